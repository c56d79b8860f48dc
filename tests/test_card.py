"""The report card shows what was measured, and a draft that is accepted too rarely is refused."""

from __future__ import annotations

import functools
import io
import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console
from tests.export_cli import run_export
from tests.tiny_models import make_tiny_model, make_tiny_tokenizer

from outrider.export.check import timing
from outrider.export.check.acceptance import NEW_TOKENS, Continuation, Rounds, measure_ranks, play_rounds, summarize
from outrider.export.check.parity import SequenceSteps
from outrider.export.check.runner import measure_agreement, open_draft
from outrider.export.cli.display import print_report
from outrider.export.make.pair import Judging, PairOptions, PairPaths, encode_judging, export_pair
from outrider.export.make.pipeline import export_model
from outrider.export.recipes import ExportOptions
from outrider.export.report import card
from outrider.export.report.card import (
    TargetTimes,
    ends_of,
    forecast_for,
    has_trees,
    judged,
    leads,
    require_acceptance,
    tokens_per_pass,
    verdict,
    warnings_of,
)
from outrider.export.report.card_html import card_html
from outrider.export.report.card_plots import COLOURS, Item, speed_up_plot
from outrider.export.report.simulation.ranks import Picked, Ranks
from outrider.export.report.simulation.trees import Outcome
from outrider.export.source.model_source import read_source
from outrider.export.source.prompts import BUILT_IN_PROMPTS, MAX_PROMPTS
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.manifest import Acceptance, AtDepth, Manifest, Timing
from outrider.models.bundle.speed_up import Setting, stream
from outrider.models.errors import ConfigError, ExportError, TokenizerError
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.process.machine_load import MachineLoad
from outrider.models.runtimes.base import ModelLimits, SequenceSlice


def acceptance(rate: float, *, temperature: float = 0.8) -> Acceptance:
    """The figures of independent tokens, each accepted with chance `rate`."""
    by_depth = tuple(
        AtDepth(depth=depth, rate=rate, tokens_per_pass=sum(rate**i for i in range(depth + 1)))
        for depth in (1, 2, 4, 8)
    )
    return Acceptance(target="a target", temperature=temperature, tested_tokens=640, rate=rate, by_depth=by_depth)


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
    draft = OneHot([0, 15])
    (measured,) = summarize(measure_ranks(draft, [continuation((1,), (0,))], num_ids=8), "t")
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


def test_low_acceptance_is_refused_and_mediocre_acceptance_is_said() -> None:
    """Judged at temperature 0.8, whatever greedy text flatters."""
    greedy = acceptance(0.95, temperature=0.0)
    with pytest.raises(
        ExportError, match=r"a target accepts 0\.29 of the tokens of.*at least 0\.3.*outrider-export distill$"
    ):
        require_acceptance((greedy, acceptance(0.29)), "a draft")
    require_acceptance((greedy, acceptance(0.3)), "a draft")
    require_acceptance((), "a draft without a target")
    assert judged((greedy,)) is None


def test_the_targets_times_can_be_given(reference_pair: PairPaths) -> None:
    """The build machine seldom runs the target; a time that is not given scales with the one that is."""
    measured = Bundle.open(reference_pair.target).manifest.report.timing
    assert measured is not None and measured.extra_ms is not None
    assert TargetTimes.resolve(measured, None, None).step_ms == measured.token_ms
    scaled = TargetTimes.resolve(measured, 2 * measured.token_ms, None)
    assert scaled.extra_ms == pytest.approx(2 * measured.extra_ms) and "as given" in scaled.words
    assert TargetTimes.resolve(None, 20.0, 0.5) == TargetTimes(20.0, 0.5, "as given")
    with pytest.raises(ExportError, match="--step-ms"):
        TargetTimes.resolve(None, None, 1.0)
    with pytest.raises(ConfigError, match=r"step takes -1\.0 ms"):
        Judging(step_ms=-1.0)


