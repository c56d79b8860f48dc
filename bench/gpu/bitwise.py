"""Part 5: whether `--exact bitwise` keeps its promise: one text alone, in a large batch, in small ones with trees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import Final

import numpy as np
from bench.gpu.place import Run
from tests.requests import flat_request

from outrider.cloud.engine import Engine, EngineConfig, Policy
from outrider.cloud.engine.config import TreeForm
from outrider.cloud.seam import CommitEvent, Event
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes import open_batch_runtime
from outrider.models.runtimes.base import BatchRuntime, RuntimeOptions
from outrider.models.text.tokenizer import Tokenizer
from outrider.reference import load_prompts, target_dir

Texts = list[list[int]]
_AHEAD: Final = 4
WITH_TREES, ALONE = "with trees of drafts", "alone"


def measure(run: Run) -> list[str]:
    """The part. Returns what should not be, in words."""
    sizes = run.sizes
    tokenizer = Tokenizer.from_dir(target_dir())
    given = [tuple(tokenizer.encode(prompt.text)[:64]) for prompt in load_prompts(sizes.prompts * 4)]
    count = -(-sizes.bitwise_tokens // sizes.tokens)
    prompts = [given[number % len(given)] for number in range(count)]
    largest = max(sizes.sessions)
    options = RuntimeOptions(
        device=run.device,
        is_batch_invariant=True if run.is_cuda else None,  # the kernels need a GPU
        properties={"dtype": "bf16" if run.is_cuda else "f32"},
    )
    with closing(open_batch_runtime("torch", target_dir(), options)) as runtime:
        told, counts = Counter[str](), Counter(accepted=0, rejected=0)
        alone = _sampled(runtime, prompts[: sizes.prompts], sizes.tokens, 1)
        for first in range(0, count, largest):
            if not run.has_time(f"bitwise: {count - first} texts", 0.95):
                break
            group = prompts[first : first + largest]
            batched = _sampled(runtime, group, sizes.tokens, largest, first=first)
            drafted = _sampled(runtime, group, sizes.tokens, max(1, largest // 2), batched, counts, first)
            told["tokens"] += sum(map(len, batched))
            told[WITH_TREES] += _different(batched, drafted)
            told[ALONE] += 0 if first else _different(alone, batched[: sizes.prompts])
            run.note("bitwise", dict(told) | {"drafted tokens": dict(counts)})
    missed = [
        f"bitwise: no drafted token was {name}" for name, number in counts.items() if told["tokens"] and not number
    ]
    if told["tokens"] < sizes.bitwise_tokens and run.is_cuda:
        missed.append(f"bitwise: {told['tokens']} tokens in the time there was, of {sizes.bitwise_tokens}")
    wrong = {name: told[name] for name in (WITH_TREES, ALONE) if told[name]}
    return [*missed, *(f"bitwise: other tokens {name}: {number}" for name, number in wrong.items() if run.is_cuda)]


def _sampled(
    runtime: BatchRuntime,
    prompts: Sequence[tuple[int, ...]],
    length: int,
    at_once: int,
    drafted: Texts | None = None,
    counts: Counter[str] | None = None,
    first: int = 0,
) -> Texts:
    """Sampled texts of so many sequences at once. drafted: what they are drafted from, with wrong guesses beside.
    counts: gets the drafted tokens that were accepted, and those that were not. first: the seed of the first text.
    """
    engine = Engine(
        runtime,
        EngineConfig(max_running=at_once, max_queue=len(prompts), policy=Policy.VERIFY, form=TreeForm.TREE),
    )
    rng, vocab_size = np.random.default_rng(0), runtime.limits.vocab_size
    texts: Texts = [[] for _ in prompts]
    numbers: dict[int, int] = {}
    for index, prompt in enumerate(prompts):

        def sink(event: Event, index: int = index) -> None:
            if isinstance(event, CommitEvent):
                texts[index] += event.tokens
                if counts is not None:
                    counts["accepted"] += event.accepted
                    counts["rejected"] += event.proposed - event.accepted

        params = SamplingParams(temperature=0.8, seed=first + index)
        numbers[index] = engine.submit(flat_request(prompt, params, length, patience_ms=0.0), sink)
    while engine.has_work:
        engine.step()
        for index, text in enumerate(texts) if drafted is not None else ():
            if 0 < len(text) < length - 1 and drafted is not None:
                right = drafted[index][len(text) : len(text) + int(rng.integers(1, _AHEAD + 1))]
                wrong = [*right[:-1], (right[-1] + 1) % vocab_size]
                engine.draft(numbers[index], len(text), [wrong, right] if rng.integers(2) else [right, wrong])
    return texts


def _different(expected: Texts, found: Texts) -> int:
    """Tokens from the first one on that differs."""
    pairs = zip(expected, found, strict=True)
    firsts = (next((at for at, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0])) for pair in pairs)
    return sum(len(text) - first for text, first in zip(expected, firsts, strict=True))
