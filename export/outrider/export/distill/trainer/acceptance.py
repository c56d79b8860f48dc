"""Measures how often draft and target pick the same token, under shared noise, on text that the target writes.

The draft's pick at a position is a pure function of the text before it, and a drafted token is only tested when all
before it in its round were accepted. So one pass of the draft over the target's text gives every pick that any round
could test, and the outcome of rounds of any depth is arithmetic on the vector of matches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from outrider.export.check.acceptance import Continuation, Rounds, play_rounds, read_along
from outrider.export.distill.trainer.rollout import Decoder
from outrider.export.progress import Stop, never
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.runtimes.base import ModelLimits, SequenceRuntime

_NO_PICK = -1
"""Where a mapped draft has no score for any id."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The result at one temperature; rates are shares in [0, 1].

    per_position: equal picks at every position of the text. in_chain: equal picks per tested token of rounds of
    `depth` drafted tokens. tokens_per_pass: tokens committed by a target pass, its own included. error: the standard
    error of `in_chain`, prompts taken as independent.
    """

    temperature: float
    depth: int
    positions: int
    per_position: float
    in_chain: float
    error: float
    tokens_per_pass: float


@dataclass(frozen=True, slots=True)
class Passage:
    """A prompt's ids and the target's text after it; `start` is where that text begins, `seed` that of its noise.

    Ends with the target's end token, if it wrote one.
    """

    ids: tuple[int, ...]
    start: int
    seed: int


@dataclass(frozen=True, slots=True)
class Score:
    """A draft's result on one passage: rounds of drafting along it, and equal picks over all its positions."""

    counts: Rounds
    hits: int
    positions: int


@torch.inference_mode()
def continue_prompts(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    new_tokens: int,
    *,
    stop_ids: Sequence[int] = (),
    num_ids: int | None = None,
    rows: int | None = None,
    stop: Stop = never,
) -> list[Passage] | None:
    """The target's text after each prompt, prompt `i` with seed `i`, to `new_tokens` or to one of `stop_ids`.

    num_ids: tokens of the tokenizer, None for all columns. rows: prompts at once, None for all. Returns None if
    `stop` says so.
    """
    rows = rows or len(prompts)
    passages: list[Passage] = []
    for first in range(0, len(prompts), rows):
        batch = prompts[first : first + rows]
        found = _continue(target, batch, first, temperature, new_tokens, frozenset(stop_ids), num_ids, stop)
        if found is None:
            return None
        passages += found
    return passages


def _continue(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    first_seed: int,
    temperature: float,
    new_tokens: int,
    stop_ids: frozenset[int],
    num_ids: int | None,
    stop: Stop,
) -> list[Passage] | None:
    decoder = Decoder(target, prompts, num_ids)
    parameters = [SamplingParams(temperature=temperature, seed=first_seed + row) for row in range(len(prompts))]
    texts = [list(prompt) for prompt in prompts]
    is_open = [True] * len(texts)
    for piece in decoder.prefill():
        last = piece[:, -1].clone()
    for _ in range(new_tokens):
        logits: NDArray[np.float32] = last.cpu().numpy()
        for row, (text, params) in enumerate(zip(texts, parameters, strict=True)):
            if is_open[row]:
                text.append(pick(logits[row], params, len(text)))
                is_open[row] = text[-1] not in stop_ids
        if not any(is_open):
            break
        if stop():
            return None
        last = decoder.step(torch.tensor([text[-1:] for text in texts], device=target.device))
    return [
        Passage(tuple(text), len(prompt), params.seed)
        for text, prompt, params in zip(texts, prompts, parameters, strict=True)
    ]


@torch.inference_mode()
def row_logits(model: PreTrainedModel, text: Sequence[int], start: int) -> Tensor:
    """Logits `[len(text) - start, vocabulary]` fp32 for the tokens of `text` from `start` on, start at least 1."""
    logits: Tensor = model(input_ids=torch.tensor([list(text[:-1])], device=model.device), use_cache=False).logits
    return logits[0, start - 1 :].float().cpu()


