"""Tests grammars over many rows in torch: masks, paths and limits as one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.test_rows_torch import assert_walked_as_lines

from outrider.models.errors import RequestError
from outrider.models.grammar.compiler import GrammarCompiler
from outrider.models.grammar.matchers import LIMITS
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.grammar.state import GrammarState, TookTooLong
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.processors.choices_torch import RowChoices
from outrider.models.processors.options import PLAIN, ProcessorOptions
from outrider.models.processors.processor_plan import ProcessorPlan, apply_all
from outrider.models.processors.rows_torch import RowChanges
from outrider.models.processors.text_rows import TextPath, TextRows
from outrider.models.text.tokenizer import Tokenizer

Row = NDArray[np.float32]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.size, tokenizer.eos_token_ids)


def plan_of(compiler: GrammarCompiler, spec: GrammarSpec, options: ProcessorOptions = PLAIN) -> ProcessorPlan:
    grammar = compiler.compile(spec)
    return ProcessorPlan(options, frozenset(grammar.stop_ids), 0, grammar)


def encoded(compiler: GrammarCompiler, text: str) -> list[int]:
    return compiler._vocabulary.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("beyond", [0, 3, 64])
@pytest.mark.parametrize(
    "options",
    [
        PLAIN,
        ProcessorOptions(allowed_ids=tuple(range(2000)), repetition_penalty=1.3),
        ProcessorOptions(allowed_ids=(5, 34, 60, 61), bad_words=((5,), (34,), (4000,)), min_tokens=99),
        ProcessorOptions(bad_words=tuple((token,) for token in range(256)), min_tokens=99),
    ],
)
def test_a_grammar_masks_as_one_by_one(compiler: GrammarCompiler, options: ProcessorOptions, beyond: int) -> None:
    """After the text and each drafted token; ids beyond the tokenizer's are forbidden. The model masks some, too."""
    size = compiler._vocabulary.tokenizer.size + beyond
    plan = plan_of(compiler, GrammarSpec("json_object", ""), options)
    tokens = encoded(compiler, '{"name":"a b","n":[1,2]}')
    rng = np.random.default_rng(0)
    for at in range(len(tokens) - 2):
        text = TextRows(plan, (), size)
        text.follow((), tokens[:at])
        drafted = tokens[at : at + 3]
        path = text.walk(drafted)
        assert len(path.rows) == 1 + len(drafted) and path.length == text.length == at
        own = rng.standard_normal((len(path.rows), size)).astype(np.float32)
        own[0, rng.random(size) < at % 3 / 2] = -np.inf
        own[0, -1] = 1.0
        logits = torch.from_numpy(own.copy())
        RowChanges([(0, path)], len(own), size, CPU).apply(logits)
        states = plan.states((), size)
        changed: list[Row] = []
        for token in [*tokens[:at], *drafted]:
            if states[0].length >= at:
                changed.append(apply_all(states, own[len(changed)]))
            for state in states:
                state.advance(token)
        changed.append(apply_all(states, own[-1]))
        assert np.array_equal(np.stack(changed).view(np.uint32), logits.numpy().view(np.uint32))
        for change, row in zip(path.rows.values(), changed, strict=True):
            assert all(change.allows(token) for token in np.flatnonzero(row > -np.inf).tolist()) or options.allowed_ids
        choices = RowChoices([SAMPLED] * len(own), range(len(own)), [None] * len(own), listing(path, size), CPU)
        truth = [pick_or_none(row, position) for position, row in enumerate(changed)]
        assert choices.choose(torch.from_numpy(own.copy())).tolist() == truth


SAMPLED = SamplingParams(temperature=0.8, seed=3)


def listing(path: TextPath, size: int) -> RowChanges:
    return RowChanges([(0, path)], len(path.rows), size, CPU, may_list=True)


def pick_or_none(row: Row, position: int) -> int:
    return pick(row, SAMPLED, position) if np.isfinite(row.max()) else -1


def test_a_grammar_that_begins_later_allows_all_of_the_tokenizer_before(compiler: GrammarCompiler) -> None:
    vocabulary = compiler._vocabulary
    spelling = vocabulary.tokenizer.token(vocabulary.stop_ids[0]) or ""
    plan = plan_of(compiler, GrammarSpec("regex", "[0-9]+", after=spelling))
    path = TextRows(plan, (), vocabulary.num_tokens + 5).walk(encoded(compiler, "a"))
    assert len(path.rows) == 2
    for row in path.rows.values():
        assert row.allows(vocabulary.num_tokens - 1) and not row.allows(vocabulary.num_tokens)


