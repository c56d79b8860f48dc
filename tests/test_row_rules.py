"""Tests of the rules of a request: penalties, bias, forbidden and allowed ids, typical-p and XTC."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from outrider.models.errors import SamplingError
from outrider.models.picks.sampling import SamplingParams, candidates, pick, survivors
from outrider.models.processors.narrowing import Narrowing, coin
from outrider.models.processors.options import ProcessorOptions
from outrider.models.processors.options_processor import OptionsProcessor
from outrider.models.processors.processor_plan import ProcessorPlan
from outrider.models.wire.fields import MAX_ALLOWED_IDS, MAX_BAD_WORDS, MAX_BIASES

VOCAB = 24
STOPS = frozenset({3, 5})

ids = st.integers(0, VOCAB - 1)
texts = st.lists(ids, max_size=20)
rules = st.builds(
    ProcessorOptions,
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3, 4.0]),
    presence_penalty=st.sampled_from([0.0, -1.5, 0.9]),
    frequency_penalty=st.sampled_from([0.0, 0.35, -2.0]),
    logit_bias=st.dictionaries(ids, st.floats(-100, 100), max_size=4).map(lambda found: tuple(found.items())),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=6).map(tuple),
    min_tokens=st.integers(0, 12),
    allowed_ids=st.none() | st.lists(ids, min_size=1, max_size=8).map(tuple),
)


def row_of(seed: int, size: int = VOCAB) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(size) * 4).astype(np.float32)


def state_after(
    rules: ProcessorOptions,
    prompt: Sequence[int],
    text: Sequence[int],
    size: int = VOCAB,
    stop_ids: frozenset[int] = STOPS,
) -> OptionsProcessor:
    state = OptionsProcessor(rules, prompt, size, stop_ids)
    for token in text:
        state.advance(token)
    return state


def changed(state: OptionsProcessor, row: NDArray[np.float32]) -> NDArray[np.float32]:
    """The row, which is changed in place."""
    state.apply(row)
    return row


def by_transformers(
    row: NDArray[np.float32], rules: ProcessorOptions, prompt: list[int], text: list[int], stop_ids: frozenset[int]
) -> NDArray[np.float32]:
    """The row after transformers' processors; presence and frequency, which they lack, by OpenAI's formula."""
    scores = torch.from_numpy(row.copy())[None]
    everything = torch.tensor([[*prompt, *text]], dtype=torch.long)
    # NoBadWords ignores a sequence that is longer than what it sees: pad, with an id that no sequence has.
    own = torch.tensor([[VOCAB] * 4 + text], dtype=torch.long)
    if rules.logit_bias:
        biases = {(token,): addend for token, addend in rules.logit_bias}
        scores = SequenceBiasLogitsProcessor(biases)(everything, scores)
    if rules.repetition_penalty != 1.0 and everything.numel():
        scores = RepetitionPenaltyLogitsProcessor(rules.repetition_penalty)(everything, scores)
    counts = torch.bincount(torch.tensor(text, dtype=torch.long), minlength=VOCAB).float()
    scores = scores - rules.frequency_penalty * counts - rules.presence_penalty * (counts > 0)
    if rules.allowed_ids is not None:
        mask = torch.full((VOCAB,), -math.inf)
        mask[list(rules.allowed_ids)] = 0.0
        scores = scores + mask
    if rules.bad_words:
        scores = NoBadWordsLogitsProcessor([list(word) for word in rules.bad_words])(own, scores)
    if rules.min_tokens and stop_ids:
        minimum = MinNewTokensLengthLogitsProcessor(len(prompt), rules.min_tokens, sorted(stop_ids))
        scores = minimum(everything, scores)
    return scores[0].numpy()


@settings(max_examples=80, deadline=None)
@given(rules, texts, texts, st.integers(0, 1000))
def test_rows_change_as_in_transformers_token_by_token(
    rules: ProcessorOptions, prompt: list[int], text: list[int], seed: int
) -> None:
    """Bit for bit, where anything is left to pick; a masked row keeps a finite maximum."""
    state = OptionsProcessor(rules, prompt, VOCAB, STOPS)
    for length, token in enumerate([*text, 0]):
        expected = by_transformers(row_of(seed + length), rules, prompt, text[:length], STOPS)
        row = changed(state, row_of(seed + length))
        assert math.isfinite(row.max())
        if math.isfinite(expected.max()):
            np.testing.assert_array_equal(row, expected)
        state.advance(token)


@settings(max_examples=60, deadline=None)
@given(rules, texts, texts, texts, st.integers(0, 20), st.integers(0, 1000))
def test_a_state_goes_back_as_if_it_had_never_been_elsewhere(
    rules: ProcessorOptions, prompt: list[int], text: list[int], wrong: list[int], kept: int, seed: int
) -> None:
    """Whatever was advanced and truncated before, only the tokens that it now holds count."""
    kept = min(kept, len(text))
    state, fresh = state_after(rules, prompt, text[:kept] + wrong), state_after(rules, prompt, text)
    state.truncate(kept)
    for token in text[kept:]:
        state.advance(token)
    assert state.length == fresh.length == len(text)
    np.testing.assert_array_equal(changed(state, row_of(seed)), changed(fresh, row_of(seed)))


def test_a_long_text_is_counted() -> None:
    """More distinct tokens than the first arrays hold."""
    rules = ProcessorOptions(repetition_penalty=2.0, frequency_penalty=1.0)
    state = state_after(rules, [1], [*range(500), 7], 1000)
    row = changed(state, np.full(1000, 8.0, dtype=np.float32))
    assert row[[1, 499, 7, 500]].tolist() == [3.0, 3.0, 2.0, 8.0]


def test_ids_that_a_shorter_row_lacks_change_nothing() -> None:
    """A draft's rows may end before the target's."""
    rules = ProcessorOptions(1.5, 1.0, 1.0, ((9, 5.0),), ((9,), (1, 9)), 4, (9, 2))
    state = state_after(rules, [9, 8], [9, 1], 5, frozenset({8, 4}))
    assert changed(state, np.arange(5, dtype=np.float32)).argmax() == 2
    # None of them: the row stays.
    state = OptionsProcessor(ProcessorOptions(allowed_ids=(9,)), [], 5)
    assert changed(state, np.arange(5, dtype=np.float32)).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_text_goes_on_where_every_id_would_be_forbidden() -> None:
    """A minimum of tokens gives way before bad words, and those before the allowed ids."""
    for words, best in ((((1,),), 0), (((0,), (1,)), 1)):
        rules = ProcessorOptions(allowed_ids=(0, 1), bad_words=words, min_tokens=5)
        state = OptionsProcessor(rules, [], 3, frozenset({0}))
        assert changed(state, np.array([1.0, 2.0, 9.0], dtype=np.float32)).argmax() == best
    state = OptionsProcessor(ProcessorOptions(allowed_ids=(0, 1)), [], 3)
    masked = np.array([-np.inf, -np.inf, 9.0], dtype=np.float32)
    assert changed(state, masked).tolist() == [0.0, 0.0, -np.inf]


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("typical_p", [0.2, 0.6, 0.95])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (12, 1.0), (0, 0.9)])
def test_typical_p_keeps_what_transformers_keeps(
    temperature: float, typical_p: float, top_k: int, top_p: float
) -> None:
    """After the other truncations, in transformers' order."""
    params = SamplingParams(temperature, top_k, top_p)
    for seed in range(20):
        row = row_of(seed, 300)
        scores = TemperatureLogitsWarper(temperature)(None, torch.from_numpy(row.astype(np.float64))[None])
        if top_k:
            scores = TopKLogitsWarper(top_k)(None, scores)
        if top_p < 1.0:
            scores = TopPLogitsWarper(top_p)(None, scores)
        scores = TypicalLogitsWarper(typical_p)(None, scores)
        expected = torch.nonzero(torch.isfinite(scores[0])).flatten().tolist()
        found = Narrowing(ProcessorOptions(typical_p=typical_p)).narrow(row, survivors(row, params), params, seed)
        assert found.tolist() == expected


