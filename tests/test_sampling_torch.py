"""Tests the picks on tensors against numpy's: pruned as on a CPU, and by the operations that GPUs have."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Final
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.pick_twins import Logits, every_way, near_ties, row_kinds, twin_pick, zipf
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.models.picks import narrowing_torch, noise_torch, pruning_torch, sampling_torch
from outrider.models.picks.narrowing_torch import reach_by_bisection, reach_by_sorting
from outrider.models.picks.row_terms import RowTerms
from outrider.models.picks.sampling import MAX_SEED, SamplingParams, noise_bits, pick
from outrider.models.picks.sampling_torch import choose_rows, pick_rows
from outrider.models.processors.options import ProcessorOptions

CPU: Final = torch.device("cpu")
SIZE: Final = 20_011  # the last ids are in no group

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 10, 24, 100]),
    top_p=st.sampled_from([1.0, 0.95, 0.9, 0.5, 0.1, 0.001]),
    min_p=st.sampled_from([0.0, 0.02, 0.2, 1.0]),
    seed=st.integers(0, MAX_SEED),
)
narrowings = st.none() | st.builds(
    ProcessorOptions,
    typical_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.01, 0.1, 0.5]),
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """On a busy machine torch's threads wait for each other, in every operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["pruned", "on a device"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both kinds of implementation, on this processor; for the second, no thresholds by sorting either."""
    if request.param == "on a device":
        monkeypatch.setattr(sampling_torch, "_choose_on_cpu", sampling_torch._choose_on_device)
        monkeypatch.setattr(narrowing_torch, "_reach", reach_by_bisection)
    return str(request.param)


def _chosen(
    logits: Logits, of: list[tuple[SamplingParams, ProcessorOptions | None]], position: int
) -> tuple[list[SamplingParams], list[int], list[ProcessorOptions | None], list[int]]:
    """Parameters, positions, narrowings and tokens of the rows."""
    own, more = [each for each, _ in of], [each for _, each in of]
    positions = [position + 31 * row for row in range(len(of))]
    terms = RowTerms.of(own, positions, [each if each and each.narrows else None for each in more], CPU)
    return own, positions, more, choose_rows(torch.from_numpy(logits), terms).tolist()