def test_a_path_ends_before_a_token_that_the_grammar_forbids(compiler: GrammarCompiler) -> None:
    """It is no error; and the states are where they were."""
    plan = plan_of(compiler, GrammarSpec("regex", "[0-9]{3,9}"), ProcessorOptions(presence_penalty=1.0))
    size = compiler._vocabulary.tokenizer.size
    text = TextRows(plan, (), size)
    one, letter = encoded(compiler, "1")[0], encoded(compiler, "x")[0]
    path = text.walk([one, letter, one])
    assert len(path.rows) == 2 and not path.errors
    assert path.rows[0].ids.tolist() == [] and path.rows[1].ids.tolist() == [one]
    again = text.walk([one])
    assert text.length == 0 and len(again.rows) == 2
    assert np.array_equal(again.rows[0].mask, path.rows[0].mask)  # type: ignore[arg-type]


def test_a_text_that_goes_back_is_as_if_it_had_never_been_there(compiler: GrammarCompiler) -> None:
    """Also to within what the prompt holds of it, as a request that is resumed may."""
    rules = ProcessorOptions(repetition_penalty=1.3, frequency_penalty=0.5, bad_words=((5, 6), (1, 7)), min_tokens=4)
    plan = replace(plan_of(compiler, GrammarSpec("regex", "[0-9a-f]+"), rules), num_generated=2)
    tokens, size = encoded(compiler, "0a1b2c3d"), compiler._vocabulary.tokenizer.size
    prompt = [9, 8, *tokens[:2]]
    gone = TextRows(plan, prompt, size)
    for length in (4, 0, len(tokens) - 2, 3):
        gone.follow(prompt, tokens[2 : 2 + length])
        fresh = TextRows(plan, prompt, size)
        fresh.follow(prompt, tokens[2 : 2 + length])
        both = torch.randn(size).repeat(2, 1)
        RowChanges([(0, gone.walk(())), (1, fresh.walk(()))], 2, size, CPU).apply(both)
        assert gone.length == 2 + length and torch.equal(both[0], both[1])


def test_a_path_ends_with_the_text(compiler: GrammarCompiler) -> None:
    plan = plan_of(compiler, GrammarSpec("regex", "1*"))
    one, stop = encoded(compiler, "1")[0], next(iter(plan.stop_ids))
    path = TextRows(plan, (), compiler._vocabulary.tokenizer.size).walk([one, stop, stop])
    assert len(path.rows) == 2 and not path.errors


AMBIGUOUS = 'start: a "."\na: "" | a a | "x" | "xx" a | a "x"'


def test_a_limit_that_a_guess_reaches_is_none_of_the_text(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path ends there, and says what the row behind it raises; the text goes on at its own place."""
    monkeypatch.setitem(LIMITS, "max_items_in_row", 40)
    plan = plan_of(compiler, GrammarSpec("grammar", AMBIGUOUS))
    size = compiler._vocabulary.tokenizer.size
    text = TextRows(plan, (), size)
    x = encoded(compiler, "x")[0]
    path = text.walk([x] * 64)
    error = path.errors[len(path.rows)]
    assert isinstance(error, RequestError) and error.code == "grammar_too_complex"
    assert 1 <= len(path.rows) < 64
    fresh = TextRows(plan, (), size).walk(())
    again = text.walk(())
    assert not again.errors and np.array_equal(again.rows[0].mask, fresh.rows[0].mask)  # type: ignore[arg-type]
    text.follow((), [x] * (len(path.rows) - 1))
    with pytest.raises(RequestError, match="too costly"):
        for count in range(len(path.rows), 64):
            text.walk(())
            text.follow((), [x] * count)


def test_guesses_cost_and_give_nothing_back(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they cost ends the text as its own tokens' cost would; cheap ones do not pay for it."""
    plan = plan_of(compiler, GrammarSpec("regex", "[0-9]+"))
    text = TextRows(plan, (), compiler._vocabulary.tokenizer.size)
    one = encoded(compiler, "1")[0]
    cost = next(state for state in text.states if isinstance(state, GrammarState)).cost
    cost.spend(0.2)
    text.walk([one] * 16)
    assert 0.19 < cost._excess_s <= 0.2  # a mask of the text's own pays 2 ms at most
    with monkeypatch.context() as patch:
        patch.setattr("outrider.models.grammar.state.FREE_S", -1.0)
        cost._free_s = -1.0
        with pytest.raises(TookTooLong):
            text.walk([one])


def test_a_tree_is_walked_as_its_paths_inside_a_grammar(compiler: GrammarCompiler) -> None:
    """Some branches end with the text, some before a token that the grammar forbids; the others go on."""
    plan = plan_of(compiler, GrammarSpec("regex", "(ab?){1,4}"))
    text = TextRows(plan, (), compiler._vocabulary.tokenizer.size)
    known = [encoded(compiler, each)[0] for each in "abc"] + [next(iter(plan.stop_ids))]
    rng = np.random.default_rng(0)
    for _ in range(40):
        count = int(rng.integers(1, 12))
        parents = [int(rng.integers(-1, node)) if node else -1 for node in range(count)]
        assert_walked_as_lines(text, [known[each] for each in rng.integers(0, 4, count)], parents)
