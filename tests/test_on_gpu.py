"""Checks exports for a GPU on the GPU; skipped, with the reason, on a machine without one.

TRITON_INTERPRET=0 python -m pytest tests/test_on_gpu.py    # else the kernels run on Triton's interpreter
"""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.pick_twins import every_way, near_ties, row_kinds
from tests.tiny_models import make_tiny_model, make_tiny_tokenizer

from outrider.cloud.vllm.terms import Terms
from outrider.cloud.vllm.worker_choosers import Asked, Found, RequestChoosers, WorkerGrammars
from outrider.export.check.runner import where_to_check
from outrider.export.make.pipeline import export_model
from outrider.export.recipes import RECIPES, ExportOptions, RuntimeName
from outrider.models.bundle.manifest import Precision, Role
from outrider.models.picks import noise_torch
from outrider.models.picks.row_terms import RowTerms
from outrider.models.picks.sampling import MAX_SEED, SamplingParams, noise_bits
from outrider.models.picks.sampling_torch import choose_rows
from outrider.models.processors.options import PLAIN, ProcessorOptions
from outrider.models.processors.rows_torch import DraftedRows
from outrider.models.runtimes import open_batch_runtime
from outrider.models.runtimes.base import RuntimeOptions, SequenceSlice, TreeRuntime

NUM_IDS = 152_000
GPU_RECIPES = [
    (role, runtime, precision)
    for (role, device, runtime), precisions in RECIPES.items()
    if device == "gpu"
    for precision in precisions
]


def _torch_with_cuda() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if os.environ["TRITON_INTERPRET"] != "0":
        pytest.skip("Triton's kernels are interpreted: set TRITON_INTERPRET=0")
    return torch


def _judge_waits(mode: str) -> None:
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize(("role", "runtime", "precision"), GPU_RECIPES)
def test_an_export_for_a_gpu_passes_its_check_there(
    role: Role, runtime: RuntimeName, precision: Precision, tmp_path: Path
) -> None:
    """Prefill, cached steps, steps of several tokens and steps after rollbacks, in the runtime and on the device."""
    pytest.importorskip(runtime)
    options = ExportOptions(role, precision, runtime, device="gpu")
    if not (place := where_to_check(options)).is_real:
        pytest.skip(f"no GPU for {runtime}: {place.words}")
    make_tiny_tokenizer(tmp_path / "model")
    make_tiny_model("qwen2", tmp_path / "model", vocab_size=320)
    bundle = export_model(tmp_path / "model", tmp_path / "out", options)
    assert bundle.manifest.report.parity.checked_on == place.words
    assert bundle.manifest.report.timing is not None and bundle.manifest.report.timing.is_on_device


@pytest.mark.parametrize("family", ["qwen2", "mistral"])  # Mistral's window is shorter than the text
def test_a_tree_on_cuda_has_the_logits_of_its_lines(family: str, tmp_path: Path) -> None:
    """Two branches in one step, then the second one moved into place: each row is that of its line."""
    _torch_with_cuda()
    path = make_tiny_model(family, tmp_path / family, vocab_size=96)
    options = RuntimeOptions(device="cuda", kv_cache_bytes=1 << 20, properties={"dtype": "f32"})
    runtime = open_batch_runtime("torch", path, options)
    assert isinstance(runtime, TreeRuntime) and runtime.why_no_trees is None
    text = [(5 * i + i * i) % 96 for i in range(31)]
    runtime.forward([SequenceSlice(text, 0, [5, 3], 0)])
    mask = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]], np.uint8)
    rows = runtime.forward([SequenceSlice([7, 8, 9, 10], 31, [5, 3], 4, [31, 31, 32, 32], mask)])
    runtime.move([3 * 32, 3 * 32 + 1], [5 * 32 + 31, 3 * 32])
    moved = runtime.forward([SequenceSlice([11], 33, [5, 3], 1)])
    line = runtime.forward([SequenceSlice([*text, 8, 9, 11], 0, [1, 2], 3)])
    assert np.abs(np.concatenate([rows[1:3], moved]) - line).max() < 1e-3
    runtime.close()


