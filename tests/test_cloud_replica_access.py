"""Tests who may use replicas and how much: what the front checks, what it hands on, what replicas share."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tests.certificates import OPENSSL, make_own, make_signed
from tests.drafts import make_draft
from tests.fake_runtime import FakeBatchRuntime
from tests.fronts import FakeReplica, RunningFront, replicas, report_of, serve_front
from tests.serving import EOS_ID, StepGate, bearer, code_of, fake_tokenizer, read_events, run_session
from tests.waiting import TIMEOUT_S

from outrider.cloud.api.audit import AuditLog
from outrider.cloud.api.state import ServedModel, ServerSettings
from outrider.cloud.engine import EngineConfig
from outrider.cloud.engine.config import SpillConfig, SpillType
from outrider.cloud.engine.thread import EngineThread
from outrider.cloud.pending.policy import Policy
from outrider.cloud.recent.store import MemoryStore
from outrider.cloud.replicas.cluster import Scale
from outrider.cloud.replicas.members import Report
from outrider.cloud.replicas.registry import Registry, SharedBudget
from outrider.cloud.replicas.trust import Caller, ForwardedOwners, forwarded
from outrider.cloud.server import replicated
from outrider.cloud.server.access import Access
from outrider.cloud.server.options import EngineName, Exactness, OwnSource, ServeOptions
from outrider.cloud.server.replicated import FRONT_OPTIONS, OpenReplica, front_server
from outrider.cloud.server.serve import audit_log_of
from outrider.models.errors import ConfigError, RequestError
from outrider.models.http.keys import KEYS_VARIABLE, ApiKey, KeyRing
from outrider.models.http.security import Gate, GatePaths, GateSettings
from outrider.models.ingress.sockets import open_socket, url_of
from outrider.models.process import watched_files
from outrider.models.wire.protocol import SessionEnd

ALICE, BOB, ROOT = "alice-has-a-long-key", "bob-has-another-long-key", "root-reads-the-metrics"
PROMPT = [5, 17, 99, 3]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True}
LONG: dict[str, Any] = BODY | {"max_tokens": 4000}


def line_of(key: str, attributes: str = "") -> str:
    """A key file's line."""
    return f"sha256:{ApiKey.plain(key).digest.hex()} {attributes}"


def ring_of(*lines: str) -> KeyRing:
    """The keys of a file with these lines."""
    return KeyRing([ApiKey.parse(line) for line in lines])


@contextmanager
def served(
    keys: KeyRing, count: int = 1, *, gate: StepGate | None = None, audit: AuditLog | None = None, **given: Any
) -> Iterator[tuple[httpx.Client, list[FakeReplica], RunningFront]]:
    """Replicas behind a front with these keys."""
    settings = given.pop("settings", ServerSettings())
    with (
        replicas(count, gate=gate, settings=replace(settings, audit=audit), **given) as group,
        serve_front(group, ServerSettings(keys, audit=audit)) as front,
        httpx.Client(base_url=front.url, timeout=TIMEOUT_S) as client,
    ):
        try:
            yield client, group, front
        finally:
            if gate is not None:
                gate.open()


# -- the header --------------------------------------------------------------------------------------------------------


def test_a_replicas_gate_takes_its_front_only() -> None:
    """The gate itself finds no owner without the secret, and takes limits from nobody else."""
    ring = ForwardedOwners("s3cret")
    key = ApiKey.parse(line_of(ALICE, "name=alice sessions=3 tokens-per-minute=70 priority=5 requests-per-second=9"))
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    gate = Gate(app, GateSettings(ring), GatePaths(), is_paced=False)

    def call(*headers: tuple[bytes, bytes]) -> None:
        scope = {"type": "http", "path": "/v1/models", "method": "GET", "headers": headers, "client": ("10.0.0.1", 1)}
        asyncio.run(gate(scope, None, None))  # type: ignore[arg-type]

    own = forwarded("s3cret", Caller(key.digest, key, "203.0.113.7", "CN=a")).encode()
    for headers in ([], [(b"authorization", b"Bearer " + ALICE.encode())], [(b"authorization", own[:-300])]):
        with pytest.raises(RequestError, match="call the server in front"):
            call(*headers)
    call((b"authorization", own))
    assert seen[0]["outrider.owner"] == key.digest
    found = ring.of_owner(key.digest)
    assert found is not None and (found.name, found.sessions, found.tokens_per_minute, found.priority) == (
        "alice",
        3,
        70,
        5,
    )
    assert found.requests_per_second is None  # the front has counted it
    assert ring.sessions_of(key.digest) == 3 and ring.may_generate(key.digest)
    call((b"authorization", forwarded("s3cret", Caller(b"10.0.0.0")).encode()))
    assert ring.of_owner(b"10.0.0.0") is None  # no key is needed: the server's limits