def test_a_forecast_is_the_prediction_from_the_measured_rounds() -> None:
    """Independent tokens give their own rate back; the curve is that of `prediction`."""
    found = forecast_for((acceptance(0.7),), 1.5, TargetTimes(40.0, 1.2, "as given"))
    assert found is not None and found.alpha == pytest.approx(0.7, abs=1e-3)
    at_50 = next(point for point in found.curve if point.rtt_ms == 50.0)
    assert at_50.stream == pytest.approx(stream(Setting(0.7, 1.5, 40.0, 1.2, 50.0)).speed_up, rel=1e-3)
    assert forecast_for((acceptance(0.7, temperature=0.0),), 1.5, TargetTimes(40.0, 1.2, "as given")) is None


def test_a_forecast_from_ranks_has_trees() -> None:
    """At each round trip at least the path's speed-up, equal for equal ranks; a second guess that hits is worth it."""
    generator = np.random.default_rng(5)
    texts = [[Picked(int(rank), (0.4,) * 7) for rank in generator.choice(3, 40, p=(0.6, 0.3, 0.1))] for _ in range(3)]
    ranks, times = Ranks(tuple(map(tuple, texts))), TargetTimes(40.0, 1.2, "as given")
    found = forecast_for((acceptance(0.6),), 1.5, times, ranks)
    assert found is not None and has_trees(found) and found == forecast_for((acceptance(0.6),), 1.5, times, ranks)
    for point in found.curve:
        assert point.line is not None and point.tree is not None and point.stream <= point.line <= point.tree
    at_50 = next(point for point in found.curve if point.rtt_ms == 50.0)
    assert at_50.line is not None and at_50.line > 1.1 * at_50.stream


