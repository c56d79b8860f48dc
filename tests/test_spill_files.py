"""Tests the directory of spilled prefixes, and the server's option of it."""

from __future__ import annotations

import logging
import os
import platform
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fake_runtime import FakeBatchRuntime
from tests.serving import code_of, run_session, serve_fake, target_tokens
from tests.spilling import TARGET, TOKENS, Hung, blocks, engine, header_of, store, with_facts

from outrider.cloud.engine import Engine, EngineConfig
from outrider.cloud.engine import spill as spill_module
from outrider.cloud.engine.config import SpillConfig
from outrider.cloud.engine.spill import SpillStore
from outrider.cloud.seam import Totals
from outrider.cloud.server import embedded
from outrider.cloud.server.embedded import _config
from outrider.cloud.server.options import EngineName, ServeOptions
from outrider.cloud.server.target import instruction_set
from outrider.cloud.server.vllm_target import VllmTarget
from outrider.models.errors import ConfigError


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "spill"


def put(store: SpillStore, owner: bytes, *names: str) -> None:
    """Prefixes of the same tokens and blocks, written."""
    for name in names:
        store.put(owner, name, TOKENS, blocks())
    store.flush()


def found_of(store: SpillStore, owner: bytes, *names: str) -> list[str]:
    """Those of an owner's prefixes that are found."""
    return [name for name in names if store.find(owner, name) is not None]


# -- the directory -----------------------------------------------------------------------------------------------------


def test_files_are_for_this_user_only(place: Path) -> None:
    """Directory 0700, files 0600; names hold no owner and no hash that a client could use."""
    with store(place) as opened:
        put(opened, b"alice", "name")
        (path,) = place.iterdir()
        assert stat.S_IMODE(place.stat().st_mode) == 0o700 and stat.S_IMODE(path.stat().st_mode) == 0o600
        assert b"alice" not in path.name.encode() + path.read_bytes() and "name" not in path.name
        assert found_of(opened, b"alice", "name", "../name") == ["name"] and not found_of(opened, b"bob", "name")


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 99), min_size=8, max_size=64), st.integers(0, 99))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, tokens: list[int], seed: int) -> None:
    """Bit by bit, and no byte more."""
    read: list[Any] = []
    with store(tmp_path_factory.mktemp("spill") / "new") as opened:
        opened.put(b"a", "n", tokens, blocks(seed))
        opened.flush()
        found = opened.find(b"a", "n")
        assert found is not None and list(found.tokens) == tokens
        file = found.path.read_bytes()
        assert file[header_of(file)[1] + 4 * len(tokens) :] == blocks(seed).tobytes()
        opened.load(b"a", found, read.append)
        opened.flush()
    assert np.array_equal(read, [blocks(seed)])


@pytest.mark.parametrize("kind", ["fp16", "fp8"])
def test_a_rounded_file_of_an_earlier_version_is_never_used(place: Path, kind: str) -> None:
    """It lies where nobody looks; with the name, and the target, of an exact one its header still tells, so it goes."""
    rounded = replace(TARGET, target=f"t rounded to {kind}")  # as `--spill-type` named it
    with closing(SpillStore(SpillConfig(place, rounded.target), rounded, Totals())) as earlier:
        put(earlier, b"a", "n")
    (path,) = place.iterdir()
    path.write_bytes(with_facts(path.read_bytes(), type=kind, exact="00"))
    data, found_at = path.read_bytes(), place / TARGET.place(b"a", "n")
    with store(place) as opened:
        assert opened.find(b"a", "n") is None and opened.totals.spill_faults == 0 and path.exists()
        of_target = {"place": found_at.name, "target": "t"}
        for changed in ({}, {"place": found_at.name}, of_target):
            found_at.write_bytes(with_facts(data, **changed))
            assert opened.find(b"a", "n") is None and not found_at.exists(), changed
        assert opened.totals.spill_faults == 3
        found_at.write_bytes(with_facts(data, **of_target, type="exact"))
        assert opened.find(b"a", "n") is not None  # so it was the type alone


