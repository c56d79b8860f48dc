"""Attacks by drafts: as many as a server takes, to one session."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from bench.attacks.attackers import attacking, draft_bytes, pipeline
from bench.attacks.crowd import crowd_of, prompt_of
from bench.attacks.rows import Row
from bench.attacks.subject import NotMeasured, Subject


def draft_flood(subject: Subject) -> Iterator[Row]:
    """Floods one session with drafts over four connections, in turn with not flooding; four others run meanwhile."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    with subject.emulated(step_ms=10.0) as server:
        for is_flooded in (False, True) * 2:
            server.wait_until_idle()
            bodies = [{"prompt": prompt_of(i), "max_tokens": 1500, "ignore_eos": True} for i in range(4)]
            with (
                crowd_of(server.port, bodies, keeps=True) as crowd,
                crowd_of(server.port, [{**bodies[0], "prompt": prompt_of(9), "patience_ms": 0}]) as flooded,
            ):
                session = flooded.streams[0]
                if not flooded.wait(lambda: bool(session.commits), 10.0):  # noqa: B023
                    raise NotMeasured("the session to flood had no token within 10 s")
                if not is_flooded:
                    rates[False].append(crowd.tokens_per_s(5.0))
                    continue
                block = draft_bytes(server.port, session.session) * 8
                with attacking(pipeline, server.port, block, 4, True):
                    rates[True].append(crowd.tokens_per_s(5.0))
    without, during = median(rates[False]), median(rates[True])
    yield Row(
        "10",
        "a flood of drafts to one session: four other sessions' tokens/s, step of 10 ms",
        f"{during:.0f}; without {without:.0f} ({without / max(during, 1e-9):.1f}x slower)",
        "at most 1.2x slower",
        1.2 * during >= without,
        {"tokens_per_s": {"without": rates[False], "during": rates[True]}},
    )