def test_logits_near_the_lowest_of_float32_leave_typical_p_something() -> None:
    """Divided by the temperature they overflow; torch's twin bounds them, too."""
    lowest = np.finfo(np.float32).min
    row, params = np.array([1.0, lowest, 0.5, 0.2], dtype=np.float32), SamplingParams(0.5)
    for others in (slice(1, 2), slice(1, 3)):
        row[others] = lowest
        found = Narrowing(ProcessorOptions(typical_p=0.5)).narrow(row, np.arange(4), params, 3)
        assert found.size > 0 and not set(found) & set(range(4)[others])


def test_xtc_drops_all_top_choices_but_the_least_likely() -> None:
    """As llama.cpp does; nothing where fewer than two reach the threshold, or the coin says no."""
    params = SamplingParams(temperature=1.0, seed=4)
    logits = np.log([0.05, 0.3, 0.4, 0.2, 0.05]).tolist()

    def left(probability: float, threshold: float, row: list[float] = logits, position: int = 9) -> list[int]:
        narrowing = Narrowing(ProcessorOptions(xtc_probability=probability, xtc_threshold=threshold))
        return list(narrowing.narrow(np.array(row, dtype=np.float32), np.arange(len(row)), params, position))

    assert left(1.0, 0.1) == [0, 3, 4] and left(1.0, 0.35) == left(0.0, 0.1) == [0, 1, 2, 3, 4]
    is_narrowed = [len(left(0.5, 0.1, position=position)) == 3 for position in range(400)]
    assert is_narrowed == [coin(4, position) < 0.5 for position in range(400)] and 160 < sum(is_narrowed) < 240
    assert (left(1.0, 0.1, [0.0] * 3, 0), left(1.0, 0.1, [0.0, 0.0, -math.inf], 0)) == ([2], [1])


