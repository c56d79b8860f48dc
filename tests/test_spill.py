"""Tests parked prefixes on disk: equal bits when they return, here and in another engine; never used when damaged."""

from __future__ import annotations

import json
import logging
import os
import platform
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_harness import SAMPLED, Collector, Harness, plain
from tests.fake_runtime import FakeBatchRuntime
from tests.requests import flat_request
from tests.serving import run_session, serve_fake, target_tokens
from tests.waiting import wait_until

from outrider.cloud.engine import Engine, EngineConfig
from outrider.cloud.engine import spill as spill_module
from outrider.cloud.engine.config import SpillConfig, SpillType
from outrider.cloud.engine.spill import SpillStore
from outrider.cloud.engine.spill_file import MAGIC, SpillTarget
from outrider.cloud.seam import Totals
from outrider.cloud.server import embedded
from outrider.cloud.server.embedded import _config
from outrider.cloud.server.options import EngineName, ServeOptions
from outrider.cloud.server.target import instruction_set
from outrider.cloud.server.vllm_target import VllmTarget
from outrider.models.errors import ConfigError, RequestError

PROMPT = tuple(range(1, 14))
TARGET = SpillTarget("t", ("u8[8]",), 4, 8, 100, 64)
TOKENS = [5, 6, 7, 8, 9, 1, 2, 3, 4]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "spill"


class SpillHarness(Harness):
    """An engine that spills; its blocks arrive from a thread, so a run waits for what is being read."""

    def __init__(
        self,
        place: Path,
        *,
        always: bool = False,
        target: str = "t",
        max_parked: int = 256,
        kind: SpillType = SpillType.EXACT,
    ) -> None:
        spill = SpillConfig(place, target, always=always, type=kind)
        super().__init__(config=EngineConfig(spill=spill, max_parked=max_parked), num_blocks=64)
        self.swap = self.engine._swap
        assert self.swap.store is not None
        self.spill = self.swap.store

    def text(self, collector: Collector) -> list[int]:
        """Runs until this sequence has ended."""
        self.steps_until(lambda: collector.end is not None)
        return collector.tokens

    def steps_until(self, is_so: Callable[[], bool]) -> None:
        """Runs steps, one at least, until it is so."""

        def is_so_after_a_step() -> bool:
            self.engine.step()
            return is_so()

        wait_until(is_so_after_a_step)

    def submit(self, prompt: Sequence[int], *given: Any, **options: Any) -> tuple[int, Collector]:
        """As the routes do: looks on disk first."""
        name, owner, salt = options.get("prefix_hash"), options.get("owner", b""), options.get("salt", b"")
        found: list[object] = []
        looked = threading.Event()

        def done(stored: object) -> None:
            found.append(stored)
            looked.set()

        if name is not None and self.engine.seek(
            owner, flat_request((), SAMPLED, 1, salt=salt).asker.name_of(name), done
        ):
            assert looked.wait(30.0)
        return super().submit(prompt, *given, stored=found[0] if found else None, **options)

    def keep(self, prompt: tuple[int, ...] = PROMPT, owner: bytes = b"", salt: bytes = b"") -> tuple[str, list[int]]:
        """A finished session that is parked: its name and all its tokens."""
        _, collector = self.submit(prompt, 8, keep=True, owner=owner, salt=salt)
        tokens = self.text(collector)
        assert collector.ended.prefix_hash is not None
        return collector.ended.prefix_hash, [*prompt, *tokens]

    def go_on(self, name: str, *, owner: bytes = b"", salt: bytes = b"") -> tuple[list[int], int]:
        """The text that continues a kept prefix, and how many of its prompt's tokens were in the cache."""
        _, collector = self.submit((3, 4), 10, prefix_hash=name, owner=owner, salt=salt)
        return self.text(collector), collector.ended.usage.cached_prompt_tokens


@contextmanager
def engine(place: Path, **options: object) -> Iterator[SpillHarness]:
    """An engine that is closed at the end, with every block returned."""
    harness = SpillHarness(place, **options)  # type: ignore[arg-type]
    try:
        yield harness
        harness.assert_all_returned()
    finally:
        harness.engine.close()
    assert not harness.spill._thread.is_alive()


# -- the engine --------------------------------------------------------------------------------------------------------


