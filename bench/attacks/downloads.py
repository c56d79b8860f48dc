"""Attacks by downloads of the drafts and the tokenizer that a server offers: such that are not read, greedy ones."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.attacks.attackers import attacking, fetch, hold
from bench.attacks.probes import beside
from bench.attacks.subject import KEYS, NotMeasured, Row, Subject, seconds
from bench.changed_bundle import change_bundle

PAD_BYTES: Final = 64 << 20
PAD: Final = "/v1/drafts/draft/pad.txt"
TOKENIZER_BYTES: Final = 32 << 20
NUM_CONNECTIONS: Final = 64
ATTACK_S: Final = 10.0


def downloads(subject: Subject) -> Iterator[Row]:
    """One key downloads on 64 connections; another key downloads once. The server offers the reference draft, 64 MiB
    larger, and shares a tokenizer of 32 MiB.
    """
    target, draft = subject.bundles
    # JSON may end with spaces: it stays the same tokenizer.
    tokenizer = (target / "tokenizer.json").read_bytes().ljust(TOKENIZER_BYTES)
    with tempfile.TemporaryDirectory() as place:
        change_bundle(draft, Path(place, "drafts", "draft"), files={"pad.txt": bytes(PAD_BYTES)})
        padded = change_bundle(target, Path(place, "target"), files={"tokenizer.json": tokenizer}).path
        for what, path, attack in (
            ("downloads that are never read", PAD, hold),
            ("downloads of a tokenizer that are never read", "/v1/tokenizer/tokenizer.json", hold),
            ("greedy downloads", PAD, fetch),
        ):
            with (
                subject.serve("--drafts", str(Path(place, "drafts")), keys=KEYS, bundle=padded) as server,
                subject.serve(keys=KEYS) as idle,
            ):
                if server.ask("GET", path, key=KEYS[0]).status != 200:
                    raise NotMeasured(f"the server has no {path}")
                request = server.request("GET", path, key=KEYS[0])
                with beside(server, idle) as seen, attacking(attack, server.port, request, NUM_CONNECTIONS):
                    time.sleep(ATTACK_S / 2)
                    other = server.ask("GET", PAD, key=KEYS[1], timeout_s=ATTACK_S)
                    time.sleep(ATTACK_S / 2)
            is_whole = other.status == 200 and len(other.body) == PAD_BYTES
            yield Row(
                "21",
                f"{NUM_CONNECTIONS} {what}, of one key: another key's 64 MiB, /health/live, memory",
                f"{seconds(other.took_s) if is_whole else f'HTTP {other.status}'}; {seen}",
                f"whole within {ATTACK_S:g} s; p99 under 50 ms more than the idle server's; +64 MB",
                is_whole and seen.is_small and seen.is_steady,
                {"took_s": other.took_s, "status": other.status, **seen.raw},
            )
