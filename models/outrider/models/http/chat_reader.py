"""Reads the text of a chat's choice, as it arrives, into the fields of a message: content, reasoning, tool calls.

Formats of calls, by what the model's chat template contains: `hermes` (Hermes, Qwen: `<tool_call>{...}</tool_call>`),
`mistral` (`[TOOL_CALLS][{...}]`, `[TOOL_CALLS]name[ARGS]{...}`) and `llama` (Llama 3: the text is `{"name": ...,
"parameters": ...}`). Text that only looks like a call stays text. docs/log.md says why no library does this.

Readers are generators: each runs as far as the text goes that has arrived, and yields where it needs more.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from outrider.models.grammar.reasoning import BEGIN, END

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A reader. It is resumed when the text has grown, or is at its end."""

SPACE: Final = " \t\r\n"
ARGUMENT_KEYS: Final = ("arguments", "parameters")
MAX_NAME_CHARS: Final = 256


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of call `index`. name: set in its first piece only. arguments: JSON text that follows the earlier one."""

    index: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class ArrivingText:
    """A text in the making, and what was found in it since somebody looked.

    held: what no reader has taken yet; it may begin something. is_last: nothing follows. Spaces around calls are
    dropped.
    """

    held: str = ""
    is_last: bool = False
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)
    num_calls: int = 0

    def until(self, mark: str, shown: list[str]) -> Steps[str | None]:
        """Appends the text before `mark` to `shown`, as it comes. Returns the mark, with the spaces before it; None at
        the text's end.
        """
        num_spaces = 0  # at the beginning of what is held: nothing is looked at twice
        while (at := self.held.find(mark, num_spaces)) < 0:
            longest = min(len(self.held), len(mark) - 1)
            end = len(self.held) - next((n for n in range(longest, 0, -1) if self.held.endswith(mark[:n])), 0)
            fresh = self.held[num_spaces:end].rstrip(SPACE)
            text = self.held[: num_spaces + len(fresh)] if fresh else ""
            shown.append(text)
            self.held = self.held[len(text) :]
            num_spaces = end - len(text)
            if self.is_last:
                return None
            yield
        text = self.held[:at].rstrip(SPACE)
        shown.append(text)
        before = self.held[len(text) : at + len(mark)]
        self.held = self.held[at + len(mark) :]
        return before

    def past(self, chars: str) -> Steps[str]:
        """Drops `chars` where the text goes on, and returns them."""
        dropped: list[str] = []
        while True:
            rest = self.held.lstrip(chars)
            dropped.append(self.held[: len(self.held) - len(rest)])
            self.held = rest
            if rest or self.is_last:
                return "".join(dropped)
            yield

    def coming(self, mark: str, spaces: str = SPACE) -> Steps[str]:
        """What comes after `spaces`, once it is known whether it begins with `mark`; takes nothing."""
        rest = self.held.lstrip(spaces)
        while mark.startswith(rest) and rest != mark and not self.is_last:
            num_read = len(self.held) - len(rest)
            yield
            rest = self.held[num_read:].lstrip(spaces)
        return rest

    def call(self, before: str, name: str | None = None, *, is_tagged: bool = True) -> Steps[bool]:
        """Reads one call. Returns whether it is whole; what is no call becomes content, with the `before` it.

        name: given, it is the function's, and the object is its arguments. is_tagged: a mark came before it, so it is a
        call without arguments, too; else that is an answer in JSON. A call that the text's end cuts keeps its
        beginning.
        """
        call = _Call(name)
        steps = _object(call, is_bare=name is not None, is_tagged=is_tagged)
        next(steps)
        raw: list[str] = []
        is_whole: bool | None = None
        is_announced = False
        while True:
            text, self.held = self.held, ""
            for num_read, char in enumerate(text, start=1):
                if (is_whole := steps.send(char)) is not None:
                    text, self.held = text[:num_read], text[num_read:]
                    break
            raw.append(text)
            if call.name is not None and call.has_arguments and (call.fresh or not is_announced):
                self.num_calls += not is_announced
                new_name = None if is_announced else call.name
                self.calls.append(CallDelta(self.num_calls - 1, new_name, "".join(call.fresh)))
                call.fresh.clear()
                is_announced = True
            if is_whole is not None or self.is_last:
                break
            yield
        if not is_announced:
            self.content.append(before + "".join(raw))
        return bool(is_whole)


@dataclass(slots=True)
class _Call:
    """A call as far as it was read. fresh: text of its arguments, in the model's own spelling, not passed on yet."""

    name: str | None
    has_arguments: bool = False
    fresh: list[str] = field(default_factory=list)

    def take(self, key: str, spelled: str) -> bool:
        """Takes a value other than an object of arguments. Returns whether a call may have it."""
        if key == "name":
            self.name = _text_of(spelled)
            return bool(self.name) and len(self.name or "") <= MAX_NAME_CHARS
        if key in ARGUMENT_KEYS:
            found = _text_of(spelled) if spelled[:1] == '"' else spelled  # an object may be spelled as a string
            self.has_arguments = True
            self.fresh = ["{}" if found == "null" else found or ""]
            return found is not None
        return True


# Reads a JSON object: takes its characters, and gives None until it knows whether they are a whole call.
_Reads = Generator[bool | None, str, T]


