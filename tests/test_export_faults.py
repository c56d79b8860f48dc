"""Faults around an export: full disks, kills, other exports. The destination stays as it was; the next try
continues where the last one stopped.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
from tests.tiny_models import make_tiny_model, make_tiny_tokenizer

from outrider.export.check.source_logits import ParityReference, SequencePair, Truth
from outrider.export.convert.openvino_ir import finish_ir
from outrider.export.convert.safetensors_cast import cast_weights
from outrider.export.disk import require_room, telling_of_full_disks
from outrider.export.make import pipeline
from outrider.export.make.pipeline import export_model
from outrider.export.make.stage_store import StageStore
from outrider.export.progress import StageEvent
from outrider.export.recipes import ExportOptions, RuntimeName
from outrider.export.source.model_source import read_source
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.manifest import Precision
from outrider.models.errors import DiskFull, ExportError

MB = 1 << 20
needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL and no fork on Windows")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2-type model with its tokenizer, about 200 kB."""
    directory = tmp_path_factory.mktemp("source") / "tiny"
    make_tiny_tokenizer(directory)
    return make_tiny_model("qwen2", directory, vocab_size=320)


@pytest.fixture(scope="module")
def old_bundle(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The bundle that is at the destination already."""
    return export_model(source, tmp_path_factory.mktemp("old") / "bundle", ExportOptions("target", "fp32", "torch"))


class SmallDisk:
    """A disk of its own, `size` bytes. fill: another program takes all but that many bytes."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def fill(self, left: int = 0) -> None:
        free = shutil.disk_usage(self.place).free
        with (self.place / "other-program").open("ab") as file:
            file.write(bytes(max(0, free - left)))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A real file system of 8 MB in memory; where the system does not let us mount one, the test is skipped."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    if mount is None or not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("a small disk can be mounted by root on Linux only")
    done = subprocess.run([mount, "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        yield SmallDisk(place)
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def save_ir_there(source: Path, place: Path) -> None:
    """OpenVINO's own writer: what it raises says nothing of the disk."""
    finish_ir(source, place, "tiny", "int8", "cpu")


def cast_there(source: Path, place: Path, precision: str = "bf16") -> None:
    """safetensors' own writer, in Rust; of FP32 the weights are copied."""
    cast_weights([source / "model.safetensors"], place, precision)


def save_truth_there(source: Path, place: Path) -> None:
    """numpy's writer."""
    logits = np.zeros((100, 320), np.float32)
    Truth(ParityReference(SequencePair(1, (1, 2), (1, 3), logits, logits)), (), ()).save(place)


def save_onnx_there(source: Path, place: Path) -> None:
    """onnx_ir's writer of external data."""
    import onnx_ir as ir

    from outrider.export.convert.onnx_graph import add_initializer, save_model

    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20}, name="tiny")
    add_initializer(graph, "weights", np.ones((128, 256), np.float32))
    save_model(ir.Model(graph, ir_version=10), place)


@pytest.mark.parametrize(
    "write", [save_ir_there, cast_there, partial(cast_there, precision="fp32"), save_truth_there, save_onnx_there]
)
@pytest.mark.parametrize("left", [0, 16 << 10])
def test_every_writer_tells_of_a_full_disk(
    write: Callable[[Path, Path], None],
    left: int,
    small_disk: SmallDisk,
    source: Path,
    tiny_ir: Callable[..., Path],
) -> None:
    """One error for all of them, whatever the writer raises itself: where, how much is free, and what would help."""
    place, given = small_disk.place / "out", tiny_ir("qwen2") if write is save_ir_there else source
    place.mkdir()
    small_disk.fill(left)
    words = r"the disk is full.* MB for .*--out.*OUTRIDER_CACHE"
    with pytest.raises(DiskFull, match=words), telling_of_full_disks(place):
        write(given, place)
    (small_disk.place / "other-program").unlink()
    with telling_of_full_disks(place):
        write(given, place)  # and with room it works
    assert any(place.iterdir())


@pytest.mark.parametrize(
    ("precision", "stage", "holds_cache"),
    [
        *(("bf16", stage, False) for stage in ("convert", "check", "write")),
        ("int8", "quantize", False),
        # Intermediate files have their own place, and may be what does not fit.
        ("bf16", "load", True),
        ("int8", "convert", True),
    ],
)
def test_a_disk_that_fills_up_leaves_the_destination_as_it_was(
    small_disk: SmallDisk,
    source: Path,
    old_bundle: Bundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: Precision,
    stage: str,
    holds_cache: bool,
) -> None:
    """Whichever stage finds no room: the old bundle is there, whole, and nothing is beside it."""
    cache, place = tmp_path / "cache", small_disk.place / "bundle"
    if holds_cache:
        cache, place = small_disk.place / "cache", tmp_path / "out" / "bundle"
    monkeypatch.setenv("OUTRIDER_CACHE", str(cache))
    shutil.copytree(old_bundle.path, place)

    def fill(event: StageEvent) -> None:
        if event.stage == stage:
            small_disk.fill(64 << 10 if precision == "int8" else 0)

    with pytest.raises(DiskFull, match=str(cache) if holds_cache else "the disk is full"):
        export_model(source, place, options_for(precision), fill)
    assert Bundle.open(place).manifest == old_bundle.manifest
    assert {path.name for path in place.parent.iterdir()} - {"other-program"} == {"bundle"}
    assert not [name for name in results(cache) if "partial" in name] and (holds_cache or results(cache))


def options_for(precision: Precision) -> ExportOptions:
    """A target, by the torch runtime for BF16, which is quickest, else by OpenVINO."""
    runtime: RuntimeName = "torch" if precision == "bf16" else "openvino"
    return ExportOptions("target", precision, runtime, num_threads=1, overwrite=True)


def test_a_disk_that_is_too_small_is_refused_before_the_work(
    small_disk: SmallDisk, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The destination's, the cache's, or one that both are on: with what is needed and what is free."""
    stages: list[str] = []
    small_disk.fill(left=MB // 32)
    for cache, place in ((tmp_path, small_disk.place), (small_disk.place, tmp_path)):
        monkeypatch.setenv("OUTRIDER_CACHE", str(cache / "cache"))
        with pytest.raises(DiskFull, match=rf"needs about [\d.]+ MB at {small_disk.place}.*0\.0 MB are free"):
            export_model(
                source, place / "bundle", ExportOptions("draft", "int8"), lambda event: stages.append(event.stage)
            )
    assert set(stages) == {"read"}
    room = shutil.disk_usage(small_disk.place).free
    require_room((small_disk.place / "a", room), (tmp_path, 1.0))
    with pytest.raises(DiskFull, match="needs about"):
        require_room((small_disk.place / "a", 0.6 * room), (small_disk.place / "b", 0.6 * room))


def test_short_memory_is_a_warning_before_the_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one line, where the source in FP32 does not fit, or a container may not take as much; the system may have ways
    to make room.
    """
    needed, limit = 4 * read_source(source).architecture.parameters, tmp_path / "memory.max"

    monkeypatch.setattr(pipeline, "require_range", Mock(side_effect=ExportError("begun")))
    monkeypatch.setattr(pipeline, "_CONTAINER_LIMIT", limit)
    for available, most, is_warned in (
        (needed - 101, None, True),
        (needed - 100, None, False),
        (needed, "max\n", False),
        (needed, f"{needed}\n", False),
        (needed, f"{needed - 1}\n", True),
    ):
        if most is not None:
            limit.write_text(most)
        monkeypatch.setattr(psutil, "virtual_memory", lambda available=available: SimpleNamespace(available=available))
        monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=100))
        with pytest.raises(ExportError, match="begun"):
            export_model(source, tmp_path / "bundle", ExportOptions("target", "bf16", "torch"))
        said = capsys.readouterr().err
        assert said.count("\n") == is_warned and ("GB of memory in FP32, and" in said) == is_warned


