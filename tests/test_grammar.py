"""Grammars: what is compiled, what a state allows, and how it follows drafts, forks and the way back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from outrider.models.errors import RequestError
from outrider.models.grammar import bounds
from outrider.models.grammar import matchers as matchers_module
from outrider.models.grammar import state as state_module
from outrider.models.grammar.compiler import (
    MAX_CACHED_PER_OWNER,
    MAX_CLIENTS,
    MAX_STRIKES,
    MAX_WAITING,
    STRIKE_S,
    CompiledGrammar,
    GrammarCompiler,
    Strikes,
)
from outrider.models.grammar.matchers import Matchers
from outrider.models.grammar.spec import GrammarSpec, with_whitespace
from outrider.models.grammar.state import GrammarState, apply_mask, unpack_mask
from outrider.models.text.tokenizer import Tokenizer
from outrider.reference import target_dir

PADDING = 33  # the model's logits are wider than its tokenizer
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
BOB = '{"name":"Bob","age":3}'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(target_dir())


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tokenizer, tokenizer.size + PADDING, tokenizer.eos_token_ids)
    yield made
    made.close()


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
    state = compiler.compile(GrammarSpec.json_schema(PERSON)).state()
    size = tokenizer.size + PADDING
    for token in tokenizer.encode(BOB):
        assert not state.may_stop
        assert token in allowed(state, size)
        assert max(allowed(state, size)) < tokenizer.size
        assert state.accept(token)
    assert state.is_over and state.may_stop
    assert allowed(state, size) == list(tokenizer.eos_token_ids)
    assert state.forced() == list(tokenizer.eos_token_ids)
    assert not state.accept(tokenizer.encode("}")[0])
    assert state.accept(tokenizer.eos_token_ids[0])
    assert allowed(state, size) == list(tokenizer.eos_token_ids)


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (GrammarSpec("regex", r"[0-9]{3}-[a-f]+"), "123-fade", "12-fade"),
        (GrammarSpec("regex", r"^\d+$"), "42", "x"),
        (GrammarSpec.choice(["yes", "no", 'a "quoted"\nline', "日本"]), 'a "quoted"\nline', "maybe"),
        (GrammarSpec.choice(["yes", "no", "日本"]), "日本", "日"),
        (GrammarSpec("grammar", 'start: "x" expr\nexpr: "(" expr ")" | /[0-9]+/'), "x((7))", "x((7)"),
        (GrammarSpec("grammar", 'root ::= "x" digits\ndigits ::= [0-9]+'), "x12", "y12"),
        (GrammarSpec("json_object"), '{"a":[1,null,{"b":"c"}]}', "[1]"),
        (GrammarSpec.json_schema({"enum": ["red", 7]}), '"red"', '"blue"'),
        (GrammarSpec.json_schema({"type": "array"}, flexible=True), "[1, \n 2]", "[1, 2"),
        (GrammarSpec.json_schema({"type": "array"}), "[1,2]", "[1, 2]"),
        (GrammarSpec.json_schema({"type": "array"}, pattern="[ ]?"), "[1, 2]", "[1,  2]"),
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


def test_the_way_back_leads_to_the_same_masks(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """Truncating to any length, past the stop id too, is the same as never having gone on."""
    grammar = compiler.compile(GrammarSpec.json_schema(PERSON))
    tokens = [*tokenizer.encode(BOB), *tokenizer.eos_token_ids[:1]]
    fresh = grammar.state()
    masks_on_the_way = []
    for token in tokens:
        masks_on_the_way.append(allowed(fresh, tokenizer.size))
        assert fresh.accept(token)
    state = grammar.state()
    for length in (3, 0, len(tokens), len(tokens) - 1, 5, len(tokens) - 2, 1):
        state.truncate(min(length, state.length))
        advance_all(state, tokens[state.length : length])
        assert state.length == length
        if length < len(tokens):
            assert allowed(state, tokenizer.size) == masks_on_the_way[length]
            assert not state.is_over or length == len(tokens) - 1


def test_forks_of_a_tree_do_not_touch_each_other(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """Siblings go their own ways, back beyond the place where they parted, while their parent stays."""
    parent = compiler.compile(GrammarSpec.choice(["red apple", "red plum", "green apple"])).state()
    at_root = allowed(parent, tokenizer.size)
    left, right = parent.fork(), parent.fork()
    advance_all(left, tokenizer.encode("red plum"))
    advance_all(right, tokenizer.encode("green"))
    assert left.is_over and not right.may_stop
    assert allowed(parent, tokenizer.size) == at_root
    twin = right.fork()
    twin.truncate(0)
    advance_all(twin, tokenizer.encode("red apple"))
    advance_all(right, tokenizer.encode(" apple"))
    assert twin.is_over and right.is_over and parent.length == 0


def test_forced_tokens_are_listed_and_are_allowed(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """What no choice is left for costs the draft nothing; listing it changes nothing."""
    state = compiler.compile(GrammarSpec.json_schema(PERSON)).state()
    forced = state.forced()
    assert tokenizer.decode(forced) == '{"name":'
    assert state.length == 0
    for token in forced:
        assert allowed(state, tokenizer.size).count(token) == 1
        assert state.accept(token)


def test_a_text_may_stop_where_the_grammar_accepts(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """A complete text that could go on takes both: more, or the end."""
    state = compiler.compile(GrammarSpec("regex", "[0-9]+")).state()
    stop = tokenizer.eos_token_ids[0]
    assert not state.accept(stop) and state.validate([stop]) == 0
    advance_all(state, tokenizer.encode("1"))
    assert not state.is_over and state.may_stop
    assert stop in allowed(state, tokenizer.size)
    assert state.validate([*tokenizer.encode("2"), stop, stop, *tokenizer.encode("3")]) == 3


def test_a_model_without_stop_ids_ends_by_is_over(tokenizer: Tokenizer) -> None:
    """The library's own end tokens are not allowed where the model has none."""
    compiler = GrammarCompiler(tokenizer, tokenizer.size, ())
    state = compiler.compile(GrammarSpec("regex", "ab?")).state()
    advance_all(state, tokenizer.encode("a"))
    assert not set(allowed(state, tokenizer.size)) & set(tokenizer.special_ids)
    advance_all(state, tokenizer.encode("b"))
    assert state.is_over and state.forced() == []
    compiler.close()