def test_a_keys_own_limits_hold_at_a_replica() -> None:
    """Sessions, tokens per minute, priority; a client's own headers and fields change none of it."""
    keys = ring_of(line_of(ALICE, "name=alice sessions=1 tokens-per-minute=40 priority=-7"), line_of(BOB, "name=bob"))
    with served(keys) as (client, (replica,), _):
        two = BODY | {"prompt": [PROMPT, PROMPT], "max_tokens": 1}
        assert code_of(client.post("/v1/completions", json=two, headers=bearer(ALICE))) == (429, "too_many_sessions")
        assert client.post("/v1/completions", json=two, headers=bearer(BOB)).status_code == 200
        forged = {"x-outrider-priority": "100", "x-forwarded-for": "192.0.2.1"} | bearer(ALICE)
        long = BODY | {"prompt": [9] * 39, "max_tokens": 1, "priority": 100}
        assert client.post("/v1/completions", json=long, headers=forged).status_code == 200
        found = replica.server.core.settings.keys.of_owner(ApiKey.plain(ALICE).digest)
        assert found is not None and found.priority == -7
        refused = client.post("/v1/completions", json=long, headers=forged)
        assert code_of(refused) == (429, "tokens_exhausted") and int(refused.headers["retry-after"]) > 10
        assert client.post("/v1/completions", json=long, headers=bearer(BOB)).status_code == 200


def test_a_front_checks_scopes_and_each_keys_rate() -> None:
    """Before anything reaches a replica; its own answers carry the request's id."""
    keys = ring_of(line_of(ALICE, "requests-per-second=0.001"), line_of(ROOT, "scopes=metrics"))
    with served(keys) as (client, _, _):
        assert client.get("/metrics", headers=bearer(ROOT)).status_code == 200
        assert code_of(client.get("/metrics", headers=bearer(ALICE))) == (403, "scope_missing")
        assert code_of(client.post("/v1/verify", json={}, headers=bearer(ROOT))) == (403, "scope_missing")
        drafts = "/v1/sessions/000001x/drafts"
        refused = client.post(drafts, json={}, headers=bearer(ROOT) | {"x-request-id": "draft.1"})
        assert code_of(refused) == (403, "scope_missing") and refused.headers["x-request-id"] == "draft.1"
        assert refused.json()["request_id"] == "draft.1"
        assert client.post("/v1/completions", json=BODY, headers=bearer(ALICE)).status_code == 200
        limited = client.post("/v1/completions", json=BODY, headers=bearer(ALICE) | {"x-request-id": "mine.1"})
        assert code_of(limited) == (429, "rate_limited") and limited.headers["x-request-id"] == "mine.1"
        assert int(limited.headers["retry-after"]) > 900


def test_a_request_keeps_its_id_and_its_trace_at_the_replica() -> None:
    """The front's answer has one id, which the replica uses too; the trace's context is passed on."""
    seen: list[tuple[str, str | None]] = []
    with served(KeyRing()) as (client, (replica,), _):
        core = replica.server.core
        submit = core.engine.submit

        def noting(request: Any, sink: Any) -> int:
            from outrider.models.http.request_context import current_request

            found = current_request()
            assert found is not None
            seen.append((found.request_id, found.trace_id))
            return submit(request, sink)

        core.engine.submit = noting  # type: ignore[method-assign]
        trace = "0af7651916cd43dd8448eb211c80319c"
        headers = {"x-request-id": "mine.7", "traceparent": f"00-{trace}-b7ad6b7169203331-00"}
        answer = client.post("/v1/completions", json=BODY, headers=headers)
        assert answer.headers.get_list("x-request-id") == ["mine.7"]
        other = client.post("/v1/completions", json=BODY)
    assert seen == [("mine.7", trace), (other.headers["x-request-id"], None)]


