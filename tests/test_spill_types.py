"""Tests prefixes on disk in FP16 and FP8: every error within its bound, labelled, and apart from exact ones."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from tests.engine_harness import SAMPLED, plain
from tests.fake_runtime import FakeBatchRuntime
from tests.spilling import TOKENS, engine, header_of, with_facts

from outrider.cloud.engine.config import SpillConfig, SpillType
from outrider.cloud.engine.spill import SpillStore
from outrider.cloud.engine.spill_codec import BOUNDS, BlockCodec, e4m3_codes, e4m3_numbers
from outrider.cloud.engine.spill_file import SpillTarget
from outrider.cloud.seam import Totals

LOSSY = (SpillType.FP16, SpillType.FP8)
NARROWED = [
    (SpillType.FP16, "f32[2, 4, 8]"),
    (SpillType.FP16, "torch.float32[4, 2, 8]"),
    (SpillType.FP8, "f32[2, 4, 8]"),
    (SpillType.FP8, "bf16[2, 4, 8]"),
    (SpillType.FP8, "torch.bfloat16[4, 2, 8]"),
    (SpillType.FP8, "torch.float16[4, 2, 8]"),
]
LAYOUT = ("f32[2, 4, 8]", "f32[2, 4, 8]")
TARGET = SpillTarget("t", LAYOUT, 4, 2 * 64 * 4, 100, 64)


def as_bytes(values: NDArray[np.float32], layout: str) -> NDArray[np.uint8]:
    """The elements in the cache's type, and their bytes: [blocks, bytes]."""
    if "bf" in layout:
        stored = (values.view(np.uint32) >> 16).astype(np.uint16)
    else:
        stored = values.astype(np.float16 if "16" in layout else np.float32)
    return stored.reshape(len(values), -1).view(np.uint8)


def as_values(data: NDArray[np.uint8], layout: str) -> NDArray[np.float64]:
    """The elements of bytes: [blocks, rows, 8]."""
    if "bf" in layout:
        found = (np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        found = np.ascontiguousarray(data).view(np.float16 if "16" in layout else np.float32)
    return found.astype(np.float64).reshape(len(data), -1, 8)


def normal(seed: int, num_blocks: int = 3, scale: float = 1.0) -> NDArray[np.float32]:
    """Blocks whose rows differ in size by orders of magnitude."""
    rng = np.random.default_rng(seed)
    sizes = scale * 10.0 ** rng.uniform(-3, 3, (num_blocks, 8, 1))
    return (sizes * rng.standard_normal((num_blocks, 8, 8))).astype(np.float32)


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_e4m3_is_that_of_its_specification() -> None:
    """Every code, and the nearest number of many values with ties to even, against the definition."""
    numbers = e4m3_numbers()
    assert (numbers[0x08], numbers[0x01], numbers[0x7E], numbers[0x38]) == (2**-6, 2**-9, 448.0, 1.0)
    assert np.isnan(numbers[[0x7F, 0xFF]]).all() and np.isfinite(np.delete(numbers, [0x7F, 0xFF])).all()
    finite = numbers[:0x7F].astype(np.float64)
    assert (np.diff(finite) > 0).all()
    middles = (finite[1:] + finite[:-1]) / 2
    values = np.concatenate([finite, middles, np.nextafter(middles, 0), np.nextafter(middles, 999), [0.0]])
    values = np.concatenate([values, np.random.default_rng(0).uniform(0, 448, 2000)]).astype(np.float32)
    distances = np.abs(values[:, None].astype(np.float64) - finite)
    nearest = distances == distances.min(axis=1, keepdims=True)
    expected = [max(np.flatnonzero(row), key=lambda code: code % 2 == 0) for row in nearest]
    assert e4m3_codes(values).tolist() == expected
    assert e4m3_codes(-values).tolist() == [code | 0x80 for code in expected]


@pytest.mark.parametrize(("kind", "layout"), NARROWED)
def test_every_error_is_within_the_bound(kind: SpillType, layout: str) -> None:
    """Of each element, by its own size and its row's; nothing is kept exactly; the size is the type's."""
    codec = BlockCodec(kind, (layout, layout))
    values = normal(3)
    data = np.concatenate([as_bytes(values, layout), as_bytes(values[::-1].copy(), layout)], axis=1)
    packed, is_exact = codec.pack(data)
    assert not is_exact.any() and len(packed) == codec.num_packed(is_exact) == 3 * codec.packed_bytes
    assert codec.packed_bytes == 2 * (64 * (2 if kind is SpillType.FP16 else 1) + 8)
    back = codec.unpack(packed, is_exact)
    half = data.shape[1] // 2
    bound, errors = BOUNDS[kind], []
    for part in (slice(None, half), slice(half, None)):
        before, after = as_values(data[:, part], layout), as_values(back[:, part], layout)
        most = np.abs(before).max(axis=2, keepdims=True)
        errors.append(np.abs(after - before))
        assert (errors[-1] <= bound.relative * np.abs(before) + bound.floor * most).all()
    assert np.max(errors) > 0
    again, _ = codec.pack(back)  # rounding twice changes nothing more: a prefix may come back often
    assert np.array_equal(codec.unpack(again, is_exact), back)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(LOSSY),
    arrays(np.float32, (2, 8, 8), elements=st.floats(width=32, allow_nan=True, allow_infinity=True)),
)
def test_any_bits_come_back_within_the_bound_or_exactly(kind: SpillType, values: NDArray[np.float32]) -> None:
    """Subnormal numbers, NaN, infinities and the largest included: a block is within the bound, or bit for bit."""
    codec = BlockCodec(kind, ("f32[8, 8]",))
    data = as_bytes(values, "f32")
    packed, is_exact = codec.pack(data)
    back = codec.unpack(packed, is_exact)
    bound = BOUNDS[kind]
    for index in range(2):
        if is_exact[index]:
            assert np.array_equal(back[index], data[index])
            continue
        before, after = values[index].astype(np.float64), as_values(back, "f32")[index]
        limit = bound.relative * np.abs(before) + bound.floor * np.abs(before).max(axis=1, keepdims=True)
        assert np.isfinite(before).all() and (np.abs(after - before) <= limit).all()


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(SpillType.FP16, "bf16[2, 8]"), (SpillType.FP16, "f16[2, 8]"), (SpillType.FP8, "u8[2, 8]"), (SpillType.FP8, "?")],
)
def test_a_cache_that_is_no_wider_is_refused(kind: SpillType, layout: str) -> None:
    """By name, when the server starts."""
    with pytest.raises(ValueError, match=f"is no wider than {kind}"):
        BlockCodec(kind, ("f32[2, 8]", layout))


