"""Tests tokenizers: encoding, end tokens, chat templates, and the fingerprint that matches draft and target."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_models import make_tiny_tokenizer
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from outrider.models.errors import TokenizerError, TokenizerMismatch
from outrider.models.text.tokenizer import Tokenizer, require_same_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% generation %}[{{ m.role }}] {{ m.content }}\n{% endgeneration %}"
    "{% endfor %}"
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "plain"
    make_tiny_tokenizer(path)
    return path


def edited(source: Path, target: Path, edit: Callable[[dict[str, Any]], None], **dump: Any) -> Tokenizer:
    """A copy of the tokenizer with tokenizer.json changed by `edit`."""
    target.mkdir()
    raw = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    edit(raw)
    (target / "tokenizer.json").write_text(json.dumps(raw, **dump), encoding="utf-8")
    return Tokenizer.from_dir(target)


def with_template(directory: Path, template: Any) -> Tokenizer:
    """The tokenizer with a template in tokenizer_config.json."""
    make_tiny_tokenizer(directory)
    config = {"chat_template": template, "bos_token": "<s>", "eos_token": {"content": "<|end|>", "lstrip": False}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Tokenizer.from_dir(directory)


def test_text_survives_encoding_and_decoding(directory: Path) -> None:
    """Any text, special characters included, comes back. A generated end token is not text, unless it is asked for."""
    tokenizer = Tokenizer.from_dir(directory)
    text = "def f(x):\n\treturn 'naïve 東京 😀'  # \x00"
    ids = [*tokenizer.encode(text), 0]
    assert (tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=False)) == (text, f"{text}<|end|>")


def test_end_tokens_come_from_every_file_that_names_some(directory: Path, tmp_path: Path) -> None:
    """generation_config may list several, config.json one, tokenizer_config one by its spelling."""
    copy, original = shutil.copytree(directory, tmp_path / "copy"), Tokenizer.from_dir(directory)
    (copy / "generation_config.json").write_text('{"eos_token_id": [7, 5]}', encoding="utf-8")
    (copy / "config.json").write_text('{"eos_token_id": 9}', encoding="utf-8")
    assert Tokenizer.from_dir(copy).eos_token_ids == (0, 5, 7, 9)
    assert (original.eos_token_ids, original.bos_token_id) == ((0,), None)


@pytest.mark.parametrize(
    ("config", "size"), [({}, 302), ({"vocab_size": 301}, 301), ({"text_config": {"vocab_size": 300}}, 300)]
)
def test_added_tokens_that_the_model_has_no_rows_for_are_text(
    config: dict[str, Any], size: int, directory: Path, tmp_path: Path
) -> None:
    """As Gemma 3's text models have one: of its spelling comes no id. The limit is given, or config.json's."""
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    backend.add_special_tokens(["<a>", "<b>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    whole = Tokenizer.from_dir(tmp_path, limit=302)
    for tokenizer in (Tokenizer.from_dir(tmp_path), Tokenizer.from_dir(tmp_path, limit=size)):
        assert tokenizer.size == size and tokenizer.special_ids == whole.special_ids & set(range(size))
        ids = tokenizer.encode("x<a><b>")
        assert max(ids) < size and tokenizer.decode(ids, skip_special_tokens=False) == "x<a><b>"
        assert tokenizer.fingerprint == whole.fingerprint


def test_truncation_in_the_file_does_not_cut_prompts(directory: Path, tmp_path: Path) -> None:
    """Training settings in tokenizer.json must not shorten users' prompts."""
    truncation = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    tokenizer = edited(directory, tmp_path / "cut", lambda raw: raw.update(truncation=truncation))
    assert len(tokenizer.encode("a b c d e f g h")) > 3


NESTED = "[" * 100_000
"""Deeper than Python reads."""


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, r"tokenizer\.json"),
        ("tokenizer.json", "not json", r"tokenizer\.json"),
        ("tokenizer.json", "[]", r"tokenizer\.json"),
        ("tokenizer.json", '{"model": {}}', r"tokenizer\.json"),
        pytest.param("tokenizer_config.json", NESTED, r"tokenizer_config\.json is not JSON", id="tokenizer_config"),
        pytest.param("special_tokens_map.json", NESTED, r"special_tokens_map\.json is not JSON", id="special_tokens"),
        pytest.param("config.json", NESTED, r"config\.json is not JSON", id="config"),
    ],
)
def test_an_unusable_file_is_a_clear_error(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    """Missing, broken and foreign files are refused with their names."""
    make_tiny_tokenizer(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_dir(tmp_path)


def test_a_chat_template_renders_as_in_transformers(tmp_path: Path) -> None:
    """Special tokens by name, the generation tag, tojson without HTML escapes."""
    tokenizer = with_template(tmp_path, TEMPLATE)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "1 < 2"}], tools=[{"name": "<é>"}])
    assert text == '<s>[user] 1 < 2\n[{"name": "<é>"}]\n[assistant]' and tokenizer.has_chat_template


