"""Tests conversations and `outrider chat`: ids that are kept, prefixes that a server holds, commands, Ctrl-C.

A real verifier on a loopback port speaks the fake language, token by token; one test has a real pair with a template.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import stat
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console
from tests.fake_runtime import FakeBatchRuntime, FakeSequenceRuntime
from tests.serving import TURNS_TEMPLATE, FakeServer, StepGate, fake_tokenizer, run_session, serve_fake, target_tokens
from tests.tiny_models import make_chat_pair

from outrider.edge.chat.conversation import Conversation, continued, read_facts
from outrider.edge.chat.messages import Message, load_chat, save_chat
from outrider.edge.cli import chat as chat_module
from outrider.edge.cli.chat import ChatScreen, chat_here
from outrider.edge.cli.command_options import ChatOptions
from outrider.edge.cli.draft_source import Notes
from outrider.edge.cli.line_editor import PipeReader, TerminalReader
from outrider.edge.cli.terminal import ALTERNATIVE_STYLE, TokenPrinter
from outrider.edge.drafting.drafter import ModelDrafter
from outrider.edge.lab.cores import plan_cores
from outrider.edge.lab.laboratory import cloud_process
from outrider.edge.link.endpoints import Endpoints, RetryPolicy
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import HeldPrefix, OnTokens, Origin, TokenBatch
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.errors import CloudError, ConfigError, RequestError
from outrider.models.picks.sampling import SamplingParams

SAMPLED = SamplingParams(0.8, seed=5)
MAX_TOKENS = 12
RETRY = RetryPolicy(max_failures=2, max_outage_s=0.0, max_loading_s=0.0)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with serve_fake(chat_template=TURNS_TEMPLATE) as running:
        yield running


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    """Runs on its own event loop, with a limit that only a hang reaches."""
    return asyncio.run(asyncio.wait_for(scenario, 60.0))


class Recorded(httpx.AsyncBaseTransport):
    """Passes requests on and keeps their bodies by path; `change` may answer in the server's place."""

    def __init__(self, change: Callable[[httpx.Request], httpx.Response | None] = lambda request: None) -> None:
        self._inner = httpx.AsyncHTTPTransport()
        self._change = change
        self.bodies: list[tuple[str, dict[str, Any]]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            self.bodies.append((request.url.path, json.loads(request.content)))
        return self._change(request) or await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        await self._inner.aclose()

    @property
    def sessions(self) -> list[dict[str, Any]]:
        """The bodies of the sessions that were asked for."""
        return [body for path, body in self.bodies if path == "/v1/sessions"]


def unreachable(urls: set[str]) -> Callable[[httpx.Request], None]:
    """Servers at these URLs do not answer, from the moment on at which they are added."""

    def refuse(request: httpx.Request) -> None:
        if any(str(request.url).startswith(url) for url in urls):
            raise httpx.ConnectError("connection refused")

    return refuse


@asynccontextmanager
async def conversing(
    url: str | Sequence[str], transport: Recorded | None = None, drafter: ModelDrafter | None = None, **more: Any
) -> AsyncIterator[Conversation]:
    """A conversation with the fake target."""
    urls = [url] if isinstance(url, str) else url
    clients = [VerifierClient(each, ClientOptions(), transport) for each in urls]
    endpoints = Endpoints(clients, RETRY)
    try:
        tokenizer = fake_tokenizer()
        facts = await read_facts(endpoints)
        agent = StreamAgent(endpoints, drafter)
        yield Conversation(agent, facts, tokenizer, tokenizer.fingerprint, **more)
    finally:
        for client in clients:
            await client.aclose()


def whole(conversation: Conversation, turn: int) -> tuple[int, ...]:
    """The tokens of an answer, made from all of its prompt at once."""
    return tuple(conversation.turns[turn].result.tokens)


async def ask(conversation: Conversation, text: str, max_tokens: int = MAX_TOKENS) -> list[int]:
    """Asks; returns the prompt's ids. The answer is the target's own to them."""
    prompts: list[list[int]] = []

    def show(prompt: Sequence[int]) -> OnTokens:
        prompts.append(list(prompt))
        return lambda batch: None

    turn = await conversation.answer(text, SAMPLED, max_tokens, show)
    expected = target_tokens(prompts[0], max_tokens, SAMPLED)
    assert list(turn.result.tokens) == expected[: len(turn.result.tokens)]
    return prompts[0]


# -- what the server holds ---------------------------------------------------------------------------------------------


def test_a_session_goes_on_from_a_hash(server: FakeServer) -> None:
    """The end names prompt and text where that was asked for; the hash and the new tokens give the whole's text."""
    prompt, more = [5, 17, 99, 3], [7, 8, 9]
    body = {"max_tokens": 10, "ignore_eos": True, "temperature": 0.8, "seed": 3}
    with httpx.Client(base_url=server.url) as client:
        silent = run_session(client, body | {"prompt": prompt})
        assert silent.end.prefix_hash is None
        first = run_session(client, body | {"prompt": prompt, "keep_prefix": True})
        assert first.end.prefix_hash is not None
        again = run_session(client, body | {"prompt": more, "prefix_hash": first.end.prefix_hash})
        everything = [*prompt, *first.tokens, *more]
        assert again.tokens == run_session(client, body | {"prompt": everything}).tokens
        assert again.tokens == target_tokens(everything, 10, SamplingParams(0.8, seed=3))
        assert again.end.usage.prompt_tokens == len(everything)
        assert again.end.usage.cached_prompt_tokens == len(prompt) + len(first.tokens) - 1
        for used in (first.end.prefix_hash, "00" * 16):  # once, and never an unknown one
            refused = client.post("/v1/sessions", json=body | {"prompt": more, "prefix_hash": used})
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "prefix_not_held")
    server.wait_until(lambda: not server.core.slots.num_taken)


