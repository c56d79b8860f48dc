"""A sequence that is rewound goes on as one that had the other tokens from its start."""

from __future__ import annotations

import pytest
from tests.engine_harness import SAMPLED, VOCAB, Collector, Harness, plain
from tests.fake_runtime import FakeBatchRuntime

from outrider.cloud.engine import EngineConfig
from outrider.cloud.engine.thread import EngineThread
from outrider.models.wire.tree_draft import ROOT, TreeDraft

PROMPT = [3, 1, 4, 1, 5, 9]


class Tail(Collector):
    """A sink for what comes after a rewind; `tokens` has the whole text."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self.tokens = tokens


@pytest.mark.parametrize("base", range(0, 14))
@pytest.mark.parametrize("looks_up", [False, True])
def test_the_text_after_a_rewind_is_that_of_the_other_tokens(base: int, looks_up: bool) -> None:
    """Wherever it goes back to: within a block, to a block's edge, into blocks that are shared by hash."""
    harness = Harness(config=EngineConfig(looks_up=looks_up))
    number, before = harness.submit(PROMPT, 40)
    while len(before.tokens) < 14:
        harness.step()
    harness.engine.draft(number, len(before.tokens), [[1, 2, 3]])
    other = [(before.tokens[base] + 1) % VOCAB, 7]
    text = [*before.tokens[:base], *other]
    after = Tail(text[:])
    assert harness.engine.rewind(number, base, other, after)
    # The old text, whose blocks are shared: the rewind must not have changed them.
    _, twin = harness.submit([*PROMPT, *before.tokens[:13]], 8)
    truth = [*text, *plain([*PROMPT, *text], SAMPLED, 40 - len(text))]
    harness.step()
    harness.engine.draft_tree(number, TreeDraft(len(text), 0, truth[len(text) : len(text) + 3], [ROOT, 0, 1], [15] * 3))
    harness.work_off()
    assert after.tokens == truth and after.end is not None
    assert twin.tokens == plain([*PROMPT, *before.tokens[:13]], SAMPLED, 8)
    stats = harness.engine.stats()
    assert stats.free_blocks == stats.num_blocks


def test_a_sequence_that_has_ended_is_not_rewound() -> None:
    """False where it is over; where it ends before its turn comes, the new sink gets an end."""
    assert not EngineThread(FakeBatchRuntime(vocab_size=64)).rewind(1, 0, [1], Tail([]))
    harness, late = Harness(), Tail([])
    number, first = harness.submit(PROMPT, 4)
    harness.engine.cancel(number)
    assert harness.engine.rewind(number, 0, [1], late)
    harness.step()
    assert first.end is not None and late.ended.reason == "cancelled" and not harness.engine.has_work
