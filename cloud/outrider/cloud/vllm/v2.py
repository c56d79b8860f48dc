"""Puts Outrider's pick and drafts from outside into vLLM's V2 model runner.

The pick is a logits processor of the runner's public interface: it leaves only the picked token of each row standing,
so that the stock argmax and the stock greedy verification (accept if and only if equal) do the rest. The runner takes
the number of drafts from the scheduler, and their values from `req_states.draft_tokens` on the device: one copy before
each step joins the two. It keeps a request's tokens on the device only, so they are kept here for the host: those that
it began with, and what vLLM reads of each step. Not public: what `extension.V2_RUNNER_ATTRIBUTES` names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

from outrider.cloud.vllm.terms import Terms, terms_of
from outrider.cloud.vllm.worker_choosers import Asked, RequestChoosers, WorkerGrammars, report_found
from outrider.models.processors.device_copies import to_device


@dataclass(slots=True)
class _Request:
    """A request of the runner. num_first: tokens that it began with; none is picked before they have all run."""

    terms: Terms | None
    prompt: Sequence[int]
    output: list[int]
    num_first: int


class Batch:
    """Tells for what the rows of the present step are, from what is kept here of the runner's requests."""

    def __init__(self, runner: Any, grammars: WorkerGrammars) -> None:
        self.choosers = RequestChoosers(grammars)
        self._states = runner.req_states
        self._requests: dict[str, _Request] = {}
        self._drafts: dict[str, list[int]] = {}  # of the present step

    def begin(self, scheduler_output: Any) -> None:
        """Takes the requests and the drafts of a step, and brings the drafts to where the runner reads them."""
        for name in scheduler_output.finished_req_ids:
            self._requests.pop(name, None)
            self.choosers.forget(name)
        for new in scheduler_output.scheduled_new_reqs:  # those that get blocks again, too
            terms = None if new.sampling_params is None else terms_of(new.sampling_params.extra_args)
            tokens, length = new.prefill_token_ids, new.prompt_len
            self._requests[new.req_id] = _Request(terms, tokens[:length], tokens[length:], len(tokens))
            self.choosers.forget(new.req_id)
        # vLLM pads some requests with -1, which is no row of the embeddings: verified as 0, as the runner has it.
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self._drafts = {name: [max(0, token) for token in tokens] for name, tokens in drafts.items()}
        if self._drafts:
            target = self._states.draft_tokens
            width = target.shape[1]
            slots = [self._states.req_id_to_index[name] for name in self._drafts]
            rows = [(own + [-1] * width)[:width] for own in self._drafts.values()]
            index, values = to_device([np.array(slots, np.int64), np.array(rows, np.int64)], target.device)
            target[index] = values.to(target.dtype)

    def took(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """Takes what vLLM has read of a step."""
        for name, own in tokens.items():
            if name in self._requests:
                self._requests[name].output += own

    def choose(self, logits: Any, slots: Sequence[int], lengths: Sequence[int]) -> Any:
        """Leaves the picks standing; logits: float32 [rows, V]. lengths: tokens of each request with this step's."""
        import torch

        asked = [self._asked(slot, length) for slot, length in zip(slots, lengths, strict=True)]
        step = self.choosers.prepare(asked, logits.shape[1], logits.device)
        for each in asked:
            if each.terms is not None and each.terms.processors.changes_rows:
                self._requests[each.key].terms = self.choosers.kept_terms(each.key, each.terms)
        picks = step.picks(logits)
        step.report_faults(picks)
        logits.fill_(-torch.inf)
        return logits.scatter_(1, picks.clamp(min=0).unsqueeze(1), 0.0)

    def _asked(self, slot: int, length: int) -> Asked:
        name = self._states.index_to_req_id.get(slot, "")
        drafted = self._drafts.get(name, ())
        request = self._requests.get(name)
        if request is None:  # vLLM's own runs have no requests
            return Asked(name, None, 0, drafted)
        is_dropped = length < request.num_first
        position = length - len(drafted)
        return Asked(name, request.terms, position, drafted, request.prompt, request.output, is_dropped)


class OutriderPick(LogitsProcessor):
    """Computes the pick of every row, drafted ones included.

    batch: of this worker's runner, once `install` has made it: vLLM makes the logits processors itself, before.
    """

    batch: ClassVar[Batch | None] = None

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuses what the engine never sends: a temperature of vLLM's own would add a second noise."""
        if sampling_params.temperature != 0.0:
            raise ValueError("temperature has to be 0: the pick adds the noise")

    def apply(self, logits: Any, ctx: Any) -> Any:
        """As `Batch.choose`. In vLLM's warm-up it changes nothing."""
        if self.batch is None:
            return logits
        slots = ctx.idx_mapping_np.tolist()
        return self.batch.choose(logits, slots, ctx.seq_lens_upper_bound_np[: len(slots)].tolist())


def install(runner: Any, grammars: WorkerGrammars) -> None:
    """Joins the scheduler's drafts with the runner's, and reports what is found beside the tokens."""
    import torch

    batch = Batch(runner, grammars)
    OutriderPick.batch = batch
    end = report_found(runner, batch.choosers, batch.took)
    update_requests, speculator = runner.update_requests, runner.speculator

    def with_drafts(scheduler_output: Any) -> None:
        end()
        update_requests(scheduler_output)  # after it the runner knows new requests, too
        batch.begin(scheduler_output)

    runner.update_requests = with_drafts
    if runner.speculative_config.use_eagle():
        _send_drafts(runner.draft_tokens_handler)
    else:
        nothing = torch.full_like(speculator.drafts, -1)
        speculator.propose = lambda input_batch, *args, **kwargs: nothing[: input_batch.num_reqs]


def _send_drafts(handler: Any) -> None:
    """Has the scheduler get the heads' drafts, which vLLM copies from the device only for grammars of its own."""
    set_draft_tokens = handler.set_draft_tokens

    def set_for_scheduler(input_batch: Any, draft_tokens: Any) -> None:
        set_draft_tokens(SimpleNamespace(req_ids=input_batch.req_ids, has_structured_output_reqs=True), draft_tokens)

    handler.set_draft_tokens = set_for_scheduler
