"""Tests how devices, the local endpoint and replicas name an adapter."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tests import agents
from tests.commands import Outrider
from tests.drafts import make_draft
from tests.fronts import report_of
from tests.local_endpoint import serve_local
from tests.serving import (
    PROMPT,
    FakeServer,
    StepGate,
    code_of,
    serve_fake,
    target_tokens,
)
from tests.test_adapters import ADAPTERS, cards_of, named

from outrider.cloud.api.metrics import Metrics
from outrider.cloud.api.state import NamedModel, ServedModel
from outrider.cloud.distributions import AdapterCounts, Distributions
from outrider.cloud.replicas.cluster import Scale
from outrider.cloud.replicas.members import Members
from outrider.cloud.seam import EngineStats, Totals
from outrider.cloud.server import replicated
from outrider.cloud.server.options import EngineName, ServeOptions
from outrider.edge.drafting.drafter import NgramDrafter
from outrider.edge.link.endpoints import Endpoints, RetryPolicy
from outrider.edge.link.fleet import Fleet
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationRequest, GenerationResult, Mode
from outrider.edge.serve.state import LocalSettings, OfflineSettings
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.client.errors import EndpointUnfit, ProtocolBroken

RETRY = RetryPolicy(max_failures=3, max_outage_s=0.0, max_loading_s=0.0)


@pytest.fixture
def cloud() -> Iterator[FakeServer]:
    with serve_fake(adapters=ADAPTERS) as server:
        yield server


# -- devices -----------------------------------------------------------------------------------------------------------


def generate(urls: list[str], model: str | None, mode: Mode, max_tokens: int = 12, **more: Any) -> GenerationResult:
    """The text that a device gets of a model from the first of these servers that has it. more: see agents.generate."""
    drafter = None if mode is Mode.CLOUD_ONLY else NgramDrafter()
    request = GenerationRequest(tuple(PROMPT), max_tokens=max_tokens, ignore_eos=True)
    options = ClientOptions(model=model)
    return asyncio.run(agents.generate(urls, request, drafter, mode=mode, options=options, retry=RETRY, **more))


@pytest.mark.parametrize("mode", Mode)
def test_a_device_asks_for_a_model(cloud: FakeServer, mode: Mode) -> None:
    """In sessions and verifications. A server that does not have it is passed over; where none has, it is said."""
    expected = tuple(target_tokens(PROMPT, 12))
    with serve_fake() as without:
        for urls, model in (([without.url, cloud.url], "sql"), ([cloud.url], None), ([cloud.url], "fake")):
            assert generate(urls, model, mode).tokens == expected
        with pytest.raises(EndpointUnfit, match="does not serve the model that was asked for: this server serves fake"):
            generate([without.url], "sql", mode)


@pytest.mark.parametrize(("others", "is_same"), [(ADAPTERS, True), ({"sql": "7" * 16}, False)])
def test_a_text_goes_on_with_its_adapter_at_another_server(others: dict[str, str], is_same: bool) -> None:
    """Where a session is cut in mid-text, another server goes on if its adapter of that name is the same one."""
    lost: list[int] = []

    def lose(_: object) -> None:
        if not lost:  # while the engine stands at the gate
            lost.extend(session.sequence_id for session in first.core.sessions.values())
            first.core.engine.cancel(lost[0])
            first.gate.open()

    with serve_fake(adapters=ADAPTERS, gate=StepGate()) as first, serve_fake(adapters=others) as second:
        first.gate.allow(2)
        result = generate([first.url, second.url], "sql", Mode.STREAM, 40, on_tokens=lose)
        assert result.num_sessions == 2 and result.tokens == tuple(target_tokens(PROMPT, 40))
        assert (second.core.engine.stats().totals.committed > 0) == is_same  # else the first one has to go on


async def test_an_older_server_is_told_apart() -> None:
    """It refuses the field as unknown: the text does not go on with another model in silence."""
    error = {"code": "invalid_parameter", "message": "model: Extra inputs are not permitted", "param": "model"}
    facts = {"name": "old", "tokenizer": "t", "vocab_size": 9, "max_positions": 9, "eos_token_ids": []}

    def older(request: httpx.Request) -> httpx.Response:
        if request.method == "POST" and "model" in json.loads(request.content):
            return httpx.Response(400, json={"error": error})
        return httpx.Response(200, json=facts | {"has_chat_template": False})

    transport = httpx.MockTransport(older)
    async with VerifierClient("http://x", ClientOptions(model="sql"), transport) as client:
        with pytest.raises(EndpointUnfit, match="serves no model 'sql'; it serves old"):
            await client.model_facts()
        with pytest.raises(EndpointUnfit, match="does not serve the model that was asked for"):
            await StreamAgent(Endpoints([client], RETRY)).generate(GenerationRequest(tuple(PROMPT), max_tokens=2))
    async with VerifierClient("http://x", ClientOptions(model="old"), transport) as client:
        assert await client.served() == ("old", None)


@pytest.mark.parametrize("mode", Mode)
def test_no_text_is_another_models(cloud: FakeServer, monkeypatch: pytest.MonkeyPatch, mode: Mode) -> None:
    """Whatever a server answers: what names another model than the one that was asked for is not used."""
    monkeypatch.setattr(ServedModel, "named", lambda self, asked: NamedModel(self.name, self.target))
    with pytest.raises(ProtocolBroken, match="another model than sql answers: fake"):
        generate([cloud.url], "sql", mode)


def test_run_asks_for_a_model(cloud: FakeServer, tmp_path: Path, outrider: Outrider) -> None:
    """`outrider run --model`; not with a verifier of its own."""
    draft = make_draft(tmp_path / "draft").path
    given = ["run", "def f", "--cloud", cloud.url, "--draft", str(draft), "--runtime", "ngram", "--seed", "5"]
    text = outrider(*given, "--max-tokens", "8").out
    assert outrider(*given, "--max-tokens", "8", "--model", "sql").out == text
    assert "does not serve the model that was asked for" in outrider(*given, "--model", "other", code=2).err
    refused = outrider("run", "a", "--target", "reference", "--model", "sql", code=2)
    assert "--target asks no other verifier, so --model would have no effect" in refused.err


# -- the local endpoint ------------------------------------------------------------------------------------------------


@contextmanager
def local_client(cloud_url: str, settings: LocalSettings | None = None) -> Iterator[httpx.Client]:
    """A client of a local endpoint before it."""
    with serve_local(cloud_url, settings) as local, httpx.Client(base_url=local.url, timeout=30.0) as client:
        yield client


def test_the_local_endpoint_passes_the_name_on(cloud: FakeServer) -> None:
    """Its models are the verifier's; a request's text is of the one that it names, drafted as any other."""
    own, texts = cloud.core.model.target, set[str]()
    with local_client(cloud.url) as client:
        assert cards_of(client) == [("fake", None), ("sql", "fake"), ("law/v2", "fake")]
        assert client.get("/v1/models/law/v2").json() == client.get("/v1/models").json()["data"][2]
        assert code_of(client.get("/v1/models/other")) == (404, "model_not_found")
        for model, target in [(None, own), ("fake", own), *ADAPTERS.items()]:
            body = {"prompt": "def f", "max_tokens": 16, "seed": 3} | named(model)
            answer = client.post("/v1/completions", json=body).json()
            assert (answer["model"], answer["system_fingerprint"]) == (model or "fake", target)
            texts.add(str(answer["choices"]))
            chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "model": model or "fake"}
            assert client.post("/v1/chat/completions", json=chat).json()["system_fingerprint"] == target
        assert code_of(client.post("/v1/completions", json={"prompt": "a", "model": "x"})) == (404, "model_not_found")
    assert len(texts) == 1 and not cloud.core.sessions


def test_the_local_endpoint_may_have_a_model_of_its_own(cloud: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """`outrider serve --model`: of requests that name none; the first one that is listed. A wrong one is said at the
    start, and keeps the others from nothing.
    """
    with local_client(cloud.url, LocalSettings(model="sql")) as client:
        assert [name for name, _ in cards_of(client)] == ["sql", "fake", "law/v2"]
        for model, target in ((None, ADAPTERS["sql"]), ("fake", cloud.core.model.target)):
            answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, **named(model)}).json()
            assert answer["system_fingerprint"] == target
    with local_client(cloud.url, LocalSettings(model="typo")) as client:
        assert "--model is typo, and fake has no such model: requests that name none get 404" in caplog.text
        assert [name for name, _ in cards_of(client)] == ["fake", "sql", "law/v2"]
        assert client.get("/v1/models/sql").json()["parent"] == "fake"
        assert code_of(client.post("/v1/completions", json={"prompt": "a"})) == (404, "model_not_found")


def test_an_answer_without_the_cloud_is_verified_by_the_model_that_it_was_for(cloud: FakeServer) -> None:
    """The draft has no adapter: what it wrote alone is checked by the one that the request names."""
    with (
        serve_local("http://127.0.0.1:1", LocalSettings(), offline=OfflineSettings("draft")) as local,
        httpx.Client(base_url=local.url, timeout=30.0) as client,
    ):
        body = {"prompt": "a", "max_tokens": 6, "model": "sql", "seed": 1, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body).json()
        assert answer["model"] == "draft"
        local.core.upstream._clients[0] = VerifierClient(cloud.url, ClientOptions(max_connections=20))
        local.core.upstream.fleet = Fleet(local.core.upstream._clients)
        assert client.post("/v1/outrider/verify", json={"id": answer["id"]}).json()["model"] == "sql"


# -- replicas and metrics ----------------------------------------------------------------------------------------------


def test_a_text_goes_on_at_a_replica_that_has_its_adapter() -> None:
    """While another version is rolled out, by the identity of the adapter that began it."""
    members = Members()
    old, new = report_of("000001", target="old", running=3), report_of("000002", target="new")
    members.update([replace(each, adapters=frozenset({f"{each.ready.target} sql"})) for each in (old, new)])
    for target, tag in (("old sql", "000001"), ("new sql", "000002"), ("old", "000001"), (None, "000002")):
        chosen = members.choose(b"o", target=target)
        assert chosen is not None and chosen.report.tag == tag


def test_replicas_get_directories_that_do_not_depend_on_where_they_work(tmp_path: Path) -> None:
    """They work elsewhere; so does a file of options."""
    target: Any = SimpleNamespace(path=tmp_path, model=SimpleNamespace(name="n"))
    given = ServeOptions("b", engine=EngineName.VLLM, lora=["a=dir/b", "c=/d"])
    assert replicated._for_replica(given, target, Scale()).lora == [f"a={Path.cwd() / 'dir/b'}", "c=/d"]


def test_metrics_are_by_adapter() -> None:
    """Names come from the command line, so there are as many as that has."""
    found = Distributions()
    found.adapters = {"sql": AdapterCounts(), "law/v2": AdapterCounts()}
    found.committed_with("sql", 4, proposed=5, accepted=3)
    found.committed_with("sql", 1, proposed=0, accepted=0)
    stats = EngineStats(Totals(), 0, 0, 0, 0, 1, 1, 0.0, None, None, distributions=found)
    body, _ = asyncio.run(Metrics(lambda: stats, lambda: 0, max_age_s=0.0).exposition(""))
    shown = dict(line.rsplit(" ", 1) for line in body.decode().splitlines() if line.startswith("outrider_adapter"))
    for name, number in (
        ("generation_tokens", "5.0"),
        ("spec_decode_num_draft_tokens", "5.0"),
        ("spec_decode_num_accepted_tokens", "3.0"),
        ("spec_decode_num_drafts", "1.0"),
    ):
        values = [shown[f'outrider_adapter_{name}_total{{adapter="{adapter}"}}'] for adapter in ("sql", "law/v2")]
        assert values == [number, "0.0"]
