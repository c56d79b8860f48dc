"""Tests who may use replicas and how much: what the front checks, hands on and knows of them."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from tests.fronts import changed, report_of, served
from tests.serving import ALICE, BOB, PROMPT, StepGate, bearer, code_of, key_line, open_session, run_session

from outrider.cloud.api.audit import AuditLog
from outrider.cloud.engine import EngineConfig
from outrider.cloud.engine.config import SpillConfig
from outrider.cloud.pending.policy import Policy
from outrider.cloud.recent.store import MemoryStore
from outrider.cloud.replicas.members import Members, Report
from outrider.cloud.replicas.registry import SILENCE_S, Registry, SharedBudget
from outrider.cloud.replicas.trust import Caller, ForwardedOwners, forwarded
from outrider.models.errors import RequestError
from outrider.models.http.keys import ApiKey, KeyRing
from outrider.models.http.request_context import current_request
from outrider.models.http.security import Gate, GatePaths, GateSettings

BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True}
LONG: dict[str, Any] = BODY | {"max_tokens": 4000}


def ring_of(*lines: str) -> KeyRing:
    """The keys of a file with these lines."""
    return KeyRing([ApiKey.parse(line) for line in lines])


# -- the header --------------------------------------------------------------------------------------------------------


def test_a_replicas_gate_takes_its_front_only() -> None:
    """The gate itself finds no owner without the secret, and takes limits from nobody else."""
    ring, app = ForwardedOwners("s3cret"), AsyncMock()
    key = ApiKey.parse(key_line(ALICE, "name=alice sessions=3 tokens-per-minute=70 priority=5 requests-per-second=9"))
    gate = Gate(app, GateSettings(ring), GatePaths(), is_paced=False)

    def owner(*headers: tuple[bytes, bytes]) -> Any:
        scope = {"type": "http", "path": "/v1/models", "method": "GET", "headers": headers, "client": ("10.0.0.1", 1)}
        asyncio.run(gate(scope, None, None))  # type: ignore[arg-type]
        return app.call_args.args[0]["outrider.owner"]

    own = forwarded("s3cret", Caller(key.digest, key, "203.0.113.7", "CN=a")).encode()
    forged = (b"", b"Bearer ", b"Bearer .6f", b"Bearer s3cre.6f", b"Bearer s3crets.6f", b"Bearer " + ALICE.encode())
    for headers in ([], *([(b"authorization", each)] for each in (*forged, own[:-300]))):
        with pytest.raises(RequestError, match="call the server in front"):
            owner(*headers)
    assert owner((b"authorization", own)) == key.digest
    # The front has counted requests per second.
    found: Any = ring.of_owner(key.digest)
    limits = (found.name, found.sessions, found.tokens_per_minute, found.priority, found.requests_per_second)
    assert limits == ("alice", 3, 70, 5, None)
    assert ring.sessions_of(key.digest) == 3 and ring.may_generate(key.digest)
    assert owner((b"authorization", forwarded("s3cret", Caller(b"\x00owner")).encode())) == b"\x00owner"
    # No key is needed: the server's limits.
    assert len(ring) == 1 and ring.of_owner(b"\x00owner") is None and ring.sessions_of(b"\x00owner") is None


def test_a_keys_own_limits_hold_at_a_replica() -> None:
    """Sessions, tokens per minute, priority; a client's own headers and fields change none of it."""
    keys = ring_of(key_line(ALICE, "name=alice sessions=1 tokens-per-minute=40 priority=-7"), key_line(BOB, "name=bob"))
    with served(keys) as (client, (replica,), _):
        two = BODY | {"prompt": [PROMPT, PROMPT], "max_tokens": 1}
        assert code_of(client.post("/v1/completions", json=two, headers=bearer(ALICE))) == (400, "invalid_parameter")
        assert client.post("/v1/completions", json=two, headers=bearer(BOB)).status_code == 200
        forged = {"x-outrider-priority": "100", "x-forwarded-for": "192.0.2.1"} | bearer(ALICE)
        long = BODY | {"prompt": [9] * 39, "max_tokens": 1, "priority": 100}
        assert client.post("/v1/completions", json=long, headers=forged).status_code == 200
        found = replica.server.core.settings.keys.of_owner(ApiKey.plain(ALICE).digest)
        assert found and found.priority == -7
        refused = client.post("/v1/completions", json=long, headers=forged)
        assert code_of(refused) == (429, "tokens_exhausted") and int(refused.headers["retry-after"]) > 10
        assert client.post("/v1/completions", json=long, headers=bearer(BOB)).status_code == 200


