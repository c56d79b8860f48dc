"""Tests stores of recent texts: in memory, and in a real Redis that dies, hangs or holds something else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_harness import Clock
from tests.redis_store import find, place, text

from outrider.cloud.recent.redis_store import RedisStore
from outrider.cloud.recent.store import (
    MAX_BYTES,
    MAX_TOKENS,
    MemoryStore,
    PromptDigest,
    RecentText,
    decode,
    encode,
    is_of_another_prompt,
    sampling_digest,
)
from outrider.cloud.server.options import ServeOptions
from outrider.cloud.server.serve import REDIS_VARIABLE, open_recent
from outrider.models.errors import ConfigError, RuntimeUnavailable
from outrider.models.picks.sampling import SamplingParams
from outrider.models.process.by_owner import Bounds

GREEDY = sampling_digest(SamplingParams())
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


# -- names and bytes ---------------------------------------------------------------------------------------------------


@given(IDS, IDS)
def test_a_digest_grows_as_the_prompt_does(first: list[int], second: list[int]) -> None:
    """A prompt in two parts, as a kept prefix and what continues it, has the place of the whole."""
    begun = PromptDigest("t", b"alice").with_tokens(first)
    assert begun.with_tokens(second).place == PromptDigest("t", b"alice").with_tokens(first + second).place
    assert begun.place == place(prompt=tuple(first))


def test_another_owner_target_or_prompt_has_another_place() -> None:
    """And nothing of the prompt or the owner is in it."""
    places = [place(), place(b"bob"), place(target="u"), place(prompt=(1, 2, 4)), place(prompt=(1, 2))]
    assert len(set(places)) == len({each.prompt for each in places}) == len(places)
    assert len({each.owner for each in places}) == 3
    assert place().owner == place(prompt=(9,)).owner
    salted = [PromptDigest("t", b"alice", salt).with_tokens((1, 2, 3)).place for salt in (b"", b"one", b"two")]
    assert salted[0] == place() and len({each.prompt for each in salted}) == 3
    assert {each.owner for each in salted} == {place().owner}  # an owner's bounds hold whatever salts it sends


def test_a_greedy_request_has_no_seed() -> None:
    """Sampled ones repeat each other with the same parameters and seed only."""
    assert sampling_digest(SamplingParams(seed=1)) == GREEDY
    hot = [SamplingParams(0.8, seed=1), SamplingParams(0.8, seed=2), SamplingParams(0.9, seed=1)]
    assert len({sampling_digest(params) for params in hot}) == 3


@given(IDS)
def test_what_is_encoded_comes_back(tokens: list[int]) -> None:
    """With its sampling; at its own place only."""
    at, written = place(), RecentText(tuple(tokens), GREEDY)
    data = encode(at, written)
    assert decode(at, data) == written and not is_of_another_prompt(at, data)
    other = place(prompt=(4,))
    assert is_of_another_prompt(other, data) and decode(other, data) is None


@given(st.data())
def test_no_change_of_the_bytes_is_accepted(data: st.DataObject) -> None:
    """A flipped bit anywhere, a cut, something longer, anything else."""
    at = place()
    good = encode(at, text(5, 6, 7))
    bit = data.draw(st.integers(0, 8 * len(good) - 1))
    flipped = bytearray(good)
    flipped[bit // 8] ^= 1 << bit % 8
    cut = data.draw(st.integers(0, len(good) - 1))
    for wrong in (bytes(flipped), good[:cut], good + b"\0\0\0\0", data.draw(st.binary(max_size=60))):
        assert decode(at, wrong) is None


def test_a_long_text_is_cut() -> None:
    """So no text takes more than its share."""
    at = place()
    data = encode(at, RecentText(tuple(range(MAX_TOKENS + 10)), GREEDY))
    found = decode(at, data)
    assert len(data) == MAX_BYTES and found is not None and found.tokens == tuple(range(MAX_TOKENS))


# -- in memory ---------------------------------------------------------------------------------------------------------


def test_memory_keeps_the_newest_text_of_each_owner() -> None:
    """Another owner never gets it."""
    store = MemoryStore()
    store.put(place(), text(1, 2))
    store.put(place(), text(3))
    assert find(store, place()) == text(3)
    assert find(store, place(b"bob")) is None and find(store, place(prompt=(1,))) is None
    stats = store.stats()
    assert (stats.texts, stats.counts.hits, stats.counts.misses, stats.counts.stored) == (1, 1, 2, 2)
    store.close()
    assert (store.stats().texts, store.stats().bytes) == (0, 0)


def test_memory_forgets_what_is_old() -> None:
    """Nobody gets it, and its memory is free again with the next call."""
    clock = Clock()
    store = MemoryStore(10.0, clock=clock)
    store.put(place(), text(1))
    clock.now += 9.9
    assert find(store, place()) == text(1)
    clock.now += 0.2
    assert find(store, place()) is None
    clock.now += 1.0
    assert store.stats().texts == store.stats().bytes == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 30)), max_size=60))
def test_memory_stays_within_its_limits(puts: list[tuple[int, int, int]]) -> None:
    """And one who holds no more than a share loses nothing to the others."""
    store = MemoryStore(bounds=Bounds(max_each=6, max_each_size=4000, max_size=9000), max_texts=12)
    store.put(place(b"small"), text(1, 2))
    for owner, prompt, length in puts:
        store.put(place(bytes([owner]), (prompt,)), text(*range(length)))
        stats = store.stats()
        assert stats.texts is not None and stats.bytes is not None
        assert stats.texts <= 12 and 512 * stats.texts <= stats.bytes <= 9000
    assert find(store, place(b"small")) == text(1, 2)


def test_what_one_key_keeps_in_memory_is_bounded() -> None:
    """By the bounds of a server: 256 texts, 9 MB; another key's text stays."""
    store = MemoryStore()
    store.put(place(b"small"), text(1, 2))
    for number in range(600):
        store.put(place(b"large", (number,)), text(*range(32)))
    assert store.stats().texts == 256 + 1
    for number in range(600):
        store.put(place(b"large", (number,)), text(*range(MAX_TOKENS)))
    stats = store.stats()
    assert stats.texts is not None and 100 < stats.texts <= 256 + 1
    assert stats.bytes is not None and 8e6 < stats.bytes <= 9e6
    assert find(store, place(b"small")) == text(1, 2) and find(store, place(b"large", (599,))) is not None


# -- options -----------------------------------------------------------------------------------------------------------


def test_the_options_choose_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory, none, or Redis; a missing package and a wrong URL are named, a password is not."""
    monkeypatch.delenv(REDIS_VARIABLE, raising=False)
    with open_recent(ServeOptions("b")) as store:
        assert isinstance(store, MemoryStore)
    with open_recent(ServeOptions("b", recent=False)) as store:
        assert store is None
    with open_recent(ServeOptions("b", redis="redis://127.0.0.1:1/0")) as store:
        assert isinstance(store, RedisStore)
    with (
        pytest.raises(ConfigError, match="--no-recent"),
        open_recent(ServeOptions("b", recent=False, redis="redis://a")),
    ):
        pass
    monkeypatch.setenv(REDIS_VARIABLE, "http://user:secret@host/0")
    with pytest.raises(ConfigError, match="write redis://HOST") as refused, open_recent(ServeOptions("b")):
        pass
    assert "secret" not in str(refused.value)
    monkeypatch.setattr("outrider.models.process.extras.is_installed", lambda name: name != "redis")
    no_package = pytest.raises(RuntimeUnavailable, match=r"--redis needs the package 'redis'.*outrider\[scale\]")
    with no_package, open_recent(ServeOptions("b", redis="redis://a")):
        pass
