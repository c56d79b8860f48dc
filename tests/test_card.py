"""The report card shows what was measured, and a draft that is accepted too rarely is refused."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tests.export_cli import run_export
from tests.tiny_models import make_tiny_model, make_tiny_tokenizer

from outrider.export.cli.display import print_report
from outrider.export.make.pair import Judging, PairOptions, PairPaths, encode_judging, export_pair
from outrider.export.make.pipeline import export_model
from outrider.export.recipes import ExportOptions
from outrider.export.report.card import (
    TargetTimes,
    ends_of,
    forecast_for,
    has_trees,
    judged,
    require_acceptance,
    tokens_per_pass,
    verdict,
    warnings_of,
)
from outrider.export.report.card_html import card_html
from outrider.export.report.simulation.ranks import Picked, Ranks
from outrider.export.source.model_source import read_source
from outrider.export.source.prompts import BUILT_IN_PROMPTS, MAX_PROMPTS
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.manifest import Acceptance, AtDepth, Manifest
from outrider.models.bundle.speed_up import Setting, stream
from outrider.models.errors import ConfigError, ExportError, TokenizerError
from outrider.models.process.machine_load import MachineLoad

OPTIONS = PairOptions(
    ExportOptions("draft", "fp32", "onnxruntime", num_threads=1),
    ExportOptions("target", "fp32", "torch", num_threads=1),
)


@pytest.fixture(scope="module")
def draft(reference_pair: PairPaths) -> Manifest:
    """The reference draft's."""
    return Bundle.open(reference_pair.draft).manifest


def acceptance(rate: float, *, temperature: float = 0.8) -> Acceptance:
    """The figures of independent tokens, each accepted with chance `rate`."""
    by_depth = tuple(
        AtDepth(depth=depth, rate=rate, tokens_per_pass=sum(rate**i for i in range(depth + 1)))
        for depth in (1, 2, 4, 8)
    )
    return Acceptance(target="a target", temperature=temperature, tested_tokens=640, rate=rate, by_depth=by_depth)


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
    scaled = TargetTimes.resolve(measured, 2 * measured.token_ms, None)
    assert scaled.extra_ms == pytest.approx(2 * measured.extra_ms) and "as given" in scaled.words
    assert TargetTimes.resolve(measured, None, None).step_ms == measured.token_ms
    assert TargetTimes.resolve(None, 20.0, 0.5) == TargetTimes(20.0, 0.5, "as given")
    with pytest.raises(ExportError, match="--step-ms"):
        TargetTimes.resolve(None, None, 1.0)


def test_a_forecast_is_the_prediction_from_the_measured_rounds() -> None:
    """Independent tokens give their own rate back; the curve is that of `prediction`."""
    times = TargetTimes(40.0, 1.2, "as given")
    found = forecast_for((acceptance(0.7),), 1.5, times)
    assert found is not None and found.alpha == pytest.approx(0.7, abs=1e-3)
    assert at(50.0, found).stream == pytest.approx(stream(Setting(0.7, 1.5, 40.0, 1.2, 50.0)).speed_up, rel=1e-3)
    assert forecast_for((acceptance(0.7, temperature=0.0),), 1.5, times) is None


def test_a_forecast_from_ranks_has_trees() -> None:
    """At each round trip at least the path's speed-up, equal for equal ranks; a second guess that hits is worth it."""
    generator = np.random.default_rng(5)
    texts = [[Picked(int(rank), (0.4,) * 7) for rank in generator.choice(3, 40, p=(0.6, 0.3, 0.1))] for _ in range(3)]
    ranks, times = Ranks(tuple(map(tuple, texts))), TargetTimes(40.0, 1.2, "as given")
    found: Any = forecast_for((acceptance(0.6),), 1.5, times, ranks)
    assert has_trees(found) and found == forecast_for((acceptance(0.6),), 1.5, times, ranks)
    assert all(point.stream <= point.line <= point.tree for point in found.curve)
    assert at(50.0, found).line > 1.1 * at(50.0, found).stream


