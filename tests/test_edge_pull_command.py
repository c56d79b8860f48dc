"""Tests the command `outrider pull`: several clouds, of which some are down or have no draft that fits; then `run`."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.agents import nowhere
from tests.commands import Outrider, screen
from tests.drafts import files_of, make_draft
from tests.raw_server import NOT_FOUND, RawServer, raw_server, writes
from tests.serving import TURNS_TEMPLATE, FakeServer, serve_fake
from tests.test_edge_terminal import chat

from outrider.edge.cli.command_options import ServeOptions
from outrider.edge.cli.draft_source import Notes, clouds_of, find_drafts
from outrider.edge.devices.placement import AS_BUNDLED, DraftChoice
from outrider.edge.setup.endpoints import Keys
from outrider.edge.store.shelf import Shelf
from outrider.models.bundle.manifest import StaticShapes
from outrider.models.bundle.reference_export import AUTO


@pytest.fixture(autouse=True)
def no_reference(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of this test's own, and no reference draft."""
    monkeypatch.setattr("outrider.edge.cli.draft_source.default_draft", lambda _: pytest.fail("took the reference"))


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


@pytest.fixture(scope="module")
def old() -> Iterator[str]:
    """A program that knows neither drafts nor models: it answers 404."""
    with raw_server(writes(NOT_FOUND)) as running:
        yield running.url


def clouds(*urls: str) -> list[str]:
    return [word for url in urls for word in ("--cloud", url)]


def test_a_pull_goes_on_to_the_next_cloud(
    server: FakeServer, empty: FakeServer, for_npus: FakeServer, old: str, place: Path, outrider: Outrider
) -> None:
    """Past one that is down, one without a list, one without drafts and one whose draft does not fit: a line each."""
    dead = nowhere()
    shown = outrider("pull", *clouds(dead, old, empty.url, for_npus.url, server.url))
    assert files_of(Path(shown.out.strip())) == files_of(place / "cpu")
    lines = [line for line in shown.err.splitlines() if "Trying" in line]
    assert lines == [
        f"No verifier answers at {dead}. Trying {old}.",
        f"{old} offers no drafts for download. Trying {empty.url}.",
        f"{empty.url} has no drafts for its target. Trying {for_npus.url}.",
        f"{for_npus.url} has no draft that fits. Trying {server.url}.",
    ]
    assert f"cpu from {server.url}: fp32" in shown.err and "rror" not in shown.err


