"""Grammars: what is compiled, what a state allows, how it follows drafts, forks and the way back, what it may take."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from llguidance import gbnf_to_lark
from tests.engine_harness import refused

from outrider.models.errors import RequestError
from outrider.models.grammar import matchers
from outrider.models.grammar import state as state_module
from outrider.models.grammar.compiler import GrammarCompiler
from outrider.models.grammar.spec import GrammarSpec, with_whitespace
from outrider.models.grammar.state import GrammarState, apply_mask, unpack_mask
from outrider.models.text.tokenizer import Tokenizer

PADDING = 33  # the model's logits are wider than its tokenizer
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
BOB = '{"name":"Bob","age":3}'


def allowed(state: GrammarState, size: int) -> list[int]:
    """The ids that a mask leaves in a row of zeros."""
    row = np.zeros(size, np.float32)
    state.apply(row)
    assert set(np.unique(row).tolist()) <= {0.0, -np.inf}
    return [int(i) for i in np.flatnonzero(row == 0)]


def advance_all(state: GrammarState, tokens: Sequence[int]) -> None:
    for token in tokens:
        assert state.accept(token)


def test_a_whole_text_goes_through_and_then_only_stop_ids_follow(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    """Every token of a valid text is in its mask; after the last one only the end is, and padding ids never are."""
    state, ends = compiler.compile(GrammarSpec.json_schema(PERSON)).state(), list(tokenizer.eos_token_ids)
    size = tokenizer.size + PADDING
    for token in tokenizer.encode(BOB):
        ids = allowed(state, size)
        assert not state.may_stop and token in ids and max(ids) < tokenizer.size and state.accept(token)
    assert state.is_over and state.may_stop and allowed(state, size) == state.forced() == ends
    assert not state.accept(tokenizer.encode("}")[0]) and state.accept(ends[0]) and allowed(state, size) == ends


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (GrammarSpec("regex", r"[0-9]{3}-[a-f]+"), "123-fade", "12-fade"),
        (GrammarSpec("regex", r"^\d+$"), "42", "x"),
        (GrammarSpec.choice(["yes", "no", 'a "quoted"\nline', "日本"]), 'a "quoted"\nline', "maybe"),
        (GrammarSpec.choice(["yes", "no", "日本"]), "日本", "日"),
        (GrammarSpec.choice(["a\x7f\x1f\\u007f"]), "a\x7f\x1f\\u007f", "a\x7f\x1f\x7f"),
        (GrammarSpec("grammar", 'start: "x" expr\nexpr: "(" expr ")" | /[0-9]+/'), "x((7))", "x((7)"),
        (GrammarSpec("grammar", 'root ::= "x" digits\ndigits ::= [0-9]+'), "x12", "y12"),
        (GrammarSpec("json_object"), '{"a":[1,null,{"b":"c"}]}', "[1]"),
        (GrammarSpec.json_schema({"enum": ["red", 7]}), '"red"', '"blue"'),
        (GrammarSpec.json_schema({"type": "array"}, flexible=True), "[1, \n 2]", "[1, 2"),
        (GrammarSpec.json_schema({"type": "array"}), "[1,2]", "[1, 2]"),
        # llguidance 1.7 lets the pattern repeat: it takes "[1,  2]", too.
        (GrammarSpec.json_schema({"type": "array"}, pattern="[ ]?"), "[1, 2]", "[1,\n2]"),
    ],
)
def test_each_kind_allows_its_texts_only(
    spec: GrammarSpec, good: str, bad: str, tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    grammar = compiler.compile(spec)
    for text, is_good in ((good, True), (bad, False)):
        state = grammar.state()
        tokens = tokenizer.encode(text)
        assert (state.validate(tokens) == len(tokens) and all(map(state.accept, tokens)) and state.may_stop) is is_good


@pytest.mark.parametrize("line_breaks", ["\n\n", "\r\n\r\n", "\n \t\n\n"])
def test_lark_and_gbnf_are_told_apart_without_the_librarys_pattern(
    line_breaks: str, tokenizer: Tokenizer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time grows with the square of line breaks. They stay: in a regular expression they are text."""
    texts = [
        text.replace("~", line_breaks)
        for text in (
            "// x~start: /a~b/",
            "~ start : /a~b/",
            "%llguidance {}~start: /a~b/",
            "# start~root ::= [~ab]+",
            "~root ::= started~started ::= [~ab]+",
        )
    ]
    assert [matchers._lark_of(text) for text in texts] == [gbnf_to_lark.any_to_lark(text) for text in texts]
    monkeypatch.setattr(gbnf_to_lark, "is_lark_syntax", None)
    good = tokenizer.encode(f"a{line_breaks}b")
    for text in texts:
        assert compiler.compile(GrammarSpec("grammar", text)).state().validate(good) == len(good)
    with refused("invalid_grammar", match="Expected name"):
        compiler.compile(GrammarSpec("grammar", 'root ::= "a"' + line_breaks * 1_000 + "}"))


