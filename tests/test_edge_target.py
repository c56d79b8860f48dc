"""Tests where a text goes on: with the target that began it, and not before the time that a verifier asks for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.agents import MODES, VOCAB, Clock, Passing, drafter, generate, nowhere, proxy_to, scripted_client, whole
from tests.commands import Outrider, screen
from tests.fake_runtime import FakeBatchRuntime
from tests.serving import FakeServer, StepGate, fake_tokenizer, serve_fake, target_tokens
from tests.test_bundle import make_manifest
from tests.waiting import run

from outrider.cloud.api.state import ServedModel
from outrider.cloud.server import target as target_module
from outrider.cloud.server.target import target_identity
from outrider.edge.cli.draft_source import Notes
from outrider.edge.cli.run import OFFLINE_RETRY, _generate
from outrider.edge.cli.run_options import RunOptions
from outrider.edge.cli.terminal import TokenPrinter
from outrider.edge.drafting.depth import FixedDepth
from outrider.edge.link.endpoints import Endpoints, RetryPolicy
from outrider.edge.link.fleet import open_fleet
from outrider.edge.results import GenerationResult, Mode, TokenBatch
from outrider.edge.serve.upstream import Upstream, quick
from outrider.models.bundle.manifest import FileEntry, Manifest
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.client.errors import MAX_RETRY_AFTER_S, EndpointLost, TargetMismatch, retry_after_s
from outrider.models.errors import CloudError
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes.base import RuntimeOptions
from outrider.models.wire.protocol import ModelFacts, SessionOpen
from outrider.models.wire.verify import VerifyAnswer

PROMPT = (5, 6, 7, 8)
REQUEST = whole(PROMPT, SamplingParams(), 60)
TRUTH = tuple(target_tokens(PROMPT, 60))
SOON = RetryPolicy(max_failures=3, max_outage_s=0.0, max_loading_s=0.0, first_pause_s=0.0)


class Moving:
    """Servers, of which the first stands still after 6 steps (6 to 30 tokens), and the text that goes on elsewhere."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self.cut = stack, stack.enter_context(ExitStack())
        self.seen, self.troubles = list[int](), list[str]()
        gate = StepGate()
        gate.allow(6)
        self.first = self.serve(gate=gate)
        self.first_url = self.cut.enter_context(proxy_to(self.first.url)).url
        """An address that `cut` takes away."""

    def serve(self, **options: Any) -> FakeServer:
        return self._stack.enter_context(serve_fake(**options))

    def another_target(self, name: str = "other") -> FakeServer:
        """It has the same tokenizer and speaks another language."""
        return self.serve(runtime=FakeBatchRuntime(vocab_size=VOCAB, seed=1), name=name)

    async def generate(self, mode: Mode, *clouds: str | VerifierClient, after: int = 6) -> GenerationResult:
        """One text from the first cloud, whose address is gone after so many tokens."""

        def on_tokens(batch: TokenBatch) -> None:
            self.seen += batch.tokens
            if len(self.seen) >= after:
                self.cut.close()

        told: dict[str, Any] = {"on_trouble": self.troubles.append, "on_tokens": on_tokens}
        return await generate(clouds, REQUEST, drafter(), mode=mode, depth=FixedDepth(4), retry=SOON, **told)


@pytest.fixture
def moving() -> Iterator[Moving]:
    with ExitStack() as stack:
        yield Moving(stack)


@pytest.mark.parametrize("mode", MODES)
async def test_another_target_with_the_same_tokenizer_does_not_go_on_with_a_text(mode: Mode, moving: Moving) -> None:
    """The error names both endpoints and both models; no token of the other is shown, and it computes nothing."""
    a_url, b = moving.first_url, moving.another_target()
    with pytest.raises(CloudError) as refused:
        await moving.generate(mode, a_url, b.url)
    assert b.core.engine.stats().totals.steps == 0
    assert len(moving.seen) >= 6 and moving.seen == target_tokens(PROMPT, len(moving.seen))
    named = f"the text began with fake (target {0:016x}) at {a_url}; other (target {1:016x}) at {b.url} serves another"
    for words in (str(refused.value), "\n".join(moving.troubles)):
        assert named in words and "give --cloud replicas of one target only" in words