def test_a_session_that_is_cancelled_holds_nothing() -> None:
    """Who leaves early is told no hash, so nothing is kept."""
    gate = StepGate()
    body = {"prompt": [1, 2, 3], "max_tokens": 50, "keep_prefix": True, "ignore_eos": True}
    with serve_fake(gate=gate) as server, httpx.Client(base_url=server.url) as client:
        with client.stream("POST", "/v1/sessions", json=body) as response:
            next(response.iter_lines())
        gate.open()
        server.wait_until(lambda: not server.core.slots.num_taken and not server.core.engine.stats().running)
        assert server.core.engine.stats().parked == 0


# -- a conversation keeps ids ------------------------------------------------------------------------------------------


def test_the_next_turn_sends_the_new_tokens_and_a_hash(server: FakeServer) -> None:
    """Both caches go on: the server's by the hash, the draft's by its sequence. Texts equal those of whole prompts."""
    seen: list[int] = []
    draft = FakeSequenceRuntime(vocab_size=fake_tokenizer().size, agreement=0.8, on_step=seen.extend)

    async def scenario() -> None:
        transport = Recorded()
        async with conversing(server.url, transport, ModelDrafter(draft)) as conversation:
            prompts = [await ask(conversation, f"question {number} of a long chat") for number in range(4)]
            sessions = transport.sessions
            assert "prefix_hash" not in sessions[0] and all(body["keep_prefix"] for body in sessions)
            for number in range(1, 4):
                kept = [*prompts[number - 1], *whole(conversation, number - 1)]
                assert prompts[number][: len(kept)] == kept
                assert sessions[number]["prompt"] == prompts[number][len(kept) :]
                turn = conversation.turns[number]
                assert turn.sent_again is None and turn.num_sent == len(sessions[number]["prompt"])
                assert turn.result.cached_prompt_tokens == len(kept) - 1
            assert len(sessions) == 4
            # The draft has read each prompt's token once, not each prompt whole.
            assert len(seen) < len(prompts[-1]) + 4 * 40 < sum(map(len, prompts)) + 4 * 40

    run(scenario())


def test_a_prefix_that_is_gone_is_sent_again(server: FakeServer) -> None:
    """A server that evicted it answers 409, and the same turn goes on with all tokens."""

    async def scenario() -> None:
        async with conversing(server.url) as conversation:
            await ask(conversation, "one")
            conversation._held = HeldPrefix(server.url, "00" * 16, conversation.num_tokens)
            await ask(conversation, "two")
            assert conversation.turns[1].sent_again == "the server held them no longer"
            await ask(conversation, "three")
            assert conversation.turns[2].sent_again is None

    run(scenario())