def test_the_way_back_leads_to_the_same_masks(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """Truncating to any length, past the stop id too, is the same as never having gone on."""
    grammar = compiler.compile(GrammarSpec.json_schema(PERSON))
    tokens = [*tokenizer.encode(BOB), *tokenizer.eos_token_ids[:1]]
    fresh, state, masks_on_the_way = grammar.state(), grammar.state(), []
    for token in tokens:
        masks_on_the_way.append(allowed(fresh, tokenizer.size))
        assert fresh.accept(token)
    for length in (3, 0, len(tokens), len(tokens) - 1, 5, len(tokens) - 2, 1):
        state.truncate(min(length, state.length))
        advance_all(state, tokens[state.length : length])
        assert state.length == length and (not state.is_over or length >= len(tokens) - 1)
        assert length == len(tokens) or allowed(state, tokenizer.size) == masks_on_the_way[length]


def test_forks_of_a_tree_do_not_touch_each_other(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """Siblings go their own ways, back beyond the place where they parted, while their parent stays."""
    parent = compiler.compile(GrammarSpec.choice(["red apple", "red plum", "green apple"])).state()
    at_root = allowed(parent, tokenizer.size)
    left, right = parent.fork(), parent.fork()
    advance_all(left, tokenizer.encode("red plum"))
    advance_all(right, tokenizer.encode("green"))
    assert left.is_over and not right.may_stop and allowed(parent, tokenizer.size) == at_root
    twin = right.fork()
    twin.truncate(0)
    advance_all(twin, tokenizer.encode("red apple"))
    advance_all(right, tokenizer.encode(" apple"))
    assert twin.is_over and right.is_over and parent.length == 0


def test_forced_tokens_are_listed_and_are_allowed(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """What no choice is left for costs the draft nothing; listing it changes nothing."""
    state = compiler.compile(GrammarSpec.json_schema(PERSON)).state()
    forced = state.forced()
    assert tokenizer.decode(forced) == '{"name":' and state.length == 0
    for token in forced:
        assert token in allowed(state, tokenizer.size) and state.accept(token)


def test_a_text_may_stop_where_the_grammar_accepts(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """A complete text that could go on takes both: more, or the end."""
    state = compiler.compile(GrammarSpec("regex", "[0-9]+")).state()
    stop = tokenizer.eos_token_ids[0]
    assert not state.accept(stop) and state.validate([stop]) == 0
    advance_all(state, tokenizer.encode("1"))
    assert not state.is_over and state.may_stop and stop in allowed(state, tokenizer.size)
    assert state.validate([*tokenizer.encode("2"), stop, stop, *tokenizer.encode("3")]) == 3


def test_a_model_without_stop_ids_ends_by_is_over(tokenizer: Tokenizer) -> None:
    """The library's own end tokens are not allowed where the model has none."""
    with closing(GrammarCompiler(tokenizer, tokenizer.size, ())) as compiler:
        state = compiler.compile(GrammarSpec("regex", "ab?")).state()
        advance_all(state, tokenizer.encode("a"))
        assert not set(allowed(state, tokenizer.size)) & set(tokenizer.special_ids)
        advance_all(state, tokenizer.encode("b"))
        assert state.is_over and state.forced() == []


def test_special_tokens_are_never_allowed_inside(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """A draft's special token in the middle of a text ends nothing and breaks nothing (vLLM 46118)."""
    state = compiler.compile(GrammarSpec("regex", '"(?s:.)*"')).state()
    advance_all(state, tokenizer.encode('"x'))
    special = min(tokenizer.special_ids)
    assert special not in allowed(state, tokenizer.size)
    assert state.validate([*tokenizer.encode("y"), special, *tokenizer.encode("z")]) == 1 and not state.accept(special)
    advance_all(state, tokenizer.encode('y"'))
    assert state.may_stop


def test_a_token_outside_leaves_the_state_usable(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """A refused token changes nothing, also one that no tokenizer has (vLLM 44006: it advanced the matcher)."""
    state = compiler.compile(GrammarSpec.json_schema(PERSON)).state()
    advance_all(state, tokenizer.encode('{"name":"'))
    before = allowed(state, tokenizer.size)
    for wrong in (tokenizer.encode("\n")[0], -1, tokenizer.size + 3, 1 << 40):
        assert not state.accept(wrong) and state.validate([wrong]) == 0
    assert allowed(state, tokenizer.size) == before


def test_a_grammar_that_ends_inside_drafted_tokens(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """Tokens drafted past the end are refused one by one, and the way back works (vLLM 42619, 54437)."""
    state = compiler.compile(GrammarSpec.choice(["yes", "no"])).state()
    tokens, stop = tokenizer.encode("yes"), tokenizer.eos_token_ids[0]
    drafted = [*tokens, stop, *tokens, stop]
    assert state.validate(drafted) == len(tokens) + 1
    assert sum(1 for _ in iter(lambda: state.accept(drafted[state.length]), False)) == len(tokens) + 1
    state.truncate(0)
    assert state.validate(tokenizer.encode("no")) == len(tokenizer.encode("no"))


def test_a_grammar_begins_inside_drafted_tokens(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """Tokens drafted after the end of the reasoning are checked, before it any token is free (vLLM 36138)."""
    (marker,), (letter,), free = tokenizer.encode("class"), tokenizer.encode("x"), tokenizer.encode("if x: ")
    state = compiler.compile(GrammarSpec("regex", "[0-9]+", after=tokenizer.token(marker) or "")).state()
    assert marker not in free and state.validate([*free, marker, *tokenizer.encode("12"), letter]) == len(free) + 2
    assert max(allowed(state, tokenizer.size + PADDING)) == tokenizer.size - 1
    advance_all(state, [*free, marker, *tokenizer.encode("1")])
    assert not state.accept(letter)
    state.truncate(len(free))
    assert state.accept(letter)  # the marker is gone with what was rolled back
    assert state.accept(marker) and not state.accept(letter)
    with pytest.raises(RequestError, match="no token of the model"):
        compiler.compile(GrammarSpec("regex", "a", after="</think never heard of>"))


def test_a_grammar_waits_only_where_its_opener_comes_first(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """A model that may reason: a text without the opener is held to the grammar from its first token on."""
    opener, marker, digit, letter = (tokenizer.encode(word)[0] for word in ("def", "class", "1", "x"))
    names = {"after": tokenizer.token(marker) or "", "opener": tokenizer.token(opener) or ""}
    state = compiler.compile(GrammarSpec("regex", "[0-9]+", **names)).state()
    first = allowed(state, tokenizer.size + PADDING)
    assert opener in first and digit in first and letter not in first and not state.forced()
    drafts = [opener, letter, opener, marker, digit, letter], [digit, opener]
    assert [state.validate(draft) for draft in drafts] == [5, 1]
    advance_all(state.fork(), [opener, letter, marker, digit])
    advance_all(state, [opener, letter])
    state.truncate(1)
    assert state.accept(letter)
    state.truncate(0)
    assert allowed(state, tokenizer.size + PADDING) == first and not state.accept(letter)
    advance_all(state, [digit])
    assert opener not in allowed(state, tokenizer.size + PADDING)
    assert GrammarSpec.of_wire(GrammarSpec("regex", "a", **names).to_wire()) == GrammarSpec("regex", "a", **names)
    assert GrammarSpec("regex", "a", **names).hash != GrammarSpec("regex", "a", after=names["after"]).hash
    assert GrammarSpec.checked("regex", "1", **names) == GrammarSpec("regex", "1", **names)
    with pytest.raises(RequestError, match="`opener` without `after`"):
        GrammarSpec("regex", "a", opener="def")


async def test_a_client_that_leaves_frees_its_turn(compiler: GrammarCompiler) -> None:
    work = asyncio.ensure_future(compiler.compile_for(GrammarSpec("regex", "left+"), "leaver"))
    await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert await compiler.compile_for(GrammarSpec("regex", "stayed+"), "leaver")


def test_equal_specs_have_one_hash() -> None:
    first, same, other, after = (GrammarSpec("regex", *rest).hash for rest in (("a",), ("a",), ("b",), ("a", "x")))
    assert first == same == "fc8ff67ee32ded7de9f8c17d45579af82c1fdf58be5859708d4d670e90b93764"
    assert len({first, other, after}) == 3


def test_a_schema_keeps_its_own_whitespace() -> None:
    own = {"type": "object", "x-guidance": {"whitespace_flexible": True}}
    assert with_whitespace(own, flexible=False) == own
    assert with_whitespace({}, flexible=False, lenient=True) == {
        "x-guidance": {"whitespace_flexible": False, "lenient": True}
    }
    assert with_whitespace(True, flexible=False) is True


@pytest.mark.parametrize("density", [0.0005, 0.6])
def test_masks_of_few_and_of_many_tokens_are_applied_alike(density: float) -> None:
    rng = np.random.default_rng(1)
    bits = rng.random(20_000) < density
    packed = bytes(np.packbits(bits, bitorder="little"))
    for size in (19_937, 20_000, 20_500):
        row = rng.standard_normal(size).astype(np.float32)
        is_allowed = np.append(bits, np.zeros(500, np.bool_))[:size]
        expected = np.where(is_allowed, row, -np.inf)
        assert apply_mask(packed, row) == is_allowed.sum() and np.array_equal(row, expected)
        assert np.array_equal(unpack_mask(packed, size), is_allowed)


# -- what a text's grammar may take while it is used, by a clock of the test's own ---------------------------------

DIGITS = GrammarSpec("regex", "[0-9]+")


class Clock:
    """Goes on by a step each time that it is read: so much each call of the library takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step_s = self._now_s = 0.0
        monkeypatch.setattr(state_module, "time", SimpleNamespace(thread_time=self._read))

    def _read(self) -> float:
        self._now_s += self.step_s
        return self._now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_long_text_is_resumed_in_a_fraction_of_a_second_or_not(
    tokenizer: Tokenizer, compiler: GrammarCompiler, clock: Clock
) -> None:
    text = tokenizer.encode("7")[:1] * 5_000
    grammar = compiler.compile(DIGITS)
    clock.step_s = 5e-6  # JSON's
    state = grammar.state()
    state.replay(text)
    assert state.length == 5_000
    clock.step_s = 1e-4
    slow = grammar.state()
    with refused("grammar_too_complex", match="takes too long"):
        slow.replay(text)
    assert slow.length < 4_000 and slow.cost._free_s == state_module.FREE_S


def test_copies_count_and_pay_for_nothing(tokenizer: Tokenizer, compiler: GrammarCompiler, clock: Clock) -> None:
    """The library keeps all that it has read, and copies all of it: with drafts, at every step."""
    state = compiler.compile(DIGITS).state()
    state.replay(tokenizer.encode("7")[:1] * 1_000)
    clock.step_s = 0.1
    state.fork()
    spent_s = state.cost._excess_s
    assert spent_s == pytest.approx(0.1 - state_module.FREE_S - 1_000 * state_module.FREE_COPY_S)
    clock.step_s = 0.0
    state.fork()
    assert state.cost._excess_s == spent_s
    clock.step_s = 0.1
    state.fork()
    state.fork()
    with refused("grammar_too_complex", match="takes too long"):
        state.fork()


@pytest.mark.parametrize("is_timed", [True, False])
def test_a_text_of_which_the_library_keeps_too_much_ends(
    is_timed: bool, tokenizer: Tokenizer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no engine copies it. One copy that is quick is enough to go on."""
    monkeypatch.setattr(state_module, "COPY_EVERY", 4)
    took_s = iter([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    monkeypatch.setattr(state_module, "_copied", lambda matcher, length: (None, next(took_s)))
    state = replace(compiler.compile(DIGITS), is_timed=is_timed).state()
    for _ in range(8):
        state.mask(tokenizer.size)
        assert state.accept(tokenizer.encode("7")[0])
    if is_timed:
        with refused("grammar_too_complex", match="memory after 8 tokens"):
            state.mask(tokenizer.size)
    else:
        assert state.mask(tokenizer.size).any()
