"""Reads the text of a chat's choice into the fields of a message: content, reasoning, tool calls."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any, Final

from outrider.models.grammar.reasoning import BEGIN, END
from outrider.models.http.tool_calls import PARSERS, Parsed, ToolCallParser

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


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """How to read the texts of a call. tools: the format of calls; None: the text has none.

    has_reasoning: it may begin with reasoning. is_one_call: `parallel_tool_calls` is false. is_forced: `tool_choice`
    names the function, so the reason stays "stop", as OpenAI's. shows_reasoning: false drops it.
    """

    tools: str | None = None
    has_reasoning: bool = False
    is_one_call: bool = False
    is_forced: bool = False
    shows_reasoning: bool = True


@dataclass(slots=True)
class ChatReader:
    """Text in, fields of deltas out. is_inside: the prompt has opened the reasoning."""

    style: ChatStyle
    is_inside: bool = False
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    _splitter: ReasoningSplitter | None = None
    _parser: ToolCallParser | None = None

    def __post_init__(self) -> None:
        if self.style.has_reasoning:
            self._splitter = ReasoningSplitter(is_inside=self.is_inside)
        if self.style.tools is not None:
            self._parser = PARSERS[self.style.tools]()

    def push(self, text: str, *, is_last: bool = False) -> dict[str, Any]:
        """The fields that `text` adds to a delta; gathers them too. is_last: nothing follows."""
        thought, said = self._splitter.push(text) if self._splitter is not None else ("", text)
        if is_last and self._splitter is not None:
            more, rest = self._splitter.finish()
            thought, said = thought + more, said + rest
        parsed = self._parser.push(said, is_last=is_last) if self._parser is not None else Parsed(said)
        delta: dict[str, Any] = {}
        if thought and self.style.shows_reasoning:
            self.reasoning += thought
            delta["reasoning_content"] = thought
        if parsed.content:
            self.content += parsed.content
            delta["content"] = parsed.content
        if calls := self._call_deltas(parsed):
            delta["tool_calls"] = calls
        return delta

    def reason(self, reason: str | None) -> str | None:
        """The finish reason: "tool_calls" where the text stopped after calls."""
        return "tool_calls" if reason == "stop" and self.calls and not self.style.is_forced else reason

    def _call_deltas(self, parsed: Parsed) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for call in parsed.calls:
            if self.style.is_one_call and call.index > 0:
                continue
            if call.name is not None:
                function = {"name": call.name, "arguments": call.arguments}
                whole = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
                self.calls.append(whole)
                found.append({"index": call.index, **whole, "function": dict(function)})
            else:
                self.calls[call.index]["function"]["arguments"] += call.arguments
                found.append({"index": call.index, "function": {"arguments": call.arguments}})
        return found