def _object(call: _Call, *, is_bare: bool, is_tagged: bool) -> _Reads[None]:
    """is_bare: the object is the arguments. is_tagged: as in `ArrivingText.call`."""
    if (yield from _char()) != "{":
        yield False
    if is_bare:
        call.has_arguments = True
        yield from _rest("{", call.fresh)
        yield True
    delimiter = ","
    while delimiter == ",":
        delimiter = yield from _char()
        if delimiter != '"':
            break
        delimiter = yield from _member(call)
    if delimiter != "}" or call.name is None or not (is_tagged or call.has_arguments):
        yield False
    if not call.has_arguments:
        call.take("arguments", "null")
    yield True


def _member(call: _Call) -> _Reads[str]:
    """A key and its value, whose first quote was read. Returns what follows; nothing for what is none."""
    text: list[str] = []
    yield from _rest('"', text)
    key = _text_of("".join(text))
    if not key or (yield from _char()) != ":":
        return ""
    char = yield from _char()
    if key in ARGUMENT_KEYS and char == "{":
        call.has_arguments = True
        yield from _rest(char, call.fresh)
        return (yield from _char())
    text = []
    if char in '"{[':
        yield from _rest(char, text)
        return (yield from _char()) if call.take(key, "".join(text)) else ""
    while char not in ",:]}" + SPACE:
        text.append(char)
        char = yield None
    if char in SPACE:
        char = yield from _char()
    return char if char in ",}" and call.take(key, "".join(text)) else ""


def _rest(first: str, text: list[str]) -> _Reads[None]:
    """Appends the string, list or object that begins with `first` to `text`, as it comes."""
    text.append(first)
    in_string, is_escaped = first == '"', False
    depth = 0 if in_string else 1
    while depth or in_string:
        char = yield None
        text.append(char)
        if in_string:
            in_string = is_escaped or char != '"'
            is_escaped = char == "\\" and not is_escaped
        elif char == '"':
            in_string = True
        else:
            depth += (char in "{[") - (char in "}]")


def _char() -> _Reads[str]:
    """The next character that is no space."""
    while (char := (yield None)) in SPACE:
        pass
    return char


def _text_of(spelled: str) -> str | None:
    """A string of JSON; None for anything else, and for half of a surrogate pair: no answer could be written."""
    try:
        found: object = json.loads(spelled)
        if isinstance(found, str):
            found.encode()
            return found
    except (ValueError, RecursionError):
        pass
    return None


def _read_hermes(text: ArrivingText) -> Steps[None]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""
    end = "</tool_call>"
    while (before := (yield from text.until("<tool_call>", text.content))) is not None:
        if (yield from text.call(before)):
            rest = yield from text.coming(end)
            if rest.startswith(end):
                text.held = rest[len(end) :]
                yield from text.past(SPACE)
            elif end.startswith(rest):  # the text's end cuts it
                text.held = ""


def _read_mistral(text: ArrivingText) -> Steps[None]:
    """`[TOOL_CALLS]` and a list of objects, or a name, `[ARGS]` and an object."""
    while (before := (yield from text.until("[TOOL_CALLS]", text.content))) is not None:
        before += yield from text.past(SPACE)
        while (begin := _begin_of_calls(text.held)) is None:
            if text.is_last:
                text.held = before + text.held
                return
            yield
        text.held = text.held[len(begin) :]
        before += begin
        if begin != "[":
            if (yield from text.call(before, begin.split("[", 1)[0].strip() or None)):
                yield from text.past(SPACE)
            continue
        while (yield from text.call(before)):
            before = ""
            yield from text.past(SPACE + ",")
            if text.held[:1] in ("]", ""):
                text.held = text.held[1:]
                yield from text.past(SPACE)
                break


def _begin_of_calls(text: str) -> str | None:
    """What comes before the first object: `[`, or the function's name, if any; None while it is not whole."""
    if text.startswith("["):
        is_whole = text != "[" and not any(mark.startswith(text) for mark in ("[CALL_ID]", "[ARGS]"))
        return "[" if is_whole else None
    return text[: text.index("{")] if "{" in text else None


def _read_llama(text: ArrivingText) -> Steps[None]:
    """The text is one object `{"name": ..., "parameters": {...}}`, or several with `;` between them."""
    tag = "<|python_tag|>"
    before: str | None = ""
    is_whole = True
    while before is not None:
        found = ""
        if is_whole:
            found = yield from text.coming(tag, SPACE + (";," if text.num_calls else ""))
            if found != tag and tag.startswith(found):  # the text ends here
                return
        if found.startswith("{"):
            text.held = found
            before = ""
        else:
            before = yield from text.until(tag, text.content)
        if before is not None:
            is_whole = yield from text.call(before, is_tagged=bool(before))


READERS: Final[dict[str, Callable[[ArrivingText], Steps[None]]]] = {
    "hermes": _read_hermes,
    "mistral": _read_mistral,
    "llama": _read_llama,
}
"""By the format's name."""


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """How to read the texts of a call. tools: the format of calls; None: the text has none.

    has_reasoning: it may begin with reasoning. is_one_call: calls after the first are dropped. is_forced: `tool_choice`
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
        # Mistral's templates take nine letters or digits back, and nothing else.
        call_id = secrets.token_hex(5)[:9] if self._style.tools == "mistral" else f"call_{secrets.token_hex(12)}"
        whole = {"id": call_id, "type": "function", "function": function}
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
        found = yield from text.coming(BEGIN)
        if not found.startswith(BEGIN):
            return
        text.held = found[len(BEGIN) :]
    yield from text.past(SPACE)
    if (yield from text.until(END, text.reasoning)) is None:
        text.reasoning.append(text.held.rstrip(SPACE))
        text.held = ""
    yield from text.past(SPACE)
