"""Who gives way to whom among vLLM's sequences; no vLLM is needed for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np

from outrider.cloud.pending.policy import Policy
from outrider.cloud.vllm.book import Book, Served
from outrider.cloud.vllm.step_shares import StepShares
from outrider.cloud.vllm.terms import Terms
from outrider.models.picks.sampling import SamplingParams

NUM_SLOTS: Final = 2


class Steps:
    """Steps of a scheduler with slots for two sequences."""

    def __init__(self) -> None:
        self.places = StepShares(num_places=NUM_SLOTS, step_tokens=64)
        self.running: set[Served] = set()
        self._book = Book(max_draft=4, policy=Policy.AUTO, looks_up=False, clock=time.monotonic)
        self._number = 0

    def open(self, owner: bytes, priority: int = 0) -> Served:
        self._number += 1
        terms = Terms(number=self._number, params=SamplingParams(), max_tokens=8, owner=owner, priority=priority)
        served = self._book.open(terms, [1, 2, 3])
        self.places.open(served)
        return served

    def step(self, *, commits: bool = True) -> list[Served]:
        """The sequences that got a slot."""
        newcomers = self.places.newcomers(self._make_room)
        if commits:
            for served in self.running:
                self.places.committed(served)
        return newcomers

    def _make_room(self, served: Served, givers: Callable[[], list[Served]]) -> bool:
        if len(self.running) == NUM_SLOTS:
            found = givers()
            if not found:
                return False
            self.running.remove(found[0])
            self.places.returned(found[0])
        self.running.add(served)
        return True


def test_who_has_priority_waits_for_no_turn() -> None:
    """Others of its priority wait until a sequence had its turn; who has a higher one takes a slot at once."""
    steps = Steps()
    held = {steps.open(b"many"), steps.open(b"many")}
    assert set(steps.step(commits=False)) == held
    equal, urgent = steps.open(b"other"), steps.open(b"urgent", priority=5)
    assert steps.step() == []  # without a token nobody gives way: each admission commits one at least
    assert steps.step() == [urgent]
    assert urgent in steps.running and equal not in steps.running and len(steps.running & held) == 1
    assert steps.step() == []  # nobody with a lower priority takes its slot, or another's before the turn


def test_prompts_have_at_most_a_steps_time_beside_another_owners_texts() -> None:
    """And beside three owners' a third of that on average; those of an owner alone have all there is."""
    steps = Steps()
    prompts = [steps.open(b"many"), steps.open(b"many")]
    texts = [steps.open(b"text %d" % i) for i in range(3)]
    for prompt in prompts:
        prompt.num_wanted = 1000
    added = np.arange(1, 257) / 20  # of a step, for 1, 2, ... tokens

    def given(num_texts: int) -> list[int]:
        found = []
        for _ in range(63):
            steps.step()
            found.append(sum(steps.places.prompt_shares(prompts, 256, texts[:num_texts], added).values()))
        return found

    assert set(given(0)) == {256}
    assert set(given(1)) == {0, 20}
    assert given(1).count(0) == 1  # one step of 64 is timed without
    three = given(3)
    assert set(three) == {0, 20} and 19 <= three.count(20) <= 22