def test_a_report_of_an_earlier_version_is_shown_as_it_was(draft: Manifest) -> None:
    """Without ranks, leads and trees: it opens, and neither view has room for them."""
    document = json.loads(draft.to_json())
    for found in document["report"]["acceptance"]:
        del found["by_width"], found["by_gap"]
    for point in document["report"]["timing"]["forecast"]["curve"]:
        del point["line"], point["tree"]
    old = Manifest.model_validate_json(json.dumps(document))
    page = card_html([old])
    assert "streamed" in page and not any(words in page for words in ("alternatives", "best 8", "lead"))
    assert not has_trees(old.report.timing.forecast)  # type: ignore[union-attr, arg-type]


def test_the_reference_pairs_card_is_whole(draft: Manifest) -> None:
    """Real acceptance near what its model card says, agreement, times, and a prediction; nothing to warn of."""
    report = draft.report
    assert [found.temperature for found in report.acceptance] == [0.0, 0.5, 0.8]
    for found in report.acceptance:
        assert 0.6 < found.rate < 0.99 and found.tested_tokens > 600
        lengths = [row.tokens_per_pass for row in found.by_depth]
        assert [row.depth for row in found.by_depth] == [1, 2, 4, 8] and lengths == sorted(lengths)
        assert found.rate == found.by_width[0].rate < found.by_width[1].rate < found.by_width[3].rate
        assert sum(row.share for row in found.by_gap) == pytest.approx(1.0, abs=1e-3)
        assert found.by_gap[0].rates[0] < found.rate < found.by_gap[-1].rates[0]
    assert report.agreement is not None and report.agreement.argmax > 0.95 and report.agreement.mean_kl < 0.01
    timing = report.timing
    assert timing is not None and timing.is_on_device and timing.forecast is not None
    assert timing.forecast.draft_ms == timing.token_ms and timing.forecast.curve[0].stream > 1.0
    assert has_trees(timing.forecast) and "alternatives" in card_html([draft])
    assert tokens_per_pass(report.acceptance) > 2.0 and warnings_of(timed(draft, load_warning=None)) == ()


def test_what_was_measured_is_no_part_of_a_bundles_identity(draft: Manifest) -> None:
    """Another run has other times, another processor other last digits, other prompts a note, and all the same digest;
    another file not.
    """
    noisier = draft.report.parity.model_copy(update={"own_delta": 1e-7})
    again = reported(timed(draft, token_ms=99.0), parity=noisier, acceptance=(), notes=("no",))
    assert again != draft and again.digest == draft.digest
    assert draft.model_copy(update={"files": draft.files[1:]}).digest != draft.digest
    assert reported(draft, versions={"openvino": "1"}).digest != draft.digest


def reported(manifest: Manifest, **changes: Any) -> Manifest:
    """The same export with another report."""
    return manifest.model_copy(update={"report": manifest.report.model_copy(update=changes)})


def timed(manifest: Manifest, **changes: Any) -> Manifest:
    """The same export with other times."""
    assert manifest.report.timing is not None
    return reported(manifest, timing=manifest.report.timing.model_copy(update=changes))


def at(rtt_ms: float, forecast: Any) -> Any:
    """The forecast at a round trip."""
    return next(point for point in forecast.curve if point.rtt_ms == rtt_ms)


def predicted(manifest: Manifest, rate: float, step_ms: float) -> Manifest:
    """The same draft, accepted at this rate by a target of this step, on an idle machine."""
    forecast = forecast_for((acceptance(rate),), 1.5, TargetTimes(step_ms, 1.0, "as given"))
    return timed(manifest, forecast=forecast, load_warning=None, is_on_device=True)


def judged_at(manifest: Manifest, rate: float) -> Manifest:
    """The same draft with another acceptance."""
    return reported(manifest, acceptance=(acceptance(rate),))


