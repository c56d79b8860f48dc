"""Divides the engine between its clients: who waits, who has blocks, whose turn it is.

An owner is a key or an address. Owners share evenly what is scarce, however many sequences each of them has; so do the
sequences of one owner. What cannot be divided goes round: to whoever has gone without it for longest. A newcomer comes
behind those that wait already, so that no flood of newcomers, and nothing that was used while there was enough, keeps
anybody waiting for more than a round. All this holds among sequences of one priority; higher ones come first, but for
every eighth step, which goes by age.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import insort_left, insort_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

_PLAIN_STEPS: Final = 64
"""One step of so many has no prompts that delay others: what they add is measured by it."""
_MAX_REFUSED: Final = 16
"""Queued sequences without room that a step looks at: looking at those of a thousand owners would cost 0.2 s."""
_TURN_STEPS: Final = 32
"""Steps for which a sequence keeps its blocks once it has committed a token: computing them again must pay off."""
_OVERDUE_STEPS: Final = 64
"""Steps after which a queued sequence is next, even if smaller ones would fit before it."""
_AGE_STEPS: Final = 8
"""One step of so many goes by age alone: those with a low priority get an eighth of the engine, whoever else waits."""
_LITTLE: Final = 0.01
"""Of a step: who owes less owes nothing."""
_PLACES: Final = 0
_TOKENS: Final = 1


class Member(Protocol):
    """A sequence, as far as sharing goes.

    turn: who goes first of an owner's sequences: the lowest. queued_at, turn_began: the step at which it was queued,
    and at which it first committed since it has blocks; None before.
    """

    tokens: list[int]
    turn: int
    queued_at: int
    turn_began: int | None

    @property
    def owner(self) -> bytes:
        """Who asks."""

    @property
    def priority(self) -> int:
        """The higher, the sooner it is served."""

    @property
    def num_wanted(self) -> int:
        """Tokens that it could run in a step."""


M = TypeVar("M", bound=Member)


def split_evenly(wanted: Sequence[int], total: int) -> list[int]:
    """Max-min fair shares of `total`: nobody gets more than it wants, and what one leaves the others share.

    Where a unit is left that cannot be divided, earlier entries get it.
    """
    level = even_level(wanted, total)
    given = [min(each, math.floor(level)) if each > level else each for each in wanted]
    rest = total - sum(given)
    for index, each in enumerate(wanted):
        if each > level and rest:
            given[index] += 1
            rest -= 1
    return given


def even_level(wanted: Sequence[int], total: int) -> float:
    """What each may have at most, in fractions, so that even shares of `total` use it up; infinite if it suffices."""
    left = float(total)
    for rank, each in enumerate(sorted(wanted)):
        level = left / (len(wanted) - rank)
        if each > level:
            return level
        left -= each
    return math.inf


@dataclass(slots=True, eq=False)
class Owner(Generic[M]):
    """One client: its sequences that wait for blocks, and those that have them.

    queue: those with a higher priority first, in order among equals.
    turns: of places and of prompt tokens: who goes first where they cannot be divided evenly, the lowest.
    """

    turns: list[int]
    queue: deque[M] = field(default_factory=deque)
    running: dict[M, None] = field(default_factory=dict)

    @property
    def num_sequences(self) -> int:
        """With and without blocks."""
        return len(self.running) + len(self.queue)

    def enqueue(self, sequence: M, *, is_first: bool = False) -> None:
        """Queues a sequence behind its equals, or before them."""
        insert = insort_left if is_first else insort_right
        insert(self.queue, sequence, key=lambda queued: -queued.priority)

    def next_queued(self, *, by_age: bool) -> M:
        """The next of the queue, which is not empty; by_age: the one that waits longest, whatever its priority."""
        if by_age and self.queue[0].priority != self.queue[-1].priority:
            return min(self.queue, key=lambda sequence: sequence.queued_at)
        return self.queue[0]


class Owners(Generic[M]):
    """The clients that have sequences in the engine. step: how many have begun.

    num_queued: sequences that wait for blocks. step_tokens: token budget of a step.
    """

    def __init__(self, step_tokens: int) -> None:
        self.step = self.num_queued = 0
        self._step_tokens = step_tokens
        self._owners: dict[bytes, Owner[M]] = {}
        # Time that owners' prompts took of the others' steps beyond their shares, in steps. It outlives an owner's last
        # sequence, or one request at a time would owe nothing; a step adds few, and each pays back in every step.
        self._owed: dict[bytes, float] = {}
        self._turns = itertools.count()
        self._num_sequences = 0
        self._level = math.inf  # places that an owner may have at most, were all its sequences ready
        self._num_divided: int | None = None  # the places that it is of; None: it is out of date

    @property
    def by_age(self) -> bool:
        """Whether this step goes by age, and not by priority."""
        return self.step % _AGE_STEPS == 0

    def crowding(self, sequence: M) -> float:
        """Sequences of its owner for each place that the owner may have; 1 as long as there are enough places.

        How many sequences another owner has makes no difference beyond that owner's share.
        """
        return max(1.0, self.of(sequence).num_sequences / self._level)

    def is_overdue(self, sequence: M) -> bool:
        """Whether a queued sequence waits for so long that nobody may overtake it."""
        return sequence.queued_at < self.step - _OVERDUE_STEPS

    def had_turn(self, sequence: M) -> bool:
        """Whether it may lose its blocks: it has committed since it got them, and kept them for a while.

        One that waits for its device keeps them as long: every answer would else cost its whole context once more.
        """
        if sequence.turn_began is None:
            return False
        steps_to_recompute = len(sequence.tokens) // self._step_tokens
        return self.step - sequence.turn_began >= max(_TURN_STEPS, 2 * steps_to_recompute)

    def precedence(self, sequence: M) -> tuple[int, int, int]:
        """The higher, the sooner it gives way: those with the lowest priority, of the largest owner, with the longest
        turn.
        """
        return -sequence.priority, len(self.of(sequence).running), self.step - (sequence.turn_began or 0)

    def givers_to(self, candidate: M, running: Iterable[M], *, spares_lower: bool = True) -> list[M]:
        """Who gives blocks to a queued sequence, in order.

        Of those that had their turn: those with a lower priority; those with the same one, or of all in a step that
        goes by age, which are of owners with more sequences that have blocks, or of the candidate's own owner.

        spares_lower: whether those with a lower priority have their turn first; else one token.
        """
        own = self.of(candidate)

        def is_eligible(sequence: M) -> bool:
            if not self.by_age and sequence.priority != candidate.priority:
                is_lower = sequence.priority < candidate.priority
                return is_lower and (self.had_turn(sequence) if spares_lower else sequence.turn_began is not None)
            owner = self.of(sequence)
            return self.had_turn(sequence) and (owner is own or len(owner.running) > len(own.running))

        return sorted(filter(is_eligible, running), key=self.precedence, reverse=True)

    def of(self, sequence: M) -> Owner[M]:
        """The owner of a sequence that was added."""
        return self._owners[sequence.owner]

    def add(self, sequence: M) -> None:
        """Appends a new sequence to its owner's queue."""
        owner = self._owners.get(sequence.owner)
        if owner is None:
            owner = self._owners[sequence.owner] = Owner([next(self._turns), next(self._turns)])
        sequence.turn = next(self._turns)
        sequence.queued_at = self.step
        owner.enqueue(sequence)
        self.num_queued += 1
        self._num_sequences += 1
        self._num_divided = None

    def remove(self, sequence: M) -> None:
        """Forgets a sequence, and its owner with its last one."""
        owner = self._owners.get(sequence.owner)
        if owner is None:
            return
        if sequence in owner.running:
            del owner.running[sequence]
        elif sequence in owner.queue:
            owner.queue.remove(sequence)
            self.num_queued -= 1
        else:
            return
        self._num_sequences -= 1
        self._num_divided = None
        if not owner.running and not owner.queue:
            del self._owners[sequence.owner]

    def admit(self, take: Callable[[M], bool], most: float = math.inf) -> list[M]:
        """Begins a step, and gives queued sequences blocks: owners in turn, each owner's in order. Gives who got some.

        take: whether there is room for a sequence; it takes that. most: sequences that may get some.
        """
        self.step += 1
        num_refused, found = 0, list[M]()
        for sequence in self._candidates() if self.num_queued else ():
            if take(sequence):
                owner = self.of(sequence)
                owner.queue.remove(sequence)
                owner.running[sequence] = None
                self.num_queued -= 1
                sequence.turn_began = None
                found.append(sequence)
                if len(found) >= most:
                    break
                continue
            num_refused += 1
            if self.is_overdue(sequence) or num_refused == _MAX_REFUSED:
                break  # nobody overtakes one that is overdue
        return found

    def gave_way(self, sequence: M) -> None:
        """Queues a sequence again, whose blocks were taken."""
        self.returned(sequence, is_first=not self.had_turn(sequence))
        sequence.queued_at = self.step

    def returned(self, sequence: M, *, is_first: bool) -> None:
        """Moves a sequence back to its owner's queue: before its equals, or behind those that have waited longer."""
        owner = self.of(sequence)
        del owner.running[sequence]
        owner.enqueue(sequence, is_first=is_first)
        self.num_queued += 1

    def _candidates(self) -> Iterator[M]:
        """The heads of the owners' queues, until the caller has enough: the highest priority first, unless `by_age`.

        Then what is overdue, then owners with the fewest sequences that have blocks, then who
        has waited longest. An owner whose head was admitted meanwhile comes again with the next one.
        """

        def entry(index: int, owner: Owner[M]) -> tuple[int, bool, int, int, int, Owner[M]]:
            head = owner.next_queued(by_age=by_age)
            rank = 0 if by_age else -head.priority
            return rank, not self.is_overdue(head), len(owner.running), head.queued_at, index, owner

        by_age = self.by_age
        heap = [entry(index, owner) for index, owner in enumerate(self._owners.values()) if owner.queue]
        heapq.heapify(heap)
        while heap:
            *_, index, owner = heapq.heappop(heap)
            if not owner.queue:
                continue
            head = owner.next_queued(by_age=by_age)
            yield head
            if owner.queue and owner.next_queued(by_age=by_age) is not head:
                heapq.heappush(heap, entry(index, owner))

    def take_places(self, ready: Sequence[M], num_places: int) -> list[M]:
        """Chooses who takes part in a step, in the order of `ready`: the highest priority first, unless `by_age`.

        Places are shared evenly by the owners that can use them; an owner's go to those whose turn it is.
        """
        if self._num_divided != num_places:
            self._num_divided = num_places
            self._level = even_level([owner.num_sequences for owner in self._owners.values()], num_places)
        if len(ready) <= num_places:
            return list(ready)
        taking_part: set[M] = set()
        for equals in _classes(ready, by_age=self.by_age):
            for mine, count in self._divide(equals, num_places - len(taking_part), _PLACES, lambda s: 1):
                taking_part.update(mine[:count])
        return [s for s in ready if s in taking_part]

    def _divide(
        self, sequences: Sequence[M], total: int, scarce: int, wanted_by: Callable[[M], int]
    ) -> list[tuple[list[M], int]]:
        """Each owner's sequences, those first whose turn it is, and its part of `total`. scarce: of `Owner.turns`."""
        of_owner: dict[Owner[M], list[M]] = {}
        for sequence in sorted(sequences, key=lambda s: s.turn):
            of_owner.setdefault(self.of(sequence), []).append(sequence)
        owners = sorted(of_owner, key=lambda owner: owner.turns[scarce])
        wanted = [sum(map(wanted_by, of_owner[owner])) for owner in owners]
        shares = split_evenly(wanted, total)
        least = min((share for share, want in zip(shares, wanted, strict=True) if share < want), default=math.inf)
        for owner, share in zip(owners, shares, strict=True):
            if share > least:  # than another that goes short; nobody where there is enough for all
                owner.turns[scarce] = next(self._turns)
        return [(of_owner[owner], share) for owner, share in zip(owners, shares, strict=True)]

    def took_part(self, sequences: Collection[M]) -> None:
        """Puts sequences that ran tokens behind their owners' others, in the order that they had."""
        if len(sequences) == self._num_sequences:
            return  # there are no others
        for sequence in sorted(sequences, key=lambda s: s.turn):
            sequence.turn = next(self._turns)

    def in_time(self, prompts: Sequence[M], texts: Sequence[M]) -> tuple[list[M], set[M]]:
        """The prompts whose owners owe the others no time, in their order; and those that delay another's text.

        texts: sequences that decode. A prompt delays those of its own priority and above, of all unless `by_age`; what
        delays none is always in time, what delays some never in one step of many. Pays back an even part of what is
        owed: call it once for each step.
        """
        if not prompts and not self._owed:
            return [], set()
        highest: dict[bytes, float] = {}
        for text in texts:
            top = math.inf if self.by_age else text.priority
            highest[text.owner] = max(highest.get(text.owner, -math.inf), top)
        lowest: dict[bytes, float] = {}
        for prompt in prompts:
            lowest[prompt.owner] = min(lowest.get(prompt.owner, math.inf), prompt.priority)
        priorities = {-math.inf, *(float(prompt.priority) for prompt in prompts)}
        num_above = {each: sum(top >= each for top in highest.values()) for each in priorities}

        def num_delayed(owner: bytes, priority: float) -> int:
            return num_above[priority] - (owner in highest and highest[owner] >= priority)

        self._owed = {
            owner: owed - 1.0 / num_others
            for owner, owed in self._owed.items()
            if (num_others := num_delayed(owner, lowest.get(owner, -math.inf))) and owed * num_others > 1.0
        }
        delaying = {s for s in prompts if num_delayed(s.owner, s.priority)}
        most = 0.0 if self.step % _PLAIN_STEPS == 0 else _LITTLE
        return [s for s in prompts if s not in delaying or self._owed.get(s.owner, 0.0) < most], delaying

    def charge(self, given: Mapping[M, int], added: NDArray[np.float64]) -> None:
        """Notes what a step's prompt tokens added to it. added: by 1, 2, ... tokens, in steps."""
        if total := sum(given.values()):
            num_steps = float(added[min(total, len(added)) - 1])
            for sequence, count in given.items():
                owed = self._owed.get(sequence.owner, 0.0)
                self._owed[sequence.owner] = owed + num_steps * count / total

    def split_tokens(self, prompts: Sequence[M], total: int) -> dict[M, int]:
        """Divides a step's prompt tokens: the highest priority first, unless `by_age`; evenly between owners.

        Half of an owner's share goes evenly to its sequences, so that none stands still; the rest to those with the
        fewest tokens to run, so that the first token comes soon on average.
        """
        given: dict[M, int] = {}
        for equals in _classes(prompts, by_age=self.by_age):
            left = total - sum(given.values())
            for mine, share in self._divide(equals, left, _TOKENS, lambda s: s.num_wanted):
                given |= dict(zip(mine, split_evenly([s.num_wanted for s in mine], -(-share // 2)), strict=True))
                rest = share - sum(given[s] for s in mine)
                for sequence in sorted(mine, key=lambda s: s.num_wanted - given[s]):
                    more = min(rest, sequence.num_wanted - given[sequence])
                    given[sequence] += more
                    rest -= more
        return given


def _classes(sequences: Sequence[M], *, by_age: bool) -> Iterator[Sequence[M]]:
    """Sequences of one priority after the other, the highest first; all at once with `by_age`."""
    priorities = {sequence.priority for sequence in sequences}
    if by_age or len(priorities) <= 1:
        yield sequences
        return
    for priority in sorted(priorities, reverse=True):
        yield [sequence for sequence in sequences if sequence.priority == priority]
