"""The seams behind which models run.

`BatchRuntime` is what the cloud's engine drives: ragged batches over a paged KV cache, every address explicit.
`SequenceRuntime` is what the device's agent drives: one sequence that grows and is cut back.
`Proposer` is what it falls back on: the same, but of guesses without a model behind them.
None knows about sampling, sessions or the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from outrider.models.errors import ConfigError
from outrider.models.manifest import StaticShapes
from outrider.models.sampling import SamplingParams

PROMISED_POSITIONS: Final = "outrider_max_positions"
"""Key of an exported config.json: the longest sequence that the bundle promises, whatever the model's own is."""


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's share of a step.

    tokens: the new tokens to run, at least one. Their keys and values are written to the cache.
    past: tokens of this sequence already in the cache. New token i goes to slot past + i, and has that position too,
      unless `positions` says otherwise.
    blocks: block numbers that hold positions 0, block_size, 2 * block_size, ...; must cover past + len(tokens).
    num_rows: for how many of the *last* new tokens logits are wanted (0 for a prompt chunk that is not the last).
    positions: absolute position of each new token; None means past, past + 1, ... (a tree gives siblings one position).
    mask: [n, n] uint8, 1 where new token i may attend new token j; None means causal. All of the past is attended.
    """

    tokens: Sequence[int]
    past: int
    blocks: Sequence[int]
    num_rows: int
    positions: Sequence[int] | None = None
    mask: NDArray[np.uint8] | None = None


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a loaded model can take: the size of its vocabulary (columns of the logits) and its longest sequence."""

    vocab_size: int
    max_positions: int


@runtime_checkable
class BatchRuntime(Protocol):
    """Ragged batches over a paged KV cache."""

    @property
    def limits(self) -> ModelLimits:
        """Vocabulary size and longest sequence."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens a cache block holds."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache; valid numbers are 0 .. num_blocks - 1."""
        ...

    def forward(self, batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
        """Runs one step; returns logits [sum of num_rows, vocab_size] float32, rows in the batch's order.

        Blocking, called from one thread at a time; changes only the cache slots that the slices address.
        The array may be reused by the next call: copy what must outlive it.
        """
        ...

    def close(self) -> None:
        """Releases model and cache; safe to call twice."""
        ...


@runtime_checkable
class PickingRuntime(Protocol):
    """A BatchRuntime that can pick where its logits are: on a GPU, copying rows of 152k to the host costs more."""

    def forward_picks(
        self, batch: Sequence[SequenceSlice], params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> list[int | None]:
        """As `BatchRuntime.forward`, but the token that `sampling.pick` takes of each row, None if it is not finite.

        params, positions: of each row, in the order of the rows; absolute positions.
        """
        ...


@runtime_checkable
class SequenceRuntime(Protocol):
    """One sequence that grows by `extend` and is cut back by `truncate`, which never copies the cache."""

    @property
    def limits(self) -> ModelLimits:
        """Vocabulary size and longest sequence."""
        ...

    @property
    def length(self) -> int:
        """Tokens now in the cache."""
        ...

    def extend(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends at least one token; returns the logits after the last one, [vocab_size] float32 (may be reused)."""
        ...

    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on; `length` at most the present one."""
        ...

    def close(self) -> None:
        """Releases model and cache; safe to call twice."""
        ...


@runtime_checkable
class Proposer(Protocol):
    """A draft without a model: it knows tokens, never logits, so it can only name what it expects next."""

    @property
    def length(self) -> int:
        """Tokens of the sequence so far."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the sequence."""
        ...

    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on; `length` at most the present one."""
        ...

    def propose(self, max_tokens: int) -> list[int]:
        """What may follow the sequence: at most `max_tokens` tokens, none when it has no idea. Changes no state."""
        ...


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """How a model is loaded.

    device: as the runtime names it ("CPU", "GPU", "NPU", "cuda:0"); for ONNX Runtime also an execution provider's
      name or a policy, such as "CUDAExecutionProvider" or "prefer-npu".
    num_threads: inference threads; 0 leaves it to the runtime.
    kv_cache_bytes: room for the paged cache (BatchRuntime only).
    kv_precision: "f32", "f16", "bf16" or "u8"; "auto" takes f32 on CPU and the runtime's own elsewhere. On CPU
      OpenVINO takes f32 and u8 only.
    cache_dir: where compiled models are kept; None for nowhere.
    is_batch_invariant: OpenVINO on CPU with an f32 cache, BatchRuntime: a token's logits are the same, bit for bit,
      however its sequence was cut into steps and whatever else was in them. Costs a few per cent of a step at short
      contexts, more of a long prompt. Steps with a tree mask are outside the promise.
    max_positions: cuts the longest sequence, and with it a SequenceRuntime's cache; 0 takes the model's own.
    static_shapes: what an NPU's model is compiled for; nothing else reads it.
    emulate_npu: runs the NPU's own path on the CPU, for machines without one.
    properties: for OpenVINO, compile properties, over everything above; for torch, "dtype": "f32", "bf16" or "f16".
    """

    device: str = "CPU"
    num_threads: int = 0
    kv_cache_bytes: int = 256 << 20
    kv_precision: str = "auto"
    cache_dir: str | None = None
    is_batch_invariant: bool = True
    max_positions: int = 0
    static_shapes: StaticShapes | None = None
    emulate_npu: bool = False
    properties: dict[str, str] = field(default_factory=dict)


@contextmanager
def telling_of_memory(max_positions: int) -> Iterator[None]:
    """Turns the system's refusal of memory for a cache of so many positions into a ConfigError."""
    try:
        yield
    except (MemoryError, OverflowError, OSError, RuntimeError, ValueError) as error:  # a device's are of any kind
        raise ConfigError(
            f"a cache for {max_positions:,} positions is more than this machine has memory for ({error}); export the "
            "model with a smaller max_position_embeddings in its config.json"
        ) from error
