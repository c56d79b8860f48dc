"""The NPU's path as tests run it: emulated on the CPU, beside transformers' logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tests.conftest import TINY_VOCAB

from outrider.models.bundle.manifest import StaticShapes
from outrider.models.runtimes.base import RuntimeOptions
from outrider.models.runtimes.openvino_npu import OpenVinoNpuRuntime
from outrider.models.runtimes.torch_loading import load_causal_lm

# Weights and cache in f16: at most 0.004 on logits of +-4; a stale or shifted slot is off by 0.5 or more.
TOLERANCE = 0.01
SHAPES = StaticShapes(prompt_len=64, response_len=64, step_len=8)
OPTIONS = RuntimeOptions(device="NPU", num_threads=1, static_shapes=SHAPES, emulate_npu=True)
RNG = np.random.default_rng(7)
FIRST = RNG.integers(0, TINY_VOCAB, 120).tolist()
SECOND = RNG.integers(0, TINY_VOCAB, 120).tolist()

Truth = Callable[[list[int]], NDArray[np.float32]]


def truth_of(path: Path, attention: str = "sdpa") -> Truth:
    model = load_causal_lm(path, torch.float32, attention)

    def logits(tokens: list[int]) -> NDArray[np.float32]:
        with torch.inference_mode():
            found: NDArray[np.float32] = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
        return found

    return logits


def replace_shapes(**lengths: int) -> StaticShapes:
    return SHAPES.model_copy(update=lengths)


def assert_close(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    assert found.dtype == np.float32 and found.shape == expected.shape
    assert np.abs(found - expected).max() < TOLERANCE


def walked(
    runtime: OpenVinoNpuRuntime, model: torch.nn.Module, tokens: list[int]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Rows of a prompt, of cached steps and after a rollback, and the model's for the same tokens."""
    other = [*tokens[:50], *tokens[:10]]
    with torch.inference_mode():
        truth = model(torch.tensor([tokens, other]), use_cache=False).logits.numpy()
    found = [runtime.extend_rows(tokens[:40]), runtime.extend_rows(tokens[40:])]
    runtime.truncate(50)
    found.append(runtime.extend_rows(other[50:]))
    runtime.close()
    return np.concatenate(found), np.concatenate([truth[0], truth[1, 50:]])
