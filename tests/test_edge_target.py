"""Tests that a text is finished by the target that began it, also where another shares its tokenizer."""

from __future__ import annotations

import asyncio
import hashlib
import io
from contextlib import ExitStack
from dataclasses import replace

import httpx
import pytest
from rich.console import Console
from tests.fake_runtime import FakeBatchRuntime, FakeSequenceRuntime
from tests.faulty_proxy import FaultyProxy
from tests.serving import FakeServer, StepGate, fake_tokenizer, serve_fake, target_tokens
from tests.test_bundle import make_manifest

from outrider.cloud.api.state import ServedModel
from outrider.cloud.server import target as target_module
from outrider.cloud.server.target import target_identity
from outrider.edge.cli.draft_source import Notes
from outrider.edge.cli.run import _generate
from outrider.edge.cli.run_options import RunOptions
from outrider.edge.cli.terminal import TokenPrinter
from outrider.edge.drafting.depth import FixedDepth
from outrider.edge.drafting.drafter import ModelDrafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.link.endpoints import Endpoints, RetryPolicy
from outrider.edge.link.fleet import open_fleet
from outrider.edge.modes.stop_and_wait import StopAndWaitAgent
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationRequest, GenerationResult, Mode, TokenBatch
from outrider.models.bundle.manifest import FileEntry, Manifest
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.client.errors import TargetMismatch
from outrider.models.errors import CloudError
from outrider.models.runtimes.base import RuntimeOptions
from outrider.models.wire.protocol import ReadyAnswer, SessionOpen
from outrider.models.wire.verify import VerifyAnswer

VOCAB = fake_tokenizer().size
PROMPT = (5, 6, 7, 8)
REQUEST = GenerationRequest(PROMPT, max_tokens=60, stop_ids=frozenset(), ignore_eos=True)
MODES = (Mode.STREAM, Mode.STOP_AND_WAIT)
SOON = RetryPolicy(max_failures=3, max_outage_s=0.0, max_loading_s=0.0, first_pause_s=0.0)


def begun(stack: ExitStack, cut: ExitStack) -> tuple[FakeServer, str]:
    """A server that stands still after 6 steps (6 to 30 tokens), and an address that `cut` takes away."""
    gate = StepGate()
    gate.allow(6)
    server = stack.enter_context(serve_fake(gate=gate))
    address = httpx.URL(server.url)
    assert address.port is not None
    return server, cut.enter_context(FaultyProxy(address.host, address.port)).url


def other(stack: ExitStack, name: str = "other") -> FakeServer:
    """A server with the same tokenizer that speaks another language."""
    return stack.enter_context(serve_fake(runtime=FakeBatchRuntime(vocab_size=VOCAB, seed=1), name=name))


async def generate(
    clients: list[VerifierClient], mode: Mode, troubles: list[str], seen: list[int], cut: ExitStack, after: int = 6
) -> GenerationResult:
    """One text from the first of the clients, whose address on `cut` is gone after so many tokens."""

    def on_tokens(batch: TokenBatch) -> None:
        seen.extend(batch.tokens)
        if len(seen) >= after:
            cut.close()

    endpoints = Endpoints(clients, SOON, on_trouble=troubles.append)
    draft = ModelDrafter(FakeSequenceRuntime(vocab_size=VOCAB, agreement=0.7))
    try:
        if mode is Mode.STOP_AND_WAIT:
            agent = StopAndWaitAgent(endpoints, draft, FixedDepth(4), Estimates())
            return await agent.generate(REQUEST, on_tokens)
        return await StreamAgent(endpoints, draft, FixedDepth(4)).generate(REQUEST, on_tokens)
    finally:
        for client in clients:
            await client.aclose()


@pytest.mark.parametrize("mode", MODES)
def test_another_target_with_the_same_tokenizer_does_not_go_on_with_a_text(mode: Mode) -> None:
    """The error names both endpoints and both models; no token of the other is shown, and it computes nothing."""
    seen, troubles = list[int](), list[str]()
    with ExitStack() as stack:
        cut = stack.enter_context(ExitStack())
        (_, a_url), b = begun(stack, cut), other(stack)
        with pytest.raises(CloudError) as refused:
            asyncio.run(generate([VerifierClient(a_url), VerifierClient(b.url)], mode, troubles, seen, cut))
        assert b.core.engine.stats().totals.steps == 0
    assert len(seen) >= 6 and seen == target_tokens(PROMPT, len(seen))
    named = f"the text began with fake (target {0:016x}) at {a_url}; other (target {1:016x}) at {b.url} serves another"
    for words in (str(refused.value), "\n".join(troubles)):
        assert named in words and "give --cloud replicas of one target only" in words


