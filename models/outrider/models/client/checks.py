"""Checks what a server sends against what was asked, so that no answer can do more than end its own text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Final

from outrider.models.client.errors import ProtocolBroken, short
from outrider.models.wire.protocol import (
    LONG_SINCE,
    Commit,
    RenderAnswer,
    SessionEvent,
    SessionOpen,
    SessionRequest,
    Taken,
    parse_event,
)
from outrider.models.wire.verify import VerifyAnswer, VerifyItem, VerifyResult

MAX_LINE_BYTES: Final = 1 << 18
"""A commit is a few hundred bytes; `open` repeats the request's stop ids."""
MAX_IDLE_BYTES: Final = 1 << 20
"""Of comments and blank lines between two events: a keep-alive of 3 bytes every 5 s takes 20 days for that."""
MAX_STEADY_S: Final = 7200.0
"""The same for the frames of a steady session, at their pace."""


class EventParser:
    """Turns the bytes of an event stream, cut anywhere, into events. Comment lines (keep-alives) are skipped.

    Keeps at most one unfinished line, of at most `MAX_LINE_BYTES`. url: the server, for errors. max_idle_bytes: of
    lines between two events.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._rest = bytearray()
        self._num_idle = 0
        self.max_idle_bytes = MAX_IDLE_BYTES

    def feed(self, data: bytes) -> Iterator[SessionEvent | Taken]:
        """Yields the events that `data` completes. Raises ProtocolBroken for anything that is not a session's event."""
        lines: list[bytes] = []
        self._rest += data
        if b"\n" in data:
            *lines, rest = bytes(self._rest).split(b"\n")
            self._rest = bytearray(rest)
        if max(map(len, [self._rest, *lines])) > MAX_LINE_BYTES:
            raise ProtocolBroken(self._url, f"a line of its stream has more than {MAX_LINE_BYTES} bytes")
        for line in lines:
            self._num_idle += len(line) + 1
            if self._num_idle > self.max_idle_bytes:
                raise ProtocolBroken(self._url, f"it sent more than {self.max_idle_bytes} bytes without an event")
            if line.startswith(b"data:"):
                try:
                    event = parse_event(line[5:])
                except (ValueError, RecursionError) as e:
                    raise ProtocolBroken(self._url, f"it sent {line[:80]!r}, which is not an event") from e
                self._num_idle = 0
                yield event


MAX_TOKEN_ID: Final = 2**24 - 1
"""No vocabulary is larger; what holds where a server does not state its own."""
MAX_HASH_CHARS: Final = 64
# A session's id becomes part of a path.
_SESSION_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")


class SessionCheck:
    """Follows the events of one session, in order.

    url: the server. asked: what opened the session. vocab_size: None: what the server says.
    """

    def __init__(self, url: str, asked: SessionRequest, vocab_size: int | None = None) -> None:
        self._url = url
        self._asked = asked
        self._vocab_size = vocab_size
        self._open: SessionOpen | None = None
        self._num_tokens = 0
        self.is_over = False
        """Whether the session has ended, so that nothing follows."""

    def __call__(self, event: SessionEvent | Taken) -> None:
        """Raises ProtocolBroken for an event that cannot come now, or with values out of bounds."""
        if isinstance(event, SessionOpen):
            self._take_open(event)
        elif self._open is None:
            raise ProtocolBroken(self._url, f"its stream begins with {event.type!r}; expected 'open'")
        elif isinstance(event, Commit):
            if event.provisional:
                self._take_provisional(event)
            else:
                self._take_commit(event)
        elif isinstance(event, Taken):
            pass  # the long request follows it
        elif not math.isfinite(event.usage.waited_ms):
            raise ProtocolBroken(self._url, f"waited_ms is {event.usage.waited_ms}; expected a number")
        else:
            _check_hash(self._url, event.prefix_hash)
            if event.cut is not None and not 0 <= event.cut.tokens <= self._num_tokens:
                raise ProtocolBroken(
                    self._url,
                    f"a stop string ends {_shown(event.cut.tokens)} of {self._num_tokens} tokens; expected no more",
                )
            self.is_over = True

    def _take_open(self, event: SessionOpen) -> None:
        if self._open is not None:
            raise ProtocolBroken(self._url, "it sent 'open' twice in one stream")
        if not _SESSION_ID.fullmatch(event.session):
            raise ProtocolBroken(
                self._url, f"the session's id is {event.session[:40]!r}; expected 1 to 128 letters, digits, _ and -"
            )
        if event.keep_alive_s is not None and not math.isfinite(event.keep_alive_s):
            raise ProtocolBroken(self._url, f"keep_alive_s is {event.keep_alive_s}; expected a number")
        if (event.steady is not None) is not self._asked.steady or (event.steady and event.protocol < LONG_SINCE):
            asked = "a steady session was" if self._asked.steady else "no steady session was"
            raise ProtocolBroken(self._url, f"{asked} asked for, and its 'open' says otherwise")
        check_model(self._url, self._asked.model, event.model)
        check_times(self._url, event)
        self._open = event
        self._vocab_size = self._vocab_size or event.vocab_size

    def _take_provisional(self, commit: Commit) -> None:
        end = commit.base + len(commit.tokens)
        if (
            not self._asked.provisional
            or not commit.tokens
            or not self._num_tokens <= commit.base < end <= self._asked.max_tokens
        ):
            raise ProtocolBroken(
                self._url,
                f"{len(commit.tokens)} provisional tokens come after {_shown(commit.base)}; expected some only where "
                f"they are asked for, after {self._num_tokens} or more, and {self._asked.max_tokens} at most in all",
            )
        _check_tokens(self._url, commit.tokens, self._vocab_size)

    def _take_commit(self, commit: Commit) -> None:
        if commit.base != self._num_tokens:
            raise ProtocolBroken(self._url, f"a commit's base is {_shown(commit.base)}; expected {self._num_tokens}")
        self._num_tokens += len(commit.tokens)
        if not commit.tokens or self._num_tokens > self._asked.max_tokens:
            raise ProtocolBroken(
                self._url,
                f"{len(commit.tokens)} tokens were committed after {commit.base}; expected at least 1, and at most "
                f"{self._asked.max_tokens} in all",
            )
        _check_tokens(self._url, commit.tokens, self._vocab_size)
        check_times(self._url, commit)
        if self._asked.logprobs is not None:
            self._check_logprobs(commit, self._asked.logprobs)
        if not 0 <= commit.accepted <= min(commit.proposed, len(commit.tokens)):
            raise ProtocolBroken(
                self._url,
                f"{_shown(commit.accepted)} of {_shown(commit.proposed)} drafted tokens were accepted in a commit of "
                f"{len(commit.tokens)}; expected no more than either",
            )

    def _check_logprobs(self, commit: Commit, num_top: int) -> None:
        found = commit.logprobs or []
        if len(found) != len(commit.tokens):
            raise ProtocolBroken(
                self._url, f"it sent {len(found)} logprobs of {len(commit.tokens)} tokens; expected one each"
            )
        for each in found:
            if len(each.top) > num_top:
                raise ProtocolBroken(
                    self._url, f"a token has {len(each.top)} likeliest tokens; expected at most {num_top}"
                )
            _check_tokens(self._url, [token for token, _ in each.top], self._vocab_size)
            if not all(map(math.isfinite, [each.logprob, *(logprob for _, logprob in each.top)])):
                raise ProtocolBroken(self._url, "a logprob is not finite; expected a number")


