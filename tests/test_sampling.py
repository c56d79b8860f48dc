"""Tests sampling: golden vectors, the distribution of the noise, truncation against transformers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from scipy import stats

from outrider.models.errors import ModelFault, SamplingError
from outrider.models.picks.acceptance import AcceptedBranch, Rule, accept_tree
from outrider.models.picks.sampling import (
    MAX_GUMBEL,
    MAX_SEED,
    SamplingParams,
    candidates,
    gumbel,
    noise_bits,
    noise_key,
    pick,
    survivors,
)

Logits = NDArray[np.float32]


def rows(size: int = 24) -> st.SearchStrategy[Logits]:
    """Rows of logits with ties: a coarse grid makes them common."""
    return arrays(np.float32, size, elements=st.integers(-16, 16).map(lambda i: i / 2))


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 10, 24, 100]),
    top_p=st.sampled_from([1.0, 0.95, 0.9, 0.5, 0.1, 0.001]),
    min_p=st.sampled_from([0.0, 0.02, 0.2, 1.0]),
    seed=st.integers(0, MAX_SEED),
)


@pytest.mark.parametrize(
    ("seed", "position", "key", "bits"),
    [
        (0, 0, 0x48218226FF3CD4BF, [1267780416, 3556634818, 3847759215, 1019012525, 2134585696, 3709280529]),
        (1, 0, 0xDCE423FC82C0D5B8, [2377028903, 3839693445, 2192479362, 1485471402, 3665030011, 4184876692]),
        (0, 1, 0x9CF48BEAFB4F0EFE, [186611133, 3886705462, 1187520847, 3657637323, 817072956, 3212159713]),
        (1234, 56, 0x1C674281470D54E8, [3031030185, 1889349630, 3065579934, 1031998970, 3636927973, 4184736369]),
        (
            9223372036854775807,
            99999,
            0x11DF0A488AF637FD,
            [4292488417, 1899057134, 3761526229, 557197981, 3069359285, 1874369161],
        ),
    ],
)
def test_golden_keys_and_bits(seed: int, position: int, key: int, bits: list[int]) -> None:
    """The position's key, and the hash of token ids 0, 1, 2, 4095, 151935 and 2^31 - 1, are pinned bit by bit."""
    assert noise_key(seed, position) == key
    assert noise_bits(seed, position, np.array([0, 1, 2, 4095, 151935, 2**31 - 1])).tolist() == bits


def test_noise_matches_its_specification_in_plain_integers() -> None:
    """A scalar transcription of the docstring's formulas gives the same words."""

    def fmix32(h: int) -> int:
        h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
        h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
        return h ^ (h >> 16)

    for seed, position, token in [(0, 0, 0), (1, 7, 4095), (MAX_SEED, 100_000, 151_935)]:
        key = noise_key(seed, position)
        word = fmix32(fmix32((token * 0x9E3779B1 + (key & 0xFFFFFFFF)) & 0xFFFFFFFF) ^ (key >> 32))
        assert noise_bits(seed, position, np.array([token])).tolist() == [word]
        expected = -math.log(-math.log((word + 0.5) / 2**32))
        assert gumbel(seed, position, np.array([token]))[0] == pytest.approx(expected, rel=1e-12)


def test_noise_is_gumbel_distributed_over_tokens_positions_and_seeds() -> None:
    """Kolmogorov-Smirnov against the Gumbel law along each of the three keys; nothing exceeds MAX_GUMBEL."""
    along_tokens = gumbel(3, 5, np.arange(20_000))
    along_positions = np.array([gumbel(3, i, np.array([7]))[0] for i in range(5_000)])
    along_seeds = np.array([gumbel(s, 5, np.array([7]))[0] for s in range(5_000)])
    for sample in (along_tokens, along_positions, along_seeds):
        assert stats.kstest(sample, "gumbel_r").pvalue > 1e-3 and sample.max() <= MAX_GUMBEL


