"""Random trees of drafts about a text that is known, in place of those that devices send."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.engine_harness import VOCAB

from outrider.cloud.pending.drafting import Drafting
from outrider.cloud.pending.estimators import StepSize
from outrider.cloud.pending.pending_drafts import PendingDrafts
from outrider.cloud.pending.selected_drafts import SelectedDrafts

MOST = 7


def grown(truth: Sequence[int], kind: str, rng: random.Random, most: int, vocab_size: int) -> SelectedDrafts:
    """A random tree of at most `most` tokens. kind: which of them continue `truth`.

    half: half of those on its path. alternatives: all, each behind a wrong sibling and its child. wrong: none.
    """
    tokens, parents = list[int](), list[int]()
    on_truth = {-1: 0}  # of the nodes that are: how many tokens of `truth` lead there

    def add(parent: int, token: int) -> None:
        if (parent, token) in zip(parents, tokens, strict=True) or len(tokens) >= most:
            return
        depth = on_truth.get(parent)
        if depth is not None and truth[depth : depth + 1] == [token]:
            on_truth[len(tokens)] = depth + 1
        tokens.append(token)
        parents.append(parent)

    def wrong(parent: int) -> int:
        depth = on_truth.get(parent)
        right = truth[depth] if depth is not None and depth < len(truth) else 0
        return (right + rng.randrange(1, vocab_size)) % vocab_size

    while len(tokens) < most:
        before = len(tokens)
        if kind == "alternatives":
            tip = max(on_truth, key=lambda node: on_truth[node])
            if on_truth[tip] == len(truth):
                break
            add(tip, wrong(tip))
            add(len(tokens) - 1, wrong(len(tokens) - 1))
            add(tip, truth[on_truth[tip]])
        else:
            parent = rng.randrange(-1, len(tokens))
            depth = on_truth.get(parent)
            if kind == "half" and depth is not None and depth < len(truth) and rng.random() < 0.5:
                add(parent, truth[depth])
            else:
                add(parent, wrong(parent))
        if len(tokens) == before and rng.random() < 0.2:
            break
    return SelectedDrafts(tokens, parents)


class RandomTrees(Drafting):
    """Chooses random trees where it knows what a sequence will commit."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.truths: dict[PendingDrafts, list[int]] = {}
        self.kind, self.vocab_size, self.rng = "half", VOCAB, random.Random(1)

    def choose(
        self, decoding: Sequence[PendingDrafts], budget: int, fixed: StepSize, context: float
    ) -> dict[PendingDrafts, SelectedDrafts]:
        chosen: dict[PendingDrafts, SelectedDrafts] = {}
        for drafts in decoding:
            rest = self.truths.get(drafts, [])[len(drafts.committed) :][: drafts.num_left - 1]
            if rest:
                # Wrong branches may be as deep as there are tokens, so they must not reach beyond the last position.
                most = min(MOST, budget, len(rest))
                chosen[drafts] = grown(rest, self.kind, self.rng, most, self.vocab_size)
                budget -= len(chosen[drafts].tokens)
        return chosen
