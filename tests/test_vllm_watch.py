"""Tests what watches vLLM: a hang, a request without an end, an engine process that is dead; a device's picks at the
start, where the check is silent if all is right, and says in words where a build is wrong.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import psutil
import pytest
import torch
from tests.serving import fake_target, serve_fake
from typer.testing import CliRunner

from outrider.cloud.engine.thread import EngineThread
from outrider.cloud.seam import CommitEvent, EndEvent, GenerateRequest, SequenceUsage, Sink
from outrider.cloud.server import main as cli
from outrider.cloud.server import serve as serve_module
from outrider.cloud.vllm import known_text, self_check
from outrider.cloud.vllm.hang_watch import DEAD_AFTER, HUNG_AFTER, LOST_AFTER, HangWatch
from outrider.models.errors import RequestError, RuntimeUnavailable
from outrider.models.picks import noise_torch, row_terms
from outrider.models.processors import logprobs_torch, rows_torch
from outrider.models.processors.chooser import TokenLogprobs
from outrider.models.runtimes.base import ModelLimits


def test_silence_is_a_hang_while_sequences_are_open() -> None:
    """First no new work is taken, then the engine is given up; an idle engine is silent, a report ends the silence."""
    watch = HangWatch()
    for _ in range(2 * DEAD_AFTER):
        watch.tick({})
    assert not watch.is_hung
    for tick in range(1, DEAD_AFTER + 1):
        watch.tick({1: None})
        assert (watch.is_hung, watch.is_dead) == (tick >= HUNG_AFTER, tick >= DEAD_AFTER)
    watch.heard()
    assert not watch.is_hung and not watch.is_dead


def test_a_request_that_vllm_answers_has_to_end() -> None:
    """What it refused in its own process is not reported by the scheduler."""
    watch = HangWatch()
    for number in (1, 2):
        watch.answered(number)
    found = [watch.tick({1: None, 3: None}) for _ in range(2 * LOST_AFTER)]
    assert [late for late in found if late] == [[1]] and found.index([1]) == LOST_AFTER - 1


CHILD = """
import os, sys
from outrider.cloud.vllm.parent import PLACE_VARIABLE, end_with_parent

def run(pipe):
    end_with_parent()
    end_with_parent()
    pipe.send(os.getpid())
    pipe.recv()

if __name__ == "__main__":
    import multiprocessing
    os.environ[PLACE_VARIABLE] = sys.argv[1]
    end_with_parent()  # nobody's child
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=run, args=(theirs,)).start()
    print(ours.recv(), flush=True)
    sys.stdin.read()
"""


def test_the_engine_process_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    """And takes the directory of the sockets with it."""
    place, script = tmp_path / "place", tmp_path / "child.py"
    place.mkdir()
    script.write_text(CHILD)
    command = [sys.executable, str(script), str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        child = psutil.Process(int(server.stdout.readline()))
        assert place.exists()
        server.kill()
    psutil.wait_procs([child], timeout=20.0)
    assert not child.is_running() and not place.exists()


def test_a_server_whose_engine_is_dead_is_neither_live_nor_ready() -> None:
    """So that a supervisor that asks sees it, too, until the process has ended."""
    with serve_fake() as server:
        assert httpx.get(f"{server.url}/health/live").json() == {"status": "live"}
        server.core.is_dead = server.core.is_draining = True
        for path in ("/health/live", "/livez", "/health/ready"):
            answer = httpx.get(server.url + path)
            assert (answer.status_code, answer.json()["status"]) == (503, "failed"), path
        server.core.is_draining = False
        server.server.fail("vLLM has died")
        server.wait_until(lambda: server.server.should_exit)


def test_a_server_whose_engine_has_died_ends_with_a_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says why; a server that is ended by a signal returns 0."""
    monkeypatch.setattr(EngineThread, "on_death", lambda engine, act: act("vLLM's engine process has died"))
    command = ["serve", str(tmp_path), "--port", "0", "--port-file", str(tmp_path / "port")]
    with fake_target() as target:
        monkeypatch.setattr(serve_module, "open_target", lambda options: target)
        found = CliRunner().invoke(cli.app, command)
    assert found.exit_code == serve_module.ENGINE_FAILED == 70
    assert "vLLM's engine process has died; its log is above." in found.output + capsys.readouterr().err


# -- the check at the start ------------------------------------------------------------------------------------------
CPU = torch.device("cpu")


