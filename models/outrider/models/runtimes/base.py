"""Defines the interfaces of model runtimes.

`BatchRuntime`, for the cloud's engine: ragged batches over a paged KV cache, every address explicit.
`SequenceRuntime`, for the device's agent: one sequence that grows and is cut back.
`BranchingRuntime`, where a draft can run several nodes of a tree in one call.
`ShareableRuntime`, whose model holds several sequences; `JoiningRuntime`, which runs several of them in one call.
None knows about sessions or the network. `OneSequence` is what every `SequenceRuntime` here shares.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from outrider.models.bundle.manifest import StaticShapes
from outrider.models.errors import ConfigError

if TYPE_CHECKING:
    from outrider.models.processors.chooser import PickedRow
    from outrider.models.processors.text_rows import AskedRows

TORCH_DTYPES: Final = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "int8": "i8"}
"""The torch runtime's `properties["dtype"]`, by a bundle's precision."""
PROMISED_POSITIONS: Final = "outrider_max_positions"
"""Key of an exported config.json: the longest sequence that the bundle supports, whatever the model's own is."""
FIRST_POSITIONS: Final = 2048
"""Positions of a cache at first, before a sequence needs more. A model's longest sequence may need gigabytes (8.6 GB
for a Llama of 1B parameters in FP32), and few texts come near it."""

_LENGTH_KEYS: Final = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's share of a step.

    tokens: the new tokens to run, at least one. Their keys and values are written to the cache.
    past: tokens of this sequence already in the cache. New token i goes to slot past + i, and has that position too,
      unless `positions` says otherwise.
    blocks: block numbers that hold positions 0, block_size, 2 * block_size, ...; must cover past + len(tokens).
    num_rows: how many of the *last* new tokens need logits (0 for a prompt chunk that is not the last).
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
    """A loaded model's limits: the size of its vocabulary (columns of the logits) and its longest sequence."""

    vocab_size: int
    max_positions: int


