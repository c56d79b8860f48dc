"""Tests the check of a device's picks at the start: silent where all is right, and in words where a build is wrong."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from outrider.cloud.seam import CommitEvent, EndEvent, GenerateRequest, SequenceUsage, Sink
from outrider.cloud.vllm import known_text, self_check
from outrider.models.errors import RequestError, RuntimeUnavailable
from outrider.models.picks import noise_torch, row_terms
from outrider.models.processors import logprobs_torch, rows_torch
from outrider.models.processors.chooser import TokenLogprobs
from outrider.models.runtimes.base import ModelLimits

CPU = torch.device("cpu")


@pytest.mark.parametrize("vocab_size", [300, 5000, 50_257])
def test_this_machine_picks_as_numpy_does(vocab_size: int) -> None:
    """For vocabularies of any size, also those that are smaller than the rows."""
    assert self_check.row_faults(CPU, vocab_size) == []


def reversed_bits(spread: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A mask whose bytes are read from their other end."""
    order = torch.tensor([int(f"{byte:08b}"[::-1], 2) for byte in range(256)])
    return lambda masks, *more: spread(order[masks.long()].to(torch.uint8), *more)


def shifted(summaries: Callable[..., Any]) -> Callable[..., Any]:
    """Sums of probabilities that are 1 % too large."""

    def wrong(*args: Any) -> Any:
        norms, *more = summaries(*args)
        return (norms + 0.01, *more)

    return wrong


@pytest.mark.parametrize(
    ("module", "name", "wrong", "told"),
    [
        (noise_torch, "_TOKEN_FACTOR", lambda right: right + 2, "noise: token "),
        (noise_torch, "_FACTORS", lambda right: (right[0], right[1] + 2), "noise: token "),
        (row_terms, "_COIN", lambda right: right + right.dtype.type(2), "XTC"),
        (rows_torch, "_spread", reversed_bits, "a grammar's mask: "),
        (logprobs_torch, "_summaries", shifted, "noise: other logprobs"),
    ],
)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, wrong: Callable[[Any], Any], told: str
) -> None:
    """A constant of the hash, the coin's, a mask's bits, a sum: each is named by the rule that it breaks."""
    monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    faults = self_check.row_faults(CPU, 1000)
    assert any(fault.startswith(told) for fault in faults), faults
    assert all(": " in fault for fault in faults)


def company(change: Callable[[GenerateRequest, int], float]) -> known_text.Submit:
    """An engine of greedy texts. change: what is added to the second likeliest logit, by request and token."""

    def submit(request: GenerateRequest, sink: Sink) -> None:
        tokens = tuple(sum(request.prompt) % 100 + place for place in range(request.max_tokens))
        rows = []
        for place, token in enumerate(tokens):
            second = -1.5 + change(request, place)
            rows.append(TokenLogprobs(token, -0.5, ((token, -0.5), (200, second), (201, -3.0))))
        sink(CommitEvent(0, tokens, 0, 0, logprobs=tuple(rows)))
        sink(EndEvent("length", SequenceUsage()))

    return submit


def test_bitwise_is_tried_before_it_is_promised() -> None:
    """The last bit of one logit, in one step that verifies drafts, is enough to refuse; a sum's rounding is not."""
    limits = ModelLimits(300, 1000)
    known_text.check_same_text(company(lambda request, place: 0.0), limits)
    known_text.check_same_text(company(lambda request, place: 1e-12 * len(request.hints.draft)), limits)
    bit = 2.0**-23  # of a float32 from 1 to 2
    wrong = company(lambda request, place: bit * (len(request.hints.draft) == 8 and place == 3))
    with pytest.raises(
        RuntimeUnavailable, match="token 3 of a text has other logits in a step that verifies 8 drafted"
    ):
        known_text.check_same_text(wrong, limits)
    known_text.check_same_text(wrong, ModelLimits(300, 56))


def answers(*texts: tuple[int, ...], error: RequestError | None = None) -> known_text.Submit:
    """An engine that commits these texts, one after the other."""
    left = list(texts)

    def submit(request: GenerateRequest, sink: Sink) -> None:
        sink(CommitEvent(0, left.pop(0), 0, 0))
        sink(EndEvent("length" if error is None else "error", SequenceUsage(), error))

    return submit


def test_a_known_text_is_the_one_that_noise_picks() -> None:
    """At temperature 100 logits that differ by 200 change nothing of it; another text is refused, as is none."""
    limits = ModelLimits(300, 1000)
    text = known_text.TEXT
    known_text.check_known_text(answers(text, text[:4]), limits)
    for wrong in (answers((*text[1:], 11), text[:4]), answers(text, text[:5])):
        with pytest.raises(RuntimeUnavailable, match=r"a known text: tokens \[.*\], expected \[.*does not start"):
            known_text.check_known_text(wrong, limits)
    with pytest.raises(RuntimeUnavailable, match="a known text failed in vLLM: broken"):
        known_text.check_known_text(answers(text, error=RequestError("model_fault", "broken")), limits)
    known_text.check_known_text(answers(), ModelLimits(14, 1000))
    known_text.check_known_text(answers(), ModelLimits(300, 16))