@pytest.mark.parametrize("is_announced", [True, False], ids=["a file without end", "more than announced"])
def test_a_server_that_lies_about_sizes_fills_no_disk(
    place: Path, shelf: Shelf, outrider: Outrider, is_announced: bool
) -> None:
    """Nothing is asked for where the files are larger than what is announced, else no more is kept than that."""
    files, pad = files_of(place / "cpu"), bytes(1 << 20)
    entry = {"path": "pad.txt", "size": len(pad), "sha256": hashlib.sha256(pad).hexdigest()}
    manifest = json.loads(files["manifest.json"])
    files["manifest.json"] = json.dumps({**manifest, "files": [*manifest["files"], entry]}).encode()
    listed = [
        {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for path, data in files.items()
    ]
    total = sum(map(len, files.values())) + len(pad)
    draft = {"name": "cpu", "model": "tiny", "device": "cpu", "runtime": "openvino", "precision": "int8"}
    sized = draft | {"size_bytes": total if is_announced else 1, "files": [*listed, entry]}
    offered = {"model": "fake", "target": "t", "tokenizer": manifest["tokenizer_fingerprint"], "drafts": [sized]}

    def reply(server: RawServer, connection: socket.socket) -> None:
        path = server.asked[connection][0].removeprefix("/v1/drafts").removeprefix("/cpu/")
        data = files.get(path, b"") if path else json.dumps(offered).encode()
        writes(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + data, b"" if data else pad)(server, connection)

    with raw_server(reply) as server:
        error = outrider("pull", "--server", server.url, "--name", "cpu", code=2).err
        asked = [path for path in server.paths if path.startswith("/v1/drafts/")]
    on_disk = sum(map(len, files_of(shelf.root).values()))
    assert "Traceback" not in error and list(shelf.drafts()) == []
    assert ("/v1/drafts/cpu/pad.txt" in asked) == bool(asked) == is_announced, error
    assert on_disk <= (total if is_announced else 0), error


def test_what_several_clouds_have_is_said_of_each(
    server: FakeServer, empty: FakeServer, for_npus: FakeServer, outrider: Outrider
) -> None:
    """In the list one that is down is a line; where all are, or none has a draft that fits, it is one error."""
    dead = nowhere()
    shown = outrider("pull", "--list", *clouds(dead, empty.url, server.url))
    assert f"at {empty.url} has 0 drafts." in shown.out and f"at {server.url} has 1 draft." in shown.out
    assert f"No verifier answers at {dead}" in shown.err
    assert f"error: No verifier answers at {dead}" in outrider("pull", "--list", *clouds(dead, nowhere()), code=2).err
    error = outrider("pull", *clouds(empty.url, for_npus.url), code=2).err.splitlines()[-1]
    assert error.startswith("error: no cloud has a draft that fits: ")
    assert f"{empty.url} has no drafts for its target" in error and f"the only draft at {for_npus.url}" in error


def test_a_draft_is_found_for_the_first_cloud_that_says_its_target(
    server: FakeServer, old: str, outrider: Outrider
) -> None:
    """Before it stands a gateway that answers 404: nothing alarming is printed."""
    pulled = Path(outrider("pull", "--cloud", server.url).out.strip())
    console, shown = screen(width=200)
    (found,) = find_drafts([AUTO], AS_BUNDLED, clouds_of([old, server.url], Keys()), Notes(console))
    assert found.path == pulled and shown.getvalue() == f"draft: cpu, pulled from {server.url}\n"


def test_a_runtime_that_is_configured_for_drafting_does_not_stop_a_pull(
    server: FakeServer, outrider: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n-gram lookup runs no draft, but pulling one is no mistake; typed, it is."""
    for configured, typed, code, words in (
        ("ngram", (), 0, "Chosen: the only draft here."),
        ("onnxruntime", (), 2, "--runtime asks for onnxruntime"),
        ("onnxruntime", ("--runtime", "ngram"), 2, "--runtime ngram drafts without a model"),
    ):
        monkeypatch.setenv("OUTRIDER_RUNTIME", configured)
        assert words in outrider("pull", "--cloud", server.url, *typed, code=code).err


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_dead_first_cloud_is_named_once(
    command: str,
    server: FakeServer,
    opened_models: list[Path],
    tmp_path: Path,
    outrider: Outrider,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where no look at the clouds has ended before the text begins: each asks for a draft, then for the text."""
    dead = nowhere()
    outrider("pull", "--cloud", server.url)
    monkeypatch.setattr("outrider.edge.link.fleet.COMPARE_TIMEOUT_S", 0.0)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    asked = ["run", "def verify("] if command == "run" else ["chat", "--history", str(tmp_path / "history")]
    shown = outrider(*asked, "--max-tokens", "8", "--depth", "3", *clouds(dead, server.url))
    assert shown.out.strip() and shown.err.count("No verifier answers") == 1, shown.err


def test_ctrl_c_says_that_nothing_is_lost(
    server: FakeServer, outrider: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 130, and where the same command goes on."""

    async def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()

    monkeypatch.setattr("outrider.edge.cli.pull.pull_draft", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
    try:
        shown = outrider("pull", "--server", server.url, code=130)
    finally:
        signal.signal(signal.SIGINT, before)
    assert shown.err.endswith("What has arrived is kept: the same command goes on there.\n")


def test_pull_then_run(
    server: FakeServer, place: Path, shelf: Shelf, outrider: Outrider, opened_models: list[Path]
) -> None:
    """Two commands: the pulled draft drafts, and the text is the one of cloud-only."""
    pulled = outrider("pull", "--server", server.url)
    bundle = Path(pulled.out.strip())
    assert bundle.parent == shelf.root and files_of(bundle) == files_of(place / "cpu")
    assert "cpu: fp32, OpenVINO on the CPU" in pulled.err and "Chosen: the only draft here." in pulled.err
    assert "Pulled. `outrider run` and `outrider serve` draft with it for this target." in pulled.err
    asked = ["run", "def verify(", "--cloud", server.url, "--max-tokens", "24", "--seed", "3", "--json"]
    shown = outrider(*asked, "--depth", "3", "--mode", "stop-and-wait")
    drafted, text = json.loads(shown.out), json.loads(outrider(*asked, "--mode", "cloud-only").out)["text"]
    assert drafted["draft"]["runtime"] == "openvino" and drafted["acceptance_rate"] == 1.0
    assert opened_models == [bundle / "openvino_model.xml"]
    assert f"draft: cpu, pulled from {server.url}" in shown.err and drafted["text"] == text and len(text) > 20
    (bundle / "openvino_model.bin").write_bytes(b"damaged")
    message = outrider(*asked, code=2).err
    assert "the pulled draft is damaged: " in message and "; run `outrider pull` again\n" in message
    outrider("pull", "--server", server.url)
    assert files_of(bundle) == files_of(place / "cpu")


def test_the_command_s_other_outputs(server: FakeServer, shelf: Shelf, outrider: Outrider, tmp_path: Path) -> None:
    """--list takes nothing, --to says how to draft with it, and mistakes are one line."""
    shown = outrider("pull", "--server", server.url, "--list")
    assert f"fake at {server.url} has 1 draft." in shown.out and "75 %" in shown.out and "yes" in shown.out
    assert list(shelf.drafts()) == []
    to = tmp_path / "my draft"
    shown = outrider("pull", "--server", server.url, "--to", to)
    assert shown.out == f"{to}\n" and f"Draft with it: outrider run --draft '{to}'" in shown.err
    for url, typed, words in (
        (server.url, ["--device", "npu"], "--device asks for npu"),
        (server.url, ["--device", "npu"], f"error: the only draft at {server.url} does not fit ("),
        (server.url, ["--list", "--to", to], "leave one of them out"),
        ("http://", [], "expected http://host:port"),
    ):
        shown = outrider("pull", "--server", url, *typed, code=2)
        assert shown.out == "" and words in shown.err


def test_a_home_directory_that_no_shell_has_expanded(
    server: FakeServer, outrider: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in --to=~/draft: it is pulled there, found there, and a chat is saved where it was loaded."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert outrider("pull", "--server", server.url, "--to=~/draft").out.strip() == str(tmp_path / "draft")
    (found,) = find_drafts(["~/draft"], AS_BUNDLED, [], Notes(screen()[0]))
    assert found.path == tmp_path / "draft" and not (tmp_path / "~").exists()
    assert ServeOptions(api_key_file=Path("~/keys")).api_key_file == tmp_path / "keys"
    with serve_fake(chat_template=TURNS_TEMPLATE) as chatting:
        chat(chatting.url, "/save", load=Path("~/chat.json"))
    assert (tmp_path / "chat.json").is_file()


def test_without_a_pulled_draft_a_run_takes_the_reference(
    server: FakeServer, outrider: Outrider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And `--draft reference` takes it in any case; a draft that is named is taken as it is."""
    reference, named = make_draft(tmp_path / "the-reference").path, make_draft(tmp_path / "named").path
    monkeypatch.setattr("outrider.edge.cli.draft_source.default_draft", lambda choice: reference)

    def found(draft: str, url: str = server.url, choice: DraftChoice = AS_BUNDLED) -> Path:
        (bundle,) = find_drafts([draft], choice, clouds_of([url], Keys()), Notes(screen()[0]))
        return bundle.path

    assert found(AUTO) == found("reference") == reference and found(str(named)) == named
    pulled = Path(outrider("pull", "--server", server.url).out.strip())
    assert found(AUTO) == pulled and found("reference") == reference
    with serve_fake(has_chat_template=False) as same_tokenizer:
        assert found(AUTO, same_tokenizer.url) == pulled
        assert found(AUTO, same_tokenizer.url, DraftChoice(device="gpu")) == reference  # this one is for the CPU
