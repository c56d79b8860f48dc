"""Tests branches of a sequence in one call, against fresh sequences of the same tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from tests.conftest import TINY_VOCAB
from tests.onnx_graphs import build

from outrider.models.errors import ConfigError, ModelFault
from outrider.models.runtimes import onnxruntime_sequence
from outrider.models.runtimes.base import (
    BranchingRuntime,
    JoiningRuntime,
    RuntimeOptions,
    SequenceRuntime,
    ShareableRuntime,
)
from outrider.models.runtimes.branch_blocks import BranchBlocks, FreeBlocks
from outrider.models.runtimes.onnxruntime_providers import CPU
from outrider.models.runtimes.onnxruntime_sequence import OnnxRuntimeSequence
from outrider.models.runtimes.openvino_sequence import OpenVinoSequenceRuntime

TOLERANCE = 1e-4
LONGEST = 120


@runtime_checkable
class Branching(SequenceRuntime, BranchingRuntime, Protocol):
    """What the device drafts trees with."""


OPTIONS = RuntimeOptions(num_threads=1, max_positions=LONGEST)

Opened = tuple[SequenceRuntime, SequenceRuntime]
Truth = Callable[[list[int]], NDArray[np.float32]]

# Mistral slides a window of 32, the length of a block.
CASES = ["openvino llama", "openvino mistral", "gpu llama", "gpu mistral"]
CASES += ["onnxruntime llama", "onnxruntime mistral"]


def pin_batch(file: Path) -> None:
    """Fixes the batch to one sequence, as in graphs of torch's exporter and of earlier versions."""
    model = onnx.load(file, load_external_data=False)
    for value in (*model.graph.input, *model.graph.output):
        if value.name != "first_row":
            value.type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, file)


Opens = Callable[..., Opened]


