"""Keeps the choosers of a vLLM worker's requests: what rules, grammars and logprobs need beyond a plain pick.

vLLM's own processing of logits is never used: the rules are our engine's, so that a text is the same on both. A worker
sees tokens that vLLM drops later (of a part of a prompt, of a step that is run again), so before each step a chooser's
states are brought to what vLLM has kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from outrider.cloud.engine.choosers import chooser_of
from outrider.cloud.vllm.terms import request_of
from outrider.models.errors import ModelFault
from outrider.models.transforms.chooser import RowChooser

LOGPROBS: Final = "outrider_logprobs"
"""The attribute of vLLM's `ModelRunnerOutput`, by request: of each token itself, its logprob, the likeliest tokens and
theirs.
"""

Logprobs = list[tuple[int, float, list[int], list[float]]]


class Choosing:
    """One request's chooser, and where its text begins in its tokens."""

    def __init__(self, chooser: RowChooser, first: int, stop_ids: frozenset[int]) -> None:
        self._chooser = chooser
        self._first = first
        self._stop_ids = stop_ids

    def choose(
        self, rows: NDArray[np.float32], drafted: Sequence[int], tokens: Sequence[int]
    ) -> tuple[list[int], Logprobs] | None:
        """The tokens that follow `tokens`, prompt and text, and their logprobs; None if a row is not finite.

        rows: [len(drafted) + 1, V].
        """
        self._chooser.follow(tokens, self._first)
        parents = range(-1, len(drafted) - 1)
        try:
            branch = self._chooser.choose(rows, drafted, parents, len(tokens), stop_ids=self._stop_ids)
        except ModelFault:
            return None
        found = [
            (each.token, each.logprob, [token for token, _ in each.top], [value for _, value in each.top])
            for each in self._chooser.logprobs
        ]
        return branch.tokens, found


def choosing_of(extra_args: Any, prompt: Sequence[int], vocab_size: int) -> Choosing | None:
    """None where a plain pick is enough, and for a request that is not ours. prompt: of the request."""
    request = request_of(extra_args)
    if request is None:
        return None
    chooser = chooser_of(request, prompt, vocab_size)
    if chooser is None:
        return None
    return Choosing(chooser, len(prompt) - request.num_generated, request.stop_ids)


class Choosings:
    """The choosers of a worker, by request."""

    def __init__(self) -> None:
        self._found: dict[str, Choosing | None] = {}

    def of(self, name: str, make: Callable[[], Choosing | None]) -> Choosing | None:
        """A request's; made when it is first asked for."""
        if name not in self._found:
            self._found[name] = make()
        return self._found[name]

    def keep(self, names: Collection[str]) -> None:
        """Forgets those of all other requests."""
        for name in [each for each in self._found if each not in names]:
            del self._found[name]
