"""Sessions of pending drafts as the engine keeps them, for tests of what is merged, chosen and waited for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.cloud.engine import Policy
from outrider.cloud.pending.drafting import Drafting
from outrider.cloud.pending.estimators import AcceptanceEstimator, StepSize
from outrider.cloud.pending.node_chances import NodeChances
from outrider.cloud.pending.pending_drafts import PendingDrafts
from outrider.cloud.pending.trie import DraftTrie, PendingNode
from outrider.models.wire.tree_draft import ROOT, TreeDraft


def timed(most: int, policy: Policy, base_s: float, token_s: float = 0.0, *, with_trees: bool = False) -> Drafting:
    """Drafting that has measured steps of `base_s` and `token_s` for each token. most: drafted tokens of a text."""
    drafting = Drafting(most, policy, with_trees=with_trees)
    for tokens in (1, 2, 4, 8, 16, 32, 64):
        drafting.curve.observe(StepSize(tokens), base_s + token_s * tokens)
    return drafting


def pending(drafting: Drafting, num_committed: int = 0, *, max_new: int = 1000) -> PendingDrafts:
    """A session of `drafting`."""
    drafts = PendingDrafts(
        [],
        max_new,
        AcceptanceEstimator(32, drafting.learned(b"").acceptance),
        NodeChances(drafting.learned(b"").chances),
    )
    for _ in range(num_committed):
        commit(drafts, 0)
    return drafts


def line_message(base: int, first: int, tokens: Sequence[int], level: int = 13) -> TreeDraft:
    """A path as a tree message."""
    size = len(tokens)
    return TreeDraft(base, first, tokens, [ROOT, *range(first, first + size - 1)], [level] * size)


def commit(drafts: PendingDrafts, *tokens: int) -> int:
    """What the engine does with the tokens of a pass."""
    drafts.committed.extend(tokens)
    return advance(drafts, tokens)


def advance(drafts: PendingDrafts, tokens: Sequence[int]) -> int:
    """Follows tokens that are committed, and settles."""
    num_looked_up = drafts.follow(tokens, teaches_path=False)
    drafts.settle()
    return num_looked_up


def nodes_below(node: PendingNode, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], PendingNode]]:
    """Every pending node, with its path. path: that of `node` itself."""
    for token, child in (node.children or {}).items():
        yield (*path, token), child
        yield from nodes_below(child, (*path, token))


def position_of(trie: DraftTrie, number: int) -> int | None:
    """Tokens generated up to and including a numbered node; negative if it was dropped, None if it is unknown."""
    node = trie._numbers.get(number)
    return None if node is None else node.position


def move_root(trie: DraftTrie, token: int) -> None:
    """Commits one token."""
    trie.follow((token,))
    trie.settle()


def learn_and_wait(
    drafting: Drafting, drafts: PendingDrafts, path: Sequence[int], tokens: Sequence[int], now: float
) -> None:
    """What the engine does next. path: the likeliest one before the step, as far as the device sent it."""
    drafts.acceptance.observe(path, tokens)
    if drafting.may_wait(drafts):
        drafting.start_wait(drafts, now, crowding=1.0)


def right_part(drafted: Sequence[int], truth: Sequence[int], base: int) -> list[int]:
    """What a pass commits behind `base` tokens: those drafted that are right, and the target's own."""
    right = next((i for i, token in enumerate(drafted) if truth[base + i] != token), len(drafted))
    return list(truth[base : base + right + 1])


def run_pass(
    drafting: Drafting, drafts: PendingDrafts, truth: Sequence[int], budget: int = 99
) -> tuple[Sequence[int], list[int], int]:
    """A step of one session, whose text is `truth`: what was drafted, what is committed, how much was looked up."""
    drafted = drafting.choose([drafts], budget, StepSize(1, 0), 0.0)[drafts].tokens
    committed = right_part(drafted, truth, len(drafts.committed))
    return drafted, committed, commit(drafts, *committed)