def test_a_forecast_plays_a_bounded_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many prompts were measured, and once per figure, so that a sweep is not slowed."""
    played: list[tuple[int, Sequence[int]]] = []

    def simulate(*_: Any, num_tokens: int, seeds: Sequence[int]) -> Outcome:
        played.append((num_tokens, seeds))
        return Outcome(2.0, *[0.0] * 7)

    monkeypatch.setattr(card, "simulate", simulate)
    ranks = Ranks((tuple(Picked(0, (1.0,) * 7) for _ in range(2000)),))
    found = forecast_for((acceptance(0.6),), 1.5, TargetTimes(40.0, 1.2, "as given"), ranks)
    assert found is not None and played == [(card.MOST_TOKENS, (0,))] * (2 * len(found.curve))


def test_a_report_of_an_earlier_version_is_shown_as_it_was(reference_pair: PairPaths) -> None:
    """Without ranks, leads and trees: it opens, and neither view has room for them."""
    document = json.loads(Bundle.open(reference_pair.draft).manifest.to_json())
    for found in document["report"]["acceptance"]:
        del found["by_width"], found["by_gap"]
    for point in document["report"]["timing"]["forecast"]["curve"]:
        del point["line"], point["tree"]
    old = Manifest.model_validate_json(json.dumps(document))
    page = card_html([old])
    assert "alternatives" not in page and "best 8" not in page and "streamed" in page and "lead" not in page
    assert not has_trees(old.report.timing.forecast)  # type: ignore[union-attr, arg-type]


def test_the_reference_pairs_card_is_whole(reference_pair: PairPaths) -> None:
    """Real acceptance near what its model card says, agreement, times, and a prediction; nothing to warn of."""
    manifest = Bundle.open(reference_pair.draft).manifest
    report = manifest.report
    assert [found.temperature for found in report.acceptance] == [0.0, 0.5, 0.8]
    assert all(0.6 < found.rate < 0.99 and found.tested_tokens > 600 for found in report.acceptance)
    for found in report.acceptance:
        lengths = [row.tokens_per_pass for row in found.by_depth]
        assert [row.depth for row in found.by_depth] == [1, 2, 4, 8] and lengths == sorted(lengths)
        assert found.rate == found.by_width[0].rate < found.by_width[1].rate < found.by_width[3].rate
        assert sum(row.share for row in found.by_gap) == pytest.approx(1.0, abs=1e-3)
        assert found.by_gap[0].rates[0] < found.rate < found.by_gap[-1].rates[0]
    assert report.agreement is not None and report.agreement.argmax > 0.95 and report.agreement.mean_kl < 0.01
    timing = report.timing
    assert timing is not None and timing.is_on_device and timing.forecast is not None
    assert timing.forecast.draft_ms == timing.token_ms and timing.forecast.curve[0].stream > 1.0
    assert has_trees(timing.forecast) and "alternatives" in card_html([manifest])
    assert tokens_per_pass(report.acceptance) > 2.0 and warnings_of(timed(manifest, load_warning=None)) == ()


def test_what_was_measured_is_no_part_of_a_bundles_identity(reference_pair: PairPaths) -> None:
    """Another run has other times, another processor other last digits, and both the same digest; another file not."""
    manifest = Bundle.open(reference_pair.draft).manifest
    assert manifest.report.timing is not None
    slower = manifest.report.timing.model_copy(update={"token_ms": 99.0})
    noisier = manifest.report.parity.model_copy(update={"own_delta": 1e-7})
    report = manifest.report.model_copy(update={"timing": slower, "parity": noisier, "acceptance": ()})
    assert manifest.model_copy(update={"report": report}).digest == manifest.digest
    assert manifest.model_copy(update={"files": manifest.files[1:]}).digest != manifest.digest
    report = manifest.report.model_copy(update={"versions": {"openvino": "1"}})
    assert manifest.model_copy(update={"report": report}).digest != manifest.digest


def timed(manifest: Manifest, **changes: Any) -> Manifest:
    """The same export with other times."""
    assert manifest.report.timing is not None
    timing = manifest.report.timing.model_copy(update=changes)
    return manifest.model_copy(update={"report": manifest.report.model_copy(update={"timing": timing})})


def predicted(manifest: Manifest, rate: float, step_ms: float) -> Manifest:
    """The same draft, accepted at this rate by a target of this step, on an idle machine."""
    forecast = forecast_for((acceptance(rate),), 1.5, TargetTimes(step_ms, 1.0, "as given"))
    return timed(manifest, forecast=forecast, load_warning=None, is_on_device=True)


def judged_at(manifest: Manifest, rate: float, timing: Timing | None = None) -> Manifest:
    """The same draft with another acceptance, and other times if given."""
    report = manifest.report.model_copy(
        update={"acceptance": (acceptance(rate),), "timing": timing or manifest.report.timing}
    )
    return manifest.model_copy(update={"report": report})


def test_a_reader_is_warned(reference_pair: PairPaths) -> None:
    """Of low acceptance, of times that are not those of the device, and of a machine that was busy."""
    manifest = timed(Bundle.open(reference_pair.draft).manifest, load_warning=None)
    assert manifest.report.timing is not None
    assert warnings_of(judged_at(manifest, 0.61)) == ()
    (warning,) = warnings_of(judged_at(manifest, 0.59))
    assert "0.59" in warning and "distil" in warning
    emulated = manifest.report.timing.model_copy(update={"is_on_device": False, "provider": "emulated"})
    (warning,) = warnings_of(judged_at(manifest, 0.61, emulated))
    assert "timed on emulated" in warning
    assert warnings_of(timed(judged_at(manifest, 0.61), load_warning="This machine was busy.")) == (
        "This machine was busy.",
    )


def test_a_busy_machine_is_noticed_while_times_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, strangers: PairPaths
) -> None:
    """The bundle says so; its identity is the same."""
    warning = "This machine was busy: other processes used 62 % of its processors."
    options = ExportOptions("target", "fp32", "torch", num_threads=1)
    idle = export_model(strangers.target, tmp_path / "idle", options)
    monkeypatch.setattr(MachineLoad, "warning", lambda load: warning)
    busy = export_model(strangers.target, tmp_path / "busy", options)
    assert busy.manifest.report.timing is not None and busy.manifest.report.timing.load_warning == warning
    assert warning in warnings_of(Bundle.open(tmp_path / "busy").manifest)
    assert busy.manifest.digest == idle.manifest.digest


def test_the_verdict_says_up_to_which_round_trip_drafting_pays(reference_pair: PairPaths) -> None:
    """Of the figures of the prediction, each case in plain words."""
    draft, target = (Bundle.open(path).manifest for path in (reference_pair.draft, reference_pair.target))
    pays = predicted(draft, 0.65, 15.0)
    assert pays.report.timing is not None
    forecast = pays.report.timing.forecast
    assert forecast is not None and forecast.fades_ms is not None and 20.0 < forecast.fades_ms < 200.0
    at_25 = next(point for point in forecast.curve if point.rtt_ms == 25.0)
    assert verdict(pays) == (
        f"With this target, drafting pays up to a round trip of {forecast.fades_ms:.0f} ms; "
        f"at 25 ms it gives {at_25.stream:.1f}x."
    )
    always = verdict(predicted(draft, 0.8, 200.0))
    assert always.startswith("With this target, drafting pays at every round trip computed; at 50 ms it gives 3.3x")
    assert always.endswith(", at 300 ms 2.0x.")
    never = verdict(predicted(draft, 0.05, 2.0))
    assert never == "With this target, drafting does not pay at any round trip: it gives 1.00x at best."
    assert "no target was at hand" in verdict(timed(draft, forecast=None)) and "outrider-export pair" in verdict(target)
    assert verdict(timed(pays, is_on_device=False)).endswith("These times are not of the CPU that the draft is for.")
    assert verdict(timed(pays, load_warning="busy")).endswith("The machine was busy while times were measured.")


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_the_card_in_a_terminal(reference_pair: PairPaths, columns: int) -> None:
    """The verdict first, figures with their units, nothing cut off, in a narrow terminal too."""
    console = Console(width=columns, record=True, file=io.StringIO())
    bundle = Bundle.open(reference_pair.draft)
    print_report(console, bundle)
    text = console.export_text()
    assert " ".join(text.split()).startswith(verdict(bundle.manifest))
    words_of_trees = (
        "the draft's best",
        "lead",
        "second",
        "alternatives",
        "tree",
        "Alternatives: the device also sends",
    )
    gain = ends_of(bundle.manifest.report.timing.forecast)[0].removeprefix("streamed drafts ")  # type: ignore[union-attr, arg-type]
    for words in ("ms per token", "agreement", "depth 8", "streamed", "stop-and-wait", gain, "KL", *words_of_trees):
        assert words in " ".join(text.split()) or columns == 60
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= columns


class Page(HTMLParser):
    """Reads a page strictly: tags must be closed in order; keeps what it names and what it says."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opens."""
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opens and closes, as SVG does."""
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        """Closes the last opened."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Text."""
        self.words.append(data)

    @property
    def text(self) -> str:
        """All that it says."""
        return " ".join(" ".join(self.words).split())