def test_an_older_server_gets_no_field_that_it_refuses(server: FakeServer) -> None:
    """It refuses the fields by name once; from then on everything is sent, without them."""

    def refuse(request: httpx.Request) -> httpx.Response | None:
        if (
            request.url.path != "/v1/sessions"
            or not {"keep_prefix", "prefix_hash"} & json.loads(request.content).keys()
        ):
            return None
        error = {"code": "invalid_parameter", "message": "keep_prefix: unknown field", "param": "keep_prefix"}
        return httpx.Response(400, json={"error": error})

    async def scenario() -> None:
        transport = Recorded(refuse)
        async with conversing(server.url, transport) as conversation:
            first = await ask(conversation, "one")
            second = await ask(conversation, "two")
            assert [body["prompt"] for body in transport.sessions] == [first, first, second]
            assert conversation.turns[1].sent_again == "the server keeps no prefixes"

    run(scenario())


def test_a_refusal_of_something_else_stays_one(server: FakeServer) -> None:
    """A field that is refused without the new ones too reaches the user, after one more try."""

    def refuse(request: httpx.Request) -> httpx.Response | None:
        error = {"error": {"code": "invalid_parameter", "message": "seed: too large", "param": "seed"}}
        return httpx.Response(400, json=error) if request.url.path == "/v1/sessions" else None

    async def scenario() -> None:
        transport = Recorded(refuse)
        async with conversing(server.url, transport) as conversation:
            with pytest.raises(RequestError, match="seed: too large"):
                await conversation.answer("one", SAMPLED, 4)
            assert len(transport.sessions) == 2 and not conversation.messages

    run(scenario())


def test_a_hash_goes_to_no_other_server() -> None:
    """The next endpoint gets everything: after a fail-over between turns the text is the same."""

    async def scenario(first: FakeServer, second: FakeServer) -> None:
        down: set[str] = set()
        transport = Recorded(unreachable(down))
        async with conversing([first.url, second.url], transport) as conversation:
            await ask(conversation, "one")
            held = conversation._held
            assert held is not None and held.url == first.url
            down.add(first.url)
            await ask(conversation, "two")
            assert conversation.turns[1].result.held is not None
            assert conversation.turns[1].result.held.url == second.url
            by_hash = [body["prefix_hash"] for body in transport.sessions if "prefix_hash" in body]
            assert held.name not in by_hash

    with serve_fake(chat_template=TURNS_TEMPLATE) as first, serve_fake(chat_template=TURNS_TEMPLATE) as second:
        run(scenario(first, second))


def test_a_cut_text_resumes_with_all_tokens(server: FakeServer) -> None:
    """A stream that breaks in the middle of a turn goes on: its hash is used up, so everything is sent."""
    is_cut = False

    class Cut(httpx.AsyncByteStream):
        def __init__(self, inner: httpx.AsyncByteStream) -> None:
            self._inner = inner

        async def __aiter__(self) -> AsyncIterator[bytes]:
            found = b""
            async for chunk in self._inner:
                found += chunk
                first = found.find(b'"base"')
                end = found.find(b"\n\n", first) if first >= 0 else -1
                if end < 0:
                    yield chunk
                    continue
                yield chunk[: len(chunk) - (len(found) - end - 2)]  # on a busy machine a chunk may have the whole text
                raise httpx.ReadError("connection reset")

        async def aclose(self) -> None:
            await self._inner.aclose()

    class Cutting(Recorded):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            nonlocal is_cut
            response = await super().handle_async_request(request)
            if request.url.path == "/v1/sessions" and len(self.sessions) == 2 and not is_cut:
                is_cut = True
                assert isinstance(response.stream, httpx.AsyncByteStream)
                return httpx.Response(200, headers=response.headers, stream=Cut(response.stream))
            return response

    async def scenario() -> None:
        transport = Cutting()
        async with conversing(server.url, transport) as conversation:
            await ask(conversation, "one", 40)
            prompt = await ask(conversation, "two", 40)
            assert conversation.turns[1].result.num_sessions == 2
            *_, by_hash, resumed = transport.sessions
            assert "prefix_hash" in by_hash and "prefix_hash" not in resumed
            assert resumed["prompt"][: len(prompt)] == prompt
            await ask(conversation, "three", 4)
            assert conversation.turns[2].sent_again is None

    run(scenario())


