"""Tests what `outrider pull` says of the cache, and what `--prune` removes from it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from tests.drafts import make_draft
from tests.serving import FakeServer, serve_fake
from tests.test_edge_cli import run_main

from outrider.edge.store.prune import find_outdated, prune
from outrider.edge.store.shelf import PulledFor, Shelf, in_use
from outrider.models.bundle.bundle import hash_file
from outrider.models.wire.offered import DraftList, OfferedDraft, OfferedFile

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """An empty cache of this test's own."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return Shelf()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    root = tmp_path_factory.mktemp("offered")
    make_draft(root / "cpu", rate=0.75)
    with serve_fake(drafts=root) as running:
        yield running


def put(shelf: Shelf, content: bytes, **targets: str) -> Path:
    """A draft that was pulled for these targets, each from a server."""
    made = make_draft(shelf.root / "new", content=content).path
    sha256 = hash_file(made / "manifest.json")
    made.rename(shelf.place(sha256))
    for target, server in targets.items():
        shelf.note(sha256, target, PulledFor(model="fake", server=server, name=content[:8].decode(), at_s=1.0))
    return shelf.place(sha256)


def listed(target: str, *drafts: Path) -> DraftList:
    """What a server of this target offers: these bundles."""
    offered = []
    for path in drafts:
        sha256 = hash_file(path / "manifest.json") if path.exists() else "f" * 64
        files = [OfferedFile(path="manifest.json", size=1, sha256=sha256)]
        offered.append(
            OfferedDraft(
                name="d", model="m", device="cpu", runtime="openvino", precision="int8", size_bytes=1, files=files
            )
        )
    return DraftList(model="fake", target=target, tokenizer="t", drafts=offered)


def test_drafts_that_are_no_longer_offered_are_outdated(shelf: Shelf) -> None:
    """For the targets of the servers that answered, and where a draft in their place is here."""
    old, new, twin = put(shelf, b"old", t="a"), put(shelf, b"new", t="a"), put(shelf, b"twin", t="a")
    put(shelf, b"both", t="a", other="b")
    put(shelf, b"elsewhere", other="b")
    earlier = put(shelf, b"recent", before="a")  # this server had another target
    replica = put(shelf, b"replica", t="c")
    put(shelf, b"unnoted")

    def found(lists: dict[str, DraftList]) -> set[Path]:
        return {each.bundle.path for each in find_outdated(shelf, lists)}

    assert found({"a": listed("t", new, twin)}) == {old, earlier, replica}
    assert found({"a": listed("t", new, twin), "c": listed("t", replica)}) == {old, earlier}
    assert found({"a": listed("t")}) == found({"a": listed("t", shelf.root / "not-here")}) == set()
    assert found({"a": listed("next")}) == found({}) == set()


def test_what_is_in_use_or_being_pulled_stays(shelf: Shelf) -> None:
    """Another process has it mapped, or is about to open it; the others go, with their records."""
    used, pulled, free = (put(shelf, name, t="a") for name in (b"used", b"pulled", b"free"))
    new = put(shelf, b"new", t="a")
    code = (
        "import sys, pathlib\nfrom outrider.edge.store.shelf import in_use\n"
        "with in_use(pathlib.Path(sys.argv[1])): print('ready', flush=True); sys.stdin.read()"
    )
    notes: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-c", code, str(used)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as user:
        assert user.stdout is not None and user.stdin is not None and user.stdout.readline() == "ready\n"
        with FileLock(shelf.lock(pulled.name)):
            removed = prune(shelf, find_outdated(shelf, {"a": listed("t", new)}), notes.append)
        assert [each.bundle.path for each in removed] == [free] and not free.exists()
        assert used.is_dir() and pulled.is_dir() and not (shelf.root / f"{free.name}.json").exists()
        assert sorted(notes) == [
            "pulled, pulled from a, stays: another process pulls it.",
            "used, pulled from a, stays: a running process uses it.",
        ]
    assert {each.bundle.path for each in prune(shelf, find_outdated(shelf, {"a": listed("t", new)}), notes.append)} == {
        used,
        pulled,
    }
    assert [path.name for path in shelf.root.iterdir() if path.is_dir()] == [new.name]


