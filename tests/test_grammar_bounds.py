"""Tests what a grammar may cost: refused when it is compiled, ended by name while it is used, and one owner's alone."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.engine_harness import refused

from outrider.models.errors import RequestError
from outrider.models.grammar import bounds
from outrider.models.grammar import matchers as matchers_module
from outrider.models.grammar import state as state_module
from outrider.models.grammar.compiler import (
    MAX_CACHED_PER_OWNER,
    MAX_CLIENTS,
    MAX_JOINED,
    MAX_STRIKES,
    MAX_WAITING,
    STRIKE_S,
    CompiledGrammar,
    GrammarCompiler,
    Strikes,
)
from outrider.models.grammar.matchers import Matchers
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.grammar.state import GrammarState
from outrider.models.text.tokenizer import Tokenizer

GROWING = GrammarSpec("regex", "(.*[a-m].{12}[n-z].*)")


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
    with refused("invalid_grammar", 400, message) as refusal:
        compiler.compile(GrammarSpec(*spec))
    assert len(str(refusal.value)) < 500


def nested(depth: int) -> Any:
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "null"}


def chain(length: int) -> Any:
    """A definition that refers to the next one, and so on: the library recurses along them."""
    defs: Any = {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(length)}
    return {"$defs": {**defs, f"a{length}": {"type": "null"}}, "$ref": "#/$defs/a0"}


def gbnf(num_rules: int) -> str:
    return "".join(f'a{i} ::= "a" a{i + 1}\n' for i in range(num_rules - 2)) + f'root ::= a0\na{num_rules - 2} ::= "a"'


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
        ("grammar", gbnf(257), "it has 257 rules and other colons"),
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
    states = list[GrammarState]()
    for seed in range(6):
        state = grammar.state()
        text = walked(state, seed, 200)
        assert walked(fresh.compile(GROWING, f"alone {seed}").state(), seed, 200) == text
        # A text that has changed its lexer on the way goes back and on as before.
        state.truncate(150)
        assert state.length == 150 and all(map(state.accept, text[150:]))
        states.append(state)
    assert len({id(state._origin) for state in states}) > 1
    # Texts that began on the first lexer go on, too, and so do their forks.
    for state in states:
        assert walked(state.fork(), 7, 20) == walked(state, 7, 20)


def test_a_full_lexer_refuses_no_token(fresh: GrammarCompiler) -> None:
    """Reading, validating and resuming find out that it is full, though the library reports a refusal only."""
    text = walked(fresh.compile(GROWING, "alone").state(), 3, 100)
    for owner in ("advance", "validate", "replay", "go back", "forced"):
        grammar = fresh.compile(GROWING, owner)
        begun = grammar.state()
        assert all(map(begun.accept, text[:50]))
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
        with refused("grammar_too_complex"):
            ask()
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
    first = matchers.current
    if is_costly:
        monkeypatch.setattr(matchers_module, "MAX_AGAIN_S", -1.0)
    monkeypatch.setattr(state_module, "FREE_S", 9.0)
    before = fresh.compile(GROWING).state()
    text = walked(before, 3, 5)
    assert matchers.current is first
    monkeypatch.setattr(state_module, "FREE_S", -0.03)  # each of four calls counts as more
    walked(fresh.compile(GROWING).state(), 4, 2)
    monkeypatch.setattr(state_module, "FREE_S", 9.0)
    assert matchers.is_usable == (fresh.compile(GROWING).matchers is matchers) == is_costly
    assert (matchers.current is first) == is_costly  # as vLLM's workers ask
    assert walked(fresh.compile(GROWING).state(), 3, 5) == text
    before.truncate(1)
    assert all(map(before.accept, text[1:]))


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
    with refused("grammar_too_complex"):
        walked(state, 0, 5_000)
    assert state.length > 1_000


@pytest.mark.parametrize(
    "spec",
    [
        *map(GrammarSpec.json_schema, (nested(40), chain(100), {"enum": ["x" * 60_000]})),
        GrammarSpec("grammar", gbnf(256)),
    ],
    ids=["nested", "chain", "long", "rules"],
)
def test_what_is_within_the_bounds_compiles(spec: GrammarSpec, compiler: GrammarCompiler) -> None:
    assert compiler.compile(spec).state().forced()


def test_a_grammar_is_compiled_once_per_owner(compiler: GrammarCompiler) -> None:
    """An owner learns nothing from the time that another's grammar takes, and pushes none of another's out."""
    spec = GrammarSpec("regex", "once+")
    first = compiler.compile(spec, "ann")
    assert compiler.find(spec, "bob") is None and compiler.find(spec, "ann", b"salt") is None
    for i in range(MAX_CACHED_PER_OWNER + 3):
        compiler.compile(GrammarSpec("regex", f"b{i}"), "bob")
    assert compiler.compile(spec, "ann").matchers is first.matchers
    assert compiler.find(GrammarSpec("regex", "b0"), "bob") is None


async def test_compiling_takes_turns_and_has_a_bound(compiler: GrammarCompiler) -> None:
    """One owner's flood is refused beyond a few; another's grammar waits for one of them at most."""
    flood, done = [GrammarSpec("regex", f"flood{i}+") for i in range(MAX_WAITING + 8)], list[str]()

    async def compile_one(spec: GrammarSpec, owner: str) -> None:
        await compiler.compile_for(spec, owner)
        done.append(owner)

    calm = compile_one(GrammarSpec("regex", "calm"), "calm")
    *results, of_calm = await asyncio.gather(
        *(compile_one(spec, "flood") for spec in flood), calm, return_exceptions=True
    )
    assert [r.code for r in results if isinstance(r, RequestError)] == ["too_many_grammars"] * (8 - 1)
    assert of_calm is None and done.index("calm") <= 1
    assert (await compiler.compile_for(flood[-1], "flood")).spec == flood[-1]


async def test_requests_for_one_grammar_wait_for_one_compilation(compiler: GrammarCompiler) -> None:
    """More than may wait for grammars of their own; also where the first of them leaves, or the grammar is none."""
    wanted, many = GrammarSpec("regex", "joined+"), 8 * MAX_WAITING
    first = asyncio.ensure_future(compiler.compile_for(wanted, "many"))
    others = [asyncio.ensure_future(compiler.compile_for(wanted, "many")) for _ in range(many)]
    await asyncio.sleep(0)  # all have asked
    first.cancel()
    assert len({id(each.matchers) for each in await asyncio.gather(*others)}) == 1
    with pytest.raises(asyncio.CancelledError):
        await first
    wrong = [compiler.compile_for(GrammarSpec("regex", "(broken"), "many") for _ in range(many)]
    refusals = await asyncio.gather(*wrong, return_exceptions=True)
    assert [each.code for each in refusals if isinstance(each, RequestError)] == ["invalid_grammar"] * many
    assert len({id(each) for each in refusals}) == many  # each with its own frames
    flood = [compiler.compile_for(GrammarSpec("regex", "flooded+"), "many") for _ in range(MAX_JOINED + 9)]
    late = [each for each in await asyncio.gather(*flood, return_exceptions=True) if isinstance(each, RequestError)]
    assert [each.code for each in late] == ["too_many_grammars"] * 7


async def test_one_client_behind_an_owner_does_not_stop_the_others(compiler: GrammarCompiler) -> None:
    """A cascade's middle sends a salt for each of its clients. What one uses up another still has; not for ever."""
    flood = [GrammarSpec("regex", f"salted{i}+") for i in range(MAX_WAITING + 4)]

    asked = [compiler.compile_for(spec, "mid", b"one") for spec in flood]
    other = compiler.compile_for(GrammarSpec("regex", "calm2"), "mid", b"two")
    *results, calm = await asyncio.gather(*asked, other, return_exceptions=True)
    assert sum(isinstance(each, RequestError) for each in results) == 3 and isinstance(calm, CompiledGrammar)
    strikes = Strikes(lambda: 5.0)
    for _ in range(MAX_STRIKES):
        strikes.add(("mid", b"one"))
    clients = ("mid", b"one"), ("mid", b"two"), ("other", b"one")
    assert [strikes.seconds_left(client) for client in clients] == [STRIKE_S, 0.0, 0.0]
    for salt in range(MAX_STRIKES * (MAX_CLIENTS - 1)):
        strikes.add(("mid", b"%d" % salt))
    assert strikes.seconds_left(("mid", b"two")) == STRIKE_S and not strikes.seconds_left(("other", b"two"))


