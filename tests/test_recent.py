"""Tests stores of recent texts, in memory and in Redis, and what bounds owners in them."""

from __future__ import annotations

from dataclasses import replace
from types import NoneType

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
from outrider.models.process.by_owner import Bounds, OwnerStore, Shares

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
    assert len({each.owner for each in places}) == 3 and place().owner == place(prompt=(9,)).owner
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
    at, other, written = place(), place(prompt=(4,)), RecentText(tuple(tokens), GREEDY)
    data = encode(at, written)
    assert decode(at, data) == written and not is_of_another_prompt(at, data)
    assert decode(other, data) is None and is_of_another_prompt(other, data)


@given(st.data())
def test_no_change_of_the_bytes_is_accepted(data: st.DataObject) -> None:
    """A flipped bit anywhere, a cut, something longer, anything else."""
    good = encode(place(), text(5, 6, 7))
    bit, cut = data.draw(st.integers(0, 8 * len(good) - 1)), data.draw(st.integers(0, len(good) - 1))
    flipped = (int.from_bytes(good, "little") ^ (1 << bit)).to_bytes(len(good), "little")
    for wrong in (flipped, good[:cut], good + b"\0\0\0\0", data.draw(st.binary(max_size=60))):
        assert decode(place(), wrong) is None


def test_a_long_text_is_cut() -> None:
    """So no text takes more than its share."""
    data = encode(place(), text(*range(MAX_TOKENS + 10)))
    assert len(data) == MAX_BYTES and decode(place(), data) == text(*range(MAX_TOKENS))


# -- in memory ---------------------------------------------------------------------------------------------------------


def test_memory_forgets_what_is_old() -> None:
    """Nobody gets it, and its memory is free again with the next call; at the end all of it is."""
    clock = Clock()
    store = MemoryStore(10.0, clock=clock)
    store.put(place(), text(1))
    for seconds, expected in ((9.9, text(1)), (0.2, None)):
        clock.now += seconds
        assert find(store, place()) == expected
    clock.now += 1.0
    assert store.stats().texts == store.stats().bytes == 0
    store.put(place(), text(1))
    store.close()
    assert store.stats().texts == 0


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
    at_a = ServeOptions("b", redis="redis://127.0.0.1:1")
    without = ServeOptions("b", recent=False)
    for options, kind in ((ServeOptions("b"), MemoryStore), (without, NoneType), (at_a, RedisStore)):
        with open_recent(options) as store:
            assert isinstance(store, kind)
    with pytest.raises(ConfigError, match="--no-recent"), open_recent(replace(without, redis="redis://a")):
        pass
    monkeypatch.setenv(REDIS_VARIABLE, "http://user:secret@host/0")
    with pytest.raises(ConfigError, match="write redis://HOST") as refused, open_recent(ServeOptions("b")):
        pass
    assert "secret" not in str(refused.value)
    monkeypatch.setattr("outrider.models.process.extras.is_installed", lambda name: name != "redis")
    no_package = pytest.raises(RuntimeUnavailable, match=r"--redis needs the package 'redis'.*outrider\[scale\]")
    with no_package, open_recent(at_a):
        pass


BOUNDS = Bounds(max_each=4, max_all=8, max_each_size=30, max_size=50)
MAX_S = 10.0
NUM_OWNERS = 4


