"""Puts Outrider's pick and drafts from outside into vLLM's V2 model runner.

The pick is a logits processor of the runner's public interface: it leaves only the picked token of each row standing,
so that the stock argmax and the stock greedy verification (accept if and only if equal) do the rest. The runner takes
the number of drafts from the scheduler, and their values from `req_states.draft_tokens` on the device: one copy before
each step joins the two. Not public: what `extension.V2_RUNNER_ATTRIBUTES` names.

vLLM loads this module in the server's process too, to validate requests: torch is imported where it is needed.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, Final

from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

from outrider.cloud.vllm.terms import Terms, terms_of
from outrider.cloud.vllm.worker_choosers import RequestChoosers, WorkerGrammars, report_found
from outrider.models.picks.sampling import SamplingParams

_choosers: Final = RequestChoosers()
"""By slot. They get the worker's grammars from `install`: vLLM makes the logits processors itself, before."""


class OutriderPick(LogitsProcessor):
    """Computes the pick of every row, drafted ones included."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._states = req_states
        self._terms: list[Terms | None] = [None] * req_states.max_num_reqs

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuses what the engine never sends: a temperature of vLLM's own would add a second noise."""
        if sampling_params.temperature != 0.0:
            raise ValueError("temperature has to be 0: the pick adds the noise")

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Takes a slot for a request."""
        self._terms[req_idx] = terms_of(sampling_params.extra_args)
        _choosers.forget(req_idx)
        return True

    def apply(self, logits: Any, ctx: Any) -> Any:
        """Leaves the picks standing; logits: float32 [rows, V]."""
        import torch

        from outrider.models.picks.sampling_torch import pick_rows

        slots: list[int] = ctx.expanded_idx_mapping.tolist()
        # Of the row's input token; the pick is for the position after it.
        positions = [position + 1 for position in ctx.pos.tolist()]
        terms = [self._terms[slot] for slot in slots]
        found = pick_rows(logits, [SamplingParams() if each is None else each.params for each in terms], positions)
        self._choose(logits, ctx, slots, positions, found)
        faults = _choosers.found.faults
        for slot, position, token in zip(slots, positions, found, strict=True):
            if token is None:
                faults[slot] = min(position, faults.get(slot, position))
        picks = torch.tensor([token or 0 for token in found], device=logits.device)
        logits.fill_(-torch.inf)
        return logits.scatter_(1, picks.unsqueeze(1), 0.0)

    def _choose(self, logits: Any, ctx: Any, slots: list[int], positions: list[int], picks: list[int | None]) -> None:
        """Replaces the picks of requests whose tokens a chooser chooses. Rows behind a wrong guess keep any token."""
        end = 0
        for slot, own_rows in groupby(slots):
            row = end
            end += len(list(own_rows))
            terms, position = self._terms[slot], positions[row]
            length = int(self._states.prompt_len.np[slot])
            # Before the prompt's end vLLM drops the token.
            if terms is not None and terms.needs_chooser and position >= length:
                drafted = ctx.input_ids[row + 1 : end].tolist()
                tokens: list[int] = self._states.all_token_ids.gpu[slot, :position].tolist()
                own = logits[row:end].float().cpu().numpy()
                chosen = _choosers.choose(slot, terms, own, drafted, tokens, length)
                if chosen is None:
                    picks[row] = None
                else:
                    picks[row : row + len(chosen)] = chosen


def install(runner: Any, grammars: WorkerGrammars) -> None:
    """Joins the scheduler's drafts with the runner's, and reports rows that are not finite."""
    import torch

    _choosers.grammars = grammars
    states, speculator = runner.req_states, runner.speculator
    update_requests = runner.update_requests
    nothing = torch.full_like(speculator.drafts, -1)

    def with_drafts(scheduler_output: Any) -> None:
        update_requests(scheduler_output)  # after it the runner knows new requests, too
        drafts = {
            states.req_id_to_index[request]: tokens
            for request, tokens in scheduler_output.scheduled_spec_decode_tokens.items()
        }
        if drafts:
            target = states.draft_tokens
            width = target.shape[1]
            # vLLM pads some requests with -1, which is no row of the embeddings: verified as 0, as the runner has it.
            rows = [([max(0, token) for token in tokens] + [-1] * width)[:width] for tokens in drafts.values()]
            index = torch.tensor(list(drafts), device=target.device)
            target[index] = torch.tensor(rows, dtype=target.dtype, device=target.device)

    runner.update_requests = with_drafts
    report_found(runner, _choosers, lambda: {slot: request for request, slot in states.req_id_to_index.items()})
    speculator.propose = lambda input_batch, *args, **kwargs: nothing[: input_batch.num_reqs]
