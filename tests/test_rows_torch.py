"""Rows of logits that torch changes, all of a step at once, against the numpy processors that change one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.pick_twins import twin_pick

from outrider.models.errors import RequestError
from outrider.models.grammar.compiler import GrammarCompiler
from outrider.models.grammar.matchers import LIMITS
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.grammar.state import GrammarState, TookTooLong
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.choices_torch import RowChoices
from outrider.models.processors.chooser import logprobs_of
from outrider.models.processors.device_copies import HostCopy, _packed, _parts, to_device
from outrider.models.processors.logprobs_torch import RowLogprobs, token_logprobs
from outrider.models.processors.options import PLAIN, ProcessorOptions
from outrider.models.processors.processor_plan import ProcessorPlan, apply_all
from outrider.models.processors.rows_torch import DraftedRows, RowChanges
from outrider.models.processors.text_rows import RowChange, TextPath, TextRows

Row = NDArray[np.float32]
CPU = torch.device("cpu")
VOCAB = 61
STOPS = frozenset((3, 7))
_ids = st.integers(0, VOCAB + 4)  # some beyond the rows
_tokens = st.lists(_ids, max_size=6)
_words = st.lists(st.lists(_ids, min_size=1, max_size=3).map(tuple), max_size=5)
_all_words = st.just(tuple((token,) for token in range(VOCAB)))


@st.composite
def plans(draw: st.DrawFn) -> ProcessorPlan:
    """Any rules, often so many that they leave little."""
    biased = draw(st.lists(_ids, max_size=8, unique=True))
    options = ProcessorOptions(
        repetition_penalty=draw(st.sampled_from((1.0, 1.3, 0.7, 100.0, 0.01))),
        presence_penalty=draw(st.sampled_from((0.0, 0.5, -2.0))),
        frequency_penalty=draw(st.sampled_from((0.0, 0.3, -1.7))),
        logit_bias=tuple((token, draw(st.floats(-9.0, 9.0))) for token in biased),
        bad_words=tuple(draw(_words | _all_words)),
        min_tokens=draw(st.integers(0, 4)),
        allowed_ids=draw(st.none() | st.lists(_ids, min_size=1, max_size=6).map(tuple)),
    )
    return ProcessorPlan(options, STOPS, draw(st.integers(0, 2)))


def rows_of_a_model(count: int, seed: int) -> NDArray[np.float32]:
    """[count, VOCAB]. Some rows are masked by the model itself, but for a few ids; some are no numbers."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, VOCAB)).astype(np.float32) * 5
    for row in rows:
        row[rng.integers(VOCAB)] = -0.0
        if rng.random() < 0.5:
            row[rng.random(VOCAB) < 1 - rng.integers(4) / VOCAB] = -np.inf
        if rng.random() < 0.2:
            row[rng.integers(VOCAB)] = rng.choice([np.nan, np.inf])
    return rows


Text = tuple[ProcessorPlan, list[int], list[int], list[int], int]
"""A plan, prompt, output, drafted tokens, and how many rows that nothing changes are before its own."""
_texts: st.SearchStrategy[Text] = st.tuples(plans(), _tokens, _tokens, _tokens, st.integers(0, 1))


def changed_rows(
    texts: Sequence[Text], own: NDArray[np.float32]
) -> tuple[list[tuple[int, TextPath]], list[Row | None]]:
    """Each text's path with its first row, and each row as numpy has it; None: nothing changes it, or it counts not."""
    paths, expected = list[tuple[int, TextPath]](), list[Row | None]()
    for plan, prompt, output, drafted, num_plain in texts:
        expected += [None] * num_plain
        text = TextRows(plan, prompt, VOCAB)
        text.follow(prompt, output)
        path = text.walk(drafted)
        assert text.length == min(len(prompt), plan.num_generated) + len(output) or not plan.processors.changes_rows
        paths.append((len(expected), path))
        for index in range(len(drafted) + 1):
            states = plan.states(prompt, VOCAB)
            for state in states:
                for token in [*output, *drafted[:index]]:
                    state.advance(token)
            counts = index < len(path.rows)
            assert counts == (STOPS.isdisjoint(drafted[:index]))
            expected.append(apply_all(states, own[len(expected)]) if counts and states else None)
    return paths, expected


def shown(row: RowChange | None) -> object:
    return row and (row.counts, *(np.asarray(part).tolist() for part in (row.mask, row.bad, row.stops)))


