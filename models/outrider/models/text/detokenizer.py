"""Turns token ids into text, piece by piece, and never shows half a character.

Two strategies behind one `StreamingDetokenizer`. For byte-level BPE (Qwen, Llama 3, the reference pair) and
SentencePiece with byte fallback (Llama 2, Gemma) every token is a few bytes, and an incremental UTF-8 decoder does the
rest: constant work per token, and exact. Any other decoder of the `tokenizers` library decodes a short window of
tokens, and what is new since the last call is shown.

Where a byte-fallback run is not UTF-8, the library turns the whole run into U+FFFD, retroactively; here, as in
SentencePiece itself, its whole characters stay and each other byte becomes one U+FFFD. For the same reason the
library's own `DecodeStream` (0.22) does not serve: it raises in the middle of such a text. It also has no flush, and
its work per token grows with the tokens that it holds back (docs/log.md).
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final

from outrider.models.errors import TokenizerError

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_BYTEWISE: Final = "outrider.bytewise"
_CONTEXT_TOKENS: Final = 64
_MAX_HELD_TOKENS: Final = 16
_MAX_ID: Final = (1 << 32) - 1  # the library's ids are 32 bits


DecoderFactory = Callable[[], "_ByteDecoder | _WindowDecoder"]


class StreamingDetokenizer:
    """Turns pushed ids into text; all pieces and `flush()` together are `Tokenizer.decode` of all ids.

    Made by `Tokenizer.detokenizer`. hidden: ids that leave no text. context: ids before the first one pushed; their
    text is not returned, but it decides how the next token looks (a leading space, the rest of a character). Not safe
    to share between threads.
    """

    def __init__(self, new_decoder: DecoderFactory, hidden: frozenset[int], *, context: Sequence[int] = ()) -> None:
        self._hidden = hidden
        self._decoder = new_decoder()
        if context:
            self.push(context[-_CONTEXT_TOKENS:])

    def push(self, ids: int | Sequence[int]) -> str:
        """The text that `ids` add and that no later token can change; may be empty.

        Raises TokenizerError for a negative id; ids beyond the vocabulary are a model's padding and leave no text.
        """
        new = (ids,) if isinstance(ids, int) else ids
        if any(index < 0 for index in new):
            raise TokenizerError(f"token id {min(new)} is negative; ids start at 0")
        return self._decoder.push([int(i) for i in new if i not in self._hidden and i <= _MAX_ID])

    @property
    def is_inside(self) -> bool:
        """Whether the ids so far end inside a character."""
        return self._decoder.is_inside

    def flush(self) -> str:
        """The text of an unfinished character, as U+FFFD; call once, at the end."""
        return self._decoder.flush()


class _ByteDecoder:
    """Decodes tokens that are bytes, whatever precedes them."""

    def __init__(self, spell: Callable[[int], bytes], *, errors: str, strips_first_space: bool) -> None:
        self._spell = spell
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        self._strips = strips_first_space

    def push(self, ids: Sequence[int]) -> str:
        return self._shown(self._utf8.decode(b"".join(map(self._spell, ids))))

    @property
    def is_inside(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def flush(self) -> str:
        return self._shown(self._utf8.decode(b"", True))

    def _shown(self, text: str) -> str:
        if self._strips and text:
            self._strips = False
            return text.removeprefix(" ")
        return text


class _WindowDecoder:
    """Decodes the last few tokens with the library, and shows what is new.

    The first `_num_shown` of `_ids` are already shown and kept as context; the text of the others is held back because
    it ends inside a character. After `_MAX_HELD_TOKENS` it is shown: such bytes are not a character.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._ids: list[int] = []
        self._num_shown = 0

    def push(self, ids: Sequence[int]) -> str:
        return "".join(self._push_one(index) for index in ids)

    @property
    def is_inside(self) -> bool:
        return len(self._ids) > self._num_shown

    def flush(self) -> str:
        text, self._num_shown = self._grown(), len(self._ids)
        return text

    def _push_one(self, index: int) -> str:
        self._ids.append(index)
        text = self._grown()
        if (not text or text.endswith(_REPLACEMENT)) and len(self._ids) - self._num_shown < _MAX_HELD_TOKENS:
            return ""
        if text:
            self._ids = self._ids[self._num_shown :]
            self._num_shown = len(self._ids)
        else:
            del self._ids[self._num_shown :]  # tokens without text: the context stays what it was
        return text

    def _grown(self) -> str:
        before = self._text(self._ids[: self._num_shown])
        return self._text(self._ids)[len(before) :]

    def _text(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text


def _speller(backend: Any, *, is_byte_level: bool, space: str) -> Callable[[int], bytes]:
    """A function from a token's id to its bytes, which it finds once."""

    @cache
    def bytes_of(index: int) -> bytes:
        token: str | None = backend.id_to_token(index)
        if token is None:
            return b""
        if is_byte_level:
            try:
                return bytes(map(_byte_level_alphabet().__getitem__, token))
            except KeyError:
                return token.encode()  # an added token, spelled as it reads
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass  # not hexadecimal, so a token like any other
        return (token.replace(space, " ") if space else token).encode()

    return bytes_of


def plan_decoding(backend: Any) -> DecoderFactory:
    """Chooses a decoder for `backend`; the result makes one per stream, all with one cache of tokens' bytes."""
    steps, kinds = _steps_of(backend.decoder)
    if kinds == ["ByteLevel"]:
        spell = _speller(backend, is_byte_level=True, space="")
        return lambda: _ByteDecoder(spell, errors="replace", strips_first_space=False)
    if "ByteFallback" not in kinds:
        return lambda: _WindowDecoder(backend)
    space, strips = "", False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(spelled)}, "content": " "} if not space:
                space = spelled
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if step is steps[-1]:
                strips = True
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                return lambda: _WindowDecoder(backend)
    spell = _speller(backend, is_byte_level=False, space=space)
    return lambda: _ByteDecoder(spell, errors=_BYTEWISE, strips_first_space=strips)


def plan_spelling(backend: Any) -> Callable[[int], bytes]:
    """A function from a token's id to the bytes of its text, which may be a part of a character."""
    steps, kinds = _steps_of(backend.decoder)
    if kinds == ["ByteLevel"]:
        return _speller(backend, is_byte_level=True, space="")
    space = next((str(step["pattern"].get("String", "")) for step in steps if step.get("type") == "Replace"), "")
    if "ByteFallback" in kinds:
        return _speller(backend, is_byte_level=False, space=space)
    text_of: Callable[[list[int]], str] = partial(backend.decode, skip_special_tokens=False)
    if kinds in ([None], ["Metaspace"], ["WordPiece"]):  # they part words, so what begins a text reads otherwise
        return lambda index: text_of([index, index]).removeprefix(text_of([index])).encode()
    return lambda index: text_of([index]).encode()


def _steps_of(decoder: Any) -> tuple[list[dict[str, Any]], list[str | None]]:
    """The steps of a decoder of the library, and the type of each."""
    state = json.loads(decoder.__getstate__()) if decoder is not None else {}
    steps = state.get("decoders", [state])
    return steps, [step.get("type") for step in steps]


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """Character to byte, as GPT-2 spells bytes: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _replace_bytewise(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_BYTEWISE, _replace_bytewise)
