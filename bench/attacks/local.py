"""Runs the local endpoint over an emulated verifier, and honest texts of another client beside an attack."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.attacks.crowd import Crowd, crowd_of
from bench.attacks.probes import Latency, Memory, health_of, memory_of
from bench.attacks.subject import KEYS, NotMeasured, Server, Subject

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
GENERATE: Final = "/v1/outrider/generate"
VERIFY: Final = "/v1/outrider/verify"
BODIES: Final[dict[str, dict[str, Any]]] = {
    COMPLETIONS: {"prompt": "a", "max_tokens": 1},
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    GENERATE: {"prompt": "a", "max_tokens": 1, "seed": 1},
    VERIFY: {"id": "cmpl-none"},
}
"""A small body for every POST route."""

ATTACKER, HONEST = KEYS
STEP_MS: Final = 20.0
MAX_OWN: Final = 8
MAX_HEALTH_S: Final = 0.05
MAX_GROWTH_MB: Final = 64.0
MIN_RATE: Final = 0.8
"""Of another client's tokens/s, without the attack."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What an attack costs: the endpoint's health, an idle endpoint's, and the endpoint's memory."""

    health: Latency
    idle: Latency
    memory: Memory

    @property
    def is_well(self) -> bool:
        """Whether health and memory stay within the limits of row 6; complete once the context is left."""
        health = self.health
        is_quick = health.high < MAX_HEALTH_S + self.idle.high and health.worst < 2 * MAX_HEALTH_S + self.idle.worst
        return is_quick and not health.num_failures and self.memory.growth_mb <= MAX_GROWTH_MB

    @property
    def raw(self) -> dict[str, Any]:
        """For --json."""
        return {
            "health_s": self.health.values,
            "idle_s": self.idle.values,
            "before_mb": self.memory.before_mb,
            "growth_mb": self.memory.growth_mb,
        }

    def __str__(self) -> str:
        growth = f"+{self.memory.growth_mb:.0f} MB"
        return f"/health/live {self.health} (an idle endpoint beside it: {self.idle}); {growth}"


WELL: Final = "p99 under 50 ms and max under 100 ms more than the idle endpoint's; +64 MB"


@contextmanager
def beside(endpoint: Server, idle: Server) -> Iterator[Beside]:
    """Watches all the while."""
    with memory_of(endpoint) as memory, health_of(endpoint) as health, health_of(idle) as its:
        yield Beside(health, its, memory)


@contextmanager
def endpoint_and_idle(
    subject: Subject, *options: str, extra_ms: float = 0.0, draft: Path | None = None, target: Path | None = None
) -> Iterator[tuple[Server, Server]]:
    """An endpoint with two keys over an emulated verifier, or over `target`, and an idle one. Every place has had a
    text.
    """
    with ExitStack() as stack:
        cloud = stack.enter_context(
            subject.emulated(STEP_MS, extra_ms) if target is None else subject.serve(bundle=target)
        )
        wide = ("--max-requests", str(2 * MAX_OWN), "--max-own", str(MAX_OWN), *options)
        endpoint = stack.enter_context(subject.endpoint(cloud.url, *wide, keys=KEYS, draft=draft))
        idle = stack.enter_context(subject.endpoint(cloud.url, *wide, keys=KEYS, draft=draft))
        warm_up(endpoint)
        yield endpoint, idle


def warm_up(endpoint: Server) -> None:
    """Fills all places of both clients once: memory that any use takes is not the attack's. Raises NotMeasured."""
    with (
        texts_of(endpoint, ATTACKER, MAX_OWN, 200) as ours,
        texts_of(endpoint, HONEST, MAX_OWN, 200) as theirs,
    ):
        streams = [*ours.streams, *theirs.streams]
        if not ours.wait(lambda: all(stream.is_over for stream in streams), 120.0):
            raise NotMeasured("the endpoint's first texts did not end within 120 s")
        if (refused := next((stream.refusal for stream in streams if stream.refusal), None)) is not None:
            raise NotMeasured(f"the endpoint refused its first texts: {refused}")
    endpoint.wait_until_idle()


def text_body(index: int, max_tokens: int = 800, **more: Any) -> dict[str, Any]:
    """A text as the page asks for it."""
    return {"prompt": f"def text_{index}(path):", "max_tokens": max_tokens, "seed": index, **more}


@contextmanager
def texts_of(
    endpoint: Server, key: str | None, count: int, max_tokens: int = 800, *, keeps: bool = False, **more: Any
) -> Iterator[Crowd]:
    """Texts of one client. keeps: those that end begin again."""
    bodies = [text_body(index, max_tokens, **more) for index in range(count)]
    with crowd_of(endpoint.port, bodies, key=key, path=GENERATE, keeps=keeps) as crowd:
        yield crowd


@contextmanager
def honest_texts(endpoint: Server, count: int = 2) -> Iterator[Crowd]:
    """Texts of the other client, all of which run. Raises NotMeasured."""
    with texts_of(endpoint, HONEST, count, keeps=True) as crowd:
        if not crowd.wait(lambda: crowd.num_running() >= count, 30.0):
            raise NotMeasured("the other client's texts did not run within 30 s")
        time.sleep(0.5)
        yield crowd
