"""Tests what a server offers: which drafts, its target's tokenizer, files by Range, and the bounds on downloads."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from tests.drafts import make_draft
from tests.engine_harness import refused
from tests.raw_client import Raw, unread
from tests.serving import FakeServer, code_of, fake_tokenizer, save_fake_tokenizer, serve_fake

from outrider.cloud.api.state import DownloadLimits, DownloadSlots, DraftFiles, ServerSettings
from outrider.cloud.server.offered import find_offered, find_tokenizer_files
from outrider.models.bundle.bundle import hash_file
from outrider.models.errors import ConfigError
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.wire.offered import DraftList, TokenizerFiles

WEIGHTS = "/v1/drafts/cpu-int8/openvino_model.bin"
TOKENIZER = "/v1/tokenizer/tokenizer.json"
CONTENT = bytes(range(256)) * 8


@pytest.fixture(scope="module")
def offered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeServer, Path]]:
    """A server with one draft, and where it lies. Beside what it lists, here and of its tokenizer, lie other files."""
    place, own = tmp_path_factory.mktemp("offered"), tmp_path_factory.mktemp("target") / "tokenizer"
    make_draft(place / "cpu-int8", rate=0.75, content=CONTENT)
    own.mkdir()
    save_fake_tokenizer(own)
    for each in (place / "cpu-int8", own):
        (each / "unlisted.md").write_text("PRIVATE")
        (each.parent / "secret.txt").write_text("PRIVATE")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.serving.fake_tokenizer", lambda **_: Tokenizer.from_dir(own, name="fake"))
        with serve_fake(drafts=place) as server:
            yield server, place / "cpu-int8"


def offered_in(place: Path, *, shares_tokenizer: bool = True) -> tuple[DraftFiles, ...]:
    """What a server of the fake target offers of a directory."""
    return find_offered(place, fake_tokenizer().fingerprint, "fake", shares_tokenizer=shares_tokenizer)


def test_drafts_for_another_target_are_named_in_the_log_and_not_offered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each with its reason: a tokenizer that is not shared, role, name, link, damage, no bundle."""
    make_draft(tmp_path / "good", rate=0.7)
    make_draft(tmp_path / "stranger", tokenizer_fingerprint="0" * 64)
    make_draft(tmp_path / "target", role="target")
    make_draft(tmp_path / "bad name")
    (make_draft(tmp_path / "damaged").path / "openvino_model.bin").write_bytes(b"WEIGHTS")
    (tmp_path / "linked").symlink_to(tmp_path / "good", target_is_directory=True)
    for name in ("empty", ".hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes.txt").write_text("no bundle")
    with caplog.at_level(logging.INFO):
        found = offered_in(tmp_path, shares_tokenizer=False)
    assert [each.entry.name for each in found] == ["good"] and "1 draft is offered: good" in caplog.text
    reasons = {
        "stranger": f"000000000000, the target's is {fake_tokenizer().fingerprint[:12]} and not shared",
        "target": "it is a target bundle; expected a draft",
        "bad name": "needs a name of up to 100 letters",
        "damaged": "openvino_model.bin is altered",
        "linked": "it is a link",
        "empty": "has no manifest.json",
    }
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == len(reasons)
    for name, reason in reasons.items():
        assert any(line.startswith(f"draft {name} is not offered: ") and reason in line for line in warnings)
    assert [each.entry.name for each in offered_in(tmp_path / "good")] == ["good"]
    with pytest.raises(ConfigError, match="is not a directory; expected one that holds draft bundles"):
        offered_in(tmp_path / "nowhere")


def test_a_draft_with_another_tokenizer_is_offered_with_its_fingerprint(tmp_path: Path) -> None:
    """Where the server shares the target's; a draft that has the target's names none."""
    make_draft(tmp_path / "own")
    make_draft(tmp_path / "stranger", tokenizer_fingerprint="0" * 64)
    for shares, expected in ((True, {"own": None, "stranger": "0" * 64}), (False, {"own": None})):
        with serve_fake(drafts=tmp_path, shares_tokenizer=shares) as server:
            listed = DraftList.model_validate(httpx.get(server.url + "/v1/drafts").json())
            assert {draft.name: draft.tokenizer for draft in listed.drafts} == expected
            assert listed.tokenizer == fake_tokenizer().fingerprint