@pytest.mark.parametrize("mode", MODES)
def test_a_replica_behind_another_target_is_found(mode: Mode) -> None:
    """A wrong endpoint between two replicas is passed over, and the text is whole."""
    seen, troubles = list[int](), list[str]()
    with ExitStack() as stack:
        cut = stack.enter_context(ExitStack())
        (_, a_url), b, c = begun(stack, cut), other(stack), stack.enter_context(serve_fake(name="renamed"))
        clients = [VerifierClient(url) for url in (a_url, b.url, c.url)]
        result = asyncio.run(generate(clients, mode, troubles, seen, cut))
    assert result.tokens == tuple(seen) == tuple(target_tokens(PROMPT, 60))
    assert sum("serves another target" in trouble for trouble in troubles) == 1


class Hiding(httpx.AsyncHTTPTransport):
    """A gateway that passes on `/v1` only, and answers the rest with `status`."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.startswith("/v1/"):
            return await super().handle_async_request(request)
        return httpx.Response(self.status)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("status", [403, 404])
def test_a_replica_that_hides_its_readiness_goes_on_with_a_text(mode: Mode, status: int) -> None:
    """Its answers show its target, too."""
    seen = list[int]()
    with ExitStack() as stack:
        cut = stack.enter_context(ExitStack())
        (_, a_url), b = begun(stack, cut), stack.enter_context(serve_fake())
        clients = [VerifierClient(a_url), VerifierClient(b.url, transport=Hiding(status))]
        result = asyncio.run(generate(clients, mode, [], seen, cut))
    assert result.tokens == tuple(seen) == tuple(target_tokens(PROMPT, 60))


@pytest.mark.parametrize("mode", MODES)
def test_a_text_that_has_not_begun_may_go_anywhere(mode: Mode) -> None:
    """The first endpoint is not there; nothing of it is in the text."""
    with ExitStack() as stack, ExitStack() as gone:
        absent = gone.enter_context(serve_fake()).url
        gone.close()
        b = other(stack)
        clients = [VerifierClient(absent), VerifierClient(b.url)]
        result = asyncio.run(generate(clients, mode, [], [], ExitStack(), after=1000))
    assert len(result.tokens) == 60 and result.tokens != tuple(target_tokens(PROMPT, 60))


class Swapping(httpx.AsyncHTTPTransport):
    """Sends requests to the next of several servers: one address, as behind a load balancer."""

    def __init__(self, urls: list[str]) -> None:
        super().__init__()
        self.urls = urls

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        request.url = request.url.copy_with(host=httpx.URL(self.urls[0]).host, port=httpx.URL(self.urls[0]).port)
        return await super().handle_async_request(request)


@pytest.mark.parametrize("mode", MODES)
def test_one_address_that_now_leads_to_another_target_is_refused_at_once(mode: Mode) -> None:
    """What answers says who it is: `open` and the verify answer. There is nothing left to try."""
    seen = list[int]()
    with ExitStack() as stack:
        cut = stack.enter_context(ExitStack())
        (_, a_url), b = begun(stack, cut), other(stack, "fake")
        swapping = Swapping([a_url, b.url])
        cut.callback(swapping.urls.pop, 0)
        with pytest.raises(
            TargetMismatch,
            match=r"began with fake .* at http://one\.localhost; fake .* at http://one\.localhost serves",
        ):
            asyncio.run(generate([VerifierClient("http://one.localhost", transport=swapping)], mode, [], seen, cut))
    assert seen == target_tokens(PROMPT, len(seen))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("first", "second"), [(None, "known"), ("known", None), (None, None)])
def test_an_identity_that_comes_or_goes_in_mid_text_is_another(
    mode: Mode, first: str | None, second: str | None
) -> None:
    """An older server sends none: who it is cannot be known. Between two of them a text goes on as before."""

    def name_target(server: FakeServer, target: str | None) -> None:
        server.core.model = replace(server.core.model)
        object.__setattr__(server.core.model, "target", target)

    with ExitStack() as stack:
        cut = stack.enter_context(ExitStack())
        (a, a_url), b = begun(stack, cut), stack.enter_context(serve_fake())
        name_target(a, first)
        name_target(b, second)
        generation = generate([VerifierClient(a_url), VerifierClient(b.url)], mode, [], [], cut)
        if first == second:
            assert asyncio.run(generation).tokens == tuple(target_tokens(PROMPT, 60))
        else:
            with pytest.raises(CloudError, match="no target identity"):
                asyncio.run(generation)


def test_different_targets_are_reported_before_the_first_token() -> None:
    """Where readiness shows them; replicas and endpoints that do not answer are no trouble."""

    async def look(*urls: str) -> str | None:
        async with open_fleet([(url, ClientOptions()) for url in urls]) as fleet:
            return await fleet.mixed_targets()

    with ExitStack() as stack, ExitStack() as gone:
        a, b, c = stack.enter_context(serve_fake()), other(stack), stack.enter_context(serve_fake())
        absent = gone.enter_context(serve_fake()).url
        gone.close()
        trouble = asyncio.run(look(a.url, b.url))
        assert trouble is not None and f"at {a.url} and other" in trouble and "different targets" in trouble
        assert asyncio.run(look(a.url, c.url)) is asyncio.run(look(absent, b.url)) is asyncio.run(look(a.url)) is None


def test_outrider_run_reports_different_targets_and_shows_no_escape_of_their_names() -> None:
    """On standard error, and the text is the first one's."""
    about = io.StringIO()
    console = Console(file=about, force_terminal=True, color_system=None, width=1000)
    with ExitStack() as stack:
        a, b = stack.enter_context(serve_fake()), other(stack, "\x1b]0;[bold]other\x07")
        options = RunOptions("x", cloud=[a.url, b.url], mode=Mode.CLOUD_ONLY)
        clouds = [(url, ClientOptions()) for url in options.cloud]
        notes = Notes(console)
        notes.printer = TokenPrinter(Console(file=io.StringIO()), fake_tokenizer().detokenizer())
        ran = asyncio.run(_generate(options, clouds, REQUEST, fake_tokenizer(), None, None, None, notes))
    assert ran.result.tokens == tuple(target_tokens(PROMPT, 60))
    (line,) = about.getvalue().splitlines()
    assert r"and \x1b]0;[bold]other\x07 (target" in line and "are different targets" in line


