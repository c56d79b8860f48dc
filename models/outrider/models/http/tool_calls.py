"""Finds tool calls in a model's text, as it arrives: one parser per way of writing them.

Formats, by what the model's chat template contains: `hermes` (Hermes, Qwen: `<tool_call>{...}</tool_call>`), `mistral`
(`[TOOL_CALLS][{...}]`, `[TOOL_CALLS]name[ARGS]{...}`) and `llama` (Llama 3: the text is `{"name": ..., "parameters":
...}`). Text that only looks like a call stays text. docs/log.md says why no library does this.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_SPACE: Final = " \t\r\n"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of call `index`. name: set in its first piece only. arguments: JSON text that follows the earlier one."""

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a piece of text adds to content and calls."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()


ARGUMENT_KEYS: Final = ("arguments", "parameters")
MAX_NAME_CHARS: Final = 256


class CallScanner:
    """Reads one tool call, a JSON object with a name and its arguments, character by character.

    Feed it until `is_over` or `is_broken`. The arguments are passed on as they arrive, in the model's own spelling.
    """

    def __init__(self, name: str | None = None) -> None:
        """name: given, it is the function's, and the object is its arguments."""
        self.name = name
        self.is_over = self.is_broken = self.has_arguments = False
        self._fed: list[str] = []
        self._fresh: list[str] = []  # of the arguments
        self._is_bare = name is not None
        self._is_open = False
        self._key: str | None = None  # of the value that is read; None while a key is
        self._text: list[str] = []  # of the key or value
        self._depth = 0  # of the key or value
        self._in_string = self._is_escaped = False
        self._is_whole = False  # the key or value cannot go on

    @property
    def raw(self) -> str:
        """What it was fed."""
        return "".join(self._fed)

    def take_arguments(self) -> str:
        """The arguments' text since the last call."""
        fresh = "".join(self._fresh)
        self._fresh.clear()
        return fresh

    def feed(self, text: str) -> str:
        """Reads `text` up to the object's end; returns what follows it."""
        for index, char in enumerate(text):
            if self.is_over or self.is_broken:
                self._fed.append(text[:index])
                return text[index:]
            self._step(char)
        self._fed.append(text)
        return ""

    def _step(self, char: str) -> None:
        is_between = self._depth == 0 and not self._in_string
        if is_between and char in _SPACE:
            self._is_whole = bool(self._text)
            return
        if not self._is_open:
            self._is_open, self.is_broken = True, char != "{"
            if not self._is_bare:
                return
            self._key = ARGUMENT_KEYS[0]
        elif is_between and char in ":,}":
            return self._end(char)
        elif self._is_whole or (is_between and char == "]") or (self._key is None and not self._text and char != '"'):
            self.is_broken = True
            return
        self._text.append(char)
        if self._in_string:
            self._in_string = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
        elif char == '"':
            self._in_string = True
        else:
            self._depth += (char in "{[") - (char in "}]")
        self._is_whole = self._depth == 0 and not self._in_string and char in '"}]'
        if self._key in ARGUMENT_KEYS and self._text[0] == "{":
            self._fresh.append(char)
            self.has_arguments = True
            self.is_over = self._is_bare and self._is_whole
        if self._is_whole and self._key is not None:
            self._take(self._key, "".join(self._text))
            self._key = ""  # is known

    def _end(self, char: str) -> None:
        """A key or a value is complete, and perhaps the object."""
        key, text = self._key, "".join(self._text)
        self._text.clear()
        self._key, self._is_whole = None, False
        if char == ":":
            self._key = _text_of(text)
            self.is_broken = key is not None or not self._key
        elif key is not None:
            self._take(key, text)
        else:
            self.is_broken = bool(text) or char == ","
        if char == "}" and not self.is_broken:
            self.is_over, self.is_broken = self.name is not None, self.name is None
            if not self.has_arguments:
                self._give("{}")

    def _take(self, key: str, text: str) -> None:
        if key == "name":
            self.name = _text_of(text)
            self.is_broken = not self.name or len(self.name) > MAX_NAME_CHARS
        elif key in ARGUMENT_KEYS and text[:1] != "{":
            if text[:1] == '"':  # an object that is spelled as a string
                found = _text_of(text)
                self.is_broken, text = found is None, found or ""
            self._give("{}" if text == "null" else text)

    def _give(self, arguments: str) -> None:
        self._fresh = [arguments]
        self.has_arguments = True


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


