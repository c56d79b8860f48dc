"""Tests where `outrider serve` takes its clouds, keys and draft from: the file, the pulled draft, the command line."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from tests.agents import nowhere
from tests.commands import KEY, OTHER_KEY, Outrider, key_file
from tests.drafts import make_draft
from tests.serving import serve_fake
from tests.waiting import run

from outrider.cloud.api.state import ServerSettings
from outrider.edge.devices.placement import AS_BUNDLED, DraftChoice
from outrider.edge.serve.state import LocalCore
from outrider.edge.store.shelf import PulledFor, Shelf, find_pulled_from
from outrider.models.errors import RequestError
from outrider.models.http.keys import ApiKey
from outrider.models.http.security import KeyRing


@dataclass
class Started:
    """What the command would have served. look: called before the end, with its connections open."""

    opened: list[Path]
    cores: list[LocalCore] = field(default_factory=list)
    look: Callable[[LocalCore], Awaitable[None]] = field(default_factory=AsyncMock)


@pytest.fixture
def started(config: Path, shelf: Shelf, opened_models: list[Path], monkeypatch: pytest.MonkeyPatch) -> Started:
    """Lets the command do everything but serve, with a fake model and a cache of this test's own."""
    found = Started(opened_models)

    async def serve(core: LocalCore) -> None:
        found.cores.append(core)
        await found.look(core)
        await core.aclose()

    server = lambda core, **_: Mock(run=lambda sockets: run(serve(core)))  # noqa: E731
    monkeypatch.setattr("outrider.edge.cli.serve.LocalServer", server)
    monkeypatch.setattr("outrider.edge.cli.serve.configure_logging", lambda format_: None)
    monkeypatch.setattr("outrider.edge.cli.draft_source.default_draft", lambda _: pytest.fail("took the reference"))
    return found


def shelved(shelf: Shelf, digit: str, server: str) -> None:
    """A draft that was pulled from a server; one with a higher digit later."""
    make_draft(shelf.root / "new", content=digit.encode()).path.rename(shelf.place(digit * 64))
    shelf.note(digit * 64, "target", PulledFor(model="fake", server=server, name="d", at_s=float(digit)))


def test_everything_comes_from_the_file(config: Path, started: Started, tmp_path: Path, outrider: Outrider) -> None:
    """As a service runs it: the draft that was pulled, and to each cloud its own key."""
    key_file(config.parent).rename(config.parent / "first.key")
    key_file(config.parent, OTHER_KEY).rename(config.parent / "second.key")
    make_draft(tmp_path / "drafts" / "cpu")

    async def look(core: LocalCore) -> None:
        assert [(await client.model_facts()).name for client in core.upstream._clients] == ["fake", "fake"]

    started.look = look
    with (
        serve_fake(ServerSettings(keys=KeyRing([KEY])), drafts=tmp_path / "drafts") as first,
        serve_fake(ServerSettings(keys=KeyRing([OTHER_KEY]))) as second,
    ):
        config.write_text(
            f"[[endpoint]]\nurl = '{first.url}'\nkey_file = 'first.key'\n"
            f"[[endpoint]]\nurl = '{second.url}'\nkey_file = 'second.key'\n"
            "[common]\neffort = 'low'\n[serve]\nport = 0\nmax_requests = 3\ndepth = '4'\n",
            encoding="utf-8",
        )
        pulled = Path(outrider("pull").out.strip())
        shown = outrider("serve")
    assert f"draft: cpu, pulled from {first.url}" in shown.err
    assert started.opened == [pulled / "openvino_model.xml"]
    assert [(core.settings.max_requests, core.settings.depth) for core in started.cores] == [(3, "4")]


