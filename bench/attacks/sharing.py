"""Attacks by long sessions and large calls: does a newcomer get a place, and an owner its share."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from bench.attacks.attackers import attacking, once, repeat
from bench.attacks.subject import (
    COMPLETIONS,
    HOST,
    OTHER_ADDRESS,
    Answer,
    Row,
    Server,
    Subject,
    middle,
    percentile,
    prompt_of,
    seconds,
)

CAP_S = 20.0
STEP_MS = 20.0
LONG: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True}
PATIENT_S = 60.0


def long_sessions(subject: Subject) -> Iterator[Row]:
    """Keeps 32 long sessions open, which fill all places of a step; newcomers come from here and from elsewhere."""
    with subject.emulated(STEP_MS) as server:
        for what, address in (("the same owner's", HOST), ("another owner's", OTHER_ADDRESS)):
            server.wait_until_idle()
            alone = [server.first_token_s({"prompt": prompt_of(200 + i)}, CAP_S) for i in range(3)]
            with server.crowd([{"prompt": prompt_of(i), **LONG} for i in range(32)], keeps=True) as crowd:
                took: list[float | None] = []
                for i in range(3):
                    # Sessions end together and are opened again; a newcomer between would find free places.
                    crowd.require("32 sessions did not all run", lambda: crowd.num_running() >= 32, 30.0)
                    took.append(server.first_token_s({"prompt": prompt_of(100 + i)}, CAP_S, address=address))
                step_s = median(crowd.gaps_s())
            limit_s = 10.0 * step_s + middle(alone, CAP_S)
            found = middle(took, CAP_S)
            yield Row(
                "3",
                f"beside 32 long sessions: {what} newcomer's first token",
                seconds(found if found < CAP_S else None, CAP_S),
                f"10 steps of {step_s * 1e3:.0f} ms, and the time alone: {seconds(limit_s)}",
                found < CAP_S and found <= limit_s,
                {"took_s": took, "alone_s": alone, "step_s": step_s},
            )


def unequal_owners(subject: Subject) -> Iterator[Row]:
    """Gives one owner 64 sessions and another two.

    The two need 2 of 32 places, less than half, so they should run nearly as if alone; a step with 32 sequences takes
    somewhat longer than one with two, hence half the speed is enough.
    """
    few = [{"prompt": prompt_of(100 + i), **LONG} for i in range(2)]
    with subject.emulated(STEP_MS) as server:
        with server.crowd(few, keeps=True, address=OTHER_ADDRESS) as crowd:
            crowd.wait(lambda: all(s.commits for s in crowd.streams), CAP_S)
            alone = crowd.tokens_per_s(3.0)
        server.wait_until_idle()
        many = [{"prompt": prompt_of(i), **LONG} for i in range(64)]
        with server.crowd(many, keeps=True) as crowd:
            crowd.wait(lambda: sum(bool(s.commits) for s in crowd.streams) >= 32, CAP_S)
            with server.crowd(few, keeps=True, address=OTHER_ADDRESS) as others:
                beside = others.tokens_per_s(10.0)
    yield Row(
        "3",
        "an owner with 2 sessions beside one with 64: its tokens/s",
        f"{beside:.0f}; alone {alone:.0f} ({beside / alone:.2f}x)",
        "at least 0.5x of alone",
        beside >= 0.5 * alone,
        {"alone": alone, "beside": beside},
    )


def long_prompts(subject: Subject) -> Iterator[Row]:
    """Sends fresh prompts of 1,000 tokens, four at a time, for one token each; another owner's text runs meanwhile.

    Emulated, each token of a step after the first takes 0.5 ms: prompts that fill steps of 256 make them last 133 ms.
    """
    with subject.emulated(6.0, 0.5) as server:
        yield _beside_prompts(server, "emulated steps of 6 ms and 0.5 ms a token")
    with subject.serve() as server:
        yield _beside_prompts(server, "the reference target")


def _beside_prompts(server: Server, what: str) -> Row:
    gaps: dict[str, list[float]] = {}
    prompts = [
        server.request("POST", COMPLETIONS, {"prompt": prompt, "max_tokens": 1})
        for prompt in (prompt_of(50_000 + i, 1000) for i in range(400))
    ]
    for phase, attack in (("alone", []), ("beside", prompts)):
        server.wait_until_idle()
        # Another prompt each time: a text that was written before is drafted from.
        text = {"prompt": prompt_of(len(gaps)), "max_tokens": 1000, "ignore_eos": True}
        with server.crowd([text], address=OTHER_ADDRESS) as crowd:
            crowd.require("the text had no token", lambda: crowd.num_running() == 1, CAP_S)
            if attack:
                with attacking(repeat, server.port, attack, 4, 120.0):
                    crowd.wait(lambda: not crowd.num_running(), 8.0)
            else:
                crowd.wait(lambda: not crowd.num_running(), 4.0)
            gaps[phase] = crowd.gaps_s()[20:]
    alone, beside, worst = median(gaps["alone"]), median(gaps["beside"]), percentile(gaps["beside"], 0.99)
    limit_s = 2 * alone + 0.005
    return Row(
        "42",
        f"four fresh prompts of 1,000 tokens at a time, {what}: gaps between another owner's tokens",
        f"median {seconds(beside)}, p99 {seconds(worst)}; alone {seconds(alone)}",
        f"median 2 steps: {seconds(limit_s)}; p99 half as much again",
        beside <= limit_s and worst <= 1.5 * limit_s,
        {"gaps_s": gaps},
    )


def large_verify_calls(subject: Subject) -> Iterator[Row]:
    """Sends 4 calls of 256 items at once, then six callers loop; another owner verifies and completes meanwhile."""
    with subject.emulated(STEP_MS) as server:
        alone = [_small(server, i).took_s for i in range(10)]
        begun_s, steps = time.perf_counter(), _steps(server)
        calls = [_call(server, seed) for seed in range(4)]
        during: list[float] = []
        with attacking(once, server.port, calls, 120.0) as reports:
            while not reports.poll() and (not during or sum(during) < CAP_S):
                during.append(_small(server, len(during)).took_s)
            whole_s, statuses = reports.recv()
        step_s = (time.perf_counter() - begun_s) / max(1, _steps(server) - steps)
        limit_s = 3.0 * median(alone) + max(step_s, STEP_MS / 1e3)
        yield Row(
            "5",
            "4 x 256 items on /v1/verify: another owner's single verify or completion",
            f"median {seconds(median(during))}, longest {seconds(max(during))}; the calls took {seconds(whole_s)}",
            f"3x alone ({seconds(median(alone))}) and a step: {seconds(limit_s)}",
            median(during) <= limit_s and set(statuses) == {200},
            {"alone_s": alone, "during_s": during, "statuses": statuses},
        )
        server.wait_until_idle(60.0)
        began_s, served = time.perf_counter(), list[float]()
        calls = [_call(server, seed) for seed in range(10, 34)]
        with attacking(repeat, server.port, calls, 6, 120.0):
            time.sleep(0.5)
            while time.perf_counter() - began_s < 10.0:
                answer = _small(server, len(served), timeout_s=CAP_S)
                served.append(answer.took_s if answer.status == 200 else CAP_S)
        yield Row(
            "5",
            "six callers of 256 items in a loop: another owner's single verify or completion",
            f"median {seconds(median(served))}, longest {seconds(max(served))}, of {len(served)} in 10 s",
            f"as above: {seconds(limit_s)}",
            median(served) <= limit_s,
            {"took_s": served},
        )


def _call(server: Server, seed: int) -> bytes:
    """A call of 256 items of 48 tokens, none of which any cache holds."""
    rng = random.Random(seed)
    items = [{"prefix": [rng.randrange(1, 4000) for _ in range(48)]} for _ in range(256)]
    return server.request("POST", "/v1/verify", {"items": items})


def _small(server: Server, index: int, timeout_s: float = PATIENT_S) -> Answer:
    """The other owner's request: a verify and a completion in turn, of one token each."""
    prompt = prompt_of(10_000 + index + int(time.perf_counter() * 1e3))
    path, body = COMPLETIONS, {"prompt": prompt, "max_tokens": 1}
    if index % 2:
        path, body = "/v1/verify", {"items": [{"prefix": prompt}]}
    return server.ask_in_time("POST", path, body, timeout_s, address=OTHER_ADDRESS)


def _steps(server: Server) -> int:
    """Steps of the engine so far; 0 where /metrics does not count them."""
    return int(sum(server.metrics("outrider_engine_steps_total")))