def test_a_list_that_no_device_would_read_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is loaded."""
    make_draft(tmp_path / "good")
    monkeypatch.setattr("outrider.cloud.server.offered.MAX_LIST_BYTES", 100)
    with pytest.raises(ConfigError, match="at most 100 are allowed: offer fewer drafts"):
        offered_in(tmp_path)


def test_the_list_says_what_a_device_needs_to_choose(offered: tuple[FakeServer, Path]) -> None:
    """Device, runtime, precision, size, the card's acceptance by this target, and each file's digest."""
    server, place = offered
    listed = DraftList.model_validate(httpx.get(server.url + "/v1/drafts").json())
    target = ("fake", fake_tokenizer().fingerprint, server.core.model.target)
    assert (listed.model, listed.tokenizer, listed.target) == target
    (draft,) = listed.drafts
    assert (draft.name, draft.model, draft.device, draft.runtime) == ("cpu-int8", "tiny-draft", "cpu", "openvino")
    assert (draft.precision, draft.acceptance) == ("fp32", 0.75) and draft.files[0].path == "manifest.json"
    sizes = {path.name: path.stat().st_size for path in place.iterdir() if path.name != "unlisted.md"}
    assert {file.path: file.size for file in draft.files} == sizes and draft.size_bytes == sum(sizes.values())
    for file in draft.files:
        answer = httpx.get(f"{server.url}/v1/drafts/cpu-int8/{file.path}")
        assert answer.status_code == 200 and answer.content == (place / file.path).read_bytes()
        assert answer.headers["etag"] == f'"{file.sha256}"' and file.sha256 == hash_file(place / file.path)
        assert answer.headers["content-length"] == str(file.size)


@pytest.mark.parametrize(
    ("asked", "status", "part"),
    [
        ("bytes=0-", 200, slice(None)),
        ("bytes=1000-", 206, slice(1000, None)),
        ("bytes=10-19", 206, slice(10, 20)),
        ("bytes=2000-999999", 206, slice(2000, None)),
        ("bytes=-7", 206, slice(-7, None)),
        ("bytes=-999999", 200, slice(None)),
        ("bytes=0-1,5-6", 200, slice(None)),  # several ranges: the whole, as RFC 9110 allows
        ("bytes=-", 200, slice(None)),
        ("lines=1-2", 200, slice(None)),
        ("bytes=2048-", 416, None),
        ("bytes=-0", 416, None),
        ("bytes=9-3", 416, None),
    ],
)
def test_ranges(offered: tuple[FakeServer, Path], asked: str, status: int, part: slice | None) -> None:
    """One range is honoured, what is none is ignored, one without a byte is refused."""
    answer = httpx.get(offered[0].url + WEIGHTS, headers={"Range": asked})
    if part is None:
        assert code_of(answer) == (status, "range_not_satisfiable")
    else:
        assert (answer.status_code, answer.content) == (status, CONTENT[part])
    first, last, _ = (part or slice(None)).indices(2048)
    expected = {206: f"bytes {first}-{last - 1}/2048", 416: "bytes */2048"}.get(status)
    assert answer.headers.get("content-range") == expected


def test_a_tag_decides_what_is_sent(offered: tuple[FakeServer, Path]) -> None:
    """The rest of a file that is another one now is never sent as the rest; what is unchanged is not sent again."""
    url, tag = offered[0].url + WEIGHTS, f'"{hash_file(offered[1] / "openvino_model.bin")}"'
    for unless, expected in ((tag, CONTENT[2000:]), ('"other"', CONTENT)):
        assert httpx.get(url, headers={"Range": "bytes=2000-", "If-Range": unless}).content == expected
    unchanged = httpx.get(url, headers={"If-None-Match": f'"other", W/{tag}'})
    assert (unchanged.status_code, unchanged.content, unchanged.headers["etag"]) == (304, b"", tag)
    head = httpx.head(url)
    assert (head.status_code, head.headers["content-length"], head.content) == (200, "2048", b"")


@pytest.mark.parametrize(
    "path",
    [
        *(
            f"drafts/{path}"
            for path in (
                *("../secret.txt", "..%2fsecret.txt", "%2e%2e/secret.txt", "....//secret.txt", "..;/secret.txt"),
                *("cpu-int8/../secret.txt", "cpu-int8/..%5csecret.txt", "%252e%252e/secret.txt"),
                *("cpu-int8/..%2f..%2fetc%2fpasswd", "cpu-int8/%2fetc/passwd", "cpu-int8/../../../../../../etc/passwd"),
                *("cpu-int8//openvino_model.bin", "cpu-int8/./openvino_model.bin", "cpu-int8/openvino_model.bin%00"),
                *("cpu-int8/openvino_model.bin/", "CPU-INT8/openvino_model.bin", "./openvino_model.bin"),
                *("cpu-int8/unlisted.md", "cpu-int8/"),
            )
        ),
        *(
            f"tokenizer/{name}"
            for name in (
                *("", "unlisted.md", "manifest.json", "openvino_model.bin", "./tokenizer.json", "tokenizer.json%00"),
                *("%2fetc%2fpasswd", "/etc/passwd", "../../../../../../etc/passwd", "../tokenizer/tokenizer.json"),
                *(f"{up}/secret.txt" for up in ("..", "%2e%2e", "..%2f..", "%252e%252e", "..%5c", "....//", "..;")),
            )
        ),
    ],
)
def test_only_listed_names_lead_to_files(offered: tuple[FakeServer, Path], path: str) -> None:
    """Sent as written: a client library would tidy the path. The refusal is one of the protocol."""
    with Raw(offered[0]) as raw:
        status, _, content = raw.answer(f"GET /v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    assert status == 404 and json.loads(content)["error"]["code"] and b"PRIVATE" not in content


def test_a_file_that_became_a_link_or_another_size_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens in the directories after the start. A server that shuts down sends none."""
    drafts, own, outside = tmp_path / "drafts", tmp_path / "own", tmp_path / "outside"
    weights = make_draft(drafts / "cpu-int8", content=CONTENT).path / "openvino_model.bin"
    own.mkdir()
    save_fake_tokenizer(own)
    monkeypatch.setattr("tests.serving.fake_tokenizer", lambda **_: Tokenizer.from_dir(own, name="fake"))
    with serve_fake(drafts=drafts) as server:
        for path, place, code, told in (
            (WEIGHTS, weights, "draft_changed", "openvino_model.bin of the draft cpu-int8 has changed"),
            (TOKENIZER, own / "tokenizer.json", "tokenizer_changed", "tokenizer.json"),
        ):
            assert httpx.get(server.url + path).status_code == 200
            outside.write_bytes(place.read_bytes())
            place.unlink()
            place.symlink_to(outside)
            for change in (place.unlink, lambda place=place: place.write_bytes(b"short"), lambda: None):
                answer = httpx.get(server.url + path)
                assert code_of(answer) == (410, code) and told in answer.text
                change()
        weights.write_bytes(CONTENT)
        monkeypatch.setattr(server.core, "is_draining", True)
        assert code_of(httpx.get(server.url + WEIGHTS)) == (503, "shutting_down")
        monkeypatch.setattr(server.core, "is_draining", False)
        weights.parent.rename(tmp_path / "moved")
        weights.parent.symlink_to(tmp_path / "moved", target_is_directory=True)
        assert httpx.get(server.url + WEIGHTS).status_code == 410 and server.core.downloads.total == 0


