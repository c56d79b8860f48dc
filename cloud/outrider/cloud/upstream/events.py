"""Reads the events of an upstream session, and checks them: no answer can do more than end its own text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Final

from outrider.cloud.upstream.errors import UpstreamLost
from outrider.models.protocol import (
    Commit,
    SessionEnd,
    SessionEvent,
    SessionOpen,
    VerifyItem,
    VerifyResult,
    parse_event,
)

MAX_LINE_BYTES: Final = 1 << 18
"""A commit is a few hundred bytes; `open` repeats the request's stop ids."""
_SESSION_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")


class EventReader:
    """Turns the bytes of one session's stream, cut anywhere, into checked events.

    Raises UpstreamLost for anything else than a session of `max_tokens` of a model with `vocab_size` ids.
    """

    def __init__(self, max_tokens: int, vocab_size: int) -> None:
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._rest = b""
        self._is_open = False
        self._num_tokens = 0
        self.is_over = False
        """Whether the session has ended, so that nothing follows."""

    def feed(self, data: bytes) -> Iterator[SessionEvent]:
        """Yields the events that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if max(map(len, (self._rest, *lines))) > MAX_LINE_BYTES:
            raise _broken(f"a line has more than {MAX_LINE_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                try:
                    event = parse_event(line[5:])
                except (ValueError, RecursionError):
                    raise _broken("it sent a line that is no event") from None
                self._check(event)
                yield event

    def _check(self, event: SessionEvent) -> None:
        if isinstance(event, SessionOpen):
            if self._is_open or not _SESSION_ID.fullmatch(event.session):
                raise _broken("its stream does not begin with one 'open'")
            self._is_open = True
        elif not self._is_open:
            raise _broken("its stream does not begin with 'open'")
        elif isinstance(event, Commit):
            if event.provisional or event.base != self._num_tokens or not event.tokens:
                raise _broken("its commits do not follow each other")
            self._num_tokens += len(event.tokens)
            if self._num_tokens > self._max_tokens:
                raise _broken("it committed more tokens than were asked for")
            check_ids(event.tokens, self._vocab_size)
            self._check_logprobs(event)
            if not 0 <= event.accepted <= min(event.proposed, len(event.tokens)):
                raise _broken("it accepted more drafted tokens than it committed")
        elif isinstance(event, SessionEnd):
            if not math.isfinite(event.usage.waited_ms):
                raise _broken("waited_ms is no number")
            self.is_over = True

    def _check_logprobs(self, commit: Commit) -> None:
        found = commit.logprobs or []
        if len(found) not in (0, len(commit.tokens)):
            raise _broken(f"it sent {len(found)} logprobs of {len(commit.tokens)} tokens")
        for each in found:
            check_ids([token for token, _ in each.top], self._vocab_size)
            if not all(map(math.isfinite, [each.logprob, *(logprob for _, logprob in each.top)])):
                raise _broken("a logprob is no number")


def check_result(item: VerifyItem, result: VerifyResult, vocab_size: int) -> None:
    """Raises UpstreamLost for a result that is no answer to `item`."""
    most = min(len(item.draft) + 1, item.max_tokens or len(item.draft) + 1)
    num_tokens = len(result.tokens)
    if num_tokens > most or not (num_tokens or result.finish_reason) or not 0 <= result.accepted <= num_tokens:
        raise _broken(f"{num_tokens} tokens answer a draft of {len(item.draft)}")
    check_ids(result.tokens, vocab_size)


def check_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Raises UpstreamLost for an id beyond the vocabulary."""
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        raise _broken(f"it committed an id beyond its vocabulary of {vocab_size}")


def _broken(what: str) -> UpstreamLost:
    return UpstreamLost(f"the upstream verifier broke the protocol: {what}; compare the versions of both servers")
