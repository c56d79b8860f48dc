"""Tests what a server shares of its target's tokenizer."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from tests.serving import code_of, fake_tokenizer, save_fake_tokenizer, serve_fake

from outrider.cloud.server.offered import find_tokenizer_files
from outrider.models.bundle.bundle import hash_file
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.wire.offered import TokenizerFiles


def test_the_tokenizer_is_listed_and_can_be_loaded_again(tmp_path: Path) -> None:
    """Its files have the bytes and hashes of the list; a range and HEAD are answered as of a draft's."""
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
        content = (own.directory / "tokenizer.json").read_bytes()
        part = client.get("/v1/tokenizer/tokenizer.json", headers={"Range": "bytes=10-19"})
        assert (part.status_code, part.content) == (206, content[10:20])
        head = client.head("/v1/tokenizer/tokenizer.json")
        assert (head.status_code, head.headers["content-length"], head.content) == (200, str(len(content)), b"")
        assert code_of(client.get("/v1/tokenizer/config.json")) == (404, "unknown_file")
    loaded = Tokenizer.from_dir(tmp_path)
    assert (loaded.fingerprint, loaded.eos_token_ids) == (own.fingerprint, own.eos_token_ids)
    assert loaded.template_source() == own.template_source()


def test_a_tokenizer_that_is_not_shared_is_refused_by_name() -> None:
    """The list and every file; what a device can do instead is said."""
    with serve_fake(shares_tokenizer=False) as server:
        for path in ("/v1/tokenizer", "/v1/tokenizer/tokenizer.json", "/v1/tokenizer/none"):
            answer = httpx.get(server.url + path)
            assert code_of(answer) == (404, "tokenizer_not_shared")
            assert "--no-share-tokenizer" in answer.text and "--tokenizer DIR" in answer.text


def test_a_cascade_shares_the_tokenizer_of_its_own_bundle() -> None:
    """It has the target's fingerprint, and the list has the target's name and identity."""
    with serve_fake(name="large") as target, serve_fake(upstream=target.url) as mid:
        of_target, of_mid = (httpx.get(each.url + "/v1/tokenizer").json() for each in (target, mid))
        assert of_mid == of_target and of_mid["model"] == "large"


def test_links_in_a_hub_cache_are_followed_and_others_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model's directory may come from anybody, and a link in it may name any file of the machine."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_fake_tokenizer(snapshot)
    (snapshot / "weights.safetensors").write_bytes(b"weights")
    (snapshot / "tokenizer.json").rename(blobs / "one")
    (snapshot / "tokenizer.json").symlink_to(Path("..", "..", "blobs", "one"))
    found = find_tokenizer_files(snapshot)
    assert found is not None and set(found) == {"tokenizer.json", "tokenizer_config.json"}
    assert found["tokenizer.json"].place == blobs / "one"
    assert found["tokenizer.json"].entry.sha256 == hash_file(blobs / "one")
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


def test_a_tokenizer_file_that_became_a_link_or_another_size_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happens in the directory after the start."""
    save_fake_tokenizer(tmp_path)
    (tmp_path / "outside").write_bytes((tmp_path / "tokenizer.json").read_bytes())
    place = tmp_path / "tokenizer.json"
    monkeypatch.setattr("tests.serving.fake_tokenizer", lambda **_: Tokenizer.from_dir(tmp_path, name="fake"))
    with serve_fake() as server:
        url = server.url + "/v1/tokenizer/tokenizer.json"
        assert httpx.get(url).status_code == 200
        place.unlink()
        place.symlink_to(tmp_path / "outside")
        assert code_of(httpx.get(url)) == (410, "tokenizer_changed")
        place.unlink()
        place.write_bytes(b"{}")
        assert code_of(httpx.get(url)) == (410, "tokenizer_changed")
        assert server.core.downloads.total == 0
