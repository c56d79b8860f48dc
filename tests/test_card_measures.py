"""What the report card shows is measured as drafting goes: acceptance, ranks, leads, times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.export.check import timing
from outrider.export.check.acceptance import NEW_TOKENS, Continuation, Rounds, measure_ranks, play_rounds, summarize
from outrider.export.check.parity import SequenceSteps
from outrider.export.check.runner import measure_agreement, open_draft
from outrider.export.recipes import ExportOptions
from outrider.export.report.card import (
    leads,
)
from outrider.models.errors import ExportError
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.runtimes.base import ModelLimits, SequenceSlice


def test_rounds_are_counted_only_where_they_could_run_in_full() -> None:
    """Up to the first rejected token, past the target's own; a round that the text's end cuts short is left out."""
    matches = np.array([1, 1, 0, 0, 1, 1, 1, 1, 0, 1], dtype=np.bool_)
    assert play_rounds(matches, 4) == Rounds(tested=8, accepted=6, rounds=3)
    assert play_rounds(matches, 2) == Rounds(tested=7, accepted=5, rounds=4)
    assert play_rounds(matches[:3], 4) == Rounds()


def test_rounds_of_independent_tokens_are_as_long_as_theory_says() -> None:
    """Mean tokens a pass against (1 - a^(k+1)) / (1 - a), and the rate of tested tokens against a."""
    generator = np.random.default_rng(7)
    texts = [generator.random(40) < 0.7 for _ in range(4000)]
    for depth in (1, 2, 4, 8):
        counts = sum((play_rounds(text, depth) for text in texts), Rounds())
        assert counts.accepted / counts.tested == pytest.approx(0.7, abs=0.01)
        assert (counts.accepted + counts.rounds) / counts.rounds == pytest.approx(
            (1 - 0.7 ** (depth + 1)) / 0.3, rel=0.01
        )


class OneHot:
    """A SequenceRuntime that is sure of one token at every position: `answers[position]`, [V] one-hot logits."""

    def __init__(self, answers: Sequence[int], *, max_positions: int = 512) -> None:
        self.limits = ModelLimits(16, max_positions)
        self.length = 0
        self.fed: list[int] = []
        self._answers = answers

    def extend(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits after the last token."""
        self.length += len(tokens)
        self.fed.append(len(tokens))
        logits = np.zeros(16, np.float32)
        logits[self._answers[self.length]] = 99.0
        return logits

    def truncate(self, length: int) -> None:
        """Cuts back."""
        self.length = length

    def close(self) -> None:
        """Nothing to release."""


def continuation(prompt: tuple[int, ...], text: tuple[int, ...], temperature: float = 0.0) -> Continuation:
    """What a target wrote."""
    return Continuation(prompt, text, SamplingParams(temperature=temperature, seed=1))


def test_acceptance_is_of_single_steps_along_the_targets_text() -> None:
    """The prompt in one piece, then a token at a time, as drafting goes; matches at three of four positions."""
    draft = OneHot([0, 0, 5, 6, 9, 8])
    (measured,) = summarize(measure_ranks(draft, [continuation((1, 2), (5, 6, 7, 8))], num_ids=16), "t")
    assert draft.fed == [2, 1, 1, 1]
    assert (measured.rate, measured.tested_tokens, measured.target) == (0.75, 4, "t")
    assert [(row.depth, row.rate) for row in measured.by_depth] == [(1, 0.6667), (2, 1.0), (4, 0.6667)]
    assert [row.tokens_per_pass for row in measured.by_depth] == [1.667, 3.0, 3.0]


