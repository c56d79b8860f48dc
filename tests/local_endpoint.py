"""Runs `outrider serve`'s endpoint on a loopback port with a fake draft: uvicorn in a thread of the test process.

with serve_fake() as cloud, serve_local(cloud.url) as local:
    httpx.get(local.url + "/v1/models")
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from tests.fake_runtime import FakeSequenceRuntime
from tests.raw_client import post
from tests.serving import FakeServer, StepGate, fake_tokenizer, in_thread, target_tokens
from tests.waiting import wait_until

from outrider.edge.devices.placement import Placement
from outrider.edge.link.endpoints import RetryPolicy
from outrider.edge.modes.assemble import OpenModel
from outrider.edge.modes.draft_ladder import LazyModel
from outrider.edge.serve.lent_drafts import DraftSequences
from outrider.edge.serve.server import LocalServer
from outrider.edge.serve.state import LocalCore, LocalSettings, OfflineSettings
from outrider.edge.serve.upstream import Upstream
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.ingress.sockets import READY_PREFIX
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes.base import SequenceRuntime
from outrider.models.wire.protocol import ModelFacts
from outrider.models.wire.tree_draft import TreeDraft

RETRY = RetryPolicy(max_failures=2, max_outage_s=0.0, max_loading_s=0.0)
PROMPT = "def verify(tokens, drafts):"
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 5}
PARAMS = SamplingParams(0.8, top_p=0.95, seed=5)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "zip("}]
DRAFTS = LocalSettings(depth="8")


@dataclass(frozen=True)
class LocalEndpoint:
    """A running endpoint: its URL and its internals."""

    url: str
    core: LocalCore
    server: LocalServer

    wait_until = staticmethod(wait_until)

    def post(self, fields: dict[str, Any], path: str = "/v1/completions", status: int = 200, **options: Any) -> Any:
        """The JSON of an answer, which must have this status."""
        answer = httpx.post(self.url + path, json=fields, timeout=60.0, **options)
        assert answer.status_code == status, answer.text
        return answer.json()

    def text(self, max_tokens: int = 48, **fields: Any) -> str:
        """The text that `body` asks for."""
        return str(self.post(body(max_tokens, **fields))["choices"][0]["text"])

    def refusal(self, status: int, fields: dict[str, Any], path: str = "/v1/completions", **options: Any) -> str:
        """The code of the error."""
        return str(self.post(fields, path, status, **options)["error"]["code"])

    def is_at_rest(self) -> bool:
        """Whether no text is in work and every sequence of the draft is back."""
        core = self.core
        return not core.places.total and not core.tasks and not core.drafts.num_lent


@contextmanager
def leaving_ids_to(cloud: FakeServer, local: LocalEndpoint) -> Iterator[None]:
    """Inside, the endpoint takes the verifier's vocabulary for larger than it is, so that only that one refuses ids."""
    facts = ModelFacts.model_validate(httpx.get(f"{cloud.url}/v1/model").json() | {"vocab_size": 1 << 30})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local.core.upstream, "facts", AsyncMock(return_value=facts))
        yield


def fake_draft(agreement: float = 0.8, max_positions: int = 4096) -> FakeSequenceRuntime:
    """A draft of the fake language."""
    return FakeSequenceRuntime(vocab_size=fake_tokenizer().size, agreement=agreement, max_positions=max_positions)


def local_core(
    cloud: str | Sequence[str],
    settings: LocalSettings | None = None,
    runtime: SequenceRuntime | None = None,
    max_sequences: int = 4,
    api_key: str | None = None,
    fingerprint: str | None = None,
    others: Sequence[LazyModel] = (),
    draft_pause_s: float = 1.0,
    offline: OfflineSettings | None = None,
    is_steady: bool = False,
) -> LocalCore:
    """What an endpoint serves. fingerprint: None is the right one. others, draft_pause_s: see DraftSequences.
    is_steady: as in ClientOptions.
    """
    urls = [cloud] if isinstance(cloud, str) else list(cloud)
    tokenizer = fake_tokenizer()
    fingerprint = fingerprint or tokenizer.fingerprint
    options = ClientOptions(api_key=api_key, max_connections=100, is_steady=is_steady)
    upstream = Upstream([VerifierClient(url, options) for url in urls], fingerprint, RETRY)
    model = OpenModel(runtime or fake_draft(), None, Placement("openvino"))
    drafts = DraftSequences(model, max_sequences, is_looked_up=True, others=others, first_pause_s=draft_pause_s)
    settings = settings or LocalSettings()
    return LocalCore(tokenizer, fingerprint, upstream, drafts, settings, "a fake draft", offline=offline)


