"""Reads the text of a chat's choice into the fields of a message: content, reasoning, tool calls."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from outrider.models.grammar.reasoning import BEGIN, END
from outrider.models.http.tool_calls import READERS, SPACE, ArrivingText, CallDelta, Steps


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


class ChatReader:
    """Text in, fields of deltas out. is_inside: the prompt has opened the reasoning."""

    def __init__(self, style: ChatStyle, *, is_inside: bool = False) -> None:
        self._style = style
        self._text = ArrivingText()
        self._steps = _read(self._text, style, is_inside=is_inside)
        self.content = ""
        self.reasoning = ""
        self.calls: list[dict[str, Any]] = []

    def push(self, text: str, *, is_last: bool = False) -> dict[str, Any]:
        """The fields that `text` adds to a delta; gathers them too. is_last: nothing follows."""
        arriving = self._text
        arriving.held += text
        arriving.is_last = is_last
        next(self._steps, None)
        delta: dict[str, Any] = {}
        thought, said = "".join(arriving.reasoning), "".join(arriving.content)
        calls = [self._call_delta(each) for each in arriving.calls if not (self._style.is_one_call and each.index)]
        for found in (arriving.reasoning, arriving.content, arriving.calls):
            found.clear()
        if thought and self._style.shows_reasoning:
            self.reasoning += thought
            delta["reasoning_content"] = thought
        if said:
            self.content += said
            delta["content"] = said
        if calls:
            delta["tool_calls"] = calls
        return delta

    def reason(self, reason: str | None) -> str | None:
        """The finish reason: "tool_calls" where the text stopped after calls."""
        return "tool_calls" if reason == "stop" and self.calls and not self._style.is_forced else reason

    def _call_delta(self, call: CallDelta) -> dict[str, Any]:
        if call.name is None:
            self.calls[call.index]["function"]["arguments"] += call.arguments
            return {"index": call.index, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        whole = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
        self.calls.append(whole)
        return {"index": call.index, **whole, "function": dict(function)}


# Knows the text only: with the reader that has it, it would be a circle.
def _read(text: ArrivingText, style: ChatStyle, *, is_inside: bool) -> Steps[None]:
    if style.has_reasoning:
        yield from _read_reasoning(text, is_inside=is_inside)
    if style.tools is not None:
        yield from READERS[style.tools](text)
    while not text.is_last:
        text.content.append(text.held)
        text.held = ""
        yield
    if text.held.strip() or not text.num_calls:
        text.content.append(text.held)


def _read_reasoning(text: ArrivingText, *, is_inside: bool) -> Steps[None]:
    """Without the spaces around it. is_inside: the text begins inside it."""
    if not is_inside:
        while BEGIN.startswith(found := text.held.lstrip(SPACE)) and found != BEGIN and not text.is_last:
            yield
        if not found.startswith(BEGIN):
            return
        text.held = found[len(BEGIN) :]
    yield from text.past(SPACE)
    if (yield from text.until(END, text.reasoning)) is None:
        text.reasoning.append(text.held.rstrip(SPACE))
        text.held = ""
    yield from text.past(SPACE)