def test_a_front_checks_scopes_and_each_keys_rate() -> None:
    """Before anything reaches a replica; its own answers carry the request's id."""
    keys = ring_of(key_line(ALICE, "requests-per-second=0.001"), key_line(BOB, "scopes=metrics"))
    with served(keys) as (client, _, _):
        assert client.get("/metrics", headers=bearer(BOB)).status_code == 200
        assert code_of(client.get("/metrics", headers=bearer(ALICE))) == (403, "scope_missing")
        for path in ("/v1/verify", "/v1/sessions/000001x/drafts"):
            refused = client.post(path, json={}, headers=bearer(BOB) | {"x-request-id": "draft.1"})
            assert code_of(refused) == (403, "scope_missing")
            assert refused.headers["x-request-id"] == refused.json()["request_id"] == "draft.1"
        assert client.post("/v1/completions", json=BODY, headers=bearer(ALICE)).status_code == 200
        limited = client.post("/v1/completions", json=BODY, headers=bearer(ALICE) | {"x-request-id": "mine.1"})
        assert code_of(limited) == (429, "rate_limited") and limited.headers["x-request-id"] == "mine.1"
        assert int(limited.headers["retry-after"]) > 900


def test_a_request_keeps_its_id_and_its_trace_at_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front's answer has one id, which the replica uses too; the trace's context is passed on."""
    seen: list[tuple[str, str | None]] = []
    with served(KeyRing()) as (client, (replica,), _):
        engine = replica.server.core.engine
        submit = engine.submit

        def noting(request: Any, sink: Any) -> int:
            found = current_request()
            assert found is not None
            seen.append((found.request_id, found.trace_id))
            return submit(request, sink)

        monkeypatch.setattr(engine, "submit", noting)
        trace = "0af7651916cd43dd8448eb211c80319c"
        headers = {"x-request-id": "mine.7", "traceparent": f"00-{trace}-b7ad6b7169203331-00"}
        own, other = (client.post("/v1/completions", json=BODY, headers=each) for each in (headers, {}))
    assert own.headers.get_list("x-request-id") == ["mine.7"]
    assert seen == [("mine.7", trace), (other.headers["x-request-id"], None)]


# -- keys that go ------------------------------------------------------------------------------------------------------


def two_keys(tmp_path: Path) -> tuple[Path, KeyRing]:
    """A file with the keys of ALICE and BOB, and its ring."""
    path = tmp_path / "keys"
    path.write_text(f"{ALICE}\n{BOB}\n")
    return path, KeyRing.load(path)


def test_the_streams_of_a_removed_key_end(tmp_path: Path) -> None:
    """At all replicas, with `unauthorized`; its next request is refused, other keys notice nothing."""
    (path, keys), gate, owner = two_keys(tmp_path), StepGate(), ApiKey.plain(ALICE).digest
    with served(keys, 2, gate=gate) as (client, group, front), ExitStack() as stack:
        theirs = [stack.enter_context(open_session(client, LONG, bearer(ALICE))) for _ in range(2)]
        other = stack.enter_context(open_session(client, BODY, bearer(BOB)))
        path.write_text(f"{BOB}\n")
        front.server.revoke(keys.reload())
        front.wait_until(lambda: all(not each.server.core.settings.keys.may_generate(owner) for each in group))
        gate.open()
        errors = [each.rest().end.error for each in theirs]
        assert [error and error.code for error in errors] == ["unauthorized"] * 2
        assert other.rest().end.reason == "length"
        assert code_of(client.post("/v1/sessions", json=BODY, headers=bearer(ALICE))) == (401, "unauthorized")
        two_keys(tmp_path)
        keys.reload()
        assert run_session(client, BODY, headers=bearer(ALICE)).end.reason == "length"


def test_a_stream_of_a_removed_key_is_cut_where_its_replica_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that has not heard of it generates for nobody."""
    monkeypatch.setattr("outrider.cloud.replicas.forward._REMOVED_S", 0.0)
    (path, keys), gate = two_keys(tmp_path), StepGate()
    with served(keys, gate=gate) as (client, (replica,), front):
        monkeypatch.setattr(replica.server.core.settings.keys, "on_removed", lambda owners: None)
        with open_session(client, LONG, bearer(ALICE)) as session:
            path.write_text(f"{BOB}\n")
            front.server.revoke(keys.reload())
            with pytest.raises(httpx.RemoteProtocolError):
                list(session.events)
        gate.open()
        replica.server.wait_until(replica.server.is_empty)


