"""Attacks on a cascade: a target's verifier that stops in mid-text."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any, Final

from bench.attacks.probes import MAX_HEALTH_S, health_of
from bench.attacks.subject import KEYS, Crowd, NotMeasured, Row, Subject, prompt_of

NUM_TEXTS: Final = 32
STOPPED_S: Final = 5.0


def cascades(subject: Subject) -> Iterator[Row]:
    """A mid before a target, both of the reference bundle."""
    with subject.serve() as target, subject.serve("--upstream", target.url, keys=KEYS) as mid:
        # Sampled: a greedy text may repeat itself, is drafted from itself, and is over before the last has begun.
        texts: dict[str, Any] = {"max_tokens": 900, "temperature": 1.0, "ignore_eos": True}
        bodies = [{"prompt": prompt_of(10 + i, 20), "seed": i, **texts} for i in range(NUM_TEXTS)]
        with mid.crowd(bodies, key=KEYS[0]) as crowd:
            if not crowd.wait(lambda: crowd.num_running() == NUM_TEXTS, 60.0):
                raise NotMeasured(f"{crowd.num_running()} of {NUM_TEXTS} texts ran at once, {_ends(crowd)}")
            target.signal(signal.SIGSTOP)
            try:
                time.sleep(0.5)  # what was on its way has arrived
                before = crowd.num_commits()
                with health_of(mid) as latency:
                    crowd.wait(lambda: False, STOPPED_S)
                after = crowd.num_commits()
            finally:
                target.signal(signal.SIGCONT)
            resumed = crowd.wait(lambda: crowd.num_commits() > after, 60.0)
            ends = _ends(crowd)
    p99 = latency.high
    yield Row(
        "39",
        f"{NUM_TEXTS} texts whose target stops for {STOPPED_S:g} s: GET /health/live of the mid-size verifier, and "
        "what is committed",
        f"p99 {p99 * 1e3:.0f} ms; {after - before} commits meanwhile; goes on: {'yes' if resumed else 'no'}",
        f"under {MAX_HEALTH_S * 1e3:.0f} ms, 0 commits, goes on",
        p99 < MAX_HEALTH_S and after == before and resumed,
        {"p99_s": p99, "commits": after - before, "resumed": resumed, "ends": ends},
    )


def _ends(crowd: Crowd) -> str:
    """How the texts ended so far."""
    refusals = sorted({stream.refusal for stream in crowd.streams if stream.refusal})
    return f"{sum(stream.is_over for stream in crowd.streams)} are over; refused: {refusals}"
