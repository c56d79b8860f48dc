"""Tests what the API asks of the engine: tokens per minute, priorities within a key's, deadlines; and Retry-After."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_harness import Clock, refused
from tests.local_endpoint import chunks_of
from tests.requests import flat_request
from tests.serving import (
    PROMPT,
    FakeServer,
    StepGate,
    bearer,
    code_of,
    key_line,
    open_session,
    run_session,
    serve_fake,
    target_tokens,
)

from outrider.cloud.api.admission import Admission, Asked
from outrider.cloud.api.state import ServerSettings
from outrider.cloud.seam import CommitEvent, EndEvent, GenerateRequest, SequenceUsage
from outrider.models.errors import RequestError
from outrider.models.http.errors import FieldError, Throttled
from outrider.models.http.keys import ApiKey, KeyRing
from outrider.models.http.limits import MAX_BUCKETS, Slots, TokenBudget
from outrider.models.picks.sampling import SamplingParams

KEY, OTHER = "a-key-with-limits-of-its-own", "another-key-without-limits"
OWNER = ApiKey.plain(KEY).digest
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {"/v1/verify": {"items": [{"prefix": PROMPT}]}}
PATHS = ("/v1/sessions", "/v1/completions", "/v1/verify")


def ring(attributes: str) -> KeyRing:
    """KEY with these attributes, and OTHER as it is."""
    return KeyRing([ApiKey.parse(key_line(KEY, f"name=limited {attributes}")), OTHER])


def admission_of(keys: KeyRing) -> tuple[Any, Clock, Admission]:
    """Admission before an engine that takes everything."""
    engine, clock = Mock(**{"submit.side_effect": count(1)}), Clock()
    return engine, clock, Admission(engine, keys, None, clock)


def wait_s(admit: Callable[..., object], *given: Any) -> float | None:
    """After how long it may be tried again; None where it is admitted."""
    try:
        admit(*given)
    except Throttled as error:
        assert error.code == "tokens_exhausted"
        return error.retry_after_s
    return None


def request_of(prompt: Sequence[int], owner: bytes = OWNER) -> GenerateRequest:
    """A request of the limited key."""
    return flat_request(tuple(prompt), SamplingParams(), 10, owner=owner)


# -- tokens per minute -----------------------------------------------------------------------------------------------


def test_a_bucket_of_tokens_fills_in_a_minute() -> None:
    """A prompt waits until it fits, debts of texts are paid first, and the advice is true to the second."""
    clock = Clock()
    budget = TokenBudget(clock)
    budget.admit(b"a", 50, 60)
    budget.take(b"a", 30, 60)  # 20 of debt
    for pause_s, owner, num_tokens, expected_s in (
        (0.0, b"a", 10, 30),
        (0.0, b"b", 60, None),
        (29.9, b"a", 10, 1),
        (0.1, b"a", 10, None),
        (60.0, b"a", 500, None),  # longer than a minute's tokens: admitted once the bucket is full
        (0.0, b"a", 1, 441),
        (600.0, b"c", 1, None),
    ):
        clock.now += pause_s
        assert wait_s(budget.admit, owner, num_tokens, 60) == expected_s
    assert len(budget) == 1  # full ones are forgotten


@given(st.lists(st.tuples(st.integers(1, 80), st.integers(0, 40)), max_size=30), st.integers(1, 60))
@settings(max_examples=200, deadline=None)
def test_nobody_gets_more_than_its_tokens(wishes: list[tuple[int, int]], per_minute: int) -> None:
    """In the long run: a bucketful, its rate, and the last prompt."""
    clock = Clock()
    budget, taken, began = TokenBudget(clock), 0, clock.now
    for num_tokens, seconds in wishes:
        clock.now += seconds
        if wait_s(budget.admit, b"a", num_tokens, per_minute) is None:
            assert taken <= per_minute + (clock.now - began) * per_minute / 60 + 1e-6
            taken += num_tokens


def test_the_owners_that_are_remembered_are_bounded() -> None:
    """Without keys anybody can be many."""
    budget = TokenBudget(Clock())
    for number in range(MAX_BUCKETS + 100):
        budget.admit(number.to_bytes(4, "big"), 1, 60)
    assert len(budget) == MAX_BUCKETS


def test_prompts_and_texts_are_charged_and_cached_tokens_are_not() -> None:
    """At admission the prompt, then each commit; at the end what was cached comes back, except a held prefix."""
    engine, clock, admission = admission_of(ring("tokens-per-minute=100"))
    events: list[Any] = []

    def is_admitted(num_tokens: int, owner: bytes = OWNER) -> bool:
        return wait_s(admission.submit, request_of(range(num_tokens), owner), events.append, Asked(clock.now)) is None

    assert is_admitted(40)
    sink = engine.submit.call_args.args[1]
    sink(CommitEvent(0, (1, 2, 3), 0, 0))
    assert not is_admitted(58) and engine.submit.call_count == 1  # 57 are left
    # 44 before the prompt were held: of 60 cached ones, 16 are the prompt's.
    sink(EndEvent("length", SequenceUsage(prompt_tokens=84, completion_tokens=3, cached_prompt_tokens=60)))
    assert [is_admitted(73), is_admitted(1), is_admitted(900, ApiKey.plain(OTHER).digest)] == [True, False, True]
    assert [type(event) for event in events] == [CommitEvent, EndEvent]


def test_a_call_of_several_texts_is_admitted_once() -> None:
    """All its prompts are taken together, or the bucket is full; further texts of a prompt go into debt."""
    _, clock, admission = admission_of(ring("tokens-per-minute=100"))
    admission.charge(OWNER, 150)
    assert wait_s(admission.charge, OWNER, 1)  # a call that comes between two texts of that one
    admission.charge(OWNER, 40, may_owe=True)
    clock.now += 60.0  # 100 less a debt of 90
    assert wait_s(admission.charge, OWNER, 11)
    admission.charge(OWNER, 10)
    admission.charge(OWNER, -10, may_owe=True)
    admission.charge(OWNER, 10)
    admission.charge(ApiKey.plain(OTHER).digest, 1_000_000)


def test_texts_of_one_prompt_fit_where_the_prompt_does() -> None:
    """A call of a prompt of 8 and four texts of one token, of 14 a minute; not another one."""
    body = {"prompt": [*PROMPT, *PROMPT], "max_tokens": 1, "n": 4}
    with (
        serve_fake(ServerSettings(ring("tokens-per-minute=14"))) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        answers = [client.post("/v1/completions", json=body, headers=bearer(KEY)) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429] and len(answers[0].json()["choices"]) == 4


def test_a_held_prefix_that_is_computed_again_is_charged() -> None:
    """One token that continues a prefix of 90 whose blocks are gone costs 91."""
    engine, clock, admission = admission_of(ring("tokens-per-minute=100"))
    admission.submit(request_of([1]), Mock(), Asked(clock.now))
    engine.submit.call_args.args[1](EndEvent("length", SequenceUsage(prompt_tokens=91, cached_prompt_tokens=0)))
    for num_tokens, fits in ((10, False), (9, True)):
        assert (wait_s(admission.submit, request_of(range(num_tokens)), Mock(), Asked(clock.now)) is None) == fits


def test_a_request_that_the_engine_refuses_costs_no_tokens() -> None:
    """What was taken for its prompt is given back."""
    engine, clock, admission = admission_of(ring("tokens-per-minute=10"))
    engine.submit.side_effect = RequestError("overloaded", "full", status=503)
    for _ in range(5):
        with pytest.raises(RequestError, match="full"):
            admission.submit(request_of(range(9)), Mock(), Asked(clock.now))


def test_a_key_over_its_tokens_gets_429_with_the_true_wait() -> None:
    """Sessions, completions and verify items alike; the server's own limit holds for keys without one."""
    with (
        serve_fake(ServerSettings(ring("tokens-per-minute=12"), tokens_per_minute=6_000_000)) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        assert run_session(client, BODY, bearer(KEY)).tokens == target_tokens(PROMPT, 6)
        for path in PATHS:
            refused = client.post(path, json=BODIES.get(path, BODY), headers=bearer(KEY))
            assert code_of(refused) == (429, "tokens_exhausted") and refused.headers["retry-after"] in ("10", "9")
        assert run_session(client, BODY, bearer(OTHER)).tokens == target_tokens(PROMPT, 6)
        server.wait_until(server.is_empty)


async def test_slots_of_an_owner_may_be_fewer_or_more() -> None:
    """An owner's own limit holds for taking, also of several, and for waiting."""
    slots = Slots(2, {b"few": 1, b"many": 3}.get)
    for owner, num_taken, too_many in ((b"many", 2, 2), (b"other", 2, 1), (b"few", 1, 1)):
        slots.take(owner, num_taken)
        with pytest.raises(RequestError, match="may be open"):
            slots.take(owner, too_many)
    waiting = asyncio.ensure_future(slots.wait(b"few"))
    await asyncio.sleep(0)
    assert not waiting.done()
    with pytest.raises(FieldError, match="asks for 2 texts; this client may have 1 open"):
        slots.take(b"few", 2)
    slots.release(b"few")
    await waiting
    assert slots.num_taken == 5


# -- priorities and deadlines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "asked", "given_"),
    [
        *((ring("priority=5"), asked, most) for asked, most in ((None, 5), (3, 3), (9, 5), (-100, -100))),
        *((KeyRing(), asked, most) for asked, most in ((None, 0), (100, 0), (-7, -7))),
    ],
)
def test_a_request_gets_no_more_than_its_keys_priority(keys: KeyRing, asked: int | None, given_: int) -> None:
    """The key's is the default and the most. Without keys a client may put itself last, and never first."""
    engine, clock, admission = admission_of(keys)
    admission.submit(request_of(PROMPT), Mock(), Asked(clock.now, priority=asked))
    assert engine.submit.call_args.args[0].asker.priority == given_


