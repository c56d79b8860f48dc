"""Tests what the three command lines share: help, version, completion, typos, errors, Ctrl-C, pipes, encodings."""

from __future__ import annotations

import importlib
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import typer.main
from rich.console import Console
from typer.testing import CliRunner

from outrider.models.errors import ConfigError, RuntimeUnavailable
from outrider.models.process.command_line import (
    print_line,
    read_stdin,
    require_utf8,
    tolerate_narrow_encodings,
)
from outrider.models.process.extras import importing, is_installed, require_packages

SCRIPTS = {
    "outrider": "outrider.edge.cli",
    "outrider-cloud": "outrider.cloud.server",
    "outrider-export": "outrider.export.cli",
}
COMMANDS = {"outrider": "run", "outrider-cloud": "serve", "outrider-export": "inspect"}
ARGUMENTS = {
    "outrider": "The text to continue",
    "outrider-cloud": "Directory of a target bundle",
    "outrider-export": "Bundle directory.",
}
TIMEOUT_S = 120.0
pytestmark = pytest.mark.usefixtures("signals_reach_children")
each_script = pytest.mark.parametrize("script", SCRIPTS)


def run_script(
    script: str, *arguments: str | bytes, before: str = "", stdout: Any = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a console script as its entry point does. before: statements that run first."""
    code = (
        f"import sys\n{before}\nsys.argv[0] = {script!r}\nfrom {SCRIPTS[script]}.__main__ import main\nsys.exit(main())"
    )
    paths = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": paths, "COLUMNS": "100", "TERM": "dumb"} | environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """`run("outrider", "-h")`: exit code, standard output and error, in this process."""
    before = signal.getsignal(signal.SIGTERM)

    def run(script: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(f"{SCRIPTS[script]}.main").main()
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    monkeypatch.setenv("COLUMNS", "100")
    yield run
    signal.signal(signal.SIGTERM, before)


@each_script
def test_help_and_version(script: str, run: Run) -> None:
    """-h is --help, on commands too; the version is the distribution's. Arguments have help also where the installed
    libraries lose it.
    """
    code, short, _ = run(script, "-h")
    assert code == 0 and "--show-completion" in short and run(script, "--help")[1] == short
    assert run(script, "--version")[:2] == (0, version("outrider") + "\n")
    code, of_command, _ = run(script, COMMANDS[script], "-h")
    assert code == 0 and ARGUMENTS[script] in of_command and run(script) == (2, short, "")


@each_script
def test_completion(script: str) -> None:
    """A shell gets a script to complete with, and commands from it."""
    words = {"COMP_WORDS": f"{script} {COMMANDS[script][:2]}", "COMP_CWORD": "1"}
    completed = run_script(script, **{f"_{script.replace('-', '_').upper()}_COMPLETE": "complete_bash"}, **words)
    assert completed.returncode == 0 and completed.stdout.strip() == COMMANDS[script], completed.stderr
    source = run_script(script, "--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert source.returncode == 0 and f"_completion {script}\n" in source.stdout


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("outrider", ["rnu"], "No such command 'rnu'. Did you mean 'run'?"),
        ("outrider", ["run", "--drft", "x", "y"], "No such option '--drft'. Did you mean '--draft'?"),
        ("outrider", ["run", "--promt", "x"], "No such option '--promt'. Did you mean '--param'?\n"),  # no argument
        ("outrider-cloud", ["serv"], "No such command 'serv'. Did you mean 'serve'?"),
        ("outrider-cloud", ["serve", "x", "--prot", "1"], "No such option '--prot'. Did you mean '--port'?"),
        ("outrider-export", ["inspct"], "No such command 'inspct'. Did you mean 'inspect'?"),
        ("outrider-export", ["xyzzy"], "No such command 'xyzzy'."),
        ("outrider-cloud", ["serve"], "Missing argument 'BUNDLE'."),
        ("outrider-cloud", ["serve", "x", "--port", "many"], "Invalid value for '--port'"),
    ],
)
def test_a_mistyped_command_is_answered_with_one_suggestion(
    script: str, arguments: list[str], message: str, run: Run
) -> None:
    """One line for the error, one that says where help is, exit code 2."""
    code, out, err = run(script, *arguments)
    error, advice = err.splitlines()
    assert (code, out) == (2, "") and re.fullmatch(r"Try '.*--help'\.", advice)
    assert f"{error}\n".startswith(f"error: {message}") and error.count("Did you mean") <= 1


INTERRUPTED_IMPORT = """
import signal
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
@pytest.mark.parametrize(
    ("script", "arguments", "module"),
    [
        ("outrider", ["run", "x"], "outrider.edge.cli.main"),
        ("outrider", ["run", "x"], "typer"),
        ("outrider", ["run", "x"], "numpy"),
        ("outrider", ["run", "x"], "outrider.edge.cli.run"),
        ("outrider", ["run", "x"], "httpx"),
        ("outrider", ["devices"], "openvino"),
        ("outrider-cloud", ["serve", "x"], "outrider.models.process.command_line"),
        ("outrider-cloud", ["serve", "x"], "rich.console"),
        ("outrider-cloud", ["serve", "x"], "fastapi"),
        ("outrider-export", ["families"], "outrider.export.make.pair"),
    ],
)
def test_ctrl_c_during_an_import_ends_without_a_traceback(script: str, arguments: list[str], module: str) -> None:
    """With 130, as at any other time, whatever the module does with an exception."""
    finished = run_script(script, *arguments, before=INTERRUPTED_IMPORT.format(module=module))
    assert (finished.returncode, finished.stdout, finished.stderr) == (130, "", "")


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
def test_ctrl_c_at_shutdown_ends_without_a_traceback() -> None:
    """After the command has printed everything."""
    late = "import atexit, signal\natexit.register(signal.raise_signal, signal.SIGINT)"
    finished = run_script("outrider", "--version", before=late)
    assert (finished.returncode, finished.stdout.strip(), finished.stderr) == (130, version("outrider"), "")


@each_script
def test_a_narrow_encoding_replaces_characters(script: str, tmp_path: Path) -> None:
    """An error may have a name that ASCII lacks, which is no traceback."""
    arguments = {
        "outrider": ["run", "x", "--draft"],
        "outrider-cloud": ["serve", "--port", "0"],
        "outrider-export": ["inspect"],
    }[script]
    refused = run_script(script, *arguments, str(tmp_path / "東京"), PYTHONIOENCODING="ascii")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr and refused.stderr.startswith("error: ")


@pytest.mark.skipif(os.name != "posix", reason="closes a POSIX pipe")
@each_script
def test_a_closed_pipe_ends_quietly(script: str) -> None:
    """`| head -1`: no traceback, no message."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        finished = run_script(script, "--version", stdout=writer)
    finally:
        os.close(writer)
    assert (finished.returncode, finished.stderr) == (1, "")


@pytest.mark.parametrize(
    ("platform", "asked", "written"),
    [
        ("win32", None, "東é".encode()),
        ("win32", ":strict", "東é".encode()),
        ("win32", "cp1252", b"?\xe9"),
        ("linux", None, b"?\xe9"),
    ],
)
def test_files_and_pipes_get_utf8_on_windows(
    monkeypatch: pytest.MonkeyPatch, platform: str, asked: str | None, written: bytes
) -> None:
    """There the default is the system's code page; an encoding that was asked for stays."""
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    if asked is not None:
        monkeypatch.setenv("PYTHONIOENCODING", asked)
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="cp1252", newline="\n") for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    tolerate_narrow_encodings(platform)
    for stream in streams:
        print("東é", file=stream, flush=True)
        assert stream.buffer.getvalue() == written + b"\n"


