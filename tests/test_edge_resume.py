"""Tests cut, refused and unreachable sessions: where a text ends, and how long an endpoint is tried.

The server is a script behind httpx's transport interface, so a cut comes exactly where the test needs it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tests.agents import MODES, Clock, generate, scripted_client

from outrider.edge.cli.summary import summary_lines
from outrider.edge.drafting.depth import CostModelDepth, FixedDepth
from outrider.edge.drafting.drafter import NgramDrafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.drafting.scheduler import DraftScheduler
from outrider.edge.link.endpoints import Endpoints, RetryPolicy
from outrider.edge.modes.stop_and_wait import StopAndWaitAgent
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationRequest, GenerationResult, Mode
from outrider.models.errors import CloudError, RequestError
from outrider.models.wire.protocol import (
    MAX_DRAFT_LAG_MS,
    Commit,
    ErrorAnswer,
    ErrorBody,
    SessionEnd,
    SessionOpen,
    SessionRequest,
    Usage,
)
from outrider.models.wire.verify import VerifyAnswer, VerifyResult

EOS = 9
PROMPT = (1, 2, 3)
ONE = GenerationRequest(PROMPT, max_tokens=1)
Answer = Callable[[httpx.Request], httpx.Response]


async def cut_after(data: bytes, is_cut: bool = True) -> AsyncIterator[bytes]:
    """Yields the bytes, then either ends or loses the connection."""
    yield data
    if is_cut:
        raise httpx.ReadError("connection reset")


def session(*events: SessionOpen | Commit | SessionEnd) -> Answer:
    """Answers with these events; without a SessionEnd the connection breaks after the last."""
    data = b"".join(b"data: " + event.model_dump_json().encode() + b"\n\n" for event in events)
    is_cut = not isinstance(events[-1], SessionEnd)
    return lambda _: httpx.Response(200, content=cut_after(data, is_cut))


def opened(stop_ids: tuple[int, ...] = (EOS,), max_positions: int | None = None) -> SessionOpen:
    """The first event of a session that ends after these ids, or at so many positions."""
    return SessionOpen(session="s", model="scripted", stop_ids=list(stop_ids), max_positions=max_positions)


def ended(reason: Any = "length") -> SessionEnd:
    """The last event of a session."""
    return SessionEnd(
        reason=reason,
        usage=Usage(
            prompt_tokens=1,
            completion_tokens=1,
            target_passes=1,
            accepted_prediction_tokens=0,
            rejected_prediction_tokens=0,
        ),
    )


def writing(token: int) -> Answer:
    """Answers a session, which is then cut, or a call of /v1/verify, with one token."""
    verified = VerifyAnswer(results=[VerifyResult(tokens=[token], accepted=0)]).model_dump_json()
    cut = session(opened(), Commit(base=0, tokens=[token]))
    return lambda request: httpx.Response(200, text=verified) if "verify" in request.url.path else cut(request)


BEGUN = writing(5)


def refusing_with(status: int, code: str) -> Answer:
    """Answers with this error."""
    error = ErrorAnswer(error=ErrorBody(code=code, message="no")).model_dump_json()
    return lambda _: httpx.Response(status, text=error)


def unreachable(_: httpx.Request) -> httpx.Response:
    """No server listens."""
    raise httpx.ConnectError("connection refused")


class Script:
    """Answers one session after the other from a script; `requests` keeps the requests."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self.requests: list[SessionRequest] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(SessionRequest.model_validate(json.loads(request.content)))
        return self._answers.pop(0)(request)


async def stream(
    handler: Answer, request: GenerationRequest, clock: Clock | None = None, retry: RetryPolicy | None = None
) -> GenerationResult:
    """One text, cloud-only, from a scripted server."""
    clock = clock or Clock()
    return await generate([scripted_client(handler)], request, retry=retry, sleep=clock.sleep, clock=clock)


def test_a_round_trip_of_a_night_is_announced_as_the_longest_that_a_server_takes() -> None:
    """A laptop that sleeps while a message is on its way measures hours; the next text must open all the same."""
    estimates = Estimates()
    estimates.on_posted(8 * 3600e3)
    assert SessionRequest(prompt=[1], max_tokens=1, draft_lag_ms=estimates.lag_ms).draft_lag_ms == MAX_DRAFT_LAG_MS


