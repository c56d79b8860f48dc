"""The parity check: correct exports pass, and every error that speculation would meet is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.tiny_models import make_tiny_tokenizer

from outrider.export.check.advice import load_measured
from outrider.export.check.parity import THRESHOLDS, BatchSteps, SequenceSteps, check_parity
from outrider.export.check.runner import usual_delta
from outrider.export.check.source_logits import LEAST_POSITIONS, ParityReference, Truth, make_reference
from outrider.export.recipes import ExportOptions
from outrider.export.source.model_source import SourceModel
from outrider.models.errors import ExportError, ParityFailure
from outrider.models.text.tokenizer import Tokenizer

VOCAB = 50
WINDOW = 80
Change = Callable[[NDArray[np.float32], int, int], NDArray[np.float32]]


def source(tokens: Sequence[int], num_rows: int = 0) -> NDArray[np.float32]:
    """A model whose logits at each position depend on the last WINDOW tokens up to it."""
    rows = [
        np.random.default_rng(list(tokens[max(0, i + 1 - WINDOW) : i + 1])).normal(size=VOCAB)
        for i in range(len(tokens) - (num_rows or len(tokens)), len(tokens))
    ]
    return np.array(rows, np.float32) * 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer(directory)
    return Tokenizer.from_dir(directory)


@pytest.fixture(scope="module")
def reference(tokenizer: Tokenizer) -> ParityReference:
    """Of a model that is not known to have a window, and whose sequences here do not get beyond it."""
    return make_reference(tokenizer, source, 512)


@pytest.fixture(scope="module")
def far_reference(tokenizer: Tokenizer) -> ParityReference:
    return make_reference(tokenizer, source, 512, [WINDOW])


def kept_in_a_file(reference: ParityReference, place: Path) -> ParityReference:
    Truth(reference, (), ()).save(place)
    return Truth.load(place).reference


class Exact(SequenceSteps):
    """An export that is the source."""

    def __init__(self, max_positions: int = 512) -> None:
        self.max_positions, self.tokens = max_positions, list[int]()

    def run(self, tokens: Sequence[int], num_rows: int) -> NDArray[np.float32]:
        self.tokens += tokens
        return source(self.tokens, num_rows)

    def truncate(self, length: int) -> None:
        del self.tokens[length:]


class Changed(Exact):
    """An export with other rows. change: of rows, given the length of the sequence and the number of new tokens."""

    def __init__(self, change: Change, max_positions: int = 512) -> None:
        super().__init__(max_positions)
        self.change = change

    def run(self, tokens: Sequence[int], num_rows: int) -> NDArray[np.float32]:
        rows = super().run(tokens, num_rows)
        return self.change(rows, len(self.tokens), len(tokens))


def noisy(rows: NDArray[np.float32], *_: int) -> NDArray[np.float32]:
    """As quantized weights are: a little off everywhere, the same whenever the same is computed."""
    noise: NDArray[np.float32] = 0.15 * np.sin(1e4 * rows)
    return rows + noise


def without_window(rows: NDArray[np.float32], length: int, _: int) -> NDArray[np.float32]:
    """Attends everything, however long ago."""
    return rows if length <= WINDOW else -rows


class NoRollback(Exact):
    """Rejected tokens stay in the cache."""

    def truncate(self, length: int) -> None:
        pass


class InTrees(Exact):
    """An export that is the source, and takes five nodes in a call."""

    max_branches = 5

    def run_branches(self, branches: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        return np.concatenate([source([*self.tokens, *branch], 1) for branch in branches])


class NoForks(InTrees):
    """Each node of a call attends those before it."""

    def run_branches(self, branches: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        ways = [sum(map(list, branches[: at + 1]), list[int]()) for at in range(len(branches))]
        return super().run_branches(ways)


def test_the_source_itself_passes_and_is_reported(reference: ParityReference) -> None:
    """Four kinds of step, in the manifest with their numbers."""
    parity = check_parity(Exact(), reference, "fp32", "Exact")
    expected = {"prefill": 48, "cached step": 8, "multi-token step": 8, "step after rollback": 6}
    assert [(stage.name, stage.rows) for stage in parity.stages] == list(expected.items())
    assert all(stage.max_delta == 0 and stage.argmax_agreement == 1 for stage in parity.stages)


def test_beyond_a_window_all_is_run_again(far_reference: ParityReference, tmp_path: Path) -> None:
    """Every compared row attends less than all; a reference survives being kept in a file."""
    kept = kept_in_a_file(far_reference, tmp_path)
    parity = check_parity(Exact(), kept, "fp32", "Exact")
    assert [stage.rows for stage in parity.stages] == [48, 8, 8, 6, 1, 8, 8, 6]
    assert parity.stages[-1].name == f"step after rollback, beyond the window of {WINDOW}"
    assert all(stage.max_delta == 0 for stage in parity.stages)
    far = kept.beyond[f", beyond the window of {WINDOW}"]
    assert len(set(far.main[:48])) > 20 and far.main[:48] == kept.near.main[:48]
    assert len(far.main) - len(far.main_logits) >= WINDOW


def one_token_unseen(rows: NDArray[np.float32], length: int, num_new: int) -> NDArray[np.float32]:
    """Quantized, and off by a little in cached steps only, as where one token of a long past is not attended."""
    return noisy(rows) * np.float32(1.0 if length == num_new else 1.08)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_what_hides_in_the_noise_of_quantization_shows_against_the_exports_own_prefill(
    precision: str, reference: ParityReference
) -> None:
    """Noise is the same in a step and in a prefill; a token that only one of them sees is not."""
    assert check_parity(Changed(noisy), reference, precision, "Noisy").own_delta == 0
    with pytest.raises(ParityFailure, match=r"differ by 0\.0\d+ from its own prefill"):
        check_parity(Changed(one_token_unseen), reference, precision, "OneTokenUnseen")


def test_a_runtime_that_takes_trees_is_run_with_one(far_reference: ParityReference) -> None:
    """Two ways from a fork, level by level, several nodes a call; beyond the window too."""
    stages = check_parity(InTrees(), far_reference, "fp32", "InTrees").stages
    assert [(stage.name, stage.rows) for stage in stages if "tree" in stage.name] == [
        ("nodes of a tree", 12),
        ("nodes of a tree, beyond the window of 80", 12),
    ]


def test_quantization_noise_passes_for_int8_and_not_for_fp32(reference: ParityReference) -> None:
    """Each precision has its own bounds."""
    assert check_parity(Changed(noisy), reference, "int8", "Noisy").stages[0].max_delta > 0.1
    with pytest.raises(ParityFailure, match=r"prefill.*fp32"):
        check_parity(Changed(noisy), reference, "fp32", "Noisy")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (NoRollback, "failed, step after rollback:"),
        # Correct for one new token, wrong for several on the cache.
        (
            lambda: Changed(lambda rows, *_: rows if len(rows) in (1, 48) else rows[::-1]),
            "failed, multi-token step:",
        ),
        (NoForks, "failed, nodes of a tree:"),
        (lambda: Changed(lambda rows, *_: rows * np.float32(np.nan)), "not finite"),
        (lambda: Changed(lambda rows, *_: rows[:, :-1]), r"shape \(48, 49\)"),
        (lambda: Changed(without_window), "failed, prefill, beyond the window of 80:"),
    ],
    ids=["no rollback", "last row only", "no forks", "not finite", "too narrow", "no window"],
)
@pytest.mark.parametrize("precision", THRESHOLDS)
def test_structural_errors_fail_at_every_precision(
    make: Callable[[], Exact], message: str, precision: str, far_reference: ParityReference
) -> None:
    """The message names the kind of step that is wrong, the error how much."""
    with pytest.raises(ParityFailure, match=message) as failure:
        check_parity(make(), far_reference, precision, "Broken")
    assert failure.value.relative_delta > 0.3


def test_sequences_of_the_check_are_not_longer_than_the_exports(tokenizer: Tokenizer) -> None:
    """Those that end at the window never get beyond it; one token more is checked; 24 positions are enough."""
    at_window = make_reference(tokenizer, source, WINDOW, [WINDOW])
    assert len(check_parity(Changed(without_window, WINDOW), at_window, "fp32", "Short").stages) == 4
    beyond = make_reference(tokenizer, source, WINDOW + 1, [WINDOW, 200])
    assert len(check_parity(Exact(WINDOW + 1), beyond, "fp32", "Short").stages) == 8
    with pytest.raises(ParityFailure, match="beyond the window of 80"):
        check_parity(Changed(without_window, WINDOW + 1), beyond, "fp32", "Short")
    least = make_reference(tokenizer, source, LEAST_POSITIONS)
    assert [stage.rows for stage in check_parity(Exact(LEAST_POSITIONS), least, "fp32", "Short").stages] == [8, 8, 8, 6]
    with pytest.raises(ExportError, match="needs 24 positions, the export holds 23"):
        check_parity(Exact(LEAST_POSITIONS - 1), least, "fp32", "Short")


def test_several_windows_and_original_lengths_are_all_passed(tokenizer: Tokenizer) -> None:
    """Every one that a configuration names, by a sequence of its own."""
    reference = make_reference(tokenizer, source, 512, [32, WINDOW], [90, 120])
    names = [stage.name for stage in check_parity(Exact(), reference, "fp32", "Exact").stages]
    assert [name.rpartition(" of ")[2] for name in names[4::4]] == ["32", "80", "90", "120"]


def slightly_off(rows: NDArray[np.float32], *_: int) -> NDArray[np.float32]:
    return rows * np.float32(1 + 5e-5)


def test_an_error_far_beyond_the_usual_of_a_recipe_is_no_rounding(reference: ParityReference) -> None:
    """Within the precision's own bound: the bound is five times the recipe's median where that is lower."""
    for usual, expected in ((None, 1e-4), (1e-5, 5e-5)):
        found = check_parity(Changed(slightly_off), reference, "fp32", "Exact", usual_delta=usual)
        assert found.max_relative_delta == expected
    with pytest.raises(ParityFailure, match=r"at most 4e-06 for fp32"):
        check_parity(Changed(slightly_off), reference, "fp32", "Exact", usual_delta=8e-7)


def test_the_usual_error_is_the_median_of_the_measured_table_and_grows_with_the_model() -> None:
    """By recipe; five times it is above all that was measured of FP32, and far below a cap of 50 that is left out."""
    options = ExportOptions("target", "fp32", "openvino")
    cells = [cell for cell in load_measured().cells if cell.way == "target cpu openvino fp32"]
    errors = sorted(cell.error for cell in cells if cell.outcome == "works")
    tiny, large = (
        cast(SourceModel, SimpleNamespace(architecture=SimpleNamespace(layers=layers, hidden_size=hidden)))
        for layers, hidden in ((2, 64), (8, 256))
    )
    usual = usual_delta(tiny, options, "fp32")
    assert usual is not None and errors[0] < usual < errors[-1] < 5 * usual < 1e-5
    assert usual_delta(large, options, "fp32") == 4 * usual


class Batched(Exact, BatchSteps):
    """A target: a neighbour beside the sequence; `blur` moves rows of either, knowing both positions' ends."""

    def __init__(self, blur: Callable[[int, int, bool], float] = lambda own, other, is_neighbour: 0.0) -> None:
        Exact.__init__(self)
        self.num_positions, self.max_neighbour, self.first_position, self.blur = 512, 448, 0, blur
        self.neighbour, self.last_positions = list[int](), list[int]()

    def begin_neighbour(self, first_position: int) -> None:
        self.neighbour, self.first_position = [], first_position

    def run_both(
        self, tokens: Sequence[int], neighbour: Sequence[int], num_rows: int, num_neighbour_rows: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        self.tokens += tokens
        self.neighbour += neighbour
        own, other = len(self.tokens), self.first_position + len(self.neighbour)
        self.last_positions.append(other - 1)
        rows = source(self.tokens, num_rows) if tokens else np.zeros((0, VOCAB), np.float32)
        return (
            rows + np.float32(self.blur(own, other, False)),
            source(self.neighbour, num_neighbour_rows) + np.float32(self.blur(other, own if tokens else 0, True)),
        )


def test_a_target_is_run_beside_a_longer_sequence(reference: ParityReference, far_reference: ParityReference) -> None:
    """To the last position, or across the original length; behind a window anew in every step."""
    steps = Batched()
    parity = check_parity(steps, reference, "fp32", "Batched")
    assert (parity.stages[-1].name, parity.stages[-1].rows) == ("batch with a longer sequence", 64)
    assert parity.own_delta == 0 and steps.last_positions[-1] == 511 and steps.last_positions[0] == 495
    steps = Batched()
    check_parity(steps, replace(reference, originals=(300,)), "fp32", "Batched")
    assert steps.last_positions[0] < 300 < steps.last_positions[8] < steps.last_positions[-1]
    assert len(check_parity(Batched(), far_reference, "fp32", "Batched").stages) == 9


@pytest.mark.parametrize(
    ("blur", "message"),
    [
        (lambda own, other, is_neighbour: 9.0 * (own + 100 < other), "failed, batch with a longer sequence:"),
        (lambda own, other, is_neighbour: 1.0 * (is_neighbour and other > 0), "differ by .* from its own prefill"),
        (
            lambda own, other, is_neighbour: np.inf if is_neighbour else 0.0,
            "failed, batch with a longer sequence: .*not finite",
        ),
    ],
)
def test_a_sequence_that_changes_with_its_neighbour_fails(
    blur: Callable[[int, int, bool], float], message: str, reference: ParityReference
) -> None:
    """Either of the two, by a difference or by what is not finite."""
    with pytest.raises(ParityFailure, match=message):
        check_parity(Batched(blur), reference, "fp32", "Batched")


def test_an_original_length_is_crossed_by_single_steps(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A reference survives being kept in a file; one that is too long for real sequences is left to batches."""
    made = make_reference(tokenizer, source, 512, (), [90])
    kept = kept_in_a_file(made, tmp_path)
    assert kept.originals == (90,) and not kept.has_windows and list(kept.beyond) == list(made.beyond)
    assert kept.beyond[", across the original length of 90"].prefill == 86
    parity = check_parity(Exact(), kept, "fp32", "Exact")
    assert [stage.rows for stage in parity.stages] == [48, 8, 8, 6, 1, 8, 8, 6]
    assert parity.stages[4].name == "prefill, across the original length of 90"
    assert len(check_parity(Exact(80), make_reference(tokenizer, source, 80, (), [90]), "fp32", "Short").stages) == 4
    assert not make_reference(tokenizer, source, 65536, (), [32768]).beyond
