"""Follows a text through its grammar: which tokens may come next and which must; goes back, too.

Bounds the time that this takes. llguidance's own limits bound a step by its work, not by its time: an ambiguous grammar
may take 300 ms for one token (measured: docs/log.md), with Python's lock held, so that every other text waits.
Processor time of the thread is what counts, so a busy machine ends no text.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.models.errors import RequestError
from outrider.models.grammar.matchers import Matchers
from outrider.models.grammar.vocabulary import Vocabulary

FREE_S: Final = 0.002
"""Of each call of the library. A mask at 152k ids takes a quarter of it in the mean."""
FREE_REPLAY_S: Final = 0.00002
"""The same, where a text that is resumed is read again, all at once, on a server's event loop. JSON takes a quarter."""
MAX_EXCESS_S: Final = 0.3
"""That one text may take beyond it, in all; what is not used does not add up."""
FREE_COPY_S: Final = 4e-7
"""Of a copy, besides `FREE_S`, for each token: JSON takes a quarter of it, an ambiguous grammar ten times as much."""
MAX_COPY_S: Final = 0.01
"""Of a copy beyond that: some 60 MB. Tried every `COPY_EVERY` tokens, as not every engine copies."""
COPY_EVERY: Final = 1024
_FEW: Final = 512  # allowed tokens up to which they are listed


def unpack_mask(bits: bytes, size: int) -> NDArray[np.bool_]:
    """Which of the first `size` tokens a bit mask allows, lowest bit first; tokens beyond its end are forbidden."""
    packed = np.frombuffer(bits, np.uint8)
    found = np.unpackbits(packed, count=min(size, packed.size * 8), bitorder="little").view(np.bool_)
    if found.size == size:
        return found
    padded = np.zeros(size, np.bool_)
    padded[: found.size] = found
    return padded


def apply_mask(bits: bytes, row: NDArray[np.float32]) -> int:
    """Sets logits of forbidden tokens to -inf, in place; returns how many tokens stay allowed."""
    packed = np.frombuffer(bits, np.uint8)
    filled = np.flatnonzero(packed)
    if filled.size <= _FEW:  # most places of JSON: listing the allowed tokens costs less than a pass over the row
        inside = np.unpackbits(packed[filled], bitorder="little").view(np.bool_)
        allowed = (filled[:, None] * 8 + np.arange(8)).ravel()[inside]
        allowed = allowed[allowed < row.size]
        kept = row[allowed]
        row.fill(-np.inf)
        row[allowed] = kept
        return int(allowed.size)
    is_allowed = unpack_mask(bits, row.size)
    np.copyto(row, -np.inf, where=~is_allowed)
    return int(np.count_nonzero(is_allowed))


Found = TypeVar("Found")


class TookTooLong(RequestError):
    """A text's grammar has taken too much time, or has filled a lexer alone: it counts against the client."""


