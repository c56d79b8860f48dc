"""Tests how `outrider pull` downloads, resumes and checks a draft, whatever its server sends."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from tests.agents import Passing, nowhere
from tests.drafts import files_of, make_draft
from tests.serving import FakeServer, fake_tokenizer, serve_fake
from tests.waiting import run

from outrider.cloud.api.state import DownloadLimits, ServerSettings
from outrider.edge.link.downloads import DraftClient
from outrider.edge.link.endpoints import RetryPolicy
from outrider.edge.store.choice import OfferChoice, Wishes
from outrider.edge.store.fetch import MAX_FAILURES, Progress
from outrider.edge.store.pull import PullResult, find_offer, list_offered, pull_draft
from outrider.edge.store.shelf import Shelf
from outrider.models.bundle.bundle import hash_file
from outrider.models.client.errors import ProtocolBroken
from outrider.models.errors import BundleError, CloudError, OutriderError
from outrider.models.wire.offered import OfferedFile

SHA = "0" * 64
CONTENT = bytes(range(251)) * 6000  # about 1.5 MB: several pieces of an answer


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one draft; do not change it."""
    root = tmp_path_factory.mktemp("offered")
    make_draft(root / "cpu", rate=0.75, content=CONTENT)
    return root


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[FakeServer]:
    with serve_fake(drafts=place) as running:
        yield running


