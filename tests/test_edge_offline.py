"""Tests text without a cloud: only where it is allowed, marked as unverified, and checked once a cloud answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.agents import SURE, free_port, proxy_to
from tests.commands import KEY, OTHER_KEY, Outrider, screen
from tests.local_endpoint import (
    DRAFTS,
    MESSAGES,
    PARAMS,
    PROMPT,
    SAMPLED,
    LocalEndpoint,
    body,
    documents_of,
    expected,
    fake_draft,
    serve_local,
)
from tests.serving import FakeServer, StepGate, bearer, code_of, fake_tokenizer, serve_fake, target_tokens

from outrider.edge.cli.run import offline_line
from outrider.edge.cli.summary import summary_lines
from outrider.edge.cli.terminal import TokenPrinter
from outrider.edge.devices.power import OnBattery, PowerWatch
from outrider.edge.drafting.drafter import Drafter, ModelDrafter, NgramDrafter
from outrider.edge.link.endpoints import Endpoints, RetryPolicy
from outrider.edge.link.origin import TextOrigin
from outrider.edge.modes.assemble import make_agent
from outrider.edge.modes.offline import OfflineText, OfflineWriter, _without_first, whole_result
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationRequest, Mode, Source, TokenBatch
from outrider.edge.serve.state import LocalSettings, OfflineSettings
from outrider.edge.serve.unverified import MAX_KEPT, MAX_KEPT_TOKENS, KeptText, UnverifiedAnswers
from outrider.models.client.client import VerifierClient
from outrider.models.client.errors import EndpointUnfit, EndpointWrong
from outrider.models.errors import CloudError, RequestError
from outrider.models.http.answer_text import TextStyle
from outrider.models.http.security import KeyRing
from outrider.models.processors.chooser import TokenLogprobs
from outrider.models.runtimes.ngram import QuotedText

TOKENS = [7, 8, 9, 10]
COUNT = 40
REQUEST = GenerationRequest(tuple(TOKENS), PARAMS, COUNT, ignore_eos=True)
QUICK = RetryPolicy(max_failures=1, max_outage_s=0.0, max_loading_s=0.0)
DRAFT = OfflineSettings("a-fake-draft", 4096)


def writer_of(client: VerifierClient, drafter: Drafter, *arguments: Any) -> OfflineWriter:
    agent = make_agent(Mode.STREAM, Endpoints([client], QUICK), drafter, depth="4")
    assert isinstance(agent, StreamAgent) and agent.drafter is not None
    return OfflineWriter(agent, agent.drafter, frozenset(), *arguments)


class Script:
    """Runs an OfflineWriter against one cloud, and records what a user sees."""

    def __init__(self, agreement: float = 1.0) -> None:
        self.agreement = agreement
        self.shown, self.pauses, self.confirmed = list[int](), list[float](), list[int]()
        self.num_unverified = self.num_replacements = 0

    def on_tokens(self, batch: TokenBatch) -> None:
        self.shown += batch.tokens
        self.num_unverified += len(batch.tokens) if batch.is_unverified else 0

    def on_replaced(self, verified: Sequence[int]) -> None:
        self.num_replacements += 1
        del self.shown[len(verified) :]

    async def sleep(self, seconds: float) -> None:
        """Passes once the draft has written four tokens more, or the text is whole."""
        self.pauses.append(seconds)
        num_written = self.num_unverified
        while self.num_unverified < min(COUNT, num_written + 4):
            await asyncio.sleep(0)

    async def run(self, url: str, find_cloud: Any = None, is_up: bool = True) -> OfflineText:
        async with VerifierClient(url) as client:
            told = (find_cloud, self.confirmed.append, self.on_replaced)
            writer = writer_of(client, ModelDrafter(fake_draft(self.agreement)), *told)
            writer.sleep = self.sleep
            return await writer.generate(REQUEST, self.on_tokens, is_up=is_up)


TRUTH = target_tokens(TOKENS, COUNT, PARAMS)
NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize("answers", [False, True])
async def test_without_a_cloud_the_draft_writes_alone_and_says_so(answers: bool) -> None:
    """A draft that agrees with the target writes its text; every token is marked all the same. A cloud that answers and
    serves no text holds nothing up: it is tried again at once, and then after pauses, while the draft writes on.
    """
    script, looks = Script(), list[int]()

    async def find_cloud() -> bool:
        looks.append(script.num_unverified)
        return True

    text = await script.run(NOWHERE, find_cloud if answers else None)
    result = whole_result(text)
    assert list(result.tokens) == text.tokens == script.shown == text.local == TRUTH and not text.verified
    assert script.num_unverified == COUNT and text.as_json()["verified"] is False
    assert set(result.sources) == {Source.UNVERIFIED} and summary_lines(result)[0].endswith(", no target pass")
    assert "UNVERIFIED: the draft wrote the last 40 of 40 tokens alone" in offline_line(text)
    assert script.pauses[:6] == ([1.0, 2.0, 4.0, 8.0, 10.0, 10.0] if answers else [])
    assert len(looks) <= 1 + len(script.pauses) and text.as_json()["error"] is not None


@pytest.mark.parametrize("agreement", [1.0, 0.7])
async def test_what_was_written_alone_is_verified_once_a_cloud_is_back(agreement: float) -> None:
    """The accepted beginning is confirmed, the rest is replaced: the text is the target's, token by token."""
    script = Script(agreement)

    with serve_fake(config=SURE) as cloud:

        async def find_cloud() -> bool:
            return script.num_unverified >= COUNT // 2

        text = await script.run(cloud.url, find_cloud, is_up=False)
    assert text.verified == script.shown == TRUTH and not text.local
    assert text.num_local == script.num_unverified == sum(script.confirmed) + text.num_replaced >= COUNT // 2
    assert sum(script.confirmed) == text.num_confirmed
    assert (text.num_replaced == 0) == (agreement == 1.0) == (not script.num_replacements)
    assert set(whole_result(text).sources) <= {Source.DRAFT, Source.TARGET}
    assert "the target confirmed" in offline_line(text)