def test_without_a_verifier_the_draft_is_the_one_last_pulled_from_it(
    config: Path, started: Started, shelf: Shelf, tmp_path: Path, outrider: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service may start before the network does; with nothing pulled from there it takes the reference draft."""
    url = nowhere()
    monkeypatch.setattr("outrider.edge.cli.draft_source.MAX_LOADING_S", 0.0)
    for number, server in enumerate((url, url, "http://other"), 1):
        shelved(shelf, str(number), server)
    shown = outrider("serve", "--port", "0", "--cloud", url).err
    assert started.opened == [shelf.place("2" * 64) / "openvino_model.xml"]
    assert shown.count(f"No verifier answers at {url}") == 1 and f"draft: d, pulled from {url}" in shown
    other = find_pulled_from(["http://other/"], AS_BUNDLED, shelf)
    assert other is not None and other.bundle.path == shelf.place("3" * 64)
    assert find_pulled_from([url], DraftChoice("onnxruntime"), shelf) is None
    reference = make_draft(tmp_path / "reference").path
    monkeypatch.setattr("outrider.edge.cli.draft_source.default_draft", lambda _: reference)
    outrider("serve", "--port", "0", "--cloud", "http://127.0.0.1:9")
    assert started.opened[1:] == [reference / "openvino_model.xml"]


def test_keys_of_clients_are_read_again(
    config: Path, started: Started, tmp_path: Path, outrider: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new key is accepted without a restart, and one that is gone is refused."""
    own, draft = key_file(tmp_path), make_draft(tmp_path / "draft").path
    monkeypatch.setattr("outrider.models.process.watched_files.LOOK_S", 0.02)

    async def look(core: LocalCore) -> None:
        keys = core.settings.keys
        assert keys.may_generate(ApiKey.plain(KEY).digest)
        own.write_text(f"{OTHER_KEY}\n")
        async with asyncio.timeout(30.0):
            while keys.of_owner(ApiKey.plain(OTHER_KEY).digest) is None:
                await asyncio.sleep(0.005)
        with pytest.raises(RequestError, match="not accepted"):
            keys.find(b"Bearer " + KEY.encode())

    started.look = look
    with serve_fake() as cloud:
        outrider("serve", "--port", "0", "--cloud", cloud.url, "--draft", draft, "--api-key-file", own)
    assert len(started.cores) == 1


def test_typed_options_without_effect_are_refused(config: Path, started: Started, outrider: Outrider) -> None:
    """By name, as in `outrider run`; not what the configuration says for every start."""
    keyed = ["--api-key-file", str(key_file(config.parent))]
    for options, message in (
        (["--depth", "4", "--effort", "low"], "--depth 4 does not depend on times, so --effort"),
        (["--width", "1", "--lookup"], "--width 1 drafts a single path, so --lookup or --no-lookup"),
        (["--runtime", "ngram", "--no-lookup"], "nothing but lookup drafts"),
        (["--runtime", "ngram", "--draft-device", "gpu.1"], "no device runs it"),
        (
            ["--runtime", "ngram", "--threads", "2", "--offline-ok"],
            "no model drafts, so --threads and --offline-ok would",
        ),
        (
            ["--runtime", "ngram", "--draft-context", "9", "--max-drafting", "2"],
            "so --draft-context and --max-drafting",
        ),
        (
            ["--insecure-no-keys"],
            "127.0.0.1 is reached from this machine only, so --insecure-no-keys would have no effect",
        ),
        (["--max-own", "5", "--max-requests", "4"], "--max-requests 4 bounds all clients together, so --max-own would"),
        (["--any-user", *keyed], "clients must send a key, so --any-user would have no effect"),
        (["--insecure-no-keys", "--host", "0.0.0.0", *keyed], "clients must send a key, so --insecure-no-keys would"),
        (["--delta", "1"], "No such option '--delta'. Every text is exactly the target's"),
    ):
        assert message in outrider("serve", *options, code=2).err
    assert started.cores == []
    config.write_text(
        "[serve]\nport = 0\nmax_own = 9\noffline_ok = true\nthreads = 2\nany_user = true\n", encoding="utf-8"
    )
    draft = ["--draft", make_draft(config.parent / "draft").path, "--runtime", "ngram", "--cloud", nowhere()]
    outrider("serve", *keyed, "--max-requests", "4", *draft)
    assert [core.offline for core in started.cores] == [None]  # copied passages are no text


def test_a_verifier_that_never_answers_delays_the_start_little(
    config: Path, started: Started, shelf: Shelf, outrider: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes connections and says nothing: each look is short, and both are at the same time."""
    monkeypatch.setattr("outrider.edge.cli.draft_source.MAX_LOOK_S", 0.2)
    monkeypatch.setattr("outrider.edge.cli.placing.LINK_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        shelved(shelf, "1", url)
        began = time.monotonic()
        shown = outrider("serve", "--port", "0", "--cloud", url).err
        assert len(started.cores) == 1 and time.monotonic() - began < 10.0
    assert f"No verifier answers at {url} within 0.2 s." in shown and f"draft: d, pulled from {url}" in shown


def test_the_verifiers_key_and_the_clients_keys_are_told_apart(
    config: Path, started: Started, tmp_path: Path, outrider: Outrider
) -> None:
    """A list of keys in --key-file, and one file for both, are refused with what each option is for."""
    several = key_file(tmp_path, f"{KEY}\n{OTHER_KEY}").rename(tmp_path / "several")
    shared = key_file(tmp_path, OTHER_KEY, 0o644).rename(tmp_path / "shared")
    one = key_file(tmp_path)
    both = (
        f"{one} is given twice: --key-file holds the key that goes to the verifier, --api-key-file those that clients"
    )
    for options, endpoint, message in (
        (["--api-key-file", shared], "", "can be read or written by other users (mode 0644); expected 0600"),
        (["--key-file", several], "", "holds 2 lines; expected one line with the key for the verifier; keys that"),
        (["--key-file", several, "--api-key-file", several], "", "is given twice: --key-file holds"),
        (["--key-file", one, "--api-key-file", one.parent / "." / one.name], "", both),
        (["--api-key-file", one], f"key_file = '{one}'\n", both),
        ([], f"key_file = '{several}'\n", "keys that clients of this endpoint send belong into --api-key-file"),
    ):
        config.write_text(f"[[endpoint]]\nurl = 'https://a.example'\n{endpoint}", encoding="utf-8")
        shown = outrider("serve", "--port", "0", *options, code=2).err
        assert message in shown and KEY not in shown, shown
    assert started.cores == []
