"""Attacks on the drafts and the tokenizer that a server offers: paths that lead elsewhere, downloads that are not read,
greedy ones.

And on the device that pulls one: a draft that is larger than announced.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from bench.attacks.attackers import attacking, fetch, hold
from bench.attacks.false_verifiers import Ways, as_answer, hostile_server
from bench.attacks.probes import beside
from bench.attacks.subject import KEYS, NotMeasured, Row, Server, Subject, listed, seconds

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


def other_paths(subject: Subject) -> Iterator[Row]:
    """Asks for files beside the bundles, in every spelling, and for listed files that have become links."""
    ups = ("..", "%2e%2e", "..%2f..", "%252e%252e", "..%5c", "....//", "..;", "draft/..", "draft/%2e%2e", "draft/..%2f")
    paths = [f"/v1/drafts/{up}/secret.txt" for up in ups]
    paths += [
        f"/v1/drafts/draft/{name}" for name in ("unlisted.md", "%2fetc%2fpasswd", "/etc/passwd", "config.json%00")
    ]
    paths += ["/v1/drafts/draft/../../../../../../etc/passwd", "/v1/drafts/./draft/config.json", "/v1/drafts/draft/"]
    names = (
        "unlisted.md",
        "manifest.json",
        "openvino_model.bin",
        "%2fetc%2fpasswd",
        "/etc/passwd",
        "tokenizer.json%00",
    )
    paths += [f"/v1/tokenizer/{name}" for name in ("", *names, *(f"{up}/secret.txt" for up in ups))]
    paths += ["/v1/tokenizer/../../../../../../etc/passwd", "/v1/tokenizer/./tokenizer.json"]
    with _offering(subject) as (server, target, draft):
        answers = {path: server.ask("GET", path, key=KEYS[0]) for path in paths}
        for link, path in (
            (draft / "config.json", "/v1/drafts/draft/config.json"),
            (target / "tokenizer.json", TOKENIZER),
        ):
            link.unlink()
            link.symlink_to(link.parent.parent / "secret.txt")
            answers[f"a link in place of {path}"] = server.ask("GET", path, key=KEYS[0])
        answers |= {f"{path} without a key": server.ask("GET", path) for path in (PAD, TOKENIZER)}
    wrong = [path for path, answer in answers.items() if answer.status not in (400, 401, 404, 410) or not answer.json]
    leaked = [path for path, answer in answers.items() if SECRET in answer.body or b"root:" in answer.body]
    yield Row(
        "20",
        f"{len(answers)} ways to files that are not offered",
        f"{listed(leaked, 'leaked')}; {listed(wrong, 'not refused by name')}",
        "none leaked, all refused by name",
        not leaked and not wrong,
        {"statuses": {path: answer.status for path, answer in answers.items()}},
    )


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


def large_offers(subject: Subject) -> Iterator[Row]:
    """Has `outrider pull` take a draft of 1 byte whose files have 401 MB, and one whose file has no end."""
    files = {path.name: path.read_bytes() for path in subject.bundles[1].iterdir() if path.is_file()}
    announced = 401 * 10**6 - sum(map(len, files.values()))
    manifest = json.loads(files["manifest.json"])
    raw: dict[str, Any] = {}
    for what, pad, size_bytes in (("announced as 1 byte", announced, 1), ("a file without end", PAD_BYTES, None)):
        entry: dict[str, Any] = {"path": "pad.txt", "size": pad, "sha256": hashlib.sha256(bytes(pad)).hexdigest()}
        files["manifest.json"] = json.dumps({**manifest, "files": [*manifest["files"], entry]}).encode()
        found: list[dict[str, Any]] = [
            {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for path, data in sorted(files.items())
        ]
        listed_files = [*found, entry]
        total = sum(file["size"] for file in listed_files)
        draft = {
            "name": "draft", "model": "m", "device": "cpu", "runtime": "openvino", "precision": "int8",
            "size_bytes": size_bytes or total, "files": listed_files,
        }  # fmt: skip
        offered = {"model": "m", "target": "t", "tokenizer": manifest["tokenizer_fingerprint"], "drafts": [draft]}
        others = {f"/v1/drafts/draft/{path}": (_HEAD + data, b"") for path, data in files.items()}
        others |= {"/v1/drafts": (as_answer(offered), b""), PAD: (_HEAD, bytes(1 << 20))}
        with tempfile.TemporaryDirectory() as cache, hostile_server() as server:
            server.ways = Ways(b"", others=others)
            done = subprocess.run(
                [subject.own_python, "-m", "outrider.edge.cli", "pull", "--server", server.url, "--name", "draft"],
                env={**subject.environment, "OUTRIDER_CACHE": cache},
                capture_output=True,
                text=True,
                timeout=120.0,
            )
            on_disk = sum(path.stat().st_size for path in Path(cache).rglob("*") if path.is_file())
            num_files = sum(path.startswith("/v1/drafts/") for path in server.paths)
        raw[what] = {"status": done.returncode, "mb": on_disk / 1e6, "asked": num_files, "errors": done.stderr[-300:]}
        is_met = done.returncode == 2 and "Traceback" not in done.stderr
        is_met &= on_disk <= (total if size_bytes is None else 0) and (size_bytes is None or not num_files)
        yield Row(
            "15",
            f"`outrider pull` from a server that lies about a draft's size: {what}",
            f"exit {done.returncode}; {num_files} files asked for, {on_disk / 1e6:.0f} MB on the disk",
            "exit 2; none, 0 MB" if size_bytes else f"exit 2; {total / 1e6:.0f} MB, as announced",
            is_met,
            raw[what],
        )
