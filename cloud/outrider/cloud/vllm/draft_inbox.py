"""Keeps draft messages that have arrived and are not read yet: a bounded part of each sequence's, read in turns.

Reading a message costs as much as its bytes. So what is read before a step is bounded by bytes, and what is read while
the model runs by time, and by bytes for each sequence: no flood holds up a step, or the drafts of others. What does not
fit is dropped, as a draft may be at any time. Knows neither sockets nor what a message says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Final

MAX_BYTES: Final = 8 << 20
"""Unread messages of all sequences, which share it evenly."""
MIN_BYTES: Final = 16 << 10
"""Of one sequence, however many there are; and what is read of it during a step: more than its trie holds."""
FIRST_BYTES: Final = 2 << 10
"""Read before a step: some 0.3 ms. A first message is read, however long: some 0.6 ms."""

SHORT_BYTES: Final = 256
"""What a message counts for at least, where bytes are received: so they bound the number of messages, too."""

_READ: Final = 0.9
_MOST_WAITED: Final = 0.6
_MORE: Final = 0.02
_RECENT: Final = 9  # steps
_SPARED: Final = 0.1  # of a step, between the end of reading and that of the model
_LEAST_S: Final = 0.0005
_SHORTEST_S: Final = 0.001  # that a socket can be waited for
_RECEIVED_FIRST: Final = 16 << 10  # bytes before a step: 64 short messages, 0.1 ms
_RECEIVED: Final = 64 << 10


class DraftInbox:
    """The unread messages by sequence. read: reads one; never raises."""

    def __init__(self, read: Callable[[bytes], None]) -> None:
        self._read = read
        self._turns: dict[int, deque[bytes]] = {}  # the next first
        self._later: dict[int, deque[bytes]] = {}  # those that had their part of this step
        self._num_bytes: dict[int, int] = {}  # unread, by sequence
        self._num_read: dict[int, int] = {}  # bytes, in this step

    def __len__(self) -> int:
        """Sequences that have unread messages."""
        return len(self._num_bytes)

    def put(self, number: int, message: bytes) -> None:
        """Adds a message of a sequence; drops its oldest ones beyond its part."""
        queue = self._turns.get(number) or self._later.get(number)
        if queue is None:
            queue = self._queues_for(number)[number] = deque()
        queue.append(message)
        num_bytes = self._num_bytes.get(number, 0) + len(message)
        most = max(MIN_BYTES, MAX_BYTES // (1 + len(self._num_bytes)))
        while num_bytes > most and len(queue) > 1:
            num_bytes -= len(queue.popleft())
        self._num_bytes[number] = num_bytes

    def begin_step(self) -> None:
        """Gives each sequence a new part; those that did not have theirs in the last step come first."""
        self._turns |= self._later
        self._later.clear()
        self._num_read.clear()

    def read_first(self, needs: Callable[[int], bool]) -> None:
        """Reads before a step. needs: which sequences' messages."""
        left, waiting = FIRST_BYTES, [number for number in (*self._turns, *self._later) if needs(number)]
        while waiting:
            for number in waiting:
                size = len((self._turns.get(number) or self._later[number])[0])
                if size > left and left < FIRST_BYTES:
                    return
                left -= size
                self._read_one(number)
            waiting = [number for number in waiting if number in self._num_bytes]

    def read_until(self, is_over: Callable[[], bool]) -> None:
        """Reads while the model runs: all sequences in turns, each no more than its part, until `is_over`."""
        while self._turns and not is_over():
            self._read_one(next(iter(self._turns)))

    def _read_one(self, number: int) -> None:
        """Reads a sequence's oldest message, and puts it behind the others."""
        queue = self._turns.pop(number, None) or self._later.pop(number)
        message = queue.popleft()
        self._num_read[number] = self._num_read.get(number, 0) + len(message)
        if queue:
            self._num_bytes[number] -= len(message)
            self._queues_for(number)[number] = queue
        else:
            del self._num_bytes[number]
        self._read(message)

    def _queues_for(self, number: int) -> dict[int, deque[bytes]]:
        return self._turns if self._num_read.get(number, 0) < MIN_BYTES else self._later


class DraftReader:
    """Reads drafts before a step and while the model runs. The engine process's main thread calls it.

    receive: moves what has arrived to an inbox, up to so many bytes, or one message, and waits up to so many seconds
    for the first; whether there may be more. read: reads one.

    While the model runs, what has arrived is read to shortly before its expected end. For more, nothing is waited for
    longer than for a share of that time, which falls where the model was found to have ended meanwhile. After the
    reading the workers' host prepares the picks: reading ends early enough for what that usually takes.
    """

    def __init__(
        self,
        receive: Callable[[DraftInbox, int, float], bool],
        read: Callable[[bytes], None],
        clock: Callable[[], float],
    ) -> None:
        self._receive = receive
        self._clock = clock
        self._inbox = DraftInbox(read)
        self._share = _MOST_WAITED
        self._left_off_s = 0.0
        self._prepared_s = deque([0.0], maxlen=_RECENT)

    def read_before(self, needs: Callable[[int], bool], wait_s: float = 0.0) -> None:
        """Reads a bounded part before a step; waits up to `wait_s` for a first message. needs: whose messages."""
        self._receive(self._inbox, _RECEIVED_FIRST, wait_s)
        if self._inbox:
            self._inbox.read_first(needs)

    def read_during(self, began_s: float, expected_s: float) -> None:
        """Reads while the model runs, which began at `began_s` and is expected to take `expected_s`."""
        self._inbox.begin_step()
        left_s = expected_s - median(self._prepared_s)
        until = max(began_s + _READ * left_s, self._clock() + _LEAST_S)
        wait_until = began_s + self._share * left_s
        while True:
            has_more = self._receive(self._inbox, _RECEIVED, 0.0)
            self._inbox.read_until(lambda: self._clock() >= until)
            now = self._left_off_s = self._clock()
            if now >= until:
                return
            if has_more:
                continue
            if wait_until - now < _SHORTEST_S:
                return
            self._receive(self._inbox, 1, wait_until - now)

    def ended(self, began_s: float, now: float, prepared_s: float) -> None:
        """Records when the model's result was here. prepared_s: of the workers' host, between reading and picks."""
        was_late = now - self._left_off_s - prepared_s < _SPARED * (now - began_s)
        self._share = self._share / 2 if was_late else min(_MOST_WAITED, self._share + _MORE)
        self._prepared_s.append(prepared_s)