def test_the_noise_on_cuda_is_numpys() -> None:
    """Every word of the hash, for seeds of both words and for late positions."""
    torch = _torch_with_cuda()
    ids, rng = np.arange(NUM_IDS), np.random.default_rng(0)
    seeds = [0, 1, 2**32 - 1, MAX_SEED, *rng.integers(0, 2**63, 16).tolist()]
    positions = [0, 1, 2**20, *rng.integers(0, 2**17, len(seeds) - 3).tolist()]
    found = noise_torch.noise_bits(seeds, positions, torch.from_numpy(ids).cuda()).cpu().numpy()
    for row, seed, position in zip(found, seeds, positions, strict=True):
        assert np.array_equal(row, noise_bits(seed, position, ids)), (seed, position)


def test_rows_on_cuda_are_picked_from_as_by_numpy() -> None:
    """Each truncation, alone and together, of rows of every flatness, with ties, masks and faults."""
    torch = _torch_with_cuda()
    num_picks = num_near = 0
    for kind, rows in row_kinds(np.random.default_rng(1), 1, NUM_IDS).items():
        of = every_way(len(kind))
        logits, positions = np.tile(rows, (len(of), 1)), [1 + 31 * row for row in range(len(of))]
        own, more = [each for each, _ in of], [each if each and each.narrows else None for _, each in of]
        there = torch.from_numpy(logits).cuda()
        tokens = choose_rows(there, RowTerms.of(own, positions, more, there.device)).tolist()
        num_near += near_ties(logits, own, positions, more, tokens)
        num_picks += len(tokens)
    assert num_near <= num_picks / 100


def test_a_vllm_workers_step_on_cuda_waits_for_nothing() -> None:
    """Picks, rules and logprobs of all rows: the CPU's, and no operation waits for the device before they are read."""
    torch = _torch_with_cuda()
    size, rng = 5000, np.random.default_rng(0)
    rules = ProcessorOptions(
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.7,
        logit_bias=((5, 2.0), (40, -3.0)),
        bad_words=((7,), (8, 9)),
        min_tokens=9,
        typical_p=0.9,
    )
    listing = replace(rules, allowed_ids=tuple(range(0, size, 7)), typical_p=1.0)
    params = SamplingParams(temperature=0.8, top_k=50, top_p=0.95)
    asked = [
        Asked(
            str(index), Terms(index, replace(params, seed=index), 9, processors=own, num_logprobs=3), 4, [8, 9], [1, 5]
        )
        for index, own in enumerate((PLAIN, rules, listing, PLAIN))
    ]
    logits = torch.from_numpy(rng.standard_normal((12, size)).astype(np.float32) * 4)
    logits[5] = torch.nan

    def step(device: Any) -> tuple[list[list[int]], Found]:
        choosers = RequestChoosers(WorkerGrammars("", size))
        own = logits.to(device)
        torch.cuda.synchronize()
        for mode in ("default", "error"):  # the first makes kernels, and reserves memory
            rows = own.clone()
            _judge_waits(mode)
            try:
                drafted = DraftedRows([each.drafted for each in asked], 3, device)
                choices = choosers.prepare(asked, size, device)
                picks = choices.picks(rows)
                choices.report_faults(picks)
                committed = drafted.committed(picks)
            finally:
                _judge_waits("default")
            tokens = [[token for token in row if token >= 0] for row in committed.tolist()]
            found = choosers.settle({each.key: row for each, row in zip(asked, tokens, strict=True)})
        return tokens, found

    (here, of_here), (there, of_there) = step(torch.device("cuda")), step(torch.device("cpu"))
    assert here == there and of_here.faults == of_there.faults == {"1": 6}
    for key, logprobs in of_there.logprobs.items():
        for one, other in zip(of_here.logprobs[key], logprobs, strict=True):
            assert one.token == other.token and abs(one.logprob - other.logprob) < 1e-4
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