def test_neighbouring_positions_and_tokens_are_uncorrelated() -> None:
    """No lag correlation between positions, nor between the noise of neighbouring tokens."""
    noise = np.stack([gumbel(11, i, np.arange(64)) for i in range(2_000)])
    for a, b in ((noise[:-1], noise[1:]), (noise[:, :-1], noise[:, 1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.015


@pytest.mark.parametrize(
    "chosen",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=1.0, min_p=0.1),
    ],
)
def test_picks_follow_the_truncated_softmax(chosen: SamplingParams) -> None:
    """Chi-square over 40,000 positions: shared noise samples the target's own distribution exactly."""
    logits = (np.random.default_rng(5).standard_normal(12) * 1.5).astype(np.float32)
    ids = survivors(logits, chosen)
    weights = np.exp(logits[ids].astype(np.float64) / chosen.temperature)
    counts = np.bincount([pick(logits, chosen, i) for i in range(40_000)], minlength=12)
    assert counts.sum() == counts[ids].sum(), "a truncated token was picked"
    assert stats.chisquare(counts[ids], 40_000 * weights / weights.sum()).pvalue > 1e-3


def test_match_probability_of_coupled_picks_reaches_its_bound() -> None:
    """Two distributions with the same noise agree at least (1 - TV) / (1 + TV) of the time (arXiv 2408.07978)."""
    rng, chosen = np.random.default_rng(2), SamplingParams(temperature=1.0, seed=9)
    p = rng.standard_normal(40).astype(np.float32) * 2
    q = p + rng.standard_normal(40).astype(np.float32)
    probabilities = [np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum() for x in (p, q)]
    distance = 0.5 * np.abs(probabilities[0] - probabilities[1]).sum()
    matches = np.mean([pick(p, chosen, i) == pick(q, chosen, i) for i in range(8_000)])
    assert matches >= (1 - distance) / (1 + distance) - 0.02


@given(rows(), params)
@settings(max_examples=300, deadline=None)
def test_truncation_equals_transformers(logits: Logits, chosen: SamplingParams) -> None:
    """top-k, top-p and min-p leave what transformers' processors leave, except for ties at top-p's edge."""
    import torch
    from transformers.generation import logits_process as processes

    scores = processes.TemperatureLogitsWarper(chosen.temperature)(None, torch.tensor(logits).unsqueeze(0))
    if chosen.top_k:
        scores = processes.TopKLogitsWarper(chosen.top_k)(None, scores)
    if chosen.top_p < 1.0:
        scores = processes.TopPLogitsWarper(chosen.top_p)(None, scores)
    if chosen.min_p > 0.0:
        scores = processes.MinPLogitsWarper(chosen.min_p)(None, scores)
    theirs = np.flatnonzero(np.isfinite(scores[0].numpy()))
    ours = survivors(logits, chosen)
    assert (np.diff(ours) > 0).all() and set(ours[logits[ours] > logits[ours].min()]) <= set(theirs.tolist())
    # Their sort breaks ties at the edge arbitrarily, and their float32 sums round; ours use ids and float64.
    assert abs(len(ours) - len(theirs)) <= 1
    assert sorted(logits[ours])[-len(theirs) :] == sorted(logits[theirs])[-len(ours) :]
    assert chosen.top_p < 1.0 or ours.tolist() == theirs.tolist()


@given(rows(), params, st.integers(0, 1_000), st.integers(1, 8))
@settings(max_examples=200, deadline=None)
def test_candidates_are_the_best_scores_with_their_gaps(
    logits: Logits, chosen: SamplingParams, position: int, count: int
) -> None:
    """Equals a sort of all scores; the first is the pick."""
    _require_best_candidates(logits, chosen, position, count)


@pytest.mark.parametrize("chosen", [SamplingParams(), SamplingParams(0.8, seed=3), SamplingParams(5.0, seed=4)])
def test_candidates_of_a_large_vocabulary(chosen: SamplingParams) -> None:
    """Pruning by blocks and by rare noise loses none, with equal logits too. Where each block's best is far above the
    rest, the bound on the scores needs as many blocks as candidates.
    """
    rng = np.random.default_rng(5)
    for spread in (0.1, 3.0, 10.0):
        logits = (rng.normal(size=20_011) * spread).astype(np.float32)
        _require_best_candidates(logits, chosen, 7, 6)
        _require_best_candidates(np.round(logits), chosen, 7, 6)
    logits = np.linspace(0.0, 1.0, 1100).astype(np.float32)
    logits[64::128] += 50.0
    _require_best_candidates(logits, chosen, 7, 16)


@pytest.mark.parametrize("chosen", [SamplingParams(), SamplingParams(0.8, seed=3), SamplingParams(0.8, top_k=9)])
def test_ids_that_a_model_masks_are_no_candidates(chosen: SamplingParams) -> None:
    """Whatever their noise, -inf is never picked: with fewer other ids there are fewer candidates."""
    logits = np.full(4096, -math.inf, np.float32)
    logits[[7, 9, 4000]] = 1.0, 0.5, 0.2
    found = candidates(logits, chosen, 3, 6)
    assert sorted(found.tokens) == [7, 9, 4000] and max(found.gaps) < math.inf
    logits[[9, 4000]] = -math.inf
    assert candidates(logits, chosen, 3, 6).gaps == [math.inf]


def _require_best_candidates(logits: Logits, chosen: SamplingParams, position: int, count: int) -> None:
    ids = np.arange(logits.size) if chosen.is_greedy else survivors(logits, chosen)
    scores = logits[ids].astype(np.float64)
    if not chosen.is_greedy:
        scores = scores / chosen.temperature + gumbel(chosen.seed, position, ids)
    order = np.lexsort((ids, -scores))[: max(2, count)]
    found, (_, *behind) = candidates(logits, chosen, position, count), (scores[order[0]] - scores[order]).tolist()
    assert found.tokens == ids[order].tolist() and found.tokens[0] == pick(logits, chosen, position)
    assert found.gaps == [*(behind[:1] or [math.inf]), *behind]


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    """Temperature 0 is argmax, ties to the lowest id, whatever the seed."""
    logits = np.array([1, 3, 3, 2], dtype=np.float32)
    assert {pick(logits, SamplingParams(seed=s), 4) for s in range(5)} == {1}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e-6),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", math.nan),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(field: str, value: float) -> None:
    """The message names the parameter and its value; a top_k of -1 is vLLM's "off"."""
    assert SamplingParams(0.8, top_k=-1) == SamplingParams(0.8)
    with pytest.raises(SamplingError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_a_model_fault(bad: float) -> None:
    """Never samples from a row with a NaN, an infinite maximum or nothing but -inf."""
    logits = np.full(8, -math.inf, dtype=np.float32) if bad == -math.inf else np.zeros(8, dtype=np.float32)
    logits[3] = bad
    for chosen in (SamplingParams(), SamplingParams(temperature=1.0)):
        with pytest.raises(ModelFault, match="position 6"):
            pick(logits, chosen, 6)


def test_accept_takes_drafts_while_they_equal_the_picks() -> None:
    """Drafts equal to the picks are accepted with the token after them; a pick replaces the first other draft."""
    logits = np.eye(5, dtype=np.float32)[[2, 4, 1]]
    accept = partial(accept_tree, logits, parents=range(-1, 1), params=SamplingParams(), position=10)
    assert [accept([2, 4]), accept([2, 3]), accept([0, 4])] == [
        AcceptedBranch([2, 4, 1], [0, 1]),
        AcceptedBranch([2, 4], [0]),
        AcceptedBranch([2], []),
    ]
    assert accept([2, 4], stop_ids={4}) == AcceptedBranch([2, 4], [0])
    assert accept([2, 4], max_tokens=1) == AcceptedBranch([2], [])


def test_greedy_rule_is_temperature_zero() -> None:
    """The greedy rule drops the temperature and keeps the rest."""
    chosen = SamplingParams(temperature=0.8, top_k=4, seed=3)
    assert Rule.GREEDY.apply(chosen) == replace(chosen, temperature=0.0) and Rule.COUPLED.apply(chosen) is chosen