def pages_of(pair: PairPaths) -> dict[str, str]:
    """The page of a pair, of a draft alone without a target, and of a target alone."""
    draft, target = (Bundle.open(path).manifest for path in (pair.draft, pair.target))
    assert draft.report.timing is not None
    timing = draft.report.timing.model_copy(update={"forecast": None})
    alone = draft.model_copy(update={"report": draft.report.model_copy(update={"acceptance": (), "timing": timing})})
    return {"pair": card_html([draft], target), "draft": card_html([alone]), "target": card_html([], target)}


def test_the_page_needs_nothing_else(reference_pair: PairPaths) -> None:
    """Well-formed, without scripts, and without anything to fetch; all of its links stay inside it."""
    for page in map(Page, pages_of(reference_pair).values()):
        assert "script" not in page.tags and "link" not in page.tags and "img" not in page.tags
        for name, value in page.attributes:
            assert not name.startswith("on")
            if name in ("href", "src", "xlink:href") or "url(" in value:
                assert value.startswith("#") or value.startswith("url(#")
            elif not name.startswith("xmlns"):
                assert "://" not in value


def test_the_page_shows_what_was_measured(reference_pair: PairPaths) -> None:
    """Plots and tables of a pair; a draft without a target has no acceptance to show, nor what follows from it."""
    pages = {name: Page(text) for name, text in pages_of(reference_pair).items()}
    assert [pages[name].tags.count("svg") for name in ("pair", "draft", "target")] == [3, 1, 1]
    manifest = Bundle.open(reference_pair.draft).manifest
    found = judged(manifest.report.acceptance)
    assert found is not None and manifest.report.timing is not None and manifest.report.timing.forecast is not None
    even_ms = manifest.report.timing.forecast.breaks_even_ms
    for words in (f"{found.rate:.3f}", "Predicted speed-up", "stop-and-wait", f"breaks even at {even_ms:.0f} ms"):
        assert words in pages["pair"].text
        assert words not in pages["draft"].text
    assert (
        "step after rollback" in pages["draft"].text
        and "argmaxes equal to the unquantized model's" in pages["target"].text
    )