class GrammarCost:
    """Counts what one text's grammar takes. on_excess: called once it is too much. note: gets each time beyond what is
    free. is_timed: False ends no text.
    """

    __slots__ = ("_excess_s", "_free_s", "_is_drafting", "_is_timed", "_note", "_on_excess")

    def __init__(self, on_excess: Callable[[], None], note: Callable[[float], None], *, is_timed: bool = True) -> None:
        self._on_excess = on_excess
        self._is_timed = is_timed
        self._note = note
        self._free_s = FREE_S
        self._is_drafting = False
        self._excess_s = 0.0

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Counts more strictly inside."""
        before, self._free_s = self._free_s, FREE_REPLAY_S
        try:
            yield
        finally:
            self._free_s = before

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Takes nothing back inside: else cheap guesses would pay for a costly text."""
        self._is_drafting = True
        try:
            yield
        finally:
            self._is_drafting = False

    def add(self, began_s: float) -> None:
        """Counts a call that began at this time of the thread's processor clock.

        Raises RequestError `grammar_too_complex` where the text's grammar has taken too much.
        """
        seconds = time.thread_time() - began_s - self._free_s
        if seconds > 0.0:
            self._note(seconds)
        self.spend(seconds)

    def spend(self, seconds: float) -> None:
        """Counts time beyond what is free, or takes back what is left of it; raises as `add`."""
        self._excess_s = max(0.0, self._excess_s + (max(0.0, seconds) if self._is_drafting else seconds))
        if self._excess_s > MAX_EXCESS_S and self._is_timed:
            self._on_excess()
            raise TookTooLong(
                "grammar_too_complex",
                f"the grammar takes too long: {self._excess_s:.2f} s of processor time beyond what its tokens may "
                "take; make it simpler",
            )

    def too_large(self, message: str) -> TookTooLong:
        """The error of a text that has filled a lexer alone, which counts like time."""
        self._on_excess()
        return TookTooLong("grammar_too_complex", message)

    def check_size(self, matcher: Any, length: int) -> None:
        """Ends a text of which the library keeps too much. Only the time of a copy tells; one may be slow by chance."""
        if self._is_timed and all(_copied(matcher, length)[1] > MAX_COPY_S for _ in range(3)):
            raise self.too_large(f"the grammar takes too much memory after {length} tokens; make it simpler")


def _copied(matcher: Any, length: int) -> tuple[Any, float]:
    """A copy of a matcher that has read `length` tokens, and the time that it took beyond what is free."""
    began_s = time.thread_time()
    twin = matcher.deep_copy()
    return twin, max(0.0, time.thread_time() - began_s - FREE_S - FREE_COPY_S * length)


class WornOut(RequestError):
    """The lexer of a costly grammar is full of what its texts have met; the next request has it compiled again."""


MAX_FORCED: Final = 64
"""Forced tokens that are listed at once."""


