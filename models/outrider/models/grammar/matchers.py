"""Gives the texts of one grammar their matchers, and new ones where the library's have worn out.

All copies of a matcher share its lexer, whose states only grow in number: every text adds those that it meets. Where
they reach the library's limit, no copy goes on, and no new text begins. Then the grammar is compiled again, at once, if
that is cheap; a costly one is worn out, and the next request has it compiled. A lexer that grows fast is left to the
texts that have it, before it is full: kept, it would hold up to 20 MB.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

MAX_AGAIN_S: Final = 0.02
"""A grammar that took longer to compile is costly: not compiled again while its texts wait. Schemas take 0.7 ms in the
median.
"""
MAX_GROWING_S: Final = 0.1
"""Of the processor that texts may take beyond what is free (`cost`) before new ones get another lexer: states that are
made take that time, those that are met again do not.
"""


class Matchers:
    """Of one grammar. Safe to share between threads."""

    def __init__(self, first: Any, compile_again: Callable[[], Any], again_s: float, *, is_timed: bool = True) -> None:
        """compile_again: gives a matcher that shares nothing with others. again_s: of the processor, that it takes.
        is_timed: False compiles again however long it takes, so that nothing depends on this process's clock.
        """
        self.again_s = again_s
        self._is_timed = is_timed
        self._lock = threading.Lock()
        self._current: Any = first
        self._compile_again = compile_again
        self._growing_s = 0.0
        self.is_worn_out = False
        """Whether texts have asked in vain for a new one."""

    @property
    def is_costly(self) -> bool:
        """Whether it is not compiled again."""
        return self._is_timed and self.again_s > MAX_AGAIN_S

    @property
    def is_usable(self) -> bool:
        """Whether a new text can begin without compiling."""
        return not self.is_worn_out and self._current is not None

    @property
    def current(self) -> Any:
        """The one to copy: no text changes it. Compiles it where it was left to the texts that have it."""
        with self._lock:
            if self._current is None:
                self._current = self._compile_again()
            return self._current

    def note(self, seconds: float) -> None:
        """Counts time beyond what is free, of any text."""
        with self._lock:
            self._growing_s += seconds
            if self._growing_s > MAX_GROWING_S and not self.is_costly:
                self._current, self._growing_s = None, 0.0

    def replaced(self, worn: Any) -> tuple[Any, bool]:
        """Another to copy than `worn`, which a text's own was a copy of, and whether no other text has had it; None
        where there is none.
        """
        with self._lock:
            if self._current is worn and self.is_costly:
                self.is_worn_out = True
                return None, False
            is_new = self._current is worn or self._current is None
            if is_new:
                self._current = self._compile_again()
                self._growing_s = 0.0
            return self._current, is_new


@dataclass(eq=False)
class Elsewhere:
    """Stands for the matchers of a grammar in an engine's other processes: they last as long as this does.

    number: their name there. taken_s: of the processor, to compile it. is_worn_out: as of `Matchers`.
    """

    number: int
    taken_s: float
    is_worn_out: bool = False

    @property
    def is_costly(self) -> bool:
        """Whether it is not compiled again."""
        return self.taken_s > MAX_AGAIN_S

    @property
    def is_usable(self) -> bool:
        """Whether a new text can begin with it."""
        return not self.is_worn_out
