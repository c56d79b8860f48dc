"""docs/api.md and docs/protocol.md: up to date with the code, their messages and curl lines are real ones."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from pydantic import BaseModel
from tests.drafts import make_draft
from tests.serving import StepGate, serve_fake
from tools.api_page import CURL, PAGE, document, page

from outrider.cloud.api.openapi import shared_codes
from outrider.cloud.api.state import ServerSettings
from outrider.models.http.keys import KeyRing
from outrider.models.http.openai import RenderRequest
from outrider.models.wire.offered import DraftList, TokenizerFiles
from outrider.models.wire.protocol import (
    DraftRequest,
    ErrorAnswer,
    RenderAnswer,
    SessionEnd,
    SessionRequest,
    Usage,
    parse_event,
)
from outrider.models.wire.verify import VerifyAnswer, VerifyRequest

KEY = "sixteen-characters"
DOCUMENT = document()
SECTION = re.compile(r"^## ((?:GET|POST|DELETE) \S+)\n(.*?)(?=^## )", re.MULTILINE | re.DOTALL)
SECTIONS = dict(SECTION.findall(PAGE.read_text(encoding="utf-8")))
SESSION = "POST /v1/sessions"
IN_A_SESSION = ("POST /v1/sessions/{session_id}/drafts", "DELETE /v1/sessions/{session_id}")


def test_the_page_is_up_to_date() -> None:
    """It is what `make docs` writes."""
    assert PAGE.read_text(encoding="utf-8") == page(DOCUMENT), "run make docs"


def test_the_page_has_every_endpoint_and_every_field_of_its_messages() -> None:
    """A section each; an endpoint without a curl line is refused by name."""
    for path, operations in DOCUMENT["paths"].items():
        for method, operation in operations.items():
            text = SECTIONS[f"{method.upper()} {path}"]
            for content in operation.get("requestBody", {}).get("content", {}).values():
                name = content["schema"].get("$ref", "").rpartition("/")[2]
                for field in DOCUMENT["components"]["schemas"][name]["properties"] if name else ():
                    assert f"`{field}`" in text, f"{method} {path} does not show {field}"
            for status, answer in operation["responses"].items():
                if status[0] == "4":
                    assert f"| {status} | {answer['description']} |" in text
    more = {**DOCUMENT, "paths": {**DOCUMENT["paths"], "/v1/new": {"get": {}}}}
    with pytest.raises(ValueError, match=r"no curl line for, or has one too many for: GET /v1/new$"):
        page(more)


def test_the_document_names_the_error_codes_that_the_protocol_explains() -> None:
    """Each code of docs/protocol.md is at an endpoint with its status, and the other way round."""
    named = {
        (code, status)
        for operations in DOCUMENT["paths"].values()
        for operation in operations.values()
        for status, answer in operation["responses"].items()
        if status[0] in "45"
        for code in re.findall(r"`(\w+)`", answer["description"])
    }
    named |= {(code, str(status)) for status, codes in shared_codes(needs_key=True).items() for code in codes}
    both_rows = {("not_found", "405"), ("method_not_allowed", "404")}  # two codes and two statuses in one row
    assert EXPLAINED - both_rows == named


@pytest.mark.skipif(shutil.which("curl") is None or shutil.which("sh") is None, reason="curl is not installed")
def test_the_pages_curl_lines_are_answered(tmp_path: Path) -> None:
    """Each as it stands on the page, with a status that the document gives for success."""
    make_draft(tmp_path / "cpu-int8")
    found = {name: re.findall(r"```sh\n(.*?)\n```", text, re.DOTALL) for name, text in SECTIONS.items()}
    lines = {name: line for name, (line,) in found.items()}
    assert lines.keys() == CURL.keys()
    with serve_fake(ServerSettings(keys=KeyRing([KEY])), drafts=tmp_path, gate=StepGate()) as server:
        variables = {"URL": server.url, "KEY": KEY, "MODEL": "fake", "DRAFT": "cpu-int8", "no_proxy": "*"}
        stream = ["sh", "-c", lines.pop(SESSION)]
        with subprocess.Popen(stream, env=variables, stdout=subprocess.PIPE, text=True) as session:
            assert session.stdout is not None
            events = (json.loads(line.removeprefix("data: ")) for line in session.stdout if line.startswith("data: "))
            variables["SESSION"] = next(events)["session"]
            for name in IN_A_SESSION:  # nothing is committed while the gate is closed
                assert run(lines.pop(name), variables)[0] == "204"
            server.gate.open()
            assert list(events)[-1]["reason"] == "cancelled" and session.wait() == 0
        assert run(lines["GET /v1/model"], variables | {"KEY": "another-key-altogether"})[0] == "401"
        for name, line in lines.items():
            method, path = name.split()
            status, body = run(line, variables)
            answers = DOCUMENT["paths"][path][method.lower()]["responses"]
            assert status[0] == "2" and status in answers and body, f"{name}: {status} {body}"


def run(line: str, variables: dict[str, str]) -> tuple[str, str]:
    """Runs a curl line in a shell; gives the answer's status and its body."""
    command = ["sh", "-c", f"{line} --write-out '\n%{{http_code}}'"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=60)
    body, _, status = done.stdout.rpartition("\n")
    return status, body


ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
EVENTS = re.findall(r"^data: (.*)$", TEXT, re.MULTILINE)
EXPLAINED = {
    (code, status)
    for codes, statuses in re.findall(r"^\| ((?:`[a-z_]+`(?:, )?)+) \| ([\d, a-z]+) \|", TEXT, re.MULTILINE)
    for code in re.findall(r"\w+", codes)
    for status in re.findall(r"\d+", statuses)
}
"""The codes of errors that the table has, each with its statuses."""
RAISED = re.compile(r'(?:RequestError|FieldError|Throttled)\(\s*"([a-z_]+)"')
MESSAGES: tuple[type[BaseModel], ...] = (
    ErrorAnswer,
    SessionRequest,
    SessionRequest,
    DraftRequest,
    VerifyRequest,
    VerifyAnswer,
    RenderRequest,
    RenderAnswer,
    DraftList,
    TokenizerFiles,
)


