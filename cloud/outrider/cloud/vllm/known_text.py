"""Checks at the start, with texts through all of vLLM, that it picks as it should, and bitwise where it has to.

The known text: at temperature 100, among four allowed tokens, the noise decides each pick. The best token leads by
2.39, which is what 239 of a logit's units are worth there. So the text is known whatever the model is, and tells
whether positions, seed, hash, masks and the verification of drafts are right on the way through scheduler and workers.
Names that vLLM keeps while their meaning changes (V1's `num_tokens_no_spec`, say) cannot pass it.

The same text: vLLM promises of its batch-invariant kernels that other requests change nothing, and says nothing of
drafts. So one text is generated alone, in company, from cached blocks and with drafts of several lengths, and the
logits of its likeliest tokens are compared to the last bit, as far as their differences tell them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from outrider.cloud.seam import CommitEvent, DraftHints, EndEvent, Event, GenerateRequest, PickOptions, Sink
from outrider.cloud.vllm.checks import refuse_picks
from outrider.models.errors import RuntimeUnavailable
from outrider.models.picks.sampling import SamplingParams, gumbel
from outrider.models.processors.chooser import TokenLogprobs
from outrider.models.processors.options import ProcessorOptions
from outrider.models.runtimes.base import ModelLimits

Submit = Callable[[GenerateRequest, Sink], object]

PROMPT: Final = tuple(range(1, 9))
IDS: Final = (11, 12, 13, 14)
SEED: Final = 14_005_859
"""Found by search, for these positions and ids."""
TEXT: Final = tuple(int(IDS[gumbel(SEED, position, np.array(IDS)).argmax()]) for position in range(8, 16))
_NUM_RIGHT: Final = 3

_LONG_PROMPT: Final = 40
"""Tokens: more than a block of the cache, on a GPU."""
_LONG_TEXT: Final = 16
_NUM_COMPANY: Final = 7
_DRAFTED: Final = (1, 4, 8, 15)
_NUM_LIKELIEST: Final = 20
_LAST_BIT: Final = 1e-9
"""Far below the last bit of a logit in float32, and above that of a difference in float64."""
_WAIT_S: Final = 120.0


def check_known_text(submit: Submit, limits: ModelLimits) -> None:
    """Generates the known text, and verifies a draft of it that is wrong at one place. Raises RuntimeUnavailable where
    either comes out otherwise. submit: as the engine's. limits: a model of fewer than 15 tokens or 17 positions has no
    such text, and passes.
    """
    if limits.vocab_size <= max(IDS) or limits.max_positions <= len(PROMPT) + len(TEXT):
        return
    wrong = next(token for token in IDS if token != TEXT[_NUM_RIGHT])
    draft = (*TEXT[:_NUM_RIGHT], wrong, *TEXT[_NUM_RIGHT + 1 :])
    options = PickOptions(SamplingParams(temperature=100.0, seed=SEED), ProcessorOptions(allowed_ids=IDS))
    for expected, asked in (
        (TEXT, GenerateRequest(PROMPT, options, len(TEXT), hints=DraftHints(patience_ms=0.0))),
        (TEXT[: _NUM_RIGHT + 1], _item(PROMPT, options, draft)),
    ):
        (found,) = _generate(submit, [asked])
        if tuple(found.tokens) != expected:
            refuse_picks("vLLM", [f"a known text: tokens {found.tokens}, expected {list(expected)}"])


def check_same_text(submit: Submit, limits: ModelLimits) -> None:
    """Generates a text in several ways. Raises RuntimeUnavailable where a logit is another one in one of them.

    submit, limits: as above; a model of fewer than 57 positions is not checked.
    """
    if limits.max_positions <= _LONG_PROMPT + _LONG_TEXT:
        return
    options = PickOptions(SamplingParams(), num_logprobs=_NUM_LIKELIEST)
    prompts = [
        tuple((index * 7 + place * 3) % (limits.vocab_size - 1) + 1 for place in range(_LONG_PROMPT - index))
        for index in range(1 + _NUM_COMPANY)
    ]
    hints = DraftHints(patience_ms=0.0)
    requests = [GenerateRequest(prompt, options, _LONG_TEXT, hints=hints) for prompt in prompts]
    (alone,) = _generate(submit, requests[:1])
    tokens = alone.tokens
    ways = {"in company": _generate(submit, requests)[0], "from cached blocks": _generate(submit, requests[:1])[0]}
    for count in _DRAFTED:
        asked = _item(prompts[0], options, tuple(tokens[:count]))
        (ways[f"in a step that verifies {count} drafted tokens"],) = _generate(submit, [asked])
    for way, found in ways.items():
        for place, (here, there) in enumerate(zip(found.logprobs, alone.logprobs, strict=False)):
            if not _is_same(here, there):
                raise RuntimeUnavailable(
                    f"--exact bitwise cannot be kept here: token {place} of a text has other logits {way} than alone. "
                    "Leave it out; texts are then exact up to near ties"
                )


def _is_same(here: TokenLogprobs, there: TokenLogprobs) -> bool:
    """Whether two rows have the same logits, but for what all of them have in common."""
    if here.token != there.token or [token for token, _ in here.top] != [token for token, _ in there.top]:
        return False
    pairs = zip(here.top, there.top, strict=True)
    return all(abs((a - here.top[0][1]) - (b - there.top[0][1])) < _LAST_BIT for (_, a), (_, b) in pairs)


def _item(prompt: tuple[int, ...], options: PickOptions, draft: tuple[int, ...]) -> GenerateRequest:
    """One of /v1/verify."""
    return GenerateRequest(prompt, options, len(draft) + 1, hints=DraftHints(draft=draft), once=True)


class _Text:
    """A sink that keeps a text."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.end: EndEvent | None = None
        self.ended = threading.Event()

    def __call__(self, event: Event) -> None:
        if isinstance(event, CommitEvent):
            self.tokens += event.tokens
            self.logprobs += event.logprobs
        elif isinstance(event, EndEvent):
            self.end = event
            self.ended.set()


def _generate(submit: Submit, requests: Sequence[GenerateRequest]) -> list[_Text]:
    """The texts, all at once. Raises RuntimeUnavailable."""
    texts = [_Text() for _ in requests]
    for request, text in zip(requests, texts, strict=True):
        submit(request, text)
    for text in texts:
        if not text.ended.wait(_WAIT_S) or text.end is None:
            raise RuntimeUnavailable("a known text does not end in vLLM; its log is above")
        if text.end.error is not None:
            raise RuntimeUnavailable(f"a known text failed in vLLM: {text.end.error}; its log is above")
    return texts
