"""Exports: checked bundles or clear refusals, the same bytes every time, and nothing left behind when interrupted."""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from tests.export_cli import run_export
from tests.tiny_models import SAMPLE_TEXT, copy_source, make_tiny_model, make_tiny_tokenizer, make_unlike_pair

from outrider.export.convert import openvino_ir
from outrider.export.make import build
from outrider.export.make import reference_pair as cache
from outrider.export.make.pair import Judging, PairOptions, PairPaths, export_pair
from outrider.export.make.pipeline import export_model
from outrider.export.make.reference_pair import export_reference_pair
from outrider.export.progress import StageEvent
from outrider.export.recipes import ExportOptions
from outrider.export.source.model_source import read_source
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.bundle_writer import BundleWriter
from outrider.models.bundle.manifest import Device, Precision
from outrider.models.cache_folder import default_cache_dir
from outrider.models.errors import BundleError, ExportError, TokenizerMismatch
from outrider.models.runtimes import open_batch_runtime, open_sequence_runtime
from outrider.models.runtimes.base import TORCH_DTYPES, RuntimeOptions, SequenceSlice
from outrider.models.runtimes.torch_paged import TorchPagedRuntime


def no_stage(event: StageEvent) -> None:
    """For what is refused before any work."""
    pytest.fail(f"{event} has begun")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    return make_unlike_pair(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def pair(sources: PairPaths, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Bundle]:
    """The INT8 draft and the FP32 target, exported once."""
    return export_pair(
        sources.draft,
        sources.target,
        tmp_path_factory.mktemp("pair") / "bundles",
        options=PairOptions(ExportOptions("draft", num_threads=1), ExportOptions("target", "fp32", num_threads=1)),
        judging=Judging(["def f(x):\n", "The target's output"], is_forced=True),  # two random models do not agree
    )


def test_a_pair_is_exported_checked_and_measured(pair: tuple[Bundle, Bundle]) -> None:
    """Both verify, say what they are, and run; padding may differ, the tokenizer may not. The report holds parity,
    tight in FP32 and not in INT8, and the acceptance of greedy text and of two temperatures.
    """
    draft, target = (Bundle.open(bundle.path) for bundle in pair)
    facts = [
        (m.role, m.precision, m.quantization is None, m.widened, m.architecture.vocab_size, m.report.parity.runtime)
        for m in (draft.manifest, target.manifest)
    ]
    assert facts == [
        ("draft", "int8", False, None, 384, "OpenVinoSequenceRuntime"),
        ("target", "fp32", True, None, 320, "OpenVinoPagedRuntime"),
    ]
    assert draft.manifest.tokenizer_fingerprint == target.manifest.tokenizer_fingerprint
    assert draft.tokenizer().size == draft.manifest.architecture.tokenizer_size <= 320
    options = RuntimeOptions(num_threads=1, kv_cache_bytes=1 << 20)
    with closing(open_sequence_runtime(draft.manifest.runtime, draft.model_file, options)) as sequence:
        assert sequence.extend([1, 2, 3]).shape == (384,)
    with closing(open_batch_runtime(target.manifest.runtime, target.model_file, options)) as batch:
        assert batch.limits.vocab_size == 320
    ours, theirs = draft.manifest.report, target.manifest.report
    assert all(stage.max_delta < 1e-4 * stage.scale for stage in theirs.parity.stages)
    assert any(stage.max_delta > 1e-3 * stage.scale for stage in ours.parity.stages)
    assert [measured.temperature for measured in ours.acceptance] == [0.0, 0.5, 0.8] and not theirs.acceptance
    assert all(measured.tested_tokens >= 8 for measured in ours.acceptance)


def test_the_same_input_gives_the_same_bundle(pair: tuple[Bundle, Bundle], sources: PairPaths, tmp_path: Path) -> None:
    """Whatever the process did before and wherever the source lies: only what was measured differs."""
    copied = shutil.copytree(sources.draft, tmp_path / "elsewhere" / "draft")
    again = export_model(copied, tmp_path / "again", ExportOptions("draft", num_threads=1)).manifest
    assert (again.files, again.digest) == (pair[0].manifest.files, pair[0].manifest.digest)


def test_a_widened_target_says_so(sources: PairPaths, tmp_path: Path) -> None:
    """Its source is the original; its size is the one that was asked for."""
    bundle = export_model(sources.target, tmp_path / "wide", ExportOptions("target", "fp32", widen_mb=2.0))
    source, widened = read_source(sources.target), bundle.manifest.widened
    assert widened is not None and widened.from_intermediate_size == 128
    assert widened.from_parameters == source.architecture.parameters
    assert widened.fp32_megabytes == pytest.approx(2.0, rel=0.05)
    assert bundle.manifest.report.size_bytes == pytest.approx(2e6, rel=0.15)
    assert bundle.manifest.source == source.describe() and not (bundle.path / "work").exists()


def test_different_tokenizers_are_refused_where_that_is_asked_for(sources: PairPaths, tmp_path: Path) -> None:
    """Before any work: both names and the first difference are in the message, and nothing is written."""
    other = copy_source(sources.target, tmp_path / "stranger")
    make_tiny_tokenizer(other, text=SAMPLE_TEXT[:2])
    judging = Judging(same_tokenizer=True)
    with pytest.raises(TokenizerMismatch, match=r"(?s)draft \(.*stranger \(.*first difference: vocabulary entry"):
        export_pair(sources.draft, other, tmp_path / "out", judging=judging, progress=no_stage)
    assert not (tmp_path / "out").exists()


def test_an_export_that_fails_its_check_replaces_nothing(
    pair: tuple[Bundle, Bundle], sources: PairPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A converter that is silently wrong: the old bundle stays, byte for byte, and nothing is left beside it."""
    place = shutil.copytree(pair[1].path, tmp_path / "target")

    def convert_wrongly(model: Any, directory: Path, name: str) -> None:
        model.model.layers[0].self_attn.q_proj.weight.data.mul_(-1)
        convert(model, directory, name)

    convert = openvino_ir.convert_to_ir
    monkeypatch.setattr(build, "convert_to_ir", convert_wrongly)
    with pytest.raises(ExportError, match="parity check failed, prefill"):
        export_model(sources.target, place, ExportOptions("target", "int8", overwrite=True))
    assert Bundle.open(place).manifest == pair[1].manifest
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.fixture
def counted_exports(pair: tuple[Bundle, Bundle], monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The cache's exports, replaced by copying the finished bundles; lists where each went."""
    places: list[Path] = []

    def copy(bundle: Bundle, place: Path) -> None:
        places.append(place)
        BundleWriter(place, overwrite=True).check_destination()
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(bundle.path, place)

    def copy_draft(target: Bundle, target_source: Path, draft: Path, place: Path, *_: object) -> None:
        assert target.manifest.role == "target"
        copy(pair[0], place)

    monkeypatch.setattr(cache, "export_model", lambda model, place, *_: copy(pair[1], place))
    monkeypatch.setattr(cache, "export_draft_for", copy_draft)
    return places


def test_the_cache_exports_once_for_all_who_ask_at_once(
    sources: PairPaths, tmp_path: Path, counted_exports: list[Path]
) -> None:
    """One exports, the others wait and use the result."""
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: export_reference_pair(tmp_path, source=sources), range(4)))
    assert len(set(found)) == 1 and counted_exports == [found[0].target, found[0].draft]
    assert Bundle.open(found[0].draft).manifest.role == "draft"


