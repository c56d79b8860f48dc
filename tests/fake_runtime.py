"""Fakes both runtime interfaces with a made-up language: for tests of engines and agents, yours included. numpy only.

The logits at a position are a hash of every token attended there and of its position, read from the cache's slots. So a
wrong block table, a missed rollback or a stale block gives other text, and a slot that was never written, or that two
sequences touch in one step, is an AssertionError. Equal contexts give equal logits, bit for bit, whatever else is in
the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.models.errors import ConfigError
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.runtimes.base import ModelLimits, OneSequence, SequenceRuntime, SequenceSlice
from outrider.models.runtimes.ragged import RaggedStep, begins, lay_out

# Logits are exponential variates times this: the likeliest token leads the next by SHARPNESS on average.
SHARPNESS: Final = 2.5
_GOLDEN: Final = 0x9E3779B97F4A7C15


def _mix64(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64, on a copy."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _packed(tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """What a slot stores for a token at a position: [T] uint64, never 0."""
    return (tokens.astype(np.uint64) << np.uint64(32)) + positions.astype(np.uint64) + np.uint64(1)


def _values(packed: NDArray[np.uint64], indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """What slots add to a context when they are read as its entries `indices`, which should be their positions.

    Real keys hold their position, so real models do not notice swapped blocks; this one does.
    """
    return _mix64(packed + indices.astype(np.uint64) * np.uint64(_GOLDEN))


def _logits(contexts: NDArray[np.uint64], vocab_size: int) -> NDArray[np.float32]:
    """[R, vocab_size] float32 from the R sums of attended slots."""
    keys = _mix64(contexts)[:, None]
    h = np.arange(vocab_size, dtype=np.uint32) * np.uint32(0x9E3779B1) + keys.astype(np.uint32)
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= (keys >> np.uint64(32)).astype(np.uint32)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    uniform = h.astype(np.float32)
    uniform += 0.5
    uniform *= 2.0**-32
    return np.log(uniform, out=uniform) * np.float32(-SHARPNESS)


def plain_text(
    prompt: Sequence[int],
    count: int,
    params: SamplingParams,
    *,
    vocab_size: int,
    stop_ids: Collection[int] = (),
) -> list[int]:
    """Target-only text by the plainest loop: one sequence, one token per step, no engine."""
    target, tokens = FakeSequenceRuntime(vocab_size=vocab_size), list(prompt)
    for _ in range(count):
        row = target.extend(tokens[target.length :])
        tokens.append(pick(row, params, len(tokens)))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


class FakeBatchRuntime:
    """`BatchRuntime` of the made-up language. Its masks are right, its blocks can be read and written."""

    why_no_trees: str | None = None
    why_no_blocks: str | None = None

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        max_positions: int = 4096,
        block_size: int = 16,
        num_blocks: int = 256,
        seed: int = 0,
        fail_on_token: int | None = None,
        on_step: Callable[[Sequence[SequenceSlice]], None] | None = None,
    ) -> None:
        """Each `seed` is another language.

        fail_on_token: a slice that ends in this token gets NaN logits.
        on_step: called with the batch at the start of each forward, in its thread: may wait, take time, record, or
          raise.
        """
        self.limits, self.block_size, self.num_blocks = ModelLimits(vocab_size, max_positions), block_size, num_blocks
        self.block_layout, self.block_bytes = (f"uint64[{block_size}]",), 8 * block_size
        self.seed, self._seed = seed, np.uint64(seed)
        self._fail_on_token, self._on_step = fail_on_token, on_step
        self._slots = np.zeros(num_blocks * block_size, np.uint64)  # 0: never written
        self._written_in = np.zeros(num_blocks * block_size, np.int64)  # the last step that wrote here
        self.num_steps = 0

    def forward(self, batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
        """Runs one step; returns logits [sum of num_rows, vocab_size] float32. AssertionError on a bad address."""
        if self._on_step is not None:
            self._on_step(batch)
        self.num_steps += 1
        step = lay_out(
            batch,
            vocab_size=self.limits.vocab_size,
            max_positions=self.limits.max_positions,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
        )
        num_new = np.diff(step.subsequence_begins)
        new = step.slots(self.block_size, step.past_lens, num_new)
        assert np.unique(new).size == new.size, "one slot is written twice in one step"
        self._slots[new] = _packed(step.input_ids, step.position_ids)
        self._written_in[new] = self.num_steps
        past = step.slots(self.block_size, np.zeros_like(step.past_lens), step.past_lens)
        assert (self._written_in[past] != self.num_steps).all(), "a sequence's past is overwritten in the same step"
        assert self._slots[past].all(), "a slot is attended that was never written"
        past_begins = begins(step.past_lens)
        indices = np.arange(past.size) - np.repeat(past_begins[:-1], step.past_lens)
        past_sums = np.diff(_running(_values(self._slots[past], indices))[past_begins])
        new_values = _values(self._slots[new], step.position_ids)
        contexts = self._attended_new(step, new_values, num_new) + np.repeat(past_sums, num_new) + self._seed
        logits = _logits(contexts[step.logit_rows], self.limits.vocab_size)
        if self._fail_on_token is not None:
            failed = [np.full(item.num_rows, item.tokens[-1] == self._fail_on_token) for item in batch]
            logits[np.concatenate(failed)] = np.nan
        return logits

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies slots to slots. AssertionError for a source that was never written."""
        assert self._slots[list(sources)].all(), "a slot is moved that was never written"
        self._slots[list(targets)] = self._slots[list(sources)]

    def read_blocks(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """The bytes of these blocks. AssertionError for a slot that was never written."""
        slots = self._slots.reshape(-1, self.block_size)[list(blocks)]
        assert slots.all(), "a slot is read that was never written"
        return slots.view(np.uint8)

    def write_blocks(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Writes what `read_blocks` gave."""
        self._slots.reshape(-1, self.block_size)[list(blocks)] = np.ascontiguousarray(data).view(np.uint64)

    @staticmethod
    def _attended_new(step: RaggedStep, values: NDArray[np.uint64], num_new: NDArray[np.integer]) -> NDArray[np.uint64]:
        """For each new token, the sum over the new tokens of its sequence that it attends: [T] uint64."""
        starts = step.subsequence_begins
        if not step.mask.size:
            running = _running(values)
            return running[1:] - np.repeat(running[starts[:-1]], num_new)
        sums = np.zeros_like(values)
        for b, n in enumerate(num_new):
            own = slice(starts[b], starts[b + 1])
            mask = step.mask[step.mask_begins[b] : step.mask_begins[b + 1]].reshape(n, n)
            sums[own] = mask.astype(np.uint64) @ values[own]
        return sums

    def close(self) -> None:
        """Nothing to release."""


def _running(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Sums of the first 0, 1, 2, ... values, wrapping."""
    return np.concatenate([np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)])


class FakeSequenceRuntime(OneSequence):
    """`SequenceRuntime` of the same language that agrees with the target as often as asked: a draft.

    A `BranchingRuntime` too.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        max_positions: int = 4096,
        seed: int = 0,
        agreement: float = 1.0,
        on_step: Callable[[Sequence[int]], None] | None = None,
        on_branches: Callable[[Sequence[Sequence[int]]], None] | None = None,
        max_branches: int = 8,
    ) -> None:
        """Logits of the FakeBatchRuntime with this `seed`; in a share 1 - `agreement` of contexts, unrelated ones.

        on_step, on_branches: called with the tokens at the start of each `extend`, and with the branches at the start
        of each `extend_branches`. Raises ConfigError when `agreement` is not in [0, 1].
        """
        if not 0.0 <= agreement <= 1.0:
            raise ConfigError(f"agreement is {agreement}; expected 0 to 1")
        super().__init__(ModelLimits(vocab_size, max_positions))
        self._seed, self._agreement, self.max_branches = np.uint64(seed), agreement, max_branches
        self._on_step, self._on_branches = on_step, on_branches
        self._sums = np.zeros(max_positions + 1, np.uint64)  # of the first 0, 1, 2, ... tokens
        self.is_closed = False
        self.opened: list[FakeSequenceRuntime] = []

    def open_sequence(self) -> FakeSequenceRuntime:
        """Another sequence of the same language and agreement; `opened` has all of them."""
        another = FakeSequenceRuntime(
            vocab_size=self.limits.vocab_size,
            max_positions=self.limits.max_positions,
            seed=int(self._seed),
            agreement=self._agreement,
            on_step=self._on_step,
            on_branches=self._on_branches,
            max_branches=self.max_branches,
        )
        self.opened.append(another)
        return another

    def extend(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends at least one token; returns the logits after the last one, [vocab_size] float32."""
        if self._on_step is not None:
            self._on_step(tokens)
        self._check_new(tokens)
        end = self._length + len(tokens)
        self._sums[self._length + 1 : end + 1] = self._sums_with(tokens)
        self._length = end
        row: NDArray[np.float32] = self._rows(self._sums[end : end + 1])[0]
        return row

    def extend_branches(self, branches: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Logits after each branch of the sequence, which stays as it is: [B, vocab_size] float32."""
        return self.extend_branches_of([(self, branches)])

    def extend_branches_of(
        self, groups: Sequence[tuple[SequenceRuntime, Sequence[Sequence[int]]]]
    ) -> NDArray[np.float32]:
        """As `extend_branches` for each of these sequences, one group after the other."""
        if self._on_branches is not None:
            self._on_branches([branch for _, branches in groups for branch in branches])
        num_branches, rows = sum(len(branches) for _, branches in groups), []
        assert 0 < num_branches <= self.max_branches, f"{num_branches} branches"
        for sequence, branches in groups:
            assert isinstance(sequence, FakeSequenceRuntime)
            for branch in branches:
                sequence._check_new(branch)
            rows.append(sequence._rows(np.concatenate([sequence._sums_with(branch)[-1:] for branch in branches])))
        return np.concatenate(rows)

    def _sums_with(self, tokens: Sequence[int]) -> NDArray[np.uint64]:
        """The sums after each of `tokens`, which follow the sequence."""
        positions = np.arange(self._length, self._length + len(tokens))
        values = _values(_packed(np.array(tokens, np.int64), positions), positions)
        sums: NDArray[np.uint64] = self._sums[self._length] + np.cumsum(values, dtype=np.uint64)
        return sums

    def _rows(self, sums: NDArray[np.uint64]) -> NDArray[np.float32]:
        contexts = sums + self._seed
        # An independent hash of the context decides whether this draft knows the answer here.
        dissent = _mix64(contexts ^ np.uint64(_GOLDEN))
        is_known = dissent.astype(np.float64) * 2.0**-64 < self._agreement
        return _logits(np.where(is_known, contexts, dissent), self.limits.vocab_size)

    def close(self) -> None:
        """Nothing to release; `is_closed` is for tests."""
        self.is_closed = True
