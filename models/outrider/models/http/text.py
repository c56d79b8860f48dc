"""Turns tokens into the text of an answer, cut at stop strings.

The text does not depend on how commits were chunked: tokens are taken one by one, and those after the one that
completes a stop string do not count.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.models.detokenizer import StreamingDetokenizer


class TextAssembler:
    """Tokens in, text out; holds back text that may begin a stop string."""

    def __init__(
        self, detokenizer: StreamingDetokenizer, stop_strings: Sequence[str], stop_ids: frozenset[int]
    ) -> None:
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._stop_ids = stop_ids
        self._held = ""
        self.num_tokens = 0
        self.is_stopped = False

    def push(self, tokens: Sequence[int]) -> str:
        """The text that `tokens` add. A stop string is not part of it, and nothing follows it."""
        shown = ""
        for token in tokens:
            if self.is_stopped:
                break
            self.num_tokens += 1
            if token not in self._stop_ids:
                shown += self._release(self._detokenizer.push(token))
        return shown

    def finish(self) -> str:
        """The text held back; call it after the last token."""
        if self.is_stopped:
            return ""
        shown = self._release(self._detokenizer.flush())
        if not self.is_stopped:
            shown += self._held
            self._held = ""
        return shown

    def _release(self, piece: str) -> str:
        text = self._held + piece
        ends = [found for found in (text.find(stop) for stop in self._stop_strings) if found >= 0]
        if ends:
            self.is_stopped = True
            self._held = ""
            return text[: min(ends)]
        keep = max((_overlap(text, stop) for stop in self._stop_strings), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
