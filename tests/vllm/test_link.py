"""What vLLM's engine process takes from its socket at once."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import zmq

from outrider.cloud.vllm import engine_messages as wire
from outrider.cloud.vllm.draft_inbox import SHORT_BYTES, DraftInbox
from outrider.cloud.vllm.engine_process import ServerLink


class Arrived:
    """A socket whose messages are all here."""

    def __init__(self, message: bytes, count: int) -> None:
        self.messages = deque([message] * count)

    def recv(self, flags: int) -> bytes:
        if not self.messages:
            raise zmq.Again
        return self.messages.popleft()


@pytest.mark.parametrize(("num_tokens", "most"), [(1, 10), (1000, 1)])
def test_as_many_bytes_are_received_as_are_asked_for(num_tokens: int, most: int) -> None:
    """Or one message; so a flood of long ones takes no longer before a step than short ones do."""
    message = wire.encode(wire.PathsOrder(1, 0, [[1 << 20] * num_tokens], 0.0))
    link, inbox = object.__new__(ServerLink), DraftInbox(lambda message: None)
    socket: Any = Arrived(message, 15)
    link._orders = socket
    assert link.receive(inbox, 10 * SHORT_BYTES, 0.0) and len(socket.messages) == 15 - most
    assert link.receive(inbox, 1, 0.0) and len(socket.messages) == 14 - most
    assert not link.receive(inbox, 1 << 20, 0.0) and len(inbox) == 1 and not socket.messages
