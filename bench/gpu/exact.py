"""Part 1: whether the GPU gives the same picks and texts, and what a batch's shape changes in its logits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from bench.gpu.needs import ROOT
from bench.gpu.place import Run
from bench.plain_text import Difference, first_difference, plain_texts
from numpy.typing import NDArray
from tools.tiny_sources import make_tiny_model

from outrider.edge.results import GenerationRequest
from outrider.models.picks.sampling import SamplingParams, noise_bits, pick
from outrider.models.picks.sampling_torch import noise_bits as torch_noise_bits
from outrider.models.picks.sampling_torch import pick_rows
from outrider.models.runtimes import open_batch_runtime
from outrider.models.runtimes.base import BatchRuntime, RuntimeOptions, SequenceSlice
from outrider.models.runtimes.torch_loading import load_causal_lm
from outrider.models.text.tokenizer import Tokenizer
from outrider.reference import load_prompts, target_dir

SAMPLINGS: Final = {
    "greedy": SamplingParams(),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "top-k 40, min-p 0.02": SamplingParams(temperature=0.7, top_k=40, min_p=0.02),
}
SAME_LOGITS_SCORE: Final = 1e-9
SAME_LOGITS_MASS: Final = 1e-5
"""From the same logits, only the last bits of a logarithm and of a sum differ: no more is a near tie."""


def measure(run: Run) -> list[str]:
    """The part. Returns what should not be, in words."""
    missed = [*_hashes(run), *_picks(run)]
    if run.is_cuda:
        missed += _exports(run)
    for dtype in ("f32", "bf16"):
        if run.has_time(f"texts in {dtype}"):
            missed += _texts(run, dtype)
        if run.has_time(f"shapes in {dtype}"):
            _shapes(run, dtype)
    return missed


def _exports(run: Run) -> list[str]:
    """tests/test_on_gpu.py: exports for a GPU pass their checks there, and a tree has the logits of its lines."""
    tests = [sys.executable, "-m", "pytest", "tests/test_on_gpu.py", "-q", "-rs", "-p", "no:cacheprovider"]
    compiled = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(tests, cwd=ROOT, env=compiled, capture_output=True, text=True, check=False)
    run.note("test_on_gpu", {"status": done.returncode, "output": done.stdout[-4000:] + done.stderr[-2000:]})
    return [] if done.returncode == 0 else [f"tests/test_on_gpu.py ends with {done.returncode}: {done.stdout[-500:]}"]


def _hashes(run: Run) -> list[str]:
    rng = np.random.default_rng(0)
    seeds = [0, 1, 2**32 - 1, 2**64 - 1, *(int(seed) for seed in rng.integers(0, 2**63, run.sizes.rows))]
    positions = [0, 1, 2**20, *(int(at) for at in rng.integers(0, 2**17, len(seeds) - 3))]
    tokens = np.arange(run.sizes.vocab)
    there = torch.from_numpy(tokens).to(run.device)
    num_wrong = 0
    for seed, position in zip(seeds, positions, strict=True):
        found = torch_noise_bits([seed], [position], there)[0].cpu().numpy()
        num_wrong += int((found != noise_bits(seed, position, tokens)).sum())
    run.note("hash", {"words": len(seeds) * tokens.size, "different": num_wrong})
    return [f"{num_wrong} words of the hash differ from numpy's; expected none"] if num_wrong else []


class _Row:
    """A model that gives these logits, for `first_difference`."""

    num_blocks = 1

    def __init__(self, row: NDArray[np.float32]) -> None:
        self._row = row

    def forward(self, batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
        """See `PlainModel`."""
        return self._row[None]

    def close(self) -> None:
        """Nothing is held."""


def _picks(run: Run) -> list[str]:
    """The same rows picked from on the device and by numpy; in the random rows many logits are equal, as in bf16."""
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((run.sizes.rows, run.sizes.vocab), np.float32) * 3
    rows[::2] = torch.from_numpy(rows[::2].copy()).bfloat16().float().numpy()
    there = torch.from_numpy(rows).to(run.device)
    missed: list[str] = []
    told: dict[str, Any] = {}
    for name, one in SAMPLINGS.items():
        params = [SamplingParams(one.temperature, one.top_k, one.top_p, one.min_p, seed) for seed in range(len(rows))]
        positions = [int(at) for at in rng.integers(1, 200, len(rows))]
        found = pick_rows(there, params, positions)
        differ: list[Difference] = []
        for row, p, position, token in zip(rows, params, positions, found, strict=True):
            if token is None or token != (expected := pick(row, p, position)):
                request = _request([0] * position, p, 1)
                other = -1 if token is None else token
                differ += filter(None, [first_difference(_Row(row), request, [expected], [other])])
        near = sum(d.score_gap < SAME_LOGITS_SCORE or d.mass_gap < SAME_LOGITS_MASS for d in differ)
        told[name] = {"picks": len(rows), "different": len(differ), "near_ties": near}
        if len(differ) > near:
            missed.append(f"{name}: {len(differ) - near} picks differ from numpy's beyond a near tie: {differ[:3]}")
    run.note("picks", told)
    return missed


def _request(prompt: Sequence[int], params: SamplingParams, max_tokens: int) -> GenerationRequest:
    return GenerationRequest(tuple(prompt), params, max_tokens, stop_ids=frozenset(), ignore_eos=True)


def _open(path: Path, run: Run, dtype: str) -> BatchRuntime:
    return open_batch_runtime(
        "torch", path, RuntimeOptions(device=run.device, num_threads=1, properties={"dtype": dtype})
    )


def _prompts(run: Run) -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.from_dir(target_dir())
    return [tuple(tokenizer.encode(prompt.text)[: run.sizes.tokens]) for prompt in load_prompts(run.sizes.texts)]


def _texts(run: Run, dtype: str) -> list[str]:
    """Greedy texts of the runtime against transformers' generate, both on the device in the same type.

    In FP32 a difference that is no near tie is a miss. In bf16 the sum's order decides more: counted, with the gaps.
    """
    told: dict[str, Any] = {}
    missed: list[str] = []
    prompts = _prompts(run)
    sources = {"reference target": target_dir()}
    for family in run.sizes.families:
        place = run.made / f"tiny-{family}"
        sources[family] = place if place.is_dir() else make_tiny_model(family, place, vocab_size=4096)
    for name, path in sources.items():
        requests = [_request(prompt, SamplingParams(), run.sizes.tokens) for prompt in prompts]
        expected = _generate(path, prompts, run, dtype)
        with closing(_open(path, run, dtype)) as runtime:
            texts = plain_texts(runtime, requests)
            differ = [
                found
                for request, a, b in zip(requests, expected, texts, strict=True)
                if (found := first_difference(runtime, request, a, b)) is not None
            ]
        near = sum(found.is_near_tie for found in differ)
        gaps = sorted(found.score_gap for found in differ)
        told[name] = {"texts": len(texts), "different": len(differ), "near_ties": near, "score_gaps": gaps}
        if dtype == "f32" and len(differ) > near:
            missed.append(f"{name} in FP32: {len(differ) - near} texts differ from transformers' beyond a near tie")
    run.note(f"texts_{dtype}", told)
    return missed


def _generate(path: Path, prompts: Sequence[tuple[int, ...]], run: Run, dtype: str) -> list[tuple[int, ...]]:
    """transformers' own greedy loop, one text at a time: with its cache, without padding."""
    # Plain attention: transformers' fused attention silently skips some steps, such as Gemma 2's soft-capping.
    model = load_causal_lm(path, torch.float32 if dtype == "f32" else torch.bfloat16, "eager")
    model = model.to(run.device)
    count = run.sizes.tokens
    config = transformers.GenerationConfig(
        do_sample=False, temperature=None, max_new_tokens=count, min_new_tokens=count, pad_token_id=0
    )
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=run.device)
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        texts.append(tuple(made[0, len(prompt) :].tolist()))
    return texts


