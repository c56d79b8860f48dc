"""Shows tokens in a terminal as they arrive, coloured by who produced them.

A model may write any character. A terminal gets control characters in a visible form; a file or a pipe gets the text
exactly.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from itertools import groupby

from rich.console import Console
from rich.highlighter import JSONHighlighter
from rich.text import Text

from outrider.edge.results import Origin, TokenBatch
from outrider.models.text.detokenizer import StreamingDetokenizer
from outrider.models.visible import visible

DRAFT_STYLE = "green"
ALTERNATIVE_STYLE = "cyan"
STYLES = {Origin.PICK: DRAFT_STYLE, Origin.ALTERNATIVE: ALTERNATIVE_STYLE, Origin.TARGET: ""}
"""By who guessed a token: the draft, the draft as an alternative, nobody before the target."""


@dataclass(slots=True)
class TokenPrinter:
    """An `OnTokens` that prints. Call `finish` after the last batch: half a character may be waiting for its rest.

    A file or a pipe gets the text and `end`, and no line break that keeps messages apart on a terminal, unless it gets
    the messages, too.

    prompt: printed before the first token, so that no message comes between it and the text. end: written after the
    text into a file or a pipe; on a terminal every text ends its line.
    """

    console: Console
    detokenizer: StreamingDetokenizer
    prompt: str = ""
    end: str = ""
    _is_in_line: bool = False
    _held: list[int] = field(default_factory=list)

    def __call__(self, batch: TokenBatch) -> None:
        self._print(self.prompt, "dim")
        self.prompt = ""
        if batch.is_unverified:
            if self.console.is_terminal:
                self._print(self.detokenizer.push(list(batch.tokens)), "yellow")
            else:
                self._held += batch.tokens  # what is written to a file cannot be taken back
            return
        for origin, run in groupby(range(len(batch.tokens)), batch.origin):
            self._print(self.detokenizer.push([batch.tokens[index] for index in run]), STYLES[origin])

    def replace_unverified(self, detokenizer: StreamingDetokenizer) -> None:
        """The tokens that follow replace unverified ones. detokenizer: one that has the verified text as context."""
        self._held = []
        if self.console.is_terminal:  # elsewhere they were not printed
            self.break_line()
            self.detokenizer = detokenizer

    def confirm_unverified(self, num_tokens: int) -> None:
        """The first of the unverified tokens are the target's, or are all that there will be."""
        confirmed, self._held = self._held[:num_tokens], self._held[num_tokens:]
        self._print(self.detokenizer.push(confirmed), "")

    def finish(self) -> None:
        """Prints what is left and what ends it."""
        self._print(self.detokenizer.flush(), "")
        if self.console.is_terminal:
            self.console.print()
        else:
            self._print(self.end, "")
            self.break_line()
        self._is_in_line = False

    def break_line(self) -> None:
        """Ends an unfinished line where messages come to the same place, so that each stands on its own."""
        if self._is_in_line and (self.console.is_terminal or self._is_beside_messages()):
            self.console.print()
            self._is_in_line = False

    def _is_beside_messages(self) -> bool:
        """Whether standard error goes to the same file, or through the same pipe."""
        try:
            return os.path.sameopenfile(self.console.file.fileno(), sys.stderr.fileno())
        except (OSError, AttributeError):  # one is no file, or there is none
            return False

    def _print(self, text: str, style: str) -> None:
        if not text:
            return
        if self.console.is_terminal:
            self.console.print(Text(visible(text), style=style), end="", soft_wrap=True)
        else:
            # Not through rich, which drops some control characters and replaces tabs.
            self.console.file.write(text)
            self.console.file.flush()
        self._is_in_line = not text.endswith("\n")


def print_document(console: Console, document: object) -> None:
    """Prints a document as JSON, coloured on a terminal; control characters are escaped there.

    Raises ValueError for NaN and infinities, which JSON lacks: numbers that are unknown are None.
    """
    text = json.dumps(document, indent=2, ensure_ascii=console.options.ascii_only, allow_nan=False)
    if console.is_terminal:
        text = visible(text)
    console.print(JSONHighlighter()(Text(text)), soft_wrap=True)
