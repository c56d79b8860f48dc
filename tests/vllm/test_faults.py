"""What vLLM's engine process may do wrong: die, hang, drop a request, raise in a step; what it reads at once.

No vLLM is started for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import suppress
from queue import Queue
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import torch
import zmq
from tests.engine_harness import Collector
from tests.requests import flat_request
from tests.waiting import TIMEOUT_S, wait_until
from vllm.v1.engine import core

from outrider.cloud.seam import SequenceUsage
from outrider.cloud.vllm import engine as engine_module
from outrider.cloud.vllm import engine_messages as wire
from outrider.cloud.vllm import engine_process, v2
from outrider.cloud.vllm.draft_inbox import SHORT_BYTES, DraftInbox
from outrider.cloud.vllm.engine import VllmEngine
from outrider.cloud.vllm.engine_process import ServerLink
from outrider.cloud.vllm.hang_watch import DEAD_AFTER
from outrider.cloud.vllm.options import VllmConfig
from outrider.cloud.vllm.processes import VllmProcesses
from outrider.cloud.vllm.worker_choosers import WorkerGrammars
from outrider.models.errors import RequestError
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes.base import ModelLimits

REQUEST = flat_request((1, 2, 3), SamplingParams(), 8)


class NoProcesses(VllmProcesses):
    """The test in the place of vLLM's processes: its AsyncLLM answers when the test lets it."""

    async def _open(self, config: VllmConfig) -> ModelLimits:
        self._listen()
        self.llm: Any = AsyncMock(errored=False, shutdown=Mock(), answers=asyncio.Queue())
        self.llm.add_request.return_value.get = self.llm.answers.get
        return ModelLimits(100, 1000)


class Bare(VllmEngine):
    """The engine without vLLM."""

    _processes: NoProcesses

    def report(self, tokens: dict[int, int], ended: int) -> None:
        """As the engine process does: a token of each of these sequences, one of which has ended."""
        commits = [wire.Commit(number, 0, [token], 0, 0) for number, token in tokens.items()]
        end = wire.End(ended, "full", SequenceUsage(prompt_tokens=3, target_passes=1))
        with wire.open_socket(self._processes._context, zmq.PUSH) as socket:
            socket.set(zmq.LINGER, -1)
            socket.connect(wire.reports_address(self._processes.place))
            socket.send(wire.encode(wire.Report(commits, [end], wire.Gauges(block_size=16))))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bare]:
    monkeypatch.setattr(engine_module, "TICK_S", 0.001)
    monkeypatch.setattr(engine_module, "VllmProcesses", NoProcesses)
    bare = Bare(VllmConfig({}))
    yield bare
    bare.stop()
    bare.close()


def test_the_death_of_an_idle_engine_is_noticed(engine: Bare) -> None:
    """Without a request that would show it; also by who asks later."""
    told: Queue[str] = Queue()
    engine.on_death(told.put)
    engine._processes.llm.errored = True
    assert told.get(timeout=TIMEOUT_S) == engine.fault() == "vLLM's engine process has died"
    engine.on_death(told.put)
    assert told.qsize() == 1
    with pytest.raises(RequestError, match="has failed"):
        engine.submit(REQUEST, Collector())


def test_a_hang_ends_what_is_open(engine: Bare) -> None:
    """With an error, so that devices go elsewhere; drafts that nobody reads are bounded meanwhile."""
    found, died = Collector(), threading.Event()
    engine.on_death(lambda why: died.set())
    engine._watch._silent = -1_000_000  # the flood first
    number = engine.submit(REQUEST, found)
    wait_until(lambda: engine._processes.llm.add_request.called)
    for _ in range(3 * wire.MAX_ORDERS):
        with suppress(RequestError):  # the later ones: the engine has too many to read
            engine.draft(number, 0, [[5] * 8])
    engine.cancel(number)
    engine._watch._silent = DEAD_AFTER - 2
    end = found.wait()
    assert died.wait(TIMEOUT_S) and engine.fault() == "a step hangs in vLLM"
    assert end.reason == "error" and end.error is not None and not engine._sequences
    with wire.open_socket(engine._processes._context, zmq.PULL, wire.MAX_ORDERS) as reader:
        reader.bind(wire.orders_address(engine._processes.place))
        count = 0
        while reader.poll(200):
            reader.recv()
            count += 1
    assert 0 < count <= 2 * wire.MAX_ORDERS