def test_a_place_that_cannot_be_written_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file where a directory should be, for the bundle or for the cache. /proc says of a new file that it does not
    exist, and filelock takes that for a race that will pass: that is an error too, and no wait.
    """
    (tmp_path / "file").write_text("not a directory")
    places = {tmp_path / "file" / "bundle": "file.* cannot be written"}
    if sys.platform == "linux":
        places[Path("/proc/x")] = "/proc cannot be written: no file can be made there"
    for place, message in places.items():
        with pytest.raises(ExportError, match=f"{message}.*--out"):
            export_model(source, place, ExportOptions("target", "bf16", "torch"))
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    with pytest.raises(ExportError, match=r"file.* cannot be written.*OUTRIDER_CACHE"):
        export_model(source, tmp_path / "bundle", ExportOptions("target", "bf16", "torch"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_other_errors_are_not_taken_for_full_disks(tmp_path: Path) -> None:
    """Neither one of the source's files nor one of ours."""
    denied = PermissionError(13, "Permission denied", str(tmp_path / "source" / "model.safetensors"))
    for error in (denied, ValueError("no such operator")):
        with pytest.raises(type(error)) as found, telling_of_full_disks(tmp_path / "out"):
            raise error
        assert found.value is error


# Imports once and forks for every export, which SIGKILL then ends in the stage that is named.
EXPORTS_TO_KILL = """
import json, os, signal, sys
import openvino, torch, transformers, optimum.exporters.openvino, optimum.intel, nncf
from outrider.export.make.pipeline import export_model
from outrider.export.recipes import ExportOptions

def export(order):
    stages = []
    def progress(event):
        stages.append(event.stage)
        if event.stage == order["until"]:
            print(json.dumps({"pid": os.getpid(), "stages": stages}), flush=True)
            signal.pause()
    export_model(order["source"], order["out"], ExportOptions("draft", "int8", overwrite=True, num_threads=1), progress)
    print(json.dumps({"pid": os.getpid(), "stages": stages}), flush=True)

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        try:
            export(json.loads(line))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    print(json.dumps({"pid": pid, "ended": True}), flush=True)
"""


