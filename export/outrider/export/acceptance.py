"""How often a draft guesses its target: the number by which a pair is judged.

The target's continuations are made first, all prompts in one batch; then the draft goes over the same tokens
and picks, at every position, with the same noise. What is counted is the share of positions where both picks
are equal, which is the acceptance rate per tested token of coupled speculation. Knows no particular runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.models.errors import ExportError
from outrider.models.manifest import Acceptance
from outrider.models.runtimes.base import BatchRuntime, SequenceRuntime, SequenceSlice
from outrider.models.sampling import SamplingParams, pick

NEW_TOKENS = 40
TEMPERATURES = (0.0, 0.8)


def measure_acceptance(
    draft: SequenceRuntime,
    target: BatchRuntime,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    *,
    num_ids: int,
    stop_ids: Sequence[int],
    target_name: str,
) -> Acceptance:
    """Tests up to NEW_TOKENS positions a prompt, prompt i with seed i.

    num_ids: ids that the tokenizer knows; columns beyond are padding, of different width in the two models.
    Raises ExportError if no prompt leaves room for a token.
    """
    params = SamplingParams(temperature=temperature)
    room = min(draft.limits.max_positions, target.limits.max_positions) - NEW_TOKENS
    fitting = [list(prompt) for prompt in prompts if 0 < len(prompt) <= room]
    if not fitting:
        raise ExportError(
            f"no prompt fits {room + NEW_TOKENS} positions with {NEW_TOKENS} new tokens; give shorter ones "
            "with --prompts"
        )
    num_equal = num_tested = 0
    texts = _continue_all(target, fitting, params, num_ids=num_ids, stop_ids=frozenset(stop_ids))
    for seed, (prompt, new) in enumerate(zip(fitting, texts, strict=True)):
        seeded = replace(params, seed=seed)
        draft.truncate(0)
        logits = draft.extend(prompt)
        for index, token in enumerate(new):
            if index:
                logits = draft.extend(new[index - 1 : index])
            num_equal += pick(logits[:num_ids], seeded, len(prompt) + index) == token
            num_tested += 1
    return Acceptance(
        target=target_name,
        temperature=temperature,
        tested_tokens=num_tested,
        rate=round(num_equal / num_tested, 4),
    )


def _continue_all(
    target: BatchRuntime,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    num_ids: int,
    stop_ids: frozenset[int],
) -> list[list[int]]:
    """The target's own continuation of each prompt, as many prompts at a time as its cache holds."""
    longest = max(map(len, prompts)) + NEW_TOKENS
    blocks_each = -(-longest // target.block_size)
    at_once = target.num_blocks // blocks_each
    if not at_once:
        raise ExportError(f"the cache holds {target.num_blocks} blocks, one prompt needs {blocks_each}; raise it")
    texts: list[list[int]] = [[] for _ in prompts]
    for first in range(0, len(prompts), at_once):
        live = list(range(first, min(first + at_once, len(prompts))))
        blocks = {i: range((i - first) * blocks_each, (i - first + 1) * blocks_each) for i in live}
        while live:
            batch = [_slice(prompts[i], texts[i], blocks[i]) for i in live]
            rows = target.forward(batch)
            for row, i in zip(rows, tuple(live), strict=True):
                position = len(prompts[i]) + len(texts[i])
                texts[i].append(pick(row[:num_ids], replace(params, seed=i), position))
                if len(texts[i]) == NEW_TOKENS or texts[i][-1] in stop_ids:
                    live.remove(i)
    return texts


def _slice(prompt: Sequence[int], text: Sequence[int], blocks: range) -> SequenceSlice:
    if not text:
        return SequenceSlice(prompt, 0, blocks, 1)
    return SequenceSlice(text[-1:], len(prompt) + len(text) - 1, blocks, 1)
