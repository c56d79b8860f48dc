"""Replicas on a real Ray: texts through them, a killed one, new weights, ports. One Ray for all tests here."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.agents import free_port
from tests.on_ray.fakes import OpenFake
from tests.redis_server import redis_server
from tests.serving import bearer, code_of, key_line, open_session, run_session, target_tokens
from tests.waiting import wait_until

from outrider.cloud.replicas.cluster import ENVIRONMENT, Scale, local_ray, replicas_of
from outrider.cloud.replicas.members import Report
from outrider.cloud.replicas.registry import open_registry
from outrider.cloud.replicas.replica import LOOPBACK
from outrider.cloud.server.options import ServeOptions
from outrider.cloud.server.replicated import APPLICATION, application_of, deploy
from outrider.edge.drafting.depth import FixedDepth
from outrider.edge.drafting.drafter import NgramDrafter
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationRequest, GenerationResult
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.client.errors import TargetMismatch
from outrider.models.http.keys import ApiKey

# Ray's own: sockets that its clients leave to the garbage collector, and deprecations of what it calls.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]

PROMPT = (5, 17, 99, 3)
KEY = "key-of-the-only-owner-0001"
WAIT_S = 180.0
"""For Ray: its processes start slowly on a busy machine."""


@dataclass(frozen=True)
class Running:
    """The application on Ray. options: those of its front."""

    url: str
    options: ServeOptions

    def deploy(self, make: OpenFake) -> None:
        """Rolls out other replicas; returns once Ray says that they run."""
        deploy(application_of(self.options, make, host=LOOPBACK))

    def reports(self) -> list[Report]:
        """What the replicas have reported last."""
        import ray

        return list(ray.get(open_registry(APPLICATION).changes.remote(None), timeout=WAIT_S)[1])

    def shown(self, name: str) -> list[float]:
        """A metric of all replicas."""
        answer = httpx.get(f"{self.url}/metrics", headers=bearer(KEY), timeout=WAIT_S)
        return [float(line.split()[-1]) for line in answer.text.splitlines() if line.startswith(name + "{")]

    def wait_until(self, is_so: Callable[[list[Report]], bool]) -> None:
        """Returns once it is so by the reports; the registry waits for their changes."""
        wait_until(lambda: is_so(self.reports()), WAIT_S)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two replicas behind a front with a key."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY + "\n")
    with pytest.MonkeyPatch.context() as patch, local_ray(8):
        for name in ENVIRONMENT:
            patch.setenv(name, ENVIRONMENT[name])
        from ray import serve

        options = ServeOptions("fake", port=free_port(), api_key_file=keys, replicas="2", threads=1, drain_s=0.1)
        deploy(application_of(options, OpenFake(), host=LOOPBACK))
        found = Running(f"http://127.0.0.1:{options.port}", options)
        found.wait_until(lambda reports: len(reports) == 2)
        yield found
        serve.shutdown()


def pid_of(report: Report) -> int:
    """The process that listens where a replica does."""
    port = int(report.url.rsplit(":", 1)[1])
    (pid,) = {c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port}
    assert pid is not None
    return int(pid)


async def generate(
    url: str, count: int, index: int, on_token: Callable[[int], None] = lambda index: None
) -> GenerationResult:
    """One text by an agent that drafts, whose prompt ends in `index`."""
    request = GenerationRequest((*PROMPT, index), max_tokens=count, ignore_eos=True)
    async with VerifierClient(url, ClientOptions(api_key=KEY)) as client:
        agent = StreamAgent(Endpoints([client]), NgramDrafter(), FixedDepth(4))
        return await agent.generate(request, lambda tokens: on_token(index))


def texts_of(url: str, count: int, num_texts: int, act: Callable[[], object] = lambda: None) -> list[GenerationResult]:
    """So many texts, each the target's. act: comes once all have begun, and before any has to end."""

    async def scenario() -> list[GenerationResult]:
        waiting, have_begun = set(range(num_texts)), asyncio.Event()

        def on_token(index: int) -> None:
            waiting.discard(index)
            if not waiting:
                have_begun.set()

        texts = [asyncio.create_task(generate(url, count, index, on_token)) for index in range(num_texts)]
        await asyncio.wait_for(have_begun.wait(), WAIT_S)
        await asyncio.to_thread(act)
        return await asyncio.wait_for(asyncio.gather(*texts), WAIT_S)

    results = asyncio.run(scenario())
    for index, result in enumerate(results):
        assert result.tokens == tuple(target_tokens((*PROMPT, index), count))
    return results


