"""Tests `outrider pull`: what it chooses, how it downloads and resumes, and that `run` drafts with it."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from tests.drafts import make_draft
from tests.fake_runtime import FakeSequenceRuntime
from tests.serving import FakeServer, fake_tokenizer, serve_fake
from tests.test_edge_cli import run_main

from outrider.cloud.api.state import DownloadLimits, ServerSettings
from outrider.edge.cli.draft_source import Notes, _find_pulled, clouds_of, find_drafts
from outrider.edge.cli.pull import show_offered
from outrider.edge.cli.run_options import RunOptions
from outrider.edge.devices.discovery import FoundDevice, FoundRuntime, ModelRuntime
from outrider.edge.devices.placement import AS_BUNDLED, DraftChoice
from outrider.edge.link.downloads import DraftClient
from outrider.edge.setup.endpoints import Keys
from outrider.edge.store import fetch
from outrider.edge.store.auto import AUTO
from outrider.edge.store.choice import OfferChoice, Wishes, choose, judge
from outrider.edge.store.fetch import Progress
from outrider.edge.store.fitting import facts_of
from outrider.edge.store.pull import PullResult, list_offered, pull_draft
from outrider.edge.store.shelf import PulledFor, Shelf, find_all_pulled, find_pulled
from outrider.models.bundle.bundle import Bundle, hash_file
from outrider.models.bundle.manifest import StaticShapes
from outrider.models.client.client import VerifierClient
from outrider.models.client.errors import ProtocolBroken
from outrider.models.errors import BundleError, CloudError, OutriderError, RequestError
from outrider.models.wire.offered import DraftList, OfferedDraft, OfferedFile
from outrider.models.wire.protocol import ModelFacts

CONTENT = bytes(range(251)) * 6000  # about 1.5 MB: several pieces of an answer
SHA = "0" * 64


def offer(name: str, device: str = "cpu", runtime: str = "openvino", **fields: Any) -> OfferedDraft:
    """A draft of a server's list."""
    files = [OfferedFile(path="manifest.json", size=1, sha256=SHA)]
    values: dict[str, Any] = {"precision": "int8", "size_bytes": 1000, "acceptance": 0.7, "files": files, "model": "m"}
    return OfferedDraft(name=name, device=device, runtime=runtime, **(values | fields))


def machine(**devices: tuple[str, ...] | None) -> Callable[[ModelRuntime], FoundRuntime]:
    """What `find_runtime` answers; None: not installed."""

    def find(runtime: ModelRuntime) -> FoundRuntime:
        names = devices.get(runtime)
        found = tuple(FoundDevice(name.upper(), name, name) for name in names or ())  # type: ignore[arg-type]
        return FoundRuntime(runtime, None if names is None else "1.0", found)

    return find


LAPTOP = machine(openvino=("cpu", "npu"))
WORKSTATION = machine(openvino=("cpu", "gpu", "npu"), onnxruntime=("cpu",))