def assert_walked_as_lines(text: TextRows, drafted: Sequence[int], parents: Sequence[int]) -> None:
    """Each row of a tree is that of its own path alone, or is there in neither."""
    tree, before = text.walk(drafted, parents), text.length
    for node in range(len(parents)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone = text.walk([drafted[each] for each in path])
        assert shown(tree.rows.get(node + 1)) == shown(alone.rows.get(len(path)))
    assert list(tree.rows) == sorted(tree.rows) and text.length == before


_trees = st.lists(st.tuples(st.integers(0, VOCAB - 1), st.integers(0, 7)), max_size=8)


@settings(max_examples=60)
@given(plans(), _tokens, _trees)
def test_a_tree_is_walked_as_its_paths(plan: ProcessorPlan, prompt: list[int], nodes: list[tuple[int, int]]) -> None:
    parents = [parent % (node + 1) - 1 for node, (_, parent) in enumerate(nodes)]
    assert_walked_as_lines(TextRows(plan, prompt, VOCAB), [token for token, _ in nodes], parents)


@settings(max_examples=60)
@given(st.lists(_texts, min_size=1, max_size=5), st.integers(0, 1 << 30))
def test_rows_change_to_the_bit_as_one_by_one(texts: list[Text], seed: int) -> None:
    """Rules of many texts in one step, drafts, rows that nothing changes, rows of which nothing would be left; many
    penalized ids and a small cache, so that not all rows are done at a time.
    """
    own = rows_of_a_model(sum(num_plain + len(drafted) + 1 for _, _, _, drafted, num_plain in texts), seed)
    paths, expected = changed_rows(texts, own)
    logits = torch.from_numpy(own.copy())
    with pytest.MonkeyPatch.context() as patch:
        for limit in ("_MOST_PENALIZED", "_CACHED"):
            patch.setattr(f"outrider.models.processors.rows_torch.{limit}", 2 * VOCAB)
        changes = RowChanges(paths, len(own), VOCAB, CPU)
        is_finite, picks = changes.apply(logits).tolist(), logits.argmax(1)
    for row, truth, found, is_fine in zip(own, expected, logits.numpy(), is_finite, strict=True):
        if truth is not None:
            assert is_fine == bool(np.isfinite(row.max()))
            assert not is_fine or np.array_equal(truth.view(np.uint32), found.view(np.uint32))
    asked = [index for index, truth in enumerate(expected) if truth is not None and is_finite[index]]
    if asked:
        index = torch.tensor(asked)
        values = changes.own(logits, index, picks[index]).tolist()
        for row, pick, value in zip(asked, picks[index].tolist(), values, strict=True):
            assert value == own[row][pick]


_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 0.8, 5.0)),
    top_k=st.sampled_from((0, 0, 1, 3, 40)),
    top_p=st.sampled_from((1.0, 1.0, 0.9, 0.3)),
    min_p=st.sampled_from((0.0, 0.0, 0.1)),
    seed=st.integers(0, 1 << 40),
)
_narrowings = st.builds(
    ProcessorOptions,
    typical_p=st.sampled_from((1.0, 0.9, 0.3)),
    xtc_probability=st.sampled_from((0.0, 1.0)),
    xtc_threshold=st.sampled_from((0.05, 0.2)),
)


@pytest.mark.parametrize("may_list", [True, False])
@settings(max_examples=60)
@given(st.lists(st.tuples(_texts, _params, _narrowings), min_size=1, max_size=5), st.integers(0, 1 << 30))
def test_picks_are_those_of_numpy(
    may_list: bool, texts: list[tuple[Text, SamplingParams, ProcessorOptions]], seed: int
) -> None:
    """With lists of the ids that are left, as on a CPU, and without; rows that are not finite have none."""
    count = sum(num_plain + len(drafted) + 1 for (_, _, _, drafted, num_plain), _, _ in texts)
    own = rows_of_a_model(count, seed)
    paths, expected = changed_rows([text for text, _, _ in texts], own)
    changes = RowChanges(paths, count, VOCAB, CPU, may_list=may_list)
    terms = [each for each in texts for _ in range(each[0][4] + len(each[0][3]) + 1)]
    params, narrowings = [each for _, each, _ in terms], [each for _, _, each in terms]
    choices = RowChoices(params, range(count), narrowings, changes, CPU)
    picks = choices.choose(torch.from_numpy(own.copy())).tolist()
    for row, (token, truth_row) in enumerate(zip(picks, expected, strict=True)):
        changed = own[row] if truth_row is None else truth_row
        is_finite = twin_pick(own[row], SamplingParams(), row) >= 0
        assert token == (twin_pick(changed, params[row], row, narrowings[row]) if is_finite else -1)


# -- grammars: paths and limits ----------------------------------------------------------------------------------------


def plan_of(compiler: GrammarCompiler, spec: GrammarSpec, options: ProcessorOptions = PLAIN) -> ProcessorPlan:
    grammar = compiler.compile(spec)
    return ProcessorPlan(options, frozenset(grammar.stop_ids), 0, grammar)


def encoded(compiler: GrammarCompiler, text: str) -> list[int]:
    return compiler._vocabulary.tokenizer.encode(text, add_special_tokens=False)


def test_a_grammar_that_begins_later_allows_all_of_the_tokenizer_before(compiler: GrammarCompiler) -> None:
    vocabulary = compiler._vocabulary
    spelling = vocabulary.tokenizer.token(vocabulary.stop_ids[0]) or ""
    plan = plan_of(compiler, GrammarSpec("regex", "[0-9]+", after=spelling))
    rows = TextRows(plan, (), vocabulary.num_tokens + 5).walk(encoded(compiler, "a")).rows.values()
    ends = [vocabulary.num_tokens - 1, vocabulary.num_tokens]
    assert [[row.allows(token) for token in ends] for row in rows] == [[True, False]] * 2


