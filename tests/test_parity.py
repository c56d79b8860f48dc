"""The parity check: right exports pass, and every way of being wrong that speculation would hit is named."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.export.parity import ParityReference, check_parity
from outrider.models.errors import ExportError

VOCAB = 50
MAIN = tuple(range(64))
OTHER = (*MAIN[:51], *range(100, 106))


def logits_of(tokens: Sequence[int]) -> NDArray[np.float32]:
    """A model whose logits at each position depend on every token up to it."""
    rows = [np.random.default_rng(hash(tuple(tokens[: i + 1])) % 2**32).normal(size=VOCAB) for i in range(len(tokens))]
    return np.array(rows, np.float32) * 3


REFERENCE = ParityReference(MAIN, OTHER, logits_of(MAIN), logits_of(OTHER))


class Exact:
    """An export that is the source."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def run(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        self.tokens += tokens
        return logits_of(self.tokens)[-len(tokens) :]

    def truncate(self, length: int) -> None:
        del self.tokens[length:]


class Noisy(Exact):
    """As quantized weights are: a little off everywhere."""

    def run(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        noise = np.random.default_rng(1).normal(size=(len(tokens), VOCAB)).astype(np.float32)
        return super().run(tokens) + 0.05 * noise


class NoRollback(Exact):
    """Rejected tokens stay in the cache."""

    def truncate(self, length: int) -> None:
        pass


class LastRowOnly(Exact):
    """Right for one new token, wrong for several on the cache."""

    def run(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        rows = super().run(tokens)
        return rows if len(tokens) in (1, 48) else rows[::-1]


class NotFinite(Exact):
    def run(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        return super().run(tokens) * np.float32(np.nan)


class TooNarrow(Exact):
    def run(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        return super().run(tokens)[:, :-1]


def test_the_source_itself_passes_and_is_reported() -> None:
    """Four kinds of step, in the manifest with their numbers."""
    parity = check_parity(Exact(), REFERENCE, "fp32", "Exact")
    assert [stage.name for stage in parity.stages] == [
        "prefill", "cached step", "multi-token step", "step after rollback",
    ]  # fmt: skip
    assert [stage.rows for stage in parity.stages] == [48, 8, 8, 6]
    assert all(stage.max_delta == 0 and stage.argmax_agreement == 1 for stage in parity.stages)


def test_quantization_noise_passes_for_int8_and_not_for_fp32() -> None:
    """Each precision has its own bounds."""
    assert check_parity(Noisy(), REFERENCE, "int8", "Noisy").stages[0].max_delta > 0.1
    with pytest.raises(ExportError, match=r"prefill.*fp32"):
        check_parity(Noisy(), REFERENCE, "fp32", "Noisy")


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (NoRollback(), "step after rollback"),
        (LastRowOnly(), "multi-token step"),
        (NotFinite(), "not finite"),
        (TooNarrow(), r"shape \(48, 49\)"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_structural_errors_fail_at_every_precision(steps: Exact, message: str, precision: str) -> None:
    """The message names the kind of step that is wrong."""
    steps.tokens.clear()
    with pytest.raises(ExportError, match=message):
        check_parity(steps, REFERENCE, precision, "Broken")