class Graded(OneHot):
    """As `OneHot`, but sure by `leads[position]` over token 9, and that over token 3 by 1."""

    def __init__(self, answers: Sequence[int], leads: Sequence[float]) -> None:
        super().__init__(answers)
        self._leads = leads

    def extend(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits after the last token."""
        logits = super().extend(tokens)
        logits[9], logits[3] = 99.0 - self._leads[self.length], 98.0 - self._leads[self.length]
        return logits


def test_ranks_and_leads_are_counted_in_the_same_reading() -> None:
    """Among the best 1, 2, 4 and 8; by the lead of the best over the second, where there are tokens."""
    draft = Graded([0, 0, 5, 5, 5, 5], [0, 0, 0.1, 0.2, 3.0, 9.0])
    (measured,) = summarize(measure_ranks(draft, [continuation((1, 2), (5, 9, 3, 5))], num_ids=16), "t")
    assert draft.fed == [2, 1, 1, 1] and measured.rate == 0.5
    assert [(row.width, row.rate) for row in measured.by_width] == [(1, 0.5), (2, 0.75), (4, 1.0), (8, 1.0)]
    rows = [(row.from_gap, row.share, row.rates) for row in measured.by_gap]
    assert rows == [(0.0, 0.5, (0.5, 0.5)), (2.0, 0.25, (0.0, 0.0)), (4.0, 0.25, (1.0, 0.0))]
    assert leads(measured) == ("0 to 2", "2 to 4", "over 4")


def test_the_error_is_that_of_texts_which_differ() -> None:
    """Two texts, one always and one never accepted: a third is unknown."""
    draft = OneHot([0, 5, 5, 5])
    texts = [continuation((1,), (5, 5)), continuation((1,), (6, 6))]
    (measured,) = summarize(measure_ranks(draft, texts, num_ids=16), "t")
    assert measured.rate == 0.5 and measured.error == pytest.approx(np.sqrt(2 * 1.0**2) / 4, abs=1e-4)


def test_padding_columns_are_no_tokens() -> None:
    """A padded vocabulary's columns beyond the tokenizer's ids are never picked."""
    (measured,) = summarize(measure_ranks(OneHot([0, 15]), [continuation((1,), (0,))], num_ids=8), "t")
    assert measured.rate == 1.0  # all real columns are equal, and ties go to the lowest id


def test_texts_that_a_short_draft_cannot_hold_are_left_out() -> None:
    """An NPU's draft may be compiled for short sequences; if nothing fits, an error says so."""
    texts = [continuation((1,), (5,)), continuation((1, 1, 1), (5, 5))]
    (measured,) = summarize(measure_ranks(OneHot([5] * 9, max_positions=3), texts, num_ids=16), "t")
    assert measured.tested_tokens == 1
    with pytest.raises(ExportError, match=f"no prompt fits 1 positions with {NEW_TOKENS} new tokens"):
        summarize(measure_ranks(OneHot([5] * 9, max_positions=1), texts, num_ids=16), "t")


def test_an_export_in_full_precision_agrees_with_its_source(
    tiny_model: Callable[[str], Path], tiny_ir: Callable[..., Path]
) -> None:
    """Every argmax and no divergence; INT8 has some; another model's logits have much."""
    from outrider.export.source.torch_source import load_source_model, source_logits

    model = load_source_model(tiny_model("qwen2"))
    texts = [(3, 1, 4, 1, 5, 9, 2, 6), (2, 7, 1, 8)]
    truth = [source_logits(model, text) for text in texts]
    found = {}
    for int8 in (False, True):
        with closing(open_draft(tiny_ir("qwen2", int8=int8) / "openvino_model.xml", ExportOptions("draft"))) as draft:
            found[int8] = measure_agreement(SequenceSteps(draft), texts, truth, num_ids=96)
            stranger = measure_agreement(SequenceSteps(draft), texts, truth[::-1][:1] + truth[1:], num_ids=96)
    assert (found[False].argmax, found[False].rows) == (1.0, 12) and found[False].mean_kl < 1e-6
    assert 1e-6 < found[True].mean_kl < 0.1 < stranger.mean_kl


class ClockedTarget:
    """A BatchRuntime whose steps of n tokens take 5 + 0.7 n ms on a clock of its own."""

    block_size, num_blocks, limits = 32, 8, ModelLimits(16, 256)

    def __init__(self) -> None:
        self.now_s = 0.0
        self.steps: list[SequenceSlice] = []

    def forward(self, batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
        """Takes its time."""
        (piece,) = batch
        assert len(piece.blocks) * self.block_size >= piece.past + len(piece.tokens)
        self.steps.append(piece)
        self.now_s += (5.0 + 0.7 * len(piece.tokens)) / 1e3
        return np.zeros((piece.num_rows, 16), np.float32)

    def close(self) -> None:
        """Nothing to release."""


def test_a_targets_times_are_its_step_and_what_a_token_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that knows the answer; every step begins where the prompt ends."""
    target = ClockedTarget()
    monkeypatch.setattr(time, "perf_counter", lambda: target.now_s)
    times = timing.time_target(target, [1] * 100)
    assert times.token_ms == pytest.approx(5.7) and times.extra_ms == pytest.approx(0.7)
    assert times.extend_tokens == 9 and times.extend_ms == pytest.approx(11.3)
    assert {(piece.past, len(piece.tokens)) for piece in target.steps} == {
        (0, 100),
        *((100, n) for n in (1, 2, 3, 5, 9)),
    }


class ClockedDraft(OneHot):
    """A SequenceRuntime whose steps of n tokens take 1 + 0.1 n ms on a clock of its own."""

    def __init__(self) -> None:
        super().__init__([0] * 512)
        self.now_s = 0.0

    def extend(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Takes its time."""
        self.now_s += (1.0 + 0.1 * len(tokens)) / 1e3
        return super().extend(tokens)


def test_a_drafts_times_are_of_one_token_and_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the stated context, which is what is left in the cache."""
    draft = ClockedDraft()
    monkeypatch.setattr(time, "perf_counter", lambda: draft.now_s)
    times = timing.time_draft(draft, [1] * 128)
    assert times.token_ms == pytest.approx(1.1) and times.extend_ms == pytest.approx(1.8)
    assert times.extend_tokens == 8 and draft.length == 128


def test_a_slow_model_is_timed_fewer_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of seconds is not repeated as often as one of milliseconds."""
    draft = ClockedDraft()
    monkeypatch.setattr(time, "perf_counter", lambda: 2000.0 * draft.now_s)
    timing.time_draft(draft, [1] * 8)
    assert len(draft.fed) == 1 + 2 * (3 + 5)


def test_the_machine_is_its_processor_not_its_name() -> None:
    """Nothing in a manifest tells whose machine it was."""
    import platform

    words = timing.machine(3)
    assert words.endswith(", 3 threads") and platform.node() not in words
    assert timing.machine(1).endswith(", 1 thread")


def test_timing_prompts_fit_short_models() -> None:
    """Room for the steps is left where a model's longest sequence is short."""
    assert len(timing.timing_prompt((1, 2, 3), 4096)) == timing.CONTEXT
    assert timing.timing_prompt((1, 2, 3), 24) == (1, 2, 3, 1, 2, 3)


def test_picks_of_the_judge_are_those_of_the_sampler() -> None:
    """The draft is judged by the picks that it makes when it drafts: same seed, same position."""
    params = SamplingParams(temperature=0.8, seed=1)
    flat = OneHot([0] * 9)
    flat.extend = lambda tokens: _flat(flat, tokens)  # type: ignore[method-assign]
    wanted = tuple(pick(np.zeros(16, np.float32), params, position) for position in (2, 3, 4))
    (measured,) = summarize(measure_ranks(flat, [Continuation((1, 2), wanted, params)], num_ids=16), "t")
    assert measured.rate == 1.0 and len(set(wanted)) > 1


def _flat(runtime: OneHot, tokens: Sequence[int]) -> NDArray[np.float32]:
    runtime.length += len(tokens)
    return np.zeros(16, np.float32)