@pytest.mark.parametrize(
    ("drafts", "find", "wishes", "name", "why"),
    [
        ([offer("a")], LAPTOP, Wishes(), "a", "the only draft here"),
        ([offer("g", "gpu"), offer("c")], LAPTOP, Wishes(), "c", "the only one of 2 that fits"),
        ([offer("o", runtime="onnxruntime"), offer("c")], LAPTOP, Wishes(), "c", "the only one of 2 that fits"),
        ([offer("low", acceptance=0.5), offer("high")], LAPTOP, Wishes(), "high", "the highest acceptance of 2"),
        ([offer("n", "npu"), offer("c")], LAPTOP, Wishes(), "c", "and the CPU comes before the NPU"),
        ([offer("n", "npu", acceptance=0.9), offer("c")], LAPTOP, Wishes(), "n", "the highest acceptance"),
        ([offer("c"), offer("g", "gpu", acceptance=0.66)], WORKSTATION, Wishes(), "g", "acceptance is alike, and"),
        ([offer("big", size_bytes=9000), offer("c")], LAPTOP, Wishes(), "c", "it is the smallest for the CPU"),
        (
            [offer("u", acceptance=None), offer("v", acceptance=None, size_bytes=9)],
            LAPTOP, Wishes(), "v", "of 2 that fit, no acceptance is known",
        ),
        ([offer("unknown", acceptance=None), offer("c")], LAPTOP, Wishes(), "c", "the highest acceptance of 2"),
        ([offer("n", "npu"), offer("c")], LAPTOP, Wishes(device="npu"), "n", "the only one of 2 that fits"),
        ([offer("f", precision="fp32"), offer("c")], LAPTOP, Wishes(precision="fp32"), "f", "the only one"),
        ([offer("g", "gpu"), offer("c")], LAPTOP, Wishes(name="g"), "g", "the only one of 2 that fits"),
        ([offer("x", "tpu", "jax"), offer("c")], LAPTOP, Wishes(), "c", "the only one of 2 that fits"),
    ],
)  # fmt: skip
def test_the_best_draft_for_the_machine(
    drafts: list[OfferedDraft],
    find: Callable[[ModelRuntime], FoundRuntime],
    wishes: Wishes,
    name: str,
    why: str,
) -> None:
    """What runs here, then acceptance where it differs, then the device, then the size; whatever the order."""
    for order in (drafts, drafts[::-1]):
        chosen = choose(judge(order, wishes, find), "http://cloud")
        assert chosen.draft.name == name and why in chosen.why
    is_absent = name == "g" and find is LAPTOP
    assert chosen.note == ("g does not run on this machine: OpenVINO sees no GPU here" if is_absent else None)