async def pulled(
    url: str,
    to: Path | None = None,
    *,
    on_change: Callable[[int], None] = lambda done: None,
    note: Callable[[str], None] = lambda words: None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> tuple[PullResult, int]:
    """Pulls the only draft; also how many bytes came down."""
    async with DraftClient(url, transport=transport) as client:
        offered = await list_offered(client, note)
        (draft,) = offered.drafts
        progress = Progress(draft.size_bytes, on_change, note)
        return await pull_draft(client, offered, OfferChoice(draft, ""), progress, to), client.wire.body_down


def pull(*given: Any, **options: Any) -> tuple[PullResult, int]:
    """Pulls it on a loop of its own."""
    return run(pulled(*given, **options))


def test_a_pulled_bundle_is_the_server_s(server: FakeServer, place: Path, shelf: Shelf) -> None:
    """Byte for byte, with nothing left beside it; a second pull fetches the list only."""
    seen: list[int] = []
    result, _ = pull(server.url, on_change=seen.append)
    assert result == PullResult(shelf.place(hash_file(place / "cpu" / "manifest.json")), is_new=True)
    assert files_of(result.path) == files_of(place / "cpu")
    assert seen == sorted(seen) and seen[-1] == sum(map(len, files_of(place / "cpu").values()))
    assert [path.name for path in shelf.root.iterdir() if "partial" in path.name] == []
    (pulled,) = shelf.drafts()
    noted = pulled.pulled_for(server.core.model.target)
    assert noted is not None and (noted.model, noted.server, noted.name) == ("fake", server.url, "cpu")
    again, num_bytes = pull(server.url)
    assert again == replace(result, is_new=False) and num_bytes < 3000


def test_a_pull_to_a_directory(server: FakeServer, place: Path, shelf: Shelf, tmp_path: Path) -> None:
    """Whole or not there; what is there is not replaced."""
    to, empty = tmp_path / "made" / "here", tmp_path / "empty"
    empty.mkdir()
    for place_to, is_new in ((to, True), (to, False), (empty, True)):
        assert pull(server.url, place_to)[0] == PullResult(place_to, is_new=is_new)
    assert files_of(to) == files_of(place / "cpu") and list(to.parent.iterdir()) == [to]
    assert list(shelf.drafts()) == []
    other = make_draft(tmp_path / "other", content=b"other").path
    (to / "openvino_model.bin").write_bytes(b"damaged")
    for wrong, words in (
        (other, r"other is another bundle\. It is not replaced: choose another place"),
        (to, r"openvino_model\.bin is truncated.*It is not replaced"),
    ):
        with pytest.raises(BundleError, match=words):
            pull(server.url, wrong)


def test_a_connection_that_is_cut_is_resumed(place: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a server that closes every download after a piece: the parts make the file, none is sent twice."""
    monkeypatch.setattr("outrider.edge.store.fetch.FIRST_PAUSE_S", 0.0)
    notes, settings = list[str](), ServerSettings(download_limits=DownloadLimits(grace_s=-1.0, min_rate=1e15))
    with serve_fake(settings, drafts=place) as cutting:
        result, num_bytes = pull(cutting.url, note=notes.append)
    assert files_of(result.path) == files_of(place / "cpu")
    assert num_bytes < sum(map(len, files_of(place / "cpu").values())) + 3000
    assert len(notes) >= 4 and all("going on at" in note for note in notes)


class Killed(BaseException):
    """Ends a pull as a signal does."""


def midway(error: BaseException) -> Callable[[int], None]:
    """Raises it in the middle of the weights."""

    def on_change(done: int) -> None:
        if done > 600_000:
            raise error

    return on_change


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_killed_pull_goes_on_where_it_stopped(
    has_ranges: bool, server: FakeServer, place: Path, shelf: Shelf
) -> None:
    """The part is kept apart from the bundle, which is not there before it is whole. From a server without ranges what
    is here of a file is dropped: the answer begins at its first byte.
    """

    def pass_on(request: httpx.Request) -> None:
        assert request.headers["user-agent"].startswith("outrider/")  # some gateways refuse requests without
        if not has_ranges:
            request.headers.pop("range", None)

    with pytest.raises(Killed):
        pull(server.url, on_change=midway(Killed()))
    assert list(shelf.drafts()) == []
    (partial,) = (path for path in shelf.root.iterdir() if path.is_dir())
    kept = (partial / "openvino_model.bin").stat().st_size
    assert partial.name.startswith(".") and 500_000 < kept < len(CONTENT)
    result, num_bytes = pull(server.url, transport=Passing(pass_on))
    assert result.is_new and files_of(result.path) == files_of(place / "cpu") and not partial.exists()
    rest = len(CONTENT) - kept + 20_000  # of the file, the small files after it, and the list
    assert num_bytes < rest if has_ranges else num_bytes > len(CONTENT)


def test_a_damaged_file_is_named_and_the_others_are_kept(tmp_path: Path, shelf: Shelf) -> None:
    """The server's disk has changed since it hashed the files. Once it is mended, only that file is fetched."""
    bundle = make_draft(tmp_path / "drafts" / "cpu", content=CONTENT).path
    weights = bundle / "openvino_model.bin"
    with serve_fake(drafts=tmp_path / "drafts") as running:
        weights.write_bytes(CONTENT[:-1] + b"?")
        with pytest.raises(BundleError, match=r"^openvino_model\.bin of cpu arrived damaged: its SHA-256 is .*again$"):
            pull(running.url)
        assert list(shelf.drafts()) == []
        (partial,) = (path for path in shelf.root.iterdir() if path.is_dir())
        assert set(files_of(partial)) == {"manifest.json"}
        weights.write_bytes(CONTENT)
        assert files_of(pull(running.url)[0].path) == files_of(bundle)


def test_what_is_damaged_here_is_mended(server: FakeServer, place: Path, shelf: Shelf) -> None:
    """What an interrupted pull left: the whole file then, once. Of a bundle in the cache only what is damaged is
    fetched, and what does not belong there goes.
    """
    partial = shelf.root / f".{shelf.place(hash_file(place / 'cpu' / 'manifest.json')).name}.partial"
    partial.mkdir(parents=True)
    (partial / "openvino_model.bin").write_bytes(b"damaged")
    (partial / "tokenizer.json").write_bytes(b"x" * (2 << 20))
    notes: list[str] = []
    first, _ = pull(server.url, note=notes.append)
    assert files_of(first.path) == files_of(place / "cpu")
    assert notes == ["openvino_model.bin is damaged: what was here of it did not belong to it. Fetching it again."]
    (first.path / "tokenizer.json").write_bytes(b"x" * (first.path / "tokenizer.json").stat().st_size)
    (first.path / "stranger.json").write_text("{}")
    (first.path / "openvino_model.xml").write_text("<n")
    again, num_bytes = pull(server.url, note=notes.append)
    assert again == first and files_of(again.path) == files_of(place / "cpu")
    assert num_bytes < len(CONTENT) / 4 and "Fetching what is damaged again." in notes[1]


async def test_two_pulls_at_once_fetch_once(server: FakeServer, place: Path, shelf: Shelf) -> None:
    """The second waits for the first, says so, and finds the bundle."""
    notes: list[str] = []
    results = [each for each, _ in await asyncio.gather(*(pulled(server.url, note=notes.append) for _ in range(2)))]
    assert sorted(each.is_new for each in results) == [False, True] and results[0].path == results[1].path
    assert notes == ["Another process pulls this draft; waiting for it."]
    assert files_of(results[0].path) == files_of(place / "cpu")


def test_a_disk_without_room(server: FakeServer, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first byte where it shows; else at the byte that does not fit, and what is there is kept."""
    room = shutil.disk_usage("/")._replace(free=1000)
    with (
        monkeypatch.context() as patched,
        pytest.raises(BundleError, match=r"cpu needs 1\.5 MB more at .* 0\.0 MB are free; free some space"),
    ):
        patched.setattr(shutil, "disk_usage", lambda path: room)
        pull(server.url)

    full = OSError(28, "No space left on device")
    with pytest.raises(BundleError, match=r"the disk of .*drafts is full; free some space and run `outrider pull`"):
        pull(server.url, on_change=midway(full))
    assert list(shelf.drafts()) == [] and pull(server.url)[0].is_new


def lying(change: Callable[[dict[str, Any], dict[str, bytes]], None], place: Path) -> httpx.MockTransport:
    """A server with the draft of `place` after `change` of its list and its files."""
    files = files_of(place / "cpu")
    paths = ["manifest.json", *sorted(set(files) - {"manifest.json"})]
    listed: dict[str, Any] = {
        "model": "fake",
        "target": "t",
        "tokenizer": fake_tokenizer().fingerprint,
        "drafts": [
            {"name": "cpu", "model": "tiny", "device": "cpu", "runtime": "openvino", "precision": "int8",
             "files": [{"path": path, "size": len(files[path]), "sha256": SHA} for path in paths]}
        ],
    }  # fmt: skip
    change(listed, files)
    (draft,) = listed["drafts"]
    for file in draft["files"]:
        if file["path"] in files and file["sha256"] == SHA:
            data = files[file["path"]]
            file |= {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    draft.setdefault("size_bytes", sum(file["size"] for file in draft["files"]))

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/v1/drafts").removeprefix("/cpu/")
        return httpx.Response(200, content=files[path]) if path else httpx.Response(200, json=listed)

    return httpx.MockTransport(answer)


def edited(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any], dict[str, bytes]], None]:
    """Changes the manifest, and the list of files with it."""

    def both(listed: dict[str, Any], files: dict[str, bytes]) -> None:
        manifest = json.loads(files["manifest.json"])
        change(manifest)
        files["manifest.json"] = json.dumps(manifest).encode()
        listed["drafts"][0]["files"] = [{"path": "manifest.json", "size": 0, "sha256": SHA}, *manifest["files"]]

    return both


def add_file(path: str) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["files"].append({"path": path, "size": 1, "sha256": SHA})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edited(add_file("../evil.json")), r"path '../evil.json' is not a plain relative path"),
        (edited(add_file("/etc/evil.json")), r"is not a plain relative path"),
        (edited(add_file("evil.py")), r"evil\.py, which could execute code on load"),
        (edited(add_file("evil.bin")), r"evil\.bin, which could execute code on load"),
        (edited(add_file("evil.html")), r"the file evil\.html, whose format is not allowed; it is not fetched"),
        (edited(lambda m: m.update(role="target")), r"cpu is a target bundle; expected a draft"),
        (edited(lambda m: m.update(tokenizer_fingerprint="1" * 64)), r"it was made for another target"),
        (edited(lambda m: m.update(schema_version=1)), r"has schema version 1, this Outrider reads 2"),
        (lambda listed, files: listed["drafts"][0]["files"].pop(), r"lists other files than the server"),
        (lambda listed, files: listed["drafts"][0]["files"].pop(0), r"lists cpu without manifest\.json"),
        (lambda listed, files: listed["drafts"][0].update(name="../x"), r"broke the protocol: its answer is not a Dra"),
        (lambda listed, files: listed["drafts"][0].update(size_bytes=-1), r"broke the protocol"),
        (
            lambda listed, files: listed["drafts"][0].update(size_bytes=1),
            r"the files of its draft cpu have \d{7} bytes in all, and 1 are announced; ask the server's operator",
        ),
        (
            lambda listed, files: listed["drafts"][0]["files"][0].update(size=5 << 20, sha256="1" * 64),
            r"the manifest of cpu has 5242880 bytes",
        ),
        (
            lambda listed, files: listed["drafts"][0]["files"][0].update(size=10, sha256="1" * 64),
            r"a file has more bytes than it announced",
        ),
        (
            lambda listed, files: listed["drafts"][0]["files"][0].update(
                size=len(files["manifest.json"]), sha256="1" * 64
            ),
            r"manifest\.json of cpu arrived damaged",
        ),
    ],
)
def test_a_server_that_lies_gets_nothing_onto_the_device(
    place: Path,
    shelf: Shelf,
    tmp_path: Path,
    change: Callable[[dict[str, Any], dict[str, bytes]], None],
    message: str,
) -> None:
    """Everything is checked against the manifest before it is fetched, and nothing lands outside the cache."""
    with pytest.raises(OutriderError, match=message):
        pull("http://cloud.example", transport=lying(change, place))
    assert not list(shelf.drafts()) and not list(tmp_path.rglob("*evil*"))


async def test_a_range_that_was_not_asked_for_is_refused(shelf: Shelf) -> None:
    """It would be written at the wrong place."""
    answer = httpx.Response(206, headers={"content-range": "bytes 5-9/10"}, content=b"12345")
    client = DraftClient("http://cloud.example", transport=httpx.MockTransport(lambda request: answer))
    with pytest.raises(ProtocolBroken, match=r"Content-Range 'bytes 5-9/10'; expected 'bytes 3-9/10'"):
        async with client, client.download("cpu", OfferedFile(path="a", size=10, sha256=SHA), 3):
            pytest.fail("the range was taken")


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (httpx.Response(404), CloudError, "offers no drafts for download: it is older than this device"),
        (
            httpx.Response(401, json={"error": {"code": "unauthorized", "message": "no"}}),
            OutriderError,
            "requires an API key: set OUTRIDER_API_KEY",
        ),
        (httpx.ConnectError("refused"), CloudError, "No verifier answers at http://cloud.example"),
    ],
)
def test_servers_that_have_nothing_to_pull(
    answer: httpx.Response | Exception,
    error: type[Exception],
    message: str,
    shelf: Shelf,
) -> None:
    """Older ones, those that want a key, and those that are not there."""
    with pytest.raises(error, match=message):
        pull("http://cloud.example", transport=httpx.MockTransport(Mock(side_effect=[answer] * 9)))


@pytest.mark.parametrize(
    ("status", "words", "num_asked"),
    [
        (503, r"openvino_model\.bin broke off after 0\.0 of 1\.5 MB: .*some words.*to go on", MAX_FAILURES),
        (410, r"some words\. Run `outrider pull` again: the server may have another draft", 1),
    ],
)
def test_a_download_that_brings_nothing_is_given_up(
    status: int, words: str, num_asked: int, place: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a few attempts, with how far it came; a file that is gone at once."""
    monkeypatch.setattr("outrider.edge.store.fetch.FIRST_PAUSE_S", 0.0)
    asked, inner = list[str](), lying(lambda listed, files: None, place)

    def answer(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith(".bin"):
            return inner.handler(request)  # type: ignore[return-value]
        asked.append(request.url.path)
        return httpx.Response(status, json={"error": {"code": "some_code", "message": "some words"}})

    with pytest.raises(CloudError, match=words):
        pull("http://cloud.example", transport=httpx.MockTransport(answer))
    assert len(asked) == num_asked


async def test_a_cloud_that_may_have_one_is_tried_again() -> None:
    """The first one is down, the second has none: the first is tried again before that is an error."""
    notes, dead = list[str](), nowhere()
    policy = RetryPolicy(max_failures=3, max_loading_s=0.0, first_pause_s=0.0)
    with serve_fake() as empty, pytest.raises(CloudError) as raised:
        async with DraftClient(dead) as first, DraftClient(empty.url) as second:
            await find_offer([first, second], Wishes(), notes.append, policy)
    assert str(raised.value).startswith(
        f"No verifier answers at {dead}. Is `outrider-cloud serve` running there? Gave up after 3 attempts in "
    )
    assert f"{empty.url} has no drafts for its target" in str(raised.value)
    assert notes[1] == f"{empty.url} has no drafts for its target. Trying {dead}."
