"""Connects vLLM's engine process to the server: drafts come, reports go. Changes what vLLM does there beside steps."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq
from vllm.v1.engine import core

from outrider.cloud.vllm import engine_messages as wire
from outrider.cloud.vllm.book import Book
from outrider.cloud.vllm.draft_inbox import SHORT_BYTES, DraftInbox
from outrider.cloud.vllm.options import VllmConfig
from outrider.cloud.vllm.parent import PLACE_VARIABLE
from outrider.models.faults import log_fault

_log = logging.getLogger("outrider.cloud")


def read_order(book: Book, message: bytes) -> None:
    """Has the book merge the drafts of a message."""
    try:
        order = wire.decode_order(message)
        if isinstance(order, wire.PathsOrder):
            book.take_paths(order.number, order.base, order.paths, order.arrived)
        else:
            book.take_tree(order.number, order.message, order.arrived)
    except Exception as error:  # as in `ServerLink.receive`
        log_fault(error)


class ServerLink:
    """The sockets to the server, and the engine's configuration, which it has written."""

    def __init__(self) -> None:
        place = Path(os.environ[PLACE_VARIABLE])
        self.config: VllmConfig = msgspec.json.decode((place / wire.SETTINGS_NAME).read_bytes(), type=VllmConfig)
        self._context = zmq.Context()
        self._orders = wire.open_socket(self._context, zmq.PULL, wire.MAX_ORDERS)
        self._orders.bind(wire.orders_address(place))
        self._reports = wire.open_socket(self._context, zmq.PUSH)
        self._reports.connect(wire.reports_address(place))

    def receive(self, inbox: DraftInbox, most: int, wait_s: float) -> bool:
        """Moves drafts that have arrived to the inbox, up to so many bytes, or one; waits up to `wait_s` for the first.

        Whether there may be more.
        """
        if wait_s > 0.0 and not self._orders.poll(max(1, int(wait_s * 1e3))):
            return False
        while most > 0:
            try:
                message = self._orders.recv(zmq.NOBLOCK)
            except zmq.Again:
                return False
            most -= max(len(message), SHORT_BYTES)
            try:
                inbox.put(wire.number_of(message), message)
            except Exception as error:  # only a bug of ours; no message may end the engine, and a draft may be lost
                log_fault(error)
        return True

    def report(self, report: wire.Report) -> None:
        """Sends a report."""
        self._reports.send(wire.encode(report))

    def close(self) -> None:
        """Closes the sockets."""
        self._context.destroy(linger=0)


def silence_dumps() -> None:
    """Replaces vLLM's dump of a step that raised: it holds drafts and parameters, so guesses of clients' texts."""
    core.dump_engine_exception = _log_failed_step


def ask_for_no_drafts() -> None:
    """Spares each step a message to the worker and back: vLLM asks for its proposer's drafts there, and has none."""
    core.EngineCore.post_step = _after_step


def _after_step(engine: Any, model_executed: bool) -> None:
    """Nothing: the scheduler sets the drafts at the start of a step."""


_ask_for_drafts: Final = core.EngineCore.post_step


def ask_for_drafts_of_heads() -> None:
    """The same for steps after which the target's own heads draft nothing."""
    core.EngineCore.post_step = _after_step_with_heads


def _after_step_with_heads(engine: Any, model_executed: bool) -> None:
    if engine.scheduler.wants_drafts:
        _ask_for_drafts(engine, model_executed)


def _log_failed_step(config: Any, scheduler_output: Any, scheduler_stats: Any) -> None:
    counts = scheduler_output.num_scheduled_tokens
    _log.error("a step failed: %d requests, %d tokens", len(counts), sum(counts.values()))
