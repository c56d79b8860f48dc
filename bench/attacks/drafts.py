"""Attacks by drafts: devices whose drafts come late, and as many drafts as a server takes."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.attacks.attackers import attacking, draft_bytes, pipeline
from bench.attacks.exchange import HOST
from bench.attacks.subject import Row, Server, Subject, prompt_of, rates_of, slowed
from bench.bare_http import Wire

from outrider.models.errors import CloudError
from outrider.models.wire.tree_draft import ROOT, TREE_MEDIA_TYPE, TreeDraft


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
    with subject.emulated(step_ms=10.0) as server:

        @contextmanager
        def flooded(is_flooded: bool) -> Iterator[None]:
            body = {"prompt": prompt_of(9), "max_tokens": 1500, "ignore_eos": True, "patience_ms": 0}
            with server.crowd([body]) as crowd:
                block = draft_bytes(server.port, crowd.running().session) * 8
                with attacking(pipeline, server.port, block, 4, True) if is_flooded else nullcontext():
                    yield

        yield slowed("10", "a flood of drafts to one session, step of 10 ms", rates_of(server, flooded))


def texts_of(server: Server, num_devices: int, num_tokens: int) -> list[tuple[list[int], list[int]]]:
    """The target's own texts, which its drafts are made from. The emulated model gives one prompt one text."""
    prompts = [prompt_of(i) for i in range(num_devices)]
    common = {"max_tokens": num_tokens, "ignore_eos": True, "patience_ms": 0}
    bodies = [{"prompt": prompt, **common} for prompt in prompts]
    with server.crowd(bodies) as crowd:
        what = f"the texts of {num_devices} sessions were not complete"
        crowd.require(what, lambda: all(len(s.tokens) == num_tokens for s in crowd.streams), 60.0)
        return [(prompt, stream.tokens) for prompt, stream in zip(prompts, crowd.streams, strict=True)]


@dataclass(frozen=True, slots=True)
class Devices:
    """texts: (prompt, the target's own text) of each device. patience_ms: 0 asks the server never to wait.

    A drafted token is right with probability `acceptance`. A device posts one message of `depth` tokens at a time.
    in_turns: each asks the server to wait for the next.
    """

    port: int
    texts: list[tuple[list[int], list[int]]]
    lag_s: float
    patience_ms: float | None
    acceptance: float = 0.7
    depth: int = 8
    in_turns: bool = False


def run_devices(report: Any, devices: Devices, settle_s: float, window_s: float) -> None:
    """Runs all of them; reports the tokens/s of the window that begins after `settle_s`."""
    counts: list[tuple[float, int]] = []

    async def all_devices() -> None:
        tasks = [asyncio.create_task(_device(devices, index, counts)) for index in range(len(devices.texts))]
        report.send("begun")
        await asyncio.sleep(settle_s)
        began_s = time.perf_counter()
        await asyncio.sleep(window_s)
        end_s = time.perf_counter()
        report.send(sum(n for at, n in counts if began_s <= at < end_s) / (end_s - began_s))
        for task in tasks:
            task.cancel()

    asyncio.run(all_devices())


async def _device(devices: Devices, index: int, counts: list[tuple[float, int]]) -> None:
    prompt, text = devices.texts[index]
    rng = random.Random(index)
    is_right = [rng.random() < devices.acceptance for _ in text]
    guess = [token if right else token % 4000 + 1 for token, right in zip(text, is_right, strict=True)]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": len(text), "ignore_eos": True}
    body["draft_lag_ms"] = devices.lag_s * 1e3
    if devices.patience_ms is not None:
        body["patience_ms"] = devices.patience_ms
    while True:
        with suppress(OSError, CloudError):
            await _session(devices, body, text, guess, counts)


async def _session(
    devices: Devices, body: dict[str, Any], text: list[int], guess: list[int], counts: list[tuple[float, int]]
) -> None:
    """One session to its end."""
    url = f"http://{HOST}:{devices.port}"
    session, drafter = "", None
    async with Wire(url) as stream, Wire(url) as up:
        await stream.post("/v1/sessions", body)
        while (event := await stream.event()) is not None and event.get("type") != "end":
            session = event.get("session", session)
            if event.get("type") == "open":
                continue
            base = event["base"] + len(event["tokens"])
            counts.append((time.perf_counter(), len(event["tokens"])))
            if drafter is None or drafter.done():
                # The next tokens as the device guesses them: the target's own up to the first wrong one.
                right = text[base : base + devices.depth]
                own = guess[base : base + devices.depth]
                at = next((at for at, token in enumerate(right) if own[at] != token), len(right))
                if path := right[:at] + own[at:]:
                    drafter = asyncio.create_task(_post_late(devices, session, base, path, up))
        if drafter is not None:
            drafter.cancel()


async def _post_late(devices: Devices, session: str, base: int, path: list[int], up: Wire) -> None:
    await asyncio.sleep(devices.lag_s)
    place = f"/v1/sessions/{session}/drafts"
    with suppress(OSError, asyncio.IncompleteReadError):
        if devices.in_turns:  # numbers of their own: at most so many tokens after each base
            numbers = range(base * devices.depth, base * devices.depth + len(path))
            tree = TreeDraft(base, numbers[0], path, [ROOT, *numbers[:-1]], [13] * len(path), is_turn=True)
            await up.post(place, tree.encode(), TREE_MEDIA_TYPE)
        else:
            await up.post(place, {"base": base, "paths": [path]})
        await up.answer()