def test_a_reader_is_warned(draft: Manifest) -> None:
    """Of low acceptance, of times that are not those of the device, and of a machine that was busy."""
    manifest = timed(draft, load_warning=None)
    good = judged_at(manifest, 0.61)
    assert warnings_of(good) == ()
    (warning,) = warnings_of(judged_at(manifest, 0.59))
    assert "0.59" in warning and "distil" in warning
    (warning,) = warnings_of(timed(good, is_on_device=False, provider="emulated"))
    assert "timed on emulated" in warning
    (warning,) = warnings_of(timed(good, load_warning="This machine was busy."))
    assert warning == "draft: when it was exported, its machine was busy."
    colder = tuple(acceptance(rate, temperature=at) for rate, at in ((0.29, 0.0), (0.3, 0.5), (0.61, 0.8)))
    (warning,) = warnings_of(reported(manifest, acceptance=colder))
    assert warning == "acceptance is under 0.3 elsewhere: 0.29 at temperature 0"


def test_a_busy_machine_is_noticed_while_times_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, strangers: PairPaths
) -> None:
    """The bundle says so; its identity is the same."""
    warning = "This machine was busy: other processes used 62 % of its processors."
    idle = export_model(strangers.target, tmp_path / "idle", OPTIONS.target)
    monkeypatch.setattr(MachineLoad, "warning", lambda load: warning)
    busy = export_model(strangers.target, tmp_path / "busy", OPTIONS.target)
    assert busy.manifest.report.timing is not None and busy.manifest.report.timing.load_warning == warning
    said = f"target: when it was exported, its {warning.removeprefix('This ')}"
    assert said in warnings_of(Bundle.open(tmp_path / "busy").manifest)
    assert busy.manifest.digest == idle.manifest.digest


def test_the_verdict_says_up_to_which_round_trip_drafting_pays(draft: Manifest, reference_pair: PairPaths) -> None:
    """Of the figures of the prediction, each case in plain words."""
    pays = predicted(draft, 0.65, 15.0)
    forecast: Any = pays.report.timing and pays.report.timing.forecast
    assert 20.0 < forecast.fades_ms < 200.0
    assert verdict(pays) == (
        f"With this target, drafting pays up to a round trip of {forecast.fades_ms:.0f} ms; "
        f"at 25 ms it gives {at(25.0, forecast).stream:.1f}x."
    )
    always = verdict(predicted(draft, 0.8, 200.0))
    assert always.startswith("With this target, drafting pays at every round trip computed; at 50 ms it gives 3.3x")
    assert always.endswith(", at 300 ms 2.0x.")
    never = verdict(predicted(draft, 0.05, 2.0))
    assert never == "With this target, drafting does not pay at any round trip: it gives 1.00x at best."
    assert "no target was at hand" in verdict(timed(draft, forecast=None))
    assert "outrider-export pair" in verdict(Bundle.open(reference_pair.target).manifest)
    assert verdict(timed(pays, is_on_device=False)).endswith("These times are not of the CPU that the draft is for.")
    assert verdict(timed(pays, load_warning="busy")).endswith("The machine was busy while times were measured.")


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_the_card_in_a_terminal(reference_pair: PairPaths, columns: int) -> None:
    """The verdict first, figures with their units, nothing cut off, in a narrow terminal too."""
    console = Console(width=columns, record=True, file=io.StringIO())
    bundle = Bundle.open(reference_pair.draft)
    print_report(console, bundle)
    text = console.export_text()
    said = " ".join(text.split())
    assert said.startswith(verdict(bundle.manifest))
    gain = ends_of(bundle.manifest.report.timing.forecast)[0].removeprefix("streamed drafts ")  # type: ignore[union-attr, arg-type]
    of_trees = ("the draft's best", "lead", "second", "alternatives", "tree", "Alternatives: the device also sends")
    for words in ("ms per token", "agreement", "depth 8", "streamed", "stop-and-wait", gain, "KL", *of_trees):
        assert words in said or columns == 60
    assert "…" not in text and max(map(len, text.splitlines())) <= columns


