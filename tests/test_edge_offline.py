"""Tests text without a cloud: only where it is allowed, marked as unverified, and checked once a cloud answers."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from tests.faulty_proxy import FaultyProxy
from tests.local_endpoint import fake_draft, serve_local
from tests.serving import StepGate, fake_tokenizer, serve_fake, target_tokens
from tests.test_edge_serve import (
    DRAFTS,
    MESSAGES,
    PROMPT,
    SAMPLED,
    SURE,
    body,
    chunks_of,
    expected,
    fake_bundle,
    run_main,
)

from outrider.edge.cli.run import offline_line
from outrider.edge.cli.summary import summary_lines
from outrider.edge.cli.terminal import TokenPrinter
from outrider.edge.devices.power import OnBattery, PowerWatch
from outrider.edge.drafting.drafter import ModelDrafter, NgramDrafter
from outrider.edge.link.endpoints import Endpoints, RetryPolicy
from outrider.edge.link.origin import TextOrigin
from outrider.edge.modes.assemble import make_agent
from outrider.edge.modes.offline import OfflineText, OfflineWriter, _without_first, whole_result
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationRequest, Mode, Source, TokenBatch
from outrider.edge.serve.state import OfflineSettings
from outrider.edge.serve.unverified import MAX_KEPT, MAX_KEPT_TOKENS, KeptText, UnverifiedAnswers
from outrider.models.client.client import VerifierClient
from outrider.models.client.errors import EndpointUnfit, EndpointWrong
from outrider.models.errors import CloudError, RequestError
from outrider.models.http.answer_text import TextStyle
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.chooser import TokenLogprobs

__all__ = ["fake_bundle"]  # a fixture

PARAMS = SamplingParams(0.8, seed=3)
TOKENS = [7, 8, 9, 10]
COUNT = 40
QUICK = RetryPolicy(max_failures=1, max_outage_s=0.0, max_loading_s=0.0)
DRAFT = OfflineSettings("a-fake-draft", 4096)


class Script:
    """Runs an OfflineWriter against one cloud, and records what a user sees."""

    def __init__(self, agreement: float = 1.0) -> None:
        self.agreement = agreement
        self.shown: list[int] = []
        self.num_unverified = 0
        self.replaced_at: list[int] = []
        self.confirmed = 0
        self.pauses: list[float] = []

    def on_tokens(self, batch: TokenBatch) -> None:
        self.shown += batch.tokens
        self.num_unverified += len(batch.tokens) if batch.is_unverified else 0

    def on_replaced(self, verified: Sequence[int]) -> None:
        self.replaced_at.append(len(verified))
        del self.shown[len(verified) :]

    def on_confirmed(self, num: int) -> None:
        self.confirmed += num

    async def sleep(self, seconds: float) -> None:
        """Passes once the draft has written four tokens more, or the text is whole."""
        self.pauses.append(seconds)
        num_written = self.num_unverified
        while self.num_unverified < min(COUNT, num_written + 4):
            await asyncio.sleep(0)

    async def run(self, url: str, find_cloud: Any = None, is_up: bool = True) -> OfflineText:
        async with VerifierClient(url) as client:
            drafter = ModelDrafter(fake_draft(self.agreement))
            agent = make_agent(Mode.STREAM, Endpoints([client], QUICK), drafter, depth="4")
            assert isinstance(agent, StreamAgent) and agent.drafter is not None
            writer = OfflineWriter(agent, agent.drafter, frozenset(), find_cloud, self.on_confirmed, self.on_replaced)
            writer.sleep = self.sleep
            request = GenerationRequest(tuple(TOKENS), PARAMS, COUNT, ignore_eos=True)
            return await asyncio.wait_for(writer.generate(request, self.on_tokens, is_up=is_up), 30.0)


def truth() -> list[int]:
    return target_tokens(TOKENS, COUNT, PARAMS)


def test_without_a_cloud_the_draft_writes_alone_and_says_so() -> None:
    """A draft that agrees with the target writes its text; every token is marked all the same."""
    script = Script()
    text = asyncio.run(script.run("http://127.0.0.1:9"))
    assert text.tokens == script.shown == text.local == truth()
    assert script.num_unverified == COUNT and text.as_json()["verified"] is False
    assert "UNVERIFIED: the draft wrote the last 40 of 40 tokens alone" in offline_line(text)
    result = whole_result(text)
    assert result.tokens == tuple(truth()) and set(result.sources) == {Source.UNVERIFIED}
    assert summary_lines(result)[0].endswith(", no target pass")


@pytest.mark.parametrize("agreement", [1.0, 0.7])
def test_what_was_written_alone_is_verified_once_a_cloud_is_back(agreement: float) -> None:
    """The accepted beginning is confirmed, the rest is replaced: the text is the target's, token by token."""
    script = Script(agreement)

    async def check() -> OfflineText:
        with serve_fake(config=SURE) as cloud:

            async def find_cloud() -> bool:
                return script.num_unverified >= COUNT // 2

            return await script.run(cloud.url, find_cloud, is_up=False)

    text = asyncio.run(check())
    assert text.verified == script.shown == truth() and not text.local
    assert text.num_local == script.num_unverified == text.num_confirmed + text.num_replaced >= COUNT // 2
    assert script.confirmed == text.num_confirmed
    assert (text.num_replaced == 0) == (agreement == 1.0) == (not script.replaced_at)
    assert set(whole_result(text).sources) <= {Source.DRAFT, Source.TARGET}
    assert "the target confirmed" in offline_line(text)


