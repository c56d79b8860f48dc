"""Sends generated requests to a server, from its own OpenAPI document, and judges every answer.

    python -m bench.fuzz_api [--max-examples 40]

schemathesis makes the requests (`pip install "schemathesis>=4.32,<5"`): examples, every boundary of every schema,
random valid and invalid ones, and chains. They are the same in every run. The server is real, its model is the tests'
fake. The second pass sends drafts to a session that stays open, and asks for the files of an offered draft. Exits 1 on
an answer 5xx, on an operation of the document that got no request, or on a finding that is not in EXPLAINED.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer
from rich.console import Console
from tests.drafts import make_draft
from tests.fake_runtime import FakeBatchRuntime
from tests.serving import StepGate, fake_tokenizer, read_events, serve_fake

from outrider.cloud.api.state import ServerSettings
from outrider.models.http.security import KeyRing
from outrider.models.wire.protocol import SessionOpen

console = Console()
KEY: Final = "a-key-for-the-fuzzer"
DRAFT, DRAFT_FILE = "cpu-int8", "openvino_model.bin"
MAX_POSITIONS: Final = 256
MIN_REQUESTS: Final = 2000
SERVER_ERROR: Final = "not_a_server_error"


@dataclass(frozen=True)
class Explained:
    """A finding that is no fault: the check that reports it, the error that the server gave, and why it is right."""

    check: str
    code: str
    message: str
    reason: str


EXPLAINED: Final = (
    Explained(
        "positive_data_acceptance",
        "token_out_of_range|context_length_exceeded|empty_prompt|no_chat_template",
        "",
        "the document holds for every model: it knows no vocabulary, context length, tokenizer or chat template",
    ),
    Explained(
        "positive_data_acceptance",
        "draft_ahead",
        "",
        "the document does not know how many tokens a session has committed",
    ),
    Explained(
        "positive_data_acceptance",
        "invalid_parameter",
        "Input should be a valid integer$",
        "JSON Schema takes 1.0 for an integer; the server does not, and neither does OpenAI's",
    ),
    Explained(
        "negative_data_rejection",
        "items",
        "",
        "a call of /v1/verify whose items fail with different statuses is answered; each item has its error",
    ),
    Explained(
        SERVER_ERROR,
        "deadline_exceeded",
        "",
        "504: the request's own `deadline_ms`, of down to 5e-324 ms, passed before its text began",
    ),
)


@dataclass(frozen=True)
class Finding:
    """A check that failed: for which operation, and what the server answered."""

    operation: str
    check: str
    status: int | None
    answer: str

    def explanation(self) -> Explained | None:
        """The entry of EXPLAINED that fits."""
        try:
            answer = json.loads(self.answer)
            if "error" not in answer and len({each["error"]["code"] for each in answer["results"]}) > 1:
                error = {"code": "items", "message": ""}
            else:
                error = answer["error"]
        except (ValueError, KeyError, TypeError):
            return None
        for entry in EXPLAINED:
            is_same = entry.check == self.check and re.fullmatch(entry.code, error["code"])
            if is_same and re.search(entry.message, error["message"]):
                return entry
        return None


@dataclass
class Verdict:
    """What a run of schemathesis found: answers by operation and status, and failed checks."""

    statuses: Counter[tuple[str, int | None]]
    findings: list[Finding]
    errors: list[str]

    @classmethod
    def read(cls, path: Path) -> Verdict:
        """From schemathesis' NDJSON report."""
        verdict = cls(Counter(), [], [])
        for line in path.read_text(encoding="utf-8").splitlines():
            ((kind, event),) = json.loads(line).items()
            if kind in ("NonFatalError", "FatalError", "Interrupted"):
                verdict.errors.append(json.dumps(event)[:500])
            if kind == "ScenarioFinished":
                verdict._add(event["recorder"])
        return verdict

    def _add(self, recorder: dict[str, Any]) -> None:
        for case, interaction in recorder.get("interactions", {}).items():
            request, response = interaction["request"], interaction["response"]
            status = response["status_code"] if response else None
            operation = f"{request['method']} {recorder['cases'][case]['value']['path']}"
            self.statuses[operation, status] += 1
            for check in recorder["checks"].get(case, ()):
                if check["status"] != "success":
                    content = (response["content"] if response else None) or {}
                    answer = base64.b64decode(content.get("$base64", "")).decode("utf-8", "replace")
                    self.findings.append(Finding(operation, check["name"], status, answer or "no answer"))


