"""Checks docs/privacy.md: what the device sends, request by request. The numbers in the test names are the page's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.agents import SAMPLED, Passing, drafter, generate, truth, whole
from tests.local_endpoint import LocalEndpoint, Wire, note_requests, serve_local
from tests.serving import FakeServer, StepGate, fake_tokenizer, serve_fake

from outrider.edge.drafting.depth import FixedDepth
from outrider.edge.results import Mode
from outrider.edge.serve.state import LocalSettings
from outrider.models.client.client import VerifierClient
from outrider.models.http.security import KeyRing
from outrider.models.picks.sampling import SamplingParams
from outrider.models.process.extras import is_installed
from outrider.models.wire.draft_stream import DRAFTS_MEDIA_TYPE, MessageReader
from outrider.models.wire.protocol import SessionRequest
from outrider.models.wire.steady import LEAST_BODY_BYTES
from outrider.models.wire.tree_draft import TREE_MEDIA_TYPE, decode_tree
from outrider.models.wire.verify import VerifyRequest

PAGE = (Path(__file__).parent.parent / "docs" / "privacy.md").read_text(encoding="utf-8")
LOCAL_KEY = "a-key-of-the-client"
PROMPT = "zanzibar def verify("
HEADERS = {"Authorization": f"Bearer {LOCAL_KEY}", "X-Private": "zanzibar", "User-Agent": "Chatty/1.0"}
ALLOWED = {"host", "content-type", "content-length", "accept-encoding", "user-agent", "prefer", "authorization"}
ALLOWED |= {"outrider-target", "transfer-encoding"}
BLOCK = {"prefix", "prefix_hash", "draft", "max_tokens", "stop_ids", "ignore_eos"}
BLOCK |= {each.name for each in fields(SamplingParams)}
"""Of a block of stop-and-wait, without rules, grammars and other things that the request has."""
NOT_HELD = {"error": {"code": "prefix_not_held", "message": "send its tokens", "type": "invalid_request_error"}}


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    return note_requests(monkeypatch)


@pytest.fixture(scope="module")
def local(cloud: FakeServer) -> Iterator[LocalEndpoint]:
    settings = LocalSettings(keys=KeyRing([LOCAL_KEY]), depth="8", docs_tokens=200)
    with serve_local(cloud.url, settings, api_key="a-key-of-the-cloud") as running:
        yield running


def post(local: LocalEndpoint, path: str, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = local.post({"seed": 5, **fields}, path, headers=HEADERS)
    return found


def test_1_a_text_sends_ids_and_parameters_and_its_user_agent(local: LocalEndpoint, wire: Wire) -> None:
    """No text of it: the ids are the prompt's, and the message has the protocol's fields only."""
    post(local, "/v1/completions", prompt=PROMPT, max_tokens=16)
    (message,) = map(json.loads, wire.to("POST /v1/sessions"))
    assert message["prompt"] == fake_tokenizer().encode(PROMPT) and message["seed"] == 5
    assert set(message) <= set(SessionRequest.model_fields) and b"zanzibar" not in wire.bytes
    for call, headers, _ in wire.sent:
        assert set(headers) <= ALLOWED
        assert headers.get("user-agent", "")[:9] == ("" if call.endswith("/drafts") else "outrider/")


def test_2_drafts_are_ids_with_levels(wire: Wire) -> None:
    """Each message is nodes and nothing else: no text, no probabilities, nothing of the model."""
    wire.gate = StepGate()
    with serve_fake(gate=wire.gate) as cloud, serve_local(cloud.url, LocalSettings(depth="8")) as local:
        post(local, "/v1/completions", prompt=PROMPT, max_tokens=64, ignore_eos=True)
    for call, headers, body in wire.sent:
        if call.endswith("/drafts"):
            is_long = headers["content-type"] == DRAFTS_MEDIA_TYPE
            assert is_long or headers["content-type"] == TREE_MEDIA_TYPE
            for message in MessageReader().feed(bytes(body)) if is_long else [bytes(body)]:
                assert decode_tree(message).encode() == message
    calls = {re.sub("sessions/[^/]+", "sessions/ID", call) for call, _, _ in wire.sent}
    known = {"GET /v1/model", "POST /v1/sessions", "POST /v1/sessions/ID/drafts", "DELETE /v1/sessions/ID"}
    assert calls <= known and "POST /v1/sessions/ID/drafts" in calls


async def test_1_and_2_stop_and_wait_sends_blocks_of_ids(cloud: FakeServer, wire: Wire) -> None:
    """With each the text's parameters, and a hash in place of ids that the server holds. Where it does not, all ids go,
    and the target that began the text is named. No text, no levels, no times of the device.
    """
    prompt = fake_tokenizer().encode(PROMPT)

    def forget(request: httpx.Request) -> httpx.Response | None:
        """The second block's prefix is not held."""
        return httpx.Response(409, json=NOT_HELD) if len(wire.to("POST /v1/verify")) == 2 else None

    client, request = VerifierClient(cloud.url, transport=Passing(forget)), whole(prompt, SAMPLED, 40)
    result = await generate([client], request, drafter(), mode=Mode.STOP_AND_WAIT, depth=FixedDepth(4))
    assert result.tokens == truth(request)
    calls = [(headers, json.loads(body)) for call, headers, body in wire.sent if call == "POST /v1/verify"]
    assert len(calls) > 4 and {call for call, _, _ in wire.sent} <= {"POST /v1/verify", "GET /health/live"}
    for headers, message in calls:
        (item,) = message["items"]
        assert set(message) <= set(VerifyRequest.model_fields) and set(item) <= BLOCK and set(headers) <= ALLOWED
        assert headers["user-agent"].startswith("outrider/") and item["seed"] == SAMPLED.seed
    held = ["prefix_hash" in message["items"][0] for _, message in calls]
    assert held[:4] == [False, True, False, True] and all(held[4:])
    first, again = calls[0][1]["items"][0]["prefix"], calls[2][1]["items"][0]["prefix"]
    assert first == prompt and again == [*prompt, *result.tokens[: len(again) - len(prompt)]]
    assert [number for number, (headers, _) in enumerate(calls) if "outrider-target" in headers] == [2]
    assert re.search(r"^\| `Outrider-Target`.*`/v1/verify`.*\[1\] \|$", PAGE, re.MULTILINE)
    assert b"zanzibar" not in wire.bytes and any(message["items"][0]["draft"] for _, message in calls)


