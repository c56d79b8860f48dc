"""Strikes the processes and links that texts run through, and heals them, for `bench.soak`; knows no text."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import signal
import ssl
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import httpx
import psutil
from bench.dropped import drop
from bench.processes import Program, endpoint_arguments, read_text, started, verifier
from tests.certificates import make_own
from tests.faulty_proxy import FaultyProxy, ProxyOptions
from tests.redis_server import redis_server

from outrider.edge.lab.laboratory import Lab

RTT_MS: Final = 20.0
HOLDS_S: Final = (0.5, 1.0, 2.0, 4.0, 18.0)
"""How long a fault lasts. The last is longer than a silence that a device takes for the verifier's end."""
RATE_KBIT_S: Final = 64.0
DAY_S: Final = 86_400
ROOM_BYTES: Final = 1 << 20
"""That a process may still take once its memory is limited."""
CLOCK_S: Final = 60.0
"""That an answer may take whose date is compared."""
AGENT: Final = ("--depth", "4", "--metrics")
NUM_DROPPED: Final = 16
NUM_FLIPS: Final = 3
START_S: Final = 150.0
"""For a replica to come back; Ray is slow on a busy machine."""


def require_preload() -> None:
    """Raises SystemExit where `WrongClock` cannot be made."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        raise SystemExit("needs Linux and a C compiler `cc`")


class WrongClock:
    """A wall clock for processes that are started with `environment`. place: a directory for its files."""

    def __init__(self, place: Path) -> None:
        library, self._offset = place / "wrong_clock.so", place / "clock"
        source = Path(__file__).with_name("wrong_clock.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
        self._offset.write_bytes(struct.pack("<q", 0))
        self.environment = {"LD_PRELOAD": str(library), "OUTRIDER_BENCH_CLOCK": str(self._offset)}

    def jump_to(self, seconds: int) -> None:
        """It is wrong by so many seconds from now on."""
        with self._offset.open("r+b") as place:
            place.write(struct.pack("<q", seconds))


@dataclass(slots=True)
class Place:
    """What is struck. cloud: a verifier, or the front of two replicas. proxy: between the agent and it.

    prompts: for sessions that are dropped. longest_s: that a fault may last. redis: holds the server of replicas.
    """

    cloud: Program
    agent: Program
    proxy: FaultyProxy
    prompts: Sequence[list[int]]
    longest_s: float
    clock: WrongClock | None = None
    tls: ssl.SSLContext | None = None
    redis: ExitStack = field(default_factory=ExitStack)
    redis_socket: Path = Path()

    @property
    def url(self) -> str:
        """Of the verifier, as devices reach it."""
        return self.proxy.url if self.tls is None else self.proxy.url.replace("http:", "https:")

    def hold(self, chance: random.Random) -> None:
        """Lets the fault last."""
        time.sleep(self.hold_s(chance))

    def hold_s(self, chance: random.Random) -> float:
        """How long it is to last."""
        return min(chance.choice(HOLDS_S), self.longest_s)


@contextmanager
def plain_place(lab: Lab, folder: Path, prompts: Sequence[list[int]], longest_s: float, *more: str) -> Iterator[Place]:
    """A verifier, a link of 20 ms, an agent whose draft's runtime can be made to raise; both have one wrong clock.

    more: options of the verifier.
    """
    clock = WrongClock(folder)
    files = ("--audit-log", str(folder / "audit.jsonl"), "--spill-dir", str(folder / "spill"))
    cloud = verifier(lab.target.path, folder, lab.cores.cloud, *files, *more, environment=clock.environment)
    with started(cloud), FaultyProxy("127.0.0.1", cloud.port, ProxyOptions(RTT_MS)) as proxy:
        arguments = ["-m", "bench.faulty_agent", *endpoint_arguments(lab.draft.path, [proxy.url])]
        agent = Program([*arguments, *AGENT], folder / "agent.log", lab.cores.agent, clock.environment)
        with started(agent):
            yield Place(cloud, agent, proxy, prompts, longest_s, clock)


@contextmanager
def replicated_place(lab: Lab, folder: Path, prompts: Sequence[list[int]], longest_s: float) -> Iterator[Place]:
    """Two replicas on a Ray of its own behind a front with TLS, their recent texts in Redis where there is one."""
    certificate, key = make_own(folder, "front")
    tls = ssl.create_default_context(cafile=str(certificate))
    with ExitStack() as stack:
        redis, socket = stack.enter_context(ExitStack()), folder / "redis"
        options = ["--tls-cert", str(certificate), "--tls-key", str(key), "--ray", "--replicas", "2"]
        if has_redis():
            redis.enter_context(redis_server(socket))
            options += ["--redis", f"unix://{socket}"]
        cloud = stack.enter_context(started(verifier(lab.target.path, folder, _both(lab), *options)))
        proxy = stack.enter_context(FaultyProxy("127.0.0.1", cloud.port, ProxyOptions(RTT_MS)))
        place = Place(cloud, cloud, proxy, prompts, longest_s, None, tls, redis, socket)
        trusting = {"SSL_CERT_FILE": str(certificate)}
        arguments = ["-m", "outrider.edge.cli", *endpoint_arguments(lab.draft.path, [place.url])]
        place.agent = Program([*arguments, *AGENT], folder / "agent.log", lab.cores.agent, trusting)
        with started(place.agent):
            yield place


def _both(lab: Lab) -> frozenset[int] | None:
    cloud, agent = lab.cores.cloud, lab.cores.agent
    return None if cloud is None or agent is None else cloud | agent


def has_redis() -> bool:
    """Whether a Redis can be killed here."""
    return shutil.which("redis-server") is not None


# -- faults of a verifier, its agent and their link -------------------------------------------------------------------


def killed(place: Place, chance: random.Random, *, is_agent: bool) -> None:
    """SIGKILL, and another start."""
    program = place.agent if is_agent else place.cloud
    program.kill()
    program.start()


def stopped(place: Place, chance: random.Random, *, is_agent: bool) -> None:
    """SIGSTOP, and SIGCONT after a while."""
    program = place.agent if is_agent else place.cloud
    program.signal(signal.SIGSTOP)
    place.hold(chance)
    program.signal(signal.SIGCONT)


def runtime_raises(place: Place, chance: random.Random) -> None:
    """The draft's runtime raises in a call of the agent's."""
    before = _num_raised(place)

    def has_raised() -> bool:
        place.agent.signal(signal.SIGUSR1)
        time.sleep(0.2)
        return _num_raised(place) > before

    _until(has_raised, "no call of the draft's runtime")


def _num_raised(place: Place) -> int:
    """As the process that runs now has counted; ends the fault."""
    size = len(place.agent.said())
    place.agent.signal(signal.SIGUSR2)
    _until(lambda: place.agent.said().endswith("\n") and len(place.agent.said()) > size, "the agent does not count")
    return int(re.findall(r"calls that met the fault: (\d+)", place.agent.said())[-1])


def dropped(place: Place, chance: random.Random) -> None:
    """Sessions of other clients, each left at a random point."""

    async def all_of_them() -> None:
        room = asyncio.Semaphore(NUM_DROPPED)
        numbers = [chance.randrange(1 << 30) for _ in range(NUM_DROPPED)]
        await asyncio.gather(*(drop(place.cloud.url, place.prompts, number, room) for number in numbers))

    asyncio.run(all_of_them())


def cut(place: Place, chance: random.Random) -> None:
    """Every connection to the verifier is closed; what was under way is lost."""
    before = place.proxy.num_cuts
    place.proxy.cut()
    _until(lambda: place.proxy.num_cuts > before, "no connection was cut")


def throttled(place: Place, chance: random.Random) -> None:
    """The link falls to 64 kbit/s each way for a while."""
    place.proxy.throttle(RATE_KBIT_S)
    place.hold(chance)
    place.proxy.throttle(0.0)


def clock_jumps(place: Place, chance: random.Random) -> None:
    """The wall clock of agent and verifier is wrong by up to a day from now on, either way."""
    assert place.clock is not None
    seconds = chance.randrange(-DAY_S, DAY_S)
    place.clock.jump_to(seconds)
    for program in (place.cloud, place.agent):
        said = read_text(program.url, {"prompt": place.prompts[0], "max_tokens": 2})
        if said.error or abs(said.created_s - time.time() - seconds) > CLOCK_S:
            raise SystemExit(f"a clock is not wrong by {seconds} s: {said}")


def disk_full(place: Place, chance: random.Random) -> None:
    """No file of agent and verifier can grow for a while: logs, the audit log, parked prefixes."""
    with ExitStack() as stack:
        for program in (place.cloud, place.agent):
            stack.enter_context(_limited(program, psutil.RLIMIT_FSIZE, 0))
        audit = place.cloud.log.parent / "audit.jsonl"
        size = audit.stat().st_size
        httpx.get(f"{place.cloud.url}/v1/models", trust_env=False).raise_for_status()
        place.hold(chance)
        if audit.stat().st_size != size:
            raise SystemExit("the disk was not full: the audit log grew")


def memory_limited(place: Place, chance: random.Random, *, is_agent: bool) -> None:
    """It can hardly allocate for a while; whether it has to is its own affair. Then it is started again.

    A process that goes on is not to be trusted: OpenVINO's CPU plug-in has ended one by a segmentation fault, a minute
    after the limit was gone.
    """
    program = place.agent if is_agent else place.cloud
    with _limited(program, psutil.RLIMIT_AS, psutil.Process(program.pid).memory_info().vms + ROOM_BYTES):
        place.hold(chance)
    _until(lambda: has_ended(program) or _is_live(program), "a process neither answers nor ends")
    program.kill()
    program.start()


@contextmanager
def _limited(program: Program, resource: int, soft: int) -> Iterator[None]:
    process = psutil.Process(program.pid)
    before = process.rlimit(resource)
    process.rlimit(resource, (soft, before[1]))
    yield
    if not has_ended(program):
        process.rlimit(resource, before)


def _is_live(program: Program) -> bool:
    try:
        return httpx.get(f"{program.url}/health/live", trust_env=False).is_success
    except httpx.HTTPError:
        return False


def has_ended(program: Program) -> bool:
    """Whether it ran and has ended by itself."""
    return bool(psutil.Process(program.pid).status() == psutil.STATUS_ZOMBIE)


# -- faults of replicas and what stands beside them -------------------------------------------------------------------


def flipped(place: Place, chance: random.Random) -> None:
    """Bits flip on the way, either way: in TLS, which notices."""
    place.proxy.flip(NUM_FLIPS)
    _until(lambda: place.proxy.is_done, "no bytes come by")


def replica_killed(place: Place, chance: random.Random) -> None:
    """SIGKILL to one of the two; Ray starts another."""
    before = _replicas(place)
    found = [child for child in psutil.Process(place.cloud.pid).children(recursive=True) if _is_replica(child)]
    chance.choice(sorted(found, key=lambda child: child.pid)).kill()
    _until(lambda: len(now := _replicas(place)) == 2 and now != before, "Ray has not started another replica", START_S)


def _is_replica(process: psutil.Process) -> bool:
    try:
        return any(word.startswith("ray::ServeReplica:outrider:replicas") for word in process.cmdline()[:1])
    except psutil.Error:  # it has just ended
        return False


def _replicas(place: Place) -> set[str]:
    """Tags of the replicas that answer."""
    assert place.tls is not None
    lines = httpx.get(f"{place.cloud.url}/metrics", verify=place.tls, timeout=30.0, trust_env=False).text.splitlines()
    return {line.split('"')[1] for line in lines if line.startswith('outrider_sessions_open{replica="')}


def redis_killed(place: Place, chance: random.Random) -> None:
    """SIGKILL, and another start after a while, with nothing in it."""
    place.redis.close()
    place.redis_socket.unlink(missing_ok=True)
    place.hold(chance)
    place.redis.enter_context(redis_server(place.redis_socket))


def _until(is_so: Callable[[], bool], words: str, limit_s: float = 60.0) -> None:
    until_s = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > until_s:
            raise SystemExit(f"{words} within {limit_s:g} s")
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind. is_agents: only texts through the endpoint meet it. may_end: it may end a text, by an error with a name.
    may_break: the endpoint's clients may lose their connections in place of that. is_replicated: of replicas.
    """

    strike: Callable[[Place, random.Random], None]
    is_agents: bool = False
    may_end: bool = False
    may_break: bool = False
    is_replicated: bool = False