def test_text_that_is_not_utf8_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument or standard input, the byte and where it is."""
    assert require_utf8("naïve 東京", "the prompt") == "naïve 東京"
    with pytest.raises(ConfigError, match="the prompt is not UTF-8: byte 0xff at offset 3"):
        require_utf8("é:\udcff", "the prompt")
    for data, text in ((b"a\r\nb\n", "a\nb"), (b"a\n\n", "a\n"), ("東".encode(), "東"), (b"", "")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
        assert read_stdin("the prompt") == text
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xe9")))
    with pytest.raises(ConfigError, match="the prompt on standard input is not UTF-8: byte 0xe9 at offset 2"):
        read_stdin("the prompt")


@pytest.mark.skipif(os.name != "posix", reason="arguments are bytes on POSIX only")
def test_a_prompt_argument_that_is_not_utf8_is_refused() -> None:
    """Before a model is loaded."""
    finished = run_script("outrider", "run", b"caf\xe9", "--draft", "nowhere")
    assert finished.returncode == 2 and "the prompt is not UTF-8: byte 0xe9 at offset 3" in finished.stderr


def test_packages_are_looked_for_without_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that is missing is named with its extra; a context around imports does the same."""
    require_packages(["typer", "outrider.models"], "it", "all")
    assert not is_installed("no_such_package") and not is_installed("no_such_package.inside")
    with pytest.raises(RuntimeUnavailable, match=r"it needs the package 'no_such_package'.*outrider\[all\]"):
        require_packages(["typer", "no_such_package"], "it", "all")
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(RuntimeUnavailable, match="'nncf'"), importing("it", "export"):
        import nncf  # noqa: F401


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["devices", "--json"], ["--version"], ["-h"]])
def test_a_full_disk_is_one_line(arguments: list[str], unbuffered: str) -> None:
    """Whether printing fails or the flush at the end, or both."""
    with Path("/dev/full").open("w") as full:
        finished = run_script("outrider", *arguments, stdout=full, PYTHONUNBUFFERED=unbuffered)
    assert (finished.returncode, finished.stderr) == (2, "error: No space left on device\n")


