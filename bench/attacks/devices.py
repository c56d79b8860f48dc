"""Emulates devices whose drafts arrive a fixed time after the commits that they follow, in a process of its own."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bench.attacks.exchange import HOST
from bench.bare_http import Wire

from outrider.models.errors import CloudError
from outrider.models.wire.tree_draft import ROOT, TREE_MEDIA_TYPE, TreeDraft


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