@pytest.mark.parametrize("mode", MODES)
async def test_a_replica_behind_another_target_is_found(mode: Mode, moving: Moving) -> None:
    """A wrong endpoint between two replicas is passed over, and the text is whole."""
    b, c = moving.another_target(), moving.serve(name="renamed")
    assert (await moving.generate(mode, moving.first_url, b.url, c.url)).tokens == tuple(moving.seen) == TRUTH
    assert sum("serves another target" in trouble for trouble in moving.troubles) == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("status", [403, 404])
async def test_a_replica_that_hides_its_readiness_goes_on_with_a_text(mode: Mode, status: int, moving: Moving) -> None:
    """A gateway passes on `/v1` only. Its answers show its target, too."""
    gateway = Passing(lambda request: None if request.url.path.startswith("/v1/") else httpx.Response(status))
    hidden = VerifierClient(moving.serve().url, transport=gateway)
    assert (await moving.generate(mode, moving.first_url, hidden)).tokens == tuple(moving.seen) == TRUTH


@pytest.mark.parametrize("mode", MODES)
async def test_a_text_that_has_not_begun_may_go_anywhere(mode: Mode, moving: Moving) -> None:
    """The first endpoint is not there; nothing of it is in the text."""
    result = await moving.generate(mode, nowhere(), moving.another_target().url, after=1000)
    assert len(result.tokens) == 60 and result.tokens != TRUTH


@pytest.mark.parametrize("mode", MODES)
async def test_one_address_that_now_leads_to_another_target_is_refused_at_once(mode: Mode, moving: Moving) -> None:
    """As behind a load balancer. What answers says who it is: `open` and the verify answer. Nothing is left to try."""
    urls = [httpx.URL(url) for url in (moving.first_url, moving.another_target("fake").url)]
    moving.cut.callback(urls.pop, 0)

    def balance(request: httpx.Request) -> None:
        request.url = request.url.copy_with(host=urls[0].host, port=urls[0].port)

    words = r"began with fake .* at http://one\.localhost; fake .* at http://one\.localhost serves"
    with pytest.raises(TargetMismatch, match=words):
        await moving.generate(mode, VerifierClient("http://one.localhost", transport=Passing(balance)))
    assert moving.seen == target_tokens(PROMPT, len(moving.seen))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("first", "second"), [(None, "known"), ("known", None), (None, None)])
async def test_an_identity_that_comes_or_goes_in_mid_text_is_another(
    mode: Mode, first: str | None, second: str | None, moving: Moving
) -> None:
    """An older server sends none: who it is cannot be known. Between two of them a text goes on as before."""
    b = moving.serve()
    for server, target in ((moving.first, first), (b, second)):
        server.core.model = replace(server.core.model)
        object.__setattr__(server.core.model, "target", target)
    with nullcontext() if first == second else pytest.raises(CloudError, match="no target identity"):
        assert (await moving.generate(mode, moving.first_url, b.url)).tokens == TRUTH


async def test_different_targets_are_reported_before_the_first_token(moving: Moving) -> None:
    """Where readiness shows them; replicas and endpoints that do not answer are no trouble."""

    async def look(*urls: str) -> str | None:
        async with open_fleet([(url, ClientOptions()) for url in urls]) as fleet:
            return await fleet.mixed_targets()

    a_url, b_url, c_url = moving.first.url, moving.another_target().url, moving.serve().url
    trouble = await look(a_url, b_url)
    assert trouble is not None and f"at {a_url} and other" in trouble and "different targets" in trouble
    assert await look(a_url, c_url) is await look(nowhere(), b_url) is await look(a_url) is None