def test_a_prefix_that_lost_its_blocks_comes_back(place: Path) -> None:
    """With its keys and values: only what follows its full blocks runs. The text is that of the tokens."""
    with engine(place, max_parked=1) as harness:
        name, tokens = harness.keep()
        harness.keep((9, 9, 9, 9, 9))  # an owner may park one: the first is evicted
        harness.spill.flush()
        assert harness.engine.stats().totals.spilled == 1
        text, cached = harness.go_on(name)
        assert text == plain([*tokens, 3, 4], SAMPLED, 10)
        assert cached == (len(tokens) - 1) // 4 * 4
        assert harness.go_on(name)[0] == text  # the file stays: a turn can be generated again


def test_another_engine_goes_on_with_it(place: Path) -> None:
    """A hand-over: the first engine writes it at once, or at its end; in the second none of its blocks is computed."""
    for always in (True, False):
        with engine(place, always=always) as first:
            name, tokens = first.keep()
            first.spill.flush()
            assert (first.engine.stats().totals.spilled == 1) == always
        with engine(place) as second:
            text, cached = second.go_on(name)
            assert text == plain([*tokens, 3, 4], SAMPLED, 10)
            assert cached == (len(tokens) - 1) // 4 * 4
            assert second.engine.stats().totals.restored == 1
            assert max(max(batch) for batch in second.batches) < 8


@pytest.mark.parametrize("salt", [b"", b"one"])
def test_only_its_owner_salt_and_target_find_a_prefix(place: Path, salt: bytes) -> None:
    """Others get 409, in this engine and in another one, and the file stays for its owner."""
    with engine(place, always=True) as first:
        name, _ = first.keep(owner=b"alice", salt=salt)
        first.spill.flush()
        with pytest.raises(RequestError, match="not held"):
            first.go_on(name, owner=b"alice", salt=b"two")
    for target, owner, sent in (
        ("t", b"bob", salt),
        ("t", b"", salt),
        ("another", b"alice", salt),
        ("t", b"alice", b"two"),
    ):
        with engine(place, target=target) as other, pytest.raises(RequestError, match="not held"):
            other.go_on(name, owner=owner, salt=sent)
    with engine(place) as second:
        assert second.go_on(name, owner=b"alice", salt=salt)[1] > 0
        assert second.engine.stats().totals.spill_faults == 0


def test_a_prefix_without_room_waits_for_it(place: Path) -> None:
    """In the queue, like any sequence; its blocks are written once it has its own."""
    with engine(place, always=True) as first:
        name, tokens = first.keep()
        first.spill.flush()
    with engine(place) as second:
        blocks = second.engine._cache.pool.allocate(62) or []
        _, collector = second.submit((3, 4), 10, prefix_hash=name)
        second.steps_until(lambda: second.engine.stats().queued == 1)  # it was read, and found no room
        assert second.engine._cache.pool.num_available == 2
        second.engine._cache.pool.release(blocks)
        assert second.text(collector) == plain([*tokens, 3, 4], SAMPLED, 10)
        assert collector.ended.usage.cached_prompt_tokens == (len(tokens) - 1) // 4 * 4


def test_a_prefix_from_disk_takes_no_blocks_of_others_before_its_turn(place: Path) -> None:
    """One that waits in the queue leaves the prefixes that others have parked where they are."""
    with engine(place, always=True) as first:
        name, _ = first.keep((7,) * 60, owner=b"bob")
        first.spill.flush()
    with engine(place) as second:
        kept, tokens = second.keep(owner=b"alice")
        blocks = second.engine._cache.pool.allocate(second.engine.stats().free_blocks) or []
        _, large = second.submit((1,) * 16, 8, owner=b"bob", priority=1)
        refuse = lambda sequence, length: False  # noqa: E731 - nobody is admitted yet
        grow, second.engine._cache.grow = second.engine._cache.grow, refuse  # type: ignore[method-assign]
        _, waits = second.submit((3, 4), 4, prefix_hash=name, owner=b"bob")
        second.steps_until(lambda: second.engine.stats().queued == 2)
        assert second.engine.stats().parked == 1
        second.engine._cache.grow = grow  # type: ignore[method-assign]
        second.engine._cache.pool.release(blocks)
        assert second.go_on(kept, owner=b"alice") == (plain([*tokens, 3, 4], SAMPLED, 10), len(tokens) - 1)
        second.text(large)
        second.text(waits)


