"""Tests drafts of the target's own heads on vLLM: alone, beside a device's, and never in a text."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from tests.requests import flat_request
from tests.vllm.gated import STEADY
from tests.vllm.head_pairs import make_eagle, make_mtp
from tests.vllm.serving import IS_CUDA, Reference, running_engine
from tests.vllm.test_equality import Guess, mixed, nothing, right, run_all, wrong

from outrider.cloud.vllm.engine import VllmEngine
from outrider.cloud.vllm.heads import NUM_DRAFTED
from outrider.models.picks.sampling import SamplingParams

PROMPTS = ((5, 17, 99), (7, 8), (40,) * 30, tuple(range(30, 130)))
SAMPLED = SamplingParams(temperature=0.8, seed=3)
NUM_TOKENS = 40
"""As in `Text`."""


@pytest.fixture(scope="module", params=["eagle", "mtp"])
def drafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp(request.param)
    heads = make_eagle(root) if request.param == "eagle" else make_mtp(root)
    # Blocks for some seven texts at once.
    given = f"heads={heads}", "max_model_len=256", "block_size=32"
    is_v2 = IS_CUDA or "OUTRIDER_INTERPRET" in os.environ
    with running_engine(root, *given, is_v2=is_v2, scheduler=STEADY, kv_cache_bytes=2 << 20) as engine:
        engine.calibrate()
        yield Running(engine, Reference(root))


@dataclass
class Running:
    """An engine with heads, and its texts by transformers and `pick`."""

    engine: VllmEngine
    truth: Reference

    def run(
        self,
        params: SamplingParams,
        guess: Guess,
        prompts: Sequence[tuple[int, ...]] = PROMPTS,
    ) -> list[int]:
        """Generates the texts side by side, and compares them. Returns each one's passes."""
        truths = [self.truth(prompt, NUM_TOKENS, params) for prompt in prompts]
        requests = [flat_request(prompt, params, NUM_TOKENS, patience_ms=0.0) for prompt in prompts]
        texts = run_all(self.engine, [(*each, guess) for each in zip(requests, truths, strict=True)])
        assert [(text.tokens, text.code) for text in texts] == [(truth, None) for truth in truths]
        return [text.wait().usage.target_passes for text in texts]


def test_heads_alone_save_their_passes(drafting: Running) -> None:
    """The prompt's pass has one token, each other one all that the heads drafted and one more."""
    assert drafting.run(SamplingParams(), nothing) == [1 + -(-(NUM_TOKENS - 1) // (NUM_DRAFTED + 1))] * len(PROMPTS)


def test_a_sampled_text_is_the_same_with_heads(drafting: Running) -> None:
    """They guess the likeliest token, which the pick often is."""
    assert all(passes < 0.8 * NUM_TOKENS for passes in drafting.run(SAMPLED, nothing))


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED])
@pytest.mark.parametrize("guess", [right, wrong, mixed])
def test_a_device_beside_the_heads_changes_no_text(drafting: Running, guess: Guess, params: SamplingParams) -> None:
    """Whatever it drafts. A wrong one takes few of the passes that the heads save: the likelier draft is verified."""
    passes = drafting.run(params, guess)
    assert not (guess is wrong and params.is_greedy) or max(passes) <= 14


@pytest.mark.parametrize(
    "prompts",
    [
        # There vLLM's proposer does not run, and fills its drafts up.
        pytest.param([tuple(range(1, 217)), (5, 17, 99)], id="to the context's end"),
        # Each that runs has room for its heads' tokens, too.
        pytest.param([tuple((7 * n + k) % 290 + 1 for k in range(130)) for n in range(40)], id="more than have blocks"),
    ],
)
def test_texts_are_whole(drafting: Running, prompts: list[tuple[int, ...]]) -> None:
    drafting.run(SamplingParams(), nothing, prompts)