class Model:
    """The same as `OwnerStore`, with every answer computed afresh from one list: owner, key, size, since."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, int, int, float]] = []

    def sizes(self) -> list[int]:
        return [sum(size for each, _, size, _ in self.kept if each == owner) for owner in range(NUM_OWNERS)]

    def counts(self) -> list[int]:
        return [sum(each == owner for each, *_ in self.kept) for owner in range(NUM_OWNERS)]

    def is_within(self) -> bool:
        counts, sizes = self.counts(), self.sizes()
        return (
            max(counts) <= BOUNDS.max_each
            and sum(counts) <= BOUNDS.max_all
            and max(sizes) <= BOUNDS.max_each_size
            and sum(sizes) <= BOUNDS.max_size
        )

    def remove_oldest(self, lost: tuple[int, int, int, float]) -> None:
        """Of its owner, which it has to be."""
        assert next(each for each in self.kept if each[0] == lost[0]) == lost
        self.kept.remove(lost)


OPERATIONS = st.one_of(
    st.tuples(
        st.just("put"), st.integers(0, NUM_OWNERS - 1), st.integers(0, 5), st.integers(0, 40), st.floats(0.0, 12.0)
    ),
    st.tuples(st.just("pop"), st.integers(0, NUM_OWNERS - 1), st.integers(0, 5)),
    st.tuples(st.just("most")),
    st.tuples(st.just("old"), st.floats(0.0, 6.0)),
)


@settings(deadline=None)
@given(st.lists(OPERATIONS, max_size=80))
def test_the_owner_with_most_loses_its_oldest(operations: list[tuple[object, ...]]) -> None:
    """Whatever is put, replaced, taken and too old: who loses has most, or too much; it loses its oldest, no more."""
    clock, model = Clock(), Model()
    store = OwnerStore[int, int, tuple[int, int, int, float]](BOUNDS, MAX_S, clock)
    for operation in operations:
        match operation:
            case ("put", int(owner), int(key), int(size), float(age)):
                value = owner, key, size, clock.now - age
                gone = store.put(owner, key, value, size, since=clock.now - age)
                model.kept = [each for each in model.kept if each[:2] != (owner, key)] + [value]
                for lost in gone:
                    assert not model.is_within()
                    counts, sizes = model.counts(), model.sizes()
                    has_too_much = counts[owner] > BOUNDS.max_each or sizes[owner] > BOUNDS.max_each_size
                    has_most = max(counts) == counts[lost[0]] or max(sizes) == sizes[lost[0]]
                    assert has_most or (lost[0] == owner and has_too_much)
                    model.remove_oldest(lost)
            case ("pop", int(owner), int(key)):
                found = [each for each in model.kept if each[:2] == (owner, key)]
                assert store.pop(owner, key) == (found[0] if found else None)
                model.kept = [each for each in model.kept if each[:2] != (owner, key)]
            case ("most",) if sum(model.sizes()):
                lost = store.pop_from_most()
                assert model.sizes()[lost[0]] == max(model.sizes())
                model.remove_oldest(lost)
            case ("old", float(seconds)):
                clock.now += seconds
                old = [each for each in model.kept if clock.now - each[3] >= MAX_S]
                assert all(store.get(*each[:2]) is None for each in old)
                assert sorted(store.pop_old()) == sorted(old)
                model.kept = [each for each in model.kept if each not in old]
        assert model.is_within() and len(store) == len(model.kept) and store.size == sum(model.sizes())
        fresh = [each for each in model.kept if clock.now - each[3] < MAX_S]
        assert all(store.get(*each[:2]) == each for each in fresh)


def test_a_store_of_many_owners_holds_nothing_of_those_that_left() -> None:
    """Nor do its ranks grow with every value that ever came."""
    store = OwnerStore[int, int, None](Bounds(max_all=100))
    for number in range(5000):
        store.put(number, 0, None)
        store.put(0, number, None)
    assert len(store) == store.size == 100 and store.get(4999, 0) is None
    parts = (store._of, store._counts._of, store._sizes._of, store._counts._ranks, store._sizes._ranks)
    assert all(len(part) <= 2 * 100 + 65 for part in parts)
    store.clear()
    assert not store and store.size == 0 and not store._of and not store._counts._of


def test_shares_have_room_up_to_their_bounds() -> None:
    """Of an owner and of all; what is given back can be taken again, and an owner with nothing is forgotten."""
    shares = Shares[str](max_each=3, max_all=4)
    assert shares.add("a", 3) and not shares.add("a") and not shares.add("b", 2) and len(shares) == 1
    assert shares.add("b") and not shares.add("b")
    assert (shares["a"], shares["b"], shares.total, len(shares)) == (3, 1, 4, 2)
    assert shares.add("a", -3) and shares["a"] == 0 and len(shares) == 1 and shares.add("a", 3)
