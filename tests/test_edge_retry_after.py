"""Tests that a device waits as long as a verifier asks for (Retry-After), and goes to another one first."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import httpx
import pytest
from tests.agents import Clock, scripted_client
from tests.waiting import run

from outrider.edge.cli.run import OFFLINE_RETRY
from outrider.edge.link.endpoints import Endpoints, RetryPolicy
from outrider.edge.serve.upstream import Upstream, quick
from outrider.models.client.client import VerifierClient
from outrider.models.client.errors import MAX_RETRY_AFTER_S, EndpointLost, retry_after_s
from outrider.models.errors import CloudError
from outrider.models.wire.protocol import ModelFacts

FACTS = ModelFacts(name="m", tokenizer="t", vocab_size=9, max_positions=9, eos_token_ids=[], has_chat_template=False)
Answer = Callable[[httpx.Request], httpx.Response]


def verifier(clock: Clock, asked: list[float], *retry_after: str, status: int = 429) -> Answer:
    """Answers `status` with each of these headers, then the facts; notes when it was asked."""
    left = list(retry_after)

    def handle(_: httpx.Request) -> httpx.Response:
        asked.append(clock.now)
        if not left:
            return httpx.Response(200, json=FACTS.model_dump())
        error = {"error": {"code": "tokens_exhausted", "message": "too many tokens", "type": "rate_limit_error"}}
        return httpx.Response(status, json=error, headers={"retry-after": left.pop(0)})

    return handle


async def facts_from(
    clock: Clock,
    *handlers: Answer,
    retry: RetryPolicy | None = None,
    on_trouble: Callable[[str], None] = lambda words: None,
) -> ModelFacts:
    """Asks the verifiers, one after the other, until one answers."""
    clients = [scripted_client(handler, f"http://verifier{index}") for index, handler in enumerate(handlers)]
    return await Endpoints(clients, retry, clock.sleep, clock, on_trouble).call(lambda client: client.model_facts())


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
    clock, asked = Clock(), list[float]()
    assert run(facts_from(clock, verifier(clock, asked, "7", "3"))) == FACTS
    assert asked == [0.0, 7.0, 10.0] and clock.pauses == [7.0, 3.0]


def test_another_verifier_is_asked_at_once() -> None:
    """And where all ask for clock, the one that asks for least comes first."""
    clock, first, second = Clock(), list[float](), list[float]()
    assert run(facts_from(clock, verifier(clock, first, "30"), verifier(clock, second))) == FACTS
    assert (first, second, clock.pauses) == ([0.0], [0.0], [])
    first, second = [], []
    assert run(facts_from(clock, verifier(clock, first, "30"), verifier(clock, second, "5"))) == FACTS
    assert (first, second, clock.pauses) == ([0.0], [0.0, 5.0], [5.0])


def test_a_verifier_that_always_asks_for_time_is_given_up() -> None:
    """After as many attempts as any other that fails."""
    clock, asked = Clock(), list[float]()
    with pytest.raises(CloudError, match="tokens_exhausted: too many tokens"):
        run(facts_from(clock, verifier(clock, asked, *["60"] * 50)))
    assert len(asked) == 6 and clock.now == 300.0


def test_the_policy_bounds_what_a_verifier_asks_for() -> None:
    """A text of `run --offline-ok` and one of `outrider serve` wait for 3 s; a question of the latter does not wait."""
    client = VerifierClient("http://verifier", transport=httpx.MockTransport(lambda _: httpx.Response(503)))
    for_texts = Upstream([client], "t").endpoints()._retry
    for policy, first_s, last_s, num in ((OFFLINE_RETRY, 3, 3, 2), (for_texts, 3, 4.5, 6), (quick(1), 0.05, 0.05, 2)):
        clock, asked = Clock(), list[float]()
        with pytest.raises(CloudError, match="tokens_exhausted"):
            run(facts_from(clock, verifier(clock, asked, *["60"] * 9, status=503), retry=policy))
        assert asked[1] == first_s and clock.now == pytest.approx(last_s) and len(asked) == num


async def test_an_outage_that_was_given_up_is_not_waited_out_again() -> None:
    """Else `run --offline-ok` is silent for 3 s at each look for a cloud; once one answers, its next outage is."""
    clock, is_up = Clock(), True

    def handle(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=FACTS.model_dump()) if is_up else httpx.Response(503)

    waited = list[float]()
    async with VerifierClient("http://verifier", transport=httpx.MockTransport(handle)) as client:
        endpoints = Endpoints([client], OFFLINE_RETRY, clock.sleep, clock)
        for is_up in (True, False, False, True, False):
            began = clock.now
            with nullcontext() if is_up else pytest.raises(CloudError):
                await endpoints.call(lambda client: client.model_facts())
            waited.append(clock.now - began)
    up, first, second, up_again, third = waited
    assert up == up_again == 0.0 and first == pytest.approx(third) and first >= 3.0 and second < 0.1


def test_the_user_reads_how_long_a_verifier_asks_to_wait() -> None:
    """Else a minute's silence looks like a hang."""
    clock, said = Clock(), list[str]()
    run(facts_from(clock, verifier(clock, [], "60"), on_trouble=said.append))
    assert said == ["http://verifier0: tokens_exhausted: too many tokens. Trying again in 60 s."]


@pytest.mark.parametrize("status", [425, 500, 501, 507, 520, 521, 522, 523, 524, 525, 526, 527, 529, 530, 599])
def test_another_verifier_is_asked_where_a_proxy_says_that_one_is_away(status: int) -> None:
    """Whatever number its proxy gives that; the request is not at fault."""
    clock = Clock()
    away, works = verifier(clock, [], "0", status=status), verifier(clock, [])
    assert run(facts_from(clock, away, works)) == FACTS and not clock.pauses