def test_a_text_whose_grammar_takes_too_long_ends(
    tokenizer: Tokenizer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processor time; the third such text of an owner within a minute is the last for a while."""
    spec, digit = GrammarSpec("regex", "[0-9]+"), tokenizer.encode("7")[0]
    for _ in range(MAX_STRIKES):
        with monkeypatch.context() as patch:
            patch.setattr(state_module, "FREE_S", -0.2)  # each call counts as 0.2 s more than it takes
            state = asyncio.run(compiler.compile_for(spec, b"slow")).state()
            assert state.accept(digit)
            with refused("grammar_too_complex", match="takes too long"):
                state.accept(digit)
    with refused("too_many_grammars", 429, "try again later") as later:
        asyncio.run(compiler.compile_for(spec, b"slow"))
    assert later.value.retry_after_s and asyncio.run(compiler.compile_for(spec, b"other")).state().accept(digit)


def test_references_and_patterns_are_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many names lead nowhere, or to parts of each other, each part is looked at three times. Patterns take
    time with the cube of their number.
    """
    looked_at: list[object] = []
    children = bounds._children

    def counted(value: object) -> Iterator[Any]:
        looked_at.append(value)
        return children(value)

    monkeypatch.setattr(bounds, "_children", counted)
    deep: Any = [1]
    for _ in range(19):
        deep = {"a": deep}
    for schema, names in (({}, (f"#{index:x}" for index in range(3000))), (deep, ("#" + "/a" * i for i in range(20)))):
        GrammarSpec("json_schema", json.dumps({**schema, "anyOf": [{"$ref": name} for name in names]}))
        assert max(Counter(id(value) for value in looked_at if isinstance(value, dict | list)).values()) <= 3
        looked_at.clear()
    with pytest.raises(RequestError, match="patternProperties"):
        GrammarSpec("json_schema", json.dumps({"patternProperties": {f"^a{index}b": {} for index in range(65)}}))