class ToolCallParser:
    """Text in, content and calls out; holds back text that may begin a call. Spaces around calls are dropped."""

    begins: str = ""
    """What begins a call."""

    def __init__(self) -> None:
        self._held = ""
        self._scanner: CallScanner | None = None
        self._before = ""  # the marker of the call that is read, for text that turns out to be none
        self._num_calls = 0
        self._is_announced = False  # the name of the call that is read was passed on
        self._content = ""
        self._deltas: list[CallDelta] = []

    def push(self, text: str) -> Parsed:
        """What `text` adds."""
        self._held += text
        while self._step():
            pass
        return self._taken()

    def finish(self) -> Parsed:
        """What was held back; call it after the last text. A call that the text's end cuts keeps its beginning."""
        if self._scanner is not None:
            self._end_call()
        if self._held.strip() or not self._num_calls:
            self._content += self._held
        self._held = ""
        return self._taken()

    def _taken(self) -> Parsed:
        parsed = Parsed(self._content, tuple(self._deltas))
        self._content, self._deltas = "", []
        return parsed

    def _step(self) -> bool:
        """Takes a part of `_held`; whether to go on."""
        if self._scanner is None:
            return self._find()
        self._held = self._scanner.feed(self._held)
        self._pass_on()
        if not (self._scanner.is_over or self._scanner.is_broken):
            return False
        self._end_call()
        return bool(self._held)

    def _find(self) -> bool:
        """Looks for what begins a call."""
        at = self._held.find(self.begins)
        if at >= 0:
            shown = self._held[:at].rstrip(_SPACE)
            before = self._held[len(shown) : at + len(self.begins)]
            self._content += shown
            self._held = self._held[at + len(self.begins) :]
            self._open(before)
            return True
        shown = self._held[: len(self._held) - _overlap(self._held, self.begins)].rstrip(_SPACE)
        self._content += shown
        self._held = self._held[len(shown) :]
        return False

    def _open(self, before: str, name: str | None = None) -> None:
        self._scanner, self._before, self._is_announced = CallScanner(name), before, False

    def _pass_on(self) -> None:
        scanner = self._scanner
        assert scanner is not None
        if scanner.name is None or not scanner.has_arguments:
            return
        arguments = scanner.take_arguments()
        if not self._is_announced:
            self._is_announced = True
            self._num_calls += 1
            self._deltas.append(CallDelta(self._num_calls - 1, scanner.name, arguments))
        elif arguments:
            self._deltas.append(CallDelta(self._num_calls - 1, None, arguments))

    def _end_call(self) -> None:
        scanner = self._scanner
        assert scanner is not None
        self._scanner = None
        if not self._is_announced:
            self._content += self._before + scanner.raw
        self._after_call(is_whole=scanner.is_over)

    def _after_call(self, *, is_whole: bool) -> None:
        """What follows a call in this format."""


class HermesParser(ToolCallParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""

    begins = "<tool_call>"
    _ends: Final = "</tool_call>"

    def __init__(self) -> None:
        super().__init__()
        self._awaits_end = False

    def _step(self) -> bool:
        if self._awaits_end:
            rest = self._held.lstrip(_SPACE)
            if rest.startswith(self._ends):
                self._held = rest[len(self._ends) :].lstrip(_SPACE)
            elif self._ends.startswith(rest):
                return False
            self._awaits_end = False
        return super()._step()

    def finish(self) -> Parsed:
        if self._awaits_end:
            self._held = ""
        return super().finish()

    def _after_call(self, *, is_whole: bool) -> None:
        self._awaits_end = is_whole


class MistralParser(ToolCallParser):
    """`[TOOL_CALLS]` and a list of objects, or a name, `[ARGS]` and an object."""

    begins = "[TOOL_CALLS]"
    _names: Final = ("[CALL_ID]", "[ARGS]")

    def __init__(self) -> None:
        super().__init__()
        self._is_in_list = False
        self._awaits_name = False

    def _open(self, before: str, name: str | None = None) -> None:
        self._before, self._awaits_name = before, True

    def _step(self) -> bool:
        if self._awaits_name:
            return self._begin_call()
        if self._is_in_list and self._scanner is None:
            return self._next_in_list()
        return super()._step()

    def finish(self) -> Parsed:
        if self._awaits_name:
            self._held, self._awaits_name = self._before + self._held, False
        if self._is_in_list and self._scanner is None:
            self._held = ""
        return super().finish()

    def _begin_call(self) -> bool:
        text = self._held.lstrip(_SPACE)
        if not text:
            return False
        if text[0] in "[{":
            if text[0] == "[":
                if text == "[" or any(mark.startswith(text) for mark in self._names):
                    return False
                self._is_in_list, text = True, text[1:]
            self._held, self._awaits_name = text, False
            super()._open(self._before)
            return True
        at = text.find("{")
        if at < 0:
            return False
        name = text[:at].split("[", 1)[0].strip()
        self._held, self._awaits_name = text[at:], False
        super()._open(self._before + text[:at], name or None)
        return True

    def _next_in_list(self) -> bool:
        text = self._held.lstrip(_SPACE + ",")
        if not text:
            self._held = ""
            return False
        if text[0] == "]":
            self._is_in_list, self._held = False, text[1:].lstrip(_SPACE)
            return bool(self._held)
        self._held = text
        super()._open("")
        return True

    def _after_call(self, *, is_whole: bool) -> None:
        self._is_in_list = self._is_in_list and is_whole
        if is_whole and not self._is_in_list:
            self._held = self._held.lstrip(_SPACE)


class LlamaParser(ToolCallParser):
    """The text is one object `{"name": ..., "parameters": {...}}`, or several with `;` between them."""

    begins = "<|python_tag|>"

    def __init__(self) -> None:
        super().__init__()
        self._may_begin = True

    def _find(self) -> bool:
        if not self._may_begin:
            return super()._find()
        text = self._held.lstrip(_SPACE + (";," if self._num_calls else ""))
        if text.startswith("{"):
            self._held = text
            self._open("")
            return True
        if not text or self.begins.startswith(text):
            return False
        self._may_begin = False
        return True

    def _after_call(self, *, is_whole: bool) -> None:
        self._may_begin = is_whole


PARSERS: Final[dict[str, Callable[[], ToolCallParser]]] = {
    "hermes": HermesParser,
    "mistral": MistralParser,
    "llama": LlamaParser,
}
"""By the format's name."""


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
