"""Has vLLM's workers compile grammars, where masks are made; the server's process holds none, nor the library."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, Final

from outrider.cloud.vllm.terms import Mark, grammar_terms
from outrider.models.errors import RequestError, RuntimeUnavailable, TokenizerError
from outrider.models.faults import log_fault
from outrider.models.grammar.compiler import CompiledGrammar
from outrider.models.grammar.matchers import Built, Elsewhere
from outrider.models.grammar.spec import GrammarSpec

FIRST_LOOK_S: Final = 0.005
LAST_LOOK_S: Final = 0.1
"""Between looks whether the workers are done, twice as long each time: a look interrupts vLLM's steps."""
SEND_AGAIN_S: Final = 1.0
BUILD_S: Final = 60.0
"""After which a grammar is given up: vLLM hangs."""

Call = Callable[[str, tuple[Any, ...]], Awaitable[list[Any]]]
"""Calls a method of the extension in all workers."""


class GrammarsInWorkers:
    """Gives each grammar a number, and lets it go in the workers once nothing here stands for it. Any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Call, fault: Callable[[], str | None]) -> None:
        """loop: the engine's, on which `call` runs. fault: why the engine cannot work now; None when it can."""
        self._loop = loop
        self._call = call
        self._fault = fault
        self._numbers = itertools.count(1)
        self._gone: deque[int] = deque()
        self._task: asyncio.Task[None] | None = None
        self._gate = threading.Lock()  # between a build's beginning and the end of all
        self._works: set[Future[Any]] = set()
        self._has_ended = False

    def build(self, spec: GrammarSpec, stop_ids: tuple[int, ...]) -> Built:
        """Blocks until the workers are done; not for the loop's thread.

        Raises TokenizerError where the tokenizer cannot be held to any grammar, RuntimeUnavailable where the workers
        lack the library, RequestError `engine_failed` or `internal_error`.
        """
        number = next(self._numbers)
        with self._gate:
            if self._has_ended or self._fault() is not None:
                raise _engine_failed()
            work = asyncio.run_coroutine_threadsafe(self._compiled(number, grammar_terms(spec, stop_ids)), self._loop)
            self._works.add(work)
        try:
            taken_s, fault, kind = work.result(BUILD_S)
        except (CancelledError, Exception) as error:
            work.cancel()
            self._let_go(number)
            if self._has_ended or self._fault() is not None or isinstance(error, CancelledError | TimeoutError):
                raise _engine_failed() from None
            log_fault(error)
            raise RequestError(
                "internal_error", "the server failed on this grammar; its log has the details", status=500
            ) from None
        finally:
            self._works.discard(work)
        if not fault:
            place = Elsewhere(number, taken_s)
            weakref.finalize(place, self._let_go, number).atexit = False
            return Built(place, "", taken_s)
        self._let_go(number)
        if kind == "tokenizer":
            raise TokenizerError(fault)
        if kind == "unavailable":
            raise RuntimeUnavailable(fault)
        return Built(None, fault, taken_s)

    def end(self) -> None:
        """Ends all builds with an error, those that come later too. The engine has died, or closes."""
        with self._gate:
            self._has_ended = True
            works = tuple(self._works)
        for work in works:
            work.cancel()

    async def _compiled(self, number: int, terms: list[Any]) -> tuple[float, str, str]:
        """Seconds of the processor, what is wrong, and of what kind it is."""
        wait_s = FIRST_LOOK_S
        answers = await self._call("outrider_compile", (number, terms))
        while None in answers:
            await asyncio.sleep(wait_s)
            wait_s = min(2.0 * wait_s, LAST_LOOK_S)
            answers = await self._call("outrider_compile", (number, None))
        _, fault, kind = next((each for each in answers if each[1]), answers[0])
        return max(each[0] for each in answers), fault, kind

    def _let_go(self, number: int) -> None:
        self._gone.append(number)
        with suppress(RuntimeError):  # the loop is closed: the workers have ended
            self._loop.call_soon_threadsafe(self._forget)

    def _forget(self) -> None:
        if self._gone and (self._task is None or self._task.done()):
            self._task = self._loop.create_task(self._send())

    async def _send(self) -> None:
        while self._gone:
            numbers = [self._gone.popleft() for _ in range(len(self._gone))]
            try:
                await self._call("outrider_forget", (numbers,))
            except Exception as error:
                self._gone.extendleft(numbers)
                if self._fault() is None:
                    log_fault(error)
                    self._loop.call_later(SEND_AGAIN_S, self._forget)
                return


def note_refusal(grammar: CompiledGrammar | None, mark: Mark) -> None:
    """Counts a text that ended by its grammar's cost as our own engine does."""
    if grammar is not None and mark == "slow":
        grammar.excess()
    if grammar is not None and mark == "worn":
        grammar.matchers.is_worn_out = True  # the next request has it compiled


def _engine_failed() -> RequestError:
    return RequestError("engine_failed", "the server's engine has failed; use another server", status=503)