async def test_outrider_run_reports_different_targets_and_shows_no_escape_of_their_names(moving: Moving) -> None:
    """On standard error, and the text is the first one's."""
    console, about = screen(force_terminal=True, color_system=None, width=1000)
    notes = Notes(console)
    notes.printer = TokenPrinter(screen()[0], fake_tokenizer().detokenizer())
    a, b = moving.serve(), moving.another_target("\x1b]0;[bold]other\x07")
    options = RunOptions("x", cloud=[a.url, b.url], mode=Mode.CLOUD_ONLY)
    clouds = [(url, ClientOptions()) for url in options.cloud]
    ran = await _generate(options, clouds, REQUEST, fake_tokenizer(), None, None, None, notes)
    assert ran.result.tokens == TRUTH
    (line,) = about.getvalue().splitlines()
    assert r"and \x1b]0;[bold]other\x07 (target" in line and "are different targets" in line


def test_every_answer_that_leads_to_tokens_names_the_target(server: FakeServer) -> None:
    """`open`, verify answers, readiness and /v1/model agree; a model without a bundle has an identity too."""
    with httpx.Client(base_url=server.url) as client:
        stream = client.post("/v1/sessions", json={"prompt": [1, 2], "max_tokens": 1}).text
        opened = SessionOpen.model_validate_json(stream.splitlines()[0].removeprefix("data: "))
        verified, failed = (
            VerifyAnswer.model_validate_json(client.post("/v1/verify", json={"items": [{"prefix": prefix}]}).text)
            for prefix in ([1], [])
        )
        ready, facts = client.get("/health/ready").json(), client.get("/v1/model").json()
    assert opened.target == verified.target == failed.target == ready["target"] == facts["target"] == f"{0:016x}"
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


FACTS = ModelFacts(name="m", tokenizer="t", vocab_size=9, max_positions=9, eos_token_ids=[], has_chat_template=False)
Answer = Callable[[httpx.Request], httpx.Response]


def verifier(clock: Clock, asked: list[float], *retry_after: str, status: int = 429) -> Answer:
    """Answers `status` with each of these headers, then the facts; notes when it was asked."""
    error = {"error": {"code": "tokens_exhausted", "message": "too many tokens", "type": "rate_limit_error"}}
    refusals = [httpx.Response(status, json=error, headers={"retry-after": header}) for header in retry_after]
    answers = iter([*refusals, httpx.Response(200, json=FACTS.model_dump())])

    def handle(_: httpx.Request) -> httpx.Response:
        asked.append(clock.now)
        return next(answers)

    return handle


async def facts_from(
    clock: Clock,
    *handlers: Answer,
    retry: RetryPolicy | None = None,
    on_trouble: Callable[[str], None] = lambda words: None,
    jitter: float = 0.0,
) -> ModelFacts:
    """Asks the verifiers, one after the other, until one answers. jitter: 0.0 adds nothing to what they ask for."""
    clients = [scripted_client(handler, f"http://verifier{index}") for index, handler in enumerate(handlers)]
    endpoints = Endpoints(clients, retry, clock.sleep, clock, on_trouble, jitter=lambda: jitter)
    return await endpoints.call(lambda client: client.model_facts())


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7.0), (" 7 ", 7.0), ("9999", MAX_RETRY_AFTER_S), (None, 0.0), ("-3", 0.0), ("1e9", 0.0), ("soon", 0.0)],
)
def test_a_header_is_whole_seconds_and_bounded(header: str | None, seconds: float) -> None:
    """No server keeps a device waiting for longer than a minute, and a date counts as none."""
    assert retry_after_s(header) == seconds and EndpointLost("lost").retry_after_s == 0.0


def test_a_verifier_is_not_asked_before_the_time_it_names() -> None:
    """However short the device's own pauses would be; the user reads it, or the silence would look like a hang."""
    clock, asked, said = Clock(), list[float](), list[str]()
    assert run(facts_from(clock, verifier(clock, asked, "7", "3"), on_trouble=said.append)) == FACTS
    assert (asked, clock.pauses) == ([0.0, 7.0, 10.0], [7.0, 3.0])
    assert said[0] == "http://verifier0: tokens_exhausted: too many tokens. Trying again in 7 s."


def test_another_verifier_is_asked_at_once() -> None:
    """And where all ask for clock, the one that asks for least comes first."""
    for asks, asked in (([], [0.0]), (["5"], [0.0, 5.0])):
        clock, first, second = Clock(), list[float](), list[float]()
        assert run(facts_from(clock, verifier(clock, first, "30"), verifier(clock, second, *asks))) == FACTS
        assert (first, second, clock.pauses) == ([0.0], asked, asked[1:])