FAULTS: Final[dict[str, Fault]] = {
    "agent killed": Fault(partial(killed, is_agent=True), is_agents=True, may_end=True, may_break=True),
    "agent stopped": Fault(partial(stopped, is_agent=True), is_agents=True),
    "agent's memory limited": Fault(
        partial(memory_limited, is_agent=True), is_agents=True, may_end=True, may_break=True
    ),
    "draft's runtime raises": Fault(runtime_raises, is_agents=True),
    "verifier killed": Fault(partial(killed, is_agent=False), may_end=True),
    "verifier stopped": Fault(partial(stopped, is_agent=False)),
    "verifier's memory limited": Fault(partial(memory_limited, is_agent=False), may_end=True),
    "sessions dropped": Fault(dropped),
    "connections cut": Fault(cut),
    "link throttled": Fault(throttled),
    "clock jumps": Fault(clock_jumps),
    "disk full": Fault(disk_full),
    "bits flipped": Fault(flipped, is_replicated=True),
    "replica killed": Fault(replica_killed, is_replicated=True),
    "Redis killed": Fault(redis_killed, is_replicated=True),
}


def away(name: str) -> str:
    """Why a fault cannot be made here; empty where it can."""
    if name == "Redis killed" and not has_redis():
        return "not here: no redis-server (apt-get install redis-server)"
    if FAULTS[name].is_replicated and shutil.which("openssl") is None:
        return "not here: no openssl"
    return ""
