"""Tests what a terminal shows: of texts of servers and models, which never command it, and `outrider chat` there."""

from __future__ import annotations

import io
import json
import os
import signal
import stat
import sys
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console
from tests.commands import screen
from tests.fake_runtime import FakeBatchRuntime
from tests.serving import TURNS_TEMPLATE, FakeServer, fake_tokenizer, serve_fake
from tests.test_edge_chat import conversing
from tests.tiny_models import make_chat_pair
from tests.waiting import run

from outrider.edge.chat.conversation import Conversation
from outrider.edge.cli import chat as chat_module
from outrider.edge.cli.chat import ChatScreen, chat_here
from outrider.edge.cli.command_options import ChatOptions
from outrider.edge.cli.draft_source import Notes
from outrider.edge.cli.line_editor import PipeReader, TerminalReader
from outrider.edge.cli.main import main
from outrider.edge.cli.run import _printer
from outrider.edge.cli.run_options import RunOptions
from outrider.edge.cli.summary import summary_lines
from outrider.edge.cli.terminal import ALTERNATIVE_STYLE, TokenPrinter, print_document
from outrider.edge.lab.cores import plan_cores
from outrider.edge.lab.laboratory import cloud_process
from outrider.edge.results import GenerationResult, Mode, Origin, TokenBatch
from outrider.models.client.errors import refusal_error
from outrider.models.errors import ConfigError, RequestError
from outrider.models.process.command_line import print_error, print_line
from outrider.models.visible import visible
from outrider.models.wire.protocol import ErrorBody

MAX_TOKENS = 12


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with serve_fake(chat_template=TURNS_TEMPLATE) as running:
        yield running


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


def chat(url: str, *messages: str | Callable[[], str | None], **options: Any) -> SimpleNamespace:
    """Chats with the fake target in a terminal without colours: what was printed, and the conversation."""
    (out, out_text), (about, about_text) = screen(), screen()
    notes = Notes(about)
    chosen = ChatOptions(seed=5, max_tokens=MAX_TOKENS, **options)

    async def talk() -> Conversation:
        async with conversing(url, on_note=notes.line) as conversation:
            await ChatScreen(chosen, "a fake draft", out, notes, Typed(*messages)).run(conversation)
            return conversation

    conversation = run(talk())
    return SimpleNamespace(out=out_text.getvalue(), about=about_text.getvalue(), conversation=conversation)


def test_commands(server: FakeServer, tmp_path: Path) -> None:
    """Each does what /help says; mistakes are answered, and the chat goes on."""
    path = tmp_path / "a chat.json"
    shown = chat(
        server.url,
        "/help",
        "/system be kind",
        "//slash",
        f"/save {path}",
        *("/stats", "/stats -v", "/stats all"),
        *("/seed", "/seed 77", "/seed x"),
        *("/clear", "/save", "/nonsense", "/sta"),
        *("/save ~nosuchuser/x", "/load ~nosuchuser/y", f"/save {'x' * 300}", "/save a\0b", "/load a\0c"),
        f"/load {tmp_path / 'missing'}",
        f"/load {path}",
        "/system",
        "/quit",
        "never asked",
    )
    about = shown.about
    for expected in (
        *chat_module.COMMANDS,
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
        "error: ~nosuchuser/x cannot be used",
        "error: ~nosuchuser/y cannot be used",
        "error: the chat cannot be saved to xxx",
        "error: the chat cannot be saved to a\\x00b: ",
        "error: a\\x00c cannot be read: embedded null byte",
        "error: no such command /nonsense; /help lists them",
        "error: no such command /sta; did you mean /stats?",
        "name a chat that /save wrote",
        "1 turn, with fake",
        "error: /save needs a name: /save FILE",
    ):
        assert expected in about.replace("\n", " ") or expected in about, (expected, about)
    assert [message.role for message in shown.conversation.messages] == ["system", "user", "assistant"]
    assert shown.conversation.messages[1].content == "/slash" and shown.out.strip("\n") and "never" not in shown.out
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert saved["messages"][1] == {"role": "user", "content": "/slash"}  # /save after /clear has no name
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
    assert "Ctrl-D or /quit ends the chat." in chat(server.url, Mock(side_effect=KeyboardInterrupt), "/quit").about


def test_an_error_ends_an_answer_and_not_the_chat(server: FakeServer) -> None:
    """The terminal shows it; a script gets the exception."""
    shown = chat(server.url, "x" * (2 << 20), "one")
    assert "error: the message has 2048 KiB" in shown.about and len(shown.conversation.turns) == 1
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RequestError, match="2048 KiB"):
        patch.setattr(Typed, "is_typed", False)
        chat(server.url, "x" * (2 << 20), "one")