@contextmanager
def serve_local(
    cloud: str | Sequence[str],
    settings: LocalSettings | None = None,
    *,
    runtime: SequenceRuntime | None = None,
    max_sequences: int = 4,
    drain_s: float = 0.0,
    api_key: str | None = None,
    others: Sequence[LazyModel] = (),
    draft_pause_s: float = 1.0,
    offline: OfflineSettings | None = None,
    is_steady: bool = False,
) -> Iterator[LocalEndpoint]:
    """Serves drafts of `runtime` for the verifiers at `cloud`."""
    core = local_core(
        cloud,
        settings,
        runtime,
        max_sequences,
        api_key,
        others=others,
        draft_pause_s=draft_pause_s,
        offline=offline,
        is_steady=is_steady,
    )
    server = LocalServer(core, drain_s=drain_s)
    with in_thread(server, lambda: server.begin_drain(drain_s)) as url:
        yield LocalEndpoint(url, core, server)


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The data of a stream's events; checks that it ends with [DONE]."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def documents_of(answer: httpx.Response) -> tuple[list[dict[str, Any]], str]:
    """The documents of a stream, or the one of a whole answer, and the text of a completion or a chat."""
    assert answer.status_code == 200, answer.text
    is_stream = answer.headers["content-type"].startswith("text/event-stream")
    documents = chunks_of(answer) if is_stream else [answer.json()]
    choices = [choice for document in documents for choice in document["choices"]]
    parts = [choice.get("delta") or choice.get("message") or choice for choice in choices]
    return documents, "".join(part.get("content") or part.get("text") or "" for part in parts)


def expected(prompt: str = PROMPT, count: int = 48, params: SamplingParams = PARAMS) -> str:
    """The target's text after a prompt."""
    return fake_tokenizer().decode(target_tokens(fake_tokenizer().encode(prompt), count, params))


def body(max_tokens: int = 48, **fields: Any) -> dict[str, Any]:
    """What asks for the text that `expected` tells."""
    return {"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, **SAMPLED, **fields}


@dataclass
class ServeProcess:
    """`outrider serve` as a process; out and log are there at its end."""

    url: str
    out: str = ""
    log: str = ""
    code: int | None = None


@contextmanager
def serve_process(*options: Any) -> Iterator[ServeProcess]:
    """Runs the command on any free port; SIGTERM ends it."""
    command = [sys.executable, "-m", "outrider.edge.cli", "serve", *map(str, options), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            yield (running := ServeProcess(process.stdout.readline().removeprefix(READY_PREFIX).strip()))
        finally:
            process.terminate()
        running.out, running.log, running.code = process.stdout.read(), process.stderr.read(), process.wait(30.0)


def on_drafts(cloud: FakeServer, arrived: Callable[[int], None]) -> None:
    """Calls `arrived` with the number of a sequence after each message of drafts for it."""
    engine, take = cloud.core.engine, cloud.core.engine.draft_tree

    def noted(sequence_id: int, message: TreeDraft) -> None:
        take(sequence_id, message)
        arrived(sequence_id)

    engine.draft_tree = noted  # type: ignore[method-assign]


@contextmanager
def posted(local: LocalEndpoint, **fields: Any) -> Iterator[socket.socket]:
    """The connection of a request for a text; at the end its client leaves."""
    content, address = json.dumps(body(**fields)).encode(), httpx.URL(local.url)
    with socket.create_connection((address.host, address.port or 0)) as connection:
        connection.sendall(post("/v1/completions", content))
        yield connection


@dataclass
class Wire:
    """Every request to a verifier: method and path, headers, body; of one in pieces, what has been sent of it."""

    sent: list[tuple[str, httpx.Headers, bytes | bytearray]] = field(default_factory=list)
    gate: StepGate | None = None  # is opened by the first draft

    def traceparents(self, path: str) -> list[str | None]:
        """Of the requests to a path."""
        return [headers.get("traceparent") for found, headers, _ in self.sent if found.split(" ")[1] == path]

    def to(self, path: str) -> list[bytes]:
        """The bodies of the requests whose path matches."""
        return [bytes(body) for found, _, body in self.sent if re.fullmatch(path, found)]

    @property
    def bytes(self) -> bytes:
        """All bodies and headers."""
        return b"\n".join(bytes(body) + repr(headers.raw).encode() for _, headers, body in self.sent)


def note_requests(monkeypatch: pytest.MonkeyPatch) -> Wire:
    """What the device sends from now on."""
    noted, send = Wire(), httpx.AsyncClient.send

    async def note(client: httpx.AsyncClient, request: httpx.Request, **options: Any) -> httpx.Response:
        stream, body = request.stream, bytearray()
        if isinstance(stream, httpx.ByteStream):
            body += request.content
        else:

            async def pieces() -> AsyncIterator[bytes]:
                assert isinstance(stream, httpx.AsyncByteStream)
                async for piece in stream:
                    body.extend(piece)
                    yield piece

            request.stream = httpx.Request("POST", request.url, content=pieces()).stream
        noted.sent.append((f"{request.method} {request.url.path}", request.headers, body))
        if noted.gate is not None and request.url.path.endswith("/drafts"):
            noted.gate.open()
        return await send(client, request, **options)

    monkeypatch.setattr(httpx.AsyncClient, "send", note)
    return noted