def test_the_page_begins_with_the_verdict_and_explains_its_figures(reference_pair: PairPaths) -> None:
    """In plain words, before any figure."""
    for name, path in (("pair", reference_pair.draft), ("target", reference_pair.target)):
        text = Page(pages_of(reference_pair)[name]).text
        assert 0 < text.index(verdict(Bundle.open(path).manifest)) < text.index(" MB size")
        assert "KL divergence: how far its probabilities are from that model's" in text


def test_tables_show_that_they_scroll_and_can_be_reached_by_keyboard(reference_pair: PairPaths) -> None:
    """Every table is in a named region that takes the focus; shadows and a hint show that there is more."""
    text = pages_of(reference_pair)["pair"]
    page = Page(text)
    assert page.tags.count("table") == text.count('role="region"') == text.count('tabindex="0"') == 6
    assert text.count("The table scrolls sideways") == 6 and "linear-gradient" in text
    names = [value for name, value in page.attributes if name == "aria-labelledby"]
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(set(names)) == 6 and set(names) <= set(ids)


def test_plots_are_readable_on_a_phone(reference_pair: PairPaths) -> None:
    """At 360 pixels, 320 of them for the plot, no letter is smaller than 10; the page does not shrink or stretch it."""
    for svg in re.findall(r"<svg.*?</svg>", pages_of(reference_pair)["pair"], flags=re.DOTALL):
        width = float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1])  # type: ignore[index]
        sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", svg)]
        assert sizes and min(sizes) * 320 / width >= 10.0


def test_drafts_that_branch_are_points_where_the_table_has_them(reference_pair: PairPaths) -> None:
    """A point at each round trip that was simulated, as many as the plot has room for, and no line between them."""
    draft = Bundle.open(reference_pair.draft).manifest
    assert draft.report.timing is not None and draft.report.timing.forecast is not None
    forecast = draft.report.timing.forecast.model_copy(update={"fades_ms": None})
    assert has_trees(forecast)
    for fades_ms, num_points in ((4.0, 2), (None, len(forecast.curve))):
        timing = draft.report.timing.model_copy(update={"forecast": forecast.model_copy(update={"fades_ms": fades_ms})})
        report = draft.report.model_copy(update={"timing": timing})
        svg = speed_up_plot([Item("draft", draft.model_copy(update={"report": report}))])
        for colour in COLOURS[2:4]:
            assert len(re.findall(f"<use .*fill: {colour}", svg)) == num_points + 1  # and one in the legend
            assert not re.search(f"fill: none; stroke: {colour}", svg)
        assert re.search(f"fill: none; stroke: {COLOURS[0]}", svg)  # the formula's curve is one


def test_names_are_text_on_the_page(reference_pair: PairPaths) -> None:
    """A model may have any name; it is shown as text, never as markup."""
    draft = Bundle.open(reference_pair.draft).manifest.model_copy(update={"name": "<script>alert(1)</script>"})
    page = Page(card_html([draft]))
    assert "script" not in page.tags and "<script>alert(1)</script>" in page.text