class GrammarState:
    """A place in a grammar, after `length` tokens of the answer. From `CompiledGrammar.state()`.

    A `LogitProcessor`; comes before others, which forbid ids among those that are left. It changes by `accept`,
    `advance`, `replay` and `truncate` only. Where the grammar accepts the text, stop ids may follow; where nothing
    can be added, only they may. Once a stop id is there, only stop ids follow. Before the token that the grammar begins
    after (`GrammarSpec.after`) every token is allowed; with a `GrammarSpec.opener`, only where that is the first token.
    Not safe to share between threads; forks may go to others.
    """

    __slots__ = (
        "_after",
        "_is_waiting",
        "_matched",
        "_matcher",
        "_matchers",
        "_num_free",
        "_num_stops",
        "_opener",
        "_origin",
        "_vocabulary",
        "cost",
    )

    def __init__(
        self, vocabulary: Vocabulary, matchers: Matchers, after: int | None, opener: int | None, cost: GrammarCost
    ) -> None:
        """cost: of the text; forks share it."""
        self.cost = cost
        self._vocabulary = vocabulary
        self._matchers = matchers
        self._origin = matchers.current
        self._matcher = self._origin.deep_copy()
        self._after = after
        self._opener = opener
        self._is_waiting = after is not None and opener is None
        self._num_free = 0  # tokens before the grammar began
        self._matched: list[int] = []
        self._num_stops = 0

    @property
    def length(self) -> int:
        """Tokens consumed."""
        return self._num_free + len(self._matched) + self._num_stops

    @property
    def is_over(self) -> bool:
        """Whether only stop ids may follow."""
        return not self._is_waiting and (self._num_stops > 0 or bool(self._matcher.is_stopped()))

    @property
    def may_stop(self) -> bool:
        """Whether the text so far is one that the grammar allows as a whole."""
        return self._is_waiting or self._num_stops > 0 or bool(self._matcher.is_accepting())

    def apply(self, row: NDArray[np.float32]) -> None:
        """Sets the logits of forbidden tokens to -inf, in place; ids beyond the tokenizer's are always forbidden.

        row: float32 [V]. Raises RequestError `grammar_too_complex` where the library's limits are reached, or where no
        token of this vocabulary goes on.
        """
        if self._is_waiting:
            row[self._vocabulary.num_tokens :] = -np.inf
            return
        if not apply_mask(self._bits(), row):
            raise _dead_end(self.length)

    def mask(self, size: int) -> NDArray[np.uint8]:
        """What `apply` leaves of a row: [(size + 7) // 8], one bit an id, lowest first. Raises as `apply`."""
        allowed = self._vocabulary.own_bits if self._is_waiting else self._bits()
        found = np.zeros(-(-size // 8), np.uint8)
        packed = np.frombuffer(allowed, np.uint8)[: found.size]
        found[: packed.size] = packed
        if size % 8:
            found[-1] &= (1 << size % 8) - 1
        if not found.any():
            raise _dead_end(self.length)
        return found

    def accept(self, token: int) -> bool:
        """Consumes a token; False, and nothing changes, where the grammar forbids it.

        Raises RequestError `grammar_too_complex` where the library's limits are reached: the state is of no use then.
        """
        if self._may_open and token == self._opener:
            self._num_free, self._is_waiting = 1, True
            return True
        if self._is_waiting:
            self._num_free += 1
            self._is_waiting = token != self._after
            return True
        if token in self._vocabulary.stop_ids and self.may_stop:
            self._num_stops += 1
            return True
        if self._num_stops:
            return False
        if not 0 <= token < self._vocabulary.num_tokens:
            return False
        if self._ask(lambda matcher: int(matcher.try_consume_tokens([token])), lambda count: count != 1) != 1:
            return False
        self._matched.append(token)
        return True

    def advance(self, token: int) -> None:
        """As `accept`, but raises RequestError `grammar_excluded` for a token outside."""
        if not self.accept(token):
            raise excluded(token, self.length)

    def replay(self, tokens: Sequence[int]) -> None:
        """Goes on by the tokens of a text that is resumed; raises RequestError as `advance`."""
        with self.cost.replaying():
            for token in tokens:
                self.advance(token)

    def truncate(self, length: int) -> None:
        """Goes back to the place after the first `length` tokens; more than there are changes nothing."""
        assert length >= 0
        dropped = max(self.length - length, 0)
        stops = min(dropped, self._num_stops)
        matched = min(dropped - stops, len(self._matched))
        free = dropped - stops - matched
        self._num_stops -= stops
        if matched:
            is_back = self._matcher.rollback(matched)
            # One that has reached the limits is replaced when it is next asked, or its text ends.
            assert is_back or self._matcher.is_error(), "the library holds as many tokens as were matched"
            del self._matched[-matched:]
        if free:
            self._num_free -= free
            self._is_waiting = self._num_free > 0 or self._opener is None

    def fork(self) -> GrammarState:
        """A state of its own at the same place. The library copies all that it has read: raises as `accept`."""
        twin = copy.copy(self)
        twin._matcher, seconds = _copied(self._matcher, len(self._matched))
        self.cost.spend(seconds)
        twin._matched = self._matched.copy()
        return twin

    def forced(self) -> list[int]:
        """The tokens that must come next, at most `MAX_FORCED`; empty where there is a choice."""
        if self._is_waiting or self._num_stops or self._may_open:
            return []
        if self._matcher.is_stopped():
            return list(self._vocabulary.stop_ids) if len(self._vocabulary.stop_ids) == 1 else []
        return list(self._ask(lambda matcher: matcher.compute_ff_tokens())[:MAX_FORCED])

    def validate(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first on, are allowed here one after the other. Changes nothing."""
        stops = self._vocabulary.stop_ids
        is_plain = not (self._is_waiting or self._num_stops or self._may_open)
        if is_plain and not any(token in stops for token in tokens):
            inside = next((i for i, t in enumerate(tokens) if not 0 <= t < self._vocabulary.num_tokens), len(tokens))
            asked = list(tokens[:inside])
            return self._ask(lambda matcher: int(matcher.validate_tokens(asked)), lambda count: count < len(asked))
        walker = self.fork()
        return next((i for i, token in enumerate(tokens) if not walker.accept(token)), len(tokens))

    @property
    def _may_open(self) -> bool:
        """Whether the next token says if the grammar waits."""
        return self._opener is not None and self.length == 0

    def _bits(self) -> bytes:
        """The mask of the next token, one bit an id."""
        if self._num_stops:
            return self._vocabulary.stop_bits
        if self._matched and len(self._matched) % COPY_EVERY == 0:
            self.cost.check_size(self._matcher, len(self._matched))
        bits: bytes = self._ask(lambda matcher: matcher.compute_bitmask())
        bits = self._vocabulary.only_own_stops(bits)
        if self._may_open:
            assert self._opener is not None
            opened = bytearray(bits)
            opened[self._opener // 8] |= 1 << self._opener % 8
            return bytes(opened)
        return bits

    def _ask(self, call: Callable[[Any], Found], is_refused: Callable[[Found], bool] = lambda found: False) -> Found:
        """What the matcher answers; one that has reached its lexer's limits is replaced, once. Raises as `accept`."""
        found, is_sound = self._ask_once(call, is_refused)
        while not is_sound:
            is_new = self._renew()
            found, is_sound = self._ask_once(call, is_refused)
            if not is_sound and is_new:
                raise self.cost.too_large(self._too_complex())
        return found

    def _ask_once(self, call: Callable[[Any], Found], is_refused: Callable[[Found], bool]) -> tuple[Found, bool]:
        """What the matcher answers, and whether it is a sound answer."""
        began_s = time.thread_time()
        found = call(self._matcher)
        if is_refused(found):
            # A limit that is reached while tokens are read looks like a refusal; only a mask tells.
            self._matcher.compute_bitmask()
        self.cost.add(began_s)
        return found, not self._matcher.is_error()

    def _renew(self) -> bool:
        """Has another matcher read the text again, within its cost; whether its lexer was no other text's.

        Raises as `accept`, and then keeps the old one.
        """
        if not str(self._matcher.get_error()).startswith("lexer error"):
            raise RequestError("grammar_too_complex", self._too_complex())
        origin, matcher = self._origin, None
        while matcher is None:  # others may have filled the next one, too
            origin, is_new = self._matchers.replaced(origin)
            if origin is None:
                raise WornOut("grammar_too_complex", self._too_complex())
            self.cost.spend(self._matchers.again_s)
            matcher = self._read_again(origin)
            if matcher is None and is_new:
                raise self.cost.too_large(self._too_complex())
        self._origin, self._matcher = origin, matcher
        return is_new

    def _read_again(self, origin: Any) -> Any:
        """A copy that has read the text; None where its lexer is full before the end."""
        matcher = origin.deep_copy()
        with self.cost.replaying():
            for token in self._matched:
                began_s = time.thread_time()
                is_read = matcher.try_consume_tokens([token]) == 1
                self.cost.add(began_s)
                if not is_read:
                    return None
        return matcher

    def _too_complex(self) -> str:
        reason = " ".join(self._matcher.get_error().split())[:120]
        return f"the grammar is too costly after {self.length} tokens: {reason}; make it simpler"


def excluded(token: int, length: int) -> RequestError:
    """For a text whose token, after `length` others, its grammar forbids."""
    return RequestError(
        "grammar_excluded",
        f"token {token} after {length} tokens of text is outside the grammar; compare the "
        "text and the request's logit processors with it",
    )


def _dead_end(length: int) -> RequestError:
    return RequestError(
        "grammar_too_complex",
        f"no token of the model's vocabulary continues the grammar after {length} tokens; make it simpler",
    )