async def test_newer_times_of_a_step_decide_at_once() -> None:
    """A draft that seems dear when the session opens is used from the commit on that says that it is not."""
    dear = SessionOpen(session="s", model="scripted", stop_ids=[EOS], step_ms=30.0, draft_token_ms=26.6)
    commits = [Commit(base=0, tokens=[7]), Commit(base=1, tokens=[8], step_ms=30.0, draft_token_ms=0.5)]
    script = Script(session(dear, *commits, Commit(base=2, tokens=[9]), ended()))
    estimates, decided, request = Estimates(), list[bool](), GenerationRequest(PROMPT, max_tokens=3)
    controller = CostModelDepth(estimates)
    on_tokens = lambda batch: decided.append(controller.is_on)  # noqa: E731
    await generate([scripted_client(script)], request, depth=controller, estimates=estimates, on_tokens=on_tokens)
    assert decided == [False, True, True] and (estimates.step_ms, estimates.extra_ms) == (30.0, 0.5)


@pytest.mark.parametrize(
    ("first", "fields", "tokens", "reason"),
    [
        pytest.param({}, {"max_tokens": 3}, [5, EOS], "stop", id="the end token that the server named"),
        pytest.param({}, {"max_tokens": 3, "stop_ids": frozenset({EOS})}, [5, EOS], "stop", id="and the agent"),
        pytest.param({}, {"max_tokens": 2}, [5, 6], "length", id="its length: none for zero tokens"),
        pytest.param({"max_positions": 5}, {"max_tokens": 10}, [5, 6], "context", id="the context limit"),
    ],
)
async def test_a_text_that_is_cut_at_its_end_is_over(
    first: dict[str, Any], fields: dict[str, Any], tokens: list[int], reason: str
) -> None:
    """No other session is opened: the server would refuse it, or go on with another text."""
    script = Script(session(opened(**first), Commit(base=0, tokens=tokens)))
    result = await stream(script, GenerationRequest(PROMPT, **fields))
    assert (list(result.tokens), result.finish_reason) == (tokens, reason)
    assert result.num_sessions == len(script.requests) == 1


async def test_a_text_that_goes_past_the_end_token_is_resumed_after_it() -> None:
    """ignore_eos leaves out the target's own ends, and no stop id that the request names, as on the server."""
    script = Script(
        session(opened(stop_ids=()), Commit(base=0, tokens=[5, EOS])),
        session(opened(stop_ids=()), Commit(base=0, tokens=[6]), ended()),
    )
    request = GenerationRequest(PROMPT, max_tokens=3, ignore_eos=True)
    for named in (set[int](), {7}, {EOS}):
        added = GenerationRequest(PROMPT, stop_ids=frozenset(named), end_ids=frozenset({EOS}))
        assert added.plan.stop_ids == {*named, EOS} and replace(added, ignore_eos=True).plan.stop_ids == named
    result = await stream(script, request)
    assert (result.tokens, result.finish_reason) == ((5, EOS, 6), "length")
    assert script.requests[1].prompt == [*PROMPT, 5, EOS] and script.requests[1].ignore_eos


async def test_a_refusal_that_is_cut_is_a_lost_endpoint() -> None:
    """Its status is unreliable then, so the session is tried again."""
    script = Script(
        lambda _: httpx.Response(500, content=cut_after(b'{"error":')),
        session(opened(), Commit(base=0, tokens=[5]), ended()),
    )
    assert (await stream(script, ONE)).tokens == (5,) and len(script.requests) == 2


async def test_a_restart_of_several_seconds_in_mid_text_is_survived() -> None:
    """Refused connections cost only the pauses, which grow to two seconds."""
    clock, script = Clock(), Script(BEGUN, session(opened(), Commit(base=0, tokens=[6]), ended()))

    def restart(request: httpx.Request) -> httpx.Response:
        return unreachable(request) if 0.0 < clock.now < 12.0 else script(request)

    result = await stream(restart, GenerationRequest(PROMPT, max_tokens=2), clock)
    assert result.tokens == (5, 6) and len(script.requests) == 2
    assert clock.pauses == sorted(clock.pauses) and clock.pauses[:3] == [0.05, 0.1, 0.2] and max(clock.pauses) == 2.0


