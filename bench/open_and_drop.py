"""Opens 10,000 sessions and drops them at random points; checks that the verifier keeps nothing of them.

    python -m bench.open_and_drop [--sessions 10000] [--at-once 32]
    python -m bench.open_and_drop --vllm-python PYTHON --warm-up 3000 --at-once 16

The verifier is a real process over the reference target, not widened; with `--vllm-python` (an environment as
docs/vllm.md says) its engine is vLLM. A client leaves before the first event, with half of the head or of the body
sent, in the middle of a long prompt, while it drafts, with half of a draft sent, while the text streams, in a
/v1/verify call, in a streamed completion, after a DELETE, or after the end; by a close or by a reset. Points are drawn
with a seed.

Looks after the sessions that warm up, and at the end, when nothing runs: blocks of the KV cache, open sessions,
asyncio tasks, threads, file descriptors, objects of Outrider's own classes, and memory of the server's processes.
Exits 1 where a block, session, task, thread, descriptor or object is left, where memory grew by more than 3 %, or where
a text afterwards is not the one from before.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
from bench.bare_http import Wire
from bench.processes import ANY_PORT, Program, read_text, source_path, started
from bench.report import TO_JSON, option, parser, verdict
from bench.verifier import VLLM, Verifier
from bench.watched_server import WATCH_FILE
from rich.console import Console

from outrider.export.make.reference_pair import export_reference_pair
from outrider.models.errors import CloudError
from outrider.models.text.tokenizer import Tokenizer
from outrider.reference import load_prompts, target_dir

MOST_GROWTH: Final = 0.03
OPEN: Final = ("num_requests_running", "num_requests_waiting", "sessions_open")
"""Gauges that are 0 once nothing runs."""
MORE_DESCRIPTORS: Final = 4
"""Connections that a look at the server may leave closing."""
LONG_PROMPT: Final = 900
KV_CACHE_MB: Final = 48
"""So small that every block is used while the server warms up: pages that are touched late would look like growth."""
BOUNDED: Final = {"outrider.cloud.recent.store.PromptDigest": 256}
"""Objects that stay, up to a number: the digests of one owner's kept prefixes, whose keys and values may be gone."""
_SETTLE_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Visit:
    """One session to be dropped. at: the share of the way at which it is, 0 to 1; salt: varies prompt and seed."""

    url: str
    prompts: Sequence[list[int]]
    at: float
    salt: int
    max_tokens: int = 24

    def body(self, length: int = 24) -> dict[str, Any]:
        """Of POST /v1/sessions."""
        prompt = self.prompts[self.salt % len(self.prompts)]
        while len(prompt) < length:
            prompt = prompt + prompt
        salted = [2 + self.salt % 250, *prompt[: length - 1]]
        return {
            "prompt": salted,
            "max_tokens": self.max_tokens,
            "temperature": 0.8,
            "seed": self.salt,
            "ignore_eos": True,
        }

    @property
    def num_tokens(self) -> int:
        """Tokens after which it leaves a stream."""
        return 1 + int(self.at * (self.max_tokens - 2))


async def half_sent(wire: Wire, visit: Visit) -> None:
    """Leaves with a part of the request sent."""
    data = wire.request("POST", "/v1/sessions", visit.body())
    await wire.send(data[: 1 + int(visit.at * (len(data) - 2))])


async def before_first_event(wire: Wire, visit: Visit) -> None:
    """Leaves at once after the request."""
    await wire.post("/v1/sessions", visit.body())
    await asyncio.sleep(0.02 * visit.at)


async def in_mid_prompt(wire: Wire, visit: Visit) -> None:
    """Leaves while a long prompt is computed."""
    await wire.post("/v1/sessions", visit.body(LONG_PROMPT))
    await wire.event()
    await asyncio.sleep(0.3 * visit.at)


async def _read_to(wire: Wire, num_tokens: int) -> tuple[str, int]:
    """The session's id, and how many tokens had been committed by the event that brought so many."""
    session, count = "", 0
    while count < num_tokens:
        event = await wire.event()
        if event is None or event.get("type") == "end":
            break
        session = event.get("session", session)
        count = max(count, event.get("base", 0) + len(event.get("tokens", ())))
    return session, count


