"""Gives the texts of one grammar their matchers, and new ones where the library's have worn out.

All copies of a matcher share its lexer, whose states only grow in number: every text adds those that it meets. Where
they reach the library's limit, no copy goes on, and no new text begins. So a second matcher, compiled apart, lies
ready: what other texts have met never ends a text.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Matchers:
    """Of one grammar. Safe to share between threads."""

    def __init__(self, first: Any, prepare: Callable[[], None] = lambda: None) -> None:
        """prepare: asks somebody to call `put_spare`, soon."""
        self._lock = threading.Lock()
        self._current = first
        self._spare: Any = None
        self._prepare = prepare
        self.is_worn_out = False
        """Whether texts have asked in vain for a new one: the grammar must be compiled again."""

    @property
    def current(self) -> Any:
        """The one to copy: no text changes it."""
        return self._current

    def put_spare(self, matcher: Any) -> None:
        """Takes a matcher of the same grammar that shares nothing with the others."""
        with self._lock:
            self._spare = matcher

    def replaced(self, worn: Any) -> Any:
        """Another to copy than `worn`, which a text's own was a copy of; None where there is none."""
        with self._lock:
            if self._current is not worn:
                return self._current
            if self._spare is None:
                self.is_worn_out = True
                return None
            self._current, self._spare = self._spare, None
        self._prepare()
        return self._current