def test_a_request_that_vllm_drops_ends(engine: Bare) -> None:
    """Its scheduler never knew of it, so no end is reported."""
    found, fine = Collector(), Collector()
    engine.submit(REQUEST, found)
    engine._processes.llm.answers.put_nowait(None)
    assert (found.wait().reason, found.code) == ("error", "internal_error")
    number = engine.submit(REQUEST, fine)
    engine.report({number: 7}, ended=number)
    assert (fine.wait().error, fine.tokens) == (None, [7])


def test_a_sink_that_raises_takes_nothing_from_others(engine: Bare) -> None:
    """A report holds the commits of all; the sequence itself is ended, in vLLM too."""

    def bad(event: Any) -> None:
        raise KeyError("a bug")

    found = Collector()
    first, second = engine.submit(REQUEST, bad), engine.submit(REQUEST, found)
    wait_until(lambda: engine._processes.llm.add_request.called)
    engine.report({first: 7, second: 8}, ended=second)
    assert found.wait().error is None and found.tokens == [8] and first not in engine._sequences.by_number


def test_a_step_that_raises_is_logged_without_texts(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's own dump has drafts and parameters in it."""
    output = SimpleNamespace(num_scheduled_tokens={"a": 3, "b": 1}, scheduled_spec_decode_tokens={"a": [424242, 7]})
    process = SimpleNamespace(vllm_config=None, scheduler=SimpleNamespace(make_stats=lambda: None))
    assert hasattr(core, "dump_engine_exception")
    engine_process.silence_dumps()
    with (
        caplog.at_level(logging.DEBUG),
        pytest.raises(MemoryError),
        core.EngineCore.log_error_detail(process, output),
    ):
        raise MemoryError
    assert "2 requests, 4 tokens" in caplog.text and "424242" not in caplog.text


def test_a_step_asks_the_workers_for_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proposer has none, and each question is a message to the worker and back."""
    monkeypatch.setattr(core.EngineCore, "post_step", core.EngineCore.post_step)  # put back at the end
    asked = Mock(return_value=None)
    workers = SimpleNamespace(take_draft_token_ids=asked)
    process = SimpleNamespace(check_for_draft_tokens=True, async_scheduling=False, model_executor=workers)
    core.EngineCore.post_step(process, True)
    assert asked.call_count == 1  # vLLM's own way: what is replaced is still there
    engine_process.ask_for_no_drafts()
    core.EngineCore.post_step(process, True)
    assert asked.call_count == 1


def test_padding_of_the_v2_runner_is_a_token() -> None:
    """vLLM pads with -1, and no row of the embeddings has that number."""
    drafts = torch.zeros((4, 3), dtype=torch.int64)
    states = SimpleNamespace(draft_tokens=drafts, req_id_to_index={"a": 1, "b": 2}, index_to_req_id={1: "a", 2: "b"})
    runner = SimpleNamespace(
        req_states=states,
        speculator=SimpleNamespace(drafts=torch.zeros((4, 3), dtype=torch.int64), propose=None),
        update_requests=lambda output: None,
        sample_tokens=lambda grammar: None,
        speculative_config=SimpleNamespace(use_eagle=lambda: False),
    )
    v2.install(runner, WorkerGrammars("", 1))
    step = {"a": [5, -1, -1], "b": [6]}
    runner.update_requests(
        SimpleNamespace(finished_req_ids=(), scheduled_new_reqs=(), scheduled_spec_decode_tokens=step)
    )
    assert drafts.tolist()[1] == [5, 0, 0] and drafts.tolist()[2][0] == 6


# -- what it takes from its socket at once -----------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "most"), [(1, 10), (1000, 1)])
def test_as_many_bytes_are_received_as_are_asked_for(num_tokens: int, most: int) -> None:
    """Or one message; so a flood of long ones takes no longer before a step than short ones do."""
    message = wire.encode(wire.PathsOrder(1, 0, [[1 << 20] * num_tokens], 0.0))
    link, inbox = object.__new__(ServerLink), DraftInbox(lambda message: None)
    link._orders = socket = Mock()
    socket.recv.side_effect = [*[message] * 15, zmq.Again]  # all are here
    assert link.receive(inbox, 10 * SHORT_BYTES, 0.0) and socket.recv.call_count == most
    assert link.receive(inbox, 1, 0.0) and socket.recv.call_count == most + 1
    assert not link.receive(inbox, 1 << 20, 0.0) and len(inbox) == 1 and socket.recv.call_count == 16
