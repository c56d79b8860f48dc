"""Copies between host and device that nothing waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from numpy.typing import NDArray

_ALIGNMENT: Final = 16


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors there, by one copy that does not wait. On the CPU they share the arrays' memory."""
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cpu":
        return tensors
    packed = _packed(tensors, pin_memory=device.type == "cuda")
    return _parts(packed.to(device, non_blocking=True), tensors)


def _packed(tensors: Sequence[torch.Tensor], *, pin_memory: bool) -> torch.Tensor:
    """One behind the other, uint8."""
    size = sum(-(-each.nbytes // _ALIGNMENT) * _ALIGNMENT for each in tensors)
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=pin_memory)
    for part, tensor in zip(_parts(packed, tensors), tensors, strict=True):
        part.copy_(tensor)
    return packed


def _parts(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What was packed, with the types and shapes of `like`."""
    found, start = [], 0
    for each in like:
        found.append(packed[start : start + each.nbytes].view(each.dtype).view(each.shape))
        start += -(-each.nbytes // _ALIGNMENT) * _ALIGNMENT
    return found


class HostCopy:
    """A tensor on its way to the host. Nothing waits for it before `tolist`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()
        else:
            self._copy = tensor.cpu()

    def tolist(self) -> Any:
        """Its values."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy.tolist()