def test_3_a_chat_sends_its_conversation_to_be_rendered(local: LocalEndpoint, wire: Wire) -> None:
    """As text, in no more bytes than the client's, and nothing else of the request."""
    messages = [{"role": "user", "content": "zanzibar, Занзибар, 桑给巴尔"}]
    post(local, "/v1/chat/completions", messages=messages, max_tokens=4, user="someone", metadata={"a": "b"})
    (rendered,) = wire.to("POST /v1/render")
    fields = json.loads(rendered)
    assert fields["messages"] == messages and set(fields) == {"messages", "chat_template_kwargs", "tokenizer"}
    assert messages[0]["content"].encode() in rendered
    assert b"someone" not in wire.bytes and b"zanzibar" not in wire.to("POST /v1/sessions")[0]


def test_3_a_steady_chat_asks_for_padding(cloud: FakeServer, wire: Wire) -> None:
    """Of the rendering only, which is padded itself."""
    with serve_local(cloud.url, is_steady=True) as local:
        post(local, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], max_tokens=4)
    for call, headers, body in wire.sent:
        assert set(headers) <= ALLOWED | {"outrider-padded"}
        assert ("outrider-padded" in headers) is (call == "POST /v1/render")
        assert call not in ("POST /v1/render", "POST /v1/sessions") or len(body) == LEAST_BODY_BYTES
    assert {"POST /v1/render", "POST /v1/sessions"} <= {call for call, _, _ in wire.sent}
    assert re.search(r"^\| `Outrider-Padded: 1`.*`/v1/render`.*\[3\] \|$", PAGE, re.MULTILINE)