def test_ids_are_kept_where_the_text_is_the_same() -> None:
    """A model may write a text with other tokens than the tokenizer: they stay, and the template's new ones follow."""
    tokenizer = fake_tokenizer()
    rendered = tokenizer.encode("user: verify\nassistant: all(token)\nuser: more\nassistant:")
    head = tokenizer.encode("user: verify\nassistant:")
    letters = [index for letter in " all(token)" for index in tokenizer.encode(letter)]
    assert continued(tokenizer, head, rendered) == rendered
    ids = continued(tokenizer, [*head, *letters], rendered)
    assert ids is not None and ids[: len(head) + len(letters)] == [*head, *letters]
    assert tokenizer.decode(ids) == tokenizer.decode(rendered) and ids != rendered
    assert continued(tokenizer, [*head, *tokenizer.encode(" none")], rendered) is None
    assert continued(tokenizer, rendered, rendered) is None  # nothing new
    assert len(tokenizer.encode("rify")) == 1  # no token begins after half of it
    assert continued(tokenizer, tokenizer.encode("ri"), tokenizer.encode("rify(")) is None


def test_a_changed_system_message_sends_everything_again(server: FakeServer) -> None:
    """And /stats says why."""

    async def scenario() -> None:
        async with conversing(server.url) as conversation:
            await ask(conversation, "one")
            conversation.set_system("be short")
            prompt = await ask(conversation, "two")
            assert fake_tokenizer().decode(prompt).startswith("<system>\nbe short\n<user>\none\n")
            turn = conversation.turns[1]
            assert (turn.num_sent, turn.sent_again) == (turn.num_prompt, "the system message was changed")

    run(scenario())


def test_the_oldest_turns_are_dropped_visibly() -> None:
    """When the context is full: the system message and the question stay, a note says how many went."""
    notes: list[str] = []
    runtime = FakeBatchRuntime(vocab_size=fake_tokenizer().size, max_positions=160)

    async def scenario(url: str) -> None:
        async with conversing(url, on_note=notes.append) as conversation:
            conversation.set_system("short")
            for number in range(12):
                prompt = await ask(conversation, f"tell me about {number}", 10)
                assert len(prompt) + 10 <= 160
            assert notes and conversation.num_dropped >= 2 and "dropped" in notes[0]
            assert conversation.messages[0] == Message(role="system", content="short")
            assert conversation.messages[1].role == "user"
            dropped = [turn for turn in conversation.turns if turn.sent_again == "the oldest turns were dropped"]
            assert len(dropped) == len(notes)
            before = list(conversation.messages)
            for words in (60, 2000):  # refused here, and by the server
                with pytest.raises((ConfigError, RequestError), match="at most 159"):
                    await conversation.answer("word " * words, SAMPLED, 4)
                assert conversation.messages == before

    with serve_fake(runtime=runtime, chat_template=TURNS_TEMPLATE) as server:
        run(scenario(server.url))


def test_an_answer_that_is_stopped_stays(server: FakeServer) -> None:
    """What was said is in the conversation; a question without an answer is not."""

    async def scenario() -> None:
        async with conversing(server.url) as conversation:
            said = asyncio.Event()

            def show(prompt: Sequence[int]) -> OnTokens:
                return lambda batch: said.set()

            task = asyncio.create_task(conversation.answer("one", SAMPLED, 3000, show))
            await said.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert [message.role for message in conversation.messages] == ["user", "assistant"]
            await ask(conversation, "two")
            assert conversation.turns[0].sent_again == "the answer before was cut short"
            assert conversation.turns[0].num_sent == conversation.turns[0].num_prompt
            before = list(conversation.messages)
            with pytest.raises(RequestError, match="2048 KiB"):  # and drops no turn for what cannot fit
                await conversation.answer("x" * (2 << 20), SAMPLED, 4)
            assert conversation.messages == before

    run(scenario())


