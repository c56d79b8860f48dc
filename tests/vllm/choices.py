"""Checks of what a chooser adds on vLLM, on both model runners: logprobs, and later rules, with and without drafts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.serving import TIMEOUT_S
from tests.vllm.test_equality import NUM_TOKENS, Text, mixed, nothing, right

from outrider.cloud.seam import CommitEvent, Event, GenerateRequest
from outrider.cloud.vllm.engine import VllmEngine
from outrider.models.sampling import SamplingParams
from outrider.models.transforms.chooser import TokenLogprobs


class Chosen(Text):
    """Keeps the logprobs, too."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, CommitEvent):
            assert [each.token for each in event.logprobs] == list(event.tokens)
            self.logprobs: list[TokenLogprobs] = [*getattr(self, "logprobs", []), *event.logprobs]
        super().__call__(event)


@pytest.mark.parametrize("guess", [nothing, right, mixed])
def test_logprobs_are_the_models_and_change_no_text(
    engine: VllmEngine, texts: list[tuple[tuple[int, ...], SamplingParams, list[int]]], guess: object
) -> None:
    """Half of the texts ask for them, beside others that do not."""
    running = []
    for index, (prompt, params, truth) in enumerate(texts[:10]):
        text = (Chosen if index % 2 else Text)(engine, truth, guess)  # type: ignore[arg-type]
        count = 3 if index % 2 else None
        text.submit(GenerateRequest(prompt, params, NUM_TOKENS, patience_ms=0.0, num_logprobs=count))
        running.append(text)
    for text in running:
        assert text.ended.wait(4 * TIMEOUT_S)
    assert [text.tokens for text in running] == [truth for _, _, truth in texts[:10]]
    if guess is not nothing:
        assert sum(text.end.usage.accepted_tokens for text in running if text.end) > NUM_TOKENS
    shown = [text.logprobs for text in running if isinstance(text, Chosen)]
    _check(shown, [truth for _, _, truth in texts[1:10:2]])


def _check(shown: Sequence[Sequence[TokenLogprobs]], truths: Sequence[Sequence[int]]) -> None:
    for own, truth in zip(shown, truths, strict=True):
        assert [each.token for each in own] == list(truth)
        assert all(len(each.top) == 3 and each.top[0][1] >= each.logprob for each in own)


def test_an_item_has_the_logprobs_of_all_its_passes(
    engine: VllmEngine, texts: list[tuple[tuple[int, ...], SamplingParams, list[int]]]
) -> None:
    """One report, however many steps it took."""
    prompt, params, truth = texts[0]
    text = Chosen(engine, truth, nothing)
    draft = (*truth[:5], truth[6])
    text.submit(GenerateRequest(prompt, params, NUM_TOKENS, draft=draft, once=True, num_logprobs=0))
    assert text.ended.wait(TIMEOUT_S)
    assert text.tokens == truth[:6] and len(text.logprobs) == 6