def score(
    draft: PreTrainedModel, passage: Passage, temperature: float, depth: int = 4, num_ids: int | None = None
) -> tuple[Score, Tensor]:
    """The draft's result on a passage, and its logits `[positions, num_ids]` fp32 over the target's text."""
    params = SamplingParams(temperature=temperature, seed=passage.seed)
    logits = row_logits(draft, passage.ids, passage.start)[:, :num_ids]
    picks = [pick(row, params, passage.start + offset) for offset, row in enumerate(logits.numpy())]
    return _score(picks, passage, depth), logits


def score_sequence(
    draft: SequenceRuntime, passage: Passage, temperature: float, depth: int = 4, *, num_ids: int
) -> Score:
    """As `score`, for a draft that reads token by token. Its sequence holds the passage afterwards."""
    text = Continuation(
        passage.ids[: passage.start],
        passage.ids[passage.start :],
        SamplingParams(temperature=temperature, seed=passage.seed),
    )
    picks = [
        pick(row, text.params, position) if row.max() != -np.inf else _NO_PICK
        for position, _, row in read_along(draft, text, num_ids)
    ]
    return _score(picks, passage, depth)


def _score(picks: Sequence[int], passage: Passage, depth: int) -> Score:
    matches = np.array(picks) == np.array(passage.ids[passage.start :])
    return Score(play_rounds(matches, depth, counts_short_ends=True), int(matches.sum()), len(matches))


class TorchSequence:
    """A `SequenceRuntime` of a model that is in memory, on its device and in its dtype. longest: its positions."""

    def __init__(self, model: PreTrainedModel, longest: int) -> None:
        self.limits = ModelLimits(model.config.get_text_config().vocab_size, longest)
        self._model = model
        self._cache = DynamicCache()  # of whole layers: those of a sliding window cannot be cut back

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return int(self._cache.get_seq_length())

    @torch.inference_mode()
    def extend(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends at least one token; returns the logits after the last."""
        ids = torch.tensor([list(tokens)], device=self._model.device)
        logits: Tensor = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True).logits
        row: NDArray[np.float32] = logits[0, -1].float().cpu().numpy()
        return row

    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on."""
        if length == 0:
            self._cache = DynamicCache()
        else:
            self._cache.crop(length)

    def close(self) -> None:
        """Releases the cache; the model is the caller's."""
        self._cache = DynamicCache()


def summarize(temperature: float, scores: Sequence[Score], depth: int = 4) -> Acceptance:
    """The rates over all passages."""
    rate, residuals = _rate(scores)
    positions = sum(one.positions for one in scores)
    return Acceptance(
        temperature=temperature,
        depth=depth,
        positions=positions,
        per_position=sum(one.hits for one in scores) / positions,
        in_chain=rate,
        error=float(np.sqrt((residuals**2).sum())),
        tokens_per_pass=positions / sum(one.counts.rounds for one in scores),
    )


@dataclass(frozen=True, slots=True)
class Change:
    """How much `in_chain` rose from one draft to another on the same passages, with its standard error.

    Both drafts are measured on the same passages, so the spread between easy and hard passages mostly cancels.
    """

    rise: float
    error: float


def compare(before: Sequence[Sequence[Score]], after: Sequence[Sequence[Score]]) -> Change:
    """The mean change over several settings, such as temperatures, each with scores of the same prompts in one order.

    The error takes prompts as independent, and passages of one prompt at several settings as related.
    """
    rated = [(_rate(was), _rate(is_now)) for was, is_now in zip(before, after, strict=True)]
    rises = [new - old for (old, _), (new, _) in rated]
    residuals = [new - old for (_, old), (_, new) in rated]
    return Change(float(np.mean(rises)), float(np.sqrt((np.mean(residuals, axis=0) ** 2).sum())))


def _rate(scores: Sequence[Score]) -> tuple[float, NDArray[np.float64]]:
    """The rate over all passages, and how much each passage moves it."""
    accepted = np.array([one.counts.accepted for one in scores], dtype=np.float64)
    tested = np.array([one.counts.tested for one in scores], dtype=np.float64)
    mean = float(accepted.sum() / tested.sum())
    return mean, (accepted - mean * tested) / tested.sum()