def test_the_coin_is_pinned_to_the_bit() -> None:
    """A second stream: other implementations must toss the same."""
    assert [coin(seed, position) for seed, position in ((0, 0), (7, 0), (7, 1), (2**63 - 1, 4095))] == GOLDEN_COINS


GOLDEN_COINS = [0.29721999892903184, 0.9349542191484321, 0.36766740234160067, 0.021071590597618095]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 500),
    st.sampled_from([0.0, 0.8, 1.5]),
    st.integers(0, 6),
    st.sampled_from([0.3, 1.0]),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_the_first_candidate_is_the_pick(seed: int, temperature: float, top_k: int, typical: float, xtc: float) -> None:
    """A device ranks by the same truncated distribution."""
    params, row = SamplingParams(temperature, top_k, seed=seed), row_of(seed)
    narrowing = Narrowing(ProcessorOptions(typical_p=typical, xtc_probability=xtc, xtc_threshold=0.05))
    first, *_ = candidates(row, params, 11, 4, narrowing).tokens
    assert first == pick(row, params, 11, narrowing)
    assert temperature > 0.0 or first == pick(row, params, 11)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("repetition_penalty", lambda: ProcessorOptions(repetition_penalty=0.0)),
        ("repetition_penalty", lambda: ProcessorOptions(repetition_penalty=math.nan)),
        ("presence_penalty", lambda: ProcessorOptions(presence_penalty=2.1)),
        ("frequency_penalty", lambda: ProcessorOptions(frequency_penalty=-math.inf)),
        ("logit_bias", lambda: ProcessorOptions(logit_bias=((1, 101.0),))),
        ("logit_bias", lambda: ProcessorOptions(logit_bias=((1, math.nan),))),
        ("logit_bias", lambda: ProcessorOptions(logit_bias=((-1, 1.0),))),
        ("logit_bias", lambda: ProcessorOptions(logit_bias=((1, 1.0), (1, 2.0)))),
        ("logit_bias", lambda: ProcessorOptions(logit_bias=tuple((i, 1.0) for i in range(MAX_BIASES + 1)))),
        ("bad_words", lambda: ProcessorOptions(bad_words=((),))),
        ("bad_words", lambda: ProcessorOptions(bad_words=((1, -1),))),
        ("bad_words", lambda: ProcessorOptions(bad_words=((1,) * 33,))),
        ("bad_words", lambda: ProcessorOptions(bad_words=((1,),) * (MAX_BAD_WORDS + 1))),
        ("min_tokens", lambda: ProcessorOptions(min_tokens=-1)),
        ("allowed_token_ids", lambda: ProcessorOptions(allowed_ids=())),
        ("allowed_token_ids", lambda: ProcessorOptions(allowed_ids=(-3,))),
        ("allowed_token_ids", lambda: ProcessorOptions(allowed_ids=(1,) * (MAX_ALLOWED_IDS + 1))),
        ("typical_p", lambda: ProcessorOptions(typical_p=0.0)),
        ("typical_p", lambda: ProcessorOptions(typical_p=math.nan)),
        ("xtc_probability", lambda: ProcessorOptions(xtc_probability=1.01)),
        ("xtc_threshold", lambda: ProcessorOptions(xtc_threshold=-0.1)),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(name: str, make: Callable[[], object]) -> None:
    """NaN included."""
    with pytest.raises(SamplingError, match=rf"^{name} "):
        make()


def test_a_plan_replays_the_part_of_the_text_that_the_prompt_holds() -> None:
    """A resumed text's penalties and bad words see it as text; a plain plan has no state."""
    rules = ProcessorOptions(presence_penalty=1.0, bad_words=((4, 6),))
    (state,) = ProcessorPlan(rules, num_generated=2).states([6, 5, 4], VOCAB)
    row = np.zeros(VOCAB, dtype=np.float32)
    state.apply(row)
    assert state.length == 2
    assert {token: row[token] for token in np.flatnonzero(row)} == {4: -1.0, 5: -1.0, 6: -np.inf}
    assert ProcessorPlan(ProcessorOptions(typical_p=0.5)).states([6], VOCAB) == []
    assert ProcessorPlan().narrowing is None
