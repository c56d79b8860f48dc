"""Runs the mid-size verifier's sequence of one text: ahead of what is confirmed, and back where that contradicts it.

A device sends each node once. When the mid-size verifier goes back, its new sequence knows none of them: the nodes that
still follow the text are sent to it again, under their numbers. Bases count from the session's start for the device,
from the sequence's own for the engine.

It goes back by the engine's rewind. Where the engine has none (vLLM), or the sequence began after the place to go back
to, the sequence ends and another one begins with the confirmed text as its prompt, whose full blocks the prefix
cache has. On the loop, but for `begin`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final, NamedTuple

from outrider.cloud.seam import CommitEvent, EndEvent, Event, GenerateRequest, SequenceEndReason, ServingEngine, Sink
from outrider.models.errors import RequestError
from outrider.models.wire.protocol import MAX_PATH_TOKENS
from outrider.models.wire.tree_draft import ROOT, TreeDraft

MAX_AHEAD: Final = 32
"""Tokens ahead of the confirmed text at which the mid-size verifier rests; it goes on at half of them."""
MAX_BEHIND: Final = 8
"""Tokens behind the confirmed text at which it begins again there; fewer are drafted to it."""
MAX_ERRORS: Final = 3
"""Of its sequences; then the text goes on without."""


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


class MidRun:
    """One text's sequences in the mid-size verifier, one after the other.

    confirmed: the text as the target has it; who appends to it calls `compare`. on_ahead: called with the position
    and the new tokens beyond it. post: calls a function on the loop, from any thread.
    """

    def __init__(
        self,
        engine: ServingEngine,
        request: GenerateRequest,
        confirmed: list[int],
        on_ahead: Callable[[int, Sequence[int]], None],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._engine = engine
        self._request = request
        self._confirmed = confirmed
        self._on_ahead = on_ahead
        self._post = post
        self._drafts = DeviceDrafts()
        self._written: list[int] = []  # the mid-size verifier's text from `_start` on
        self._start = 0
        self._agreed = 0  # tokens of the text that were compared
        self._base = 0  # tokens of the text before the present sequence's own
        self._shift = 0  # tokens from there to where `_drafts` counts from
        self._number: int | None = None
        self._run = 0
        self._num_errors = 0
        self._is_off = False
        self._is_at_end = False  # of the text, if it is confirmed
        self._beginning = threading.Lock()  # held while the first sequence is submitted, on another thread

    @property
    def ahead(self) -> list[int]:
        """What the mid-size verifier has written after the confirmed text."""
        return self._written[len(self._confirmed) - self._start :] if self._end > len(self._confirmed) else []

    @property
    def _end(self) -> int:
        return self._start + len(self._written)

    def begin(self) -> None:
        """Submits the first sequence. Where this engine refuses the request, the text goes on without it: the target
        may take what the mid-size verifier does not. Raises RequestError where it is too busy. On any thread.
        """
        with self._beginning:
            try:
                self._begin()
            except RequestError as error:
                if error.status >= 500:
                    raise
                self._is_off = True

    def _begin(self) -> None:
        """Submits a sequence that goes on where the mid-size verifier's text ends."""
        limits, request = self._engine.limits, self._request
        text = [*self._confirmed[: self._start], *self._written]
        num_left = request.max_tokens - len(text)
        is_over = num_left <= 0 or (bool(text) and text[-1] in request.stop_ids)
        prompt = (*request.prompt, *text)
        self._is_at_end = is_over
        if is_over:
            return
        if len(prompt) >= limits.max_positions or max(prompt) >= limits.vocab_size:
            self._is_off = True  # the target may hold more than the mid-size verifier
            return
        self._base, self._shift = len(text), 0
        hints = request.hints
        is_known = list(hints.recent[: len(text)]) == text
        own = replace(
            request,
            prompt=prompt,
            max_tokens=num_left,
            pick=replace(request.pick, num_logprobs=None),
            hints=replace(hints, recent=hints.recent[len(text) :] if is_known else ()),
            asker=replace(request.asker, deadline_ms=None),  # of the text: the target's
            provisional=False,
            keep=False,  # nobody could name what is parked here
            num_generated=request.num_generated + len(text),
        )
        self._number = self._engine.submit(own, self._new_sink())
        self._draft_again(text)

    def _new_sink(self) -> Sink:
        """A sink from which alone events count from now on."""
        self._run += 1
        run = self._run
        return lambda event: self._post(lambda: self._on_event(run, event))

    def _draft_again(self, text: Sequence[int]) -> None:
        """Drafts what the device sent and still follows `text`, which the sequence has now."""
        trees, paths = self._drafts.begin(len(text), text.__getitem__)
        for tree in trees:
            self._draft_part(tree)
        if paths:
            self._try(lambda number: self._engine.draft(number, self._shift, paths))

    def _draft_part(self, tree: TreeDraft) -> None:
        moved = replace(tree, base=tree.base + self._shift)
        self._try(lambda number: self._engine.draft_tree(number, moved))

    def close(self, reason: SequenceEndReason) -> None:
        """Ends the present sequence; none follows. reason: why its text ends."""
        self._is_off = True
        self._cancel("stop" if reason == "stop" else "cancelled")

    def draft(self, base: int, paths: Sequence[Sequence[int]]) -> None:
        """A device's paths, by the session's base. Where the text contradicts all, those before are kept."""
        known = self._confirmed[base:]
        if not any(len(path) > len(known) and list(path[: len(known)]) == known for path in paths):
            return
        base, paths = self._drafts.add_paths(base, paths)
        if paths:
            self._try(lambda number: self._engine.draft(number, base + self._shift, paths))

    def draft_tree(self, message: TreeDraft) -> None:
        """A device's part of a tree, by the session's base."""
        for tree in self._drafts.add(message):
            self._draft_part(tree)

    def _try(self, ask: Callable[[int], None]) -> None:
        """Drafts are hints: one that the sequence does not take is dropped."""
        if self._number is not None:
            try:
                ask(self._number)
            except RequestError:
                pass

    def _on_event(self, run: int, event: Event) -> None:
        with self._beginning:
            if run != self._run or self._is_off:
                return
        if isinstance(event, CommitEvent):
            position = max(self._end, len(self._confirmed))
            self._written += event.tokens
            self.compare()
            if self._end > position:
                self._on_ahead(position, self._written[position - self._start :])
        elif isinstance(event, EndEvent):
            self._number = None
            if event.reason == "error":
                self._num_errors += 1
            if event.reason == "shutdown" or self._num_errors >= MAX_ERRORS:
                self._is_off = True
            else:
                self.compare()

    def compare(self) -> int:
        """Goes back, on, or to rest, as the confirmed text says: call it when that has grown.

        Returns how many provisional tokens it contradicts: they are void.
        """
        confirmed, known = self._confirmed, len(self._confirmed)
        for position in range(self._agreed, min(known, self._end)):
            if confirmed[position] != self._written[position - self._start]:
                void = self._end - position
                self._go_to_confirmed(position)
                return void
        self._agreed = max(self._agreed, min(known, self._end))
        behind = known - self._end
        if behind > 0 and (self._number is None or (behind > MAX_BEHIND and self._written)):
            self._go_to_confirmed(self._end)
        elif behind > 0 and self._written and self._number is not None:
            tail = confirmed[self._end :][:MAX_PATH_TOKENS]
            base = self._end - self._base
            self._try(lambda number: self._engine.draft(number, base, [tail]))
        elif self._number is not None and -behind >= MAX_AHEAD:
            self._cancel()
        elif self._number is None and -behind <= MAX_AHEAD // 2 and not self._is_at_end:
            self._go_on()
        return 0

    def _go_to_confirmed(self, position: int) -> None:
        """Goes to the end of the confirmed text. From `position` on, the own text differs from it, or ends."""
        self._written = []
        self._start = self._agreed = len(self._confirmed)
        if self._number is not None and position >= self._base and not self._is_text_over():
            tail = self._confirmed[position:]
            if self._engine.rewind(self._number, position - self._base, tail, self._new_sink()):
                self._shift = self._start - self._base
                self._draft_again(self._confirmed)
                return
        self._cancel()
        self._go_on()

    def _is_text_over(self) -> bool:
        text, request = self._confirmed, self._request
        limits = self._engine.limits
        is_full = len(request.prompt) + len(text) >= min(limits.max_positions, len(request.prompt) + request.max_tokens)
        return is_full or text[-1] in request.stop_ids or max(text) >= limits.vocab_size

    def _go_on(self) -> None:
        if self._is_off:
            return
        try:
            self._begin()
        except RequestError as error:  # too busy for now: the next commit asks again
            self._is_off = error.code not in ("overloaded", "prefix_not_held")

    def _cancel(self, reason: SequenceEndReason = "cancelled") -> None:
        self._run += 1
        if self._number is not None:
            self._engine.cancel(self._number, reason)
            self._number = None