async def test_a_pipe_is_read_as_utf_8_whatever_the_system_s_code_page() -> None:
    """Windows would read it in its own; what is no UTF-8 is an error and no other text."""

    def reader(data: bytes) -> PipeReader:
        return PipeReader(io.TextIOWrapper(io.BytesIO(data), encoding="cp1252"))

    assert await reader("a \u2013 b\n".encode()).read() == "a \u2013 b"
    with pytest.raises(ConfigError, match="not UTF-8"):
        await reader(b"\xff\n").read()


async def test_a_pipe_gives_a_message_per_line() -> None:
    """A backslash at a line's end goes on in the next; the end of the file is the end of the chat."""
    reader = PipeReader(io.StringIO("one\ntwo \\\nthree\n/stats"))
    assert [await reader.read() for _ in range(4)] == ["one", "two \nthree", "/stats", None]


async def test_the_editor_takes_several_lines_and_keeps_a_history(tmp_path: Path) -> None:
    """Enter sends; Alt-Enter and a backslash begin a line; the arrow goes back; Ctrl-C and Ctrl-D are told apart.

    A history that can be written no more is said once, and goes on in memory.
    """
    history = tmp_path / "history"
    with create_pipe_input() as keys:
        notes = list[str]()
        reader = TerminalReader(history, ["/help"], notes.append, input=keys, output=DummyOutput())
        for typed, read in (
            ("one\r", "one"),
            ("two\x1b\rmore\r", "two\nmore"),
            ("three\\\rfour\r", "three\nfour"),
            ("\x1b[A\x1b[A\x1b[A!\r", "two\nmore!"),
        ):
            keys.send_text(typed)
            assert await reader.read() == read
        assert stat.S_IMODE(history.stat().st_mode) == 0o600 and "+one" in history.read_text()
        history.unlink()
        history.mkdir()
        for typed, read in (("five\r", "five"), ("six\r", "six"), ("\x1b[A\x1b[A!\r", "five!")):
            keys.send_text(typed)
            assert await reader.read() == read
        assert notes == [f"--history {history} takes no more (Is a directory): the rest ends with this chat."]
        keys.send_text("half\x03")
        with pytest.raises(KeyboardInterrupt):
            await reader.read()
        keys.send_text("\x04")
        assert await reader.read() is None
    with pytest.raises(ConfigError, match="cannot be written"):
        TerminalReader(tmp_path / "nowhere" / "history", [])


def test_tokens_are_coloured_by_origin() -> None:
    """Accepted picks, accepted alternatives and the target's own: three styles on a terminal."""
    batch = TokenBatch((1, 2, 3, 4), 3, 0.0, 4, alternatives=frozenset({1, 3}))
    assert list(map(batch.origin, range(4))) == [Origin.PICK, Origin.ALTERNATIVE, Origin.PICK, Origin.TARGET]
    (out, shown), tokenizer = screen(force_terminal=True, color_system="standard"), fake_tokenizer()
    tokens = tuple(tokenizer.encode("abcd"))
    TokenPrinter(out, tokenizer.detokenizer())(TokenBatch(tokens, 3, 0.0, 4, alternatives=frozenset({1})))
    assert (ALTERNATIVE_STYLE, shown.getvalue()) == ("cyan", "\x1b[32ma\x1b[0m\x1b[36mb\x1b[0m\x1b[32mc\x1b[0md")


def test_a_chat_with_a_real_pair(tmp_path: Path) -> None:
    """`outrider chat` from a pipe, with a server process and a draft model: the same answers without drafts."""
    pair = make_chat_pair(tmp_path / "pair")
    script = "/seed 3\nhello there\n/stats\nand you?\n/stats\nverify the tokens\n/stats -v\n"
    shown: list[tuple[str, str]] = []
    # The policy that waits for drafts: otherwise steps of a tiny target outrun the draft on a busy machine.
    with cloud_process(pair.target, plan_cores().cloud, ("--policy", "verify")) as url:
        for more in ({"depth": "8"}, {"drafts": False}):
            (out, text), (about, about_text) = screen(width=200), screen(width=200)
            options = ChatOptions(draft=[str(pair.draft)], cloud=[url], max_tokens=24, **more)
            chat_here(options, out, about, reader=PipeReader(io.StringIO(script)))
            shown.append((text.getvalue(), about_text.getvalue()))
            assert "3 answers; the conversation has" in shown[-1][1] and "no turn was sent again" in shown[-1][1]
    drafted, plain = shown
    assert drafted[0] == plain[0] and drafted[0].count("\n") >= 3
    assert "drafted by: nothing" in plain[1] and "this device:" not in plain[1]
    assert "drafted by: int8" in drafted[1] and "last answer, this device: guesses at" in drafted[1]


ATTACKS = {
    "colour": "\x1b[31mred",
    "title": "\x1b]0;owned\x07",
    "clipboard": "\x1b]52;c;cm0gLXJmIH4=\x1b\\",
    "C1": "\x9b2J\x9d0;owned\x9c",
    "return": "harmless\rowned",
    "backspace": "ab\x08\x08cd",
    "bell and form feed": "\x07\x0c\x0b",
    "delete": "a\x7f",
    "override": "abc\u202egpj.exe",
    "isolate": "\u2066a\u2069",
    "separators": "a\u2028b\x85c",
}
COMMANDS = {"Cc", "Cf", "Zl", "Zp"}