@pytest.mark.parametrize("vocab_size", [300, 5000, 50_257])
def test_this_machine_picks_as_numpy_does(vocab_size: int) -> None:
    """For vocabularies of any size, also those that are smaller than the rows."""
    assert self_check.row_faults(CPU, vocab_size) == []


def reversed_bits(spread: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A mask whose bytes are read from their other end."""
    order = torch.tensor([int(f"{byte:08b}"[::-1], 2) for byte in range(256)])
    return lambda masks, *more: spread(order[masks.long()].to(torch.uint8), *more)


def shifted(summaries: Callable[..., Any]) -> Callable[..., Any]:
    """Sums of probabilities that are 1 % too large."""

    def wrong(*args: Any) -> Any:
        norms, *more = summaries(*args)
        return (norms + 0.01, *more)

    return wrong


@pytest.mark.parametrize(
    ("module", "name", "wrong", "told"),
    [
        (noise_torch, "_TOKEN_FACTOR", lambda right: right + 2, "noise: token "),
        (noise_torch, "_FACTORS", lambda right: (right[0], right[1] + 2), "noise: token "),
        (row_terms, "_COIN", lambda right: right + right.dtype.type(2), "XTC"),
        (rows_torch, "_spread", reversed_bits, "a grammar's mask: "),
        (logprobs_torch, "_summaries", shifted, "noise: other logprobs"),
    ],
)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, wrong: Callable[[Any], Any], told: str
) -> None:
    """A constant of the hash, the coin's, a mask's bits, a sum: each is named by the rule that it breaks."""
    monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    faults = self_check.row_faults(CPU, 1000)
    assert any(fault.startswith(told) for fault in faults) and all(": " in fault for fault in faults), faults


def company(change: Callable[[GenerateRequest, int], float]) -> known_text.Submit:
    """An engine of greedy texts. change: what is added to the second likeliest logit, by request and token."""

    def submit(request: GenerateRequest, sink: Sink) -> None:
        tokens = tuple(sum(request.prompt) % 100 + place for place in range(request.max_tokens))
        rows = tuple(
            TokenLogprobs(token, -0.5, ((token, -0.5), (200, -1.5 + change(request, place)), (201, -3.0)))
            for place, token in enumerate(tokens)
        )
        sink(CommitEvent(0, tokens, 0, 0, logprobs=rows))
        sink(EndEvent("length", SequenceUsage()))

    return submit


def test_bitwise_is_tried_before_it_is_promised() -> None:
    """The last bit of one logit, in one step that verifies drafts, is enough to refuse; a sum's rounding is not."""
    limits = ModelLimits(300, 1000)
    known_text.check_same_text(company(lambda request, place: 0.0), limits)
    known_text.check_same_text(company(lambda request, place: 1e-12 * len(request.hints.draft)), limits)
    bit = 2.0**-23  # of a float32 from 1 to 2
    wrong = company(lambda request, place: bit * (len(request.hints.draft) == 8 and place == 3))
    with pytest.raises(
        RuntimeUnavailable, match="token 3 of a text has other logits in a step that verifies 8 drafted"
    ):
        known_text.check_same_text(wrong, limits)
    known_text.check_same_text(wrong, ModelLimits(300, 56))


def answers(*texts: tuple[int, ...], error: RequestError | None = None) -> known_text.Submit:
    """An engine that commits these texts, one after the other."""
    left = list(texts)

    def submit(request: GenerateRequest, sink: Sink) -> None:
        sink(CommitEvent(0, left.pop(0), 0, 0))
        sink(EndEvent("length" if error is None else "error", SequenceUsage(), error))

    return submit


def test_a_known_text_is_the_one_that_noise_picks() -> None:
    """At temperature 100 logits that differ by 200 change nothing of it; another text is refused, as is none."""
    limits, text = ModelLimits(300, 1000), known_text.TEXT
    another = r"a known text: tokens \[.*\], expected \[.*does not start"
    for wrong, message in (
        (answers((*text[1:], 11), text[:4]), another),
        (answers(text, text[:5]), another),
        (answers(text, error=RequestError("model_fault", "broken")), "a known text failed in vLLM: broken"),
    ):
        with pytest.raises(RuntimeUnavailable, match=message):
            known_text.check_known_text(wrong, limits)
    for fine, of in (
        (answers(text, text[:4]), limits),
        (answers(), ModelLimits(14, 1000)),
        (answers(), ModelLimits(300, 16)),
    ):
        known_text.check_known_text(fine, of)
