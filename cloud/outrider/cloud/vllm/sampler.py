"""Puts Outrider's position-keyed pick in the place of vLLM's samplers (V1 model runner, synchronous scheduling).

A drafted token is accepted if and only if it is the pick at its position; the first that is not is replaced by the
pick. It runs on the device that the logits are on. Temperature, top-k, top-p and min-p are ours; vLLM's own processing
of logits is skipped: penalties and the like are our engine's (`worker_choosers`), and read their rows on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from outrider.cloud.vllm.terms import Terms, terms_of
from outrider.cloud.vllm.worker_choosers import RequestChoosers, WorkerGrammars, report_found
from outrider.models.picks.sampling import SamplingParams
from outrider.models.picks.sampling_torch import pick_rows

_NONE: Final = -1
"""No token: vLLM's placeholder, and `faulty_rows.FAULTY` for a row that is not finite."""


class Rows:
    """Which request, at which position, each row of the present batch samples for."""

    def __init__(self, runner: Any, grammars: WorkerGrammars) -> None:
        self._runner = runner
        self._terms: dict[str, Terms | None] = {}
        self.choosers = RequestChoosers(grammars)

    def chosen(self, index: int, logits: torch.Tensor, drafted: Sequence[int]) -> list[int] | None:
        """The tokens of the batch's request at `index`, from its rows [len(drafted) + 1, V]; None: picks are enough.

        [_NONE] where a row is not finite.
        """
        if index >= self._runner.input_batch.num_reqs:  # vLLM's profiling run
            return None
        name = self._runner.input_batch.req_ids[index]
        terms = self._terms_of(name)
        if terms is None or not terms.needs_chooser:
            return None
        state = self._runner.requests[name]
        prompt = state.prompt_token_ids
        rows, tokens = logits.float().cpu().numpy(), [*prompt, *state.output_token_ids]
        return self.choosers.choose(name, terms, rows, drafted, tokens, len(prompt)) or [_NONE]

    def batch(self, count: int) -> tuple[list[SamplingParams], list[int]]:
        """For each of `count` requests: its parameters, and the position of its next token."""
        batch = self._runner.input_batch
        if batch.num_reqs < count:  # vLLM's profiling run has no requests
            return [SamplingParams()] * count, [0] * count
        found = [self._terms_of(each) for each in batch.req_ids[: batch.num_reqs]]
        positions = [int(n) for n in batch.num_tokens_no_spec[: batch.num_reqs]]
        return [SamplingParams() if terms is None else terms.params for terms in found], positions

    def _terms_of(self, name: str) -> Terms | None:
        if name not in self._terms:
            for gone in self._terms.keys() - self._runner.requests.keys():
                del self._terms[gone]
                self.choosers.forget(gone)
            self._terms[name] = terms_of(self._runner.requests[name].sampling_params.extra_args)
        return self._terms[name]


def until_wrong(picks: Sequence[int | None], drafted: Sequence[int]) -> list[int]:
    """The picks up to the first that is not the drafted token, or before the first that is None."""
    tokens: list[int] = []
    for pick, guess in zip(picks, [*drafted, None], strict=True):
        if pick is None:
            break
        tokens.append(pick)
        if pick != guess:
            break
    return tokens


class OutriderSampler(Sampler):
    """One pick a request, where nothing was drafted."""

    def __init__(self, rows: Rows, logprobs_mode: Any) -> None:
        super().__init__(logprobs_mode)
        self._rows = rows

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *_: Any, **__: Any) -> SamplerOutput:
        """The picks, int32 [requests, 1]."""
        params, positions = self._rows.batch(logits.shape[0])
        picks = [_NONE if token is None else token for token in pick_rows(logits.float(), params, positions)]
        for index in range(len(picks)):
            chosen = self._rows.chosen(index, logits[index : index + 1], ())
            if chosen is not None:
                picks[index] = chosen[0]
        ids = torch.tensor(picks, dtype=torch.int32, device=logits.device).unsqueeze(1)
        return SamplerOutput(sampled_token_ids=ids, logprobs_tensors=None)


class OutriderVerifier(RejectionSampler):
    """The picks of drafted rows, up to the first that is not the drafted token."""

    def __init__(self, rows: Rows, sampler: OutriderSampler, speculative_config: Any, device: torch.device) -> None:
        super().__init__(sampler, speculative_config, device)
        self._rows = rows

    def forward(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> SamplerOutput:
        """The committed tokens, int32 [requests, most drafted + 1], the rest _NONE; logits: [drafted + requests, V]."""
        counts: list[int] = metadata.num_draft_tokens
        params, positions = self._rows.batch(len(counts))
        row_params: list[SamplingParams] = []
        row_positions: list[int] = []
        for own, position, count in zip(params, positions, counts, strict=True):
            row_params += [own] * (count + 1)
            row_positions += range(position, position + count + 1)
        picks = pick_rows(logits.float(), row_params, row_positions)
        drafts: list[int] = metadata.draft_token_ids.tolist()
        out = torch.full((len(counts), metadata.max_spec_len + 1), _NONE, dtype=torch.int32)
        row = drafted = 0
        for request, count in enumerate(counts):
            guesses = drafts[drafted : drafted + count]
            chosen = self._rows.chosen(request, logits[row : row + count + 1], guesses)
            if chosen is None:
                chosen = until_wrong(picks[row : row + count + 1], guesses)
            out[request, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
            row += count + 1
            drafted += count
        return SamplerOutput(sampled_token_ids=out.to(logits.device), logprobs_tensors=None)


def install(runner: Any, grammars: WorkerGrammars) -> None:
    """Replaces the runner's samplers."""
    rows = Rows(runner, grammars)
    runner.sampler = OutriderSampler(rows, runner.sampler.logprobs_mode)
    runner.rejection_sampler = OutriderVerifier(rows, runner.sampler, runner.speculative_config, runner.device)
    report_found(runner, rows.choosers)
