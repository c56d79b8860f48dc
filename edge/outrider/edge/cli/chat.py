"""Chats in the terminal: `outrider chat`.

Answers go to standard output, everything else to standard error. Ctrl-C ends an answer; what it has said stays.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from difflib import get_close_matches
from typing import Final

from rich.console import Console

from outrider.edge.chat.conversation import Conversation, read_facts
from outrider.edge.chat.messages import SYSTEM, Message, load_chat, save_chat, turns_of
from outrider.edge.cli.command_options import ChatOptions
from outrider.edge.cli.draft_source import (
    Clouds,
    Notes,
    agent_options,
    asked_for,
    find_drafts,
    open_draft,
    other_tokenizer,
    place_drafts,
)
from outrider.edge.cli.line_editor import PipeReader, Reader, TerminalReader
from outrider.edge.cli.summary import ended_by, stats_lines
from outrider.edge.cli.terminal import TokenPrinter
from outrider.edge.cli.verifiers import Verifiers, open_verifiers
from outrider.edge.devices.power import PowerWatch
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.link.fleet import open_fleet
from outrider.edge.modes.assemble import OpenDraft, make_agent, make_depth
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import Mode, OnTokens
from outrider.models.cache_folder import expanded
from outrider.models.counted import counted
from outrider.models.errors import ConfigError, OutriderError
from outrider.models.picks.sampling import MAX_SEED
from outrider.models.process.command_line import print_line
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.wire.protocol import ModelFacts

COMMANDS: Final = {
    "/help": "this list",
    "/save FILE": "save the conversation; without a name, where it was saved or loaded last",
    "/load FILE": "go on with a saved conversation",
    "/system TEXT": "set the system message; without a text, show it; - removes it",
    "/seed N": "set the seed; without a number, show it; new draws one",
    "/stats": "tokens, times, caches, drafts; /stats -v for all figures",
    "/clear": "begin again; the system message stays",
    "/quit": "end the chat, as Ctrl-D does",
}
DRAFT_CONTEXT: Final = 8192
"""Tokens of a chat that the draft holds; it bounds memory. Later ones get no drafts."""


def chat_here(options: ChatOptions, out: Console, about: Console, reader: Reader | None = None) -> None:
    """Chats until the input ends; raises OutriderError. out: the answers. about: everything else.

    reader: by default, the terminal, or what is piped in.
    """
    agent_options(options)  # a wrong option is found before a model is loaded
    notes = Notes(about)
    messages = load_chat(expanded(options.load)).messages if options.load is not None else []
    if reader is None:
        names = [name.partition(" ")[0] for name in COMMANDS]
        is_terminal = sys.stdin.isatty() and out.is_terminal
        history = expanded(options.history) if options.history is not None else None
        reader = TerminalReader(history, names, notes.line) if is_terminal else PipeReader()
    with open_verifiers(options, about) as verifiers:
        _chat_here(options, verifiers, messages, out, notes, reader)


def _chat_here(
    options: ChatOptions,
    verifiers: Verifiers,
    messages: list[Message],
    out: Console,
    notes: Notes,
    reader: Reader,
) -> None:
    clouds, num_threads = verifiers.clouds, options.threads
    named = asked_for(clouds, options.model)
    facts = verifiers.run(_look(named, notes))
    bundles = find_drafts(verifiers.drafts, options.choice, clouds, notes)
    has_model = options.drafts and options.choice.runtime != "ngram"
    target = other_tokenizer(bundles, options, clouds, notes, is_drafted=has_model)
    draft = None
    if options.drafts:
        is_mapped = target is not None
        candidates = place_drafts(bundles, options.choice, num_threads, clouds, notes.about, is_mapped=is_mapped)
        draft = open_draft(candidates, options, notes, notes.line, num_threads, DRAFT_CONTEXT, target)
    tokenizer = target or bundles[0].tokenizer()
    with closing(draft.drafter) if draft is not None else nullcontext():
        screen = ChatScreen(options, draft.placement.words if draft is not None else None, out, notes, reader)
        verifiers.run(_chat(options, named, tokenizer, facts, draft, messages, screen, notes))


async def _look(clouds: Clouds, notes: Notes) -> ModelFacts:
    async with open_fleet(clouds) as fleet:
        endpoints = Endpoints(fleet.clients, on_trouble=notes.before_text, fleet=fleet)
        if (mixed := await fleet.mixed_targets()) is not None:
            notes.before_text(mixed)
        return await read_facts(endpoints)


async def _chat(
    options: ChatOptions,
    clouds: Clouds,
    tokenizer: Tokenizer,
    facts: ModelFacts,
    draft: OpenDraft | None,
    messages: list[Message],
    screen: ChatScreen,
    notes: Notes,
) -> None:
    async with open_fleet(clouds) as fleet:
        endpoints = Endpoints(fleet.clients, on_trouble=notes.in_text, fleet=fleet)
        drafter = draft.drafter if draft is not None else None
        agent = make_agent(Mode.STREAM, endpoints, drafter, options.depth, agent_options(options))
        assert isinstance(agent, StreamAgent)
        await screen.run(Conversation(agent, facts, tokenizer, facts.tokenizer, notes.line, messages))


class ChatScreen:
    """Reads messages and commands, shows answers. Belongs to the event loop on which `run` is awaited."""

    def __init__(
        self, options: ChatOptions, drafted_by: str | None, out: Console, notes: Notes, reader: Reader
    ) -> None:
        self._options = options
        self._params = options.params
        self._file = expanded(options.load) if options.load is not None else None
        self._drafted_by = drafted_by
        self._out = out
        self._notes = notes
        self._reader = reader
        self._answer: asyncio.Task[None] | None = None
        self._power = PowerWatch(options.on_battery)
        self._is_eased = False

    async def run(self, conversation: Conversation) -> None:
        """Chats until the input ends, or /quit."""
        if self._options.system:
            conversation.set_system(self._options.system)
        if self._reader.is_typed:
            self._greet(conversation)
        with self._interrupts():
            while True:
                try:
                    typed = await self._reader.read()
                    if typed is None or typed.strip() == "/quit":
                        return
                    typed = typed.rstrip().lstrip("\r\n")
                    if typed.startswith("/") and not typed.startswith("//"):
                        self._command(conversation, typed)
                    elif typed:
                        await self._ask(conversation, typed.removeprefix("/"))
                except KeyboardInterrupt:
                    if not self._reader.is_typed:
                        raise
                    self._notes.line("Ctrl-D or /quit ends the chat.")
                except OutriderError as error:
                    if not self._reader.is_typed:
                        raise  # a script must notice
                    print_line(self._notes.about, f"error: {error}", "red")

    def _greet(self, conversation: Conversation) -> None:
        drafted = f", drafted by {self._drafted_by}" if self._drafted_by is not None else ""
        self._tell(f"{conversation.model}, {conversation.facts.max_positions} tokens{drafted}")
        self._tell("Enter sends, Alt-Enter begins a new line, /help lists the commands.")
        if conversation.messages:
            self._tell(f"goes on after {counted(len(turns_of(conversation.messages)), 'turn')}")

    async def _ask(self, conversation: Conversation, question: str) -> None:
        self._answer = asyncio.get_running_loop().create_task(self._show_answer(conversation, question))
        try:
            await self._answer
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # the whole chat is cancelled, and its answer with it
            self._notes.line("(stopped)")
        finally:
            self._answer = None

    async def _show_answer(self, conversation: Conversation, question: str) -> None:
        def show(prompt: Sequence[int]) -> OnTokens:
            detokenizer = conversation.tokenizer.detokenizer(context=prompt)
            self._notes.printer = printer = TokenPrinter(self._out, detokenizer, end="\n")
            return printer

        conversation.agent.endpoints.choose_again()
        if self._drafted_by is not None:
            self._ease(conversation.agent)
        try:
            turn = await conversation.answer(question, self._params, self._options.max_tokens, show)
        except OutriderError:
            if self._notes.printer is not None:
                self._notes.printer.break_line()
                self._notes.printer = None  # the text has no end
            raise
        finally:
            if self._notes.printer is not None:
                self._notes.printer.finish()
                self._notes.printer = None
        if turn.result.draft_error is not None:
            self._notes.line(f"Drafting ended early: {turn.result.draft_error}.")
        if (why := ended_by(turn.result.finish_reason)) is not None:
            self._notes.line(f"(ended by {why})")

    def _ease(self, agent: StreamAgent) -> None:
        """Half the work from now on, or all again: a chat may begin with a charger and go on without."""
        reason = self._power.reason
        if self._is_eased == (reason is not None):
            return
        self._is_eased = reason is not None
        agent.options = agent_options(self._options, reason)
        agent.depth = make_depth(self._options.depth, agent.estimates, agent.options.effort)
        how = f"half the work: {reason} (--on-battery full drafts all)" if reason is not None else "all the work again"
        self._notes.line(f"Drafts with {how}.")

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Ctrl-C ends the answer; where there is none, it raises KeyboardInterrupt."""

        def handle(number: int, _: object) -> None:
            if self._answer is None:
                raise KeyboardInterrupt
            self._answer.get_loop().call_soon_threadsafe(self._answer.cancel)

        before = signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    # -- commands ----------------------------------------------------------------------------------------------------

    def _command(self, conversation: Conversation, typed: str) -> None:
        name, _, rest = typed.partition(" ")
        rest = rest.strip()
        known: dict[str, Callable[[Conversation, str], None]] = {
            "/help": self._help,
            "/save": self._save,
            "/load": self._load,
            "/system": self._set_system,
            "/seed": self._set_seed,
            "/stats": self._stats,
            "/clear": self._clear,
        }
        if name not in known:
            closest = get_close_matches(name, [*known, "/quit"], n=1)
            advice = f"did you mean {closest[0]}?" if closest else "/help lists them; // begins a message with a slash"
            raise ConfigError(f"no such command {name}; {advice}")
        known[name](conversation, rest)

    def _help(self, conversation: Conversation, rest: str) -> None:
        for name, what in COMMANDS.items():
            self._tell(f"{name:<14}{what}")
        self._tell(
            "Enter sends; Alt-Enter, Ctrl-J, or a backslash before Enter begins a new line. Ctrl-C ends an answer."
        )

    def _save(self, conversation: Conversation, rest: str) -> None:
        path = expanded(rest) if rest else self._file
        if path is None:
            raise ConfigError("/save needs a name: /save FILE")
        save_chat(path, conversation.messages, conversation.model)
        self._file = path
        self._tell(f"saved to {path}")

    def _load(self, conversation: Conversation, rest: str) -> None:
        if not rest:
            raise ConfigError("/load needs a name: /load FILE")
        path = expanded(rest)
        saved, self._file = load_chat(path), path
        conversation.replace(list(saved.messages), "another conversation was loaded")
        self._tell(f"{counted(len(turns_of(saved.messages)), 'turn')}, with {saved.model or 'a target without a name'}")
        for message in saved.messages:
            self._tell(f"{message.role}: {message.content}")

    def _set_system(self, conversation: Conversation, rest: str) -> None:
        if rest:
            conversation.set_system("" if rest == "-" else rest)
        now = next((message.content for message in conversation.messages if message.role == SYSTEM), None)
        self._tell(f"system: {now}" if now is not None else "no system message")

    def _set_seed(self, conversation: Conversation, rest: str) -> None:
        if rest == "new":
            self._params = replace(self._params, seed=secrets.randbits(32))
        elif rest:
            if not (rest.isascii() and rest.isdecimal() and len(rest) < 40 and int(rest) <= MAX_SEED):
                raise ConfigError(f"the seed is {rest[:40]!r}; expected a number, 0 to {MAX_SEED}, or new")
            self._params = replace(self._params, seed=int(rest))
        self._tell(f"seed {self._params.seed}")

    def _stats(self, conversation: Conversation, rest: str) -> None:
        if rest not in ("", "-v"):
            raise ConfigError(f"/stats does not know {rest[:40]}; /stats -v shows all figures")
        for line in stats_lines(conversation, self._params, self._drafted_by, rest == "-v"):
            self._tell(line)

    def _clear(self, conversation: Conversation, rest: str) -> None:
        conversation.replace(
            [message for message in conversation.messages if message.role == SYSTEM], "the conversation was cleared"
        )
        self._file = None  # a /save without a name would replace what was saved
        self._tell("cleared")

    def _tell(self, line: str) -> None:
        print_line(self._notes.about, line, "dim")