def test_a_draft_that_cannot_be_removed_stays_whole(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, where another process has a file of it open: it is reported, and the others go."""
    first, second, new = (put(shelf, name, t="a") for name in (b"1", b"2", b"new"))
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self == first:
            raise PermissionError(13, "Access is denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    notes: list[str] = []
    removed = prune(shelf, find_outdated(shelf, {"a": listed("t", new)}), notes.append)
    assert [each.bundle.path for each in removed] == [second]
    assert notes == ["1, pulled from a, stays: Access is denied."] and (first / "manifest.json").is_file()
    assert (shelf.root / f"{first.name}.json").is_file()


def test_a_pull_says_what_is_kept_and_prunes_when_asked(
    server: FakeServer, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The size of all, and of what is no longer offered. Without --prune nothing goes."""
    target = server.core.model.target
    assert target is not None
    old = put(shelf, b"x" * 2_000_000, **{target: server.url})
    other = put(shelf, b"other", another="http://elsewhere.example")
    assert run_main(monkeypatch, "pull", "--cloud", server.url) == 0
    shown = capsys.readouterr()
    pulled = Path(shown.out.strip())
    assert re.search(
        rf"The cache holds 3 drafts, 2\.\d MB, in {re.escape(str(shelf.root))}; no longer offered: 1, 2\.\d MB\. "
        "`outrider pull --prune` removes them\\.",
        shown.err,
    )
    with in_use(old):
        assert run_main(monkeypatch, "pull", "--cloud", server.url, "--prune") == 0
        assert "stays: a running process uses it" in capsys.readouterr().err and old.is_dir()
    assert run_main(monkeypatch, "pull", "--cloud", server.url, "--prune") == 0
    shown = capsys.readouterr()
    assert Path(shown.out.strip()) == pulled and "Removed: " in shown.err and "holds 2 drafts, 0.0 MB" in shown.err
    assert not old.exists() and pulled.is_dir() and other.is_dir()


def test_prune_goes_with_a_pull_into_the_cache(
    server: FakeServer, shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Typed where it has no effect it is a mistake; configured it is ignored."""
    assert run_main(monkeypatch, "pull", "--cloud", server.url, "--prune", "--list") == 2
    assert "--list changes nothing, so --prune would have no effect" in capsys.readouterr().err
    assert run_main(monkeypatch, "pull", "--cloud", server.url, "--prune", "--to", str(tmp_path / "to")) == 2
    assert "--to leaves the cache as it is, so --prune would have no effect" in capsys.readouterr().err
    monkeypatch.setenv("OUTRIDER_PULL_PRUNE", "1")
    assert run_main(monkeypatch, "pull", "--cloud", server.url, "--to", str(tmp_path / "to")) == 0
    assert "The cache holds" not in capsys.readouterr().err


def test_the_draft_that_a_command_takes_is_marked(
    server: FakeServer, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """From before it is opened until the command ends: it may be opened late, or again after a failure."""
    assert run_main(monkeypatch, "pull", "--cloud", server.url) == 0
    pulled = Path(capsys.readouterr().out.strip())
    (found,) = shelf.drafts()
    stayed: list[str] = []

    def try_to_prune(*_: object) -> None:
        assert prune(shelf, [found], stayed.append) == []
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.edge.cli.draft_source.open_draft_bundle", try_to_prune)
    for draft in ("auto", str(pulled)):
        assert run_main(monkeypatch, "run", "text", "--cloud", server.url, "--draft", draft) == 130
    assert len(stayed) == 2 and all("a running process uses it" in note for note in stayed)
    assert prune(shelf, [found], stayed.append) == [found] and not pulled.exists()
    assert [path.name for path in shelf.root.iterdir()] == [f".{pulled.name}.lock"]
