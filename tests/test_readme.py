"""What the documents tell users to type exists: every command, option, file and link in them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import typer.main

from outrider.edge.cli.summary import summary_lines
from outrider.edge.lab.comparison import Comparison
from outrider.edge.results import GenerationResult, Mode, Source

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "bench" / "README.md",
    ROOT / "examples" / "laptop_npu" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def commands() -> list[str]:
    """Every `outrider...` command line in a fenced block of README.md and docs/npu.md."""
    texts = README + (ROOT / "docs" / "npu.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:sh|powershell)\n(.*?)```", texts, re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if re.match(r"(\S*[/\\])?outrider(-\w+)?\s", line)]


@pytest.mark.parametrize("line", commands())
def test_readme_commands_parse(line: str) -> None:
    """The command, its subcommand and its options are those of the console scripts."""
    from outrider.cloud.server.main import app as cloud
    from outrider.edge.cli.main import app as edge
    from outrider.export.cli.main import app as export

    name, *arguments = shlex.split(line.replace("\\", "/"))
    app = {"outrider": edge, "outrider-cloud": cloud, "outrider-export": export}[Path(name).name]
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    subcommand = group.commands.get(arguments[0])
    assert subcommand is not None, f"{name} has no command {arguments[0]!r}"
    subcommand.make_context(arguments[0], arguments[1:])  # parses, and runs nothing


def test_readme_names_the_two_commands_and_they_are_make_targets() -> None:
    """`make demo` and `make test` are in README and in the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert f"make {target}" in README and re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_readme_shows_what_run_prints() -> None:
    """In the words that `run` uses now."""
    result = GenerationResult(
        *(Mode.STREAM, (1,) * 40, (Source.TARGET,) * 40, tuple(0.1 * i for i in range(40)), "length", 4, 4, 5, 5)
    )
    for line in (summary_lines(result)[0], Comparison(3, (2.0, 2.1, 2.2), None, {}, True, None).sentence("stream")):
        words = re.split(r"\d[\d.]*", line.partition(" tokens per target pass")[0])
        assert re.search(r"\d[\d.]*".join(map(re.escape, words[:-1])), README), line


def test_readme_is_short() -> None:
    """At most 90 lines of at most 120 columns; details are in docs/. A table's row is one line."""
    lines = README.splitlines()
    assert len(lines) <= 90 and [line for line in lines if len(line) > 120] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_file_names_in_documents_exist(document: Path) -> None:
    """Relative links and names of repository files in backticks point at something."""
    text = document.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    files = re.findall(r"`((?:models|edge|cloud|export|tests|bench|docs|examples)/[\w./-]+\.\w+)`", text)
    assert [link for link in links if not (document.parent / link).exists()] == []
    assert [name for name in files if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_modules_named_in_documents_exist(document: Path) -> None:
    """`outrider.PART.module`, also with a function behind it, and `bench.module` exist. Files are none."""
    pattern = r"(?<!vnd\.)(?<!/)\b(?:outrider|bench)\.[a-z]\w+(?:\.[a-z]\w+)*"
    for name in set(re.findall(pattern, document.read_text(encoding="utf-8"))):
        first, part, *rest = name.split(".")
        base = ROOT / "bench" if first == "bench" else ROOT / part / "outrider" / part
        parts = [part, *rest] if first == "bench" else rest
        for length in (len(parts), len(parts) - 1):  # the last may be something in the module
            path = base.joinpath(*parts[:length])
            if path.with_suffix(".py").is_file():
                source = path.with_suffix(".py").read_text(encoding="utf-8")
                assert length == len(parts) or re.search(rf"^(?:def|class) {parts[-1]}\b", source, re.MULTILINE)
                break
            if (path / "__init__.py").is_file() and length == len(parts):
                break
        else:
            pytest.fail(f"{document.name} names {name}")


def test_tests_named_in_documents_exist() -> None:
    """A test that a document cites is there under that name."""
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    documents = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    assert [name for name in re.findall(r"`(test_\w+)`", documents) if f"def {name}(" not in sources] == []