def _shapes(run: Run, dtype: str) -> None:
    """The same rows from steps of other shapes, against one token at a time alone: what batching does to logits.

    Standard deviations of the logits, and how many picks change, greedy and with noise.
    """
    (prompt, *_), count = _prompts(run), 8
    num_rows = count * max(1, run.sizes.tokens // 24)
    with closing(_open(target_dir(), run, dtype)) as runtime:
        texts = plain_texts(runtime, [_request(prompt, SamplingParams(), num_rows)])
        tokens, start = [*prompt, *texts[0]], len(prompt)
        per = -(-len(tokens) // runtime.block_size)
        alone = np.concatenate(_in_steps(runtime, tokens, start, 1, per, 1))
        told: dict[str, Any] = {}
        for at_once, num in product((1, count), run.sizes.sessions):
            if num * per <= runtime.num_blocks:
                rows = np.concatenate(_in_steps(runtime, tokens, start, at_once, per, num))
                each = "one token" if at_once == 1 else f"{at_once} tokens"
                told[f"{num} sequences, {each} each"] = _compare(alone, rows, start)
    run.note(f"shapes_{dtype}", told)


def _in_steps(
    runtime: BatchRuntime, tokens: Sequence[int], start: int, at_once: int, per: int, num: int
) -> list[NDArray[np.float32]]:
    """Rows of the first of `num` equal sequences, each step with `at_once` tokens of each."""
    tables = [list(range(i * per, (i + 1) * per)) for i in range(num)]
    for table in tables:
        runtime.forward([SequenceSlice(tokens[:start], 0, table, 1)])
    found = []
    for past in range(start, len(tokens), at_once):
        new = tokens[past : past + at_once]
        found.append(runtime.forward([SequenceSlice(new, past, table, len(new)) for table in tables])[: len(new)])
    return found


def _compare(alone: NDArray[np.float32], rows: NDArray[np.float32], start: int) -> dict[str, Any]:
    error = np.abs(alone - rows)
    sampled = [SamplingParams(temperature=0.8, seed=seed) for seed in range(50)]
    pairs = list(zip(alone, rows, strict=True))
    changed = sum(pick(a, p, start + i) != pick(b, p, start + i) for i, (a, b) in enumerate(pairs) for p in sampled)
    return {
        "max_over_std": float(error.max() / alone.std()),
        "mean_over_std": float(error.mean() / alone.std()),
        "greedy_changed": int((alone.argmax(1) != rows.argmax(1)).sum()),
        "greedy": len(pairs),
        "sampled_changed": changed,
        "sampled": len(pairs) * len(sampled),
    }
