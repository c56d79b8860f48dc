"""Runs tests/test_cloud_verify.py on vLLM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests import test_cloud_verify as same
from tests.serving import EOS_ID
from tests.vllm.serving import SharedEngine, shared_by

from outrider.models.picks.sampling import SamplingParams

globals().update(shared_by(same))


@pytest.fixture(scope="module", autouse=True)
def endless_prefix(vllm: SharedEngine) -> Iterator[None]:
    """The module's items go on for some tokens; the model's own end in them would be right, and another answer."""
    sampled = SamplingParams(temperature=same.SAMPLED["temperature"], seed=int(same.SAMPLED["seed"]))

    def has_no_end(prefix: list[int]) -> bool:
        texts = [vllm.target_tokens(prefix, 12, params) for params in (SamplingParams(), sampled)]
        return not any(EOS_ID in text for text in texts)

    others = ([1 + (7 * seed + 31 * i) % 250 for i in range(len(same.PREFIX))] for seed in range(100))
    prefix = next(prefix for prefix in (same.PREFIX, *others) if has_no_end(prefix))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(same, "PREFIX", prefix)
        yield