@pytest.mark.parametrize("size", [300, SIZE])
def test_rows_of_every_kind_are_picked_from_as_by_numpy(way: str, size: int) -> None:
    """Each truncation, alone and together, of rows of every flatness, with ties, masks and faults; all in one call."""
    num_picks = num_near = 0
    for kind, rows in row_kinds(np.random.default_rng(size), 3, size).items():
        of = [each for each in every_way(len(kind)) for _ in rows]
        logits = np.tile(rows, (len(of) // 3, 1))
        own, positions, more, tokens = _chosen(logits, of, 5)
        num_near += near_ties(logits, own, positions, more, tokens)
        num_picks += len(tokens)
        assert (kind == "faulty") == (tokens.count(-1) == len(tokens))
    assert num_near <= num_picks / 1000


def _small_rows() -> st.SearchStrategy[Logits]:
    values = st.one_of(st.integers(-16, 16).map(lambda i: i / 2), st.just(-np.inf))
    return arrays(np.float32, 27, elements=values).filter(lambda row: bool(np.isfinite(row).any()))


@pytest.mark.parametrize("prunes", [False, True])
@given(_small_rows(), st.lists(st.tuples(params, narrowings), min_size=1, max_size=5), st.integers(0, 10_000))
@settings(max_examples=150, deadline=None)
def test_small_rows_with_many_ties(
    prunes: bool, row: Logits, of: list[tuple[SamplingParams, ProcessorOptions | None]], position: int
) -> None:
    """A coarse grid makes ties common; pruned as if the rows were large, and not."""
    limits: dict[str, Any] = {"_SMALL": 0, "_PROBED": 2, "_MOST_GROUPS": 0.7} if prunes else {}
    with patch.multiple(pruning_torch, **limits) if limits else nullcontext():
        logits = np.stack([row] * len(of))
        near_ties(logits, *_chosen(logits, of, position))


def test_each_way_of_pruning_is_taken() -> None:
    """Peaked rows need no hash of the vocabulary, and none is truncated as a whole; flat ones do."""
    rng = np.random.default_rng(2)
    peaked, level = zipf(rng, 1, SIZE, 2.5), (rng.standard_normal((1, SIZE)) * 0.1).astype(np.float32)
    hashed, relative, survivors = (
        Mock(wraps=getattr(pruning_torch, name)) for name in ("_word_peaks", "relative", "survivors")
    )
    with patch.multiple(pruning_torch, _word_peaks=hashed, relative=relative, survivors=survivors):
        for logits, expected in ((peaked, 0), (level, 1)):
            _chosen(logits, [(SamplingParams(0.8), None)], 1)
            assert hashed.call_count == expected
        survivors.reset_mock()
        truncated = [SamplingParams(0.8, top_p=0.9), SamplingParams(0.8, min_p=0.1), SamplingParams(0.8, top_k=5)]
        for own in truncated:
            _chosen(peaked, [(own, None)], 1)
        assert _num_whole(survivors) == 0
        for own in [*truncated[:2], SamplingParams(0.8, top_k=SIZE // 3)]:
            _chosen(level, [(own, None)], 1)
    assert _num_whole(survivors) == 3
    assert _num_whole(relative) == 0  # whose weights are made strip by strip


def _num_whole(function: Mock) -> int:
    """How many of its calls were for whole rows."""
    return sum(call.args[0].shape[1] == SIZE for call in function.call_args_list)


def test_a_pick_does_not_depend_on_the_other_rows(way: str) -> None:
    """In whatever company and chunk a row is picked from, its token is the same."""
    rows = np.concatenate(list(row_kinds(np.random.default_rng(4), 3, SIZE).values()))
    of = every_way(9)[: len(rows)]
    own, positions, more, together = _chosen(rows, of, 3)
    for row in range(len(rows)):
        terms = RowTerms.of(own[row : row + 1], positions[row : row + 1], more[row : row + 1], CPU)
        assert choose_rows(torch.from_numpy(rows[row : row + 1]), terms).tolist() == together[row : row + 1]


def test_rows_of_a_padded_tensor_are_read_in_place(way: str) -> None:
    """Logits may be a part of a wider tensor, as where a model pads its vocabulary; they are not changed."""
    wide = torch.from_numpy(zipf(np.random.default_rng(6), 4, SIZE + 53, 1.6))
    before, logits = wide.clone(), wide[:, :SIZE]
    for own, more in every_way(1):
        terms = RowTerms.of([own] * 4, range(4), [more if more and more.narrows else None] * 4, CPU)
        assert torch.equal(choose_rows(logits, terms), choose_rows(logits.contiguous(), terms))
    assert torch.equal(wide, before)


def test_rows_that_were_not_finite_before_they_were_changed(way: str) -> None:
    """The caller's mask counts besides the row's own maximum."""
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(3, 1)
    logits[2] = -torch.inf
    for own in (SamplingParams(), SamplingParams(0.8, seed=1), SamplingParams(0.8, top_p=0.5)):
        terms = RowTerms.of([own] * 3, [0] * 3, None, CPU)
        assert (choose_rows(logits, terms, torch.tensor([False, True, True])) == -1).tolist() == [True, False, True]


def test_pick_rows_is_the_same_for_the_host() -> None:
    """None stands for a row that is not finite. A step may have no rows to pick from."""
    logits = np.random.default_rng(3).standard_normal((3, 50)).astype(np.float32)
    own = [SamplingParams(0.8, seed=seed) for seed in range(3)]
    first, _, last = (pick(row, each, at) for row, each, at in zip(logits, own, (4, 5, 6), strict=True))
    logits[1, 7] = np.nan
    assert pick_rows(torch.from_numpy(logits), own, [4, 5, 6]) == [first, None, last]
    assert pick_rows(torch.empty((0, 50)), [], []) == []


def test_rows_that_need_more_leave_the_others_their_kernel() -> None:
    """Whoever asks for typical-p, or XTC where its coin says yes, makes nobody else's top-p dearer."""
    own = [SamplingParams(0.8, top_p=0.9)] * 4
    more = [None, ProcessorOptions(typical_p=0.5), None, ProcessorOptions(xtc_probability=1.0)]
    parts = RowTerms.of(own, range(4), more, torch.device("cpu")).parts
    found = [(part.is_common, np.arange(4)[part.rows].tolist()) for part in parts]
    assert found == [(True, [0, 2]), (False, [1, 3])]


# -- what is made on the way -------------------------------------------------------------------------------------------


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest tensor that is made, and the operations that would make a host wait for a device.

    given: rows of which views are made, too.
    """

    _WAITS: Final = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "unique",
        "repeat_interleave",
        "equal",
        "is_nonzero",
    )

    def __init__(self, given: Logits) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = given.ctypes.data
        self.largest = 0
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        places = args[1] if name in ("index", "index_put_") else ()
        if name in self._WAITS or any(each is not None and each.dtype is torch.bool for each in places):
            self.waits.append(name)
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() != self._given:
                self.largest = max(self.largest, tensor.numel())
        return made


def test_memory_does_not_grow_with_the_rows(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that do not fit one chunk get the same picks; no tensor is larger than a chunk."""
    vocab, num_rows = 400, 23
    monkeypatch.setattr(sampling_torch, "_CHUNK", 3 * vocab + 7)
    logits = np.random.default_rng(1).standard_normal((num_rows, vocab)).round(1).astype(np.float32)
    logits[4, 7] = np.nan
    sampled = [
        SamplingParams(
            0.8 + i / 50, top_k=(0, 5)[i % 2], top_p=(1.0, 0.9, 0.5)[i % 3], min_p=(0.0, 0.05)[i % 2], seed=i
        )
        for i in range(num_rows)
    ]
    mixed = [own if i % 4 else SamplingParams() for i, own in enumerate(sampled)]
    for chosen in (sampled, mixed, [SamplingParams()] * num_rows):
        with _Watch(logits) as watch:
            *_, tokens = _chosen(logits, [(own, None) for own in chosen], 5)
        assert tokens == [
            twin_pick(row, own, 5 + 31 * i) for i, (row, own) in enumerate(zip(logits, chosen, strict=True))
        ]
        assert watch.largest <= 3 * vocab


def test_nothing_waits_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation of the devices' implementation depends on what a tensor holds."""
    monkeypatch.setattr(sampling_torch, "_choose_on_cpu", sampling_torch._choose_on_device)
    monkeypatch.setattr(narrowing_torch, "_reach", reach_by_bisection)
    of = every_way(3)
    logits = zipf(np.random.default_rng(1), len(of), SIZE, 1.6)
    narrowing = [more if more and more.narrows else None for _, more in of]
    with _Watch(logits) as watch:
        terms = RowTerms.of([own for own, _ in of], [7] * len(of), narrowing, CPU)
        tokens = choose_rows(torch.from_numpy(logits), terms, torch.ones(len(of), dtype=torch.bool))
    assert watch.waits == []
    with _Watch(logits) as watch:
        assert tokens.tolist() and int(tokens[0]) >= 0
    assert watch.waits  # it does see such operations


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_the_hash_is_equal_bit_for_bit() -> None:
    """All 32 bits agree, at ids and seeds that overflow a signed word."""
    tokens = np.array([0, 1, 77, 4095, 151_935, 2**31 - 1])
    words = sampling_torch.noise_bits([0, MAX_SEED], [0, 123_456], torch.tensor(tokens))
    expected = [noise_bits(0, 0, tokens).tolist(), noise_bits(MAX_SEED, 123_456, tokens).tolist()]
    assert words.tolist() == expected


@given(st.integers(0, MAX_SEED), st.integers(0, 1 << 20))
@settings(max_examples=50, deadline=None)
def test_the_hash_runs_backwards(seed: int, position: int) -> None:
    """The tokens of the highest words have exactly these."""
    (part,) = RowTerms.of([SamplingParams(1.0, seed=seed)], [position], None, CPU).parts
    tokens = noise_torch.tokens_of_highest(part.low, part.high, 1000)[0].numpy().view(np.uint32)
    assert noise_bits(seed, position, tokens).tolist() == list(range(2**32 - 1000, 2**32))


@given(
    st.lists(
        st.tuples(st.integers(-5, 5) | st.integers(-(2**31), 2**31 - 1), st.integers(0, 8)), min_size=1, max_size=40
    ),
    st.integers(1, 200) | st.just(np.inf),
)
@settings(max_examples=200, deadline=None)
def test_thresholds_are_the_same_by_each_search(pairs: list[tuple[int, int]], wanted: float) -> None:
    """Whole weights, so that every sum is exact: the least key up to which there is enough."""
    keys = torch.tensor([[key for key, _ in pairs]], dtype=torch.int32)
    weights = torch.tensor([[float(weight) for _, weight in pairs]])
    goal = torch.tensor([[wanted]], dtype=torch.float64)
    enough = [key for key, _ in pairs if sum(weight for other, weight in pairs if other <= key) >= wanted]
    expected = min(enough, default=2**31 - 1)
    assert int(reach_by_bisection(keys, weights, goal)) == int(reach_by_sorting(keys, weights, goal)) == expected
    beside = torch.cat([goal, torch.ones_like(goal)])  # another row with another goal
    found = narrowing_torch._reach_by_digits(keys.repeat(2, 1), weights.repeat(2, 1), beside)
    assert int(found[0]) == expected and torch.equal(found[1:], reach_by_sorting(keys, weights, beside[1:]))


def test_equal_tokens_at_an_edge(way: str) -> None:
    """top-k keeps all that equal the k-th; top-p as many as it takes, by id; XTC spares the last."""
    level = np.array([[0.0, -0.0] * 5] * 200, dtype=np.float32)
    for own, more, expected in (
        (SamplingParams(1.0, top_k=2), None, set(range(10))),
        (SamplingParams(1.0, top_p=0.35), None, {0, 1, 2, 3}),
        (SamplingParams(1.0, top_k=2, top_p=0.55), None, set(range(6))),
        (SamplingParams(1.0), ProcessorOptions(xtc_probability=1.0, xtc_threshold=0.1), {9}),
    ):
        *_, tokens = _chosen(level, [(dataclasses.replace(own, seed=seed), more) for seed in range(200)], 0)
        assert set(tokens) == expected, (own, more)