def test_a_path_ends_before_a_token_that_the_grammar_forbids(compiler: GrammarCompiler) -> None:
    """It is no error; and the states are where they were. So it does behind the text's last token."""
    plan = plan_of(compiler, GrammarSpec("regex", "[0-9]{3,9}"), ProcessorOptions(presence_penalty=1.0))
    size = compiler._vocabulary.tokenizer.size
    text = TextRows(plan, (), size)
    one, letter = encoded(compiler, "1")[0], encoded(compiler, "x")[0]
    path = text.walk([one, letter, one])
    assert len(path.rows) == 2 and not path.errors
    assert path.penalized[0].size == 0 and [row.counts for row in path.rows.values()] == [{}, {one: 1.0}]
    again, ended = text.walk([one]), text.walk([one, one, one, *plan.stop_ids, one])
    assert text.length == 0 and len(again.rows) == 2 and len(ended.rows) == 4 and not ended.errors
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
    fresh, again = TextRows(plan, (), size).walk(()), text.walk(())
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
    monkeypatch.setattr("outrider.models.grammar.state.FREE_S", -1.0)
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


# -- logprobs and what is committed ------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.sampled_from((5, 61, 128, 300, 4096, 20_000)),
    st.integers(0, 20),
    st.integers(0, 1 << 30),
    st.sampled_from((0.01, 3.0, 60.0)),
    st.booleans(),
)
def test_logprobs_are_those_of_numpy(size: int, count: int, seed: int, scale: float, has_ties: bool) -> None:
    """Ids in the same order, ties by id; values within 1e-5 of what float64 gives."""
    rng = np.random.default_rng(seed)
    own = (rng.standard_normal((4, size)) * scale).astype(np.float32)
    if has_ties:
        own = np.round(own)
    own[1, rng.random(size) < 0.7] = -np.inf
    own[1, size // 2] = 1.0
    rows_of = [0, 1, 3]
    tokens = rng.integers(0, size, 3)
    found = RowLogprobs(torch.from_numpy(own), torch.tensor(rows_of), count)
    values = found.of(torch.from_numpy(own[rows_of, tokens])).tolist()
    for row, token, given_row in zip(rows_of, tokens.tolist(), values, strict=True):
        for wanted in {count, count // 2}:
            truth, here = logprobs_of(own[row], token, wanted), token_logprobs(token, given_row, wanted)
            assert [each for each, _ in here.top] == [each for each, _ in truth.top]
            exact = own[row].astype(np.float64)
            norm = exact.max() + np.log(np.exp(exact - exact.max()).sum())
            for each, value in [(token, here.logprob), *here.top]:
                assert value == exact[each] - norm or abs(value - (exact[each] - norm)) < 1e-5


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=5), st.data())
def test_what_is_committed_ends_with_the_first_pick_that_was_not_drafted(
    drafted: list[list[int]], data: st.DataObject
) -> None:
    """Or before the first that is none."""
    picks = [[data.draw(st.integers(-1, 2)) for _ in range(len(own) + 1)] for own in drafted]
    width = max(map(len, picks)) + data.draw(st.integers(0, 2))
    flat = torch.tensor([pick for own in picks for pick in own])
    found = DraftedRows(drafted, width, CPU).committed(flat)
    assert found.dtype == torch.int32 and found.shape == (len(drafted), width)
    for own, guesses, row in zip(picks, drafted, found.tolist(), strict=True):
        others = (
            at for at, (token, guess) in enumerate(zip(own, guesses, strict=False)) if token != guess or token < 0
        )
        count = next(others, len(guesses)) + 1
        assert row == own[:count] + [-1] * (width - count)


def test_arrays_reach_a_device_by_one_copy() -> None:
    """What is packed is what is unpacked; here on a device without memory. On the CPU nothing is copied."""
    arrays: list[NDArray[Any]] = [np.arange(3), np.empty((0, 2), np.uint8), np.ones((2, 5), np.float32)]
    arrays += [np.arange(7, dtype=np.uint8), np.empty(0, np.int64), np.empty((0, 3), np.float32), np.arange(2)]
    here = to_device(arrays, CPU)
    assert all(tensor.data_ptr() == array.ctypes.data for array, tensor in zip(arrays, here, strict=True) if array.size)
    for array, tensor in zip(arrays, _parts(_packed(here, pin_memory=False), here), strict=True):
        assert np.array_equal(tensor.numpy(), array) and tensor.numpy().dtype == array.dtype
    there = to_device(arrays, torch.device("meta"))
    assert [(each.shape, each.dtype) for each in there] == [(each.shape, each.dtype) for each in here]
    assert HostCopy(torch.tensor([[1.5, 2.0]])).tolist() == [[1.5, 2.0]]