class Hung:
    """A disk that does not answer until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.answers, self.asked = threading.Event(), threading.Event()
        real = getattr(spill_module, name)

        def call(*given: Any) -> Any:
            self.asked.set()
            assert self.answers.wait(30.0)
            return real(*given)

        monkeypatch.setattr(spill_module, name, call)


def test_blocks_that_do_not_come_are_computed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some seconds; a sequence with a deadline ends at it; what comes later is not used."""
    with engine(place, always=True) as first:
        name, tokens = first.keep()
        first.spill.flush()
    with engine(place) as second:
        disk = Hung(monkeypatch, "read_blocks")
        _, late = second.submit((3, 4), 10, prefix_hash=name)
        second.engine.step()
        assert disk.asked.wait(30.0)
        ((first_id, _),) = second.swap.loading.items()
        found = second.spill.find(b"", name)
        request = flat_request((3, 4), SAMPLED, 10, prefix_hash=name, stored=found, deadline_ms=500.0)
        second.engine.submit(request, Collector())
        assert second.engine.step() == pytest.approx(0.5)
        second.clock.now += 0.5
        assert second.engine.step() == pytest.approx(4.5, abs=0.2)
        assert list(second.engine._sequences) == [first_id]  # the other ended at its deadline
        assert late.end is None
        second.clock.now += 4.6
        assert second.text(late) == plain([*tokens, 3, 4], SAMPLED, 10)
        assert late.ended.usage.cached_prompt_tokens == 0
        assert second.engine.stats().totals.spill_faults == 1
        disk.answers.set()
        second.spill.flush()
        second.run()


def test_a_cancelled_request_takes_no_blocks(place: Path) -> None:
    """Its blocks may arrive after its end."""
    with engine(place, always=True) as first:
        name, _ = first.keep()
        first.spill.flush()
    with engine(place) as second:
        number, collector = second.submit((3, 4), 10, prefix_hash=name)
        second.engine.cancel(number)
        second.text(collector)
        second.spill.flush()
        second.run()


def damaged(data: bytes) -> dict[str, bytes]:
    """Files that must not be used."""
    (length,) = struct.unpack("<I", data[8:12])
    facts = json.loads(data[12 : 12 + length])
    rest = data[12 + length + 32 :]

    def with_facts(**changed: object) -> bytes:
        header = json.dumps(facts | changed).encode()
        start = MAGIC + struct.pack("<I", len(header)) + header
        return start + sha256(start).digest() + rest

    nothing = MAGIC + struct.pack("<I", 2) + b"[]"
    return {
        "empty": b"",
        "magic": b"x" + data[1:],
        "header": data[:40] + bytes([data[40] ^ 1]) + data[41:],
        "a huge header": data[:8] + struct.pack("<I", 1 << 31) + data[12:],
        "cut": data[:-1],
        "longer": data + b"\0",
        "ids": data[: 12 + length + 32] + b"\xff" + data[12 + length + 33 :],
        "blocks": data[:-1] + bytes([data[-1] ^ 1]),
        "another layout": with_facts(layout=["f32[4]"]),
        "another place": with_facts(place="a-b.kv"),
        "no list": with_facts(layout=7),
        "no tokens": with_facts(num_tokens=0),
        "words for numbers": with_facts(num_blocks="4"),
        "more blocks than tokens": with_facts(num_blocks=1 << 40),
        "too old": with_facts(created=facts["created"] - 3601.0),
        "of the future": with_facts(created=facts["created"] + 3600.0),
        "no header": nothing + sha256(nothing).digest() + rest,
    }


