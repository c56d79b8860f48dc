"""Attacks by drafts: hints of a long lag, devices whose drafts come late, and as many drafts as a server takes."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from bench.attacks.attackers import attacking, draft_bytes, pipeline
from bench.attacks.devices import Devices, run_devices
from bench.attacks.subject import Row, Server, Subject, middle, prompt_of, seconds

CAP_S = 20.0
LONG = 300
"""Tokens of a session, which is opened again at its end: 33 of them fit the emulated cache."""


def long_hints(subject: Subject) -> Iterator[Row]:
    """Opens 33 sessions that say that their drafts take a minute, and send none."""
    took: dict[str, list[float | None]] = {"hint": [], "none": []}
    with subject.emulated(step_ms=10.0) as server:
        for _ in range(2):
            for kind, hint in (("none", {}), ("hint", {"draft_lag_ms": 60_000})):
                server.wait_until_idle()
                bodies = [{"prompt": prompt_of(i), "max_tokens": LONG, "ignore_eos": True, **hint} for i in range(33)]
                with server.crowd(bodies, keeps=True) as crowd:
                    for i in range(3):
                        # Sessions end together and are opened again; a newcomer between would find free places.
                        crowd.require("32 of 33 sessions did not run", lambda: crowd.num_running() >= 32, 30.0)
                        took[kind].append(server.first_token_s({"prompt": prompt_of(100 + i)}, CAP_S))
                        if took[kind][-1] is None:
                            break
    hinted, plain = (middle(took[kind], CAP_S) for kind in ("hint", "none"))
    shown = seconds(hinted if hinted < CAP_S else None, CAP_S)
    yield Row(
        "1",
        "33 sessions with draft_lag_ms 60000 and no drafts: a newcomer's first token",
        f"{shown}; beside 33 sessions without hints {seconds(plain)}",
        "at most 2x (and one step)",
        hinted < CAP_S and hinted <= 2.0 * plain + 0.01,
        {"first_token_s": took},
    )


def late_drafts(subject: Subject) -> Iterator[Row]:
    """Serves 40 devices on 32 places, with drafts 200 ms late: waiting as the server likes, as devices in turns ask
    for, and not waiting.
    """
    kinds = {"never waits": (0.0, False), "auto": (None, False), "turns": (None, True)}
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    with subject.emulated(step_ms=20.0) as server:
        texts = texts_of(server, 40, 200)
        for _ in range(2):
            for kind, (patience_ms, in_turns) in kinds.items():
                server.wait_until_idle()
                devices = Devices(server.port, texts, 0.2, patience_ms, in_turns=in_turns)
                with attacking(run_devices, devices, 2.0, 8.0) as reports:
                    rates[kind].append(reports.recv())
    never = median(rates["never waits"])
    for kind, asked in (("auto", "under auto"), ("turns", "each asks in its drafts to be waited for")):
        rate = median(rates[kind])
        yield Row(
            "2",
            f"40 devices on 32 places, drafts 200 ms late, flat step of 20 ms: tokens/s, {asked}",
            f"{rate:.0f}; not waiting {never:.0f} ({rate / never:.2f}x)",
            "at least 0.95x of not waiting",
            rate >= 0.95 * never,
            {"tokens_per_s": rates},
        )


def draft_flood(subject: Subject) -> Iterator[Row]:
    """Floods one session with drafts over four connections, in turn with not flooding; four others run meanwhile."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    with subject.emulated(step_ms=10.0) as server:
        for is_flooded in (False, True) * 2:
            server.wait_until_idle()
            bodies = [{"prompt": prompt_of(i), "max_tokens": 1500, "ignore_eos": True} for i in range(4)]
            with (
                server.crowd(bodies, keeps=True) as crowd,
                server.crowd([{**bodies[0], "prompt": prompt_of(9), "patience_ms": 0}]) as flooded,
            ):
                session = flooded.running()
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


def texts_of(server: Server, num_devices: int, num_tokens: int) -> list[tuple[list[int], list[int]]]:
    """The target's own texts, which its drafts are made from. The emulated model gives one prompt one text."""
    prompts = [prompt_of(i) for i in range(num_devices)]
    common = {"max_tokens": num_tokens, "ignore_eos": True, "patience_ms": 0}
    bodies = [{"prompt": prompt, **common} for prompt in prompts]
    with server.crowd(bodies) as crowd:
        what = f"the texts of {num_devices} sessions were not complete"
        crowd.require(what, lambda: all(len(s.tokens) == num_tokens for s in crowd.streams), 60.0)
        return [(prompt, stream.tokens) for prompt, stream in zip(prompts, crowd.streams, strict=True)]
