"""Tests that a device waits as long as a verifier asks for (Retry-After), and goes to another one first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest

from outrider.edge.link.client import CloudClient
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.link.errors import MAX_RETRY_AFTER_S, EndpointLost, retry_after_s
from outrider.models.errors import CloudError
from outrider.models.protocol import ModelFacts

FACTS = ModelFacts(name="m", tokenizer="t", vocab_size=9, max_positions=9, eos_token_ids=[], has_chat_template=False)
Answer = Callable[[httpx.Request], httpx.Response]


class Time:
    """Seconds that pass in pauses only, which are noted."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, pause_s: float) -> None:
        """Passes at once."""
        self.pauses.append(pause_s)
        self.now += pause_s


def verifier(time: Time, asked: list[float], *retry_after: str) -> Answer:
    """Answers 429 with each of these headers, then the facts; notes when it was asked."""
    left = list(retry_after)

    def handle(_: httpx.Request) -> httpx.Response:
        asked.append(time.now)
        if not left:
            return httpx.Response(200, json=FACTS.model_dump())
        error = {"error": {"code": "tokens_exhausted", "message": "too many tokens", "type": "rate_limit_error"}}
        return httpx.Response(429, json=error, headers={"retry-after": left.pop(0)})

    return handle


async def facts_from(time: Time, *handlers: Answer) -> ModelFacts:
    """Asks the verifiers, one after the other, until one answers."""
    clients = [
        CloudClient(f"http://verifier{index}", transport=httpx.MockTransport(handler))
        for index, handler in enumerate(handlers)
    ]
    try:
        return await Endpoints(clients, None, time.sleep, time).call(lambda client: client.model_facts())
    finally:
        for client in clients:
            await client.aclose()


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7.0), (" 7 ", 7.0), ("9999", MAX_RETRY_AFTER_S), (None, 0.0), ("-3", 0.0), ("1e9", 0.0), ("soon", 0.0)],
)
def test_a_header_is_whole_seconds_and_bounded(header: str | None, seconds: float) -> None:
    """No server keeps a device waiting for longer than a minute, and a date counts as none."""
    assert retry_after_s(header) == seconds
    assert EndpointLost("lost").retry_after_s == 0.0


def test_a_verifier_is_not_asked_before_the_time_it_names() -> None:
    """However short the device's own pauses would be."""
    time, asked = Time(), list[float]()
    assert asyncio.run(facts_from(time, verifier(time, asked, "7", "3"))) == FACTS
    assert asked == [0.0, 7.0, 10.0] and time.pauses == [7.0, 3.0]


def test_another_verifier_is_asked_at_once() -> None:
    """And where all ask for time, the one that asks for least comes first."""
    time, first, second = Time(), list[float](), list[float]()
    assert asyncio.run(facts_from(time, verifier(time, first, "30"), verifier(time, second))) == FACTS
    assert (first, second, time.pauses) == ([0.0], [0.0], [])
    first, second = [], []
    assert asyncio.run(facts_from(time, verifier(time, first, "30"), verifier(time, second, "5"))) == FACTS
    assert (first, second, time.pauses) == ([0.0], [0.0, 5.0], [5.0])


def test_a_verifier_that_always_asks_for_time_is_given_up() -> None:
    """After as many attempts as any other that fails."""
    time, asked = Time(), list[float]()
    with pytest.raises(CloudError, match="tokens_exhausted: too many tokens"):
        asyncio.run(facts_from(time, verifier(time, asked, *["60"] * 50)))
    assert len(asked) == 6 and time.now == 300.0