def check_model(url: str, asked: str | None, found: str | None) -> None:
    """Raises ProtocolBroken where another model answers than the one that was asked for."""
    if asked is not None and found != asked:
        raise ProtocolBroken(url, f"another model than {short(asked)} answers: {short(str(found))}")


def check_times(url: str, message: SessionOpen | Commit | VerifyAnswer) -> None:
    """Raises ProtocolBroken for a step's times that can be none."""
    for name in ("step_ms", "draft_token_ms"):
        value = getattr(message, name)
        if value is not None and not 0.0 <= value < math.inf:
            raise ProtocolBroken(url, f"{name} is {value}; expected a number, at least 0")


def check_result(url: str, item: VerifyItem, result: VerifyResult, vocab_size: int | None = None) -> None:
    """Raises ProtocolBroken for a result that is no answer to `item`: tokens, counts and hash out of bounds."""
    most = min(len(item.draft) + 1, item.max_tokens or MAX_TOKEN_ID)
    num_tokens = len(result.tokens)
    if num_tokens > most or (not num_tokens and result.finish_reason is None):
        raise ProtocolBroken(url, f"{num_tokens} tokens answer {len(item.draft)} drafted ones; expected 1 to {most}")
    if not 0 <= result.accepted <= min(len(item.draft), num_tokens):
        raise ProtocolBroken(
            url, f"{_shown(result.accepted)} of {len(item.draft)} drafted tokens were accepted in {num_tokens} tokens"
        )
    _check_hash(url, result.prefix_hash)
    _check_tokens(url, result.tokens, vocab_size)


def check_rendered(url: str, answer: RenderAnswer) -> None:
    """Raises ProtocolBroken for a conversation's ids that can be none."""
    if not answer.tokens:
        raise ProtocolBroken(url, "0 tokens render a conversation; expected at least 1")
    _check_tokens(url, answer.tokens, None)


def _check_hash(url: str, prefix_hash: str | None) -> None:
    if len(prefix_hash or "") > MAX_HASH_CHARS:
        raise ProtocolBroken(url, f"prefix_hash has more than {MAX_HASH_CHARS} characters")


def _check_tokens(url: str, tokens: Sequence[int], vocab_size: int | None) -> None:
    last = MAX_TOKEN_ID if vocab_size is None else min(MAX_TOKEN_ID, vocab_size - 1)
    for token in tokens:
        if not 0 <= token <= last:
            raise ProtocolBroken(url, f"a token's id is {_shown(token)}; expected 0 to {last}")


def _shown(number: int) -> str:
    """A number from a server; Python refuses to print the longest ones."""
    return str(number) if abs(number) < 2**63 else "a number of more than 63 bits"
