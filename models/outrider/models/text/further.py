"""Splits a text that goes on: without what a tokenizer puts before one that begins."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Final

import tokenizers

from outrider.models.errors import TokenizerError

_SPACE: Final = "\u2581"
"""SentencePiece's space."""


class Further:
    """A tokenizer of the library for texts that follow others. name: for messages. Safe to share between threads."""

    def __init__(self, backend: Any, name: str) -> None:
        self._whole, self._name = backend, name
        found = ((prefix, step["type"] == "Prepend") for step in _steps(backend) if (prefix := _prefix_of(step)))
        begin: tuple[str, bool] = next(found, ("", False))
        self._prefix, self._is_always = begin

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that follows another: without special tokens and `prefix_of`. For short texts.

        Raises TokenizerError where the library gives up.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except BaseException as error:  # a panic of the library, as for a pattern that never ends, is no Exception
            if type(error).__name__ != "PanicException":
                raise
            raise TokenizerError(f"the tokenizer of {self._name} cannot split a text ({error})") from None
        return ids

    def prefix_of(self, text: str) -> str:
        """What is put before a text that begins, as a part of it: a space, as SentencePiece does, or nothing."""
        return self._prefix if self._is_always or not text.startswith(self._prefix) else ""

    @cached_property
    def _backend(self) -> Any:
        if not self._prefix:
            return self._whole
        document = json.loads(self._whole.to_str())
        for part in ("normalizer", "pre_tokenizer"):
            document[part] = _unprefixed(document[part])
        return tokenizers.Tokenizer.from_str(json.dumps(document))


def _steps(backend: Any) -> Iterator[dict[str, Any]]:
    """What a backend does to a text before it splits it, step by step."""
    for part in (backend.normalizer, backend.pre_tokenizer):
        state = json.loads(part.__getstate__()) if part is not None else {}
        yield from state.get("normalizers", state.get("pretokenizers", [state]))


def _prefix_of(step: Mapping[str, Any]) -> str:
    """What a step puts before a text."""
    match step:
        case {"type": "Prepend", "prepend": str(prefix)}:
            return prefix.replace(_SPACE, " ")
        case {"type": "Metaspace"} if step.get("prepend_scheme", "always") != "never":
            return " "
        case {"type": "ByteLevel", "add_prefix_space": True}:
            return " "
    return ""


def _unprefixed(part: Any) -> Any:
    """A normalizer or pre-tokenizer that puts nothing before a text."""
    if not isinstance(part, dict):
        return part
    for name in ("normalizers", "pretokenizers"):
        if name in part:
            return part | {name: [_unprefixed(step) for step in part[name] if step.get("type") != "Prepend"]}
    match part:
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return part | {"prepend_scheme": "never"}
        case {"type": "ByteLevel"} if "add_prefix_space" in part:
            return part | {"add_prefix_space": False}
    return part