@pytest.mark.parametrize(
    ("template", "variables"),
    [
        ("{% if documents is none %}none{% endif %}{{ documents is defined }}", {}),
        ("{{ documents[0].title }}", {"documents": [{"title": "a", "text": "b"}]}),
        ("{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}", {}),
        ("{% generation %}{% set fresh = 2 %}{% endgeneration %}{{ fresh is defined }}", {}),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% generation %}{% set ns.n = ns.n + 1 %}"
            "{{ loop.index }}{{ m.content }}{% endgeneration %}{% endfor %}{{ ns.n }}",
            {},
        ),
        ("{% generation %}{% for m in messages %}{% continue %}{% endfor %}<{% endgeneration %}", {}),
        ("{{ messages | tojson(false, 1, (',', ':'), true) }}", {}),
        ("{{ bos_token }}{{ enable_thinking }}", {"enable_thinking": False}),
    ],
)
def test_names_and_scopes_are_those_of_transformers(tmp_path: Path, template: str, variables: dict[str, Any]) -> None:
    """What a template finds defined, what its generation block keeps to itself, and tojson's arguments by place."""
    messages = [{"role": "user", "content": "<x>"}, {"role": "assistant", "content": "é"}]
    tokenizer = with_template(tmp_path, template)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>")
    expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=False, **variables)
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False, variables=variables) == expected


def test_a_template_file_wins_and_named_templates_are_chosen_by_use(tmp_path: Path) -> None:
    """tool_use is used when tools are given, else default; chat_template.jinja replaces both."""
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = with_template(tmp_path, named)
    assert (tokenizer.apply_chat_template([]), tokenizer.apply_chat_template([], tools=[{}])) == ("plain", "tools")
    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert Tokenizer.from_dir(tmp_path).apply_chat_template([]) == "file"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% if %}",
        "{{ messages[0]['role']['x'].y }}",
        None,
    ],
)
def test_a_hostile_or_broken_template_is_an_error_and_nothing_else(tmp_path: Path, template: str | None) -> None:
    """Templates come with models: they may refuse, but neither access Python nor end the server. A model without one
    says so.
    """
    tokenizer = with_template(tmp_path, template)
    assert tokenizer.has_chat_template == (template is not None)
    with pytest.raises(TokenizerError, match="no chat template" if template is None else "template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_the_fingerprint_ignores_how_the_file_is_written(directory: Path, tmp_path: Path) -> None:
    """Key order, indentation, both spellings of merges, absent or false switches, offsets."""
    original = Tokenizer.from_dir(directory)

    def edit(raw: dict[str, Any]) -> None:
        raw["model"]["merges"] = [" ".join(merge) for merge in raw["model"]["merges"]]
        del raw["model"]["fuse_unk"]
        raw["decoder"]["trim_offsets"] = not raw["decoder"]["trim_offsets"]
        for name in reversed(list(raw)):  # in another order
            raw[name] = raw.pop(name)

    rewritten = edited(directory, tmp_path / "rewritten", edit, indent=5)
    assert rewritten.fingerprint == original.fingerprint
    assert original.identity.first_difference(rewritten.identity) is None
    require_same_tokenizer(original, rewritten)


def swap_entries(raw: dict[str, Any]) -> None:
    """Exchanges the ids of two tokens."""
    vocab = raw["model"]["vocab"]
    first, second = (token for token, index in vocab.items() if index in (270, 271))
    vocab[first], vocab[second] = vocab[second], vocab[first]


def swap_merges(raw: dict[str, Any]) -> None:
    """Exchanges the ranks of two merges."""
    merges = raw["model"]["merges"]
    merges[3], merges[4] = merges[4], merges[3]


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (swap_entries, "vocabulary entry 270"),
        (swap_merges, "merges entry 3"),
        (lambda raw: raw.update(normalizer={"type": "NFC"}), "settings.*normalizer.*NFC"),
        (lambda raw: raw["added_tokens"][0].update(special=False), "added tokens entry 0"),
    ],
)
def test_whatever_changes_ids_or_text_changes_the_fingerprint(
    directory: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], None], named: str
) -> None:
    """The refusal names both tokenizers and the first entry that differs."""
    original = Tokenizer.from_dir(directory, name="the-draft")
    other = edited(directory, tmp_path / "the-target", edit)
    assert original.fingerprint != other.fingerprint
    with pytest.raises(TokenizerMismatch, match=f"(?s)the-draft.*the-target.*{named}"):
        require_same_tokenizer(original, other)


def normalizer(**switches: bool | None) -> dict[str, Any]:
    """Of BERT's tokenizers."""
    common = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
    return {"normalizer": {"type": "BertNormalizer", **common, **switches}}


def spaces(**switches: bool) -> dict[str, Any]:
    """The pre-tokenizer of SentencePiece's kind."""
    return {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", **switches}}


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (spaces(), spaces(split=True), True),
        (spaces(), spaces(split=False), False),
        (normalizer(), normalizer(strip_accents=False), False),  # null: as `lowercase`
        (normalizer(lowercase=False), normalizer(lowercase=False, strip_accents=False), True),
    ],
)
def test_a_switch_that_is_off_is_not_taken_for_one_that_is_absent(
    directory: Path, tmp_path: Path, one: dict[str, Any], other: dict[str, Any], is_same: bool
) -> None:
    """Where absent does not mean off; who cuts a text into the same pieces has the same fingerprint."""
    prints, pieces = set(), set()
    for name, parts in (("one", one), ("other", other)):
        prints.add(edited(directory, tmp_path / name, partial(dict.update, **parts)).fingerprint)
        backend = Backend.from_file(str(tmp_path / name / "tokenizer.json"))
        text = backend.normalizer.normalize_str("  é É  x") if "normalizer" in parts else "  é É  x"
        pieces.add(tuple(backend.pre_tokenizer.pre_tokenize_str(text)))
    assert (len(prints) == 1) is is_same and (len(pieces) == 1) is is_same