@pytest.mark.skipif(not is_installed("bm25s"), reason='needs bm25s: pip install "outrider[docs]"')
def test_4_of_documents_only_the_passages_are_in_the_prompt(
    local: LocalEndpoint, wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the rest of the file, nor where it lies."""
    from outrider.edge.retrieval.documents import read_documents
    from outrider.edge.retrieval.grounding import Library
    from outrider.edge.retrieval.index import PassageIndex

    (tmp_path / "animals.md").write_text("# Zebras\n\nZebras are striped.\n\n# Salaries\n\nTop secret numbers.\n")
    library = Library(PassageIndex(read_documents(tmp_path).documents), fake_tokenizer(), 200)
    monkeypatch.setattr(local.core, "library", library)
    found = post(local, "/v1/completions", prompt="zebras?", max_tokens=4)["passages"]
    (opened,) = wire.to("POST /v1/sessions")
    prompt = fake_tokenizer().decode(json.loads(opened)["prompt"])
    assert "Zebras are striped." in prompt and "[1] animals.md, lines 1-3" in prompt
    assert "secret" not in prompt and str(tmp_path) not in prompt and tmp_path.name not in prompt
    assert [(each["document"], each["last_line"]) for each in found] == [("animals.md", 3)]
    brought = [{"name": "mine", "text": "zebras own text"}]
    post(local, "/v1/chat/completions", messages=[{"role": "user", "content": "zebras?"}], documents=brought)
    rendered = json.loads(wire.to("POST /v1/render")[0])
    assert "zebras own text" in rendered["messages"][0]["content"] and "documents" not in rendered


def test_5_the_clients_own_key_and_headers_stay_here(local: LocalEndpoint, wire: Wire) -> None:
    """The verifier gets its own key."""
    post(local, "/v1/completions", prompt=PROMPT, max_tokens=16)
    assert {headers["authorization"] for _, headers, _ in wire.sent} == {"Bearer a-key-of-the-cloud"}
    assert not any(word in wire.bytes for word in (LOCAL_KEY.encode(), b"Chatty", b"X-Private"))


def test_7_openvino_cannot_report_its_use() -> None:
    """Its reporting package is as if it were not installed, once a runtime of ours is opened."""
    code = (
        "import importlib, sys\n"
        "from pathlib import Path\n"
        "from outrider.models.errors import OutriderError\n"
        "from outrider.models.runtimes import open_sequence_runtime\n"
        "from outrider.models.runtimes.base import RuntimeOptions\n"
        "try:\n    open_sequence_runtime('openvino', Path('missing.xml'), RuntimeOptions())\n"
        "except OutriderError:\n    pass\n"
        "try:\n    importlib.import_module('openvino_telemetry')\n"
        "except ModuleNotFoundError:\n    print('blocked', 'openvino' in sys.modules)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["blocked", "True"]


def test_7_onnxruntime_keeps_no_reports(tmp_path: Path) -> None:
    """From its import on it would write them, with an identifier of the device, into a directory of the user's."""
    code = "import outrider.models.runtimes.onnxruntime_sequence, sys; print('onnxruntime' in sys.modules)"
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "LOCALAPPDATA": str(tmp_path)}
    asked = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    shown = subprocess.run([sys.executable, "-c", code], env=asked | home, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["True"] and not list(tmp_path.iterdir())


def test_each_line_with_a_number_has_its_test() -> None:
    """6 is in test_edge_telemetry.py."""
    numbers = set(re.findall(r"\[(\d)\]", PAGE))
    assert numbers == set(re.findall(r"def test_(\d)_", Path(__file__).read_text(encoding="utf-8"))) | {"6"}
    telemetry = Path(__file__).with_name("test_edge_telemetry.py").read_text(encoding="utf-8")
    for name in ("nothing_is_traced_or_loaded", "metrics_have_no_word_of_a_text", "traces_have_no_word_of_a_text"):
        assert f"def test_{name}" in telemetry
