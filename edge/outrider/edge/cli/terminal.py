"""Shows tokens in a terminal as they arrive, coloured by who produced them."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from outrider.edge.results import TokenBatch
from outrider.models.detokenizer import StreamingDetokenizer

DRAFT_STYLE = "green"
"""Accepted drafted tokens; the target's own have no style."""
PROMPT_STYLE = "dim"


class TokenPrinter:
    """An `OnTokens` that prints. Call `finish` after the last batch: half a character may be waiting for its rest.

    prompt: printed before the first token, so that no message comes between it and the text.
    """

    def __init__(self, console: Console, detokenizer: StreamingDetokenizer, prompt: str = "") -> None:
        self._console = console
        self._detokenizer = detokenizer
        self._prompt = prompt
        self._is_in_line = False

    def __call__(self, batch: TokenBatch) -> None:
        self._print(self._prompt, PROMPT_STYLE)
        self._prompt = ""
        self._print(self._detokenizer.push(list(batch.tokens[: batch.num_accepted])), DRAFT_STYLE)
        self._print(self._detokenizer.push(list(batch.tokens[batch.num_accepted :])), "")

    def finish(self) -> None:
        """Prints what is left and ends the line."""
        self._print(self._detokenizer.flush(), "")
        self._console.print()
        self._is_in_line = False

    def break_line(self) -> None:
        """Ends an unfinished line, so that a message stands on its own."""
        if self._is_in_line:
            self._console.print()
            self._is_in_line = False

    def _print(self, text: str, style: str) -> None:
        if text:
            self._console.print(Text(text, style=style), end="", soft_wrap=True)
            self._is_in_line = not text.endswith("\n")