def test_what_is_said_of_each_token_goes_with_it() -> None:
    """Where the first tokens of a commit are shown already: ranks, alternatives and logprobs are of the others."""
    logprobs = tuple(TokenLogprobs(token, -1.0, ()) for token in (5, 6, 7))
    batch = TokenBatch((5, 6, 7), 2, 0.0, ranks=(0, 3, 8), alternatives=frozenset({1}), logprobs=logprobs)
    rest = TokenBatch((6, 7), 1, 0.0, ranks=(3, 8), alternatives=frozenset({0}), logprobs=logprobs[1:])
    assert _without_first(batch, 1) == rest


async def test_other_texts_draft_between_the_pieces_of_a_prompt() -> None:
    """Of a text that the draft writes alone: what another text asks of the thread comes after the piece in work."""
    done: list[str] = []

    class Slow(ModelDrafter):
        @property
        def is_behind(self) -> bool:
            return done.count("piece") < 3

        def read_on(self) -> None:
            done.append("piece")
            writer.agent.scheduler.do(lambda: done.append("another text's"))

    async with VerifierClient(NOWHERE) as client:
        writer = writer_of(client, Slow(fake_draft()))
        await writer.generate(replace(REQUEST, max_tokens=1), lambda batch: None, is_up=False)
    assert done[:5] == ["piece", "another text's", "piece", "another text's", "piece"]


async def test_a_cloud_that_is_lost_in_mid_text_leaves_a_verified_beginning() -> None:
    """The draft goes on from there; only its own tokens are marked."""
    gate, script = StepGate(), Script(agreement=0.0)
    gate.allow(6)

    with serve_fake(config=SURE, gate=gate) as cloud:
        with proxy_to(cloud.url) as proxy:
            writing = asyncio.create_task(script.run(proxy.url))
            while not script.shown:
                await asyncio.sleep(0.002)
        gate.open()
        text = await writing
    assert text.verified and text.verified == TRUTH[: len(text.verified)]
    assert len(text.tokens) == COUNT and text.local and script.num_unverified == len(text.local)