def test_special_tokens_are_never_allowed_inside(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """A draft's special token in the middle of a text ends nothing and breaks nothing (vLLM 46118)."""
    state = compiler.compile(GrammarSpec("regex", '"(?s:.)*"')).state()
    advance_all(state, tokenizer.encode('"x'))
    special = min(tokenizer.special_ids)
    assert special not in allowed(state, tokenizer.size)
    assert state.validate([*tokenizer.encode("y"), special, *tokenizer.encode("z")]) == 1
    assert not state.accept(special)
    advance_all(state, tokenizer.encode('y"'))
    assert state.may_stop


def test_a_token_outside_leaves_the_state_usable(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """A refused token changes nothing, also one that no tokenizer has (vLLM 44006: it advanced the matcher)."""
    state = compiler.compile(GrammarSpec.json_schema(PERSON)).state()
    advance_all(state, tokenizer.encode('{"name":"'))
    before = allowed(state, tokenizer.size)
    for wrong in (tokenizer.encode("\n")[0], -1, tokenizer.size + 3, 1 << 40):
        assert not state.accept(wrong)
        assert state.validate([wrong]) == 0
    assert allowed(state, tokenizer.size) == before


def test_a_grammar_that_ends_inside_drafted_tokens(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """Tokens drafted past the end are refused one by one, and the way back works (vLLM 42619, 54437)."""
    state = compiler.compile(GrammarSpec.choice(["yes", "no"])).state()
    stop = tokenizer.eos_token_ids[0]
    tokens = tokenizer.encode("yes")
    drafted = [*tokens, stop, *tokenizer.encode("yes"), stop]
    assert state.validate(drafted) == len(tokens) + 1
    accepted = sum(1 for _ in iter(lambda: state.accept(drafted[state.length]), False))
    assert accepted == len(tokens) + 1
    state.truncate(0)
    assert state.validate(tokenizer.encode("no")) == len(tokenizer.encode("no"))


def test_a_grammar_begins_inside_drafted_tokens(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """Tokens drafted after the end of the reasoning are checked, before it any token is free (vLLM 36138)."""
    after = tokenizer.token(tokenizer.encode("class")[0]) or ""
    state = compiler.compile(GrammarSpec("regex", "[0-9]+", after=after)).state()
    (marker,) = tokenizer.encode("class")
    free = tokenizer.encode("if x: ")
    assert marker not in free
    assert state.validate([*free, marker, *tokenizer.encode("12"), *tokenizer.encode("x")]) == len(free) + 2
    assert max(allowed(state, tokenizer.size + PADDING)) == tokenizer.size - 1
    advance_all(state, [*free, marker, *tokenizer.encode("1")])
    assert not state.accept(tokenizer.encode("x")[0])
    state.truncate(len(free))
    assert state.accept(tokenizer.encode("x")[0])  # the marker is gone with what was rolled back
    assert state.accept(marker) and not state.accept(tokenizer.encode("x")[0])
    with pytest.raises(RequestError, match="no token of the model"):
        compiler.compile(GrammarSpec("regex", "a", after="</think never heard of>"))


def test_a_grammar_waits_only_where_its_opener_comes_first(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """A model that may reason: a text without the opener is held to the grammar from its first token on."""
    (opener,), (marker,) = tokenizer.encode("def"), tokenizer.encode("class")
    digit, letter = tokenizer.encode("1")[0], tokenizer.encode("x")[0]
    names = {"after": tokenizer.token(marker) or "", "opener": tokenizer.token(opener) or ""}
    state = compiler.compile(GrammarSpec("regex", "[0-9]+", **names)).state()
    first = allowed(state, tokenizer.size + PADDING)
    assert opener in first and digit in first and letter not in first and not state.forced()
    assert state.validate([opener, letter, opener, marker, digit, letter]) == 5
    assert state.validate([digit, opener]) == 1
    advance_all(state.fork(), [opener, letter, marker, digit])
    advance_all(state, [opener, letter])
    state.truncate(1)
    assert state.accept(letter)
    state.truncate(0)
    assert allowed(state, tokenizer.size + PADDING) == first and not state.accept(letter)
    advance_all(state, [digit])
    assert opener not in allowed(state, tokenizer.size + PADDING)
    wire = GrammarSpec("regex", "a", **names).to_wire()
    assert GrammarSpec.of_wire(wire) == GrammarSpec("regex", "a", **names)
    assert GrammarSpec("regex", "a", **names).hash != GrammarSpec("regex", "a", after=names["after"]).hash
    with pytest.raises(RequestError, match="`opener` without `after`"):
        GrammarSpec("regex", "a", opener="def")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (("json_schema", "{"), "not JSON"),
        (("json_schema", "[]"), "expected an object"),
        (("json_schema", '{"type":"strin"}'), "Invalid type: strin"),
        (("json_schema", '{"type":"array","uniqueItems":true}'), "uniqueItems"),
        (("json_schema", '{"const":NaN}'), "NaN"),
        (("json_schema", '{"$ref":"https://example.com/schema"}'), "example.com"),
        (("json_schema", '{"$ref":"#"}'), "refused"),
        (("json_object", "{}"), "no text"),
        (("regex", "(a"), "unclosed group"),
        (("regex", ""), "empty"),
        (("regex", "\ud800"), "surrogate"),
        (("grammar", "start: x"), "unknown name"),
        (("grammar", '{"grammars":[]}'), "begins with"),
        (("choice", "[]"), "at least one"),
        (("choice", '["a",""]'), "none of them empty"),
        (("sql", "select"), "expected one of"),
    ],
)
def test_a_bad_grammar_is_refused_by_name(spec: tuple[Any, str], message: str, compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match=message) as refusal:
        compiler.compile(GrammarSpec(*spec))
    assert refusal.value.code == "invalid_grammar" and refusal.value.status == 400
    assert len(str(refusal.value)) < 500


def nested(depth: int) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def chain(length: int) -> Any:
    """A definition that refers to the next one, and so on: the library recurses along them."""
    defs: Any = {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(length)}
    return {"$defs": {**defs, f"a{length}": {"type": "null"}}, "$ref": "#/$defs/a0"}


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json_schema", json.dumps({"enum": ["x" * 66_000]}), "bytes"),
        ("regex", "a" * 17_000, "bytes"),
        ("json_schema", json.dumps(nested(100)), "levels deep"),
        ("json_schema", json.dumps(chain(900)), "levels deep"),
        ("json_schema", json.dumps({"properties": {f"p{i}": {} for i in range(501)}}), "501 properties"),
        ("json_schema", '{"type":"integer","multipleOf":999983}', "multipleOf is 999983"),
        ("json_schema", '{"type":"number","multipleOf":0.000123457}', "multipleOf is 123457"),
        ("json_schema", '{"multipleOf":1,"multipleOf":1e300}', "multipleOf"),
        ("grammar", "start: A0\n" + "".join(f"A{i}: ~A{i + 1}\n" for i in range(300)) + 'A300: "x"', "301|302 rules"),
        ("grammar", 'start: %json {"type":"integer","multipl\\u0065Of":999983}', "multipleOf is 999983"),
        (
            "grammar",
            "start: "
            + "".join(f"%json {json.dumps({'properties': {f'p{i}': {} for i in range(500)}})} " for _ in "abcde"),
            "2,500 properties",
        ),
        ("grammar", 'start: "' + "x" * 17_000 + '"', "bytes besides its schemas"),
        ("choice", json.dumps([str(i) for i in range(3000)]), "3,000 choices"),
    ],
)
def test_a_costly_grammar_is_refused(kind: Any, text: str, message: str, compiler: GrammarCompiler) -> None:
    """These took seconds or ended the process before they were bounded."""
    with pytest.raises(RequestError, match=message):
        compiler.compile(GrammarSpec(kind, text))


def test_a_grammar_that_grows_beyond_its_limits_fails_by_name(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """Its own text ends with an error, and nothing hangs: the automaton of this one doubles with every token."""
    state = compiler.compile(GrammarSpec("regex", ".*[a-m].{200}[n-z].{100}")).state()
    rng = np.random.default_rng(0)
    with pytest.raises(RequestError) as refusal:
        for _ in range(500):
            row = rng.standard_normal(tokenizer.size).astype(np.float32)
            state.apply(row)
            state.accept(int(row.argmax()))
    assert refusal.value.code == "grammar_too_complex"


GROWING = GrammarSpec("regex", "(.*[a-m].{12}[n-z].*)")
"""A text of 300 tokens adds some 6,000 states to the lexer, which may have 10,000."""


def walked(state: GrammarState, seed: int, count: int) -> list[int]:
    """A random text that does not end."""
    rng, text = np.random.default_rng(seed), []
    vocabulary = state._vocabulary
    for _ in range(count):
        row = rng.standard_normal(vocabulary.num_tokens).astype(np.float32)
        row[list(vocabulary.stop_ids)] = -9.0
        state.apply(row)
        text.append(int(row.argmax()))
        assert state.accept(text[-1])
    return text


@pytest.fixture
def fresh(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    """A compiler that has seen nothing."""
    with closing(GrammarCompiler(tokenizer, tokenizer.size + 7, tokenizer.eos_token_ids)) as compiler:
        yield compiler


def worn(grammar: CompiledGrammar) -> None:
    """Fills the lexer that the grammar's texts share: a copy of its matcher can do nothing any more."""
    assert isinstance(grammar.matchers, Matchers)
    matcher = grammar.matchers.current.deep_copy()
    rng, size = np.random.default_rng(9), grammar.vocabulary.num_tokens
    while not matcher.is_error():
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:size]
        row = np.where(bits, rng.standard_normal(size), -np.inf)
        row[list(grammar.stop_ids)] = -np.inf
        if not matcher.is_error() and matcher.try_consume_tokens([int(row.argmax())]) != 1:
            matcher.compute_bitmask()  # a limit that is reached while a token is read looks like a refusal


def test_a_text_never_fails_for_what_earlier_texts_have_met(fresh: GrammarCompiler) -> None:
    """All copies of a matcher share its lexer: once, the third of these texts failed at its first token."""
    grammar = fresh.compile(GROWING, "crowd")
    origins, states = [], []
    for seed in range(6):
        state = grammar.state()
        text = walked(state, seed, 200)
        assert walked(fresh.compile(GROWING, f"alone {seed}").state(), seed, 200) == text
        # A text that has changed its lexer on the way goes back and on as before.
        state.truncate(150)
        assert state.length == 150 and all(state.accept(token) for token in text[150:])
        origins.append(state._origin)
        states.append(state)
    assert len({id(origin) for origin in origins}) > 1
    # Texts that began on the first lexer go on, too, and so do their forks.
    for state in states:
        assert walked(state.fork(), 7, 20) == walked(state, 7, 20)


def test_a_full_lexer_refuses_no_token(fresh: GrammarCompiler) -> None:
    """Reading, validating and resuming find out that it is full, though the library reports a refusal only."""
    text = walked(fresh.compile(GROWING, "alone").state(), 3, 100)
    for owner in ("advance", "validate", "replay", "go back", "forced"):
        grammar = fresh.compile(GROWING, owner)
        begun = grammar.state()
        assert all(begun.accept(token) for token in text[:50])
        worn(grammar)
        match owner:
            case "advance":
                assert all(begun.accept(token) for token in text[50:])
            case "validate":
                assert begun.validate(text[50:]) == 50
            case "replay":
                rows = grammar.state()
                rows.replay(text)
                assert rows.length == 100
            case "go back":
                begun.truncate(20)
                assert all(begun.accept(token) for token in text[20:])
            case "forced":
                assert begun.forced() == []
        assert not grammar.matchers.is_worn_out


def test_a_costly_grammar_that_wears_out_ends_by_name(fresh: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not compiled while its texts wait. The next request has it compiled; never does a text end as if whole."""
    monkeypatch.setattr(matchers_module, "MAX_AGAIN_S", -1.0)
    grammar = fresh.compile(GROWING)
    state = grammar.state()
    walked(state, 1, 50)
    worn(grammar)
    for ask in (lambda: state.apply(np.zeros(4096, np.float32)), lambda: state.accept(5), lambda: state.validate([5])):
        with pytest.raises(RequestError) as refusal:
            ask()
        assert refusal.value.code == "grammar_too_complex"
    assert grammar.matchers.is_worn_out
    again = fresh.compile(GROWING)
    assert again.matchers is not grammar.matchers and walked(again.state(), 0, 50)


@pytest.mark.parametrize("is_costly", [False, True])
def test_a_lexer_that_grows_fast_is_left_to_its_texts(
    is_costly: bool, fresh: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New texts get another, unless that would take long. The time that texts take is what counts."""
    matchers = fresh.compile(GROWING).matchers
    assert isinstance(matchers, Matchers)
    first, monkeypatched = matchers.current, -1.0 if is_costly else matchers_module.MAX_AGAIN_S
    monkeypatch.setattr(matchers_module, "MAX_AGAIN_S", monkeypatched)
    monkeypatch.setattr(state_module, "FREE_S", 9.0)
    before = fresh.compile(GROWING).state()
    text = walked(before, 3, 5)
    assert matchers.current is first
    monkeypatch.setattr(state_module, "FREE_S", -0.03)  # each of four calls counts as more
    walked(fresh.compile(GROWING).state(), 4, 2)
    monkeypatch.setattr(state_module, "FREE_S", 9.0)
    assert matchers.is_usable == is_costly
    assert (fresh.compile(GROWING).matchers is matchers) == is_costly
    assert (matchers.current is first) == is_costly  # as vLLM's workers ask
    assert walked(fresh.compile(GROWING).state(), 3, 5) == text
    before.truncate(1)
    assert all(before.accept(token) for token in text[1:])


def test_a_text_is_not_blamed_for_what_others_filled(fresh: GrammarCompiler) -> None:
    """The lexer that a text goes on with may be full of others' states, too: then there is another one."""
    grammar = fresh.compile(GROWING)
    blamed: list[str] = []
    first, second = (replace(grammar, excess=partial(blamed.append, name)).state() for name in ("first", "second"))
    texts = walked(first, 1, 20), walked(second, 2, 20)
    worn(grammar)
    walked(first, 3, 5)  # gets the second lexer
    worn(grammar)
    rest = walked(second, 4, 5)  # gets the third one
    truth = fresh.compile(GrammarSpec(GROWING.kind, GROWING.text, after="")).state()
    assert truth.validate([*texts[1], *rest]) == 25 and not blamed


def test_a_text_that_fills_a_lexer_alone_ends_by_name(fresh: GrammarCompiler) -> None:
    """Read again by a new lexer, it comes to the same limit. It never ends as if it were whole."""
    state = fresh.compile(GROWING).state()
    with pytest.raises(RequestError) as refusal:
        walked(state, 0, 5_000)
    assert refusal.value.code == "grammar_too_complex" and state.length > 1_000


@pytest.mark.parametrize("schema", [nested(40), chain(100), {"enum": ["x" * 60_000]}])
def test_what_is_within_the_bounds_compiles(schema: Any, compiler: GrammarCompiler) -> None:
    assert compiler.compile(GrammarSpec.json_schema(schema)).state().forced()


def test_a_grammar_is_compiled_once_per_owner(compiler: GrammarCompiler) -> None:
    """An owner learns nothing from the time that another's grammar takes, and pushes none of another's out."""
    spec = GrammarSpec("regex", "once+")
    first = compiler.compile(spec, "ann")
    assert compiler.compile(spec, "ann").matchers is first.matchers
    assert compiler.find(spec, "bob") is None and compiler.find(spec, "ann", b"salt") is None
    for i in range(MAX_CACHED_PER_OWNER + 3):
        compiler.compile(GrammarSpec("regex", f"b{i}"), "bob")
    assert compiler.compile(spec, "ann").matchers is first.matchers
    assert compiler.find(GrammarSpec("regex", "b0"), "bob") is None


def test_compiling_takes_turns_and_has_a_bound(compiler: GrammarCompiler) -> None:
    """One owner's flood is refused beyond a few; another's grammar waits for one of them at most."""
    flood = [GrammarSpec("regex", f"flood{i}+") for i in range(MAX_WAITING + 8)]
    done = []

    async def compile_one(spec: GrammarSpec, owner: str) -> CompiledGrammar:
        compiled = await compiler.compile_for(spec, owner)
        done.append(owner)
        return compiled

    async def run() -> list[CompiledGrammar | BaseException]:
        return await asyncio.gather(
            *(compile_one(spec, "flood") for spec in flood),
            compile_one(GrammarSpec("regex", "calm"), "calm"),
            return_exceptions=True,
        )

    results = asyncio.run(run())
    refused = [r for r in results if isinstance(r, RequestError)]
    assert [r.code for r in refused] == ["too_many_grammars"] * (8 - 1)
    assert not isinstance(results[-1], BaseException)
    assert done.index("calm") <= 1
    assert asyncio.run(compiler.compile_for(flood[-1], "flood")).spec == flood[-1]


def test_one_client_behind_an_owner_does_not_stop_the_others(compiler: GrammarCompiler) -> None:
    """A cascade's middle sends a salt for each of its clients. What one uses up another still has; not for ever."""
    flood = [GrammarSpec("regex", f"salted{i}+") for i in range(MAX_WAITING + 4)]

    async def run() -> list[CompiledGrammar | BaseException]:
        asked = [compiler.compile_for(spec, "mid", b"one") for spec in flood]
        calm = compiler.compile_for(GrammarSpec("regex", "calm2"), "mid", b"two")
        return await asyncio.gather(*asked, calm, return_exceptions=True)

    *results, calm = asyncio.run(run())
    assert sum(isinstance(each, RequestError) for each in results) == 3 and isinstance(calm, CompiledGrammar)
    strikes = Strikes(lambda: 5.0)
    for _ in range(MAX_STRIKES):
        strikes.add(("mid", b"one"))
    assert strikes.seconds_left(("mid", b"one")) == STRIKE_S
    assert strikes.seconds_left(("mid", b"two")) == strikes.seconds_left(("other", b"one")) == 0.0
    for salt in range(MAX_STRIKES * (MAX_CLIENTS - 1)):
        strikes.add(("mid", b"%d" % salt))
    assert strikes.seconds_left(("mid", b"two")) == STRIKE_S and not strikes.seconds_left(("other", b"two"))


def test_a_client_that_leaves_frees_its_turn(compiler: GrammarCompiler) -> None:
    async def run() -> CompiledGrammar:
        work = asyncio.ensure_future(compiler.compile_for(GrammarSpec("regex", "left+"), "leaver"))
        await asyncio.sleep(0)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        return await compiler.compile_for(GrammarSpec("regex", "stayed+"), "leaver")

    assert asyncio.run(run())


def test_equal_specs_have_one_hash() -> None:
    a = GrammarSpec("regex", "a")
    assert a.hash == GrammarSpec("regex", "a").hash and len(a.hash) == 64
    assert len({a.hash, GrammarSpec("regex", "b").hash, GrammarSpec("regex", "a", "x").hash}) == 3
    assert a.hash == "fc8ff67ee32ded7de9f8c17d45579af82c1fdf58be5859708d4d670e90b93764"


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
        kept = row.copy()
        is_allowed = np.zeros(size, np.bool_)
        is_allowed[: min(size, bits.size)] = bits[:size]
        assert apply_mask(packed, row) == is_allowed.sum()
        assert np.array_equal(row, np.where(is_allowed, kept, -np.inf))
        assert np.array_equal(unpack_mask(packed, size), is_allowed)


def test_a_text_whose_grammar_takes_too_long_ends(
    tokenizer: Tokenizer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processor time; the third such text of an owner within a minute is the last for a while."""
    spec = GrammarSpec("regex", "[0-9]+")
    digit = tokenizer.encode("7")[0]
    for strike in range(MAX_STRIKES):
        state = asyncio.run(compiler.compile_for(spec, b"slow")).state()
        with monkeypatch.context() as patch:
            patch.setattr(state_module, "FREE_S", -0.2)  # each call counts as 0.2 s more than it takes
            state = asyncio.run(compiler.compile_for(spec, b"slow")).state()
            assert state.accept(digit)
            with pytest.raises(RequestError, match="takes too long") as refused:
                state.accept(digit)
        assert refused.value.code == "grammar_too_complex", strike
    with pytest.raises(RequestError, match="try again later") as later:
        asyncio.run(compiler.compile_for(spec, b"slow"))
    assert (later.value.code, later.value.status) == ("too_many_grammars", 429) and later.value.retry_after_s
    assert asyncio.run(compiler.compile_for(spec, b"other")).state().accept(digit)


def test_a_text_that_is_resumed_is_read_more_strictly(
    tokenizer: Tokenizer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its tokens are read at once, while others wait."""
    rows = compiler.compile(GrammarSpec("regex", "[0-9]+")).state()
    monkeypatch.setattr(state_module, "FREE_REPLAY_S", -0.2)
    with pytest.raises(RequestError, match="takes too long"):
        rows.replay(tokenizer.encode("7777")[:1] * 3)
    rows.truncate(0)
    assert state_module.FREE_S > 0.0 and rows.cost._free_s == state_module.FREE_S


def test_references_and_patterns_are_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of names that lead nowhere are looked at once; patterns take time with the cube of their number."""
    walks: list[object] = []
    depth = bounds._depth

    def counted(value: object) -> int:
        walks.append(value)
        return depth(value)

    monkeypatch.setattr(bounds, "_depth", counted)
    GrammarSpec("json_schema", json.dumps({"anyOf": [{"$ref": f"#{index:x}"} for index in range(3000)]}))
    assert len(walks) == 2
    with pytest.raises(RequestError, match="patternProperties"):
        GrammarSpec("json_schema", json.dumps({"patternProperties": {f"^a{index}b": {} for index in range(65)}}))
