"""Runs a real verifier on a loopback port with the fake runtime: uvicorn in a thread of the test process.

    with serve_fake() as server:
        httpx.get(server.url + "/health/ready")

`server.core.engine.stats()` shows the engine from inside. Everything is stopped and joined at the end.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from fastapi import FastAPI
from tests.fake_runtime import FakeBatchRuntime, plain_text
from tests.waiting import TIMEOUT_S, wait_until

from outrider.cloud.api.app import create_app
from outrider.cloud.api.serving import VerifierServer
from outrider.cloud.api.state import Core, DraftFiles, ServedModel, ServerSettings
from outrider.cloud.engine import EngineConfig
from outrider.cloud.engine.thread import EngineThread
from outrider.cloud.recent.store import RecentStore
from outrider.cloud.seam import ServingEngine
from outrider.cloud.server.cascade import cascade_model, fetch_facts, show_cascade
from outrider.cloud.server.offered import find_offered, find_tokenizer_files
from outrider.cloud.upstream.engine import CascadeEngine
from outrider.cloud.upstream.upstream import UpstreamClient, UpstreamRetry
from outrider.models.http.keys import ApiKey
from outrider.models.ingress.bounded_server import BoundedServer
from outrider.models.ingress.connections import ConnectionLimits
from outrider.models.ingress.sockets import TlsFiles, open_socket, url_of
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes.base import SequenceSlice
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.wire.protocol import Commit, SessionEnd, SessionEvent, SessionOpen, Taken, parse_event

EOS_ID = 0
"""`<|end|>`; about one in 300 tokens of the fake language."""

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TURNS_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
"""Ends each turn with the end token, as most templates do: what follows an answer begins with what was before it."""
ALICE, BOB = "alice-has-a-long-key", "bob-has-another-long-key"
"""Keys."""
JSON = {"content-type": "application/json"}
"""For bodies that are posted as bytes."""
PROMPT = [5, 17, 99, 3]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True}
"""Asks for 24 tokens, greedily."""


def save_fake_tokenizer(root: Path, *, has_chat_template: bool = True, chat_template: str = CHAT_TEMPLATE) -> None:
    """Writes a byte-level BPE of 300 ids, whose id 0 is the special `<|end|>`, to the directory `root`."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = (
        "def verify(tokens, drafts): return all(token == draft for token, draft in zip(tokens, drafts)) naïve 東京 😀"
    )
    backend.train_from_iterator([text] * 4, trainer)
    backend.save(str(root / "tokenizer.json"))
    config = {"eos_token": "<|end|>"} | ({"chat_template": chat_template} if has_chat_template else {})
    (root / "tokenizer_config.json").write_text(json.dumps(config))


def bearer(key: str) -> dict[str, str]:
    """The header that carries a key."""
    return {"authorization": f"Bearer {key}"}


def key_line(key: str, attributes: str = "") -> str:
    """The line of a key file that has a key's digest."""
    return f"sha256:{ApiKey.plain(key).digest.hex()} {attributes}".strip()


def code_of(answer: httpx.Response) -> tuple[int, str]:
    """Status and code of an error."""
    return answer.status_code, answer.json()["error"]["code"]


