"""Bounds the time that a client's grammar takes while its text is written.

llguidance's own limits bound a step by its work, not by its time: an ambiguous grammar may take 300 ms for one token
(measured: docs/log.md), with Python's lock held, so that every other text waits. Processor time of the thread is what
counts, so a busy machine ends no text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from outrider.models.errors import RequestError

FREE_S: Final = 0.002
"""Of each call of the library. A mask at 152k ids takes a quarter of it in the mean."""
FREE_REPLAY_S: Final = 0.0002
"""The same, where a text that is resumed is read again: all its tokens at once."""
MAX_EXCESS_S: Final = 0.3
"""That one text may take beyond it, in all; what is not used does not add up."""


class TookTooLong(RequestError):
    """A text's grammar has taken too much time, or has filled a lexer alone: it counts against the client."""


class GrammarCost:
    """Counts what one text's grammar takes. on_excess: called once it is too much. note: gets each time beyond what is
    free. is_timed: False ends no text.
    """

    __slots__ = ("_excess_s", "_free_s", "_is_timed", "_note", "_on_excess")

    def __init__(self, on_excess: Callable[[], None], note: Callable[[float], None], *, is_timed: bool = True) -> None:
        self._on_excess = on_excess
        self._is_timed = is_timed
        self._note = note
        self._free_s = FREE_S
        self._excess_s = 0.0

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Counts more strictly inside."""
        before, self._free_s = self._free_s, FREE_REPLAY_S
        try:
            yield
        finally:
            self._free_s = before

    def add(self, began_s: float) -> None:
        """Counts a call that began at this time of the thread's processor clock.

        Raises RequestError `grammar_too_complex` where the text's grammar has taken too much.
        """
        seconds = time.thread_time() - began_s - self._free_s
        if seconds > 0.0:
            self._note(seconds)
        self.spend(seconds)

    def spend(self, seconds: float) -> None:
        """Counts time beyond what is free, or takes back what is left of it; raises as `add`."""
        self._excess_s = max(0.0, self._excess_s + seconds)
        if self._excess_s > MAX_EXCESS_S and self._is_timed:
            self._on_excess()
            raise TookTooLong(
                "grammar_too_complex",
                f"the grammar takes too long: {self._excess_s:.2f} s of processor time beyond what its tokens may "
                "take; make it simpler",
            )

    def too_large(self, message: str) -> TookTooLong:
        """The error of a text that has filled a lexer alone, which counts like time."""
        self._on_excess()
        return TookTooLong("grammar_too_complex", message)