def test_the_page_warns(reference_pair: PairPaths) -> None:
    """As the terminal does."""
    page = Page(card_html([judged_at(Bundle.open(reference_pair.draft).manifest, 0.45)]))
    assert "Warning: acceptance is 0.45" in page.text


def test_inspect_makes_the_page_of_any_bundle(
    reference_pair: PairPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the given path, in addition to the printed card."""
    for path in (reference_pair.draft, reference_pair.target):
        place = tmp_path / f"{path.name}.html"
        assert run_export(monkeypatch, "inspect", str(path), "--html", str(place)) == 0
        assert f"Report card: {path.name} outrider-reference" in Page(place.read_text(encoding="utf-8")).text
    said = capsys.readouterr().out.replace("\n", "")
    assert "agreement" in said and "target.html" in said


def test_warnings_go_where_they_are_seen(
    reference_pair: PairPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On standard error and in the card, and in the JSON for programs."""
    mediocre = shutil.copytree(reference_pair.draft, tmp_path / "draft")
    manifest = judged_at(timed(Bundle.open(mediocre).manifest, load_warning=None), 0.5)
    (mediocre / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
    monkeypatch.setenv("COLUMNS", "160")
    assert run_export(monkeypatch, "inspect", str(mediocre)) == 0
    said = capsys.readouterr()
    assert "warning: acceptance is 0.50" in said.err
    assert "warning" in said.out and "acceptance is 0.50" in said.out
    assert run_export(monkeypatch, "inspect", str(mediocre), "--json") == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert warning.startswith("acceptance is 0.50")


def test_a_user_s_prompts_are_all_used_and_go_through_the_chat_template_where_asked(tmp_path: Path) -> None:
    """A longer list makes a surer figure; without any, the built-in ones. The template is the target's."""
    make_tiny_tokenizer(tmp_path)
    make_tiny_model("llama", tmp_path, vocab_size=320)
    source = read_source(tmp_path)
    plain = encode_judging(source, [f"prompt {index}" for index in range(40)], is_chat=False)
    assert [source.tokenizer.decode(ids) for ids in plain] == [f"prompt {index}" for index in range(40)]
    assert len(encode_judging(source, None, is_chat=False)) == len(set(BUILT_IN_PROMPTS)) == MAX_PROMPTS
    with pytest.raises(TokenizerError, match="chat template"):
        encode_judging(source, ["Hi"], is_chat=True)
    with pytest.raises(ConfigError, match="give your own with --prompts"):
        encode_judging(source, None, is_chat=True)
    with pytest.raises(ExportError, match="1 of 2 prompts are empty, the first is number 2"):
        encode_judging(source, ["Hi", ""], is_chat=False)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    source = read_source(tmp_path)
    (ids,) = encode_judging(source, ["Hi"], is_chat=True)
    assert source.tokenizer.decode(ids) == "<user>Hi"


def test_a_pair_that_does_not_agree_is_not_written(strangers: PairPaths, tmp_path: Path) -> None:
    """Unless forced; then the warning is in the report."""
    out = tmp_path / "out"
    export = functools.partial(
        export_pair,
        strangers.draft,
        strangers.target,
        out,
        options=PairOptions(
            ExportOptions("draft", "fp32", "onnxruntime", num_threads=1),
            ExportOptions("target", "fp32", "torch", num_threads=1),
        ),
    )
    with pytest.raises(ExportError, match=r"expected at least 0\.3"):
        export()
    assert not out.exists()
    draft, _ = export(judging=Judging(step_ms=20.0, is_forced=True))
    found = judged(draft.manifest.report.acceptance)
    assert found is not None and found.rate < 0.3
    assert "little" in warnings_of(Bundle.open(out / "draft").manifest)[0]
    assert json.loads((out / "draft" / "manifest.json").read_text())["report"]["timing"]["forecast"]["step_ms"] == 20.0


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