@runtime_checkable
class BatchRuntime(Protocol):
    """Ragged batches over a paged KV cache."""

    @property
    def limits(self) -> ModelLimits:
        """Vocabulary size and longest sequence."""

    @property
    def block_size(self) -> int:
        """Tokens a cache block holds."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache; valid numbers are 0 .. num_blocks - 1."""

    def forward(self, batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
        """Runs one step; returns logits [sum of num_rows, vocab_size] float32, rows in the batch's order.

        Blocking, called from one thread at a time; changes only the cache slots that the slices address.
        The array may be reused by the next call: copy what must outlive it.
        """

    def close(self) -> None:
        """Releases model and cache; safe to call twice."""


Ask = Callable[[], "Sequence[AskedRows]"]
"""Tells what decides a step's rows, text by text in their order."""
Beside = Callable[[Callable[[], bool]], None]
"""Works while a device runs a step, until the function that it gets says that the device is done."""


@runtime_checkable
class PickingRuntime(Protocol):
    """A BatchRuntime that picks tokens where its logits are: copying rows of 152k from a GPU to the host costs more."""

    def forward_picks(self, batch: Sequence[SequenceSlice], ask: Ask, beside: Beside) -> list[PickedRow]:
        """As `BatchRuntime.forward`, but returns each row's token as `sampling.pick` takes it from the changed row.

        ask: called once, while the model runs where the device lets it. beside: called once all is ordered, where a
        device carries it out meanwhile; nowhere else.
        """


@runtime_checkable
class DescribedRuntime(Protocol):
    """A BatchRuntime that runs in one of several ways, and says at the start in which."""

    @property
    def description(self) -> str:
        """For a log's line."""


@runtime_checkable
class LastingFaultRuntime(Protocol):
    """A BatchRuntime on which no call may succeed again once one has failed, as with a CUDA context."""

    @property
    def faults_last(self) -> bool:
        """Whether only a new process helps."""


@runtime_checkable
class TreeRuntime(Protocol):
    """A BatchRuntime that verifies trees: slices with `positions` and `mask`, then `move` of the accepted branch."""

    @property
    def why_no_trees(self) -> str | None:
        """Why this model, loaded as it is, must get no masks, and what to do; None: it may get them."""

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies keys and values of all layers from slots to slots, as if all were read before any is written.

        A slot is block * block_size + offset. Same thread as `forward`, between two steps.
        """


@runtime_checkable
class BlockRuntime(Protocol):
    """A BatchRuntime whose cache blocks can be read and written, bit by bit, to keep them elsewhere."""

    @property
    def why_no_blocks(self) -> str | None:
        """Why this model's blocks, loaded as it is, cannot be read and written, and what to do; None: they can."""

    @property
    def block_layout(self) -> tuple[str, ...]:
        """Type and shape of each cache tensor's part of a block, in the order of their bytes."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all layers."""

    def read_blocks(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """The bytes of these blocks over all layers, a copy: [len(blocks), bytes of a block]. Same thread as `forward`,
        between two steps.
        """

    def write_blocks(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Writes what `read_blocks` of a runtime with the same `block_layout` gave. Same thread as `forward`."""


@runtime_checkable
class SequenceRuntime(Protocol):
    """One sequence that grows by `extend` and is cut back by `truncate`, which never copies the cache."""

    @property
    def limits(self) -> ModelLimits:
        """Vocabulary size and longest sequence."""

    @property
    def length(self) -> int:
        """Tokens now in the cache."""

    def extend(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends at least one token; returns the logits after the last one, [vocab_size] float32 (may be reused)."""

    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on; `length` is at most the present one."""

    def close(self) -> None:
        """Releases model and cache; safe to call twice."""


@runtime_checkable
class BranchingRuntime(Protocol):
    """A SequenceRuntime that runs several continuations of its sequence in one call."""

    @property
    def max_branches(self) -> int:
        """Branches that one call takes at most; where it is 1, it takes none: cut the sequence back and extend it."""

    def extend_branches(self, branches: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Logits after each branch, [B, vocab_size] float32 (may be reused).

        A branch is the tokens that follow the present sequence, at least one; the sequence itself stays as it is. The
        runtime keeps what it can of earlier branches: one that goes on from an earlier branch costs only its new
        tokens, and so does `extend` with tokens of an earlier branch (all but the last). A `truncate` that shortens the
        sequence forgets all branches.
        """


@runtime_checkable
class ShareableRuntime(Protocol):
    """A SequenceRuntime whose model holds several sequences, each with a cache of its own."""

    def open_sequence(self) -> SequenceRuntime:
        """Another, empty sequence of the same model; close it before this one.

        One thread at a time drives all of them. Raises ConfigError beyond `RuntimeOptions.num_sequences`.
        """


@runtime_checkable
class JoiningRuntime(Protocol):
    """A BranchingRuntime that runs branches of several of its model's sequences in one call."""

    def extend_branches_of(
        self, groups: Sequence[tuple[SequenceRuntime, Sequence[Sequence[int]]]]
    ) -> NDArray[np.float32]:
        """As `extend_branches` for each of these sequences: [sum of B, vocab_size] float32, in the groups' order.

        At most `max_branches` branches in all.
        """


BRANCH_COUNTS: Final = (1, 4, 8, 16)
"""Branches of a call: runtimes that prepare for shapes are faster on few of them."""


def padded_branches(count: int) -> int:
    """The entry of BRANCH_COUNTS that `count` branches are padded to; `count` itself beyond the last."""
    return next((size for size in BRANCH_COUNTS if size >= count), count)


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """First tokens that both have."""
    shared = 0
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            break
        shared += 1
    return shared


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """Options for loading a model.

    device: as the runtime names it ("CPU", "GPU", "GPU.1", "NPU", "cuda:0"); for ONNX Runtime also an execution
      provider's name or a policy, such as "CUDAExecutionProvider" or "prefer-npu".
    num_threads: inference threads; 0 leaves it to the runtime.
    kv_cache_bytes: size of the paged cache (BatchRuntime only).
    cache_dir: where compiled models are stored; None: not stored.
    is_batch_invariant: OpenVINO on CPU with an f32 cache, or torch on CUDA, BatchRuntime: a token's logits are the
      same, bit for bit, however its sequence is cut into steps and whatever else those steps hold. Costs a few per cent
      of a step at short contexts, more for a long prompt. On OpenVINO it does not cover steps with a tree mask. None:
      as the runtime is served by default, which is True for OpenVINO and False for torch.
    max_positions: shortens the longest sequence, and with it a SequenceRuntime's cache; 0: the model's own.
    num_sequences: sequences that a SequenceRuntime's model may hold at a time, where it can hold several.
    static_shapes: the shapes that an NPU's model is compiled for; other devices ignore it.
    emulate_npu: runs the NPU's code path on the CPU, for machines without an NPU.
    properties: for OpenVINO, compile properties, which override all of the above, such as "KV_CACHE_PRECISION": "u8";
      for torch, "dtype": "f32", "bf16" or "f16".

    Raises ConfigError for a number of threads below 0.
    """

    device: str = "CPU"
    num_threads: int = 0
    kv_cache_bytes: int = 256 << 20
    cache_dir: str | None = None
    is_batch_invariant: bool | None = None
    max_positions: int = 0
    num_sequences: int = 1
    static_shapes: StaticShapes | None = None
    emulate_npu: bool = False
    properties: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_threads < 0:
            raise ConfigError(f"num_threads is {self.num_threads}; expected 0 (the runtime's choice) or more")


class OneSequence:
    """The state of one sequence whose cache is cut back by counting: rollback is a smaller length. limits: of the model
    as it is loaded.
    """

    full_advice: ClassVar = "stop earlier"

    def __init__(self, limits: ModelLimits) -> None:
        self.limits = limits
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens now in the cache."""
        return self._length

    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on; `length` is at most the present one. Touches no tensor."""
        assert 0 <= length <= self._length, f"truncate to {length} of {self._length} tokens"
        self._length = length

    def _check_new(self, tokens: Sequence[int]) -> None:
        """Asserts at least one token, all in the vocabulary. Raises ConfigError when they do not fit."""
        assert len(tokens) and min(tokens) >= 0 and max(tokens) < self.limits.vocab_size, f"token ids {tokens}"
        if (end := self._length + len(tokens)) > self.limits.max_positions:
            raise ConfigError(
                f"{end} tokens do not fit the {self.limits.max_positions} positions of this runtime; {self.full_advice}"
            )


@dataclass(slots=True)
class OpenSequences:
    """The open sequences of one model, at most `most`."""

    most: int
    number: int = 0

    def add(self) -> None:
        """One more. Raises ConfigError where there are as many as may be."""
        if self.number >= self.most:
            raise ConfigError(f"the model holds {self.most} sequences; load it with more num_sequences")
        self.number += 1


def cache_positions(needed: int, held: int, longest: int) -> int:
    """Positions of a cache for `needed`, up to `longest`: at least twice those `held`, so that it seldom grows."""
    return min(longest, max(needed, 2 * held, FIRST_POSITIONS))


def longest_sequence(directory: Path, options: RuntimeOptions) -> int:
    """The model's longest sequence, from its config.json, cut to `options.max_positions`.

    Raises ConfigError when neither gives one, or config.json is not a JSON object.
    """
    config = directory / "config.json"
    own = 0
    if config.is_file():
        try:
            fields = json.loads(config.read_text(encoding="utf-8"))
            fields = fields.get("text_config", fields)
        except (ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{config} is no configuration of a model ({error}); export the model again") from None
        own = next((int(fields[key]) for key in _LENGTH_KEYS if fields.get(key)), 0)
    if not own and not options.max_positions:
        raise ConfigError(f"{config} does not give {_LENGTH_KEYS[0]}; set max_positions in the options")
    return min(own or options.max_positions, options.max_positions or own)


@contextmanager
def telling_of_memory(max_positions: int) -> Iterator[None]:
    """Turns a failed allocation of a cache for `max_positions` into a ConfigError."""
    try:
        yield
    except (MemoryError, OverflowError, OSError, RuntimeError, ValueError) as error:  # devices raise any of these
        raise ConfigError(
            f"a cache for {max_positions:,} positions is more than this machine's memory ({error}); export the model "
            "with a smaller max_position_embeddings in its config.json"
        ) from error