def test_a_file_has_an_end(place: Path) -> None:
    """It is not found when it is too old, and removed by whichever replica looks next; leftovers of killed ones too."""
    offset = [0.0]
    with store(place, lambda: time.time() + offset[0], max_s=100.0) as opened:
        opened.put(b"a", "old", TOKENS, blocks(), age_s=90.0)
        put(opened, b"a", "new")
        (place / "x.kv.1.part").touch()
        offset[0] = 20.0
        assert found_of(opened, b"a", "old", "new") == ["new"]
        offset[0] = 1000.0
        with store(place, lambda: time.time() + 1000.0, max_s=100.0) as later:
            later.flush()
            assert not list(place.iterdir())


def test_the_owner_with_most_bytes_loses_its_oldest_file(place: Path) -> None:
    """So a flood leaves others' files alone, and the directory keeps to its size."""
    size = 600
    with store(place, max_bytes=5 * size) as opened:
        put(opened, b"small", "n")
        put(opened, b"large", *map(str, range(20)))
        assert sum(path.stat().st_size for path in place.iterdir()) <= 5 * size
        assert found_of(opened, b"small", "n") and found_of(opened, b"large", "0", "19") == ["19"]
        assert not opened.has_room(5 * size) and opened.totals.spill_faults == 1


def test_at_the_end_every_parked_prefix_is_written(place: Path) -> None:
    """However few bytes may wait at a time; while it serves, what does not fit is dropped and counted."""
    with engine(place) as harness:
        spill = harness.spill
        spill._max_waiting_bytes = 12 * harness.runtime.block_bytes  # two prefixes of 5 blocks
        names = [harness.keep((seed,) * 13)[0] for seed in range(8)]
        harness.engine.shut_down()
        assert (spill.totals.spilled, spill.totals.spill_faults) == (8, 0) and found_of(spill, b"", *names) == names
        assert spill.has_room(12) and not spill.has_room(13) and spill.totals.spill_faults == 1


