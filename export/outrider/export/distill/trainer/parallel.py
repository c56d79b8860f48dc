"""Trains in several processes of one thread each, under `torchrun`: on a shared machine faster than one with threads.

Threads wait for each other at every operation, these processes once per step. Without `torchrun` every function here is
the identity. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def rank() -> int:
    """This process's number, from 0; 0 alone writes files."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """How many processes share the work."""
    return dist.get_world_size() if dist.is_initialized() else 1


def agree(value: float) -> float:
    """The largest of all processes' values, so that all take the same decision."""
    if not dist.is_initialized():
        return value
    largest = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replaces every gradient by its mean over the processes, in one exchange."""
    if not dist.is_initialized():
        return
    gradients: list[Tensor] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = parameters_to_vector(gradients)
    dist.all_reduce(flat)
    vector_to_parameters(flat / size(), gradients)