def test_whoever_waits_for_another_export_is_told(
    sources: PairPaths, tmp_path: Path, counted_exports: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, while another process has the lock; with the pair in the cache nobody waits."""
    is_told, lines = threading.Event(), io.StringIO()

    def write(text: str) -> int:
        is_told.set()
        return lines.write(text)

    first = export_reference_pair(tmp_path, source=sources)
    shutil.rmtree(first.draft)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write, flush=lambda: None))
    with FileLock(first.target.parent.with_suffix(".lock")):
        waiting = threading.Thread(target=export_reference_pair, args=(tmp_path,), kwargs={"source": sources})
        waiting.start()
        assert is_told.wait(60)
        assert counted_exports == [first.target, first.draft]
    waiting.join()
    with FileLock(first.target.parent.with_suffix(".lock")):
        assert export_reference_pair(tmp_path, source=sources) == first
    assert counted_exports == [first.target, first.draft, first.draft]
    assert lines.getvalue() == "Another process is exporting the reference pair; waiting for it.\n"


def test_the_cache_knows_options_and_sources_apart_and_mends_damage(
    sources: PairPaths, tmp_path: Path, counted_exports: list[Path]
) -> None:
    """Another precision, width or weight is another directory; a damaged bundle is exported again. Drafts for another
    runtime or device share one target, and a default and its name are one.
    """
    first = export_reference_pair(tmp_path, source=sources)
    widened = export_reference_pair(tmp_path, source=sources, widen_mb=2.0)
    int8 = export_reference_pair(tmp_path, source=sources, target_precision="int8")
    changed = PairPaths(sources.draft, copy_source(sources.target, tmp_path / "other", rms_norm_eps=1e-3))
    pairs = (first, widened, int8, export_reference_pair(tmp_path, source=changed))
    assert len({pair.target for pair in pairs}) == len({pair.draft for pair in pairs}) == 4
    assert len(counted_exports) == 8
    for damaged, content in (("openvino_model.bin", b""), ("manifest.json", b"{")):
        (first.target / damaged).write_bytes(content)
        assert export_reference_pair(tmp_path, source=sources) == first
        assert counted_exports[8:] == [first.target] and Bundle.open(first.target).manifest.role == "target"
        counted_exports.pop()
    onnx = export_reference_pair(tmp_path, source=sources, draft=ExportOptions("draft", runtime="onnxruntime"))
    npu = export_reference_pair(tmp_path, source=sources, draft=ExportOptions("draft", device="npu"))
    assert first.target == onnx.target == npu.target and len({first.draft, onnx.draft, npu.draft}) == 3
    assert export_reference_pair(tmp_path, source=sources, draft=ExportOptions("draft", "int8", "openvino")) == first
    assert counted_exports[8:] == [onnx.draft, npu.draft]


def test_the_cache_forgets_pairs_that_nobody_asks_for(
    sources: PairPaths, tmp_path: Path, counted_exports: list[Path]
) -> None:
    """After some weeks, when another one is exported; one that is in use, or that is being exported, stays."""
    export = functools.partial(export_reference_pair, tmp_path, source=sources)
    unused, used, busy = (export(widen_mb=size).target.parent for size in (2.0, 3.0, 4.0))
    killed = tmp_path / "pairs" / f".{busy.name[::-1]}.partial-1"
    killed.mkdir()
    for place in (unused, used, busy, killed):
        os.utime(place, (1e9, 1e9))
    export(widen_mb=3.0)
    assert unused.is_dir() and len(counted_exports) == 6
    with FileLock(busy.with_suffix(".lock")):
        new = export().target.parent
    assert {path for path in (tmp_path / "pairs").iterdir() if path.is_dir()} == {used, busy, new}
    assert export(widen_mb=2.0).target.parent == unused and not busy.exists() and len(counted_exports) == 10


def test_a_refused_draft_leaves_its_target_in_the_cache(
    sources: PairPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two random models do not agree; the next try exports the draft alone."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    stages: list[str] = []
    for _ in range(2):
        with pytest.raises(ExportError, match=r"expected at least 0\.3"):
            export_reference_pair(source=sources, progress=lambda event: stages.append(str(event)))
    written, read = "hashing and writing the bundle", "reading and hashing the source"
    assert [stages.count(stage) for stage in (f"target: {written}", f"draft: {read}", f"draft: {written}")] == [1, 2, 0]
    (manifest,) = (tmp_path / "pairs").rglob("manifest.json")
    assert manifest.parent.name == "target" and Bundle.open(manifest.parent).manifest.precision == "fp32"


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """$OUTRIDER_CACHE before the platform's place, which on Linux is XDG_CACHE_HOME or ~/.cache."""
    places = {"OUTRIDER_CACHE": ".", "XDG_CACHE_HOME": "outrider", "HOME": ".cache/outrider"}
    for name in places:
        monkeypatch.setenv(name, str(tmp_path / name))
    for name, place in places.items():
        if name == "OUTRIDER_CACHE" or sys.platform == "linux":
            assert default_cache_dir() == tmp_path / name / place
        monkeypatch.delenv(name)
    assert "outrider" in default_cache_dir().parts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "nowhere"], "not a directory"),
        (["pair", "only-one"], "only one model was given"),
        (["pair", "reference", "--rtt-ms", "20"], "--rtt-ms and --keep are for several drafts; add --sweep"),
        (["pair", "reference", "--keep"], "--rtt-ms and --keep are for several drafts; add --sweep"),
        (["target", "nowhere", "--out", "x"], "is not a directory"),
        (["draft", "Qwen/Qwen3-0.6B", "--out", "x"], "offline mode is on"),
    ],
)
def test_a_users_mistake_ends_in_one_message(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    """On standard error, exit status 2, no traceback."""
    monkeypatch.chdir(tmp_path)
    assert run_export(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err.replace("\n", " ") and "Traceback" not in captured.err and not captured.out
    assert not any(tmp_path.iterdir())


def test_an_existing_bundle_is_not_replaced_unasked(pair: tuple[Bundle, Bundle], sources: PairPaths) -> None:
    """Reported before any work."""
    with pytest.raises(BundleError, match="--overwrite"):
        export_model(sources.draft, pair[0].path, ExportOptions("draft"), no_stage)


@pytest.mark.parametrize(("device", "precision"), [("cpu", "bf16"), ("gpu", "int8")])
def test_a_torch_target_is_cast_and_checked_in_its_precision(
    device: Device, precision: Precision, sources: PairPaths, tmp_path: Path
) -> None:
    """Safetensors with a config that says what they are now; INT8 is made of them when they are loaded."""
    options = ExportOptions("target", precision, "torch", device=device)
    bundle = export_model(sources.target, tmp_path / precision, options)
    found, is_int8 = bundle.manifest, precision == "int8"
    assert (found.format, found.runtime, found.precision) == ("safetensors", "torch", precision)
    assert (found.quantization is not None) is is_int8 and bundle.model_file == bundle.path
    loading = RuntimeOptions(kv_cache_bytes=1 << 20, properties={"dtype": TORCH_DTYPES[precision]})
    with closing(TorchPagedRuntime(bundle.path, loading)) as runtime:
        assert ("linear layers in INT8" in runtime.description) is is_int8
    assert json.loads((bundle.path / "config.json").read_text())["dtype"] == "bfloat16"
    assert max(stage.max_delta for stage in found.report.parity.stages) > 1e-3


def test_int8_leaves_a_mixtures_router(tmp_path: Path) -> None:
    """DeepSeek V2 reads its router's weights without calling it; rounded, it would choose other experts."""
    path = make_tiny_model("deepseek_v2", tmp_path / "model", vocab_size=320)
    rows = []
    for dtype in ("bf16", "i8"):
        loading = RuntimeOptions(kv_cache_bytes=1 << 20, properties={"dtype": dtype})
        with closing(TorchPagedRuntime(path, loading)) as runtime:
            rows.append(runtime.forward([SequenceSlice(list(range(40)), 0, [0, 1], 40)]).copy())
    assert 0 < np.abs(rows[0] - rows[1]).mean() < 0.05


def test_int8_that_would_change_nothing_is_refused(tmp_path: Path) -> None:
    """GPT-2's layers are not torch's."""
    make_tiny_tokenizer(tmp_path / "model")
    make_tiny_model("gpt2", tmp_path / "model", vocab_size=320)
    with pytest.raises(ExportError, match="gpt2 has no linear layers of torch's own, so INT8 changes nothing"):
        export_model(tmp_path / "model", tmp_path / "out", ExportOptions("target", "int8", "torch", device="gpu"))