@needs_posix
def test_an_export_killed_in_any_stage_leaves_the_destination_and_is_taken_up_again(
    source: Path, old_bundle: Bundle, tmp_path: Path
) -> None:
    """The old bundle stays; what was loaded and converted is not loaded and converted again."""
    place, cache, errors = tmp_path / "out" / "bundle", tmp_path / "cache", tmp_path / "errors.txt"
    shutil.copytree(old_bundle.path, place)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OUTRIDER_CACHE": str(cache),
        "OMP_NUM_THREADS": "1",
    }
    with (
        errors.open("w") as heard,
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", EXPORTS_TO_KILL],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=heard, text=True,
        ) as process,
    ):  # fmt: skip
        assert process.stdin is not None and process.stdout is not None

        def export(until: str) -> list[str]:
            assert process.stdin is not None and process.stdout is not None
            order = {"source": str(source), "out": str(place), "until": until}
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            told = json.loads(process.stdout.readline() or f'{{"stages": ["failed", {errors.read_text()!r}]}}')
            if until != "never":
                os.kill(told["pid"], signal.SIGKILL)
            assert json.loads(process.stdout.readline())["ended"]
            return list(told["stages"])

        expected = {
            "read": ["read"],
            "load": ["read", "load"],
            "convert": ["read", "load", "convert"],
            "quantize": ["read", "load", "convert", "quantize"],  # the load was for `convert`: the truth was kept
            "check": ["read", "quantize", "check"],
            "write": ["read", "quantize", "check", "write"],
        }
        for until, stages in expected.items():
            assert export(until) == stages
            assert Bundle.open(place).manifest == old_bundle.manifest
            assert len(list(place.parent.glob(".bundle.partial-*"))) == 1  # and the next export removes it
        assert len(results(cache)) == 2  # the truth and the FP32 IR, which only the first three made
        assert export("never") == ["read", "quantize", "check", "write"]
        process.stdin.close()
    assert Bundle.open(place).manifest.precision == "int8" and results(cache) == []
    assert [path.name for path in place.parent.iterdir()] == ["bundle"]


def results(cache: Path) -> list[str]:
    """Stages that a cache holds, locks aside."""
    work = cache / "work"
    return sorted(path.name for path in work.iterdir() if path.is_dir()) if work.is_dir() else []


def fill(directory: Path) -> None:
    (directory / "result").write_text("made", encoding="utf-8")


def never(directory: Path) -> None:
    raise AssertionError("this was made already")


def test_a_result_that_another_export_uses_stays(tmp_path: Path) -> None:
    """Two precisions of one model at a time: who ends first does not take the other's files away."""
    first, second = StageStore(tmp_path), StageStore(tmp_path)
    place = first.get({"stage": "ir"}, fill)
    assert second.get({"stage": "ir"}, never) == place
    first.release()
    assert (place / "result").read_text() == "made"
    second.release()
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == []


USE_AND_WAIT = """
import signal, sys
from pathlib import Path
from outrider.export.make.stage_store import StageStore
store = StageStore(Path(sys.argv[1]))
store.get({"stage": "ir"}, lambda directory: (directory / "result").write_text("made"))
print("got", flush=True)
signal.pause()
"""


@needs_posix
def test_a_killed_user_of_a_result_is_forgotten(tmp_path: Path) -> None:
    """Its result serves the next export, which then removes it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", USE_AND_WAIT, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "got\n"
        process.send_signal(signal.SIGKILL)
    store = StageStore(tmp_path)
    place = store.get({"stage": "ir"}, never)
    store.release()
    assert not place.exists() and not list(tmp_path.glob("*.user-*"))


def test_a_result_is_never_half_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is stopped while removing leaves something that no export takes for a result."""
    store = StageStore(tmp_path)
    place = store.get({"stage": "ir"}, fill)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", Mock(side_effect=KeyboardInterrupt))
        store.release()
    assert not place.exists() and StageStore(tmp_path).get({"stage": "ir"}, fill) == place  # made anew
    assert [path for path in tmp_path.iterdir() if "partial" in path.name] == []
