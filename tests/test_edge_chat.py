"""Tests conversations: ids that are kept, prefixes that a server holds, turns that are dropped, files of saved ones.

A real verifier on a loopback port speaks the fake language, token by token.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.agents import Passing, proxy_to
from tests.fake_runtime import FakeBatchRuntime, FakeSequenceRuntime
from tests.serving import TURNS_TEMPLATE, FakeServer, fake_tokenizer, serve_fake, target_tokens

from outrider.edge.chat.conversation import Conversation, continued, read_facts
from outrider.edge.chat.messages import Message, load_chat, save_chat
from outrider.edge.drafting.drafter import ModelDrafter
from outrider.edge.link.endpoints import Endpoints, RetryPolicy
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import HeldPrefix, OnTokens
from outrider.models.client.client import VerifierClient
from outrider.models.errors import CloudError, ConfigError, RequestError
from outrider.models.picks.sampling import SamplingParams

SAMPLED = SamplingParams(0.8, seed=5)
MAX_TOKENS = 12
RETRY = RetryPolicy(max_failures=2, max_outage_s=0.0, max_loading_s=0.0)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with serve_fake(chat_template=TURNS_TEMPLATE) as running:
        yield running


class Recorded(Passing):
    """Passes requests on and keeps their bodies by path; `change` may answer in the server's place."""

    def __init__(self, change: Callable[[httpx.Request], httpx.Response | None] = lambda request: None) -> None:
        super().__init__(change)
        self.bodies: list[tuple[str, dict[str, Any]]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            self.bodies.append((request.url.path, json.loads(request.content)))
        return await super().handle_async_request(request)

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


def refusing(
    path: str, message: str, status: int = 400, fields: frozenset[str] = frozenset()
) -> Callable[[httpx.Request], httpx.Response | None]:
    """Refuses what goes to a path; fields: only what has one of them."""
    error = {"code": "invalid_parameter", "message": message, "param": message.split(":")[0]}

    def refuse(request: httpx.Request) -> httpx.Response | None:
        if request.url.path != path or (fields and not fields & json.loads(request.content).keys()):
            return None
        return httpx.Response(status, json={"error": error})

    return refuse


@asynccontextmanager
async def conversing(
    url: str | Sequence[str], transport: Recorded | None = None, drafter: ModelDrafter | None = None, **more: Any
) -> AsyncIterator[Conversation]:
    """A conversation with the fake target."""
    async with AsyncExitStack() as stack:
        clients = [VerifierClient(each, None, transport) for each in ([url] if isinstance(url, str) else url)]
        for client in clients:
            stack.push_async_callback(client.aclose)
        endpoints, tokenizer = Endpoints(clients, RETRY), fake_tokenizer()
        facts = await read_facts(endpoints)
        yield Conversation(StreamAgent(endpoints, drafter), facts, tokenizer, tokenizer.fingerprint, **more)


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


async def test_the_next_turn_sends_the_new_tokens_and_a_hash(server: FakeServer) -> None:
    """Both caches go on: the server's by the hash, the draft's by its sequence. Texts equal those of whole prompts."""
    seen, transport = list[int](), Recorded()
    draft = FakeSequenceRuntime(vocab_size=fake_tokenizer().size, agreement=0.8, on_step=seen.extend)
    async with conversing(server.url, transport, ModelDrafter(draft)) as conversation:
        prompts = [await ask(conversation, f"question {number} of a long chat") for number in range(4)]
    turns, sessions = conversation.turns, transport.sessions
    assert "prefix_hash" not in sessions[0] and all(body["keep_prefix"] for body in sessions) and len(sessions) == 4
    for number in range(1, 4):
        kept, sent = [*prompts[number - 1], *turns[number - 1].result.tokens], sessions[number]["prompt"]
        assert prompts[number] == [*kept, *sent]
        assert (turns[number].sent_again, turns[number].num_sent) == (None, len(sent))
        assert turns[number].result.cached_prompt_tokens == len(kept) - 1
    # The draft has read each prompt's token once, not each prompt whole.
    assert len(seen) < len(prompts[-1]) + 4 * 40 < sum(map(len, prompts)) + 4 * 40


async def test_everything_is_sent_again_where_a_prefix_is_gone_or_changed(server: FakeServer) -> None:
    """A server that evicted it answers 409, and the same turn goes on with all tokens; /stats says why."""
    async with conversing(server.url) as conversation:
        await ask(conversation, "one")
        conversation._held = HeldPrefix(server.url, "00" * 16, conversation.num_tokens)
        await ask(conversation, "two")
        await ask(conversation, "three")
        conversation.set_system("be short")
        prompt = await ask(conversation, "four")
    assert fake_tokenizer().decode(prompt).startswith("<system>\nbe short\n<user>\none\n")
    _, *turns = conversation.turns
    reasons = ["the server held them no longer", None, "the system message was changed"]
    assert [turn.sent_again for turn in turns] == reasons and turns[2].num_sent == turns[2].num_prompt


async def test_an_older_server_gets_no_field_that_it_refuses(server: FakeServer) -> None:
    """It refuses the fields by name once; from then on everything is sent, without them."""
    fields = frozenset({"keep_prefix", "prefix_hash"})
    transport = Recorded(refusing("/v1/sessions", "keep_prefix: unknown field", fields=fields))
    async with conversing(server.url, transport) as conversation:
        first, second = [await ask(conversation, words) for words in ("one", "two")]
    assert [body["prompt"] for body in transport.sessions] == [first, first, second]
    assert conversation.turns[1].sent_again == "the server keeps no prefixes"


async def test_a_refusal_of_something_else_stays_one(server: FakeServer) -> None:
    """A field that is refused without the new ones too reaches the user, after one more try."""
    transport = Recorded(refusing("/v1/sessions", "seed: too large"))
    async with conversing(server.url, transport) as conversation:
        with pytest.raises(RequestError, match="seed: too large"):
            await conversation.answer("one", SAMPLED, 4)
    assert len(transport.sessions) == 2 and not conversation.messages


async def test_a_hash_goes_to_no_other_server() -> None:
    """The next endpoint gets everything: after a fail-over between turns the text is the same."""
    transport = Recorded(unreachable(down := set[str]()))
    with serve_fake(chat_template=TURNS_TEMPLATE) as first, serve_fake(chat_template=TURNS_TEMPLATE) as second:
        async with conversing([first.url, second.url], transport) as conversation:
            await ask(conversation, "one")
            down.add(first.url)
            await ask(conversation, "two")
    before, after = (turn.result.held for turn in conversation.turns)
    assert before is not None and after is not None and (before.url, after.url) == (first.url, second.url)
    assert before.name not in [body.get("prefix_hash") for body in transport.sessions]


async def test_a_cut_text_resumes_with_all_tokens(server: FakeServer) -> None:
    """A stream that breaks in the middle of a turn goes on: its hash is used up, so everything is sent."""
    transport = Recorded()
    with proxy_to(server.url) as proxy:
        async with conversing(proxy.url, transport) as conversation:
            await ask(conversation, "one", 40)
            proxy.cut_after(b'"base"', 2)
            prompt = await ask(conversation, "two", 40)
            await ask(conversation, "three", 4)
    _, by_hash, resumed, _ = transport.sessions
    assert "prefix_hash" in by_hash and "prefix_hash" not in resumed
    assert resumed["prompt"][: len(prompt)] == prompt
    assert (conversation.turns[1].result.num_sessions, conversation.turns[2].sent_again) == (2, None)


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
    assert len(tokenizer.encode("rify")) == 1  # no token begins after half of it
    for kept, whole in (
        ([*head, *tokenizer.encode(" none")], rendered),
        (rendered, rendered),  # nothing new
        (tokenizer.encode("ri"), tokenizer.encode("rify(")),
    ):
        assert continued(tokenizer, kept, whole) is None


async def test_the_oldest_turns_are_dropped_visibly() -> None:
    """When the context is full: the system message and the question stay, a note says how many went."""
    notes, runtime = list[str](), FakeBatchRuntime(vocab_size=fake_tokenizer().size, max_positions=160)
    with serve_fake(runtime=runtime, chat_template=TURNS_TEMPLATE) as server:
        async with conversing(server.url, on_note=notes.append) as conversation:
            conversation.set_system("short")
            for number in range(12):
                assert len(await ask(conversation, f"tell me about {number}", 10)) + 10 <= 160
            assert conversation.num_dropped >= 2 and "dropped" in notes[0]
            assert conversation.messages[0] == Message(role="system", content="short")
            assert conversation.messages[1].role == "user"
            reasons = [turn.sent_again for turn in conversation.turns]
            assert reasons.count("the oldest turns were dropped") == len(notes)
            before = list(conversation.messages)
            for words in (60, 2000):  # refused here, and by the server
                with pytest.raises((ConfigError, RequestError), match="at most 159"):
                    await conversation.answer("word " * words, SAMPLED, 4)
                assert conversation.messages == before


async def test_a_chat_of_many_messages_goes_on_and_can_be_saved(tmp_path: Path) -> None:
    """Short ones fill no context. A server takes 2,048, a file 2,000."""
    runtime = FakeBatchRuntime(vocab_size=fake_tokenizer().size, max_positions=1 << 16, num_blocks=1 << 13)
    said = [Message(role=role, content="x") for _ in range(1030) for role in ("user", "assistant")]
    with pytest.raises(ConfigError, match="2060 messages are more than 2000"):
        save_chat(tmp_path / "chat.json", said, "fake")
    with serve_fake(runtime=runtime, chat_template=TURNS_TEMPLATE) as server:
        async with conversing(server.url, on_note=(notes := list[str]()).append, messages=said) as conversation:
            await conversation.answer("and now?", SAMPLED, 4)
            assert len(conversation.messages) == 2 * (1031 - conversation.num_dropped) <= 2000
            assert notes[0].startswith("The chat of 2000 messages is full: the ")
            save_chat(tmp_path / "chat.json", conversation.messages, "fake")


async def test_an_answer_that_is_stopped_stays(server: FakeServer) -> None:
    """What was said is in the conversation; a question without an answer is not."""
    async with conversing(server.url) as conversation:
        said = asyncio.Event()
        answer = conversation.answer("one", SAMPLED, 3000, lambda prompt: lambda batch: said.set())
        task = asyncio.create_task(answer)
        await said.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [message.role for message in conversation.messages] == ["user", "assistant"]
        await ask(conversation, "two")
        (turn,) = conversation.turns
        assert (turn.sent_again, turn.num_sent) == ("the answer before was cut short", turn.num_prompt)
        before = list(conversation.messages)
        with pytest.raises(RequestError, match="2048 KiB"):  # and drops no turn for what cannot fit
            await conversation.answer("x" * (2 << 20), SAMPLED, 4)
        assert conversation.messages == before


async def test_another_target_takes_over_visibly() -> None:
    """The next turn names it, and no hash of the other is used."""
    notes, other = list[str](), FakeBatchRuntime(vocab_size=fake_tokenizer().size, seed=99)
    transport = Recorded(unreachable(down := set[str]()))
    with serve_fake() as first, serve_fake(name="other", runtime=other) as second:
        async with conversing([first.url, second.url], transport, on_note=notes.append) as conversation:
            await ask(conversation, "one")
            down.add(first.url)
            await conversation.answer("two", SAMPLED, 4)
            assert "goes on with other" in notes[0] and conversation.model == "other"


async def test_a_target_without_a_template_is_one_clear_error() -> None:
    """Before any model is loaded; the advice names the command that works."""
    with serve_fake(has_chat_template=False) as server:
        async with VerifierClient(server.url) as client:
            with pytest.raises(ConfigError, match=r"fake has no chat template, so it cannot chat; .*outrider run"):
                await read_facts(Endpoints([client], RETRY))


@pytest.mark.parametrize("positions", [0, 10**400])
async def test_facts_out_of_bounds_are_refused(server: FakeServer, positions: int) -> None:
    """A server cannot break the chat's arithmetic."""

    def lie(request: httpx.Request) -> httpx.Response | None:
        if request.url.path != "/v1/model":
            return None
        facts = {"name": "liar", "tokenizer": "", "vocab_size": 300, "eos_token_ids": [], "has_chat_template": True}
        return httpx.Response(200, content=json.dumps(facts)[:-1] + f', "max_positions": {positions}}}')

    with pytest.raises(CloudError, match="broke the protocol"):
        async with conversing(server.url, Recorded(lie)):
            pass


async def test_an_older_server_without_rendering_is_named(server: FakeServer) -> None:
    """404 for /v1/render gives advice, not a list of attempts."""
    async with conversing(server.url, Recorded(refusing("/v1/render", "no such route", 404))) as conversation:
        with pytest.raises(CloudError, match="renders no conversations"):
            await conversation.answer("one", SAMPLED, 4)


def test_saved_chats_are_checked(tmp_path: Path) -> None:
    """Another file is never replaced or taken for a chat."""
    messages = [Message(role="user", content="é\x1b"), Message(role="assistant", content="\ud7ff")]
    path, late = tmp_path / "chat.json", tmp_path / "late.json"
    for each in (messages, messages[:1]):
        save_chat(path, each, "fake")
        assert load_chat(path).messages == each and list(tmp_path.iterdir()) == [path]
    for text in ("", "{}", '{"format": "outrider-chat", "messages": [{"role": "tool", "content": ""}]}', "\x00"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is no saved chat: "):
            load_chat(path)
        with pytest.raises(ConfigError, match="exists and is no saved chat; choose another name"):
            save_chat(path, messages, "fake")
    save_chat(late, [messages[0], Message(role="system", content="late")], "fake")
    with pytest.raises(ConfigError, match="a system message stands after others"):
        load_chat(late)
    with pytest.raises(ConfigError, match="cannot be saved"):
        save_chat(tmp_path / "nowhere" / "chat.json", messages, "fake")