def test_a_cloud_that_answers_and_serves_no_text_holds_nothing_up() -> None:
    """It is tried again at once, and then after pauses: the draft writes on meanwhile, and the text ends unverified."""
    script, looks = Script(), list[int]()

    async def find_cloud() -> bool:
        looks.append(script.num_unverified)
        return True

    text = asyncio.run(script.run("http://127.0.0.1:9", find_cloud))
    assert text.local == truth() and not text.verified
    assert script.pauses[:6] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert len(looks) <= 1 + len(script.pauses)
    assert text.as_json()["error"] is not None


def test_what_is_said_of_each_token_goes_with_it() -> None:
    """Where the first tokens of a commit are shown already: ranks, alternatives and logprobs are of the others."""
    logprobs = tuple(TokenLogprobs(token, -1.0, ()) for token in (5, 6, 7))
    batch = TokenBatch((5, 6, 7), 2, 0.0, ranks=(0, 3, 8), alternatives=frozenset({1}), logprobs=logprobs)
    rest = _without_first(batch, 1)
    assert (rest.tokens, rest.num_accepted, rest.ranks) == ((6, 7), 1, (3, 8))
    assert rest.alternatives == {0} and rest.logprobs == logprobs[1:]


def test_other_texts_draft_between_the_pieces_of_a_prompt() -> None:
    """Of a text that the draft writes alone: what another text asks of the thread comes after the piece in work."""
    done: list[str] = []

    class Slow(ModelDrafter):
        left = 3
        agent: StreamAgent

        @property
        def is_behind(self) -> bool:
            return self.left > 0

        def read_on(self) -> None:
            done.append("piece")
            self.left -= 1
            self.agent.scheduler.do(lambda: done.append("another text's"))

    async def check() -> None:
        async with VerifierClient("http://127.0.0.1:9") as client:
            drafter = Slow(fake_draft())
            agent = make_agent(Mode.STREAM, Endpoints([client], QUICK), drafter)
            assert isinstance(agent, StreamAgent)
            drafter.agent = agent
            writer = OfflineWriter(agent, drafter, frozenset())
            request = GenerationRequest(tuple(TOKENS), PARAMS, 1, ignore_eos=True)
            await asyncio.wait_for(writer.generate(request, lambda batch: None, is_up=False), 30.0)

    asyncio.run(check())
    assert done[:5] == ["piece", "another text's", "piece", "another text's", "piece"]


def test_a_cloud_that_is_lost_in_mid_text_leaves_a_verified_beginning() -> None:
    """The draft goes on from there; only its own tokens are marked."""
    gate, script = StepGate(), Script(agreement=0.0)
    gate.allow(6)

    async def check() -> OfflineText:
        with serve_fake(config=SURE, gate=gate) as cloud:
            address = httpx.URL(cloud.url)
            assert address.port is not None
            with FaultyProxy(address.host, address.port) as proxy:
                writing = asyncio.create_task(script.run(proxy.url))
                while not script.shown:
                    await asyncio.sleep(0.002)
            gate.open()
            return await writing

    text = asyncio.run(check())
    assert text.verified and text.verified == truth()[: len(text.verified)]
    assert len(text.tokens) == COUNT and text.local and script.num_unverified == len(text.local)


def test_lookup_alone_writes_nothing() -> None:
    """Repeating passages is no text: the error of the cloud stays one."""

    async def check() -> None:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(VerifierClient("http://127.0.0.1:9"))
            agent = make_agent(Mode.STREAM, Endpoints([client], QUICK), NgramDrafter())
            assert isinstance(agent, StreamAgent) and agent.drafter is not None
            writer = OfflineWriter(agent, agent.drafter, frozenset())
            with pytest.raises(CloudError, match="the draft cannot write alone either"):
                await writer.generate(GenerationRequest((1, 2, 1, 2), PARAMS, 8), lambda batch: None)

    asyncio.run(check())