@pytest.mark.parametrize(("message", "example"), tuple(zip(MESSAGES, EXAMPLES, strict=True)))
def test_examples_are_messages(message: type[BaseModel], example: str) -> None:
    """Each example is the message that its place says, with no key that the message does not have."""
    assert message.model_validate_json(example).model_dump(exclude_unset=True) == json.loads(example)


def test_the_example_of_a_stream_is_one() -> None:
    """Every event parses, no key is unknown; bases of the first four add up, and their end has all of the usage."""
    shown = [json.loads(event) for event in EVENTS]
    every = [parse_event(event) for event in EVENTS]
    kinds = ("open", "commit", "commit", "end", "commit", "commit", "end", "commit", "taken")
    assert tuple(event.type for event in every) == kinds
    assert [event.model_dump(mode="json", exclude_unset=True) for event in every] == shown
    assert shown[2]["base"] == shown[1]["base"] + len(shown[1]["tokens"])
    end = every[3]
    assert isinstance(end, SessionEnd) and end.usage.model_fields_set == set(Usage.model_fields)
    assert end.usage.completion_tokens == end.usage.target_passes + end.usage.accepted_prediction_tokens


def test_every_error_code_is_in_the_table() -> None:
    """The codes in the table are those that the server's sources raise."""
    models = ROOT / "models" / "outrider" / "models"
    folders = (ROOT / "cloud", models / "http", models / "ingress", models / "grammar", models / "wire")
    sources = [path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py")]
    raised = {code for source in sources for code in RAISED.findall(source)}
    assert {code for code, _ in EXPLAINED} == raised