async def while_streaming(wire: Wire, visit: Visit) -> None:
    """Leaves after some tokens."""
    await wire.post("/v1/sessions", visit.body())
    await _read_to(wire, visit.num_tokens)


async def after_the_end(wire: Wire, visit: Visit) -> None:
    """Reads everything; the cache is kept for what continues the session."""
    await wire.post("/v1/sessions", visit.body() | {"keep_prefix": visit.at < 0.5})
    await _read_to(wire, visit.max_tokens + 1)


async def while_drafting(wire: Wire, visit: Visit) -> None:
    """Leaves after some tokens and drafts for them, perhaps with half of the last draft sent."""
    await wire.post("/v1/sessions", visit.body())
    drafts = Wire(visit.url)
    await drafts.open()
    try:
        for num_tokens in range(1, 1 + visit.num_tokens, 4):
            session, base = await _read_to(wire, num_tokens)
            if not session:
                return
            body = {"base": base, "paths": [[7, 8, 9, 10], [11, 12]]}
            data = drafts.request("POST", f"/v1/sessions/{session}/drafts", body)
            await drafts.send(data[: len(data) // 2] if num_tokens + 4 > visit.num_tokens and visit.salt % 2 else data)
    finally:
        await drafts.leave(visit.salt % 2 == 0)


async def deleted(wire: Wire, visit: Visit) -> None:
    """Ends the session by DELETE after some tokens, and leaves without reading the rest."""
    await wire.post("/v1/sessions", visit.body())
    session, _ = await _read_to(wire, visit.num_tokens)
    async with Wire(visit.url) as other:
        await other.send(other.request("DELETE", f"/v1/sessions/{session}"))
        await other.reader.readline()


async def in_verify(wire: Wire, visit: Visit) -> None:
    """Leaves a /v1/verify call, before its answer or after."""
    item = visit.body()
    item["prefix"] = item.pop("prompt")
    await wire.post("/v1/verify", {"items": [item | {"draft": [7, 8, 9]}] * 3})
    if visit.at < 0.5:
        await asyncio.sleep(0.04 * visit.at)
    else:
        await wire.reader.readline()


async def in_completion(wire: Wire, visit: Visit) -> None:
    """Leaves a streamed completion after some chunks."""
    body = visit.body()
    await wire.post("/v1/completions", body | {"stream": True, "n": 1})
    for _ in range(visit.num_tokens):
        if await wire.event() is None:
            return


POINTS: Final[tuple[Callable[[Wire, Visit], Awaitable[None]], ...]] = (
    half_sent,
    before_first_event,
    in_mid_prompt,
    while_streaming,
    while_drafting,
    deleted,
    in_verify,
    in_completion,
    after_the_end,
)


async def visit_all(
    url: str, prompts: Sequence[list[int]], numbers: range, at_once: int, on_each: Callable[[str], None]
) -> None:
    """Opens and drops one session for each number, `at_once` at a time. on_each: gets the point, or a refusal."""
    room = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        drawn = random.Random(number)
        point = drawn.choice(POINTS)
        visit = Visit(url, prompts, drawn.random(), number)
        async with room:
            wire = Wire(url)
            await wire.open()
            try:
                await point(wire, visit)
                on_each(point.__name__)
            except CloudError as error:
                on_each(str(error))
            finally:
                await wire.leave(drawn.random() < 0.5)

    for start in range(numbers.start, numbers.stop, 1000):  # not all tasks at once
        await asyncio.gather(*(one(number) for number in range(start, min(start + 1000, numbers.stop))))


@dataclass(frozen=True, slots=True)
class State:
    """What the server holds when nothing runs. blocks: neither free nor parked; memory_mb: of each of its processes,
    what no other process shares. parked, texts: prefixes kept for what continues them, recent texts; these may stay.
    """

    blocks: int
    busy: dict[str, float]
    parked: float
    texts: float
    tasks: tuple[str, ...]
    threads: int
    descriptors: int
    processes: int
    objects: dict[str, int]
    memory_mb: tuple[float, ...]

    @property
    def all_mb(self) -> float:
        """Memory of all processes."""
        return sum(self.memory_mb)


def memory_of(pid: int) -> tuple[float, ...]:
    """MB of a process and of its children, what none shares."""
    leader = psutil.Process(pid)
    return tuple(each.memory_full_info().uss / 1e6 for each in (leader, *leader.children(recursive=True)))


async def at_rest(url: str) -> dict[str, float]:
    """The server's gauges once nothing runs; parked prefixes may stay."""
    async with httpx.AsyncClient() as client:
        for _ in range(200):
            lines = (await client.get(f"{url}/metrics")).text.splitlines()
            values = dict(line.split() for line in lines if line and not line.startswith("#") and "{" not in line)
            gauges = {name: float(values[f"outrider_{name}"]) for name in OPEN}
            if not any(gauges.values()):
                break
            await asyncio.sleep(0.05)
        for name in ("blocks", "free_blocks", "parked_prefixes", "parked_blocks"):
            gauges[name] = float(values[f"outrider_kv_cache_{name}"])
        gauges["recent_texts"] = float(values.get("outrider_recent_texts", 0))  # none without a store
    return gauges


def state_of(server: Program, watch: Path) -> State:
    """Waits until nothing runs, and looks."""
    gauges = asyncio.run(at_rest(server.url))
    tree = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    deadline_s = time.monotonic() + _SETTLE_S
    while _num_connections(tree[0], server.port) and time.monotonic() < deadline_s:
        time.sleep(0.1)  # those that closed last
    watch.unlink(missing_ok=True)
    tree[0].send_signal(signal.SIGUSR1)
    while not watch.exists() and time.monotonic() < deadline_s + _SETTLE_S:
        time.sleep(0.05)
    alive = json.loads(watch.read_text(encoding="utf-8"))
    return State(
        blocks=int(gauges["blocks"] - gauges["free_blocks"] - gauges["parked_blocks"]),
        busy={name: gauges[name] for name in OPEN if gauges[name]},
        parked=gauges["parked_prefixes"],
        texts=gauges["recent_texts"],
        tasks=tuple(alive["tasks"]),
        threads=sum(process.num_threads() for process in tree),
        descriptors=sum(process.num_fds() for process in tree),
        processes=len(tree),
        objects=alive["objects"],
        memory_mb=memory_of(server.pid),
    )


def _num_connections(process: psutil.Process, port: int) -> int:
    connections = process.net_connections("tcp")
    return sum(c.laddr.port == port and c.status != psutil.CONN_LISTEN for c in connections)


def leaks(before: State, after: State) -> list[str]:
    """What is left that was not there before, in words."""
    told = [f"{after.blocks} KV blocks are neither free nor parked"] if after.blocks else []
    told += [f"{name} is {value:g} though nobody is there" for name, value in after.busy.items()]
    new_tasks = Counter(after.tasks) - Counter(before.tasks)
    told += [f"{count} tasks more of {name}" for name, count in new_tasks.items()]
    if after.threads > before.threads:
        told.append(f"{after.threads} threads; expected at most {before.threads}")
    if after.descriptors > before.descriptors + MORE_DESCRIPTORS:
        told.append(f"{after.descriptors} file descriptors; expected at most {before.descriptors + MORE_DESCRIPTORS}")
    if after.processes > before.processes:
        told.append(f"{after.processes} processes; expected {before.processes}")
    told += [f"{count} objects more of {name}" for name, count in more_objects(before, after).items()]
    if after.all_mb > (1.0 + MOST_GROWTH) * before.all_mb:
        told.append(f"{after.all_mb:.1f} MB; expected at most {1.0 + MOST_GROWTH:g} times {before.all_mb:.1f} MB")
    return told


def more_objects(before: State, after: State) -> Mapping[str, int]:
    """Classes that have more objects than before: beyond a few, beyond one for each prefix or text kept since, and
    beyond their bound.
    """
    more = {name: count - before.objects.get(name, 0) for name, count in after.objects.items()}
    allowed = 8 + max(0.0, after.parked - before.parked) + max(0.0, after.texts - before.texts)
    return {
        name: count for name, count in more.items() if count > allowed and after.objects[name] > BOUNDED.get(name, 0)
    }


def make_server(vllm_python: str | None, place: Path, watch: Path) -> Program:
    """The verifier, which can be watched."""
    arguments = ["-m", "bench.watched_server", "serve"]
    environment = {WATCH_FILE: str(watch)}
    if vllm_python:
        arguments += [str(target_dir()), *Verifier(VLLM).options]
        environment["PYTHONPATH"] = source_path()
    else:
        arguments += [str(export_reference_pair().target)]
    arguments += [*ANY_PORT, "--threads", "1", "--drain-s", "0", "--kv-cache-mb", str(KV_CACHE_MB)]
    return Program(arguments, place / "verifier.log", environment=environment, python=vllm_python or sys.executable)


def main(given: Sequence[str] | None = None) -> int:
    """The command."""
    options = parser(
        __doc__,
        {
            "--sessions": option(10_000),
            "--warm-up": option(type=int, help="of the sessions, those before the first look; default: a tenth"),
            "--at-once": option(32),
            "--vllm-python": option(help="the interpreter of an environment with vLLM"),
            **TO_JSON,
        },
    ).parse_args(given)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the server would stay behind
    console = Console(width=120)
    tokenizer = Tokenizer.from_dir(target_dir())
    prompts = [tokenizer.encode(prompt.text) for prompt in load_prompts(64)]
    left, began_s = Counter[str](), time.monotonic()
    question = {"prompt": prompts[0][:40], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    with tempfile.TemporaryDirectory() as place:
        watch = Path(place) / "alive.json"
        with started(make_server(options.vllm_python, Path(place), watch)) as server:
            first = read_text(server.url, question)
            num_warm = options.warm_up or options.sessions // 10

            def on_each(how: str) -> None:
                left[how] += 1
                if left.total() % max(1, options.sessions // 10) == 0:
                    each = " + ".join(f"{mb:.0f}" for mb in memory_of(server.pid))
                    console.print(f"{left.total()} sessions, {time.monotonic() - began_s:.0f} s, {each} MB")

            asyncio.run(visit_all(server.url, prompts, range(num_warm), options.at_once, on_each))
            before = state_of(server, watch)
            rest = range(num_warm, options.sessions)
            asyncio.run(visit_all(server.url, prompts, rest, options.at_once, on_each))
            after = state_of(server, watch)
            last = read_text(server.url, question)
            ready = httpx.get(f"{server.url}/health/ready", trust_env=False).status_code
            log = server.said()
    missed = leaks(before, after)
    if first.error or last.text != first.text:
        missed.append(f"a text differs afterwards: {last.text!r} {last.error}; expected {first.text!r} {first.error}")
    if ready != 200:
        missed.append(f"/health/ready answers {ready}; expected 200")
    if "Traceback" in log:
        missed.append(f"the server's log has a traceback: {log[log.index('Traceback') :][:2000]}")
    console.print(dict(left))
    for name, state in (("after the warm-up", before), ("at the end", after)):
        console.print(
            f"{name}: {state.all_mb:.1f} MB, {state.descriptors} descriptors, {state.threads} threads, "
            f"{len(state.tasks)} tasks, {sum(state.objects.values())} objects, {state.blocks} blocks lost, "
            f"{state.parked:.0f} prefixes parked, {state.texts:.0f} texts",
            highlight=False,
        )
    document = {
        "sessions": options.sessions,
        "engine": "vllm" if options.vllm_python else "embedded",
        "left": left,
        "before": asdict(before),
        "after": asdict(after),
        "seconds": time.monotonic() - began_s,
    }
    return verdict(console, missed, options.json, document)


if __name__ == "__main__":
    sys.exit(main())