# -- the audit log -----------------------------------------------------------------------------------------------------


def test_front_and_replicas_write_one_audit_log(tmp_path: Path) -> None:
    """One line per request, with key and address of the client: by the replica that worked, or by the front."""
    path, invalid = tmp_path / "audit.jsonl", BODY | {"max_tokens": -1}
    with (
        closing(AuditLog(path)) as log,
        served(ring_of(key_line(ALICE, "name=alice")), 2, audit=log) as (client, group, front),
    ):
        run_session(client, BODY, headers={"x-request-id": "work.1"} | bearer(ALICE))
        for place, body, headers, status in (
            ("/v1/completions", invalid, bearer(ALICE), 400),
            ("/v1/completions", BODY, {}, 401),
            ("/v1/sessions/000001x/drafts", {}, {}, 401),
        ):
            assert client.post(place, json=body, headers=headers).status_code == status
        assert client.get("/v1/models", headers=bearer(ALICE)).status_code == 200
        for each in group:
            each.server.wait_until(each.server.is_empty)
        front.publish([])
        front.wait_until(lambda: client.get("/health/ready").status_code == 503)
        assert client.post("/v1/completions", json=BODY, headers=bearer(ALICE)).status_code == 503
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    expected: tuple[dict[str, Any], ...] = (
        {"key": "alice", "network": "127.0.0.1", "request_id": "work.1", "prompt_tokens": 4, "generated_tokens": 12}
        | {"end": "length"},
        {"key": "alice", "status": 400},
        {"key": None, "end": "unauthorized", "network": "127.0.0.1"},
        {"key": "alice", "end": "no_replica"},
        {"endpoint": "/v1/sessions/{session_id}/drafts", "refused_requests": 1},
    )
    assert [line.items() >= each.items() for line, each in zip(lines, expected, strict=True)] == [True] * 5
    assert ALICE not in path.read_text()


# -- what replicas share -----------------------------------------------------------------------------------------------


async def test_tokens_per_minute_hold_for_all_replicas_together() -> None:
    """Through the registry: each hears what the others have charged or given back."""
    registry, first, second = Registry(), SharedBudget(), SharedBudget()
    reports = [report_of(tag) for tag in ("000001", "000002")]

    async def exchange() -> None:
        for budget, report in zip((first, second) * 2, reports * 2, strict=True):
            budget.apply(await registry.report(report, budget.collect()))

    await exchange()
    first.admit(b"o", 90, 100)
    second.admit(b"o", 5, 100)
    first.take(b"o", -10, 100)
    await exchange()
    for budget in (first, second):
        with pytest.raises(RequestError, match="100 tokens per minute"):
            budget.admit(b"o", 50, 100)
        budget.admit(b"other", 100, 100)
    assert not first.collect().keys() - {b"other"}  # what it heard is no charge of its own
    await registry.leave("000001")
    second.admit(b"third", 1, 100)
    await registry.report(reports[1], second.collect())
    assert not registry._owed


def test_a_repeated_prompt_is_drafted_from_its_earlier_text_unless_no_store() -> None:
    """`Cache-Control` reaches the replica. Its policy verifies all that is pending, whatever the time."""
    with (
        closing(MemoryStore()) as store,
        served(KeyRing(), recent=store, config=EngineConfig(policy=Policy.VERIFY)) as (client, _, _),
    ):

        def looked_up(**headers: str) -> int:
            return run_session(client, BODY, headers=headers).end.usage.looked_up_tokens

        looked_up(**{"cache-control": "no-store"})
        assert looked_up() == 0 and looked_up() > 5 and looked_up(**{"cache-control": "no-store"}) == 0


def test_a_prefix_on_disk_is_found_by_another_replica(tmp_path: Path) -> None:
    """The replica that kept it has gone."""
    config = EngineConfig(spill=SpillConfig(tmp_path / "spill", "t", always=True))
    body = BODY | {"prompt": PROMPT * 9}
    with served(config=config, count=2) as (client, group, front):
        turn = run_session(client, body | {"keep_prefix": True})
        keeper, left = sorted(group, key=lambda each: -each.server.core.engine.stats().totals.committed)
        keeper.server.wait_until(lambda: keeper.server.core.engine.stats().totals.spilled == 1)
        front.publish([left.report])
        front.wait_until(lambda: len(front.front.members) == 1)
        again = run_session(client, body | {"prompt": [7, 8], "prefix_hash": turn.end.prefix_hash})
        assert again.end.usage.cached_prompt_tokens > 30
        assert left.server.core.engine.stats().totals.restored == 1