def test_the_policy_bounds_what_a_verifier_asks_for() -> None:
    """A text of `run --offline-ok` and one of `outrider serve` wait for 3 s; a question of the latter does not wait."""
    for_texts = Upstream([VerifierClient("http://verifier")], "t").endpoints()._retry
    for policy, first_s, last_s, num in ((OFFLINE_RETRY, 3, 3, 2), (for_texts, 3, 4.5, 6), (quick(1), 0.05, 0.05, 2)):
        clock, asked = Clock(), list[float]()
        with pytest.raises(CloudError, match="tokens_exhausted"):
            run(facts_from(clock, verifier(clock, asked, *["60"] * 9, status=503), retry=policy, jitter=0.5))
        assert (asked[1], clock.now, len(asked)) == pytest.approx((first_s, last_s, num))


def test_a_question_of_serve_survives_a_moment_of_cut_connections() -> None:
    """Three in a row, as where bits of TLS flip; a link that stays bad is given up in a third of a second."""
    clock, asked = Clock(), list[float]()
    works = verifier(clock, asked)

    def cut(request: httpx.Request) -> httpx.Response:
        if len(asked) == 3:
            return works(request)
        asked.append(clock.now)
        raise httpx.RemoteProtocolError("Server disconnected without sending a response.", request=request)

    assert run(facts_from(clock, cut, retry=quick(1), jitter=0.5)) == FACTS
    assert asked == pytest.approx([0.0, 0.05, 0.15, 0.35])
    with pytest.raises(CloudError, match="after 4 attempts"):
        run(facts_from(Clock(), cut, retry=quick(1), jitter=0.5))


def test_a_file_that_allows_it_shortens_no_wait_of_other_modes(
    fake_bundle: Path, outrider: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a text that the draft can write alone gives its cloud up after 3 s."""
    policies: list[RetryPolicy | None] = []

    def noted(urls: Any, retry: RetryPolicy | None, **given: Any) -> Endpoints:
        policies.append(retry)
        return Endpoints(urls, retry, **given)

    monkeypatch.setattr("outrider.edge.cli.run.Endpoints", noted)
    monkeypatch.setenv("OUTRIDER_OFFLINE_OK", "true")
    with serve_fake() as cloud:
        for mode in Mode:
            given = ["--draft", fake_bundle, "--cloud", cloud.url, "--max-tokens", "4", "--mode", mode.value]
            outrider("run", "def def", *given, *([] if mode is Mode.CLOUD_ONLY else ["--runtime", "ngram"]))
            assert policies.pop() is (OFFLINE_RETRY if mode is Mode.STREAM else None)


async def test_an_outage_that_was_given_up_is_not_waited_out_again() -> None:
    """Else `run --offline-ok` is silent for 3 s at each look for a cloud; once one answers, its next outage is."""
    clock, is_up, waited = Clock(), True, list[float]()

    def handle(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=FACTS.model_dump()) if is_up else httpx.Response(503)

    async with scripted_client(handle) as client:
        endpoints = Endpoints([client], OFFLINE_RETRY, clock.sleep, clock, jitter=lambda: 0.5)
        for is_up in (True, False, False, True, False):
            began = clock.now
            with nullcontext() if is_up else pytest.raises(CloudError):
                await endpoints.call(lambda client: client.model_facts())
            waited.append(clock.now - began)
    up, first, second, up_again, third = waited
    assert up == up_again == 0.0 and first == pytest.approx(third) and first >= 3.0 and second < 0.1


@pytest.mark.parametrize("status", [425, 500, 501, 507, 520, 521, 522, 523, 524, 525, 526, 527, 529, 530, 599])
def test_another_verifier_is_asked_where_a_proxy_says_that_one_is_away(status: int) -> None:
    """Whatever number its proxy gives that; the request is not at fault."""
    clock = Clock()
    away, works = verifier(clock, [], "0", status=status), verifier(clock, [])
    assert run(facts_from(clock, away, works)) == FACTS and not clock.pauses
