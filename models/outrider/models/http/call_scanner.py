"""Reads one tool call, a JSON object with a name and its arguments, character by character.

The arguments are passed on as they arrive, in the model's own spelling, once the name is known.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

ARGUMENT_KEYS: Final = ("arguments", "parameters")
_SPACE: Final = " \t\r\n"
MAX_NAME_CHARS: Final = 256


class _At(Enum):
    BEGIN = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    INSIDE = auto()
    AFTER = auto()
    END = auto()


@dataclass(slots=True)
class CallScanner:
    """Feed it characters until `is_over` or `is_broken`.

    name: None until it is known; given, it is the function's, and the object is its arguments. raw: what it was fed.
    """

    name: str | None = None
    raw: str = ""
    is_over: bool = False
    is_broken: bool = False
    has_arguments: bool = False
    _fresh: str = ""
    _at: _At = _At.BEGIN
    _key: str = ""
    _value: list[str] = field(default_factory=list)
    _depth: int = 0
    _in_string: bool = False
    _is_escaped: bool = False
    _is_bare: bool = False  # the whole object is the arguments

    def __post_init__(self) -> None:
        self._is_bare = self.name is not None

    def take_arguments(self) -> str:
        """The arguments' text since the last call; nothing before the name is known."""
        if self.name is None:
            return ""
        fresh, self._fresh = self._fresh, ""
        return fresh

    def feed(self, text: str) -> str:
        """Reads `text` up to the object's end; returns what follows it."""
        for index, char in enumerate(text):
            if self.is_over or self.is_broken:
                return text[index:]
            self.raw += char
            self._step(char)
        return ""

    def _step(self, char: str) -> None:
        if self._at is _At.INSIDE:
            self._inside(char)
        elif char in _SPACE:
            return
        elif self._at is _At.BEGIN:
            self._begin(char)
        elif self._at is _At.KEY:
            if char == '"':
                self._open(char)
            else:
                self._close(char)
        elif self._at is _At.COLON:
            self._at = _At.VALUE
            self.is_broken = char != ":"
        elif self._at is _At.VALUE:
            self._open(char)
        elif char == ",":
            self._at = _At.KEY
        else:
            self._close(char)

    def _begin(self, char: str) -> None:
        if char != "{":
            self.is_broken = True
        elif self._is_bare:
            self._key, self._at = ARGUMENT_KEYS[0], _At.VALUE
            self._open(char)
        else:
            self._at = _At.KEY

    def _close(self, char: str) -> None:
        if char == "}" and self.name is not None and self.has_arguments:
            self.is_over = True
        elif char == "}" and self.name is not None:  # a call without arguments
            self._fresh, self.has_arguments, self.is_over = "{}", True, True
        else:
            self.is_broken = True

    def _open(self, char: str) -> None:
        """Begins a key or a value."""
        self._value.clear()
        self._depth, self._in_string, self._is_escaped = 0, False, False
        is_key = self._at is _At.KEY
        if is_key:
            self._key = ""
        self._at = _At.INSIDE
        self._inside(char)

    def _inside(self, char: str) -> None:
        is_streamed = self._key in ARGUMENT_KEYS and self._value[:1] != ['"'] and (bool(self._value) or char == "{")
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            if self._depth == 0:  # ends a number or a word, and the object
                self._ended()
                if not self.is_broken:
                    self._close(char)
                return
            self._depth -= 1
        elif char == "," and self._depth == 0:
            self._ended()
            self._at = _At.KEY
            return
        self._value.append(char)
        if is_streamed:
            self._fresh += char
            self.has_arguments = True
        is_whole = self._depth == 0 and not self._in_string and self._value[0] in '{["'
        if is_whole:
            self._ended()

    def _ended(self) -> None:
        """A key or a value is complete."""
        text = "".join(self._value).strip()
        if not self._key:
            found = _loaded(text)
            self.is_broken = not isinstance(found, str) or not found
            self._key = found if isinstance(found, str) else ""
            self._at = _At.COLON
            return
        if self._key == "name":
            found = _loaded(text)
            self.is_broken = not isinstance(found, str) or not 0 < len(found) <= MAX_NAME_CHARS
            self.name = found if isinstance(found, str) else None
        elif self._key in ARGUMENT_KEYS and text[:1] == '"':  # an object that is spelled as a string
            found = _loaded(text)
            self.is_broken = not isinstance(found, str)
            self._fresh, self.has_arguments = str(found), True
        elif self._key in ARGUMENT_KEYS and text[:1] != "{":
            self._fresh, self.has_arguments = "{}" if text == "null" else text, True
        self._key = ""
        self._at = _At.AFTER
        if self._is_bare:
            self.is_over = True


def _loaded(text: str) -> object:
    try:
        found: object = json.loads(text)
        if isinstance(found, str):
            found.encode()  # half of a surrogate pair is no text: an answer could not be written
    except (ValueError, RecursionError):
        return None
    return found
