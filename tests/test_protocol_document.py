"""docs/protocol.md shows the messages that the code speaks, and names every error code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

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

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
EVENTS = re.findall(r"^data: (.*)$", TEXT, re.MULTILINE)
RAISED = re.compile(r'(?:RequestError|FieldError|Throttled)\(\s*"([a-z_]+)"')
# Made from an HTTP status in models/outrider/models/http/errors.py, or by a route below the framework.
FROM_STATUS = {"invalid_request"}
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
    every = [parse_event(event) for event in EVENTS]
    assert [event.type for event in every] == [
        *("open", "commit", "commit", "end", "commit", "commit", "end"),
        *("commit", "taken"),
    ]
    for event, shown in zip(every, EVENTS, strict=True):
        assert event.model_dump(mode="json", exclude_unset=True) == json.loads(shown)
    events = every[:4]
    first, second = (json.loads(event) for event in EVENTS[1:3])
    assert second["base"] == first["base"] + len(first["tokens"])
    end = events[-1]
    assert isinstance(end, SessionEnd) and end.usage.model_fields_set == set(Usage.model_fields)
    assert end.usage.completion_tokens == end.usage.target_passes + end.usage.accepted_prediction_tokens


def test_every_error_code_is_in_the_table() -> None:
    """The codes in the table are those that the server's sources raise."""
    models = ROOT / "models" / "outrider" / "models"
    folders = (ROOT / "cloud", models / "http", models / "ingress", models / "grammar")
    sources = [path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py")]
    raised = {code for source in sources for code in RAISED.findall(source)}
    rows = re.findall(r"^\| ((?:`[a-z_]+`(?:, )?)+) \| [\d, a-z]+ \|", TEXT, re.MULTILINE)
    documented = {code for row in rows for code in re.findall(r"`([a-z_]+)`", row)}
    assert documented - FROM_STATUS == raised
    assert documented >= FROM_STATUS
