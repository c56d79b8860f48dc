"""Attacks in mid-text: the server goes, and another model, or nothing, answers in its place."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from bench.attacks.agents import agent
from bench.attacks.subject import NotMeasured, Row, Server, Subject, seconds

_PROMPT: Final = "def walk(path):"
_TEXT: Final = ("--mode", "cloud-only", "--temperature", "0", "--ignore-eos", "--max-tokens", "500", "--", _PROMPT)
BEGUN: Final = 150
"""Bytes of text after which a server is killed or stopped; the whole is some thousands."""
NOTICED_S: Final = 16.5
CAP_S: Final = 25.0


def another_model(subject: Subject) -> Iterator[Row]:
    """Serves two models with one tokenizer, kills the first in mid-text, and reads what the agent prints."""
    with tempfile.TemporaryDirectory() as place:
        other = other_model(subject.bundles[0], Path(place))
        with subject.serve() as first, subject.serve(bundle=other) as second, subject.serve() as same:
            found = {name: _targets(server) for name, server in (("first", first), ("other", second), ("same", same))}
            missing = sorted(name for name, value in found["first"].items() if value is None)
            differs = found["first"] != found["other"] and not missing
            agrees = found["first"] == found["same"]
            yield Row(
                "12",
                "`target` in open, verify answers and readiness",
                f"missing in {', '.join(missing)}"
                if missing
                else f"another model's {'differs' if differs else 'is the same'}, the same model's "
                f"{'is the same' if agrees else 'differs'}",
                "in all three; differs for another model; the same for the same",
                not missing and differs and agrees and len(set(found["first"].values())) == 1,
                found,
            )
            whole = {name: _whole_text(subject, server) for name, server in (("first", first), ("other", second))}
            if whole["first"] == whole["other"]:
                raise NotMeasured("the altered model gives the same text, so a change of models would not show")
            text, status, errors, printed = _killed(subject, first, second)
        is_own = whole["first"].startswith(text)
        yield Row(
            "12",
            "the first of two endpoints is killed in mid-text, the second serves another model",
            f"exit {status}, {'only the first' if is_own else 'also the other'} model's text"
            + (f": {errors[-160:]}" if status else ""),
            "an error; no text of the other model",
            is_own and status not in (0, None),
            {"status": status, "errors": errors, "printed": printed},
        )
        with subject.serve() as first, subject.serve() as same:
            text, status, errors, _ = _killed(subject, first, same)
        yield Row(
            "12",
            "the same, the second serves the same model",
            f"exit {status}, the text is {'the same' if text == whole['first'] else 'not the same'}",
            "exit 0, the same text",
            status == 0 and text == whole["first"],
            {"status": status, "errors": errors},
        )


def stopped_server(subject: Subject) -> Iterator[Row]:
    """Stops the first of two equal servers with SIGSTOP in mid-text; its connections stay open."""
    with subject.serve() as first, subject.serve() as second:
        urls = ("--cloud", first.url, "--cloud", second.url)
        with agent(subject, *urls, *_TEXT) as running:
            if not running.wait(lambda: len(running.text) >= BEGUN, 60.0):
                raise NotMeasured(f"no text within 60 s: {running.errors[-300:]!r}")
            first.signal(signal.SIGSTOP)
            stopped_s, before = time.monotonic(), 0
            while before != len(running.text):  # what was under way arrives
                before = len(running.text)
                time.sleep(0.3)
            noticed = running.wait(lambda: len(running.text) > before or bool(running.errors), CAP_S)
            took_s = time.monotonic() - stopped_s if noticed else None
            goes_on = running.wait(lambda: len(running.text) > before, 10.0)
            first.signal(signal.SIGCONT)
    yield Row(
        "13",
        "the server is stopped (SIGSTOP) in mid-text: noticed after",
        seconds(took_s, CAP_S) + (", then the text goes on at the second server" if goes_on else ""),
        seconds(NOTICED_S),
        took_s is not None and took_s <= NOTICED_S and goes_on,
        {"took_s": took_s, "goes_on": goes_on},
    )


def _killed(subject: Subject, first: Server, second: Server) -> tuple[bytes, int | None, str, int]:
    """The agent's text, exit status and errors, when `first` is killed in mid-text; how much was printed by then."""
    with agent(subject, "--cloud", first.url, "--cloud", second.url, *_TEXT) as running:
        if not running.wait(lambda: len(running.text) >= BEGUN, 60.0):
            raise NotMeasured(f"no text within 60 s: {running.errors[-300:]!r}")
        first.kill()
        printed = len(running.text)
        status = running.finish(60.0)
        return _joined(running.text), status, " ".join(running.errors.decode(errors="replace").split()), printed


def _whole_text(subject: Subject, server: Server) -> bytes:
    with agent(subject, "--cloud", server.url, *_TEXT) as running:
        if running.finish(120.0) != 0:
            raise NotMeasured(f"the agent failed: {running.errors[-300:]!r}")
        return _joined(running.text)


def _joined(text: bytes) -> bytes:
    """The text without its line ends: a message on the way ends the line."""
    return text.replace(b"\n", b"")


def _targets(server: Server) -> dict[str, Any]:
    """The target's identity in each answer that should carry it."""
    body = {"prompt": [1, 2, 3], "max_tokens": 1}
    opened = server.ask("POST", "/v1/sessions", body).body.partition(b"data: ")[2].partition(b"\n")[0]
    verified = server.ask("POST", "/v1/verify", {"items": [{"prefix": [1, 2, 3]}]}).json
    return {
        "open": json.loads(opened).get("target"),
        "verify": verified.get("target") or (verified.get("results") or [{}])[0].get("target"),
        "ready": server.ask("GET", "/health/ready").json.get("target"),
    }


def other_model(bundle: Path, place: Path) -> Path:
    """A copy of the bundle with the sign of some weights turned, and a manifest that fits: a different model."""
    other = place / "other"
    shutil.copytree(bundle, other)
    weights = next(path for path in sorted(other.iterdir()) if path.suffix in (".bin", ".safetensors"))
    data = bytearray(weights.read_bytes())
    values = np.frombuffer(data, "<f4", count=len(data) // 4)
    middle = values[values.size // 3 : values.size // 2]
    # Only what looks like a weight: the file also holds shapes and indices.
    looks_real = (np.abs(middle) > 1e-4) & (np.abs(middle) < 1.0)
    middle[looks_real] *= -1.0
    weights.write_bytes(data)
    path = other / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    for entry in manifest["files"]:
        if entry["path"] == weights.name:
            entry["sha256"] = hashlib.sha256(data).hexdigest()
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return other
