"""A sequence that is rewound goes on as one that had the other tokens from its start."""

from __future__ import annotations

import pytest
from tests.engine_harness import SAMPLED, VOCAB, Collector, Harness, plain
from tests.fake_runtime import FakeBatchRuntime
from tests.requests import flat_request

from outrider.cloud.engine import EngineConfig
from outrider.cloud.engine.thread import EngineThread
from outrider.models.wire.tree_draft import ROOT, TreeDraft

PROMPT = [3, 1, 4, 1, 5, 9]


class Tail:
    """A sink for what comes after a rewind; `tokens` has the whole text."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.end: object = None

    def __call__(self, event: object) -> None:
        tokens = getattr(event, "tokens", None)
        if tokens is None:
            self.end = event
        else:
            assert event.base == len(self.tokens)  # type: ignore[attr-defined]
            self.tokens += tokens


@pytest.mark.parametrize("base", range(0, 14))
@pytest.mark.parametrize("looks_up", [False, True])
def test_the_text_after_a_rewind_is_that_of_the_other_tokens(base: int, looks_up: bool) -> None:
    """Wherever it goes back to: within a block, to a block's edge, into blocks that are shared by hash."""
    harness = Harness(config=EngineConfig(looks_up=looks_up))
    before = Collector()
    number = harness.engine.submit(flat_request(tuple(PROMPT), SAMPLED, 40), before)
    while len(before.tokens) < 14:
        harness.step()
    harness.engine.draft(number, len(before.tokens), [[1, 2, 3]])
    other = [(before.tokens[base] + 1) % VOCAB, 7]
    after = Tail([*before.tokens[:base], *other])
    assert harness.engine.rewind(number, base, other, after)
    twin = Collector()  # the old text, whose blocks are shared: the rewind must not have changed them
    harness.engine.submit(flat_request((*PROMPT, *before.tokens[:13]), SAMPLED, 8), twin)
    text = [*before.tokens[:base], *other]
    truth = [*text, *plain([*PROMPT, *text], SAMPLED, 40 - len(text))]
    harness.step()
    tree = TreeDraft(len(text), 0, truth[len(text) : len(text) + 3], [ROOT, 0, 1], [15] * 3)
    harness.engine.draft_tree(number, tree)
    while harness.engine.has_work:
        harness.step()
    assert after.tokens == truth and after.end is not None
    assert twin.tokens == plain([*PROMPT, *before.tokens[:13]], SAMPLED, 8)
    stats = harness.engine.stats()
    assert stats.free_blocks == stats.num_blocks


def test_a_sequence_that_has_ended_is_not_rewound() -> None:
    """False where it is over; where it ends before its turn comes, the new sink gets an end."""
    engine = EngineThread(FakeBatchRuntime(vocab_size=64))
    assert not engine.rewind(1, 0, [1], Tail([]))
    harness = Harness()
    first, late = Collector(), Tail([])
    number = harness.engine.submit(flat_request(tuple(PROMPT), SAMPLED, 4), first)
    harness.engine.cancel(number)
    assert harness.engine.rewind(number, 0, [1], late)
    harness.step()
    assert first.end is not None and getattr(late.end, "reason", "") == "cancelled"
    assert isinstance(harness.runtime, FakeBatchRuntime) and not harness.engine.has_work