def test_a_full_disk_is_one_warning(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And no fault of any request."""
    with store(place) as opened:
        place.rmdir()
        put(opened, b"a", *["n"] * 3)
        assert opened.totals.spill_faults >= 3 and opened.totals.spilled == 0
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_an_owner_has_only_so_many_calls_wait(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks and reads together, those included whose blocks wait for room; others' calls are taken, and come first."""
    calls = Mock()
    monkeypatch.setattr(spill_module, "_MAX_CALLS_EACH", 3)
    with store(place) as opened:
        put(opened, b"a", "one", "two", "three")
        found = opened.find(b"a", "one")
        assert found is not None
        kept: list[np.ndarray | None] = []
        for _ in range(4):
            opened.load(b"a", found, kept.append)
        opened.flush()
        assert [each is None for each in kept].count(True) == 1
        assert not opened.seek(b"a", "two", lambda _: None)
        kept.clear()  # nobody has the blocks any more
        disk = Hung(monkeypatch, "read_head")
        for owner in (b"a", b"a", b"a", b"b"):
            assert opened.seek(owner, "two", partial(calls, owner))
            assert disk.asked.wait(30.0)  # the first one's
        assert not opened.seek(b"a", "two", lambda _: None)
        monkeypatch.setattr(spill_module, "_STUCK_S", -1.0)
        assert not opened.seek(b"c", "two", lambda _: None), "a disk that hangs is asked no more"
        disk.answers.set()
        opened.flush()
    assert [call.args[0] for call in calls.call_args_list] == [b"a", b"b", b"a", b"a"]


def test_a_write_does_not_read_the_whole_directory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner with many small prefixes would take the thread from others; the bound on bytes holds all the same."""
    scan = Mock(wraps=os.scandir)
    monkeypatch.setattr(spill_module, "_SCAN_S", 3600.0)
    monkeypatch.setattr(os, "scandir", scan)
    with store(place, max_bytes=3000) as opened:
        put(opened, b"a", *map(str, range(40)), "39")  # the last in place of the one before
        scan.assert_called_once_with(place)
        sizes = [path.stat().st_size for path in place.iterdir()]
        assert sum(sizes) <= 3000 < sum(sizes) + max(sizes) and found_of(opened, b"a", "39")


def test_a_directory_that_others_may_read_is_refused(tmp_path: Path) -> None:
    """With the command that closes it; a file, and one that cannot be made, by name."""
    tmp_path.chmod(0o755)
    (tmp_path / "file").touch()
    for wrong, message in ((".", "run: chmod 700"), ("file", "--spill-dir"), ("file/below", "--spill-dir")):
        with pytest.raises(ConfigError, match=message), store(tmp_path / wrong):
            pass


def test_a_runtime_without_blocks_is_refused_by_name(place: Path) -> None:
    """So is vLLM, whose cache is its own."""

    class OnGpu(FakeBatchRuntime):
        why_no_blocks = "the KV cache of OpenVINO on GPU cannot be read"

    with pytest.raises(ConfigError, match="--spill-dir keeps the KV cache, and the KV cache of OpenVINO on GPU"):
        Engine(OnGpu(), EngineConfig(spill=SpillConfig(place, "t")))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"spill_dir": place}, "--spill-dir keeps the embedded engine's KV cache"),
        ({"allow_tolerance": True}, "leave --allow-tolerance out"),
    ]
    for options, message in wrong:
        with pytest.raises(ConfigError, match=message):
            VllmTarget(ServeOptions("b", engine=EngineName.VLLM, **options))


# -- the server --------------------------------------------------------------------------------------------------------


def test_a_server_goes_on_where_another_was_killed(place: Path) -> None:
    """Its thread wakes when blocks have been read: a session on a second server finds the turn of the first."""
    body: dict[str, Any] = {"prompt": [5, 17, 99] * 12, "max_tokens": 20, "ignore_eos": True}
    config = EngineConfig(spill=SpillConfig(place, "t", always=True))
    with serve_fake(config=config) as first, httpx.Client(base_url=first.url) as client:
        turn = run_session(client, body | {"keep_prefix": True})
        first.wait_until(lambda: first.core.engine.stats().totals.spilled == 1)
    with serve_fake(config=config) as second, httpx.Client(base_url=second.url) as client:
        again = run_session(client, body | {"prompt": [7, 8], "prefix_hash": turn.end.prefix_hash})
        assert again.tokens == target_tokens([*body["prompt"], *turn.tokens, 7, 8], 20)
        assert again.end.usage.cached_prompt_tokens == 48
        shown = client.get("/metrics").text
        assert "outrider_kv_cache_restored_total 1.0" in shown and "outrider_kv_cache_spill_faults_total 0.0" in shown


def test_a_hung_directory_stops_nobody(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one request waits for it others are answered; then 409, and the next ones do not wait at all."""
    config = EngineConfig(spill=SpillConfig(place, "t", always=True))
    body: dict[str, Any] = {"prompt": [5, 17, 99], "max_tokens": 4, "ignore_eos": True}
    continued = body | {"prefix_hash": "a" * 32}
    disk = Hung(monkeypatch, "read_head")
    with serve_fake(config=config) as server, httpx.Client(base_url=server.url, timeout=30.0) as client:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(httpx.post, f"{server.url}/v1/sessions", json=continued, timeout=30.0)
            assert disk.asked.wait(30.0)
            assert run_session(client, body).tokens == target_tokens(body["prompt"], 4)
            assert not first.done()
            monkeypatch.setattr(spill_module, "_STUCK_S", 0.0)
            refused = client.post("/v1/verify", json={"items": [{"prefix": [5], "prefix_hash": "a" * 32}] * 20})
            assert not first.done()
            assert code_of(refused) == code_of(first.result()) == (409, "prefix_not_held")
        disk.answers.set()


def test_the_options_reach_the_engine(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default nothing is written. A processor of another kind finds no files: its keys may differ in a bit."""
    assert _config(ServeOptions("b"), "t").spill is None
    assert platform.machine() in instruction_set()
    monkeypatch.setattr(embedded, "instruction_set", lambda: "x86_64 AVX2")
    options, expected = ServeOptions("b", spill_dir=place, spill_mb=3), SpillConfig(place, "t x86_64 AVX2", 3 << 20)
    assert _config(options, "t").spill == expected
    assert _config(replace(options, ray=True), "t").spill == replace(expected, always=True)