def test_lines_are_wrapped_on_a_terminal_only() -> None:
    """A number is never cut in two; a file gets the line as it is."""
    line = "stream: 128 tokens (length), 1234.5 tokens/s, first token after 12345 ms, 75 % of drafted tokens accepted"
    for is_terminal in (False, True):
        out = io.StringIO()
        console = Console(file=out, width=60, force_terminal=is_terminal, no_color=True)
        print_line(console, line)
        shown = out.getvalue().splitlines()
        assert max(map(len, shown)) <= 60 if is_terminal else len(shown) == 1
        assert " ".join(part.strip() for part in shown) == line


def commands_of(group: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from commands_of(command, (*path, name))


@pytest.mark.parametrize("part", ["edge.cli.main", "cloud.server.main", "export.cli.main"])
def test_no_word_of_the_help_is_broken_or_cut_in_a_narrow_terminal(part: str) -> None:
    """Choices were broken between any two letters, and options beside them were cut short."""
    app = importlib.import_module(f"outrider.{part}").app
    paths = list(commands_of(typer.main.get_command(app)))
    grouped = [path for path in paths if path in (("run",), ("chat",), ("serve",))]
    for path, help_option in [*((each, "--help") for each in paths), *((each, "--help-all") for each in grouped)]:
        wide, *narrow = (
            CliRunner().invoke(app, [*path, help_option], env={"COLUMNS": width, "TERM": "dumb"}).output
            for width in ("120", "100", "80", "60")
        )
        assert "--help" in wide and "\n\n" in wide and "\ue000" not in wide
        for each in narrow:
            assert each.split() == wide.split(), path


@pytest.mark.parametrize(
    ("script", "command", "most", "everyday", "seldom"),
    [
        (
            *("outrider-cloud", "serve", 46, {"--host", "--api-key-file", "--tls-cert"}),
            {"--port-file", "--insecure-no-keys", "--policy", "--rate"},
        ),
        ("outrider", "run", 40, {"--draft"}, set()),
        ("outrider", "serve", 37, {"--draft"}, set()),
        ("outrider", "chat", 28, {"--draft"}, set()),
    ],  # 42, 36, 32 and 24, --target, --steady, --tokenizer and --same-tokenizer, --exact, --lora and --model
)
def test_help_shows_few_options_in_named_groups_and_help_all_every_one(
    script: str, command: str, most: int, everyday: set[str], seldom: set[str], run: Run
) -> None:
    """At most 20; an option that there was once is refused with what to do instead."""
    short, whole = run(script, command, "--help")[1], run(script, command, "--help-all")[1]
    few, every = (set(re.findall(r"^ +(?:-\w, )?(--[\w-]+)", text, re.MULTILINE)) for text in (short, whole))
    helps = {"--help", "--help-all"}
    assert len(few - helps) <= 20 and len(every) - len(helps) <= most
    assert everyday <= few < every and seldom <= every - few
    assert "\nMore:\n" in whole and "\nMore:\n" not in short
    commands = importlib.import_module(f"{SCRIPTS[script]}.main").app.registered_commands
    (removed,) = (each.callback.removed for each in commands if each.callback.__name__ == command)
    for name, advice in removed.items():
        code, _, told = run(script, command, "x", name, "1")
        assert code == 2 and told.startswith(f"error: No such option {name!r}. {advice}\n")