@pytest.mark.parametrize(
    ("limits", "status"),
    [(DownloadLimits(max_each=1, refusal_s=0.0), 429), (DownloadLimits(max_all=1, refusal_s=0.0), 503)],
)
def test_downloads_at_a_time_are_bounded(tmp_path: Path, limits: DownloadLimits, status: int) -> None:
    """Of one owner and in all; a client that leaves makes room, and nothing else waits for it."""
    make_draft(tmp_path / "cpu-int8", content=bytes(16 << 20))
    with serve_fake(ServerSettings(download_limits=limits), drafts=tmp_path) as server:
        with unread(server, f"GET {WEIGHTS} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()):
            server.wait_until(lambda: server.core.downloads.total == 1)
            for path in (WEIGHTS, TOKENIZER):
                refused = httpx.get(server.url + path)
                assert code_of(refused) == (status, "too_many_downloads") and int(refused.headers["retry-after"]) >= 1
            assert httpx.get(server.url + "/v1/drafts").status_code == 200
            assert httpx.head(server.url + WEIGHTS).status_code == 200
        server.wait_until(lambda: server.core.downloads.total == 0)
        assert len(httpx.get(server.url + WEIGHTS).content) == 16 << 20


def test_a_download_that_is_too_slow_is_cut(tmp_path: Path) -> None:
    """Its place is free again; with such limits every download is too slow after its first piece."""
    make_draft(tmp_path / "cpu-int8", content=bytes(1 << 20))
    limits = DownloadLimits(grace_s=-1.0, min_rate=1e15)
    with serve_fake(ServerSettings(download_limits=limits), drafts=tmp_path) as server:
        with pytest.raises(httpx.RemoteProtocolError, match="peer closed connection"):
            httpx.get(server.url + WEIGHTS)
        server.wait_until(lambda: server.core.downloads.total == 0)


async def test_a_refusal_comes_late_and_says_why_it_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that asks again and again would keep the server busy. Its other download may end before the answer."""
    slept: list[float] = []

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)
        slots.add(b"", -1)

    monkeypatch.setattr("outrider.cloud.api.state.asyncio", SimpleNamespace(sleep=sleep))
    for limits, status, why in (
        (DownloadLimits(max_each=1), 429, "this client has 1 downloads"),
        (DownloadLimits(max_all=1), 503, "1 downloads"),
    ):
        slots = DownloadSlots(limits)
        with refused("too_many_downloads", status, why):
            async with slots.place(b""), slots.place(b""):
                pass
    assert slept == [1.0, 1.0]


# -- the tokenizer -----------------------------------------------------------------------------------------------------


def test_the_tokenizer_is_listed_and_can_be_loaded_again(tmp_path: Path) -> None:
    """Its files have the bytes and hashes of the list. Drafts are listed only where there is a directory of them."""
    own = fake_tokenizer()
    with serve_fake() as server, httpx.Client(base_url=server.url) as client:
        listed = TokenizerFiles.model_validate(client.get("/v1/tokenizer").json())
        assert (listed.model, listed.target, listed.tokenizer) == ("fake", server.core.model.target, own.fingerprint)
        assert {file.path for file in listed.files} == {path.name for path in own.directory.iterdir()}
        for file in listed.files:
            answer = client.get(f"/v1/tokenizer/{file.path}")
            assert answer.status_code == 200 and answer.headers["etag"] == f'"{file.sha256}"'
            (tmp_path / file.path).write_bytes(answer.content)
            assert (len(answer.content), hash_file(tmp_path / file.path)) == (file.size, file.sha256)
        assert client.get("/v1/drafts").json()["drafts"] == []
        assert code_of(client.get(WEIGHTS)) == (404, "unknown_draft")
    loaded = Tokenizer.from_dir(tmp_path)
    assert (loaded.fingerprint, loaded.eos_token_ids) == (own.fingerprint, own.eos_token_ids)
    assert loaded.template_source() == own.template_source()


def test_a_tokenizer_that_is_not_shared_is_refused_by_name() -> None:
    """The list and every file; what a device can do instead is said."""
    with serve_fake(shares_tokenizer=False) as server:
        for path in ("/v1/tokenizer", TOKENIZER, "/v1/tokenizer/none"):
            answer = httpx.get(server.url + path)
            assert code_of(answer) == (404, "tokenizer_not_shared")
            assert "--no-share-tokenizer" in answer.text and "--tokenizer DIR" in answer.text


def test_links_in_a_hub_cache_are_followed_and_others_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model's directory may come from anybody, and a link in it may name any file of the machine."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1", tmp_path / "models--a--b" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    save_fake_tokenizer(snapshot)
    (snapshot / "weights.safetensors").write_bytes(b"weights")
    (snapshot / "tokenizer.json").rename(blobs / "one")
    (snapshot / "tokenizer.json").symlink_to(Path("..", "..", "blobs", "one"))
    found = find_tokenizer_files(snapshot) or {}
    assert set(found) == {"tokenizer.json", "tokenizer_config.json"}
    file = found["tokenizer.json"]
    assert (file.place, file.entry.sha256) == (blobs / "one", hash_file(blobs / "one"))
    (tmp_path / "secret").write_text("PRIVATE")
    (snapshot / "chat_template.jinja").symlink_to(tmp_path / "secret")
    assert find_tokenizer_files(snapshot) is None
    assert "is not shared: chat_template.jinja is a link that leads out of the model's directory" in caplog.text


def test_a_tokenizer_that_is_too_large_is_not_shared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server starts without it, and says why."""
    monkeypatch.setattr("outrider.cloud.server.offered.MAX_SHARED_BYTES", 100)
    assert find_tokenizer_files(fake_tokenizer().directory) is None
    assert "at most 100 are shared" in caplog.text
