"""Runs the mid-size verifier's sequence of one text: ahead of what is confirmed, and back where that contradicts it.

It goes back by the engine's rewind. Where the engine has none (vLLM), or the sequence began after the place to go back
to, the sequence ends and another one begins with the confirmed text as its prompt, whose full blocks the prefix
cache has. On the loop, but for `begin`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from outrider.cloud.seam import CommitEvent, EndEvent, Event, GenerateRequest, ServingEngine, Sink
from outrider.cloud.upstream.device_drafts import DeviceDrafts
from outrider.models.errors import RequestError
from outrider.models.wire.protocol import MAX_PATH_TOKENS
from outrider.models.wire.tree_draft import TreeDraft

MAX_AHEAD: Final = 32
"""Tokens ahead of the confirmed text at which the mid-size verifier rests; it goes on at half of them."""
MAX_BEHIND: Final = 8
"""Tokens behind the confirmed text at which it begins again there; fewer are drafted to it."""
MAX_ERRORS: Final = 3
"""Of its sequences; then the text goes on without."""


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

    def close(self) -> None:
        """Ends the present sequence; none follows."""
        self._is_off = True
        self._cancel()

    def draft(self, base: int, paths: Sequence[Sequence[int]]) -> None:
        """A device's paths, by the session's base."""
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

    def _cancel(self) -> None:
        self._run += 1
        if self._number is not None:
            self._engine.cancel(self._number)
            self._number = None
