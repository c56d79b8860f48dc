"""Tests parked prefixes on disk: equal bits when they return, here and in another engine; never used when damaged."""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.engine_harness import SAMPLED, Collector, plain
from tests.requests import flat_request
from tests.spilling import Hung, engine, header_of, left_by_another, with_facts

from outrider.cloud.engine.spill_file import MAGIC
from outrider.models.errors import RequestError


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "spill"


def restored(tokens: Sequence[int]) -> tuple[list[int], int]:
    """What goes on with these: its text, and how many of them were read from the cache, those of full blocks."""
    return plain([*tokens, 3, 4], SAMPLED, 10), (len(tokens) - 1) // 4 * 4


def test_a_prefix_that_lost_its_blocks_comes_back(place: Path) -> None:
    """With its keys and values: only what follows its full blocks runs. The text is that of the tokens."""
    with engine(place, max_parked=1) as harness:
        name, tokens = harness.keep()
        harness.keep((9, 9, 9, 9, 9))  # an owner may park one: the first is evicted
        harness.spill.flush()
        assert harness.engine.stats().totals.spilled == 1
        assert harness.go_on(name) == restored(tokens)
        assert harness.go_on(name)[0] == restored(tokens)[0]  # the file stays: a turn can be generated again


@pytest.mark.parametrize("always", [True, False])
def test_another_engine_goes_on_with_it(place: Path, always: bool) -> None:
    """A hand-over: the first engine writes it at once, or at its end; in the second none of its blocks is computed."""
    with engine(place, always=always) as first:
        name, tokens = first.keep()
        first.spill.flush()
        assert (first.engine.stats().totals.spilled == 1) == always
    with engine(place) as second:
        assert second.go_on(name) == restored(tokens)
        assert second.engine.stats().totals.restored == 1
        assert max(max(batch) for batch in second.batches) < 8


