"""Splits a model's text into reasoning, between `<think>` and `</think>`, and content, as it arrives."""

from __future__ import annotations

from typing import Final

from outrider.models.grammar.reasoning import BEGIN, END

_SPACE: Final = " \t\r\n"


class ReasoningSplitter:
    """Text in, reasoning and content out. Spaces around the reasoning are dropped.

    is_inside: the prompt has opened the reasoning already, so the text begins inside it.
    """

    def __init__(self, *, is_inside: bool) -> None:
        self._held = ""
        self._is_open = is_inside
        self._may_begin = not is_inside
        self._is_first = True  # nothing of this part was shown
        self._has_reasoned = False

    def push(self, text: str) -> tuple[str, str]:
        """What `text` adds to the reasoning, and to the content."""
        self._held += text
        if self._may_begin:
            found = self._held.lstrip(_SPACE)
            if BEGIN.startswith(found) and found != BEGIN:
                return "", ""
            self._may_begin = False
            if found.startswith(BEGIN):
                self._held, self._is_open = found[len(BEGIN) :], True
        if not self._is_open:
            return "", self._shown_content()
        before, mark, after = self._held.partition(END)
        if mark:
            reasoning = before.rstrip(_SPACE)
            reasoning = reasoning.lstrip(_SPACE) if self._is_first else reasoning
            self._held, self._is_open, self._is_first = after, False, True
            self._has_reasoned = True
            return reasoning, self._shown_content()
        keep = next((n for n in range(len(END) - 1, 0, -1) if self._held.endswith(END[:n])), 0)
        shown = self._held[: len(self._held) - keep].rstrip(_SPACE)
        self._held = self._held[len(shown) :]
        if self._is_first:
            shown = shown.lstrip(_SPACE)
            self._is_first = not shown
        return shown, ""

    def finish(self) -> tuple[str, str]:
        """What was held back."""
        held, self._held = self._held, ""
        return (held.rstrip(_SPACE), "") if self._is_open else ("", held)

    def _shown_content(self) -> str:
        text, self._held = self._held, ""
        if self._has_reasoned and self._is_first:
            text = text.lstrip(_SPACE)
            self._is_first = not text
        return text