# -- which replicas a front knows --------------------------------------------------------------------------------------


def test_the_least_loaded_replica_of_the_right_target_is_chosen() -> None:
    """Held prefixes first, then the target, then the load; an owner's choice is stable."""
    members, idle = Members(), Members()
    reports = [report_of(f"{index:06x}", target="old" if index < 2 else "new", running=index) for index in range(4)]
    members.update(reports)
    zero, one, two, three = sorted(members, key=lambda member: member.report.tag)
    members.hold(b"o", "h", three)
    choices: tuple[dict[str, Any], ...] = (
        {},
        {"target": "new"},
        {"target": "none"},
        {"held": "h", "target": "old"},
        {"held": "h", "tried": [three]},
    )
    assert [members.choose(b"o", **choice) for choice in choices] == [zero, two, zero, three, zero]
    zero.is_suspect = True
    assert members.choose(b"o") is one
    members.update([replace(reports[0], number=2), *reports[1:]])
    assert members.choose(b"o") is zero
    idle.update([changed(each, running=0) for each in reports])
    owners = [bytes([n]) for n in range(40)]
    chosen = [idle.choose(owner) for owner in owners]
    assert [idle.choose(owner) for owner in owners] == chosen and len(set(map(id, chosen))) > 1
    assert Members().choose(b"o") is None and Members().ready(is_draining=False) is None


def test_the_log_names_the_file_of_each_replicas_log(caplog: pytest.LogCaptureFixture) -> None:
    """Once, when it comes; replicas' own lines are not in the front's log."""
    caplog.set_level(logging.INFO, "outrider.replicas")
    known = Members()
    for number in (1, 2):
        known.update([report_of("00fa4e", number=number, pid=4321)])
    known.update([])
    assert [record.getMessage() for record in caplog.records] == [
        "replica 00fa4e has come; its log is in worker-*-4321.err",
        "replica 00fa4e has gone",
    ]


async def test_the_registry_forgets_the_silent_and_learns_after_a_restart() -> None:
    """What has not reported for SILENCE_S is gone; a new registry names nobody until all had the time to report."""
    now = [0.0]
    registry = Registry(clock=lambda: now[0])
    first = report_of("000001")
    await registry.report(first)
    state, reports = await registry.changes(None)
    assert reports == [first]
    waiting = asyncio.create_task(registry.changes(state))
    await asyncio.sleep(0)
    await registry.report(changed(first, status="draining"))
    state, reports = await waiting
    assert reports is not None and not reports[0].takes_work
    await registry.leave("000001")
    assert (await registry.changes(state))[1] == []
    await registry.report(first)
    now[0] = SILENCE_S + 0.1
    assert (await registry.changes(None))[1] == []
    anew = Registry(clock=lambda: now[0])
    assert await anew.changes(state) == (state, None)
    await anew.report(first)
    now[0] += 5.0
    assert (await anew.changes(state))[1] == [first]


async def test_a_registry_that_stood_still_takes_no_replica_for_lost() -> None:
    """Until all had the time to report again. Where none does, all are lost; and where all fall silent at once, too."""
    now = [0.0]
    registry = Registry(clock=lambda: now[0])
    first = report_of("000001")
    await registry.report(first)
    state, _ = await registry.changes(None)

    async def known_after(seconds: float, *, is_alive: bool) -> list[Report] | None:
        nonlocal state
        now[0] += seconds
        newest = await registry.changes((state[0], -1))  # before the report that waits
        state = newest[0]
        if is_alive:
            await registry.report(first)
        return newest[1]

    for _ in range(2):
        assert await known_after(SILENCE_S + 1.0, is_alive=True) is None
        assert [await known_after(1.0, is_alive=True) for _ in range(4)] == [None, None, [first], [first]]
    silent = [await known_after(1.0, is_alive=False) for _ in range(12)]
    assert silent[:9] == [[first]] * 9 and silent[11] == []
    await registry.report(first)
    assert await known_after(SILENCE_S + 1.0, is_alive=False) is None
    assert [await known_after(1.0, is_alive=False) for _ in range(4)] == [None, None, [], []]