def test_blocks_from_disk_are_shared_like_any(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With a prompt that begins alike and names no prefix; every text is that of its tokens."""
    name, tokens = left_by_another(place, tuple(range(20, 33)))
    with engine(place, always=True) as second:
        _, collector = second.submit((3, 4), 10, prefix_hash=name, keep=True)
        text, whole = second.text(collector), (*tokens, 3, 4)
        assert text == plain(whole, SAMPLED, 10)
        assert collector.ended.usage.cached_prompt_tokens == (len(tokens) - 1) // 4 * 4
        again = collector.ended.prefix_hash
        assert again is not None
        _, shared = second.submit((*whole, 1), 4)  # with the continued one parked
        assert second.text(shared) == plain((*whole, 1), SAMPLED, 4)
        assert shared.ended.usage.cached_prompt_tokens > 0
        _, third = second.submit((8,) * 9, 4, prefix_hash=again)
        second.text(third)
        longer = (*whole, *text, *(8,) * 9, 1)
        _, unnamed = second.submit(longer, 4)
        assert second.text(unnamed) == plain(longer, SAMPLED, 4)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("salt", [b"", b"one"])
def test_only_its_owner_salt_and_target_find_a_prefix(place: Path, salt: bytes) -> None:
    """Others get 409, in this engine and in another one, and the file stays for its owner."""
    with engine(place, always=True) as first:
        name, _ = first.keep(owner=b"alice", salt=salt)
        first.spill.flush()
        with pytest.raises(RequestError, match="not held"):
            first.go_on(name, owner=b"alice", salt=b"two")
    with engine(place, target="another") as other, pytest.raises(RequestError, match="not held"):
        other.go_on(name, owner=b"alice", salt=salt)
    with engine(place) as second:
        for owner, sent in ((b"bob", salt), (b"", salt), (b"alice", b"two")):
            with pytest.raises(RequestError, match="not held"):
                second.go_on(name, owner=owner, salt=sent)
        assert second.go_on(name, owner=b"alice", salt=salt)[1] > 0
        assert second.engine.stats().totals.spill_faults == 0


def test_a_prefix_without_room_waits_for_it(place: Path) -> None:
    """In the queue, like any sequence; its blocks are written once it has its own."""
    name, tokens = left_by_another(place)
    with engine(place) as second:
        blocks = second.engine._cache.pool.allocate(62) or []
        _, collector = second.submit((3, 4), 10, prefix_hash=name)
        second.steps_until(lambda: second.engine.stats().queued == 1)  # it was read, and found no room
        assert second.engine._cache.pool.num_available == 2
        second.engine._cache.pool.release(blocks)
        assert (second.text(collector), collector.ended.usage.cached_prompt_tokens) == restored(tokens)


def test_a_prefix_from_disk_takes_no_blocks_of_others_before_its_turn(place: Path) -> None:
    """One that waits in the queue leaves the prefixes that others have parked where they are."""
    name, _ = left_by_another(place, (7,) * 60, owner=b"bob")
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
        assert second.go_on(kept, owner=b"alice") == (restored(tokens)[0], len(tokens) - 1)
        assert second.text(large) and second.text(waits)


def test_blocks_that_do_not_come_are_computed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some seconds; a sequence with a deadline ends at it; what comes later is not used."""
    name, tokens = left_by_another(place)
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
        assert (second.text(late), late.ended.usage.cached_prompt_tokens) == (restored(tokens)[0], 0)
        assert second.engine.stats().totals.spill_faults == 1
        disk.answers.set()
        second.spill.flush()
        second.run()


def test_a_cancelled_request_takes_no_blocks(place: Path) -> None:
    """Its blocks may arrive after its end."""
    name, _ = left_by_another(place)
    with engine(place) as second:
        number, collector = second.submit((3, 4), 10, prefix_hash=name)
        second.engine.cancel(number)
        second.text(collector)
        second.spill.flush()
        second.run()


def damaged(data: bytes) -> dict[str, bytes]:
    """Files that must not be used."""
    facts, end = header_of(data)
    nothing = MAGIC + struct.pack("<I", 2) + b"[]"
    return {
        "empty": b"",
        "magic": b"x" + data[1:],
        "header": data[:40] + bytes([data[40] ^ 1]) + data[41:],
        "a huge header": data[:8] + struct.pack("<I", 1 << 31) + data[12:],
        "cut": data[:-1],
        "longer": data + b"\0",
        "ids": data[:end] + b"\xff" + data[end + 1 :],
        "blocks": data[:-1] + bytes([data[-1] ^ 1]),
        "another layout": with_facts(data, layout=["f32[4]"]),
        "another place": with_facts(data, place="a-b.kv"),
        "another type": with_facts(data, type="fp8"),
        "no list": with_facts(data, layout=7),
        "no tokens": with_facts(data, num_tokens=0),
        "words for numbers": with_facts(data, num_blocks="4"),
        "more blocks than tokens": with_facts(data, num_blocks=1 << 40),
        "too old": with_facts(data, created=facts["created"] - 3601.0),
        "of the future": with_facts(data, created=facts["created"] + 3600.0),
        "no header": nothing + sha256(nothing).digest() + data[end:],
    }


def test_no_damaged_file_is_used(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is counted, with one warning in all, and removed; the request gets 409, or runs its tokens again."""
    name, tokens = left_by_another(place)
    (path,) = place.iterdir()
    cases = damaged(path.read_bytes())
    with engine(place) as second:
        for what, data in cases.items():
            path.write_bytes(data)
            if what == "blocks":  # found when they are read; the ids are fine
                assert second.go_on(name) == (restored(tokens)[0], 0), what
            else:
                with pytest.raises(RequestError, match="not held"):
                    second.go_on(name)
            assert not path.exists(), what
        path.symlink_to("/dev/zero")
        with pytest.raises(RequestError, match="not held"):
            second.go_on(name)
        totals = second.engine.stats().totals
        assert (totals.spill_faults, totals.restored) == (len(cases) + 1, 0)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "is not used, and removed" in warnings[0].getMessage()


def test_a_runtime_that_fails_to_copy_fails_no_request(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when a prefix is written, nor when it returns."""
    fail = Mock(side_effect=RuntimeError("the copy failed"))
    with engine(place, always=True) as first:
        name, tokens = first.keep()
        monkeypatch.setattr(first.runtime, "read_blocks", fail)
        first.keep((9, 9, 9, 9, 9))
        first.spill.flush()
        assert first.engine.stats().totals.spilled == first.engine.stats().totals.faults == 1
    with engine(place) as second:
        monkeypatch.setattr(second.runtime, "write_blocks", fail)
        assert second.go_on(name) == (restored(tokens)[0], 0)
