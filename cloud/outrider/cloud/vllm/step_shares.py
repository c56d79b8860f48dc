"""Divides vLLM's steps between owners: who takes part, how far prompts run, who gives way to a queued sequence.

The rules, and `Owners`, are those of the embedded engine's scheduler. Knows no vLLM; its scheduler carries out what is
decided here. Only the engine process's main thread calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from outrider.cloud.engine.owners import Owners
from outrider.cloud.pending.estimators import tokens_within_a_step
from outrider.cloud.vllm.book import Served


class StepShares:
    """The open sequences by owner, queued or running (with blocks). num_places: that take part in a step."""

    def __init__(self, num_places: int, step_tokens: int) -> None:
        self._num_places = num_places
        self.owners = Owners[Served](step_tokens)
        self._running: dict[Served, None] = {}

    @property
    def num_queued(self) -> int:
        """Sequences without blocks."""
        return self.owners.num_queued

    @property
    def num_running(self) -> int:
        """Sequences with blocks, newcomers of the present step included."""
        return len(self._running)

    # -- sequences ---------------------------------------------------------------------------------------------------

    def open(self, served: Served) -> None:
        """Queues a new sequence."""
        self.owners.add(served)

    def close(self, served: Served) -> None:
        """Forgets a sequence."""
        self._running.pop(served, None)
        self.owners.remove(served)

    def committed(self, served: Served) -> None:
        """Notes that a sequence's turn has begun, with the first token since it has blocks."""
        if served.turn_began is None:
            served.turn_began = self.owners.step

    def returned(self, served: Served) -> None:
        """Queues a sequence again, whose blocks were taken."""
        del self._running[served]
        self.owners.gave_way(served)

    # -- a step ------------------------------------------------------------------------------------------------------

    def newcomers(self, make_room: Callable[[Served, Callable[[], list[Served]]], bool]) -> list[Served]:
        """Begins a step; gives the queued sequences that get blocks in it, owners in turn, each owner's in order.

        make_room: whether there is room for a sequence; it may take the blocks of those that the second argument
        gives, in their order, if they suffice.
        """

        def take(served: Served) -> bool:
            # None that has just given way.
            if served.queued_at == self.owners.step or not make_room(served, partial(self._givers_to, served)):
                return False
            self._running[served] = None
            return True

        return self.owners.admit(take, self._num_places)

    def not_admitted(self, newcomers: Sequence[Served]) -> None:
        """Queues newcomers as before: the step has no place, or vLLM had no blocks for them."""
        for served in reversed(newcomers):
            del self._running[served]
            self.owners.returned(served, is_first=True)

    def take_part(self, ready: Sequence[Served]) -> Sequence[Served]:
        """Those of the running sequences that take part; owners share the places evenly."""
        return self.owners.take_places(ready, self._num_places)

    def took_part(self, sequences: Collection[Served]) -> None:
        """Puts sequences that ran tokens behind their owners' others."""
        self.owners.took_part(sequences)

    def prompt_shares(
        self, prompts: Sequence[Served], total: int, decoding: Sequence[Served], added: NDArray[np.float64]
    ) -> dict[Served, int]:
        """Divides a step's prompt tokens evenly between owners; `num_wanted` and `num_drafted` of each are set.

        decoding: who decodes in it. Where prompts delay other owners' texts, they have `added`, as `steps_added` gives
        it, for at most one step, and no tokens while their owners owe the others time. An item's draft is not cut, so
        that it gets one pass: of items that delay others, one may take longer than that.
        """
        in_time, delaying = self.owners.in_time(prompts, decoding)
        if not prompts:
            return {}
        num_free = sum(s.num_wanted for s in prompts if s not in delaying)
        most = min(total, max(tokens_within_a_step(added), num_free)) if delaying else total
        given = self.owners.split_tokens(in_time, most)
        left, is_long = total - sum(given.values()), False
        for served, share in given.items():
            lacking, must_wait = served.num_wanted - share, is_long and served in delaying
            if not served.num_drafted or not 0 < lacking <= served.num_drafted + 1:
                continue
            if lacking <= left and not must_wait:
                given[served] += lacking
                left -= lacking
                is_long |= served in delaying
            elif must_wait or lacking > served.num_drafted:
                # Two tokens wait for another step: behind one it would decode, and have its draft verified unpaid.
                given[served] = max(0, served.num_wanted - served.num_drafted - 2)
        self.owners.charge({s: count for s, count in given.items() if s in delaying}, added)
        return dict.fromkeys(prompts, 0) | given

    # -- who gives way -----------------------------------------------------------------------------------------------

    def _givers_to(self, candidate: Served) -> list[Served]:
        """As `Owners.givers_to`, but those with a lower priority have one token and no turn.

        The embedded engine's places have no such limit as vLLM's `max_num_seqs`, so there who has priority seldom needs
        another's blocks; here it would wait for the end of a turn.
        """
        return self.owners.givers_to(candidate, self._running, spares_lower=False)