async def test_what_is_an_error_stays_one(server: FakeServer) -> None:
    """Lookup writes nothing alone: repeating passages is no text, its own or a document's. A cloud that answers and
    refuses is no outage.
    """
    for url, drafter, first, error, words in (
        (NOWHERE, NgramDrafter(), 1, CloudError, "the draft cannot write alone either"),
        (NOWHERE, NgramDrafter([QuotedText([1, 2, 3, 1, 2, 4])]), 1, CloudError, "the draft cannot write alone either"),
        (server.url, ModelDrafter(fake_draft()), 100_000, RequestError, "100000"),
    ):
        async with VerifierClient(url) as client:
            writer = writer_of(client, drafter)
            writer.drafter = drafter
            with pytest.raises(error, match=words):
                await writer.generate(GenerationRequest((first, 2, 1, 2), PARAMS, 8), lambda _: pytest.fail("shown"))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_file_never_gets_text_that_is_taken_back(is_terminal: bool) -> None:
    """A terminal shows unverified text at once, in its own colour; a file gets it once it is confirmed."""
    console, out = screen(force_terminal=is_terminal, color_system="standard" if is_terminal else None)
    tokenizer = fake_tokenizer()
    ids = tokenizer.encode("def verify(tokens)")
    printer = TokenPrinter(console, tokenizer.detokenizer())
    printer(TokenBatch(tuple(ids), 0, 0.0, is_unverified=True))
    assert ("\x1b[33m" in out.getvalue()) == bool(out.getvalue()) == is_terminal
    printer.confirm_unverified(2)
    printer.replace_unverified(tokenizer.detokenizer(context=ids[:2]))
    printer(TokenBatch(tuple(tokenizer.encode(" 東京")), 0, 0.0))
    printer.finish()
    assert is_terminal or out.getvalue() == f"{tokenizer.decode(ids[:2])} 東京"


VERIFY, UNVERIFIED = "/v1/outrider/verify", {"verified": False, "unverified_tokens": 48}


@contextmanager
def unreached(
    settings: LocalSettings = DRAFTS, gate: StepGate | None = None
) -> Iterator[tuple[FakeServer, LocalEndpoint, Callable[[], AbstractContextManager[object]]]]:
    """A cloud, an endpoint whose draft writes alone since it does not reach the cloud, and what makes it reach it."""
    port = free_port()
    with (
        serve_fake(config=SURE, gate=gate) as cloud,
        serve_local(f"http://127.0.0.1:{port}", settings, runtime=fake_draft(agreement=0.9), offline=DRAFT) as local,
    ):
        yield cloud, local, lambda: proxy_to(cloud.url, listen_port=port)


