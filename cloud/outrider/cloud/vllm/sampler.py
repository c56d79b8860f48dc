"""Puts Outrider's position-keyed pick in the place of vLLM's samplers (V1 model runner, synchronous scheduling).

A drafted token is accepted if and only if it is the pick at its position; the first that is not is replaced by the
pick. vLLM's own processing of logits is skipped: all of it is ours (`worker_choosers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from outrider.cloud.vllm.terms import Terms, terms_of
from outrider.cloud.vllm.worker_choosers import Asked, RequestChoosers, WorkerGrammars, report_found
from outrider.models.processors.rows_torch import DraftedRows


class Batch:
    """Tells for what the rows of the present step are, from what the runner's host has of it."""

    def __init__(self, runner: Any, grammars: WorkerGrammars) -> None:
        self._runner = runner
        self._terms: dict[str, Terms | None] = {}
        self.choosers = RequestChoosers(grammars)

    def choose(self, logits: torch.Tensor, counts: Sequence[int], width: int) -> SamplerOutput:
        """The committed tokens, int32 [requests, width], -1 behind them and for a row that is not finite.

        logits: [rows, V]; changed where they are float32. counts: of the drafted tokens of each request.
        """
        asked = [self._asked(index, count) for index, count in enumerate(counts)]
        drafted = DraftedRows([each.drafted for each in asked], width, logits.device)
        step = self.choosers.prepare(asked, logits.shape[1], logits.device)
        for each in asked:
            if each.terms is not None and each.terms.processors.changes_rows:
                self._terms[each.key] = self.choosers.kept_terms(each.key, each.terms)
        tokens = drafted.committed(step.picks(logits.to(torch.float32).contiguous()))
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)

    def _asked(self, index: int, count: int) -> Asked:
        runner, batch = self._runner, self._runner.input_batch
        if index >= batch.num_reqs:  # vLLM's profiling run has no requests
            return Asked("", None, 0, (-1,) * count)
        name = batch.req_ids[index]
        state = runner.requests[name]
        return Asked(
            name,
            self._terms_of(name),
            int(batch.num_tokens_no_spec[index]),
            batch.spec_token_ids[index][:count],
            state.prompt_token_ids,
            state.output_token_ids,
            bool(runner.discard_request_mask.np[index]),
        )

    def _terms_of(self, name: str) -> Terms | None:
        if name not in self._terms:
            for gone in self._terms.keys() - self._runner.requests.keys():
                del self._terms[gone]
                self.choosers.forget(gone)
            self._terms[name] = terms_of(self._runner.requests[name].sampling_params.extra_args)
        return self._terms[name]


class OutriderSampler(Sampler):
    """One pick a request, where nothing was drafted."""

    def __init__(self, batch: Batch, logprobs_mode: Any) -> None:
        super().__init__(logprobs_mode)
        self._batch = batch

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *_: Any, **__: Any) -> SamplerOutput:
        """As `Batch.choose`."""
        return self._batch.choose(logits, [0] * logits.shape[0], 1)


class OutriderVerifier(RejectionSampler):
    """The picks of drafted rows, up to the first that is not the drafted token."""

    def __init__(self, batch: Batch, sampler: OutriderSampler, speculative_config: Any, device: torch.device) -> None:
        super().__init__(sampler, speculative_config, device)
        self._batch = batch

    def forward(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> SamplerOutput:
        """As `Batch.choose`; logits: [drafted + requests, V]."""
        return self._batch.choose(logits, metadata.num_draft_tokens, metadata.max_spec_len + 1)


def install(runner: Any, grammars: WorkerGrammars) -> None:
    """Replaces the runner's samplers."""
    batch = Batch(runner, grammars)
    runner.sampler = OutriderSampler(batch, runner.sampler.logprobs_mode)
    runner.rejection_sampler = OutriderVerifier(batch, runner.sampler, runner.speculative_config, runner.device)
    report_found(runner, batch.choosers)