def test_what_does_not_fit_is_named_with_its_reason() -> None:
    """All in one message, with one piece of advice."""
    drafts = [offer("g", "gpu"), offer("o", runtime="onnxruntime"), offer("c"), offer("x", "tpu")]
    with pytest.raises(BundleError) as raised:
        choose(judge(drafts, Wishes(precision="int4"), LAPTOP), "http://cloud")
    assert "none of the 4 drafts at http://cloud fits" in str(raised.value)
    assert "c: its precision is int8, --precision asks for int4" in str(raised.value)
    reasons = {each.draft.name: each.why_not for each in judge(drafts, Wishes(), LAPTOP)}
    assert reasons == {
        "g": "OpenVINO sees no GPU here",
        "o": 'ONNX Runtime is not installed; run: pip install "outrider[edge-onnxruntime]"',
        "c": None,
        "x": "this version knows no drafts for openvino on tpu",
    }
    with pytest.raises(BundleError, match=r"has no drafts for its target; start it with --drafts DIR"):
        choose([], "http://cloud")


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """An empty cache of this test's own."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return Shelf()


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


async def no_pause(_: float) -> None:
    """For attempts that need not wait."""


def pull(
    url: str,
    to: Path | None = None,
    *,
    name: str = "cpu",
    on_change: Callable[[int], None] = lambda done: None,
    notes: list[str] | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> tuple[PullResult, int]:
    """Pulls the draft `name`; also how many bytes came down."""

    async def run() -> tuple[PullResult, int]:
        async with DraftClient(url, transport=transport) as client:
            offered = await list_offered(client, (notes if notes is not None else []).append)
            draft = next(each for each in offered.drafts if each.name == name)
            progress = Progress(draft.size_bytes, on_change, (notes if notes is not None else []).append)
            result = await pull_draft(client, offered, OfferChoice(draft, ""), progress, to)
            return result, client.wire.body_down

    return asyncio.run(run())


def files_of(root: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_pulled_bundle_is_the_server_s(server: FakeServer, place: Path, shelf: Shelf) -> None:
    """Byte for byte, with nothing left beside it; a second pull fetches the list only."""
    seen: list[int] = []
    result, _ = pull(server.url, on_change=seen.append)
    assert result.is_new and files_of(result.path) == files_of(place / "cpu")
    assert seen == sorted(seen) and seen[-1] == sum(map(len, files_of(place / "cpu").values()))
    assert result.path == shelf.place(hash_file(place / "cpu" / "manifest.json"))
    assert [path.name for path in shelf.root.iterdir() if "partial" in path.name] == []
    (pulled,) = shelf.drafts()
    noted = pulled.pulled_for(server.core.model.target)
    assert noted is not None and (noted.model, noted.server, noted.name) == ("fake", server.url, "cpu")
    again, num_bytes = pull(server.url)
    assert again == replace(result, is_new=False) and num_bytes < 3000


def test_a_pull_to_a_directory(server: FakeServer, place: Path, shelf: Shelf, tmp_path: Path) -> None:
    """Whole or not there; what is there is not replaced."""
    to = tmp_path / "made" / "here"
    assert pull(server.url, to)[0] == PullResult(to, is_new=True)
    assert files_of(to) == files_of(place / "cpu") and list(to.parent.iterdir()) == [to]
    assert pull(server.url, to)[0] == PullResult(to, is_new=False)
    assert list(shelf.drafts()) == []
    (tmp_path / "empty").mkdir()
    assert pull(server.url, tmp_path / "empty")[0].is_new
    other = make_draft(tmp_path / "other", content=b"other").path
    with pytest.raises(BundleError, match=r"other is another bundle\. It is not replaced: choose another place"):
        pull(server.url, other)
    (to / "openvino_model.bin").write_bytes(b"damaged")
    with pytest.raises(BundleError, match=r"openvino_model\.bin is truncated.*It is not replaced"):
        pull(server.url, to)


def test_a_connection_that_is_cut_is_resumed(place: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a server that closes every download after a piece: the parts make the file, none is sent twice."""
    monkeypatch.setattr(fetch, "FIRST_PAUSE_S", 0.0)
    limits = DownloadLimits(grace_s=-1.0, min_rate=1e15)
    notes: list[str] = []
    with serve_fake(ServerSettings(download_limits=limits), drafts=place) as cutting:
        result, num_bytes = pull(cutting.url, notes=notes)
    assert files_of(result.path) == files_of(place / "cpu")
    assert num_bytes < sum(map(len, files_of(place / "cpu").values())) + 3000
    assert len(notes) >= 4 and all("going on at" in note for note in notes)


class Killed(BaseException):
    """Ends a pull as a signal does."""


def test_a_killed_pull_goes_on_where_it_stopped(server: FakeServer, place: Path, shelf: Shelf) -> None:
    """The part is kept apart from the bundle, which is not there before it is whole."""

    def kill(done: int) -> None:
        if done > 600_000:
            raise Killed

    with pytest.raises(Killed):
        pull(server.url, on_change=kill)
    assert list(shelf.drafts()) == []
    (partial,) = (path for path in shelf.root.iterdir() if path.is_dir())
    kept = (partial / "openvino_model.bin").stat().st_size
    assert partial.name.startswith(".") and 500_000 < kept < len(CONTENT)
    result, num_bytes = pull(server.url)
    assert result.is_new and files_of(result.path) == files_of(place / "cpu") and not partial.exists()
    assert num_bytes < len(CONTENT) - kept + 20_000  # the rest, the small files after it, and the list


