"""Divides the engine between its clients: who waits, who has blocks, who was served how often.

An owner is a key or an address. Owners share evenly what is scarce, however many sequences each of them has; so do the
sequences of one owner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from outrider.cloud.engine.sequence_state import SequenceState


def split_evenly(wanted: Sequence[int], total: int) -> list[int]:
    """Max-min fair shares of `total`: nobody gets more than it wants, and what one leaves the others share.

    Where a unit is left that cannot be divided, earlier entries get it.
    """
    given = [0] * len(wanted)
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    for rank, index in enumerate(order):
        level, rest = divmod(total, len(order) - rank)
        if wanted[index] <= level:
            given[index] = wanted[index]
            total -= wanted[index]
            continue
        for place, late in enumerate(sorted(order[rank:])):  # all of them want more than the level
            given[late] = level + (place < rest)
        break
    return given


@dataclass(slots=True, eq=False)
class Owner:
    """One client: its sequences that wait for blocks, those that have them, and the steps that they took part in."""

    served: int
    queue: deque[SequenceState] = field(default_factory=deque)
    running: dict[SequenceState, None] = field(default_factory=dict)

    def first_served(self) -> int:
        """Where a new sequence begins to count: level with the least served one, and no earlier.

        Those that have not run yet do not count, or a flood of short requests would keep the others waiting for ever.
        """
        all_ = [*self.running, *self.queue]
        ran = [s.served for s in all_ if s.served > s.came_at]
        return min(ran or [s.came_at for s in all_], default=0)


class Owners:
    """The clients that have sequences in the engine."""

    def __init__(self) -> None:
        self._owners: dict[bytes, Owner] = {}

    def __iter__(self) -> Iterator[Owner]:
        return iter(self._owners.values())

    def of(self, sequence: SequenceState) -> Owner:
        """The owner of a sequence that was added."""
        return self._owners[sequence.request.owner]

    def is_queued(self, sequence: SequenceState) -> bool:
        """Whether it waits for blocks."""
        owner = self._owners.get(sequence.request.owner)
        return owner is not None and sequence in owner.queue

    def is_running(self, sequence: SequenceState) -> bool:
        """Whether it has blocks."""
        owner = self._owners.get(sequence.request.owner)
        return owner is not None and sequence in owner.running

    def add(self, sequence: SequenceState) -> None:
        """Appends a new sequence to its owner's queue. A new owner counts as served like the least served one."""
        owner = self._owners.get(sequence.request.owner)
        if owner is None:
            owner = Owner(min((other.served for other in self), default=0))
            self._owners[sequence.request.owner] = owner
        sequence.served = sequence.came_at = owner.first_served()
        owner.queue.append(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Forgets a sequence, and its owner with its last one."""
        owner = self._owners.get(sequence.request.owner)
        if owner is None:
            return
        if sequence in owner.running:
            del owner.running[sequence]
        elif sequence in owner.queue:
            owner.queue.remove(sequence)
        if not owner.running and not owner.queue:
            del self._owners[sequence.request.owner]

    def admitted(self, sequence: SequenceState) -> None:
        """Moves a queued sequence to those that have blocks."""
        owner = self.of(sequence)
        owner.queue.remove(sequence)
        owner.running[sequence] = None

    def returned(self, sequence: SequenceState, *, is_first: bool) -> None:
        """Moves a sequence back to its owner's queue: to its head, or behind those that have waited longer."""
        owner = self.of(sequence)
        del owner.running[sequence]
        if is_first:
            owner.queue.appendleft(sequence)
        else:
            owner.queue.append(sequence)

    def queue_heads(self) -> list[SequenceState]:
        """The head of each owner's queue: owners with the fewest sequences that have blocks first."""
        waiting = [owner for owner in self if owner.queue]
        waiting.sort(key=lambda owner: (len(owner.running), owner.served))
        return [owner.queue[0] for owner in waiting]

    def take_places(self, ready: Sequence[SequenceState], num_places: int) -> list[SequenceState]:
        """Chooses who takes part in a step, in the order of `ready`, and counts it.

        Places are shared evenly by the owners that can use them; an owner's go to its least served sequences.
        """
        chosen = list(ready)
        if len(ready) > num_places:
            of_owner: dict[Owner, list[SequenceState]] = {}
            for sequence in ready:
                of_owner.setdefault(self.of(sequence), []).append(sequence)
            owners = sorted(of_owner, key=lambda owner: owner.served)
            shares = split_evenly([len(of_owner[owner]) for owner in owners], num_places)
            taking_part: set[SequenceState] = set()
            for owner, count in zip(owners, shares, strict=True):
                taking_part.update(sorted(of_owner[owner], key=lambda s: s.served)[:count])
            chosen = [s for s in ready if s in taking_part]
        for sequence in chosen:
            sequence.served += 1
            self.of(sequence).served += 1
        return chosen

    def split_tokens(self, prompts: Sequence[SequenceState], total: int) -> dict[SequenceState, int]:
        """Divides a step's prompt tokens: evenly between owners.

        Half of an owner's share goes evenly to its sequences, so that none stands still; the rest to those with the
        fewest tokens to run, so that the first token comes soon on average.
        """
        of_owner: dict[Owner, list[SequenceState]] = {}
        for sequence in sorted(prompts, key=lambda s: s.served):
            of_owner.setdefault(self.of(sequence), []).append(sequence)
        owners = sorted(of_owner, key=lambda owner: owner.served)
        shares = split_evenly([sum(s.num_wanted for s in of_owner[owner]) for owner in owners], total)
        given: dict[SequenceState, int] = {}
        for owner, share in zip(owners, shares, strict=True):
            mine = of_owner[owner]
            given |= dict(zip(mine, split_evenly([s.num_wanted for s in mine], -(-share // 2)), strict=True))
            share -= sum(given[s] for s in mine)
            for sequence in sorted(mine, key=lambda s: s.num_wanted - given[s]):
                more = min(share, sequence.num_wanted - given[sequence])
                given[sequence] += more
                share -= more
        return given