# -- keys that go ------------------------------------------------------------------------------------------------------


def test_the_streams_of_a_removed_key_end(tmp_path: Path) -> None:
    """At all replicas, with `unauthorized`; its next request is refused, other keys notice nothing."""
    path, gate = tmp_path / "keys", StepGate()
    path.write_text(f"{ALICE}\n{BOB}\n")
    keys = KeyRing.load(path)
    with served(keys, 2, gate=gate) as (client, group, front), ExitStack() as stack:

        def stream(key: str, body: dict[str, Any]) -> Any:
            return read_events(
                stack.enter_context(client.stream("POST", "/v1/sessions", json=body, headers=bearer(key)))
            )

        theirs, other = [stream(ALICE, LONG) for _ in range(2)], stream(BOB, BODY)
        for each in (*theirs, other):
            next(each)
        path.write_text(f"{BOB}\n")
        front.server.revoke(keys.reload())
        owner = ApiKey.plain(ALICE).digest
        front.wait_until(lambda: all(not each.server.core.settings.keys.may_generate(owner) for each in group))
        gate.open()
        for each in theirs:
            *_, end = each
            assert isinstance(end, SessionEnd) and end.error is not None and end.error.code == "unauthorized"
        *_, end = other
        assert isinstance(end, SessionEnd) and end.reason == "length"
        assert code_of(client.post("/v1/sessions", json=BODY, headers=bearer(ALICE))) == (401, "unauthorized")
        path.write_text(f"{ALICE}\n{BOB}\n")
        keys.reload()
        assert run_session(client, BODY, headers=bearer(ALICE)).end.reason == "length"