def test_ctrl_c_says_that_nothing_is_lost(
    server: FakeServer, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 130, and where the same command goes on."""

    async def interrupted(*_: object) -> PullResult:
        signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()
        raise AssertionError("it was not interrupted")

    monkeypatch.setattr("outrider.edge.cli.pull.pull_draft", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
    try:
        assert run_main(monkeypatch, "pull", "--server", server.url) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.endswith("What has arrived is kept: the same command goes on there.\n")


def test_a_server_without_ranges_begins_again(place: Path, shelf: Shelf) -> None:
    """What is here of a file is dropped: the answer begins at its first byte."""
    with serve_fake(drafts=place) as running:
        with pytest.raises(Killed):
            pull(running.url, on_change=lambda done: (_ for _ in ()).throw(Killed) if done > 600_000 else None)
        inner = httpx.AsyncHTTPTransport()

        class NoRanges(httpx.AsyncBaseTransport):
            async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
                request.headers.pop("range", None)
                assert request.headers["user-agent"].startswith("outrider/")  # some gateways refuse requests without
                return await inner.handle_async_request(request)

            async def aclose(self) -> None:
                await inner.aclose()

        result, num_bytes = pull(running.url, transport=NoRanges())
    assert files_of(result.path) == files_of(place / "cpu") and num_bytes > len(CONTENT)


def test_a_damaged_file_is_named_and_the_others_are_kept(tmp_path: Path, shelf: Shelf) -> None:
    """The server's disk has changed since it hashed the files. Once it is mended, only that file is fetched."""
    bundle = make_draft(tmp_path / "drafts" / "cpu", content=CONTENT)
    weights = bundle.path / "openvino_model.bin"
    with serve_fake(drafts=tmp_path / "drafts") as running:
        weights.write_bytes(CONTENT[:-1] + b"?")
        with pytest.raises(BundleError, match=r"^openvino_model\.bin of cpu arrived damaged: its SHA-256 is .*again$"):
            pull(running.url)
        assert list(shelf.drafts()) == []
        (partial,) = (path for path in shelf.root.iterdir() if path.is_dir())
        assert set(files_of(partial)) == {"manifest.json"}
        weights.write_bytes(CONTENT)
        assert files_of(pull(running.url)[0].path) == files_of(bundle.path)


def test_a_damaged_bundle_in_the_cache_is_mended(server: FakeServer, place: Path, shelf: Shelf) -> None:
    """Only what is damaged is fetched, and what does not belong there goes."""
    first, _ = pull(server.url)
    (first.path / "tokenizer.json").write_bytes(b"x" * (first.path / "tokenizer.json").stat().st_size)
    (first.path / "stranger.json").write_text("{}")
    (first.path / "openvino_model.xml").write_text("<n")
    notes: list[str] = []
    again, num_bytes = pull(server.url, notes=notes)
    assert again == first and files_of(again.path) == files_of(place / "cpu")
    assert num_bytes < len(CONTENT) / 4 and "Fetching what is damaged again." in notes[0]


def test_a_damaged_part_is_fetched_again(server: FakeServer, place: Path, shelf: Shelf) -> None:
    """What an interrupted pull left may be damaged too: the whole file then, once."""
    partial = shelf.root / f".{shelf.place(hash_file(place / 'cpu' / 'manifest.json')).name}.partial"
    partial.mkdir(parents=True)
    (partial / "openvino_model.bin").write_bytes(b"damaged")
    (partial / "tokenizer.json").write_bytes(b"x" * (2 << 20))
    notes: list[str] = []
    result, _ = pull(server.url, notes=notes)
    assert files_of(result.path) == files_of(place / "cpu")
    assert notes == ["openvino_model.bin is damaged: what was here of it did not belong to it. Fetching it again."]


def test_two_pulls_at_once_fetch_once(server: FakeServer, place: Path, shelf: Shelf) -> None:
    """The second waits for the first, says so, and finds the bundle."""

    async def run() -> tuple[list[PullResult], list[str]]:
        notes: list[str] = []
        async with DraftClient(server.url) as client:
            offered = await list_offered(client, notes.append)
            (draft,) = offered.drafts
            both = (
                pull_draft(client, offered, OfferChoice(draft, ""), Progress(draft.size_bytes, note=notes.append))
                for _ in range(2)
            )
            return await asyncio.gather(*both), notes

    results, notes = asyncio.run(run())
    assert sorted(each.is_new for each in results) == [False, True] and results[0].path == results[1].path
    assert notes == ["Another process pulls this draft; waiting for it."]
    assert files_of(results[0].path) == files_of(place / "cpu")


def test_a_disk_without_room(server: FakeServer, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first byte where it shows; else at the byte that does not fit, and what is there is kept."""
    room = shutil.disk_usage("/")._replace(free=1000)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: room)
        with pytest.raises(BundleError, match=r"cpu needs 1\.5 MB more at .* 0\.0 MB are free; free some space"):
            pull(server.url)

    def fill(done: int) -> None:
        if done > 600_000:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(BundleError, match=r"the disk of .*drafts is full; free some space and run `outrider pull`"):
        pull(server.url, on_change=fill)
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

    import hashlib

    for file in listed["drafts"][0]["files"]:
        if file["path"] in files and file["sha256"] == SHA:
            file["sha256"] = hashlib.sha256(files[file["path"]]).hexdigest()
            file["size"] = len(files[file["path"]])
    draft = listed["drafts"][0]
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
    assert list(shelf.drafts()) == []
    assert list(tmp_path.rglob("*evil*")) == []


def test_a_range_that_was_not_asked_for_is_refused(shelf: Shelf) -> None:
    """It would be written at the wrong place."""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(206, headers={"content-range": "bytes 5-9/10"}, content=b"12345")

    async def run() -> None:
        file = OfferedFile(path="a", size=10, sha256=SHA)
        async with (
            DraftClient("http://cloud.example", transport=httpx.MockTransport(answer)) as client,
            client.download("cpu", file, 3),
        ):
            pytest.fail("the range was taken")

    with pytest.raises(ProtocolBroken, match=r"Content-Range 'bytes 5-9/10'; expected 'bytes 3-9/10'"):
        asyncio.run(run())


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

    def handle(request: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(error, match=message):
        pull("http://cloud.example", transport=httpx.MockTransport(handle))


def test_a_download_that_brings_nothing_is_given_up(place: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few attempts, with how far it came; a file that is gone at once."""
    monkeypatch.setattr(fetch, "FIRST_PAUSE_S", 0.0)
    asked: list[str] = []

    def served(status: int) -> httpx.MockTransport:
        inner = lying(lambda listed, files: None, place)

        def answer(request: httpx.Request) -> httpx.Response:
            if not request.url.path.endswith(".bin"):
                return inner.handler(request)  # type: ignore[return-value]
            asked.append(request.url.path)
            return httpx.Response(status, json={"error": {"code": "some_code", "message": "some words"}})

        return httpx.MockTransport(answer)

    with pytest.raises(
        CloudError, match=r"openvino_model\.bin broke off after 0\.0 of 1\.5 MB: .*some words.*to go on"
    ):
        pull("http://cloud.example", transport=served(503))
    assert len(asked) == fetch.MAX_FAILURES
    with pytest.raises(CloudError, match=r"some words\. Run `outrider pull` again: the server may have another draft"):
        pull("http://cloud.example", transport=served(410))
    assert len(asked) == fetch.MAX_FAILURES + 1


def facts(target: str = "a", tokenizer: str | None = None) -> ModelFacts:
    """What a server says about its target."""
    return ModelFacts(
        name="fake",
        tokenizer=tokenizer or fake_tokenizer().fingerprint,
        vocab_size=300,
        max_positions=100,
        eos_token_ids=[0],
        has_chat_template=True,
        target=target,
    )


def test_the_last_draft_pulled_for_a_target_is_found(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before those of other targets with its tokenizer; only what can run as asked; never another tokenizer's."""

    def put(content: bytes, targets: dict[str, float], **changes: Any) -> Path:
        made = make_draft(shelf.root / "new", content=content, **changes).path
        sha256 = hash_file(made / "manifest.json")
        made.rename(shelf.place(sha256))
        for target, at_s in targets.items():
            shelf.note(sha256, target, PulledFor(model="fake", server="http://c", name="d", at_s=at_s))
        return shelf.place(sha256)

    def found(served: ModelFacts, choice: DraftChoice = AS_BUNDLED) -> Path | None:
        pulled = find_pulled(served.tokenizer, served.target, choice, shelf)
        return None if pulled is None else pulled.bundle.path

    assert found(facts()) is None
    for_a = put(b"1", {"a": 1.0})
    assert found(facts("a")) == found(facts("other")) == for_a
    newer_for_b = put(b"2", {"b": 2.0})
    assert found(facts("a")) == for_a and found(facts("b")) == found(facts("other")) == newer_for_b
    twin_for_b = put(b"4", {"b": 1.5})
    all_for_b = find_all_pulled(facts().tokenizer, "b", AS_BUNDLED, shelf)
    assert [each.bundle.path for each in all_for_b] == [newer_for_b, twin_for_b]  # these compete; the latest first
    assert len(find_all_pulled(facts().tokenizer, "other", AS_BUNDLED, shelf)) == 1
    shutil.rmtree(twin_for_b)
    for_npu = put(b"3", {"a": 3.0}, device="npu", static_shapes=StaticShapes())
    assert for_npu != found(facts("a")) == for_a
    assert found(facts("a"), DraftChoice(emulate_npu=True)) == for_npu
    assert found(facts("a"), DraftChoice("onnxruntime")) is None
    assert found(facts("a"), DraftChoice("ngram")) == for_npu
    assert found(facts("a", "1" * 64)) == for_a  # mapped: it was pulled for this target
    assert found(facts("c", "1" * 64)) is None
    (for_a / "manifest.json").write_text("damaged")
    assert found(facts("a")) == newer_for_b
    for path in shelf.root.glob("*.json"):
        path.write_text("{")
    assert found(facts("b")) == newer_for_b  # without its record


def test_nobody_is_asked_where_nothing_was_pulled(shelf: Shelf) -> None:
    """A server that does not say what it serves has no draft here; one that refuses is an error."""
    about = Notes(Console(file=io.StringIO()))
    assert _find_pulled(AS_BUNDLED, clouds_of(["http://127.0.0.1:9"], Keys()), about, needs_server=True) == []

    async def run(answer: httpx.Response) -> ModelFacts | None:
        def handle(request: httpx.Request) -> httpx.Response:
            asked.append(request.url.path)
            return answer

        async with VerifierClient("http://cloud.example", transport=httpx.MockTransport(handle)) as client:
            return await facts_of([client])

    asked: list[str] = []
    assert asyncio.run(run(httpx.Response(404))) is asyncio.run(run(httpx.Response(403))) is None
    assert asyncio.run(run(httpx.Response(200, content=facts().model_dump_json().encode()))) == facts()
    assert asked == ["/v1/model"] * 3
    with pytest.raises(RequestError, match="requires an API key"):
        asyncio.run(run(httpx.Response(401)))


def test_pull_then_run(
    server: FakeServer, place: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two commands: the pulled draft drafts, and the text is the one of cloud-only."""
    opened: list[Path] = []

    def open_fake(kind: str, model_file: Path, options: object) -> FakeSequenceRuntime:
        opened.append(model_file)
        return FakeSequenceRuntime(vocab_size=fake_tokenizer().size)

    monkeypatch.setattr("outrider.edge.modes.assemble.open_sequence_runtime", open_fake)
    monkeypatch.setattr("outrider.edge.cli.draft_source.default_draft", lambda _: pytest.fail("took the reference"))
    assert run_main(monkeypatch, "pull", "--server", server.url) == 0
    shown = capsys.readouterr()
    bundle = Path(shown.out.strip())
    assert bundle.parent == shelf.root and files_of(bundle) == files_of(place / "cpu")
    assert "cpu: fp32, OpenVINO on the CPU" in shown.err and "Chosen: the only draft here." in shown.err
    assert "Pulled. `outrider run` and `outrider serve` draft with it for this target." in shown.err
    asked = ["run", "def verify(", "--cloud", server.url, "--max-tokens", "24", "--seed", "3", "--json"]
    assert run_main(monkeypatch, *asked, "--depth", "3", "--mode", "stop-and-wait") == 0
    shown = capsys.readouterr()
    drafted = json.loads(shown.out)
    assert drafted["draft"]["runtime"] == "openvino" and drafted["acceptance_rate"] == 1.0
    assert opened == [bundle / "openvino_model.xml"]
    assert f"draft: cpu, pulled from {server.url}" in shown.err
    assert run_main(monkeypatch, *asked, "--mode", "cloud-only") == 0
    alone = json.loads(capsys.readouterr().out)
    assert drafted["text"] == alone["text"] and len(alone["text"]) > 20
    (bundle / "openvino_model.bin").write_bytes(b"damaged")
    assert run_main(monkeypatch, *asked) == 2
    message = capsys.readouterr().err
    assert "the pulled draft is damaged: " in message and "; run `outrider pull` again\n" in message
    assert run_main(monkeypatch, "pull", "--server", server.url) == 0
    assert Bundle.open(bundle)


def test_without_a_pulled_draft_a_run_takes_the_reference(
    server: FakeServer, place: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And `--draft reference` takes it in any case; a draft that is named is taken as it is."""
    reference, named = make_draft(tmp_path / "the-reference").path, make_draft(tmp_path / "named").path
    monkeypatch.setattr("outrider.edge.cli.draft_source.default_draft", lambda choice: reference)
    about = Console(file=io.StringIO())

    def found(draft: str, url: str = server.url, choice: DraftChoice = AS_BUNDLED) -> Path:
        (bundle,) = find_drafts([draft], choice, clouds_of([url], Keys()), Notes(about))
        return bundle.path

    assert RunOptions("x").draft == [AUTO]
    assert found(AUTO) == found("reference") == reference and found(str(named)) == named
    pulled = pull(server.url)[0].path
    assert found(AUTO) == pulled and found("reference") == reference
    with serve_fake(has_chat_template=False) as same_tokenizer:
        assert found(AUTO, same_tokenizer.url) == pulled
        assert found(AUTO, same_tokenizer.url, DraftChoice(device="gpu")) == reference  # this one is for the CPU


def test_the_command_s_other_outputs(
    server: FakeServer,
    shelf: Shelf,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """--list takes nothing, --to says how to draft with it, and mistakes are one line."""
    assert run_main(monkeypatch, "pull", "--server", server.url, "--list") == 0
    shown = capsys.readouterr()
    assert f"fake at {server.url} has 1 draft." in shown.out and "75 %" in shown.out and "yes" in shown.out
    assert list(shelf.drafts()) == []
    to = tmp_path / "my draft"
    assert run_main(monkeypatch, "pull", "--server", server.url, "--to", str(to)) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{to}\n" and f"Draft with it: outrider run --draft '{to}'" in shown.err
    assert run_main(monkeypatch, "pull", "--server", server.url, "--device", "npu") == 2
    shown = capsys.readouterr()
    assert (
        shown.out == ""
        and f"error: the only draft at {server.url} does not fit (" in shown.err
        and "--device asks for npu" in shown.err
    )
    assert run_main(monkeypatch, "pull", "--server", server.url, "--list", "--to", str(to)) == 2
    assert "leave one of them out" in capsys.readouterr().err
    assert run_main(monkeypatch, "pull", "--server", "http://") == 2
    assert "expected http://host:port" in capsys.readouterr().err


def test_a_server_s_words_cannot_command_the_terminal() -> None:
    """Names in the table are shown, not obeyed."""
    out = io.StringIO()
    listed = DraftList(model="m\x1b]0;x", tokenizer="t", drafts=[offer("a", precision="\x1b[31m[bold]")])
    show_offered(Console(file=out, width=200), listed, judge(listed.drafts, Wishes(), LAPTOP), "http://c")
    assert "\x1b" not in out.getvalue() and r"\x1b[31m[bold]" in out.getvalue()
