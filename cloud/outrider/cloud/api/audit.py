"""Writes the audit log: who used what, when, how much, and how it ended; never a prompt, a text or a key.

One JSON object per line. A request that the server refused gets a line of its own while there are few; a flood of them
is counted, one line per window, so that nobody fills the disk with refusals. Lines are written on a thread of their
own. A disk that is full, or a file that cannot be opened, loses lines and stops nothing: the log says so once, and a
metric counts them.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from starlette.types import Scope

from outrider.models.errors import ConfigError
from outrider.models.hosts import client_network
from outrider.models.http.errors import ERROR_CODE
from outrider.models.http.keys import KEY, ForwardedKey
from outrider.models.http.request_context import current_request
from outrider.models.http.security import SUBJECT

AUDIT: Final = "outrider.audit"
"""Key of the ASGI scope that holds the entry of a request that was let in."""
WINDOW_S: Final = 10.0
MAX_REFUSED_LINES: Final = 20
"""Refused requests that get a line of their own, per window; the rest are counted."""
MAX_WAITING: Final = 10_000
"""Lines that wait for a slow disk."""
_LOOK_S: Final = 1.0
"""Seconds between two looks whether the file was moved away."""
_FLUSH_S: Final = 5.0

_log = logging.getLogger("outrider.audit")


@dataclass(slots=True)
class AuditEntry:
    """What a request's sequences took. The engine's thread fills it. ends: by their reason, or their error's code."""

    num_prompt: int = 0
    num_generated: int = 0
    num_accepted: int = 0
    num_sequences: int = 0
    ends: Counter[str] = field(default_factory=Counter)

    @property
    def end(self) -> str | None:
        """How the sequences ended, several reasons joined; `left` for those whose client left. None without any."""
        reasons = sorted(self.ends)
        if self.ends.total() < self.num_sequences:
            reasons.append("left")
        return "+".join(reasons) or None


class AuditLog:
    """The file. Any thread may write; `close` writes what waits.

    num_lost: lines that could not be written.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Opens the file, with mode 0600. Raises ConfigError if it cannot be written."""
        self._path = path
        self._clock = clock
        self.num_lost = 0
        self._has_complained = False
        self._is_moved = False  # and could not be opened again
        self._is_torn = False  # the last line was cut by a full disk
        self._lines: queue.Queue[bytes] = queue.Queue(MAX_WAITING)  # b"" ends them
        self._lock = threading.Lock()  # guards the counts of refused requests
        self._looked_s = self._window_s = clock()
        self._num_refused = 0
        self._refused: Counter[tuple[str, int, str]] = Counter()
        try:
            self._descriptor: int | None = self._open()
        except OSError as error:
            raise ConfigError(f"the audit log {path} cannot be written: {error.strerror}; name another file") from None
        self._thread = threading.Thread(target=self._run, name="outrider-audit", daemon=True)
        self._thread.start()

    def write(self, line: dict[str, Any]) -> None:
        """Writes a line soon; never blocks on the disk."""
        try:
            self._lines.put_nowait(_encoded(line))
        except queue.Full:
            self.num_lost += 1

    def refused(self, line: dict[str, Any], *, is_counted_only: bool = False) -> None:
        """Writes a refused request: a line of its own, or a count where there were many in this window."""
        with self._lock:
            is_single = not is_counted_only and self._num_refused < MAX_REFUSED_LINES
            self._num_refused += is_single
            if not is_single:
                self._refused[str(line["endpoint"]), int(line["status"]), str(line["end"])] += 1
        if is_single:
            self.write(line)

    def over(self, scope: Scope, endpoint: str, status: int | None, took_s: float, *, is_work: bool) -> None:
        """Writes the line of a request that is over. status: None where its client left before the answer.

        endpoint: the pattern of the route that answered. is_work: written also where it was not refused.
        """
        entry: AuditEntry = scope.get(AUDIT) or AuditEntry()
        status = status or 499
        is_refused = status >= 400 and not entry.num_sequences
        if not (is_refused or is_work):
            return
        request = current_request()
        line = {
            "endpoint": endpoint,
            "method": scope["method"],
            **caller_of(scope),
            "request_id": request.request_id if request is not None else "",
            "status": status,
            "end": entry.end or scope.get(ERROR_CODE),
            "prompt_tokens": entry.num_prompt,
            "generated_tokens": entry.num_generated,
            "accepted_tokens": entry.num_accepted,
            "duration_ms": round(took_s * 1e3, 1),
        }
        if is_refused:
            self.refused(line)
        else:
            self.write(line)

    def close(self) -> None:
        """Writes what waits, for up to some seconds, and closes the file."""
        with suppress(queue.Full):  # of a disk that hangs
            self._lines.put(b"", timeout=_FLUSH_S)
        self._thread.join(_FLUSH_S)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            lines: list[bytes] = []
            with suppress(queue.Empty):
                lines.append(self._lines.get(timeout=_LOOK_S))
            is_last = b"" in lines
            self._reopen_if_moved()
            for line in [*filter(None, lines), *self._counts(is_last)]:
                self._append(line)
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _counts(self, is_last: bool) -> list[bytes]:
        """The lines that count refused requests, at the end of a window."""
        now = self._clock()
        if now - self._window_s < WINDOW_S and not is_last:
            return []
        with self._lock:
            self._window_s, self._num_refused = now, 0
            counts, self._refused = self._refused, Counter()
        return [
            _encoded({"endpoint": endpoint, "status": status, "end": end, "refused_requests": count})
            for (endpoint, status, end), count in counts.items()
        ]

    def _open(self) -> int:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        if os.name == "posix" and stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.fchmod(descriptor, 0o600)  # it may have been there
        return descriptor

    def _reopen_if_moved(self) -> None:
        now = self._clock()
        if now - self._looked_s < _LOOK_S:
            return
        self._looked_s = now
        try:
            found = self._path.stat()
            if self._descriptor is not None:
                held = os.fstat(self._descriptor)
                if (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino):
                    return
        except OSError:
            pass  # moved away: make a new one
        try:
            opened = self._open()
        except OSError as error:
            self._is_moved = True
            return self._complain(error)  # the old one takes the lines
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._is_torn, self._is_moved = opened, False, False

    def _append(self, line: bytes) -> None:
        data = (b"\n" if self._is_torn else b"") + line
        try:
            assert self._descriptor is not None
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            self._is_torn = self._is_torn or len(data) < len(line)
            self.num_lost += 1
            return self._complain(error)
        self._is_torn = False
        self._has_complained = self._is_moved

    def _complain(self, error: OSError) -> None:
        if not self._has_complained:
            self._has_complained = True
            _log.warning("the audit log %s cannot be written: %s; its lines are lost", self._path, error.strerror)


def caller_of(scope: Scope) -> dict[str, str | None]:
    """Who called: the key's name, the name on the certificate, the network."""
    key, client = scope.get(KEY), scope.get("client")
    name = None if key is None else key.name
    network = client_network(client[0]) if client else None
    subject = scope[SUBJECT].shown if scope.get(SUBJECT) else None
    if isinstance(key, ForwardedKey):  # the client is the server in front
        name, network, subject = key.name if key.is_known else None, key.network, key.subject
    caller: dict[str, str | None] = {"key": name, "network": network}
    return caller | ({"subject": subject} if subject else {})


def _encoded(line: dict[str, Any]) -> bytes:
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1e3):03d}Z"
    return json.dumps({"time": stamp, **line}, separators=(",", ":")).encode() + b"\n"