def test_a_refusal_is_no_outage() -> None:
    """A cloud that answers and refuses does not make the draft write."""
    with serve_fake() as cloud:
        script = Script()

        async def check() -> None:
            async with VerifierClient(cloud.url) as client:
                agent = make_agent(Mode.STREAM, Endpoints([client], QUICK), ModelDrafter(fake_draft()))
                assert isinstance(agent, StreamAgent) and agent.drafter is not None
                writer = OfflineWriter(agent, agent.drafter, frozenset())
                with pytest.raises(RequestError):
                    await writer.generate(GenerationRequest((100_000,), PARAMS, 8), script.on_tokens)

        asyncio.run(check())
        assert not script.shown


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_file_never_gets_text_that_is_taken_back(is_terminal: bool) -> None:
    """A terminal shows unverified text at once, in its own colour; a file gets it once it is confirmed."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, color_system="standard" if is_terminal else None)
    tokenizer = fake_tokenizer()
    ids = tokenizer.encode("def verify(tokens)")
    printer = TokenPrinter(console, tokenizer.detokenizer())
    printer(TokenBatch(tuple(ids), 0, 0.0, is_unverified=True))
    if is_terminal:
        assert "\x1b[33m" in out.getvalue()
        return
    assert out.getvalue() == ""
    printer.confirm_unverified(2)
    printer.replace_unverified(tokenizer.detokenizer(context=ids[:2]))
    printer(TokenBatch(tuple(tokenizer.encode(" 東京")), 0, 0.0))
    printer.finish()
    assert out.getvalue() == f"{tokenizer.decode(ids[:2])} 東京"


def test_serve_marks_what_no_cloud_has_seen_and_has_it_verified_later() -> None:
    """Whole, streamed and as a chat. Another client cannot ask for it, and an answer is verified once."""
    with serve_fake(config=SURE) as cloud:
        address = httpx.URL(cloud.url)
        assert address.port is not None
        with FaultyProxy(address.host, address.port) as proxy:
            port = proxy.port
        with (
            serve_local(f"http://127.0.0.1:{port}", DRAFTS, runtime=fake_draft(agreement=0.9), offline=DRAFT) as local,
            httpx.Client(base_url=local.url, timeout=30.0) as client,
        ):
            answer = client.post("/v1/completions", json=body(model="fake"))
            assert answer.status_code == 200, answer.text
            document = answer.json()
            assert document["model"] == "a-fake-draft"
            assert document["choices"][0]["outrider"] == {"verified": False, "unverified_tokens": 48}
            streamed = chunks_of(client.post("/v1/completions", json=body(stream=True)))
            marks = [chunk["choices"][0].get("outrider", {}).get("unverified_tokens", 0) for chunk in streamed]
            assert sum(marks) == 48
            text = "".join(chunk["choices"][0]["text"] for chunk in streamed)
            assert text == document["choices"][0]["text"]
            fields = {"messages": MESSAGES, "max_tokens": 24, "ignore_eos": True, **SAMPLED}
            chat = client.post("/v1/chat/completions", json=fields).json()
            assert chat["choices"][0]["outrider"]["unverified_tokens"] == 24
            away = client.post("/v1/outrider/verify", json={"id": document["id"]})
            assert away.status_code == 503 and away.json()["error"]["code"] == "no_verifier"
            local.wait_until(local.is_at_rest)
            with FaultyProxy(address.host, address.port, listen_port=port):
                kept = local.core.unverified
                kept._in_work.add(document["id"])  # as while another call has it verified
                busy = client.post("/v1/outrider/verify", json={"id": document["id"]})
                assert busy.status_code == 409 and busy.json()["error"]["code"] == "answer_in_work"
                kept._in_work.clear()
                verified = client.post("/v1/outrider/verify", json={"id": document["id"]})
                assert verified.status_code == 200, verified.text
                (choice,) = verified.json()["choices"]
                assert choice["text"] == expected() and verified.json()["model"] == "fake"
                assert choice["confirmed_tokens"] + choice["replaced_tokens"] == 48
                assert choice["is_same"] == (text == expected())
                again = client.post("/v1/outrider/verify", json={"id": document["id"]})
                assert again.status_code == 404 and again.json()["error"]["code"] == "unknown_answer"
                with pytest.raises(RequestError, match="no unverified answer"):
                    local.core.unverified.find(chat["id"], b"another client")
                alone = httpx.post(f"{cloud.url}/v1/chat/completions", json=fields).json()
                (choice,) = client.post("/v1/outrider/verify", json={"id": chat["id"]}).json()["choices"]
                assert choice["text"] == alone["choices"][0]["message"]["content"]
                online = client.post("/v1/completions", json=body()).json()
                assert online["choices"][0]["text"] == expected() and "outrider" not in online["choices"][0]
                local.wait_until(local.is_at_rest)


def test_an_answer_is_checked_by_one_call_at_a_time() -> None:
    """It stays where the check fails, and is gone after it."""
    answers, text = UnverifiedAnswers(), kept_text()
    answers.keep("one", b"owner", 0, text)
    with pytest.raises(CloudError), answers.checking("one", b"owner") as kept:
        assert kept == {0: text}
        with pytest.raises(RequestError, match="another call has the answer 'one' verified") as busy:
            answers.checking("one", b"owner").__enter__()
        assert busy.value.status == 409
        with pytest.raises(RequestError, match="no unverified answer"):
            answers.checking("one", b"other").__enter__()
        raise CloudError("no cloud answers")
    with answers.checking("one", b"owner"):
        pass
    with pytest.raises(RequestError, match="no unverified answer"):
        answers.find("one", b"owner")


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


def test_a_check_ends_when_its_client_leaves_and_can_be_asked_for_again() -> None:
    """Its session in the cloud ends, and the answer is not lost."""
    gate = StepGate()
    with serve_fake(config=SURE, gate=gate) as cloud:
        address = httpx.URL(cloud.url)
        assert address.port is not None
        with FaultyProxy(address.host, address.port) as proxy:
            port = proxy.port
        with serve_local(f"http://127.0.0.1:{port}", DRAFTS, offline=DRAFT) as local:
            answer = httpx.post(f"{local.url}/v1/completions", json=body(), timeout=30.0).json()

            async def leave() -> None:
                async with httpx.AsyncClient(base_url=local.url, timeout=30.0) as client:
                    call = asyncio.create_task(client.post("/v1/outrider/verify", json={"id": answer["id"]}))
                    while not cloud.core.sessions:
                        await asyncio.sleep(0.002)
                    call.cancel()
                    await asyncio.wait({call})

            with FaultyProxy(address.host, address.port, listen_port=port):
                asyncio.run(leave())
                local.wait_until(local.is_at_rest)
                gate.open()
                again = httpx.post(f"{local.url}/v1/outrider/verify", json={"id": answer["id"]}, timeout=30.0)
                assert again.status_code == 200 and again.json()["choices"][0]["text"] == expected()
                local.wait_until(local.is_at_rest)


def test_run_writes_and_marks_a_text_without_a_cloud(
    fake_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command: text to standard output, the mark to standard error; as JSON too; on battery with half the work."""
    monkeypatch.setattr("outrider.edge.modes.assemble.open_sequence_runtime", lambda *given: fake_draft(1.0))
    monkeypatch.setattr(PowerWatch.__init__, "__defaults__", (OnBattery.HALF, lambda: "on battery, 40 %", float))
    command = ["run", PROMPT, "--draft", str(fake_bundle), "--cloud", "http://127.0.0.1:9", "--max-tokens", "48"]
    sampled = ["--temperature", "0.8", "--param", "top_p=0.95", "--seed", "5", "--ignore-eos", "--offline-ok"]
    monkeypatch.setattr("outrider.edge.cli.run.OFFLINE_RETRY", QUICK)
    assert run_main(monkeypatch, *command, *sampled) == 0
    shown = capsys.readouterr()
    assert shown.out.removesuffix("\n") == expected()
    said = " ".join(shown.err.split())
    assert "UNVERIFIED: the draft wrote the last 48 of 48 tokens alone" in said and "on battery, 40 %" in said
    assert run_main(monkeypatch, *command, *sampled, "--on-battery", "full", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["offline"]["num_unverified"] == 48 and document["offline"]["verified"] is False
    assert set(document["sources"]) == {"unverified"} and document["eased_by"] is None
    assert run_main(monkeypatch, *command, "--offline-ok", "--mode", "cloud-only") == 2
    assert "--offline-ok needs a draft that streams" in capsys.readouterr().err


def test_an_address_that_was_wrong_is_tried_again() -> None:
    """What cannot go on with the text stays out; a name that was not found may be found once the network is back."""
    origin = TextOrigin()
    unfit = EndpointUnfit("another target")
    origin.unfit |= {"http://one": EndpointWrong("no host has this name"), "http://two": unfit}
    origin.forget_addresses()
    assert origin.unfit == {"http://two": unfit}


def test_without_the_option_a_missing_cloud_is_an_error() -> None:
    """As before: 503, and no text."""
    with serve_local("http://127.0.0.1:9", DRAFTS) as local:
        answer = httpx.post(f"{local.url}/v1/completions", json=body(prompt=PROMPT), timeout=30.0)
        assert answer.status_code == 503 and json.loads(answer.text)["error"]["code"] == "no_verifier"