def commands(text: str) -> set[str]:
    """The characters that a terminal may obey."""
    return {each for each in text if unicodedata.category(each) in COMMANDS and each not in "\n\t"}


def terminal() -> tuple[Console, io.StringIO]:
    """A terminal without colours: whatever it is sent beyond text comes from that text."""
    return screen(force_terminal=True, color_system=None, width=400, legacy_windows=False)


def printed(console: Console, text: str) -> None:
    """Prints a text as `outrider run` prints a target's."""
    tokenizer = fake_tokenizer()
    tokens = tuple(tokenizer.encode(text))
    printer = TokenPrinter(console, tokenizer.detokenizer(), prompt=text)
    printer(TokenBatch(tokens[:2], 2, 0.0))
    printer(TokenBatch(tokens[2:], 0, 0.0))
    printer.finish()


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_a_terminal_shows_what_it_would_obey(attack: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The generated text and the prompt, a line of statistics, an error, and JSON: each in a visible form."""
    console, out = terminal()
    printed(console, attack)
    print_line(console, attack)
    print_document(console, {"text": attack})
    print_error(str(refusal_error("http://x", ErrorBody(code=attack, message=attack), 400)))
    shown = out.getvalue() + capsys.readouterr().err
    assert not commands(shown) and shown.count(visible(attack)) >= 4
    assert json.loads(out.getvalue()[out.getvalue().index("{\n") :]) == {"text": attack}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_a_file_gets_the_text_exactly(attack: str) -> None:
    """Standard output that is no terminal belongs to a program; rich would drop characters and replace tabs."""
    text = f"\tdef naïve(東京):\r\n\t\treturn '😀'  {attack}"
    (console, out), (other, document) = screen(width=20), screen(width=20)
    printer = TokenPrinter(console, fake_tokenizer().detokenizer())
    printer(TokenBatch(tuple(fake_tokenizer().encode(text)), 3, 0.0))
    printer.finish()
    assert out.getvalue() == text
    print_document(other, {"text": text})
    assert json.loads(document.getvalue()) == {"text": text}


@pytest.mark.parametrize("forced", ["", "1"], ids=["no FORCE_COLOR", "FORCE_COLOR=1"])
@pytest.mark.parametrize("command", ["run", "chat"])
def test_what_happens_beside_a_text_does_not_reach_a_file(
    command: str, forced: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither the prompt nor colours, nor the line breaks before messages; a chat ends its answers."""
    monkeypatch.setenv("FORCE_COLOR", forced)
    tokenizer = fake_tokenizer()
    text = tuple(tokenizer.encode("\tdef naïve(東京):\r\n  pass"))

    def print_text(options: RunOptions | ChatOptions, out: Console, about: Console) -> None:
        assert about.stderr
        if isinstance(options, RunOptions):
            printer = _printer(out, options, tokenizer.detokenizer())
        else:
            printer = TokenPrinter(out, tokenizer.detokenizer(), end="\n")
        printer(TokenBatch(text[:2], 2, 0.0))
        printer.break_line()  # as every message does
        printer(TokenBatch(text[2:], 0, 0.0))
        printer.finish()
        printer.break_line()

    monkeypatch.setattr("outrider.edge.cli.run.run_once", print_text)
    monkeypatch.setattr("outrider.edge.cli.chat.chat_here", print_text)
    monkeypatch.setattr(sys, "argv", ["outrider", command, *(["a prompt"] if command == "run" else [])])
    path = tmp_path / "out.txt"
    with path.open("w", encoding="utf-8", newline="") as file, pytest.raises(SystemExit) as ended:
        monkeypatch.setattr(sys, "stdout", file)
        main()
    assert not ended.value.code
    assert path.read_bytes() == tokenizer.decode(text).encode() + (b"\n" if command == "chat" else b"")


def test_ordinary_text_is_shown_as_it_is() -> None:
    """All scripts, emoji with joiners, newlines and tabs."""
    text = "naïve 東京 עברית العربية 👩\u200d💻\n\tx\n"
    assert visible(text) == text and visible("\x1b\x00\x7f\x9b\u202e") == r"\x1b\x00\u007f\u009b\u202e"


def test_markup_of_a_server_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets are brackets: in errors, trouble and statistics."""
    words = "[bold red]no[/] [link=http://evil]click[/link] [/]"
    console, out = terminal()
    print_line(console, words, "yellow")
    print_error(words)
    for line in summary_lines(GenerationResult(Mode.STREAM, (1,), (), (0.1,), words, 1, 0, 0, 0, draft_error=words)):
        print_line(console, line)
    assert out.getvalue().count(words) == 3 and capsys.readouterr().err == f"error: {words}\n"