@pytest.fixture(scope="module")
def opens(
    tiny_ir: Callable[..., Path], tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Opens:
    """Opens a runtime, and a second one that runs every sequence from its first token."""

    def opens(kind: str, family: str, options: RuntimeOptions = OPTIONS) -> Opened:
        if kind in ("openvino", "gpu"):
            runtime = OpenVinoSequenceRuntime(tiny_ir(family), options)
            if kind == "gpu":
                pretend_gpu(runtime)
            return runtime, OpenVinoSequenceRuntime(tiny_ir(family), OPTIONS)
        place = build(tiny_model(family), tmp_path_factory.mktemp("branches") / "onnx", "fp32")
        if kind in ("pinned", "device"):
            pin_batch(place / "model.onnx")
        with pytest.MonkeyPatch.context() as patch:
            if kind == "device":
                patch.setattr(onnxruntime_sequence, "_CACHE_DEVICES", {CPU: "cpu"})
            first = OnnxRuntimeSequence(place, options)
        return first, OnnxRuntimeSequence(place, OPTIONS)

    return opens


@pytest.fixture(scope="module", params=CASES)
def opened(request: pytest.FixtureRequest, opens: Opens) -> Iterator[Opened]:
    """Both, of a kind and a family.

    "gpu": blocks cannot be copied. "device": the cache is not in the host's memory, as far as the runtime knows.
    """
    pair = opens(*request.param.split())
    yield pair
    for runtime in pair:
        runtime.close()


def pretend_gpu(runtime: OpenVinoSequenceRuntime) -> None:
    """Lets a fresh runtime treat its cache as one in a GPU's memory: nothing of it can be copied."""
    runtime._shared.is_on_host, runtime._shared.host_caches = False, []
    num_blocks, pool = runtime._blocks.num_blocks, runtime._shared.pool
    runtime._blocks = BranchBlocks(num_blocks, runtime._shared.block_size, LONGEST, copies=False, pool=pool)


@pytest.fixture
def runtime(opened: Opened) -> Branching:
    opened[0].truncate(0)
    assert isinstance(opened[0], Branching)
    return opened[0]


def truth_of(plain: SequenceRuntime) -> Truth:
    """The logits after a sequence, run in one call."""

    def logits(tokens: list[int]) -> NDArray[np.float32]:
        plain.truncate(0)
        return plain.extend(tokens).copy()

    return logits


@pytest.fixture
def truth(opened: Opened) -> Truth:
    return truth_of(opened[1])


def assert_close(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    assert found.dtype == np.float32 and found.shape == expected.shape
    assert np.abs(found - expected).max() < TOLERANCE and (found.argmax(-1) == expected.argmax(-1)).all()


def tokens_of(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(TINY_VOCAB) for _ in range(count)]


@pytest.mark.parametrize("seed", range(4))
def test_branches_have_the_logits_of_fresh_sequences(runtime: Branching, truth: Truth, seed: int) -> None:
    """Random trees of up to eight nodes a call, over block boundaries and to the longest sequence; commits along
    branches and across them, rollbacks; and afterwards no block is lost.
    """
    walk(runtime, truth, seed)


GROWING = ["openvino llama", "gpu llama", "onnxruntime llama", "pinned llama", "device llama"]


@pytest.mark.parametrize("opened", GROWING, indirect=True)
def test_a_cache_that_grows_keeps_what_it_holds(
    opened: Opened, truth: Truth, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same with room for 32 positions at first: it grows in extensions and in branches, and twice at least."""
    runtime = opened[0]
    assert isinstance(runtime, OpenVinoSequenceRuntime | OnnxRuntimeSequence)
    monkeypatch.setattr("outrider.models.runtimes.base.FIRST_POSITIONS", 32)
    reserve, sizes = runtime._reserve, list[int]()

    def noted(num_positions: int) -> None:
        reserve(num_positions)
        sizes.append(runtime._num_positions)

    monkeypatch.setattr(runtime, "_reserve", noted)
    for seed in range(3):
        runtime.truncate(0)
        runtime._num_positions = 0  # of the cache that it gets now
        if isinstance(runtime, OpenVinoSequenceRuntime):
            runtime._shared.pool = runtime._blocks._pool = FreeBlocks(0)
            runtime._shared.num_promised = runtime._blocks.num_blocks = 0
            runtime._shared.host_caches = []
        reserve(1)
        assert runtime._num_positions == 32
        walk(runtime, truth, seed)
    assert {32, LONGEST} < set(sizes)


def walk(runtime: Branching, truth: Truth, seed: int) -> None:
    """Extends, cuts and branches at random, and compares every row with that of a fresh sequence."""
    rng = random.Random(seed)
    text = tokens_of(rng, rng.randint(20, 70))
    assert_close(runtime.extend(text), truth(text))
    known: list[list[int]] = [[]]
    for _ in range(30):
        assert runtime.length == len(text)
        room, action = LONGEST - len(text), rng.random()
        if action < 0.7 and room and runtime.max_branches > 1:
            branches = [
                (rng.choice(known) + tokens_of(rng, rng.choice([1, 1, 1, 2, 30])))[:room]
                for _ in range(rng.randint(1, runtime.max_branches))
            ]
            found = runtime.extend_branches(branches).copy()
            assert_close(found, np.stack([truth(text + branch) for branch in branches]))
            known += branches
        elif action < 0.9 and room:
            new = (rng.choice(known) + tokens_of(rng, rng.randint(0, 2)))[:room] or [1]
            text = text + new
            assert_close(runtime.extend(new), truth(text))
            known = [[], *(b[len(new) :] for b in known if b[: len(new)] == new and len(b) > len(new))]
        else:
            text = text[: max(len(text) - rng.randint(0, 40), 1)]
            if len(text) < runtime.length:
                known = [[]]
            runtime.truncate(len(text))
    runtime.truncate(0)
    if isinstance(runtime, OpenVinoSequenceRuntime):
        assert runtime._blocks.num_free == runtime._blocks.num_blocks
    elif isinstance(runtime, OnnxRuntimeSequence) and runtime._rows is not None:
        assert not runtime._rows.nodes


def test_a_full_tree_at_the_longest_sequence(runtime: Branching, truth: Truth) -> None:
    """It and its branches may end at the last position; one token more is refused and changes nothing."""
    assert runtime.limits.max_positions == LONGEST
    text = tokens_of(random.Random(9), LONGEST - 2)
    runtime.extend(text)
    branches = [[1, 2], [1, 3], [4]]
    expected = np.stack([truth(text + branch) for branch in branches])
    for row, branch in zip(expected, branches, strict=True):
        assert_close(runtime.extend_branches([branch])[0], row)
    assert_close(runtime.extend_branches(branches), expected)
    too_long = pytest.raises(ConfigError, match=f"{LONGEST + 1} tokens do not fit the {LONGEST} positions")
    with too_long:
        runtime.extend_branches([[4], [1, 2, 3]])
    assert runtime.length == len(text)
    assert_close(runtime.extend([1, 3]), expected[1])
    with too_long:
        runtime.extend([1])
    assert runtime.length == LONGEST
    runtime.truncate(LONGEST - 1)
    assert_close(runtime.extend([3]), expected[1])


@pytest.mark.parametrize("opened", ["pinned llama", "device llama"], indirect=True)
def test_a_graph_or_device_of_one_sequence_runs_no_branches(runtime: Branching) -> None:
    """It says so by `max_branches`: a drafter cuts such a sequence back to the fork."""
    assert runtime.max_branches == 1
    with pytest.raises(AssertionError, match="runs no branches"):
        runtime.extend_branches([[1]])


def test_it_is_a_branching_sequence_runtime(runtime: Branching) -> None:
    """A call takes one branch at least and `max_branches` at most, of known tokens. A rollback does not go on."""
    assert runtime.max_branches == 8
    runtime.extend([1])
    wrongs: list[tuple[Callable[[Any], object], Any]] = [
        (runtime.extend, []),
        (runtime.extend, [-1]),
        (runtime.extend, [TINY_VOCAB]),
        (runtime.truncate, 2),
        (runtime.extend_branches, []),
        (runtime.extend_branches, [[]]),
        (runtime.extend_branches, [[TINY_VOCAB]]),
        (runtime.extend_branches, [[1]] * 9),
    ]
    for call, wrong in wrongs:
        with pytest.raises(AssertionError):
            call(wrong)


@pytest.mark.parametrize(
    ("family", "int8", "properties", "most"),
    [("qwen2", True, {}, 0.1), ("llama", False, {"KV_CACHE_PRECISION": "u8"}, 0.05)],
    ids=["int8 weights", "u8 cache"],
)
def test_branches_of_quantized_models_stay_close(
    tiny_ir: Callable[..., Path], family: str, int8: bool, properties: dict[str, str], most: float
) -> None:
    """Activations are quantized on the fly, so kernels that round differently move logits a little, as for `extend`.
    Blocks of a quantized cache are copied with their scales.
    """
    options, rng = replace(OPTIONS, properties=properties), random.Random(2)
    runtime, plain = (OpenVinoSequenceRuntime(tiny_ir(family, int8=int8), options) for _ in range(2))
    text, branches = tokens_of(rng, 45), [tokens_of(rng, 3) for _ in range(8)]
    runtime.extend(text)
    for depth in (1, 2, 3):
        for row, branch in zip(runtime.extend_branches([branch[:depth] for branch in branches]), branches, strict=True):
            plain.truncate(0)
            expected = [plain.extend(part).copy() for part in (text, *([token] for token in branch[:depth]))]
            assert np.abs(row - expected[-1]).max() < most


class Broken:
    """In the place of an infer request or a session: it runs nothing, once it has run so often."""

    def __init__(self, original: Any, num_runs: int = 0) -> None:
        self.original, self.num_runs = original, num_runs

    def __getattr__(self, name: str) -> object:
        return getattr(self.original, name)

    def start_async(self, **options: object) -> None:
        raise RuntimeError("broken")

    def run_with_iobinding(self, binding: object) -> None:
        if not self.num_runs:
            raise RuntimeError("broken")
        self.num_runs -= 1
        self.original.run_with_iobinding(binding)


@pytest.mark.parametrize("opened", ["openvino llama", "onnxruntime llama"], indirect=True)
def test_a_failed_call_forgets_its_branches(
    opened: Opened, runtime: Branching, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was planned but did not run is not taken for run: the sequence stays, and the next calls have the correct
    logits. With ONNX Runtime the fault is the runtime's own.
    """
    text = list(range(40))
    runtime.extend(text)
    parts: list[Any] = [runtime._shared] if isinstance(runtime, OpenVinoSequenceRuntime) else [runtime, runtime._rows]  # type: ignore[attr-defined]
    calls: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: runtime.extend_branches([[1, 2], [1, 3]]), "a step of 2 branches after 40: broken"),
        (lambda: runtime.extend([1, 2, 3]), "a step of 2 tokens after 41: broken"),
    )
    for call, words in calls:
        runtime.extend_branches([[1], [2]])
        with monkeypatch.context() as patch:
            for part in parts:
                if hasattr(part, "request"):
                    patch.setattr(part, "request", Broken(part.request))
                else:
                    patch.setattr(part, "_model", replace(part._model, session=Broken(None)))
            with pytest.raises((RuntimeError, ModelFault), match="broken") as fault:
                call()
        assert fault.type is RuntimeError if len(parts) == 1 else words in str(fault.value)
    assert runtime.length == 40
    if isinstance(runtime, OpenVinoSequenceRuntime):
        assert runtime._blocks.num_nodes == 0 and runtime._blocks.num_blocks - runtime._blocks.num_free == 2
    else:
        assert not parts[1].nodes
    assert_close(runtime.extend_branches([[1, 2, 4]])[0], truth([*text, 1, 2, 4]))
    assert_close(runtime.extend([5]), truth([*text, 5]))


@pytest.mark.parametrize("opened", ["gpu llama", "device llama", "onnxruntime llama"], indirect=True)
def test_a_failed_call_leaves_the_text(runtime: Branching, truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that failed in its second piece, or while a text ran again that was lost with a cache."""
    assert isinstance(runtime, OpenVinoSequenceRuntime | OnnxRuntimeSequence)
    monkeypatch.setattr(onnxruntime_sequence, "_MAX_STEP", 16)
    runtime.extend(text := list(range(40)))
    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises((RuntimeError, ModelFault), match="broken"):
            if isinstance(runtime, OpenVinoSequenceRuntime):
                runtime._shared.num_lost += 1
                patch.setattr(runtime._shared, "request", Broken(runtime._shared.request))
            else:
                runtime._num_positions = 0
                patch.setattr(runtime, "_model", replace(runtime._model, session=Broken(runtime._model.session, 1)))
            runtime.extend(range(40, 60))
        assert runtime.length == 40
    assert_close(runtime.extend([5]), truth([*text, 5]))


@pytest.mark.parametrize("kind", ["openvino", "gpu", "onnxruntime"])
def test_sequences_of_one_model_do_not_touch_each_other(kind: str, opens: Opens) -> None:
    """In turns and in shared calls; each has its own cache, which is free again when it is closed."""
    first, plain = opens(kind, "llama", replace(OPTIONS, num_sequences=3))
    assert isinstance(first, ShareableRuntime)
    sequences = [first, first.open_sequence(), first.open_sequence()]
    with pytest.raises(ConfigError, match="the model holds 3 sequences"):
        first.open_sequence()
    rng, truth = random.Random(3), truth_of(plain)
    texts: list[list[int]] = [[], [], []]
    for round_ in range(6):
        for text, sequence in zip(texts, sequences, strict=True):
            if len(text) > 60:
                del text[20:]
                sequence.truncate(20)
            new = tokens_of(rng, rng.choice([1, 2, 30]))
            text += new
            assert_close(sequence.extend(new), truth(text))
        asked = [[tokens_of(rng, rng.randint(1, 3)) for _ in range(rng.randint(1, 2))] for _ in sequences]
        expected = [truth(text + branch) for text, own in zip(texts, asked, strict=True) for branch in own]
        if isinstance(first, JoiningRuntime):
            rows = first.extend_branches_of(list(zip(sequences, asked, strict=True)))
        else:
            each = [sequence.extend_branches(own) for sequence, own in zip(sequences, asked, strict=True)]  # type: ignore[attr-defined]
            rows = np.concatenate(each)
        assert_close(rows, np.stack(expected))
        if round_ == 3:
            sequences[2].close()
            sequences[2].close()
            sequences[2], texts[2] = first.open_sequence(), []
    for sequence in sequences[1:]:
        sequence.close()
    if isinstance(first, OpenVinoSequenceRuntime):
        first.truncate(0)
        assert first._shared.pool.num_free == first._shared.pool.num_blocks
    first.close()
