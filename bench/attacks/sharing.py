"""Attacks by long prompts and large calls, and by the clock on what a server keeps of another key. That places, queues
and priorities are shared is said by tests of the engine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from statistics import median

from bench.attacks.attackers import attacking, received, repeat
from bench.attacks.subject import (
    COMPLETIONS,
    KEYS,
    OTHER_ADDRESS,
    Answer,
    NotMeasured,
    Row,
    Server,
    Subject,
    percentile,
    prompt_of,
    seconds,
)

CAP_S = 20.0
STEP_MS = 20.0
_LENGTH = 800
"""Tokens of a prompt: long enough that its prefill shows."""


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
    """Has six callers send 256 items each, in a loop; another owner verifies and completes meanwhile."""
    with subject.emulated(STEP_MS) as server:
        alone = [_small(server, i).took_s for i in range(10)]
        calls = [_call(server, seed) for seed in range(10, 34)]
        began_s, served, steps = time.perf_counter(), list[float](), _steps(server)
        with attacking(repeat, server.port, calls, 6, 120.0) as reports:
            time.sleep(0.5)
            while time.perf_counter() - began_s < 20.0:
                answer = _small(server, len(served))
                served.append(answer.took_s if answer.status == 200 else CAP_S)
            step_s = (time.perf_counter() - began_s) / max(1, _steps(server) - steps)
            statuses = set(received(reports))
    limit_s = 3.0 * median(alone) + max(step_s, STEP_MS / 1e3)
    yield Row(
        "5",
        "six callers of 256 items on /v1/verify in a loop: another owner's single verify or completion",
        f"median {seconds(median(served))}, longest {seconds(max(served))}, of {len(served)} in 20 s",
        f"3x alone ({seconds(median(alone))}) and a step: {seconds(limit_s)}",
        median(served) <= limit_s and statuses == {200},
        {"alone_s": alone, "took_s": served, "statuses": sorted(statuses)},
    )


def _call(server: Server, seed: int) -> bytes:
    """A call of 256 items of 48 tokens, none of which any cache holds."""
    rng = random.Random(seed)
    items = [{"prefix": [rng.randrange(1, 4000) for _ in range(48)]} for _ in range(256)]
    return server.request("POST", "/v1/verify", {"items": items})


def _small(server: Server, index: int) -> Answer:
    """The other owner's request: a verify and a completion in turn, of one token each."""
    prompt = prompt_of(10_000 + index + int(time.perf_counter() * 1e3))
    path, body = COMPLETIONS, {"prompt": prompt, "max_tokens": 1}
    if index % 2:
        path, body = "/v1/verify", {"items": [{"prefix": prompt}]}
    return server.ask_in_time("POST", path, body, CAP_S, address=OTHER_ADDRESS)


def _steps(server: Server) -> int:
    """Steps of the engine so far; 0 where /metrics does not count them."""
    return int(sum(server.metrics("outrider_engine_steps_total")))


def others_prompts(subject: Subject) -> Iterator[Row]:
    """Asks with one key whether another key's prompt was seen before."""
    took: dict[str, list[float]] = {"fresh": [], "seen": []}
    with subject.serve(keys=KEYS) as server:
        for i in range(7):
            seen, fresh = prompt_of(100 + i, _LENGTH), prompt_of(200 + i, _LENGTH)
            server.complete({"prompt": seen, "max_tokens": 1}, KEYS[0])
            for kind, tokens in (("fresh", fresh), ("seen", seen)):
                found = server.first_token_s({"prompt": tokens}, 10.0, key=KEYS[1])
                if found is None:
                    raise NotMeasured(f"a prompt of {_LENGTH} tokens had no first token after 10 s")
                took[kind].append(found)
    share = median(took["seen"]) / median(took["fresh"])
    yield Row(
        "4",
        f"another key's prompt of {_LENGTH} tokens: time to first token",
        f"{seconds(median(took['seen']))}; a fresh prompt {seconds(median(took['fresh']))} ({share:.2f}x)",
        "0.7x to 1.4x of a fresh prompt",
        0.7 <= share <= 1.4,
        {"took_s": took},
    )
