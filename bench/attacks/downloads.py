"""Attacks by downloads of the drafts and the tokenizer that a server offers: such that are not read, greedy ones."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.attacks.attackers import attacking, fetch, hold
from bench.attacks.probes import beside
from bench.attacks.subject import KEYS, NotMeasured, Row, Server, Subject, seconds

PAD_BYTES: Final = 64 << 20
PAD: Final = "/v1/drafts/draft/pad.txt"
TOKENIZER_BYTES: Final = 32 << 20
TOKENIZER: Final = "/v1/tokenizer/tokenizer.json"
NUM_CONNECTIONS: Final = 64
ATTACK_S: Final = 10.0
_HEAD: Final = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
SECRET: Final = b"the file beside a bundle"


@contextmanager
def _offering(subject: Subject) -> Iterator[tuple[Server, Path, Path]]:
    """A server with keys that offers the reference draft, 64 MiB larger, and shares a tokenizer of 32 MiB; the target's
    place, and the draft's.
    """
    with tempfile.TemporaryDirectory() as directory:
        target, draft = Path(directory, "targets", "target"), Path(directory, "drafts", "draft")
        for place, source in zip((target, draft), subject.bundles, strict=True):
            shutil.copytree(source, place)
            (place / "unlisted.md").write_bytes(SECRET)
            (place.parent / "secret.txt").write_bytes(SECRET)
        _put(draft, "pad.txt", bytes(PAD_BYTES))
        # JSON may end with spaces: it stays the same tokenizer.
        _put(target, "tokenizer.json", (target / "tokenizer.json").read_bytes().ljust(TOKENIZER_BYTES))
        with subject.serve("--drafts", str(draft.parent), keys=KEYS, bundle=target) as server:
            for path in ("/v1/drafts", "/v1/tokenizer"):
                if server.ask("GET", path, key=KEYS[0]).status != 200:
                    raise NotMeasured(f"the server has no {path}")
            yield server, target, draft


def _put(bundle: Path, path: str, content: bytes) -> None:
    """Writes a file of the bundle, and its entry in the manifest."""
    (bundle / path).write_bytes(content)
    manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    entry = {"path": path, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["files"] = [*(each for each in manifest["files"] if each["path"] != path), entry]
    (bundle / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def unread_downloads(subject: Subject) -> Iterator[Row]:
    """One key asks for 64 MiB on 64 connections and reads nothing; another key downloads once."""
    yield from _beside(subject, f"{NUM_CONNECTIONS} downloads of one key that are never read", PAD, reads=False)


def unread_tokenizers(subject: Subject) -> Iterator[Row]:
    """The same with a tokenizer of 32 MiB."""
    what = f"{NUM_CONNECTIONS} downloads of a tokenizer by one key that are never read"
    yield from _beside(subject, what, TOKENIZER, reads=False)


def greedy_downloads(subject: Subject) -> Iterator[Row]:
    """One key downloads on 64 connections as fast as it can; another key downloads once."""
    yield from _beside(subject, f"{NUM_CONNECTIONS} greedy downloads of one key", PAD, reads=True)


def _beside(subject: Subject, what: str, path: str, *, reads: bool) -> Iterator[Row]:
    with _offering(subject) as (server, _, _), subject.serve(keys=KEYS) as idle:
        request, attack = server.request("GET", path, key=KEYS[0]), fetch if reads else hold
        with beside(server, idle) as seen, attacking(attack, server.port, request, NUM_CONNECTIONS):
            time.sleep(ATTACK_S / 2)
            other = server.ask("GET", PAD, key=KEYS[1], timeout_s=ATTACK_S)
            time.sleep(ATTACK_S / 2)
    is_whole = other.status == 200 and len(other.body) == PAD_BYTES
    yield Row(
        "21",
        f"{what}: another key's 64 MiB, /health/live, memory",
        f"{seconds(other.took_s) if is_whole else f'HTTP {other.status}'}; {seen}",
        f"whole within {ATTACK_S:g} s; p99 under 50 ms more than the idle server's; +64 MB",
        is_whole and seen.is_small and seen.is_steady,
        {"took_s": other.took_s, "status": other.status, **seen.raw},
    )