def test_another_target_takes_over_visibly() -> None:
    """The next turn names it, and no hash of the other is used."""
    notes: list[str] = []

    async def scenario(first: FakeServer, second: FakeServer) -> None:
        down: set[str] = set()
        transport = Recorded(unreachable(down))
        async with conversing([first.url, second.url], transport, on_note=notes.append) as conversation:
            await ask(conversation, "one")
            down.add(first.url)
            await conversation.answer("two", SAMPLED, 4)
            assert "goes on with other" in notes[0] and conversation.model == "other"

    other = FakeBatchRuntime(vocab_size=fake_tokenizer().size, seed=99)
    with serve_fake() as first, serve_fake(name="other", runtime=other) as second:
        run(scenario(first, second))


def test_a_target_without_a_template_is_one_clear_error() -> None:
    """Before any model is loaded; the advice names the command that works."""

    async def scenario(url: str) -> None:
        async with VerifierClient(url) as client:
            with pytest.raises(ConfigError, match=r"fake has no chat template, so it cannot chat; .*outrider run"):
                await read_facts(Endpoints([client], RETRY))

    with serve_fake(has_chat_template=False) as server:
        run(scenario(server.url))


@pytest.mark.parametrize("positions", [0, 10**400])
def test_facts_out_of_bounds_are_refused(server: FakeServer, positions: int) -> None:
    """A server cannot break the chat's arithmetic."""

    def lie(request: httpx.Request) -> httpx.Response | None:
        if request.url.path != "/v1/model":
            return None
        facts = {"name": "liar", "tokenizer": "", "vocab_size": 300, "eos_token_ids": [], "has_chat_template": True}
        return httpx.Response(200, content=json.dumps(facts)[:-1] + f', "max_positions": {positions}}}')

    async def scenario() -> None:
        with pytest.raises(CloudError, match="broke the protocol"):
            async with conversing(server.url, Recorded(lie)):
                pass

    run(scenario())


def test_an_older_server_without_rendering_is_named(server: FakeServer) -> None:
    """404 for /v1/render gives advice, not a list of attempts."""

    def old(request: httpx.Request) -> httpx.Response | None:
        error = {"error": {"code": "not_found", "message": "no such route"}}
        return httpx.Response(404, json=error) if request.url.path == "/v1/render" else None

    async def scenario() -> None:
        async with conversing(server.url, Recorded(old)) as conversation:
            with pytest.raises(CloudError, match="renders no conversations"):
                await conversation.answer("one", SAMPLED, 4)

    run(scenario())


# -- the terminal ------------------------------------------------------------------------------------------------------


class Typed:
    """A reader of given messages; an entry that is a function is called, and None from it reads on."""

    is_typed = True

    def __init__(self, *messages: str | Callable[[], str | None]) -> None:
        self._messages = list(messages)

    async def read(self) -> str | None:
        while self._messages:
            message = self._messages.pop(0)
            if (text := message() if callable(message) else message) is not None:
                return text
        return None


@dataclass
class Shown:
    """What a chat printed, and the conversation that it left."""

    out: str
    about: str
    conversation: Conversation


def chat(url: str, *messages: str | Callable[[], str | None], **options: Any) -> Shown:
    """Chats with the fake target in a terminal without colours."""
    out, about = Console(file=io.StringIO(), width=100), Console(file=io.StringIO(), width=100)

    async def scenario() -> Conversation:
        chosen = ChatOptions(seed=5, max_tokens=MAX_TOKENS, **options)
        notes = Notes(about)
        screen = ChatScreen(chosen, "a fake draft", out, notes, Typed(*messages))
        async with conversing(url, on_note=notes.line) as conversation:
            await screen.run(conversation)
            return conversation

    conversation = run(scenario())
    assert isinstance(out.file, io.StringIO) and isinstance(about.file, io.StringIO)
    return Shown(out.file.getvalue(), about.file.getvalue(), conversation)


