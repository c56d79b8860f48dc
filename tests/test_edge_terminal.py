"""Tests that text from a server or a model is shown to a terminal and never commands it."""

from __future__ import annotations

import io
import json
import sys
import unicodedata
from pathlib import Path

import pytest
from rich.console import Console
from tests.commands import screen
from tests.serving import fake_tokenizer

from outrider.edge.cli.command_options import ChatOptions
from outrider.edge.cli.main import main
from outrider.edge.cli.run import _printer
from outrider.edge.cli.run_options import RunOptions
from outrider.edge.cli.summary import summary_lines
from outrider.edge.cli.terminal import TokenPrinter, print_document
from outrider.edge.results import GenerationResult, Mode, TokenBatch
from outrider.models.client.errors import refusal_error
from outrider.models.process.command_line import print_error, print_line
from outrider.models.visible import visible
from outrider.models.wire.protocol import ErrorBody

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
    assert not commands(shown)
    assert shown.count(visible(attack)) >= 4
    document = out.getvalue()[out.getvalue().index("{\n") :]
    assert json.loads(document) == {"text": attack}


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
    assert visible(text) == text
    assert visible("\x1b\x00\x7f\x9b\u202e") == r"\x1b\x00\u007f\u009b\u202e"


def test_markup_of_a_server_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets are brackets: in errors, trouble and statistics."""
    words = "[bold red]no[/] [link=http://evil]click[/link] [/]"
    console, out = terminal()
    print_line(console, words, "yellow")
    print_error(words)
    result = GenerationResult(Mode.STREAM, (1,), (), (0.1,), words, 1, 0, 0, 0, draft_error=words)
    for line in summary_lines(result):
        print_line(console, line)
    assert out.getvalue().count(words) == 3 and capsys.readouterr().err == f"error: {words}\n"
