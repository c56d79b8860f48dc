"""Tests what bounds owners: shares, and stores in which the owner with most loses its oldest."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_harness import Clock

from outrider.models.process.by_owner import Bounds, OwnerStore, Shares

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
                    assert (
                        (lost[0] == owner and has_too_much)
                        or max(counts) == counts[lost[0]]
                        or (max(sizes) == sizes[lost[0]])
                    )
                    assert next(each for each in model.kept if each[0] == lost[0]) == lost
                    model.kept.remove(lost)
            case ("pop", int(owner), int(key)):
                found = [each for each in model.kept if each[:2] == (owner, key)]
                assert store.pop(owner, key) == (found[0] if found else None)
                model.kept = [each for each in model.kept if each[:2] != (owner, key)]
            case ("most",) if sum(model.sizes()):
                lost = store.pop_from_most()
                assert model.sizes()[lost[0]] == max(model.sizes())
                assert next(each for each in model.kept if each[0] == lost[0]) == lost
                model.kept.remove(lost)
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