def test_warnings_go_where_they_are_seen(
    draft: Manifest,
    reference_pair: PairPaths,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On standard error and in the card, and in the JSON for programs."""
    mediocre = shutil.copytree(reference_pair.draft, tmp_path / "draft")
    (mediocre / "manifest.json").write_text(judged_at(timed(draft, load_warning=None), 0.5).to_json())
    monkeypatch.setenv("COLUMNS", "160")
    assert run_export(monkeypatch, "inspect", str(mediocre)) == 0
    said = capsys.readouterr()
    for words in ("parity, step after rollback", "acceptance by a target", "int8", "warning", "acceptance is 0.50"):
        assert words in said.out
    assert "warning: acceptance is 0.50" in said.err
    assert run_export(monkeypatch, "inspect", str(mediocre), "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    (warning,) = shown["warnings"]
    assert warning.startswith("acceptance is 0.50") and shown["role"] == "draft"


def test_a_strangers_manifest_commands_no_terminal(
    draft: Manifest,
    reference_pair: PairPaths,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Control characters and rich's markup in any of its free strings are shown, not obeyed."""
    evil, harmless = "\x1b]0;\x9b[red]", r"\x1b]0;\u009b[red]"
    free = ("name", "runtime", "target", "machine", "provider", "step_from", "load_warning", "notes")

    def spoiled(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {key: spoiled(item, key) for key, item in value.items()}
        if isinstance(value, list):
            return [spoiled(item, name) for item in value]
        return f"{name}{evil}" if name in free else value

    bundle = shutil.copytree(reference_pair.draft, tmp_path / "draft")
    document = json.loads(timed(reported(draft, notes=("a note",)), load_warning="busy").to_json())
    (bundle / "manifest.json").write_text(json.dumps(spoiled(document)), encoding="utf-8")
    monkeypatch.setenv("COLUMNS", "300")
    assert run_export(monkeypatch, "inspect", str(bundle)) == 0
    said = capsys.readouterr()
    assert not {"\x1b", "\x9b"} & {*said.out, *said.err}
    for name in free:
        assert f"{name}{harmless}" in said.out, name


def test_a_user_s_prompts_are_all_used_and_go_through_the_chat_template_where_asked(tmp_path: Path) -> None:
    """A longer list makes a surer figure; without any, the built-in ones. The template is the target's."""
    make_tiny_tokenizer(tmp_path)
    make_tiny_model("llama", tmp_path, vocab_size=320)
    source, prompts = read_source(tmp_path), [f"prompt {index}" for index in range(40)]
    assert [source.tokenizer.decode(ids) for ids in encode_judging(source, prompts, is_chat=False)] == prompts
    assert len(encode_judging(source, None, is_chat=False)) == len(set(BUILT_IN_PROMPTS)) == MAX_PROMPTS
    for given, is_chat, kind, message in (
        (["Hi"], True, TokenizerError, "chat template"),
        (None, True, ConfigError, "give your own with --prompts"),
        (["Hi", ""], False, ExportError, "1 of 2 prompts are empty, the first is number 2"),
    ):
        with pytest.raises(kind, match=message):
            encode_judging(source, given, is_chat=is_chat)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    source = read_source(tmp_path)
    (ids,) = encode_judging(source, ["Hi"], is_chat=True)
    assert source.tokenizer.decode(ids) == "<user>Hi"


def test_a_pair_that_does_not_agree_is_not_written(strangers: PairPaths, tmp_path: Path) -> None:
    """Unless forced; then the warning is in the report. So is the number of prompts that no sequence holds."""
    out = tmp_path / "out"
    with pytest.raises(ExportError, match=r"expected at least 0\.3"):
        export_pair(strangers.draft, strangers.target, out, options=OPTIONS)
    assert not out.exists()
    judging = Judging([*BUILT_IN_PROMPTS, "def " * 600], step_ms=20.0, is_forced=True)
    draft, _ = export_pair(strangers.draft, strangers.target, out, options=OPTIONS, judging=judging)
    found = judged(draft.manifest.report.acceptance)
    assert found is not None and found.rate < 0.3
    left_out, rarely = warnings_of(Bundle.open(out / "draft").manifest)[:2]
    assert left_out.startswith("acceptance is without 1 of the 17 prompts") and "little" in rarely
    assert json.loads((out / "draft" / "manifest.json").read_text())["report"]["timing"]["forecast"]["step_ms"] == 20.0
