"""Divides vLLM's steps between owners: who takes part, how far prompts run, who gives way to a queued sequence.

The rules, and `Owners`, are those of the embedded engine's scheduler. Knows no vLLM; its scheduler carries out what is
decided here. Only the engine process's main thread calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.cloud.engine.owners import MAX_REFUSED, PLAIN_STEPS, Owners
from outrider.cloud.pending.estimators import tokens_within_a_step
from outrider.cloud.vllm.book import Served


class StepShares:
    """The open sequences by owner, queued or running (with blocks). num_places: that take part in a step."""

    def __init__(self, num_places: int, step_tokens: int) -> None:
        self._num_places = num_places
        self.owners = Owners[Served](step_tokens)
        self._running: dict[Served, None] = {}
        self.num_queued = 0

    @property
    def num_running(self) -> int:
        """Sequences with blocks, newcomers of the present step included."""
        return len(self._running)

    # -- sequences ---------------------------------------------------------------------------------------------------

    def open(self, served: Served) -> None:
        """Queues a new sequence."""
        served.queued_at = self.owners.step
        self.owners.add(served)
        self.num_queued += 1

    def close(self, served: Served) -> None:
        """Forgets a sequence."""
        if served in self._running:
            del self._running[served]
        else:
            self.num_queued -= 1
        self.owners.remove(served)

    def committed(self, served: Served) -> None:
        """Notes that a sequence's turn has begun, with the first token since it has blocks."""
        if served.turn_began is None:
            served.turn_began = self.owners.step

    def returned(self, served: Served) -> None:
        """Queues a sequence again, whose blocks were taken."""
        had_turn = self.owners.had_turn(served)
        self._leave(served, is_first=not had_turn)
        served.queued_at = self.owners.step

    def _leave(self, served: Served, *, is_first: bool) -> None:
        del self._running[served]
        self.num_queued += 1
        self.owners.returned(served, is_first=is_first)

    # -- a step ------------------------------------------------------------------------------------------------------

    def newcomers(self, make_room: Callable[[Served, Callable[[], list[Served]]], bool]) -> list[Served]:
        """Begins a step; gives the queued sequences that get blocks in it, owners in turn, each owner's in order.

        make_room: whether there is room for a sequence; it may take the blocks of those that the second argument
        gives, in their order, if they suffice.
        """
        self.owners.step += 1
        found: list[Served] = []
        if not self.num_queued:
            return found
        num_refused = 0
        for served in self.owners.candidates():
            if served.queued_at == self.owners.step:
                continue  # it has just given way
            if make_room(served, lambda served=served: self._givers_to(served)):  # type: ignore[misc]
                self.owners.admitted(served)
                self._running[served] = None
                self.num_queued -= 1
                served.turn_began = None
                found.append(served)
                if len(found) == self._num_places:
                    break
            else:
                num_refused += 1
                if self.owners.is_overdue(served) or num_refused == MAX_REFUSED:
                    break  # nobody overtakes one that is overdue
        return found

    def not_admitted(self, newcomers: Sequence[Served]) -> None:
        """Queues newcomers as before: the step has no place, or vLLM had no blocks for them."""
        for served in reversed(newcomers):
            self._leave(served, is_first=True)

    def take_part(self, ready: Sequence[Served]) -> set[Served]:
        """Those of the running sequences that take part; owners share the places evenly."""
        return set(self.owners.take_places(ready, self._num_places))

    def took_part(self, sequences: Iterable[Served]) -> None:
        """Puts sequences that ran tokens behind their owners' others."""
        self.owners.took_part(sequences)

    def prompt_shares(
        self, prompts: Sequence[Served], total: int, decoding: Sequence[Served], added: NDArray[np.float64]
    ) -> dict[Served, int]:
        """Divides a step's prompt tokens evenly between owners; `num_wanted` of each is set.

        decoding: who decodes in it. Where prompts delay other owners' texts, they have `added`, as `steps_added` gives
        it, for at most one step, and no tokens while their owners owe the others time.
        """
        in_time, delaying = self.owners.in_time(prompts, decoding)
        if not delaying:
            return self.owners.split_tokens(prompts, total)
        if self.owners.step % PLAIN_STEPS == 0:
            in_time = [s for s in prompts if s not in delaying]
        num_free = sum(s.num_wanted for s in prompts if s not in delaying)
        total = min(total, max(tokens_within_a_step(added), num_free))
        given = self.owners.split_tokens(in_time, total)
        self.owners.charge({s: count for s, count in given.items() if s in delaying}, added)
        return dict.fromkeys(prompts, 0) | given

    # -- who gives way -----------------------------------------------------------------------------------------------

    def _givers_to(self, candidate: Served) -> list[Served]:
        """Sequences with a lower priority that have committed a token since they have blocks. Of those that had their
        turn: those with the same priority, or of all in a step that goes by age, which are of owners with more running
        sequences or of the candidate's own owner.

        The embedded engine's places have no such limit as vLLM's `max_num_seqs`, so there who has priority seldom needs
        another's blocks; here it would wait for the end of a turn.
        """
        own = self.owners.of(candidate)
        eligible = []
        for served in self._running:
            if not self.owners.by_age and served.priority != candidate.priority:
                is_eligible = served.priority < candidate.priority and served.turn_began is not None
            else:
                owner = self.owners.of(served)
                is_eligible = self.owners.had_turn(served) and (owner is own or len(owner.running) > len(own.running))
            if is_eligible:
                eligible.append(served)
        eligible.sort(key=self.owners.precedence, reverse=True)
        return eligible
