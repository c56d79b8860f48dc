"""Opens sessions and drops them at random points, with whole ones between, for `bench.soak`.

A client leaves before the first event, with half of the head or of the body sent, in the middle of a long prompt, while
it drafts, with half of a draft sent, while the text streams, in a /v1/verify call, in a streamed completion, after a
DELETE, or after the end; by a close or by a reset. Points are drawn with a seed. After each hundred of these come one
text of each mode of the agent.

Missed is what `bench.soak` exits 1 for: memory that grew by more than 2 % over the last three quarters, a block,
session, thread or descriptor that is left when nothing runs, a text afterwards that is not the one from before.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psutil
from bench.bare_http import Wire
from bench.processes import metrics_of
from rich.console import Console

from outrider.edge.lab.laboratory import Lab, three_modes
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.results import GenerationRequest
from outrider.models.client.client import VerifierClient
from outrider.models.errors import CloudError
from outrider.models.picks.sampling import SamplingParams
from outrider.reference import load_prompts

MOST_GROWTH: Final = 0.02
OPEN: Final = ("num_requests_running", "num_requests_waiting", "sessions_open")
"""Gauges that are 0 once nothing runs."""
MORE_DESCRIPTORS: Final = 4
"""Connections that a look at the server may leave closing."""
LONG_PROMPT: Final = 900
KV_CACHE_MB: Final = "48"
"""So small that every block is used while the server warms up: pages that are touched late would look like growth."""
EACH: Final = 100
AT_ONCE: Final = 32


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
        salted = [2 + self.salt % 250, *(prompt * (1 + length // len(prompt)))[: length - 1]]
        sampling = {"temperature": 0.8, "seed": self.salt, "ignore_eos": True}
        return {"prompt": salted, "max_tokens": self.max_tokens, **sampling}

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
    await wire.post("/v1/completions", visit.body() | {"stream": True, "n": 1})
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


async def drop(url: str, prompts: Sequence[list[int]], number: int, room: asyncio.Semaphore) -> None:
    """Opens and drops the session of a number. An answer that is an error may come while the server is full."""
    drawn = random.Random(number)
    point = drawn.choice(POINTS)
    visit = Visit(url, prompts, drawn.random(), number)
    async with room:
        wire = Wire(url)
        await wire.open()
        try:
            await point(wire, visit)
        except CloudError:
            pass
        finally:
            await wire.leave(drawn.random() < 0.5)


async def texts(lab: Lab, prompt: Sequence[int]) -> list[tuple[int, ...]]:
    """The same text in each mode of the agent."""
    request = GenerationRequest(tuple(prompt), SamplingParams(0.8, seed=3), max_tokens=12, ignore_eos=True)
    async with VerifierClient(lab.url) as client:
        modes = three_modes(Endpoints([client]), lab.drafter).values()
        return [(await mode.generate(request)).tokens for mode in modes]


async def at_rest(url: str) -> dict[str, float]:
    """The server's gauges once nothing runs; parked prefixes may stay."""
    for _ in range(200):
        values = metrics_of(url)
        gauges = {name: values[f"outrider_{name}"] for name in OPEN}
        if not any(gauges.values()):
            break
        await asyncio.sleep(0.05)
    cache = [values[f"outrider_kv_cache_{name}"] for name in ("blocks", "free_blocks", "parked_blocks")]
    return {**gauges, "blocks": cache[0] - cache[1] - cache[2]}


async def soak(lab: Lab, server: psutil.Process, numbers: range, console: Console) -> list[float]:
    """Runs the sessions of these numbers; the server's memory after each hundred, in MB that it shares with none."""
    samples = list[float]()
    prompts = [list(lab.encode(prompt.text)) for prompt in load_prompts(64)]
    room = asyncio.Semaphore(AT_ONCE)
    for start in range(numbers.start, numbers.stop, EACH):
        await asyncio.gather(*(drop(lab.url, prompts, number, room) for number in range(start, start + EACH)))
        await texts(lab, prompts[start // EACH % len(prompts)])
        samples.append(server.memory_full_info().uss / 1e6)
        console.print(f"{start + EACH:5d} sessions   {samples[-1]:8.1f} MB   {server.num_fds()} descriptors")
    return samples


async def measure(
    lab: Lab, server: psutil.Process, sessions: int, warm_up: int, console: Console
) -> tuple[list[str], dict[str, Any]]:
    """What is missed, and the figures. server: the process that the lab's URL leads to."""
    prompt = list(lab.encode(load_prompts(1)[0].text))
    await soak(lab, server, range(warm_up), console)
    first = await texts(lab, prompt)
    await at_rest(lab.url)
    before = (server.num_threads(), server.num_fds())
    samples = await soak(lab, server, range(warm_up, warm_up + sessions), console)
    last = await texts(lab, prompt)
    left = await at_rest(lab.url)
    threads, descriptors = server.num_threads(), server.num_fds()
    steady = samples[len(samples) // 4 :]
    missed = [f"{name}: {value:g} of {name} are left though nobody is there" for name, value in left.items() if value]
    if threads > before[0] or descriptors > before[1] + MORE_DESCRIPTORS:
        missed.append(f"{threads} threads and {descriptors} descriptors; {before[0]} and {before[1]} before")
    if (growth := steady[-1] - steady[0]) > MOST_GROWTH * steady[0]:
        missed.append(f"memory grew by {growth:.1f} MB of {steady[0]:.1f}; expected at most {MOST_GROWTH:.0%}")
    if len({*first, *last}) != 1:
        missed.append(f"texts differ: {first} before, {last} afterwards")
    console.print(f"growth over the last three quarters: {growth:+.2f} MB of {steady[0]:.1f} MB")
    return missed, {"sessions": sessions, "memory_mb": samples, "threads": threads, "descriptors": descriptors, **left}