def test_a_stream_of_a_removed_key_is_cut_where_its_replica_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that has not heard of it generates for nobody."""
    monkeypatch.setattr("outrider.cloud.replicas.forward._REMOVED_S", 0.0)
    path, gate = tmp_path / "keys", StepGate()
    path.write_text(f"{ALICE}\n{BOB}\n")
    keys = KeyRing.load(path)
    with served(keys, gate=gate) as (client, (replica,), front):
        ring = replica.server.core.settings.keys
        assert isinstance(ring, ForwardedOwners)
        ring.on_removed = lambda owners: None
        with client.stream("POST", "/v1/sessions", json=LONG, headers=bearer(ALICE)) as stream:
            events = read_events(stream)
            next(events)
            path.write_text(f"{BOB}\n")
            front.server.revoke(keys.reload())
            with pytest.raises(httpx.RemoteProtocolError):
                list(events)
        gate.open()
        replica.server.wait_until(replica.server.is_empty)


# -- the audit log -----------------------------------------------------------------------------------------------------


def test_front_and_replicas_write_one_audit_log(tmp_path: Path) -> None:
    """One line per request, with key and address of the client: by the replica that worked, or by the front."""
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    keys = ring_of(line_of(ALICE, "name=alice"))
    with served(keys, 2, audit=log) as (client, group, front):
        ids = {"x-request-id": "work.1"} | bearer(ALICE)
        run_session(client, BODY, headers=ids)
        assert client.post("/v1/completions", json=BODY | {"max_tokens": -1}, headers=bearer(ALICE)).status_code == 400
        assert client.post("/v1/completions", json=BODY).status_code == 401
        assert client.post("/v1/sessions/000001x/drafts", json={}).status_code == 401
        assert client.get("/v1/models", headers=bearer(ALICE)).status_code == 200
        for each in group:
            each.server.wait_until(each.server.is_empty)
        front.publish([])
        front.wait_until(lambda: client.get("/health/ready").status_code == 503)
        assert client.post("/v1/completions", json=BODY, headers=bearer(ALICE)).status_code == 503
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    work, invalid, refused, nowhere, counted = lines
    assert (work["key"], work["network"], work["request_id"]) == ("alice", "127.0.0.1", "work.1")
    assert (work["prompt_tokens"], work["generated_tokens"], work["end"]) == (4, 12, "length")
    assert (invalid["key"], invalid["status"]) == ("alice", 400)
    assert (refused["key"], refused["end"], refused["network"]) == (None, "unauthorized", "127.0.0.1")
    assert (nowhere["key"], nowhere["end"]) == ("alice", "no_replica")
    assert (counted["endpoint"], counted["refused_requests"]) == ("/v1/sessions/{session_id}/drafts", 1)
    assert ALICE not in path.read_text()


# -- what replicas share -----------------------------------------------------------------------------------------------


def test_tokens_per_minute_hold_for_all_replicas_together() -> None:
    """Through the registry: each hears what the others have charged or given back."""

    async def scenario() -> None:
        registry = Registry()
        first, second = SharedBudget(), SharedBudget()
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

    asyncio.run(scenario())


def test_a_repeated_prompt_is_drafted_from_its_earlier_text_unless_no_store() -> None:
    """`Cache-Control` reaches the replica. Its policy verifies all that is pending, whatever the time."""
    store = MemoryStore()
    with served(KeyRing(), recent=store, config=EngineConfig(policy=Policy.VERIFY)) as (client, _, _):

        def looked_up(**headers: str) -> int:
            return run_session(client, BODY, headers=headers).end.usage.looked_up_tokens

        looked_up(**{"cache-control": "no-store"})
        assert looked_up() == 0
        assert looked_up() > 5
        assert looked_up(**{"cache-control": "no-store"}) == 0
    store.close()


def test_a_prefix_on_disk_is_found_by_another_replica(tmp_path: Path) -> None:
    """The replica that kept it has gone."""
    config = EngineConfig(spill=SpillConfig(tmp_path / "spill", "t", always=True))
    body = BODY | {"prompt": PROMPT * 9}
    with served(ring_of(line_of(ALICE)), 2, config=config) as (client, group, front):
        turn = run_session(client, body | {"keep_prefix": True}, headers=bearer(ALICE))
        keeper = next(each for each in group if each.server.core.engine.stats().totals.committed)
        keeper.server.wait_until(lambda: keeper.server.core.engine.stats().totals.spilled == 1)
        left = [each for each in group if each is not keeper]
        front.publish([each.report for each in left])
        front.wait_until(lambda: len(front.front.members) == 1)
        again = run_session(
            client, body | {"prompt": [7, 8], "prefix_hash": turn.end.prefix_hash}, headers=bearer(ALICE)
        )
        assert again.end.usage.cached_prompt_tokens > 30
        assert left[0].server.core.engine.stats().totals.restored == 1


# -- options -----------------------------------------------------------------------------------------------------------


def every_option(place: Path) -> ServeOptions:
    """Each option with a value that is not its default."""
    return ServeOptions(
        "bundle",
        ray=True,
        replicas="1-3",
        gpus_per_replica=0.5,
        tls_cert=place / "cert",
        tls_key=place / "key",
        tls_client_ca=place / "ca",
        allowed_host=["a.example"],
        config=place / "config",
        host="::1",
        port=1,
        port_file=place / "port",
        name="n",
        drafts=Path("drafts"),
        share_tokenizer=False,
        api_key_file=place / "keys",
        insecure_no_keys=True,
        allowed_origin=["https://a.example"],
        engine=EngineName.VLLM,
        vllm_option=["a=b"],
        lora=["a=/b"],
        device="GPU",
        threads=3,
        kv_cache_mb=7,
        exact=Exactness.BITWISE,
        spill_dir=Path("spill"),
        spill_type=SpillType.FP8,
        spill_mb=3,
        max_running=5,
        max_sessions=8,
        policy=type(ServeOptions("b").policy)("verify"),
        lookup=False,
        source=[OwnSource.LOOKAHEAD],
        allow_tolerance=True,
        steady=True,
        upstream="http://u",
        recent=False,
        redis="redis://h",
        tree=type(ServeOptions("b").tree)("line"),
        share_prefixes=False,
        share_caches_between_keys=True,
        max_per_client=12,
        rate=14.0,
        tokens_per_minute=15,
        audit_log=Path("audit"),
        drain_s=16.0,
        log_format=type(ServeOptions("b").log_format)("json"),
    )


def test_every_option_is_the_fronts_or_reaches_the_replicas(tmp_path: Path) -> None:
    """None is lost on the way: paths are made absolute, keys and certificates stay with the front."""
    given = every_option(tmp_path)
    default = ServeOptions("b")
    same = [each.name for each in fields(ServeOptions) if getattr(given, each.name) == getattr(default, each.name)]
    assert not same  # a new option belongs into this test
    target: Any = SimpleNamespace(path=Path("bundle"), model=SimpleNamespace(name="n"))
    found = replicated._for_replica(given, target, Scale())
    for each in fields(ServeOptions):
        before, after = getattr(given, each.name), getattr(found, each.name)
        if each.name in FRONT_OPTIONS:
            assert after is None, each.name
        elif isinstance(before, Path) or each.name == "bundle":
            assert Path(after).is_absolute() and Path(after) == Path(before).resolve(), each.name
        else:
            assert after == before, each.name
    assert replicated._without_access(given).audit_log == given.audit_log


def test_a_password_of_redis_is_not_kept_by_ray() -> None:
    """An application's arguments are shown by Ray's dashboard."""
    with pytest.raises(ConfigError, match="OUTRIDER_REDIS"):
        replicated.app({"bundle": "b", "redis": "redis://:secret@host:6379/0"})


@pytest.mark.parametrize(
    ("argument", "told"), [("config", "a file that no node reads"), ("spill", "at once with Ray"), ("a", "Remove it")]
)
def test_an_argument_that_has_no_effect_in_a_cluster_is_refused(argument: str, told: str) -> None:
    """A removed option's with what to do in its place."""
    with pytest.raises(ConfigError, match=told):
        replicated.app({"bundle": "b", argument: "c"})


