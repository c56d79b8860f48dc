"""Prints what is wrong with clouds while a command prepares its text, each sentence once.

A command asks its clouds several times before the first token: which draft fits, what is served, then for the text.
"""

from __future__ import annotations

from rich.console import Console

from outrider.models.process.command_line import print_line


class SaidOnce:
    """Sentences that were printed so far. about: where to."""

    def __init__(self, about: Console) -> None:
        self._about = about
        self._said: set[str] = set()

    def note(self, words: str) -> None:
        """Prints a sentence, unless it has been printed."""
        if words not in self._said:
            self._said.add(words)
            print_line(self._about, words, "yellow")

    def was_said(self, words: str) -> bool:
        """Whether a sentence has been printed; true once: it may come back with another outage."""
        if words not in self._said:
            return False
        self._said.remove(words)
        return True