def test_the_time_before_the_engine_counts_against_a_deadline() -> None:
    """Parsing, tokenizing, waiting for a slot: the engine gets what is left, and no request that has nothing left."""
    engine, clock, admission = admission_of(KeyRing())
    admission.submit(request_of(PROMPT), Mock(), Asked(clock.now - 0.25, deadline_ms=1000.0))
    assert engine.submit.call_args.args[0].asker.deadline_ms == pytest.approx(750.0)
    with refused("deadline_exceeded", 504, "deadline_ms passed"):
        admission.submit(request_of(PROMPT), Mock(), Asked(clock.now - 1.0, deadline_ms=1000.0))
    assert engine.submit.call_count == 1


def test_a_running_text_ends_at_its_deadline_with_what_it_has() -> None:
    """A session's reason is `deadline`, a completion's `length`."""
    body = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "temperature": 0, "deadline_ms": 500.0}
    with (
        serve_fake(gate=StepGate()) as server,
        httpx.Client(base_url=server.url, timeout=60.0) as client,
        open_session(client, body) as session,
        client.stream("POST", "/v1/completions", json=body | {"stream": True}) as completion,
    ):

        def is_over() -> bool:
            server.gate.allow(1)
            return server.core.engine.stats().totals.finished == 2

        server.wait_until(is_over)
        text = session.rest()
        assert text.end.reason == "deadline"
        assert text.tokens == target_tokens(PROMPT, text.end.usage.completion_tokens) != []
        completion.read()
        assert chunks_of(completion)[-1]["choices"][0]["finish_reason"] == "length"
        server.wait_until(server.is_empty)


@pytest.mark.parametrize("path", PATHS)
def test_a_deadline_that_has_passed_is_answered_504(server: FakeServer, path: str) -> None:
    """Before anything runs."""
    num_steps = server.core.engine.stats().totals.steps
    late = httpx.post(server.url + path, json=BODIES.get(path, BODY) | {"deadline_ms": 1e-9})
    assert code_of(late) == (504, "deadline_exceeded")
    assert server.core.engine.stats().totals.steps == num_steps and server.is_empty()


@pytest.mark.parametrize("field", [{"priority": 101}, {"priority": "1"}, {"deadline_ms": 0}, {"deadline_ms": 1e9}])
@pytest.mark.parametrize("path", PATHS)
def test_values_beyond_their_range_are_refused_by_name(server: FakeServer, path: str, field: dict[str, Any]) -> None:
    """The same on every route."""
    refused = httpx.post(server.url + path, json=BODIES.get(path, BODY) | field)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(field)))
