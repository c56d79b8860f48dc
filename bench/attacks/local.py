"""Runs the local endpoint over an emulated verifier, and honest texts of another client beside an attack."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from bench.attacks.subject import KEYS, Crowd, NotMeasured, Server, Subject

CHAT: Final = "/v1/chat/completions"
GENERATE: Final = "/v1/outrider/generate"
VERIFY: Final = "/v1/outrider/verify"
ATTACKER, HONEST = KEYS
STEP_MS: Final = 20.0
MAX_OWN: Final = 8
PLACES: Final = ("--max-requests", str(2 * MAX_OWN), "--max-own", str(MAX_OWN))
MIN_RATE: Final = 0.8
"""Of another client's tokens/s, without the attack."""


WELL: Final = "p99 under 50 ms and max under 100 ms more than the idle endpoint's; +64 MB"


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
        endpoint, idle = (
            stack.enter_context(subject.endpoint(cloud.url, *PLACES, *options, keys=KEYS, draft=draft))
            for _ in range(2)
        )
        warm_up(endpoint)
        yield endpoint, idle


def warm_up(endpoint: Server) -> None:
    """Fills all places of both clients once: memory that any use takes is not the attack's. Raises NotMeasured."""
    with (
        texts_of(endpoint, ATTACKER, MAX_OWN, 200) as ours,
        texts_of(endpoint, HONEST, MAX_OWN, 200) as theirs,
    ):
        streams = [*ours.streams, *theirs.streams]
        ours.require("the endpoint's first texts did not end", lambda: all(stream.is_over for stream in streams), 120.0)
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
    with endpoint.crowd(bodies, key=key, path=GENERATE, keeps=keeps) as crowd:
        yield crowd


@contextmanager
def honest_texts(endpoint: Server, count: int = 2) -> Iterator[Crowd]:
    """Texts of the other client, all of which run. Raises NotMeasured."""
    with texts_of(endpoint, HONEST, count, keeps=True) as crowd:
        crowd.require("the other client's texts did not run", lambda: crowd.num_running() >= count, 30.0)
        time.sleep(0.5)
        yield crowd
