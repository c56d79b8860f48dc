"""Tests streaming detokenization: whole characters only, and together exactly the decoded text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny_models import make_tiny_tokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from outrider.models.errors import TokenizerError
from outrider.models.text.tokenizer import Tokenizer

TEXTS = st.text(
    alphabet=st.one_of(st.sampled_from("aeiou \n\t.,()'é中文日本語😀👩‍🚀🇳🇴"), st.characters(codec="utf-8")), max_size=40
)
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def numbered(words: Sequence[str]) -> dict[str, int]:
    """A vocabulary of words, which have the ids of their places."""
    return {word: index for index, word in enumerate(words)}


def make_byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2: pieces with a mark for spaces, bytes for whatever is not in the vocabulary."""
    words = ["▁", "▁the", "a", "e", "i", "o", "u", "t", "h", "▁a", "é", "中", "\n", "."]
    special, pieces = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    vocab, merges = numbered([*special, *pieces, *words]), [("▁", "a")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.add_special_tokens(special)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def make_metaspace() -> tokenizers.Tokenizer:
    """As T5: a decoder of the library, used window by window."""
    pieces = [
        ("<unk>", 0.0),
        ("▁", -2.0),
        ("▁the", -3.0),
        ("a", -3.5),
        ("b", -3.6),
        ("é", -4.0),
        ("日", -4.0),
        ("😀", -5.0),
    ]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def make_wordpiece() -> tokenizers.Tokenizer:
    """As BERT: words joined by spaces, and pieces that continue a word."""
    words = ["[UNK]", "the", "a", "b", ".", "'", "é", "日", "😀"]
    pieces = ["##" + piece for piece in "aeiouthbn.é日😀"]
    tokenizer = tokenizers.Tokenizer(models.WordPiece(numbered([*words, *pieces]), unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def make_undecoded() -> tokenizers.Tokenizer:
    """A tokenizer without a decoder: the library joins tokens by spaces."""
    words = ["[UNK]", "the", "a", "b", ".", "é", "日", "😀"]
    tokenizer = tokenizers.Tokenizer(models.WordLevel(numbered(words), unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


MAKERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-fallback": make_byte_fallback,
    "metaspace": make_metaspace,
    "wordpiece": make_wordpiece,
    "undecoded": make_undecoded,
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("detokenizers")
    # As Qwen and Llama 3: every byte is in the vocabulary.
    make_tiny_tokenizer(root / "byte-level", special_tokens=("<|end|>", "<|日本|>"))
    for name, make in MAKERS.items():
        (root / name).mkdir()
        make().save(str(root / name / "tokenizer.json"))
    # Byte fallback with a step in its decoder that this package does not know.
    raw = json.loads((root / "byte-fallback" / "tokenizer.json").read_text(encoding="utf-8"))
    raw["decoder"]["decoders"].insert(0, {"type": "Replace", "pattern": {"String": "a"}, "content": "A"})
    (root / "unusual").mkdir()
    (root / "unusual" / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    return {name: Tokenizer.from_dir(root / name) for name in ("byte-level", *MAKERS, "unusual")}


@pytest.fixture(params=("byte-level", *MAKERS))
def tokenizer(request: pytest.FixtureRequest, loaded: dict[str, Tokenizer]) -> Tokenizer:
    return loaded[request.param]


def library_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The `tokenizers` library's own text for the ids."""
    path = tokenizer.directory / "tokenizer.json"
    text: str = tokenizers.Tokenizer.from_file(str(path)).decode(list(ids), skip_special_tokens=True)
    return text


def stream(tokenizer: Tokenizer, ids: Sequence[int], **options: Any) -> list[str]:
    """The pieces, one per token, then what `flush` gives: nothing, unless the ids end inside a character."""
    detokenizer = tokenizer.detokenizer(**options)
    pieces = [detokenizer.push(index) for index in ids]
    is_inside, last = detokenizer.is_inside, detokenizer.flush()
    assert (is_inside or not last) and not detokenizer.is_inside
    return [*pieces, last]


@given(text=TEXTS)
def test_pieces_of_real_text_are_that_text(loaded: dict[str, Tokenizer], text: str) -> None:
    """For every kind of decoder: concatenation, decode and the library agree, and no piece holds half a character."""
    for tokenizer in loaded.values():
        ids = tokenizer.encode(text)
        pieces = stream(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids) == library_text(tokenizer, ids)
        assert REPLACEMENT in text or not any(REPLACEMENT in piece for piece in pieces)


@given(data=st.data())
def test_any_ids_byte_level_are_decoded_as_the_library_does(loaded: dict[str, Tokenizer], data: st.DataObject) -> None:
    """Broken bytes included: a sampled model may produce any tokens."""
    tokenizer = loaded["byte-level"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.size + 5), max_size=30))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == library_text(tokenizer, ids)


@given(data=st.data(), cut=st.integers(0, 30))
def test_how_ids_are_grouped_makes_no_difference(loaded: dict[str, Tokenizer], data: st.DataObject, cut: int) -> None:
    """Commits arrive several tokens at a time. Bytes that are not UTF-8 never raise, as they do in the library's
    DecodeStream.
    """
    for tokenizer in loaded.values():
        ids = data.draw(st.lists(st.integers(0, tokenizer.size + 5), max_size=30))
        detokenizer = tokenizer.detokenizer()
        text = detokenizer.push(ids[:cut]) + detokenizer.push(ids[cut:]) + detokenizer.flush()
        assert text == tokenizer.decode(ids)


@given(prompt=TEXTS.filter(bool), data=st.data())
def test_text_after_a_prompt_goes_on_where_the_prompt_ended(
    loaded: dict[str, Tokenizer], prompt: str, data: st.DataObject
) -> None:
    """With the prompt as context, prompt and pieces together are the decoded whole."""
    for tokenizer in loaded.values():
        before = tokenizer.encode(prompt)
        after = data.draw(st.lists(st.integers(0, tokenizer.size - 1), max_size=12))
        pieces = stream(tokenizer, after, context=before)
        assert tokenizer.decode(before) + "".join(pieces) == tokenizer.decode([*before, *after])


@given(text=TEXTS)
def test_the_bytes_of_a_texts_tokens_are_the_text(loaded: dict[str, Tokenizer], text: str) -> None:
    """Spaces included, where words begin with one that the first of a text does not have."""
    for name in ("byte-level", *MAKERS):
        tokenizer = loaded[name]
        ids = tokenizer.encode(text)
        spelled = b"".join(map(tokenizer.token_bytes, ids))
        assert spelled == "".join(stream(tokenizer, ids, context=tokenizer.encode("a"))).encode()


def test_a_character_of_four_tokens_appears_with_its_last(tokenizer: Tokenizer) -> None:
    """An emoji outside the vocabulary is bytes; it is shown with the last of them."""
    pieces = stream(tokenizer, tokenizer.encode("😀"))
    assert [piece for piece in pieces if piece.strip()] == ["😀"] == ["".join(pieces).strip()]


def test_padding_ids_leave_no_text_and_negative_ones_are_refused(tokenizer: Tokenizer) -> None:
    """A model's embedding may be wider than its tokenizer."""
    assert tokenizer.decode([tokenizer.size, tokenizer.size + 1, 1 << 40]) == ""
    with pytest.raises(TokenizerError, match="negative"):
        tokenizer.detokenizer().push(-1)


def test_a_broken_byte_run_keeps_its_whole_characters(loaded: dict[str, Tokenizer]) -> None:
    """The library would replace the whole run of bytes; here only the bytes that are not a character are replaced."""
    tokenizer, ids = loaded["byte-fallback"], [3 + byte for byte in "é".encode() + b"\xff"]
    assert (tokenizer.decode(ids), library_text(tokenizer, ids)) == ("é" + REPLACEMENT, REPLACEMENT * 3)


def test_a_long_run_of_broken_bytes_is_not_held_back(loaded: dict[str, Tokenizer]) -> None:
    """At most 16 tokens wait for the rest of a character: memory and work per token stay bounded."""
    # "Ģ" is byte 0x80 in the byte-level alphabet.
    for name, token in (("byte-level", "Ģ"), ("byte-fallback", "<0x80>"), ("unusual", "<0x80>")):
        broken = loaded[name].token_id(token)
        assert broken is not None
        assert loaded[name].detokenizer().push([broken] * 64).count(REPLACEMENT) >= 48