def test_texts_through_two_replicas_are_those_of_one_server(running: Running) -> None:
    """With drafts; both replicas take part, and a key is asked for."""
    assert httpx.post(f"{running.url}/v1/sessions", json={"prompt": [1], "max_tokens": 1}).status_code == 401
    texts_of(running.url, 40, 8)
    with httpx.Client(base_url=running.url, headers=bearer(KEY), timeout=WAIT_S) as client:
        body = {"prompt": list(PROMPT), "max_tokens": 3, "ignore_eos": True}
        assert run_session(client, body).tokens == target_tokens(PROMPT, 3)
    assert sum(number > 0.0 for number in running.shown("outrider_generation_tokens_total")) == 2


def test_the_texts_of_a_removed_key_end(running: Running) -> None:
    """The front reads its key file again, and says so to the replicas; keys' limits reach them."""
    path, other = running.options.api_key_file, "key-of-a-guest-who-leaves"
    assert path is not None
    before = path.read_text()
    body = {"prompt": list(PROMPT), "max_tokens": 4000, "ignore_eos": True}
    with httpx.Client(base_url=running.url, headers=bearer(other), timeout=WAIT_S) as client:
        path.write_text(f"{before}{key_line(other, 'name=guest sessions=1')}\n")
        running.wait_until(lambda _: client.get("/v1/models").status_code == 200)
        two = client.post("/v1/completions", json=body | {"prompt": [list(PROMPT)] * 2})
        assert code_of(two) == (400, "invalid_parameter")
        with open_session(client, body) as session:
            path.write_text(before)
            error = session.rest().end.error
        assert error is not None and error.code == "unauthorized"
        assert client.get("/v1/models").status_code == 401


def test_nothing_of_ray_listens_beyond_loopback(running: Running) -> None:
    """Neither its own processes, nor its proxy, nor replicas and front; and the dashboard does not listen."""
    ours = psutil.Process()
    pids = {each.pid for each in (ours, *ours.children(recursive=True))}
    found = [c for c in psutil.net_connections("inet") if c.pid in pids and c.status == "LISTEN"]
    ports = {c.laddr.port for c in found}
    assert len(ports) > 5 and {c.laddr.ip.removeprefix("::ffff:") for c in found} == {"127.0.0.1"}
    assert not {8265, 8000} & ports and os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    urls = [report.url for report in running.reports()]
    assert len(urls) == 2 and {int(url.rsplit(":", 1)[1]) for url in urls} <= ports
    owner = ApiKey.plain(KEY).digest.hex()
    for url in (running.url, *urls):  # replicas answer nobody but their front, which takes no header of a front
        for value in (f"{'0' * 64}.{owner}.100.0.0", f".{owner}", ".", *([KEY] if url in urls else [])):
            for path in ("/v1/completions", "/v1/sessions"):
                answer = httpx.post(url + path, json={"prompt": [1], "max_tokens": 1}, headers=bearer(value))
                assert answer.status_code == 401
            assert httpx.get(f"{url}/metrics", headers=bearer(value)).status_code == 401