# -- as `serve --ray` opens them, without Ray --------------------------------------------------------------------------


@contextmanager
def fake_target() -> Iterator[tuple[Any, list[Any]]]:
    """What a replica loads, over the fake language; and what its engine calls at its death."""
    tokenizer = fake_tokenizer()
    engine = EngineThread(FakeBatchRuntime(vocab_size=tokenizer.size))
    deaths: list[Any] = []
    engine.on_death = deaths.append  # type: ignore[method-assign, assignment]

    @contextmanager
    def load() -> Iterator[Any]:
        try:
            yield SimpleNamespace(engine=engine, summary="a fake target")
        finally:
            engine.close()

    model = ServedModel("fake", tokenizer, frozenset({EOS_ID}))
    yield SimpleNamespace(load=load, model=model, path=Path("fake"), source_name="fake", num_gpus=0), deaths


@contextmanager
def running(options: ServeOptions, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A front and a replica by the options, in this process; the registry names the one to the other."""
    monkeypatch.setattr(replicated, "configure_logging", lambda _: None)
    owners = ForwardedOwners("s3cret")
    with ExitStack() as stack:
        target, deaths = stack.enter_context(fake_target())
        monkeypatch.setattr(replicated, "open_target", lambda _: target)
        opened = stack.enter_context(OpenReplica(replicated._without_access(options))("000001", owners))
        owners.on_removed = opened.core.admission.revoke
        sock = stack.enter_context(open_socket("127.0.0.1", 0))
        report = report_of("000001", url_of(sock, is_tls=False), "s3cret", target=opened.core.model.target)

        async def follow(registry: object) -> AsyncIterator[list[Report]]:
            yield [report]
            await asyncio.Event().wait()

        monkeypatch.setattr(replicated, "follow", follow)
        monkeypatch.setattr(replicated, "open_registry", lambda name: None)
        access = Access.of(options)
        audit = stack.enter_context(audit_log_of(options.audit_log))
        is_ready = threading.Event()
        front = front_server(access, "a", drain=lambda: None, on_ready=is_ready.set, audit=audit)
        public = stack.enter_context(open_socket("127.0.0.1", 0))
        stack.enter_context(access.watching(front.tls, front.revoke))
        for server, each in ((opened, sock), (front, public)):
            thread = threading.Thread(target=server.run, args=([each],))
            thread.start()
            stack.callback(thread.join, TIMEOUT_S)
        stack.callback(opened.begin_drain, 0.0)
        stack.callback(front.begin_drain)
        assert is_ready.wait(TIMEOUT_S)
        yield SimpleNamespace(
            url=url_of(public, is_tls=access.tls is not None), replica=report.url, opened=opened, deaths=deaths
        )


def test_serve_with_ray_has_what_a_single_server_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are read again, the audit log is one file, recent texts are kept, a dead engine ends its replica."""
    monkeypatch.setattr(watched_files, "LOOK_S", 0.02)
    monkeypatch.setenv(KEYS_VARIABLE, ROOT)
    keys, audit = tmp_path / "keys", tmp_path / "audit.jsonl"
    keys.write_text(f"{ALICE}\n")
    options = ServeOptions("fake", ray=True, api_key_file=keys, audit_log=audit, tokens_per_minute=500, drain_s=0.0)
    with running(options, monkeypatch) as found, httpx.Client(base_url=found.url, timeout=TIMEOUT_S) as client:
        assert KEYS_VARIABLE not in os.environ  # Ray's processes and vLLM's get the rest
        core = found.opened.core
        assert found.deaths == [found.opened.fail]
        assert core.recent is not None and core.admission._tokens_per_minute == 500
        for path in ("/v1/models", "/metrics"):
            assert httpx.get(found.replica + path).status_code == 401
        assert run_session(client, BODY, headers=bearer(ALICE)).end.reason == "length"
        keys.write_text(f"{BOB}\n")

        def is_removed() -> bool:
            return client.get("/v1/models", headers=bearer(ALICE)).status_code == 401

        deadline = threading.Event()
        for _ in range(3000):
            if is_removed():
                break
            deadline.wait(0.01)
        assert is_removed()
        shown = client.get("/metrics", headers=bearer(ROOT)).text
        assert 'outrider_reloads_total{replica="front",file="keys",result="ok"} 1.0' in shown
        assert 'outrider_audit_lines_lost_total{replica="000001"} 0.0' in shown
        assert 'outrider_audit_lines_lost_total{replica="front"} 0.0' in shown
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [line["key"] for line in lines if line["status"] == 200] == [ApiKey.plain(ALICE).name]
    assert {line["endpoint"] for line in lines if line["status"] == 401} == {"/v1/models", "/metrics", "unmatched"}


@pytest.mark.parametrize("shares", [True, False])
def test_the_tokenizer_is_shared_unless_the_option_says_no(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: bool
) -> None:
    """Then a draft with another tokenizer is not offered either."""
    make_draft(tmp_path / "stranger", tokenizer_fingerprint="0" * 64)
    options = ServeOptions("fake", ray=True, drafts=tmp_path, share_tokenizer=shares, drain_s=0.0)
    with running(options, monkeypatch) as found, httpx.Client(base_url=found.url, timeout=TIMEOUT_S) as client:
        assert client.get("/v1/tokenizer").status_code == (200 if shares else 404)
        assert [draft["name"] for draft in client.get("/v1/drafts").json()["drafts"]] == ["stranger"] * shares


@pytest.mark.skipif(OPENSSL is None, reason="needs the openssl command")
def test_a_front_asks_for_client_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The subject is the owner, and stands in the audit log; without a certificate there is no connection."""
    own, authority = make_own(tmp_path, "server"), make_own(tmp_path, "authority")
    client = make_signed(tmp_path, "phone-7", authority)
    audit = tmp_path / "audit.jsonl"
    options = ServeOptions(
        "fake", ray=True, tls_cert=own[0], tls_key=own[1], tls_client_ca=authority[0], audit_log=audit, drain_s=0.0
    )
    with running(options, monkeypatch) as found:
        context = ssl.create_default_context(cafile=str(own[0]))
        with pytest.raises(httpx.TransportError):
            httpx.get(found.url + "/v1/models", verify=context)
        client.load_into(context)
        with httpx.Client(base_url=found.url, verify=context) as known:
            assert run_session(known, BODY).end.reason == "length"
    (line,) = [json.loads(line) for line in audit.read_text().splitlines()]
    assert (line["key"], line["subject"], line["network"]) == (None, "CN=phone-7,O=Acme", "127.0.0.1")