# -- files -------------------------------------------------------------------------------------------------------------


def store(place: Path, kind: SpillType) -> SpillStore:
    return SpillStore(SpillConfig(place, "t", type=kind), replace(TARGET, type=kind), Totals())


def blocks(seed: int = 0) -> NDArray[np.uint8]:
    return normal(seed, 2 * 2).view(np.uint8).reshape(2, -1)


def kept(place: Path, kind: SpillType, data: NDArray[np.uint8]) -> tuple[Path, NDArray[np.uint8], int]:
    """The file of these blocks, what is read from it, and the blocks that were not rounded."""
    with closing(store(place, kind)) as opened:
        opened.put(b"a", "n", TOKENS, data)
        opened.flush()
        found = opened.find(b"a", "n")
        assert found is not None and list(found.tokens) == TOKENS
        read: list[NDArray[np.uint8] | None] = []
        opened.load(b"a", found, read.append)
        opened.flush()
        assert read[0] is not None and opened.totals.spill_faults == 0
        return found.path, read[0], opened.totals.spill_beyond


def test_files_are_smaller(tmp_path: Path) -> None:
    """Exact ones are bit for bit; FP16 has half the bytes and FP8 a quarter, and one for each row."""
    sizes = {}
    for kind in SpillType:
        path, data, beyond = kept(tmp_path / kind, kind, blocks())
        head = path.read_bytes().index(b"}") + 1 + 32 + 4 * len(TOKENS)
        sizes[kind] = path.stat().st_size - head
        assert beyond == 0 and np.array_equal(data, blocks()) == (kind is SpillType.EXACT)
    elements, rows = 2 * 128, 2 * 16
    assert list(sizes.values()) == [4 * elements, 2 * elements + rows, elements + rows]