def test_commands(server: FakeServer, tmp_path: Path) -> None:
    """Each does what /help says; mistakes are answered, and the chat goes on."""
    path = tmp_path / "a chat.json"
    shown = chat(
        server.url,
        "/help",
        "/system be kind",
        "//slash",
        f"/save {path}",
        "/stats",
        "/stats -v",
        "/stats all",
        "/seed",
        "/seed 77",
        "/seed x",
        "/clear",
        "/save",
        "/nonsense",
        "/sta",
        f"/load {tmp_path / 'missing'}",
        f"/load {path}",
        "/system",
        "/quit",
        "never asked",
    )
    about = shown.about
    for name in chat_module.COMMANDS:
        assert name in about
    for expected in (
        "system: be kind",
        f"saved to {path}".replace("\n", ""),
        "target: fake; drafted by: a fake draft",
        "1 answer; the conversation has",
        "no turn was sent again",
        "tokens per target pass",
        "last answer, first token after",
        "error: /stats does not know all; /stats -v shows all figures",
        "seed 5\n",
        "seed 77\n",
        "error: the seed is 'x'; expected a number",
        "cleared",
        "error: no such command /nonsense; /help lists them",
        "error: no such command /sta; did you mean /stats?",
        "name a chat that /save wrote",
        "1 turn, with fake",
        "error: /save needs a name: /save FILE",
    ):
        assert expected in about.replace("\n", " ") or expected in about, (expected, about)
    assert [message.role for message in shown.conversation.messages] == ["system", "user", "assistant"]
    assert shown.conversation.messages[1].content == "/slash"
    assert shown.out.strip("\n") and "never" not in shown.out
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert saved["messages"][1] == {
        "role": "user",
        "content": "/slash",
    }  # /save after /clear has no name
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_ctrl_c_ends_the_answer_and_not_the_chat() -> None:
    """A real SIGINT in the middle of an answer; what it said stays, and the next question is answered."""
    runtime = FakeBatchRuntime(vocab_size=fake_tokenizer().size, max_positions=100_000, num_blocks=20_000)

    class Interrupting(TokenPrinter):
        def __call__(self, batch: TokenBatch) -> None:
            super().__call__(batch)
            if len(batch.tokens) and not is_done:
                is_done.append(True)
                os.kill(os.getpid(), signal.SIGINT)

    is_done: list[bool] = []
    before = signal.getsignal(signal.SIGINT)
    with serve_fake(runtime=runtime, chat_template=TURNS_TEMPLATE) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_module, "TokenPrinter", Interrupting)
        shown = chat(server.url, "one", "/stats", "two")
    assert "(stopped)" in shown.about and len(shown.conversation.turns) == 1
    assert [message.content for message in shown.conversation.messages][::2] == ["one", "two"]
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_at_the_prompt_says_how_to_leave(server: FakeServer) -> None:
    """Somebody who typed it twice does not lose the conversation."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    assert "Ctrl-D or /quit ends the chat." in chat(server.url, interrupt, "/quit").about


def test_an_error_ends_an_answer_and_not_the_chat(server: FakeServer) -> None:
    """The terminal shows it; a script gets the exception."""
    shown = chat(server.url, "x" * (2 << 20), "one")
    assert "error: the message has 2048 KiB" in shown.about and len(shown.conversation.turns) == 1
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RequestError, match="2048 KiB"):
        patch.setattr(Typed, "is_typed", False)
        chat(server.url, "x" * (2 << 20), "one")


def test_saved_chats_are_checked(tmp_path: Path) -> None:
    """Another file is never replaced or taken for a chat."""
    messages = [Message(role="user", content="é\x1b"), Message(role="assistant", content="\ud7ff")]
    path = tmp_path / "chat.json"
    save_chat(path, messages, "fake")
    save_chat(path, messages[:1], "fake")
    assert load_chat(path).messages == messages[:1] and list(tmp_path.iterdir()) == [path]
    for text in ("", "{}", '{"format": "outrider-chat", "messages": [{"role": "tool", "content": ""}]}', "\x00"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is no saved chat: "):
            load_chat(path)
        with pytest.raises(ConfigError, match="exists and is no saved chat; choose another name"):
            save_chat(path, messages, "fake")
    system = [messages[0], Message(role="system", content="late")]
    path.unlink()
    save_chat(path, system, "fake")
    with pytest.raises(ConfigError, match="a system message stands after others"):
        load_chat(path)
    with pytest.raises(ConfigError, match="cannot be saved"):
        save_chat(tmp_path / "nowhere" / "chat.json", messages, "fake")


def test_a_pipe_is_read_as_utf_8_whatever_the_system_s_code_page() -> None:
    """Windows would read it in its own; what is no UTF-8 is an error and no other text."""

    def read(data: bytes) -> str | None:
        return asyncio.run(PipeReader(io.TextIOWrapper(io.BytesIO(data), encoding="cp1252")).read())

    assert read("a \u2013 b\n".encode()) == "a \u2013 b"
    with pytest.raises(ConfigError, match="not UTF-8"):
        read(b"\xff\n")


def test_a_pipe_gives_a_message_per_line() -> None:
    """A backslash at a line's end goes on in the next; the end of the file is the end of the chat."""
    reader = PipeReader(io.StringIO("one\ntwo \\\nthree\n/stats"))

    async def scenario() -> list[str | None]:
        return [await reader.read() for _ in range(4)]

    assert run(scenario()) == ["one", "two \nthree", "/stats", None]