def fuzz(url: str, *options: str, config: str = "") -> Verdict:
    """Runs schemathesis against a server."""
    with tempfile.TemporaryDirectory() as directory:
        settings, report = Path(directory, "schemathesis.toml"), Path(directory, "report.ndjson")
        settings.write_text(config, encoding="utf-8")
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(settings)),
            *("run", f"{url}/openapi.json", "--header", f"Authorization: Bearer {KEY}"),
            *("--checks", "all", "--continue-on-failure", "--generation-deterministic", "--no-shrink"),
            *("--suppress-health-check", "all", "--request-timeout", "60", "--no-color"),
            *("--report", "ndjson", "--report-ndjson-path", str(report)),
            *options,
        ]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=3600)
        if not report.is_file():
            raise SystemExit(
                f"schemathesis ended with {done.returncode}, and wrote no report:\n{done.stdout}{done.stderr}"
            )
        return Verdict.read(report)


@contextmanager
def open_server(gate: StepGate | None = None) -> Iterator[str]:
    """A server with the fake model, which offers the draft DRAFT; its URL."""
    runtime = FakeBatchRuntime(vocab_size=fake_tokenizer().size, max_positions=MAX_POSITIONS, on_step=gate)
    settings = ServerSettings(keys=KeyRing([KEY]))
    with tempfile.TemporaryDirectory() as drafts:
        make_draft(Path(drafts, DRAFT), rate=0.75)
        with serve_fake(settings, runtime=runtime, gate=gate, drafts=Path(drafts)) as server:
            yield server.url
            if gate is None:
                server.wait_until(lambda: server.core.engine.stats().running == server.core.slots.num_taken == 0)


def fuzz_named(max_examples: int) -> Verdict:
    """What needs a name that exists: drafts to an open session (the engine waits, so it does not end), the files of an
    offered draft, the model.
    """
    gate = StepGate()
    with (
        open_server(gate) as url,
        httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}) as client,
        client.stream("POST", "/v1/sessions", json={"prompt": [12, 5, 80], "max_tokens": 100}) as response,
    ):
        events = read_events(response)  # kept: without a reader the stream closes
        opened = next(events)
        assert isinstance(opened, SessionOpen)
        names = {"session_id": opened.session, "name": DRAFT, "path": DRAFT_FILE, "model": "fake"}
        config = "[parameters]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in names.items())
        # A DELETE would end the session.
        options = ("--include-path-regex", "drafts|models/", "--max-examples", str(max_examples))
        verdict = fuzz(url, *options, config=config)
        gate.open()
        assert list(events)
        return verdict


def main(
    max_examples: Annotated[int, typer.Option(min=1, help="Random requests per operation and phase.")] = 40,
) -> None:
    """Prints the answers by operation and status, and every finding."""
    if importlib.util.find_spec("schemathesis") is None:
        raise SystemExit('schemathesis is not installed; pip install "schemathesis>=4.32,<5"')
    with open_server() as url:
        paths = httpx.get(f"{url}/openapi.json", timeout=60.0, trust_env=False).raise_for_status().json()["paths"]
        verdicts = [fuzz(url, "--max-examples", str(max_examples)), fuzz_named(max_examples)]
    operations = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    statuses = sum((verdict.statuses for verdict in verdicts), Counter())
    for operation in sorted({operation for operation, _ in statuses}):
        counts = {status: num for (each, status), num in statuses.items() if each == operation}
        if set(counts) != {405}:  # most are methods that no route has
            shown = ", ".join(f"{status or 'none'}: {num}" for status, num in sorted(counts.items(), key=str))
            console.print(f"{operation:42} {shown}")
    findings = [finding for verdict in verdicts for finding in verdict.findings]
    explained = Counter(entry.reason for finding in findings if (entry := finding.explanation()))
    for reason, count in explained.items():
        console.print(f"{count} explained: {reason}")
    faults = [finding for finding in findings if finding.explanation() is None]
    for finding in faults:
        console.print(f"[red]{finding.operation}: {finding.check} ({finding.status})[/]", finding.answer[:300])
    errors = [error for verdict in verdicts for error in verdict.errors]
    for error in errors:
        console.print("[red]schemathesis:[/]", error)
    missing = operations - {operation for operation, _ in statuses}
    for operation in sorted(missing):
        console.print(f"[red]{operation} got no request[/]")
    num_broken = sum(num for (_, status), num in statuses.items() if status is None or status >= 500)
    num_broken -= sum(finding.check == SERVER_ERROR and finding.explanation() is not None for finding in findings)
    num_taken = sum(verdict.statuses["POST /v1/sessions/{session_id}/drafts", 204] for verdict in verdicts)
    num_files = sum(verdict.statuses["GET /v1/drafts/{name}/{path}", 200] for verdict in verdicts)
    console.print(
        f"{len(operations)} operations, {statuses.total()} requests, {num_broken} without an answer or 5xx, "
        f"{len(faults)} findings, {sum(explained.values())} more explained, {num_taken} drafts taken, "
        f"{num_files} files sent"
    )
    has_all = num_taken and num_files and statuses.total() >= MIN_REQUESTS
    if faults or errors or num_broken or missing or not has_all:
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
