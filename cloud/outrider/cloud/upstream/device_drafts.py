"""Keeps what a device drafted for a text, and sends it again to a sequence that begins later in the text.

A device sends each node once. When the mid-size verifier goes back, its new sequence knows none of them: the nodes that
still follow the text are sent to it again, under their numbers. Bases count from the session's start for the device,
from the sequence's own for the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from outrider.models.wire.tree_draft import ROOT, TreeDraft

MAX_NODES: Final = 1024
"""The newest; as many numbers as an engine remembers."""
_DEAD: Final = -1
_UNKNOWN: Final = -2


class _Node(NamedTuple):
    base: int
    parent: int
    token: int
    level: int


class DeviceDrafts:
    """The newest drafts of one text. On one thread."""

    def __init__(self) -> None:
        self._nodes: dict[int, _Node] = {}
        self._places: dict[int, int] = {}  # by number: tokens of the text up to the node; _DEAD: it contradicts them
        self._paths: tuple[int, Sequence[Sequence[int]]] | None = None
        self._start = 0
        self._text: Callable[[int], int] = lambda position: ROOT

    def begin(self, start: int, text: Callable[[int], int]) -> tuple[list[TreeDraft], list[list[int]]]:
        """A new sequence begins after `start` tokens; text: the token at a position before that.

        Returns what to draft for it, by its own bases: trees, and paths of base 0.
        """
        self._start, self._text = start, text
        self._places.clear()
        trees = list(self._placed(list(self._nodes)))
        paths = self.paths(*self._paths)[1] if self._paths is not None and self._paths[0] <= start else []
        return trees, paths

    def add(self, message: TreeDraft) -> list[TreeDraft]:
        """Takes a device's message; returns it as the present sequence takes it."""
        numbers = range(message.first, message.first + len(message.tokens))
        for number, token, parent, level in zip(numbers, message.tokens, message.parents, message.levels, strict=True):
            self._nodes[number] = _Node(message.base, parent, token, level)
        found = list(self._placed(list(numbers)))
        if len(self._nodes) > MAX_NODES:
            for oldest in list(islice(self._nodes, len(self._nodes) - MAX_NODES)):
                del self._nodes[oldest]
                self._places.pop(oldest, None)
        return found

    def add_paths(self, base: int, paths: Sequence[Sequence[int]]) -> tuple[int, list[list[int]]]:
        """Takes a device's paths; returns them as the present sequence takes them: its base, and what is left."""
        self._paths = base, paths
        return self.paths(base, paths)

    def paths(self, base: int, paths: Sequence[Sequence[int]]) -> tuple[int, list[list[int]]]:
        """The paths that do not contradict the text before the sequence, without what overlaps it."""
        if base >= self._start:
            return base - self._start, [list(path) for path in paths]
        overlap = self._start - base
        right = [self._text(position) for position in range(base, self._start)]
        return 0, [list(path[overlap:]) for path in paths if len(path) > overlap and list(path[:overlap]) == right]

    def _placed(self, numbers: list[int]) -> Iterator[TreeDraft]:
        """The nodes that follow the sequence's start, in runs of one base and consecutive numbers."""
        run: list[tuple[int, int, _Node]] = []  # number, parent as the sequence knows it, node
        run_base = 0
        for number in numbers:
            node = self._nodes[number]
            before = node.base if node.parent == ROOT else self._places.get(node.parent, _UNKNOWN)
            base = max(0, node.base - self._start)
            if before == _UNKNOWN and self._start == 0:
                parent = node.parent  # the engine holds it until its parent comes
            elif before < 0:
                self._places[number] = _DEAD
                continue
            elif before < self._start:
                self._places[number] = before + 1 if self._text(before) == node.token else _DEAD
                continue
            else:
                self._places[number] = before + 1
                parent = node.parent
                if parent != ROOT and before == self._start:  # the sequence has its parent as text
                    parent, base = ROOT, 0
            if run and (number != run[-1][0] + 1 or base != run_base):
                yield _message(run_base, run)
                run = []
            run_base = base
            run.append((number, parent, node))
        if run:
            yield _message(run_base, run)


def _message(base: int, run: Sequence[tuple[int, int, _Node]]) -> TreeDraft:
    return TreeDraft(
        base,
        run[0][0],
        [node.token for _, _, node in run],
        [parent for _, parent, _ in run],
        [node.level for _, _, node in run],
    )