def test_no_damaged_file_is_used(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is counted, with one warning in all, and removed; the request gets 409, or runs its tokens again."""
    with engine(place, always=True) as first:
        name, tokens = first.keep()
        first.spill.flush()
    (path,) = place.iterdir()
    cases = damaged(path.read_bytes())
    with engine(place) as second:
        for what, data in cases.items():
            path.write_bytes(data)
            if what == "blocks":  # found when they are read; the ids are fine
                assert second.go_on(name) == (plain([*tokens, 3, 4], SAMPLED, 10), 0), what
            else:
                with pytest.raises(RequestError, match="not held"):
                    second.go_on(name)
            assert not path.exists(), what
        path.symlink_to("/dev/zero")
        with pytest.raises(RequestError, match="not held"):
            second.go_on(name)
        assert second.engine.stats().totals.spill_faults == len(cases) + 1
        assert second.engine.stats().totals.restored == 0
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "is not used, and removed" in warnings[0].getMessage()


def test_a_runtime_that_fails_to_copy_fails_no_request(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when a prefix is written, nor when it returns."""

    def fail(*_: object) -> None:
        raise RuntimeError("the copy failed")

    with engine(place, always=True) as first:
        name, tokens = first.keep()
        monkeypatch.setattr(first.runtime, "read_blocks", fail)
        first.keep((9, 9, 9, 9, 9))
        first.spill.flush()
        assert first.engine.stats().totals.spilled == first.engine.stats().totals.faults == 1
    with engine(place) as second:
        monkeypatch.setattr(second.runtime, "write_blocks", fail)
        assert second.go_on(name) == (plain([*tokens, 3, 4], SAMPLED, 10), 0)


# -- the directory -----------------------------------------------------------------------------------------------------


@contextmanager
def store(place: Path, clock: Callable[[], float] = time.time, **limits: object) -> Iterator[SpillStore]:
    config = SpillConfig(place, "t", **limits)  # type: ignore[arg-type]
    with closing(SpillStore(config, TARGET, Totals(), clock)) as opened:
        yield opened


def blocks(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (2, 8), np.uint8)


def test_files_are_for_this_user_only(place: Path) -> None:
    """Directory 0700, files 0600; names hold no owner and no hash that a client could use."""
    with store(place) as opened:
        opened.put(b"alice", "name", TOKENS, blocks())
        opened.flush()
        (path,) = place.iterdir()
        assert stat.S_IMODE(place.stat().st_mode) == 0o700 and stat.S_IMODE(path.stat().st_mode) == 0o600
        assert b"alice" not in path.name.encode() + path.read_bytes() and "name" not in path.name
        found = opened.find(b"alice", "name")
        assert found is not None and list(found.tokens) == TOKENS
        assert opened.find(b"alice", "../name") is None and opened.find(b"bob", "name") is None


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 99), min_size=8, max_size=64), st.integers(0, 99))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, tokens: list[int], seed: int) -> None:
    """Bit by bit."""
    read: list[np.ndarray | None] = []
    with store(tmp_path_factory.mktemp("spill") / "new") as opened:
        opened.put(b"a", "n", tokens, blocks(seed))
        opened.flush()
        found = opened.find(b"a", "n")
        assert found is not None and list(found.tokens) == tokens
        opened.load(b"a", found, read.append)
        opened.flush()
    assert len(read) == 1 and read[0] is not None and np.array_equal(read[0], blocks(seed))


def test_a_file_has_an_end(place: Path) -> None:
    """It is not found when it is too old, and removed by whichever replica looks next; leftovers of killed ones too."""
    offset = [0.0]
    with store(place, lambda: time.time() + offset[0], max_s=100.0) as opened:
        opened.put(b"a", "old", TOKENS, blocks(), age_s=90.0)
        opened.put(b"a", "new", TOKENS, blocks())
        opened.flush()
        (place / "x.kv.1.part").touch()
        offset[0] = 20.0
        assert opened.find(b"a", "old") is None and opened.find(b"a", "new") is not None
        offset[0] = 1000.0
        with store(place, lambda: time.time() + 1000.0, max_s=100.0) as later:
            later.flush()
            assert not list(place.iterdir())


def test_the_owner_with_most_bytes_loses_its_oldest_file(place: Path) -> None:
    """So a flood leaves others' files alone, and the directory keeps to its size."""
    size = 600
    with store(place, max_bytes=5 * size) as opened:
        opened.put(b"small", "n", TOKENS, blocks())
        for index in range(20):
            opened.put(b"large", str(index), TOKENS, blocks())
        opened.flush()
        assert sum(path.stat().st_size for path in place.iterdir()) <= 5 * size
        assert opened.find(b"small", "n") is not None and opened.find(b"large", "19") is not None
        assert opened.find(b"large", "0") is None
        assert not opened.has_room(5 * size) and opened.totals.spill_faults == 1


def test_at_the_end_every_parked_prefix_is_written(place: Path) -> None:
    """However few bytes may wait at a time; while it serves, what does not fit is dropped and counted."""
    with engine(place) as harness:
        block = harness.runtime.block_bytes
        harness.spill._max_waiting_bytes = 12 * block  # two prefixes of 5 blocks
        names = [harness.keep((seed,) * 13)[0] for seed in range(8)]
        harness.engine.shut_down()
        assert harness.spill.totals.spilled == 8 and harness.spill.totals.spill_faults == 0
        assert all(harness.spill.find(b"", name) is not None for name in names)
        assert harness.spill.has_room(12) and not harness.spill.has_room(13)
        assert harness.spill.totals.spill_faults == 1