@pytest.mark.parametrize("kind", LOSSY)
@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan, np.float32(3.4028235e38)])
def test_a_block_beyond_the_bound_is_kept_exactly_and_counted(tmp_path: Path, kind: SpillType, wrong: float) -> None:
    """The others of the prefix are rounded. 3.4e38 is the largest float32, which both types round to infinity."""
    data = blocks()
    data[1].view(np.float32)[7] = wrong
    _, back, beyond = kept(tmp_path / "spill", kind, data)
    assert beyond == 1
    assert np.array_equal(back[1], data[1]) and not np.array_equal(back[0], data[0])


@pytest.mark.parametrize("written", SpillType)
def test_a_file_of_another_type_is_never_used(tmp_path: Path, written: SpillType) -> None:
    """It is not found; renamed to where it would be found, it is refused by its header, and removed."""
    place = tmp_path / "spill"
    path, _, _ = kept(place, written, blocks())
    for kind in set(SpillType) - {written}:
        with closing(store(place, kind)) as other:
            assert other.find(b"a", "n") is None and other.totals.spill_faults == 0 and path.exists()
            wrong = place / other._target.place(b"a", "n")
            assert wrong != path
            shutil.copy(path, wrong)
            assert other.find(b"a", "n") is None and other.totals.spill_faults == 1 and not wrong.exists()


def test_flags_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """A header that is whole, with too many flags, none, or flags that do not fit the length."""
    path, _, _ = kept(tmp_path / "spill", SpillType.FP8, blocks())
    data = path.read_bytes()
    facts, _ = header_of(data)
    assert facts["type"] == "fp8" and facts["exact"] == "00"
    for changed in ({"exact": "0000"}, {"exact": None}, {"exact": "xx"}, {"exact": "80"}, {"type": "exact"}):
        path.write_bytes(with_facts(data, **changed))
        with closing(store(tmp_path / "spill", SpillType.FP8)) as opened:
            assert opened.find(b"a", "n") is None and opened.totals.spill_faults == 1, changed


# -- the engine --------------------------------------------------------------------------------------------------------


class FloatRuntime(FakeBatchRuntime):
    """The fake with a float32 cache: of each slot the token and the position, small numbers that FP8 may round."""

    @property
    def block_layout(self) -> tuple[str, ...]:
        return (f"f32[{self.block_size}, 2]",)

    def read_blocks(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        return super().read_blocks(blocks).view(np.uint32).astype(np.float32).view(np.uint8)

    def write_blocks(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        slots = np.ascontiguousarray(data).view(np.float32)
        super().write_blocks(blocks, np.rint(slots).astype(np.uint32).view(np.uint8))


@pytest.mark.parametrize("kind", SpillType)
def test_an_engine_goes_on_with_rounded_blocks(
    tmp_path: Path, kind: SpillType, caplog: pytest.LogCaptureFixture
) -> None:
    """Labelled in the log and in the stats. What continues them is not shared with a prompt that names no prefix."""
    prompt = tuple(range(20, 33))
    with engine(tmp_path / "spill", always=True, kind=kind, runtime=FloatRuntime) as first:
        name, tokens = first.keep(prompt)
        first.spill.flush()
        assert first.engine.stats().totals.spilled == 1
        assert first.engine.stats().spill_lossy == (kind is not SpillType.EXACT)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == (kind is not SpillType.EXACT)
    assert all(f"--spill-type {kind}" in line and "may differ from the target's" in line for line in warnings)
    with engine(tmp_path / "spill", always=True, kind=kind, runtime=FloatRuntime) as second:
        _, collector = second.submit((3, 4), 10, prefix_hash=name, keep=True)
        text = second.text(collector)
        assert collector.ended.usage.cached_prompt_tokens == (len(tokens) - 1) // 4 * 4
        whole = (*tokens, 3, 4)
        assert (text == plain(whole, SAMPLED, 10)) == (kind is not SpillType.FP8)  # FP16 has all integers to 2,048
        again = collector.ended.prefix_hash
        assert again is not None
        shared = second.submit((*whole, 1), 4)[1]  # with the continued one parked
        assert second.text(shared) == plain((*whole, 1), SAMPLED, 4)
        assert (shared.ended.usage.cached_prompt_tokens > 0) == (kind is SpillType.EXACT)
        _, third = second.submit((8,) * 9, 4, prefix_hash=again)  # goes on with rounded ones, in memory
        second.text(third)
        longer = (*whole, *text, *(8,) * 9, 1)
        _, unnamed = second.submit(longer, 4)
        assert second.text(unnamed) == plain(longer, SAMPLED, 4)