def test_a_killed_replica_loses_nothing(
    running: Running, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL while twelve texts run: all are the same, and Ray starts another replica. One short line tells of it."""
    victim = running.reports()[0]
    pid = pid_of(victim)
    results = texts_of(running.url, 150, 12, lambda: os.kill(pid, signal.SIGKILL))
    assert sum(result.num_sessions > 1 for result in results) >= 1
    running.wait_until(lambda reports: len(reports) == 2 and victim.tag not in {r.tag for r in reports})

    def told() -> list[str]:
        return [line for line in caplog.messages if f"process {pid}" in line]

    running.wait_until(lambda _: bool(told()))
    assert len(told()) == 1 and len(told()[0]) < 200
    assert "Worker exit detail" not in "".join(capfd.readouterr())


def test_a_rolling_update_drains_and_texts_go_on(running: Running) -> None:
    """The same weights: each replica is replaced, texts in progress are resumed and stay the same."""
    before = {report.tag for report in running.reports()}
    results = texts_of(running.url, 1500, 3, lambda: running.deploy(OpenFake(version=1)))
    assert all(result.num_sessions > 1 for result in results)
    running.wait_until(lambda reports: len(reports) == 2 and not before & {r.tag for r in reports})


def test_a_killed_redis_changes_no_text(running: Running, tmp_path: Path) -> None:
    """SIGKILL while texts run: they, those before and those after it are the target's; one warning, gauge 0."""
    import ray

    place, count, num_texts = tmp_path / "redis", 100, 8
    logs = Path(ray._private.worker.global_worker.node.get_logs_dir_path())

    def warnings(report: Report) -> list[str]:
        (path,) = logs.glob(f"worker-*-{report.pid}.err")
        return [line for line in path.read_text().splitlines() if "WARNING outrider.cloud: Redis at " in line]

    with redis_server(place) as process:
        before = {report.tag for report in running.reports()}
        running.deploy(OpenFake(version=2, redis=f"unix://{place}"))
        running.wait_until(lambda reports: len(reports) == 2 and not before & {r.tag for r in reports})
        running.wait_until(lambda _: running.shown("outrider_recent_up") == [1.0, 1.0])
        texts_of(running.url, count, num_texts)
        running.wait_until(lambda _: sum(running.shown("outrider_recent_stored_total")) >= num_texts)
        texts_of(running.url, count, num_texts, process.kill)
        assert process.wait(WAIT_S) == -signal.SIGKILL
        texts_of(running.url, count, num_texts)
        running.wait_until(lambda _: running.shown("outrider_recent_up") == [0.0, 0.0])
    running.wait_until(lambda reports: all(len(warnings(report)) == 1 for report in reports))
    assert all("no earlier texts are used until it answers" in warnings(report)[0] for report in running.reports())


def test_other_weights_end_a_text_with_a_clear_error(running: Running) -> None:
    """It goes on as long as a replica of its target is left, and no token of the other's is used."""
    with pytest.raises(
        TargetMismatch, match=r"began with fake \(target 0{16}\).*target 0{15}7.*replicas of one target"
    ):
        texts_of(running.url, 3500, 1, lambda: running.deploy(OpenFake(seed=7, version=3)))
    running.wait_until(lambda reports: {r.ready.target for r in reports} == {f"{7:016x}"})


def test_replicas_scale_by_what_they_report() -> None:
    """Ray's own count of requests is not used: they do not pass through Ray."""

    def config_of(scale: Scale) -> Any:
        return replicas_of(OpenFake(), "a", scale, host=LOOPBACK, drain_s=30.0)._bound_deployment._deployment_config

    scaled, fixed = config_of(Scale(replicas=2, most=6, sequences=24.0)), config_of(Scale(replicas=3, most=3))
    found = scaled.autoscaling_config
    assert (found.min_replicas, found.initial_replicas, found.max_replicas) == (2, 2, 6)
    assert found.target_ongoing_requests == 24.0 and scaled.graceful_shutdown_timeout_s >= 30.0 + 15.0
    assert found.policy.policy_function == "outrider.cloud.replicas.scaling:by_sequences"
    assert (fixed.num_replicas, fixed.autoscaling_config) == (3, None)


def test_applications_of_one_cluster_keep_to_their_replicas(running: Running) -> None:
    """Another model, deployed beside the first: neither front may choose the other's replicas."""
    import ray
    from ray import serve

    own = {report.tag for report in running.reports()}
    options = replace(running.options, port=free_port(), replicas="1")
    # The builder of `serve deploy` does not know the application's name.
    deploy(application_of(options, OpenFake(seed=9), host=LOOPBACK), name="other")
    others = ray.get(open_registry("other").changes.remote(None), timeout=WAIT_S)[1]
    assert {report.ready.target for report in others} == {f"{9:016x}"}
    assert {report.tag for report in running.reports()} == own
    serve.delete("other")