def test_a_full_disk_is_one_warning(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And no fault of any request."""
    with store(place) as opened:
        place.rmdir()
        for _ in range(3):
            opened.put(b"a", "n", TOKENS, blocks())
        opened.flush()
        assert opened.totals.spill_faults >= 3 and opened.totals.spilled == 0
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_an_owner_has_only_so_many_calls_wait(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks and reads together, those included whose blocks wait for room; others' calls are taken, and come first."""
    order: list[bytes] = []

    def note(owner: bytes, _: object) -> None:
        order.append(owner)

    monkeypatch.setattr(spill_module, "_MAX_CALLS_EACH", 3)
    with store(place) as opened:
        for name in ("one", "two", "three"):
            opened.put(b"a", name, TOKENS, blocks())
        opened.flush()
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
            assert opened.seek(owner, "two", partial(note, owner))
            assert disk.asked.wait(30.0)  # the first one's
        assert not opened.seek(b"a", "two", lambda _: None)
        monkeypatch.setattr(spill_module, "_STUCK_S", -1.0)
        assert not opened.seek(b"c", "two", lambda _: None), "a disk that hangs is asked no more"
        disk.answers.set()
        opened.flush()
    assert order == [b"a", b"b", b"a", b"a"]


def test_a_write_does_not_read_the_whole_directory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner with many small prefixes would take the thread from others; the bound on bytes holds all the same."""
    scans: list[object] = []
    real = os.scandir

    def scan(path: Any) -> Any:
        scans.append(path)
        return real(path)

    monkeypatch.setattr(spill_module, "_SCAN_S", 3600.0)
    monkeypatch.setattr(os, "scandir", scan)
    with store(place, max_bytes=3000) as opened:
        for index in range(40):
            opened.put(b"a", str(index), TOKENS, blocks())
        opened.put(b"a", "39", TOKENS, blocks())  # in place of the one before
        opened.flush()
        assert scans == [place]
        sizes = [path.stat().st_size for path in place.iterdir()]
        assert sum(sizes) <= 3000 < sum(sizes) + max(sizes) and opened.find(b"a", "39") is not None


def test_a_directory_that_others_may_read_is_refused(tmp_path: Path) -> None:
    """With the command that closes it; a file, and one that cannot be made, by name."""
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="run: chmod 700"), store(tmp_path):
        pass
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="--spill-dir"), store(wrong):
            pass


def test_a_runtime_without_blocks_is_refused_by_name(place: Path) -> None:
    """So is vLLM, whose cache is its own."""

    class OnGpu(FakeBatchRuntime):
        why_no_blocks = "the KV cache of OpenVINO on GPU cannot be read"

    with pytest.raises(ConfigError, match="--spill-dir keeps the KV cache, and the KV cache of OpenVINO on GPU"):
        Engine(OnGpu(), EngineConfig(spill=SpillConfig(place, "t")))
    with pytest.raises(ConfigError, match="--spill-dir keeps the embedded engine's KV cache"):
        VllmTarget(ServeOptions("b", engine=EngineName.VLLM, spill_dir=place))


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
            item = {"prefix": [5], "prefix_hash": "a" * 32}
            refused = client.post("/v1/verify", json={"items": [item] * 20})
            assert not first.done()
            answer = first.result()
        for each in (refused, answer):
            assert (each.status_code, each.json()["error"]["code"]) == (409, "prefix_not_held")
        disk.answers.set()


def test_the_options_reach_the_engine(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default nothing is written. A processor of another kind finds no files: its keys may differ in a bit."""
    assert _config(ServeOptions("b"), "t", None).spill is None
    assert platform.machine() in instruction_set()
    monkeypatch.setattr(embedded, "instruction_set", lambda: "x86_64 AVX2")
    options = ServeOptions("b", spill_dir=place, spill_mb=3)
    assert _config(options, "t", None).spill == SpillConfig(place, "t x86_64 AVX2", 3 << 20)
    of_replica = _config(replace(options, ray=True), "t", None).spill
    assert of_replica == SpillConfig(place, "t x86_64 AVX2", 3 << 20, always=True)
