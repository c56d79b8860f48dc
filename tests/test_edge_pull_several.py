"""Tests pulls with several clouds: the next one is asked where one is down or has no draft that fits."""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from rich.console import Console
from tests.drafts import make_draft
from tests.fake_runtime import FakeSequenceRuntime
from tests.serving import FakeServer, fake_tokenizer, serve_fake
from tests.test_edge_cli import run_main
from tests.test_edge_pull import files_of

from outrider.edge.cli.draft_source import Notes, clouds_of, find_drafts
from outrider.edge.devices.placement import AS_BUNDLED
from outrider.edge.link.downloads import DraftClient
from outrider.edge.link.endpoints import RetryPolicy
from outrider.edge.setup.endpoints import Keys
from outrider.edge.store.auto import AUTO
from outrider.edge.store.choice import Wishes
from outrider.edge.store.pull import find_offer
from outrider.edge.store.shelf import Shelf
from outrider.models.bundle.manifest import StaticShapes
from outrider.models.errors import CloudError

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """An empty cache of this test's own."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("outrider.edge.cli.draft_source.default_draft", lambda _: pytest.fail("took the reference"))
    return Shelf()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one draft for the CPU; do not change it."""
    root = tmp_path_factory.mktemp("offered")
    make_draft(root / "cpu", rate=0.75)
    return root


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[FakeServer]:
    with serve_fake(drafts=place) as running:
        yield running


@pytest.fixture(scope="module")
def empty() -> Iterator[FakeServer]:
    """A verifier that offers no drafts."""
    with serve_fake() as running:
        yield running


@pytest.fixture(scope="module")
def for_npus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    """A verifier with a draft for a device that this machine lacks."""
    root = tmp_path_factory.mktemp("npu")
    make_draft(root / "npu", device="npu", static_shapes=StaticShapes())
    with serve_fake(drafts=root) as running:
        yield running


@contextmanager
def gateway() -> Iterator[str]:
    """A program that knows neither drafts nor models: it answers 404."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    running = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = Thread(target=running.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}"
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


def nowhere() -> str:
    """An address where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def clouds(*urls: str) -> list[str]:
    return [word for url in urls for word in ("--cloud", url)]


def test_a_pull_goes_on_to_the_next_cloud(
    server: FakeServer,
    empty: FakeServer,
    for_npus: FakeServer,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """Past one that is down, one without a list, one without drafts and one whose draft does not fit: a line each."""
    dead = nowhere()
    with gateway() as old:
        assert run_main(monkeypatch, "pull", *clouds(dead, old, empty.url, for_npus.url, server.url)) == 0
    shown = capsys.readouterr()
    assert files_of(Path(shown.out.strip())) == files_of(place / "cpu")
    lines = [line for line in shown.err.splitlines() if "Trying" in line]
    assert lines == [
        f"No verifier answers at {dead}. Trying {old}.",
        f"{old} offers no drafts for download. Trying {empty.url}.",
        f"{empty.url} has no drafts for its target. Trying {for_npus.url}.",
        f"{for_npus.url} has no draft that fits. Trying {server.url}.",
    ]
    assert f"cpu from {server.url}: fp32" in shown.err and "rror" not in shown.err


def test_a_cloud_that_may_have_one_is_tried_again(empty: FakeServer) -> None:
    """The first one is down, the second has none: the first is tried again before that is an error."""

    async def pull(*urls: str) -> None:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(DraftClient(url)) for url in urls]
            policy = RetryPolicy(max_failures=3, max_loading_s=0.0, first_pause_s=0.0)
            await find_offer(clients, Wishes(), notes.append, policy)

    notes: list[str] = []
    dead = nowhere()
    with pytest.raises(CloudError) as raised:
        asyncio.run(pull(dead, empty.url))
    assert str(raised.value).startswith(
        f"No verifier answers at {dead}. Is `outrider-cloud serve` running there? Gave up after 3 attempts in "
    )
    assert f"{empty.url} has no drafts for its target" in str(raised.value)
    assert notes[1] == f"{empty.url} has no drafts for its target. Trying {dead}."


def test_where_no_cloud_has_a_draft_that_fits_each_says_why(
    empty: FakeServer, for_npus: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """In one error."""
    assert run_main(monkeypatch, "pull", *clouds(empty.url, for_npus.url)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: no cloud has a draft that fits: ")
    assert f"{empty.url} has no drafts for its target" in error and f"the only draft at {for_npus.url}" in error


def test_the_list_is_of_every_cloud(
    server: FakeServer, empty: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """One that is down is a line; where all are, it is the error."""
    dead = nowhere()
    assert run_main(monkeypatch, "pull", "--list", *clouds(dead, empty.url, server.url)) == 0
    shown = capsys.readouterr()
    assert f"at {empty.url} has 0 drafts." in shown.out and f"at {server.url} has 1 draft." in shown.out
    assert f"No verifier answers at {dead}" in shown.err
    assert run_main(monkeypatch, "pull", "--list", *clouds(dead, nowhere())) == 2
    assert f"error: No verifier answers at {dead}" in capsys.readouterr().err


def test_a_draft_is_found_for_the_first_cloud_that_says_its_target(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Before it stands a gateway that answers 404: nothing alarming is printed."""
    assert run_main(monkeypatch, "pull", "--cloud", server.url) == 0
    pulled = Path(capsys.readouterr().out.strip())
    shown = io.StringIO()
    with gateway() as old:
        found = find_drafts(
            [AUTO], AS_BUNDLED, clouds_of([old, server.url], Keys()), Notes(Console(file=shown, width=200))
        )
        assert [bundle.path for bundle in found] == [pulled]
    assert shown.getvalue() == f"draft: cpu, pulled from {server.url}\n"


def test_a_runtime_that_is_configured_for_drafting_does_not_stop_a_pull(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """n-gram lookup runs no draft, but pulling one is no mistake; typed, it is."""
    monkeypatch.setenv("OUTRIDER_RUNTIME", "ngram")
    assert run_main(monkeypatch, "pull", "--cloud", server.url) == 0, capsys.readouterr().err
    assert "Chosen: the only draft here." in capsys.readouterr().err
    monkeypatch.setenv("OUTRIDER_RUNTIME", "onnxruntime")
    assert run_main(monkeypatch, "pull", "--cloud", server.url) == 2
    assert "--runtime asks for onnxruntime" in capsys.readouterr().err
    assert run_main(monkeypatch, "pull", "--cloud", server.url, "--runtime", "ngram") == 2
    assert "--runtime ngram drafts without a model" in capsys.readouterr().err


@pytest.fixture
def fake_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundles of these tests hold no model."""

    def open_fake(kind: str, model_file: Path, options: object) -> FakeSequenceRuntime:
        return FakeSequenceRuntime(vocab_size=fake_tokenizer().size)

    monkeypatch.setattr("outrider.edge.modes.assemble.open_sequence_runtime", open_fake)


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_dead_first_cloud_is_named_once(
    command: str,
    server: FakeServer,
    fake_model: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """Also where no look at the clouds has ended before the text begins: each asks for a draft, then for the text."""
    dead = nowhere()
    assert run_main(monkeypatch, "pull", "--cloud", server.url) == 0
    capsys.readouterr()
    monkeypatch.setattr("outrider.edge.link.fleet.COMPARE_TIMEOUT_S", 0.0)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    asked = ["run", "def verify("] if command == "run" else ["chat", "--history", str(tmp_path / "history")]
    assert run_main(monkeypatch, *asked, "--max-tokens", "8", "--depth", "3", *clouds(dead, server.url)) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() and shown.err.count("No verifier answers") == 1, shown.err