@cache
def fake_tokenizer(*, has_chat_template: bool = True, chat_template: str = CHAT_TEMPLATE) -> Tokenizer:
    """The tokenizer that `save_fake_tokenizer` writes. Its directory, which servers share, goes with the process."""
    root = Path(tempfile.mkdtemp(prefix="outrider-tokenizer-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    save_fake_tokenizer(root, has_chat_template=has_chat_template, chat_template=chat_template)
    tokenizer = Tokenizer.from_dir(root, name="fake")
    assert tokenizer.eos_token_ids == (EOS_ID,) and tokenizer.has_chat_template == has_chat_template
    return tokenizer


class StepGate:
    """For `on_step`: holds the engine before each step until the test allows the step."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._allowed = 0
        self._is_open = False

    def __call__(self, batch: Sequence[SequenceSlice]) -> None:
        with self._condition:
            assert self._condition.wait_for(lambda: self._is_open or self._allowed > 0, TIMEOUT_S)
            self._allowed -= 1

    def allow(self, num_steps: int) -> None:
        """Lets `num_steps` more steps run."""
        with self._condition:
            self._allowed += num_steps
            self._condition.notify_all()

    def open(self) -> None:
        """Lets all steps run from now on."""
        with self._condition:
            self._is_open = True
            self._condition.notify_all()


def target_tokens(prompt: Sequence[int], count: int, params: SamplingParams | None = None) -> list[int]:
    """The fake target's text after `prompt`, without an engine."""
    return plain_text(prompt, count, params or SamplingParams(), vocab_size=fake_tokenizer().size)


@dataclass(frozen=True)
class FakeServer:
    """A running server: its URL and its internals."""

    url: str
    core: Core
    server: VerifierServer
    runtime: FakeBatchRuntime
    own_gate: StepGate | None = None

    wait_until = staticmethod(wait_until)

    @property
    def gate(self) -> StepGate:
        """The gate that it was given."""
        assert self.own_gate is not None
        return self.own_gate

    def is_empty(self) -> bool:
        """Whether nothing runs or waits, and every block and slot is free."""
        stats = self.core.engine.stats()
        return (
            stats.running == stats.queued == self.core.slots.num_taken == len(self.core.sessions) == 0
            and stats.free_blocks == stats.num_blocks
        )


@contextmanager
def in_thread(server: BoundedServer, end: Callable[[], None], *, is_tls: bool = False) -> Iterator[str]:
    """Runs a server on a loopback port; gives its URL once it listens. end: makes it end, which it then has to."""
    with open_socket("127.0.0.1", 0) as sock:
        thread = threading.Thread(target=server.run, args=([sock],), name="outrider-test-server")
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield url_of(sock, is_tls=is_tls)
        finally:
            end()
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "the server did not end"


@contextmanager
def serve_app(app: FastAPI, runtime: Any = None, gate: Any = None, **options: Any) -> Iterator[FakeServer]:
    """The HTTP server around an application. gate: opened at the end. options: of VerifierServer."""
    server, core = VerifierServer(app, **options), app.state.core

    def end() -> None:
        if gate is not None:
            gate.open()
        if not core.is_draining:
            server.begin_drain(0.0)

    with in_thread(server, end, is_tls=options.get("tls") is not None) as url:
        yield FakeServer(url, core, server, runtime, gate)


@contextmanager
def serve_fake(
    settings: ServerSettings | None = None,
    *,
    config: EngineConfig | None = None,
    runtime: FakeBatchRuntime | None = None,
    gate: StepGate | None = None,
    has_chat_template: bool = True,
    chat_template: str = CHAT_TEMPLATE,
    drain_s: float = 0.0,
    name: str = "fake",
    limits: ConnectionLimits | None = None,
    tls: TlsFiles | None = None,
    drafts: Path | None = None,
    shares_tokenizer: bool = True,
    recent: RecentStore | None = None,
    upstream: str | None = None,
    upstream_key: str | None = None,
    upstream_retry: UpstreamRetry | None = None,
    adapters: Mapping[str, str] | None = None,
) -> Iterator[FakeServer]:
    """Serves the fake model `name`. gate: opened at the end; drain_s, limits, tls: see VerifierServer.

    drafts: directory of bundles that are offered for download. shares_tokenizer: the target's, too. recent: as
    create_app takes it; the caller closes it.
    upstream: URL of the target's verifier; the fake model here verifies first. adapters: names and identities; their
    texts are the model's.
    Runtimes with one `seed` speak one language, so servers with them are replicas of one target.
    """
    tokenizer = fake_tokenizer(has_chat_template=has_chat_template, chat_template=chat_template)
    runtime = runtime or FakeBatchRuntime(vocab_size=tokenizer.size, on_step=gate)
    own = EngineThread(runtime, config)
    model = ServedModel(name, tokenizer, frozenset({EOS_ID}), target=f"{runtime.seed:016x}", adapters=adapters or {})
    engine: ServingEngine = own
    if upstream is not None:
        facts = fetch_facts(upstream, upstream_key)
        model = cascade_model(model, facts, None)
        engine = CascadeEngine(own, UpstreamClient.to(upstream, upstream_key, facts.vocab_size), facts, upstream_retry)
    engine.start()
    tokenizer_files = find_tokenizer_files(tokenizer.directory) if shares_tokenizer else None
    offered: tuple[DraftFiles, ...] = ()
    if drafts is not None:
        offered = find_offered(drafts, tokenizer.fingerprint, name, shares_tokenizer=shares_tokenizer)
    settings = replace(settings or ServerSettings(), metrics_age_s=0.0)
    app = create_app(engine, model, settings, offered, recent, tokenizer_files)
    if isinstance(engine, CascadeEngine):
        show_cascade(app.state.core.metrics, engine)
    try:
        with serve_app(app, runtime, gate, drain_s=drain_s, limits=limits, tls=tls) as running:
            yield running
    finally:
        if engine is not own:
            engine.stop()
        own.close()


@contextmanager
def fake_target(on_load: Callable[[], object] = lambda: None) -> Iterator[Any]:
    """What `serve` and a replica load, over the fake language. on_load: called while it is loaded."""
    engine = EngineThread(FakeBatchRuntime(vocab_size=fake_tokenizer().size))

    @contextmanager
    def load() -> Iterator[Any]:
        on_load()
        try:
            yield SimpleNamespace(engine=engine, summary="a fake target")
        finally:
            engine.close()

    model = ServedModel("fake", fake_tokenizer(), frozenset({EOS_ID}))
    yield SimpleNamespace(load=load, model=model, path=Path("fake"), source_name="fake", num_gpus=0, engine=engine)


def read_events(response: httpx.Response) -> Iterator[SessionEvent]:
    """The events of a session's stream as they arrive, without those that only acknowledge drafts."""
    return (event for event in read_all_events(response) if not isinstance(event, Taken))


def read_all_events(response: httpx.Response) -> Iterator[SessionEvent | Taken]:
    """The same with all acknowledgements."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield parse_event(line.removeprefix("data: "))


@dataclass(frozen=True)
class Transcript:
    """A whole session: the open event, the commits, the end event."""

    open: SessionOpen
    commits: list[Commit]
    end: SessionEnd

    @property
    def tokens(self) -> list[int]:
        """All committed tokens."""
        return [token for commit in self.commits for token in commit.tokens]


class OpenSession:
    """A session whose stream has begun. opened: its first event; events: those after it, as they arrive."""

    def __init__(self, response: httpx.Response) -> None:
        assert response.status_code == 200, response.read()
        self.events = read_events(response)
        opened = next(self.events)
        assert isinstance(opened, SessionOpen)
        self.opened = opened
        self.path = f"/v1/sessions/{opened.session}"
        self.drafts = f"{self.path}/drafts"

    def commit(self) -> Commit:
        """The next event, which is a commit."""
        event = next(self.events)
        assert isinstance(event, Commit)
        return event

    def rest(self) -> Transcript:
        """The session with all commits to come and its end."""
        *middle, end = self.events
        assert isinstance(end, SessionEnd)
        commits = [event for event in middle if isinstance(event, Commit)]
        assert len(commits) == len(middle)
        return Transcript(self.opened, commits, end)


@contextmanager
def open_session(
    client: httpx.Client, body: dict[str, Any], headers: dict[str, str] | None = None
) -> Iterator[OpenSession]:
    """Opens a session; its stream is closed at the end."""
    with client.stream("POST", "/v1/sessions", json=body, headers=headers) as response:
        yield OpenSession(response)


def run_session(client: httpx.Client, body: dict[str, Any], headers: dict[str, str] | None = None) -> Transcript:
    """Opens a session and reads it to its end; checks that commits are contiguous."""
    with open_session(client, body, headers) as session:
        whole = session.rest()
    count = 0
    for commit in whole.commits:
        assert commit.base == count and commit.tokens
        count += len(commit.tokens)
    return whole
