"""Chooses the tokens of a step's rows, and reports their logprobs, on the device that holds the logits.

All that the host has to do is done before the logits are touched; then nothing waits for the device before its caller
reads what was found. For vLLM's workers and for the torch runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.choices_torch import RowChoices
from outrider.models.processors.chooser import PickedRow, TokenLogprobs
from outrider.models.processors.device_copies import HostCopy, to_device
from outrider.models.processors.logprobs_torch import RowLogprobs, token_logprobs
from outrider.models.processors.options import ProcessorOptions
from outrider.models.processors.rows_torch import RowChanges
from outrider.models.processors.text_rows import AskedRows


class StepChoices:
    """Of the rows of one step."""

    def __init__(self, asked: Sequence[AskedRows], vocab_size: int, device: torch.device) -> None:
        """asked: of all texts, in the order of their rows. vocab_size: of the logits."""
        self._asked = asked
        self._firsts = [0]
        params: list[SamplingParams] = []
        positions: list[int] = []
        narrowings: list[ProcessorOptions | None] = []
        reported: list[int] = []
        whole: list[int] = []
        for each in asked:
            count = len(each.positions)
            rows = range(len(params), len(params) + count)
            if each.num_logprobs is not None:
                reported += rows
            if each.is_whole:
                whole += rows
            params += [each.params] * count
            positions += each.positions
            narrowings += [each.narrowing] * count
            self._firsts.append(rows.stop)
        changes = [
            (first, each.path) for first, each in zip(self._firsts, asked, strict=False) if each.path is not None
        ]
        is_cpu = device.type == "cpu"
        self._changes: RowChanges | None = None
        if changes:
            self._changes = RowChanges(
                changes, len(params), vocab_size, device, may_list=is_cpu, may_undo=bool(reported)
            )
        self._choices = RowChoices(params, positions, narrowings, self._changes, device)
        self._num_reported = max((each.num_logprobs for each in asked if each.num_logprobs is not None), default=0)
        self._reported, self._whole = to_device([np.array(reported, np.int64), np.array(whole, np.int64)], device)
        self._logprobs: HostCopy | None = None

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """The token of each row, int64 [rows]; -1 where its logits are not finite. Does not wait for the device.

        logits: float32 [rows, V], contiguous; changed.
        """
        logprobs = RowLogprobs(logits, self._reported, self._num_reported) if len(self._reported) else None
        picks = self._choices.choose(logits)
        if logprobs is not None:
            tokens = picks[self._reported].clamp_(min=0)
            changes = self._changes
            own = logits[self._reported, tokens] if changes is None else changes.own(logits, self._reported, tokens)
            self._logprobs = HostCopy(logprobs.of(own))
        return picks

    def logprobs(self, tokens: Sequence[Sequence[int]]) -> list[tuple[TokenLogprobs, ...] | None]:
        """Of each text, once `choose` has run: those of the tokens that were picked from its first rows.

        None for a text that asked for none. Waits for the device.
        """
        rows = iter([] if self._logprobs is None else self._logprobs.tolist())
        found: list[tuple[TokenLogprobs, ...] | None] = []
        for each, own in zip(self._asked, tokens, strict=True):
            count = each.num_logprobs
            if count is None:
                found.append(None)
                continue
            its = [next(rows) for _ in each.positions]
            found.append(tuple(token_logprobs(token, row, count) for token, row in zip(own, its, strict=False)))
        return found

    def found(self, logits: torch.Tensor, beside: Callable[[], None] | None = None) -> list[PickedRow]:
        """Chooses, and waits: of each row its token, with logprobs where they were asked for; or the row, float32 [V].

        logits: as of `choose`. beside: called once the device has its orders.
        """
        whole = logits[self._whole]  # a copy: `choose` changes them
        picks = self.choose(logits)
        if beside is not None:
            beside()
        tokens = picks.tolist()
        picked: list[PickedRow] = [None if token < 0 else token for token in tokens]
        its = [tokens[first:end] for first, end in zip(self._firsts, self._firsts[1:], strict=False)]
        for first, reported in zip(self._firsts, self.logprobs(its), strict=False):
            for row, each in enumerate(reported or (), first):
                if each.token >= 0:
                    picked[row] = each
        for row, values in zip(self._whole.tolist(), whole.cpu().numpy(), strict=True):
            picked[row] = values
        return picked
