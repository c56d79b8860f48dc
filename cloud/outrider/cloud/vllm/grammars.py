"""Has vLLM's workers compile grammars, where masks are made; the server's process holds none, nor the library."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, Final

from outrider.cloud.vllm.terms import grammar_terms
from outrider.models.errors import RequestError, TokenizerError
from outrider.models.faults import log_fault
from outrider.models.grammar.building import Built
from outrider.models.grammar.compiler import CompiledGrammar
from outrider.models.grammar.matchers import Elsewhere
from outrider.models.grammar.spec import GrammarSpec

FIRST_LOOK_S: Final = 0.002
LAST_LOOK_S: Final = 0.1
"""Between looks whether the workers are done, twice as long each time: a look interrupts vLLM's steps."""

Call = Callable[[str, tuple[Any, ...]], Awaitable[list[Any]]]
"""Calls a method of the extension in all workers."""


class GrammarsInWorkers:
    """Gives each grammar a number, and lets it go in the workers once nothing here stands for it. Any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Call) -> None:
        """loop: the engine's, on which `call` runs."""
        self._loop = loop
        self._call = call
        self._numbers = itertools.count(1)
        self._gone: deque[int] = deque()
        self._task: asyncio.Task[None] | None = None

    def build(self, spec: GrammarSpec, stop_ids: tuple[int, ...]) -> Built:
        """Blocks until the workers are done; not for the loop's thread.

        Raises TokenizerError where the tokenizer cannot be held to any grammar, RequestError `engine_failed`.
        """
        number = next(self._numbers)
        work = asyncio.run_coroutine_threadsafe(self._compiled(number, grammar_terms(spec, stop_ids)), self._loop)
        try:
            taken_s, fault, is_tokenizers = work.result()
        except (CancelledError, Exception) as error:
            self._let_go(number)
            if not isinstance(error, CancelledError):
                log_fault(error)
            raise RequestError(
                "engine_failed", "the server's engine has failed; use another server", status=503
            ) from None
        if fault:
            self._let_go(number)
            if is_tokenizers:
                raise TokenizerError(fault)
            return Built(None, fault, taken_s)
        place = Elsewhere(number, taken_s)
        weakref.finalize(place, self._let_go, number).atexit = False
        return Built(place, "", taken_s)

    async def _compiled(self, number: int, terms: list[Any]) -> tuple[float, str, bool]:
        """Seconds of the processor, what is wrong, and whether that is the tokenizer's fault."""
        wait_s = FIRST_LOOK_S
        while None in (answers := await self._call("outrider_compile", (number, terms))):
            await asyncio.sleep(wait_s)
            wait_s = min(2.0 * wait_s, LAST_LOOK_S)
        _, fault, is_tokenizers = next((each for each in answers if each[1]), answers[0])
        return max(each[0] for each in answers), fault, is_tokenizers

    def _let_go(self, number: int) -> None:
        self._gone.append(number)
        with suppress(RuntimeError):  # the loop is closed: the workers have ended
            self._loop.call_soon_threadsafe(self._forget)

    def _forget(self) -> None:
        if self._gone and (self._task is None or self._task.done()):
            self._task = self._loop.create_task(self._send())

    async def _send(self) -> None:
        with suppress(Exception):  # the engine has died, which its watcher reports
            while self._gone:
                numbers = [self._gone.popleft() for _ in range(len(self._gone))]
                await self._call("outrider_forget", (numbers,))


def note_refusal(grammar: CompiledGrammar | None, code: str, took_too_long: bool) -> None:
    """Counts a text that ended by its grammar's cost as our own engine does."""
    if grammar is None:
        return
    if took_too_long:
        grammar.excess()
    if code == "grammar_too_complex" and grammar.matchers.is_costly:
        grammar.matchers.is_worn_out = True  # perhaps; the next request has it compiled