def test_serve_marks_what_no_cloud_has_seen_and_has_it_verified_later() -> None:
    """Whole, streamed and as a chat; an answer is verified once."""
    with unreached() as (cloud, local, reached):
        document, (card,) = local.post(body(model="fake")), httpx.get(f"{local.url}/v1/models").json()["data"]
        assert document["model"] == card["id"] == "a-fake-draft" and card["max_model_len"] == 4096
        assert httpx.get(f"{local.url}/v1/models/a-fake-draft").json() == card
        (choice,), asked = document["choices"], {"id": document["id"]}
        assert choice["outrider"] == UNVERIFIED
        streamed, text = documents_of(httpx.post(f"{local.url}/v1/completions", json=body(stream=True), timeout=30.0))
        marks = [chunk["choices"][0].get("outrider", {}).get("unverified_tokens", 0) for chunk in streamed]
        assert sum(marks) == 48 and text == choice["text"]
        assert local.core.metrics.counts["committed"] == 0  # that is what a target has seen
        fields = {"messages": MESSAGES, "max_tokens": 24, "ignore_eos": True, **SAMPLED}
        chat = local.post(fields, "/v1/chat/completions")
        assert chat["choices"][0]["outrider"]["unverified_tokens"] == 24
        assert local.refusal(503, asked, VERIFY) == "no_verifier"
        local.wait_until(local.is_at_rest)
        with reached():
            verified = local.post(asked, VERIFY)
            (choice,) = verified["choices"]
            assert (choice["text"], verified["model"]) == (expected(), "fake")
            assert choice["confirmed_tokens"] + choice["replaced_tokens"] == 48
            assert choice["is_same"] == (text == expected())
            assert local.refusal(404, asked, VERIFY) == "unknown_answer"
            (alone,) = httpx.post(f"{cloud.url}/v1/chat/completions", json=fields).json()["choices"]
            (choice,), (online,) = local.post({"id": chat["id"]}, VERIFY)["choices"], local.post(body())["choices"]
            assert choice["text"] == alone["message"]["content"]
            assert online["text"] == expected() and "outrider" not in online
            local.wait_until(local.is_at_rest)
        assert local.post(body())["choices"][0]["outrider"] == UNVERIFIED
        assert not httpx.get(f"{local.url}/v1/outrider/info").json()["is_up"]  # the next text tries no session


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/outrider/generate"])
def test_the_first_text_of_an_outage_is_written_too(path: str) -> None:
    """Also a conversation, which a cloud would make token ids: with the draft's template, under the draft's name."""
    asked = body() if path == "/v1/completions" else {"messages": MESSAGES, "max_tokens": 24, **SAMPLED}
    asked = {name: asked[name] for name in asked if name != "top_p" or "generate" not in path}
    with unreached() as (_, local, reached):
        with reached():
            assert '"unverified' not in httpx.post(local.url + path, json=asked, timeout=60.0).text
            local.wait_until(local.is_at_rest)
        for _ in range(2):
            answer = httpx.post(local.url + path, json=asked, timeout=60.0)
            assert answer.status_code == 200 and '"unverified' in answer.text, answer.text
            if "chat" in path:
                assert answer.json()["model"] == "a-fake-draft"


def test_an_unverified_answer_is_its_own_clients() -> None:
    """Another key finds none, with a cloud and without; of eight calls at once one has it verified, by one text."""
    gate, own, other = StepGate(), bearer(KEY), bearer(OTHER_KEY)
    with unreached(LocalSettings(KeyRing([KEY, OTHER_KEY]), depth="8"), gate) as (cloud, local, reached):
        asked = {"id": local.post(body(), headers=own)["id"]}
        assert local.refusal(404, asked, VERIFY, headers=other) == "unknown_answer"
        with reached(), ThreadPoolExecutor(8) as pool:
            assert local.refusal(404, asked, VERIFY, headers=other) == "unknown_answer"
            assert local.refusal(401, asked, VERIFY) == "unauthorized"
            url = local.url + VERIFY
            calls = [pool.submit(httpx.post, url, json=asked, headers=own, timeout=60.0) for _ in range(8)]
            try:
                local.wait_until(lambda: sum(call.done() for call in calls) == 7)
                refused = [code_of(call.result()) for call in calls if call.done()]
            finally:
                gate.open()
            assert refused == [(409, "answer_in_work")] * 7
            assert sorted(call.result().status_code for call in calls) == [200, *[409] * 7]
            assert local.refusal(404, asked, VERIFY, headers=own) == "unknown_answer"
            local.wait_until(local.is_at_rest)
            counted = cloud.core.metrics.requests.items()
            assert {status: num for (path, _, status), num in counted if path == "/v1/sessions"} == {200: 1}


def test_a_server_that_ends_ends_its_checks_and_begins_none() -> None:
    """The client learns why."""
    gate = StepGate()
    with unreached(gate=gate) as (cloud, local, reached):
        first, second = ({"id": local.post(body())["id"]} for _ in range(2))
        with reached(), ThreadPoolExecutor(2) as pool:
            checked = pool.submit(httpx.post, local.url + VERIFY, json=first, timeout=60.0)
            local.wait_until(lambda: len(cloud.core.sessions) == 1)
            local.core.is_draining = True
            assert local.refusal(503, second, VERIFY) == "shutting_down"
            local.server.begin_drain(0.0)
            assert code_of(checked.result()) == (503, "shutting_down")
        gate.open()