def test_every_answer_that_leads_to_tokens_names_the_target() -> None:
    """`open`, verify answers, readiness and /v1/model agree; a model without a bundle has an identity too."""
    with serve_fake() as server, httpx.Client(base_url=server.url) as client:
        body = {"prompt": [1, 2], "max_tokens": 1}
        stream = client.post("/v1/sessions", json=body).text
        opened = SessionOpen.model_validate_json(stream.splitlines()[0].removeprefix("data: "))
        verified = VerifyAnswer.model_validate_json(client.post("/v1/verify", json={"items": [{"prefix": [1]}]}).text)
        failed = VerifyAnswer.model_validate_json(client.post("/v1/verify", json={"items": [{"prefix": []}]}).text)
        ready = ReadyAnswer.model_validate_json(client.get("/health/ready").text)
        facts = client.get("/v1/model").json()
    assert opened.target == verified.target == failed.target == ready.target == facts["target"] == f"{0:016x}"
    assert opened.vocab_size == facts["vocab_size"] and opened.model == verified.model == "fake"
    one, same, two = (ServedModel(name, fake_tokenizer(), frozenset()).target for name in ("one", "one", "two"))
    assert one == same != two and len(one) == 16


def bundle(**files: str) -> Manifest:
    """A target's manifest with these files: path without its dot -> content."""
    entries = tuple(
        FileEntry(path=path.replace("__", "."), size=1, sha256=hashlib.sha256(content.encode()).hexdigest())
        for path, content in files.items()
    )
    return make_manifest(entries, "0" * 64).model_copy(update={"role": "target", "runtime": "openvino"})


IR = bundle(model__xml="graph", model__bin="weights", tokenizer__json="t", config__json="c")


def test_replicas_have_one_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another name, tokenizer file, report, thread count, cache folder or device number is the same target."""
    monkeypatch.setattr(target_module, "version", lambda name: "1.0")
    same = target_identity(IR, RuntimeOptions())
    assert len(same) == 16 and int(same, 16) >= 0
    renamed = bundle(a__xml="graph", a__bin="weights", tokenizer__json="u", config__json="d", README__md="x")
    assert target_identity(renamed.model_copy(update={"name": "mine"}), RuntimeOptions()) == same
    assert target_identity(IR, RuntimeOptions(num_threads=3, cache_dir="x", kv_cache_bytes=1, device="cpu")) == same
    assert target_identity(IR, RuntimeOptions("GPU.1")) == target_identity(IR, RuntimeOptions("GPU.0")) != same


def test_what_may_change_a_token_changes_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, graph, precision, runtime and its version, arithmetic, cache, device kind, engine, torch's config."""
    torch = bundle(model__safetensors="weights", config__json="c").model_copy(
        update={"format": "safetensors", "runtime": "torch"}
    )
    scaled = torch.model_copy(update={"files": bundle(model__safetensors="weights", config__json="d").files})
    found = [
        target_identity(IR, RuntimeOptions()),
        target_identity(bundle(model__xml="graph", model__bin="others"), RuntimeOptions()),
        target_identity(bundle(model__xml="another", model__bin="weights"), RuntimeOptions()),
        target_identity(IR.model_copy(update={"precision": "int8"}), RuntimeOptions()),
        target_identity(IR, RuntimeOptions("GPU")),
        target_identity(IR, RuntimeOptions(properties={"KV_CACHE_PRECISION": "u8"})),
        target_identity(IR, RuntimeOptions(properties={"dtype": "bf16"})),
        target_identity(IR, RuntimeOptions(), engine="another"),
        target_identity(torch, RuntimeOptions()),
        target_identity(scaled, RuntimeOptions()),
    ]
    monkeypatch.setattr(target_module, "version", lambda name: "0.0")
    found.append(target_identity(IR, RuntimeOptions()))
    assert len(set(found)) == len(found)