def test_the_editor_takes_several_lines_and_keeps_a_history(tmp_path: Path) -> None:
    """Enter sends; Alt-Enter and a backslash begin a line; the arrow goes back; Ctrl-C and Ctrl-D are told apart."""
    history = tmp_path / "history"

    async def scenario() -> list[str | None]:
        with create_pipe_input() as keys:
            reader = TerminalReader(history, ["/help"], input=keys, output=DummyOutput())
            found = []
            for typed in ("one\r", "two\x1b\rmore\r", "three\\\rfour\r", "\x1b[A\x1b[A\x1b[A!\r"):
                keys.send_text(typed)
                found.append(await reader.read())
            keys.send_text("half\x03")
            with pytest.raises(KeyboardInterrupt):
                await reader.read()
            keys.send_text("\x04")
            return [*found, await reader.read()]

    assert run(scenario()) == ["one", "two\nmore", "three\nfour", "two\nmore!", None]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600 and "+one" in history.read_text()
    with pytest.raises(ConfigError, match="cannot be written"):
        TerminalReader(tmp_path / "nowhere" / "history", [])


def test_tokens_are_coloured_by_origin() -> None:
    """Accepted picks, accepted alternatives and the target's own: three styles on a terminal."""
    batch = TokenBatch((1, 2, 3, 4), 3, 0.0, 4, alternatives=frozenset({1, 3}))
    assert [batch.origin(index) for index in range(4)] == [
        Origin.PICK,
        Origin.ALTERNATIVE,
        Origin.PICK,
        Origin.TARGET,
    ]
    tokenizer = fake_tokenizer()
    out = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    TokenPrinter(out, tokenizer.detokenizer())(
        TokenBatch(tuple(tokenizer.encode("abcd")[:4]), 3, 0.0, 4, alternatives=frozenset({1}))
    )
    assert isinstance(out.file, io.StringIO) and ALTERNATIVE_STYLE == "cyan"
    assert out.file.getvalue() == "\x1b[32ma\x1b[0m\x1b[36mb\x1b[0m\x1b[32mc\x1b[0md"


# -- a real pair -------------------------------------------------------------------------------------------------------


def test_a_chat_with_a_real_pair(tmp_path: Path) -> None:
    """`outrider chat` from a pipe, with a server process and a draft model: the same answers without drafts."""
    pair = make_chat_pair(tmp_path / "pair")
    script = "/seed 3\nhello there\n/stats\nand you?\n/stats\nverify the tokens\n/stats -v\n"
    shown: list[tuple[str, str]] = []
    # The policy that waits for drafts: otherwise steps of a tiny target outrun the draft on a busy machine.
    with cloud_process(pair.target, plan_cores().cloud, ("--policy", "verify")) as url:
        for more in ({"depth": "8"}, {"drafts": False}):
            out, about = Console(file=io.StringIO(), width=200), Console(file=io.StringIO(), width=200)
            options = ChatOptions(draft=[str(pair.draft)], cloud=[url], max_tokens=24, **more)
            chat_here(options, out, about, reader=PipeReader(io.StringIO(script)))
            assert isinstance(out.file, io.StringIO) and isinstance(about.file, io.StringIO)
            shown.append((out.file.getvalue(), about.file.getvalue()))
    drafted, plain = shown
    assert drafted[0] == plain[0] and drafted[0].count("\n") >= 3
    assert "drafted by: nothing" in plain[1] and "drafted by: int8" in drafted[1]
    for _, about_text in shown:
        assert "3 answers; the conversation has" in about_text and "no turn was sent again" in about_text
    assert "last answer, this device: guesses at" in drafted[1] and "this device:" not in plain[1]