def test_a_client_with_many_answers_gives_way_to_one_with_few() -> None:
    """However many one client leaves unverified, another's stays; also where they are bounded by their tokens."""
    answers = UnverifiedAnswers()
    answers.keep("few", b"other", 0, kept_text())
    for number in range(3 * MAX_KEPT):
        answers.keep(f"{number}", b"owner", 0, kept_text())
    assert answers.find("few", b"other") and len(answers._kept) == MAX_KEPT
    answers.find(f"{3 * MAX_KEPT - 1}", b"owner")
    answers.keep("large", b"owner", 0, kept_text(MAX_KEPT_TOKENS))
    assert answers.find("few", b"other") and answers._kept.size == kept_text().num_tokens


def kept_text(num_tokens: int = 4) -> KeptText:
    return KeptText(GenerationRequest((1,), PARAMS, COUNT), (), (7,) * num_tokens, None, TextStyle())


async def test_a_check_ends_when_its_client_leaves_and_can_be_asked_for_again() -> None:
    """Its session in the cloud ends, and the answer is not lost."""
    gate = StepGate()
    with unreached(gate=gate) as (cloud, local, reached):
        asked = {"id": local.post(body())["id"]}
        with reached():
            async with httpx.AsyncClient(base_url=local.url, timeout=30.0) as client:
                call = asyncio.create_task(client.post(VERIFY, json=asked))
                while not cloud.core.sessions:
                    await asyncio.sleep(0.002)
                call.cancel()
                await asyncio.wait({call})
            local.wait_until(local.is_at_rest)
            gate.open()
            assert local.post(asked, VERIFY)["choices"][0]["text"] == expected()
            local.wait_until(local.is_at_rest)


def test_run_writes_and_marks_a_text_without_a_cloud(
    fake_bundle: Path, outrider: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command: text to standard output, the mark to standard error; as JSON too; on battery with half the work."""
    monkeypatch.setattr("outrider.edge.modes.assemble.open_sequence_runtime", lambda *given: fake_draft(1.0))
    monkeypatch.setattr(PowerWatch.__init__, "__defaults__", (OnBattery.HALF, lambda: "on battery, 40 %", float))
    command = ["run", PROMPT, "--draft", fake_bundle, "--cloud", NOWHERE, "--max-tokens", "48"]
    sampled = ["--temperature", "0.8", "--param", "top_p=0.95", "--seed", "5", "--ignore-eos", "--offline-ok"]
    monkeypatch.setattr("outrider.edge.cli.run.OFFLINE_RETRY", QUICK)
    monkeypatch.setattr("outrider.edge.cli.draft_source.MAX_LOADING_S", 0.0)
    shown = outrider(*command, *sampled)
    assert shown.out.removesuffix("\n") == expected()
    said = " ".join(shown.err.split())
    assert "UNVERIFIED: the draft wrote the last 48 of 48 tokens alone" in said and "on battery, 40 %" in said
    document = json.loads(outrider(*command, *sampled, "--on-battery", "full", "--json").out)
    assert document["offline"]["num_unverified"] == 48 and document["offline"]["verified"] is False
    assert set(document["sources"]) == {"unverified"} and document["eased_by"] is None
    refused = outrider(*command, "--offline-ok", "--mode", "cloud-only", code=2).err
    assert "--offline-ok needs a draft that streams" in refused


def test_an_address_that_was_wrong_is_tried_again() -> None:
    """What cannot go on with the text stays out; a name that was not found may be found once the network is back."""
    origin = TextOrigin()
    unfit = EndpointUnfit("another target")
    origin.unfit |= {"http://one": EndpointWrong("no host has this name"), "http://two": unfit}
    origin.forget_addresses()
    assert origin.unfit == {"http://two": unfit}