@pytest.mark.parametrize(
    ("begun", "retry", "message", "least_s", "most_s"),
    [
        pytest.param([BEGUN], None, r"Gave up after \d+ attempts in 2\d\.\d s: .*refused", 20.0, 22.0, id="it is gone"),
        pytest.param([], None, "after 6 attempts", 0.0, 2.0, id="a wrong address is reported at once"),
        pytest.param(
            [BEGUN], RetryPolicy(max_failures=2000), "after 2000 attempts", 3000.0, 4000.0, id="a long outage"
        ),
    ],
)
async def test_an_endpoint_that_stays_away_is_given_up(
    begun: list[Answer], retry: RetryPolicy | None, message: str, least_s: float, most_s: float
) -> None:
    """The error says how long it was tried. Pauses stay bounded, however many there are."""
    clock, script = Clock(), Script(*begun, *[unreachable] * 3000)
    with pytest.raises(CloudError, match=f"No verifier answers .*{message}"):
        await stream(script, GenerationRequest(PROMPT, max_tokens=2), clock, retry)
    assert least_s <= clock.now <= most_s and max(clock.pauses) == (2.0 if begun else clock.pauses[-1])


@pytest.mark.parametrize("mode", MODES)
async def test_a_text_ends_at_its_deadline_with_what_it_has(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request has what is left of it. A text that has not begun is refused, and is asked for no more."""
    clock, asked = Clock(), list[dict[str, Any]]()
    monkeypatch.setattr("outrider.edge.results.time", SimpleNamespace(monotonic=clock))

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        clock.now += 40.0
        return (refusing_with(504, "deadline_exceeded") if is_late else BEGUN)(request)

    is_late, request = False, GenerationRequest(PROMPT, max_tokens=9, priority=-7, due_s=100.0)
    result = await generate([scripted_client(answer)], request, mode=mode)
    is_late = True
    assert (result.tokens, result.finish_reason) == ((5, 5, 5), "deadline")
    assert [(each["priority"], each["deadline_ms"]) for each in asked] == [(-7, 100e3), (-7, 60e3), (-7, 20e3)]
    for due_s in (200.0, 100.0):  # the server's refusal, and the device's own
        with pytest.raises(RequestError) as refused:
            await generate([scripted_client(answer)], replace(request, due_s=due_s), mode=mode)
        assert (refused.value.code, refused.value.status) == ("deadline_exceeded", 504)
    assert len(asked) == 4


def refusing(num_refused: int) -> Answer:
    """A server that refuses so many connections, then serves a text of one token."""
    return Script(*[unreachable] * num_refused, session(opened(), Commit(base=0, tokens=[5]), ended()))


@pytest.mark.parametrize(
    ("url", "num_refused", "least_s", "most_s"),
    [
        ("http://127.0.0.1:8000", 10, 10.0, 15.0),
        ("http://localhost:8000", 10, 10.0, 15.0),
        ("http://[::1]:8000", 10, 10.0, 15.0),
        ("http://127.0.0.1:8000", 100, 15.0, 17.0),
        ("http://192.0.2.1:8000", 100, 1.0, 2.0),
    ],
)
async def test_a_server_on_this_machine_that_is_still_loading_is_waited_for(
    url: str, num_refused: int, least_s: float, most_s: float
) -> None:
    """For fifteen seconds, and announced once; one elsewhere is given up as before."""
    clock, troubles = Clock(), list[str]()
    client = scripted_client(refusing(num_refused), url)
    text = generate([client], ONE, sleep=clock.sleep, clock=clock, on_trouble=troubles.append)
    if num_refused == 10:
        assert (await text).tokens == (5,)
    else:
        with pytest.raises(CloudError, match=r"No verifier answers .* Gave up after"):
            await text
    (trouble,) = troubles
    assert least_s <= clock.now < most_s and trouble.startswith(f"No verifier answers at {url}. ")
    assert "192" in url or trouble.endswith("Is `outrider-cloud serve` running there? Trying again.")


async def test_an_address_on_this_machine_that_answers_with_an_error_is_given_up_soon() -> None:
    """What answers there has loaded."""
    clock, troubles = Clock(), list[str]()
    client = scripted_client(lambda _: httpx.Response(503), "http://127.0.0.1:8000")
    with pytest.raises(CloudError, match="no cloud endpoint is left after 6 attempts"):
        await generate([client], ONE, sleep=clock.sleep, clock=clock, on_trouble=troubles.append)
    assert clock.now < 2.0 and "HTTP 503" in troubles[0] and "running there" not in "".join(troubles)


async def test_a_fallback_that_answers_at_once_is_no_lost_connection() -> None:
    """Only what failed and what comes next is named, and nothing was lost that had not been open."""
    clock, troubles = Clock(), list[str]()

    async def from_two(request: GenerationRequest, *handlers: Answer) -> GenerationResult:
        clients = [scripted_client(each, f"http://verifier{index}") for index, each in enumerate(handlers, 1)]
        return await generate(clients, request, sleep=clock.sleep, clock=clock, on_trouble=troubles.append)

    result = await from_two(ONE, unreachable, refusing(0))
    assert (result.tokens, result.num_sessions, clock.pauses) == ((5,), 1, [])
    assert not any("lost" in line for line in summary_lines(result))
    assert (await from_two(ONE, unreachable, refusing(1))).num_sessions == 1
    assert troubles == [
        "No verifier answers at http://verifier1. Trying http://verifier2.",
        "No verifier answers at http://verifier1. Trying http://verifier2.",
        "No verifier answers at http://verifier1 or http://verifier2. Is `outrider-cloud serve` running at one of "
        "them? Trying again.",
    ]
    rest, request = session(opened(), Commit(base=0, tokens=[6]), ended()), GenerationRequest(PROMPT, max_tokens=2)
    result = await from_two(request, Script(BEGUN, unreachable), Script(unreachable, rest))
    assert (result.tokens, result.num_sessions) == ((5, 6), 2)
    assert "the connection was lost and resumed 1 time" in summary_lines(result)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("status", [401, 403])
async def test_a_key_that_one_endpoint_refuses_is_tried_at_the_next(mode: Mode, status: int) -> None:
    """At the beginning and in the middle of a text. Only where none takes it the refusal is the text's."""
    troubles, asked, refused = list[str](), list[str](), refusing_with(status, "unauthorized")

    async def text(one: list[Answer], two: list[Answer], num_tokens: int = 2) -> GenerationResult:
        def next_answer(request: httpx.Request) -> httpx.Response:
            asked.append(request.url.host)
            return (one if request.url.host == "one" else two).pop(0)(request)

        clients = [scripted_client(next_answer, url) for url in ("http://one", "http://two")]
        request = GenerationRequest(PROMPT, max_tokens=num_tokens)
        return await generate(clients, request, mode=mode, on_trouble=troubles.append)

    assert (await text([refused], [writing(6)], 1)).tokens == (6,) and asked == ["one", "two"]
    assert "http://one" in troubles[0] and troubles[0].endswith(". Trying http://two.") and ".." not in troubles[0]
    assert (await text([writing(5), refused], [unreachable, writing(6)])).tokens == (5, 6)
    for before in list[Answer](), [writing(5)]:
        with pytest.raises(RequestError) as error:
            await text([*before, refused], [refused])
        assert (error.value.code, error.value.status) == ("unauthorized", status)


@pytest.mark.parametrize("mode", MODES)
async def test_another_endpoint_has_round_trips_of_its_own(mode: Mode) -> None:
    """After 24 posts over 5 ms, a session 150 ms away is neither announced nor planned with 5; the way back is."""
    estimates, clock = Estimates(), Clock()
    for _ in range(24):
        estimates.on_posted(5.0)
    depth_near = CostModelDepth(estimates).plan().depth

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "near":
            return unreachable(request)
        clock.now += 0.15
        assert json.loads(request.content).get("draft_lag_ms") is None
        return writing(5)(request)

    near, far = (scripted_client(answer, url) for url in ("http://near", "http://far"))
    async with near, far:
        endpoints, depth = Endpoints([near, far], None, clock.sleep, clock), FixedDepth(0)
        agent = (
            StreamAgent(endpoints, NgramDrafter(), depth, estimates, scheduler=DraftScheduler(clock))
            if mode is Mode.STREAM
            else StopAndWaitAgent(endpoints, NgramDrafter(), depth, estimates, clock)
        )
        assert (await agent.generate(ONE)).tokens == (5,)
    assert estimates.round_trip_ms == pytest.approx(150.0 if mode is Mode.STREAM else 110.0)  # less a step of 40 ms
    assert CostModelDepth(estimates).plan().depth > depth_near
    estimates.use(near.url)
    assert estimates.round_trip_ms == 5.0
