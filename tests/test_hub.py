"""Hub ids: the cache, offline mode and tokens respected, against a cache laid out by hand and a hub on loopback."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from tools.tiny_sources import make_tiny_source

from outrider.export.quiet import quiet_upstream
from outrider.export.source.hub import resolve_model
from outrider.export.source.model_source import read_source
from outrider.models.errors import ExportError

SHA = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_forTestsOnly"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_source("llama", tmp_path_factory.mktemp("hub") / "tiny")


@pytest.fixture
def cache(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with org/tiny at SHA, which is its branch main."""
    root = tmp_path / "cache"
    repo = root / "models--org--tiny"
    snapshot, blobs = repo / "snapshots" / SHA, repo / "blobs"
    for directory in (repo / "refs", snapshot, blobs):
        directory.mkdir(parents=True)
    (repo / "refs" / "main").write_text(SHA)
    for number, path in enumerate(source.iterdir()):
        shutil.copyfile(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", str(number)))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    return root


@pytest.mark.parametrize("model", ["org/tiny", "org/tiny@main", f"org/tiny@{SHA}"])
def test_what_the_cache_has_needs_no_network(model: str, cache: Path) -> None:
    """By branch, tag or commit; name and commit go into the manifest."""
    found = read_source(model)
    assert found.path == cache / "models--org--tiny" / "snapshots" / SHA
    assert (found.name, found.revision, found.describe().name) == ("org/tiny", SHA, "org/tiny")


@pytest.mark.parametrize("name", ["chat_template.jinja", "vocab.json"])  # one of a bundle, one of a distilled draft
def test_links_out_of_a_model_are_not_followed(name: str, cache: Path, source: Path, tmp_path: Path) -> None:
    """A model's directory may come from anybody, and its texts go into bundles that others get."""
    (tmp_path / "secret").write_text("PRIVATE")
    copied = tmp_path / "copied"
    shutil.copytree(source, copied)
    for path in (copied, cache / "models--org--tiny" / "snapshots" / SHA):
        (path / name).symlink_to(tmp_path / "secret")
        with pytest.raises(ExportError, match=f"{name} is a link that leads out of the model's directory; copy"):
            read_source(path)


def test_directories_come_first(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hub ids and paths are distinguished: an existing directory is a path, and so is a name in an existing one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "here").mkdir(parents=True)
    assert resolve_model("org/here") == tmp_path / "org" / "here"
    absent = ("org/gone", "gone", "./gone/too", str(tmp_path / "gone"), "a/b/c")
    others = {"else/where..not": "neither a directory nor a hub id", "": "the model's name is empty"}
    for wrong, message in (dict.fromkeys(absent, "is not a directory") | others).items():
        with pytest.raises(ExportError, match=message):
            resolve_model(wrong)


def test_conversions_stay_off_the_network_and_downloads_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream code runs offline, and its subprocesses do; afterwards the user's own setting holds again."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with quiet_upstream("a"):
        assert huggingface_hub.is_offline_mode() and os.environ["HF_HUB_OFFLINE"] == "1"
        with quiet_upstream("b"):
            pass
        assert huggingface_hub.is_offline_mode()
        with pytest.raises(ConnectionError, match="offline mode is enabled"):
            huggingface_hub.model_info("org/tiny")
    assert not huggingface_hub.is_offline_mode() and "HF_HUB_OFFLINE" not in os.environ


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's API as a download takes. Knows org/tiny, org/gated (with TOKEN only), org/pickled and
    org/broken.
    """

    directory: Path
    asked: list[tuple[str, str | None]]

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        token, parts = self.headers.get("Authorization"), self.path.strip("/").split("/")
        if parts[0] == "api" and parts[1] != "models":  # lists that the library keeps for itself
            self._send(404, b"", {})
            return
        self.asked.append((self.path, token))
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if name == "org/broken":
            self._send(503, b"", {})
        elif name not in ("org/tiny", "org/gated", "org/pickled"):
            self._send(401 if token is None else 404, b"", {"X-Error-Code": "RepoNotFound"})
        elif parts[0] == "api" and parts[-1] not in ("main", SHA):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif parts[0] == "api":
            files = sorted(path.name for path in self.directory.iterdir())
            if name == "org/pickled":
                files.remove("model.safetensors")
            listed = [*files, "pytorch_model.bin", "modeling_own.py", "onnx/config.json", "consolidated.safetensors"]
            answer = {"id": name, "sha": SHA, "siblings": [{"rfilename": file} for file in listed]}
            self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})
        elif name == "org/gated" and token != f"Bearer {TOKEN}":
            self._send(401 if token is None else 403, b"", {"X-Error-Code": "GatedRepo"})
        else:
            content = (self.directory / parts[-1]).read_bytes()
            headers = {"X-Repo-Commit": SHA, "ETag": f'"{hash(content)}"', "Accept-Ranges": "bytes"}
            self._send(200, content, headers)

    do_HEAD = do_GET

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(source: Path) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """Its endpoint, and the paths and tokens that it was asked for."""
    asked: list[tuple[str, str | None]] = []
    handler = type("BoundHub", (Hub,), {"directory": source, "asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()
        thread.join()


RESOLVE = """
import json, sys
from outrider.export.source.hub import resolve_model
from outrider.models.errors import ExportError

found = {}
for model in sys.argv[1:]:
    try:
        path = resolve_model(model)
        found[model] = [path.parents[1].name, path.name, sorted(each.name for each in path.iterdir())]
    except ExportError as error:
        found[model] = str(error)
print(json.dumps(found))
"""


def resolve_in_process(home: Path, endpoint: str, *models: str, **environment: str) -> dict[str, Any]:
    """What a process of its own finds for models (folder in the cache, commit, files; or the error), with the hub's
    settings as a user would set them.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", RESOLVE, *models]
    done = subprocess.run(command, env=inherited | own | environment, capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_download_takes_safe_files_only_and_is_kept(
    hub: tuple[str, list[tuple[str, str | None]]], source: Path, tmp_path: Path
) -> None:
    """Nothing that executes code is even asked for. Then the cache is enough, offline and where the hub is out of
    reach; what was not fetched before is an error that says which of both it is.
    """
    endpoint, asked = hub
    fetched = ["models--org--tiny", SHA, sorted(path.name for path in source.iterdir())]
    assert resolve_in_process(tmp_path, endpoint, "org/tiny")["org/tiny"] == fetched
    assert {Path(path).name for path, _ in asked} == {*fetched[2], "main"} and len(asked) > len(fetched[2])
    assert {token for _, token in asked} == {None}
    asked.clear()
    nobody = "http://127.0.0.1:9"
    for url, environment, told in (
        (endpoint, {"HF_HUB_OFFLINE": "1"}, "offline mode is on"),
        (nobody, {}, f"the hub at {nobody} cannot be reached"),
    ):
        found = resolve_in_process(tmp_path, url, "org/tiny", "org/other", "org/tiny@v2", **environment)
        assert found["org/tiny"] == fetched
        for model, named in (("org/other", "org/other"), ("org/tiny@v2", "org/tiny at revision v2")):
            assert re.search(rf"{named} is not in the cache \(.*\), and {told}", found[model])
    assert not asked


def test_the_hubs_refusals_are_told_apart(hub: tuple[str, list[tuple[str, str | None]]], tmp_path: Path) -> None:
    """Not there, no such revision, gated, broken, pickled only: each with what to do, without a token and with one."""
    endpoint, asked = hub
    models = ("org/gone", "org/tiny@v9", "org/gated", "org/broken", "org/pickled")
    without = resolve_in_process(tmp_path / "a", endpoint, *models)
    told = {
        "org/gone": ["has no model org/gone", "hf auth login"],
        "org/tiny@v9": ["org/tiny has no revision 'v9' on the hub"],
        "org/gated": ["org/gated is gated", "set HF_TOKEN"],
        "org/broken": ["org/broken", "503"],
        "org/pickled": ["the hub offers no *.safetensors of org/pickled, and pickled weights are not taken"],
    }
    assert [(model, words) for model in models for words in told[model] if words not in without[model]] == []
    asked.clear()
    refused = resolve_in_process(tmp_path / "b", endpoint, *models, HF_TOKEN="hf_another")
    assert all("A token was sent" in refused[model] for model in ("org/gone", "org/gated"))
    assert {token for _, token in asked} == {"Bearer hf_another"}


def test_a_saved_login_is_used(hub: tuple[str, list[tuple[str, str | None]]], tmp_path: Path) -> None:
    """The file that `hf auth login` writes."""
    tmp_path.joinpath("token").write_text(TOKEN)
    assert resolve_in_process(tmp_path, hub[0], "org/gated")["org/gated"][:2] == ["models--org--gated", SHA]
    assert {token for _, token in hub[1]} == {f"Bearer {TOKEN}"}
