"""How often the draft's pick is the target's, under shared noise, on text that the target writes.

The draft's pick at a position is a pure function of the true text before it, and a drafted token is only tested when
all before it in its chain were right. So one pass of the draft over the target's text gives every pick that any chain
could have tested, and the outcome of chains of any depth is arithmetic on the vector of matches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from outrider.models.distillation.attention import batch_decoding
from outrider.models.sampling import SamplingParams, pick


@dataclass(frozen=True, slots=True)
class Chain:
    """Counts over rounds of drafting to one depth: a round ends at the first wrong token or when all were right."""

    tested: int = 0
    accepted: int = 0
    rounds: int = 0

    def __add__(self, other: Chain) -> Chain:
        return Chain(self.tested + other.tested, self.accepted + other.accepted, self.rounds + other.rounds)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What one temperature gave; rates are shares in [0, 1].

    per_position: the draft's pick is the target's, at every position of the text. in_chain: the same, per tested token
    of chains of depth `depth`. tokens_per_pass: tokens committed by a target pass, its own included. rejection: what
    classic rejection sampling would accept per position, the sum of min(p, q). error: the standard error of
    `in_chain`, prompts taken as independent.
    """

    temperature: float
    depth: int
    positions: int
    per_position: float
    in_chain: float
    error: float
    tokens_per_pass: float
    rejection: float


def run_chains(matches: NDArray[np.bool_], depth: int) -> Chain:
    """Plays rounds of up to `depth` drafted tokens along one text; `matches` is `[positions]`.

    A round that accepts n tokens moves on by n + 1: the target's own token follows, right or not.
    """
    tested = accepted = rounds = start = 0
    while start < len(matches):
        window = matches[start : start + depth]
        wrong = np.flatnonzero(~window)
        right = len(window) if wrong.size == 0 else int(wrong[0])
        tested += right + (wrong.size > 0)
        accepted += right
        rounds += 1
        start += right + 1
    return Chain(tested, accepted, rounds)


def continue_prompts(
    target: PreTrainedModel, prompts: Sequence[Sequence[int]], temperature: float, new_tokens: int
) -> list[list[int]]:
    """Each prompt and the target's text after it, prompt `i` with seed `i`; shorter rows are padded on the left."""
    with torch.inference_mode(), batch_decoding(target):
        return _continue_prompts(target, prompts, temperature, new_tokens)


def _continue_prompts(
    target: PreTrainedModel, prompts: Sequence[Sequence[int]], temperature: float, new_tokens: int
) -> list[list[int]]:
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    parameters = [SamplingParams(temperature=temperature, seed=row) for row in range(len(prompts))]
    texts = [list(prompt) for prompt in prompts]
    cache = DynamicCache(config=target.config)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    for _ in range(new_tokens):
        output = target(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        )
        logits: NDArray[np.float32] = output.logits[:, -1].float().numpy()
        for text, row, params in zip(texts, logits, parameters, strict=True):
            text.append(pick(row, params, len(text)))
        ids = torch.tensor([text[-1:] for text in texts])
        mask = torch.cat([mask, torch.ones(len(texts), 1, dtype=mask.dtype)], dim=1)
        positions = positions[:, -1:] + 1
    return texts


@torch.inference_mode()
def row_logits(model: PreTrainedModel, text: Sequence[int], start: int) -> Tensor:
    """Logits `[len(text) - start, vocabulary]` fp32 for the tokens of `text` from `start` on, start at least 1."""
    logits: Tensor = model(input_ids=torch.tensor([list(text[:-1])]), use_cache=False).logits
    return logits[0, start - 1 :].float()


def measure(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    new_tokens: int,
    depth: int = 4,
) -> Acceptance:
    """Acceptance over `new_tokens` of the target's text after each prompt, or until it ends; 0 is greedy."""
    end = target.config.eos_token_id
    chains: list[Chain] = []
    hits = positions = 0
    overlap = 0.0
    for seed, text in enumerate(continue_prompts(target, prompts, temperature, new_tokens)):
        start = len(prompts[seed])
        if end in text[start:]:
            text = text[: text.index(end, start) + 1]
        params = SamplingParams(temperature=temperature, seed=seed)
        drafted = row_logits(draft, text, start)
        picks = [pick(row, params, start + offset) for offset, row in enumerate(drafted.numpy())]
        matches = np.array(picks) == np.array(text[start:])
        chains.append(run_chains(matches, depth))
        hits += int(matches.sum())
        positions += len(matches)
        if temperature > 0.0:
            p = torch.softmax(row_logits(target, text, start) / temperature, dim=-1)
            q = torch.softmax(drafted / temperature, dim=-1)
            overlap += float(torch.minimum(p, q).sum())
    total = sum(chains, Chain())
    rate = total.accepted / total.tested
    residuals = [chain.accepted - rate * chain.tested for chain in chains]
    return Acceptance(
        temperature=temperature,
        depth=depth,
        positions=positions,
        per_position=hits / positions,
        in_chain=rate,
        error=math.sqrt(sum(residual**2 for residual in residuals)) / total.tested,
        tokens_per_pass=positions / total.rounds,
        rejection=overlap / positions if temperature > 0.0 else hits / positions,
    )
