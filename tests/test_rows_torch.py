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

from outrider.models.errors import ModelFault, RequestError
from outrider.models.grammar.compiler import GrammarCompiler
from outrider.models.grammar.matchers import LIMITS
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.grammar.state import GrammarState, TookTooLong
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.processors.choices_torch import RowChoices
from outrider.models.processors.chooser import logprobs_of
from outrider.models.processors.logprobs_torch import RowLogprobs, token_logprobs
from outrider.models.processors.narrowing import Narrowing
from outrider.models.processors.options import PLAIN, ProcessorOptions
from outrider.models.processors.processor_plan import ProcessorPlan, apply_all
from outrider.models.processors.rows_torch import DraftedRows, HostCopy, RowChanges, _packed, _parts, to_device
from outrider.models.processors.text_rows import TextPath, TextRows
from outrider.models.text.tokenizer import Tokenizer
from outrider.reference import target_dir

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
    paths: list[tuple[int, TextPath]] = []
    expected: list[Row | None] = []
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


@settings(max_examples=60)
@given(st.lists(_texts, min_size=1, max_size=5), st.integers(0, 1 << 30))
def test_rows_change_to_the_bit_as_one_by_one(texts: list[Text], seed: int) -> None:
    """Rules of many texts in one step, drafts, rows that nothing changes, rows of which nothing would be left."""
    own = rows_of_a_model(sum(num_plain + len(drafted) + 1 for _, _, _, drafted, num_plain in texts), seed)
    paths, expected = changed_rows(texts, own)
    logits = torch.from_numpy(own.copy())
    changes = RowChanges(paths, len(own), VOCAB, CPU)
    is_finite = changes.apply(logits).tolist()
    picks = logits.argmax(1)
    for row, truth, found, is_fine in zip(own, expected, logits.numpy(), is_finite, strict=True):
        if truth is None:
            continue
        assert is_fine == bool(np.isfinite(row.max()))
        if is_fine:
            assert np.array_equal(truth.view(np.uint32), found.view(np.uint32))
    asked = [index for index, truth in enumerate(expected) if truth is not None and is_finite[index]]
    if asked:
        index = torch.tensor(asked)
        values = changes.own(logits, index, picks[index]).tolist()
        for row, pick, value in zip(asked, picks[index].tolist(), values, strict=True):
            assert value == own[row][pick]


def test_a_mask_of_many_rows_is_applied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts are as large as a core's cache, whatever the vocabulary."""
    monkeypatch.setattr("outrider.models.processors.rows_torch._CACHED", 2 * VOCAB)
    plan = ProcessorPlan(ProcessorOptions(allowed_ids=(1, 5)))
    own = np.random.default_rng(0).standard_normal((9, VOCAB)).astype(np.float32)
    paths = [(first, TextRows(plan, (), VOCAB).walk(())) for first in range(1, 8)]
    logits = torch.from_numpy(own.copy())
    RowChanges(paths, 9, VOCAB, CPU).apply(logits)
    assert np.array_equal(logits[[0, 8]].numpy(), own[[0, 8]])
    for index in range(1, 8):
        assert np.array_equal(logits[index].numpy(), apply_all(plan.states((), VOCAB), own[index]))


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
        try:
            pick(own[row], SamplingParams(), row)
            truth = pick(changed, params[row], row, Narrowing(narrowings[row]) if narrowings[row].narrows else None)
        except ModelFault:
            truth = -1
        assert token == truth


# -- grammars ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = Tokenizer.from_dir(target_dir())
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
        truth = []
        for token, guess in zip(own, [*guesses, None], strict=True):
            truth.append(token)
            if token != guess or token < 0:
                break
        assert row == truth + [-1] * (width - len(truth))


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
