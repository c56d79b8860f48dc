"""Tests drafts of the target's own heads on vLLM: alone, beside a device's, and never in a text."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.requests import flat_request
from tests.vllm.gated import STEADY
from tests.vllm.head_pairs import make_eagle, make_mtp
from tests.vllm.serving import IS_CUDA, Reference, start_engine
from tests.vllm.test_equality import Text, mixed, nothing, right, wrong
from tests.waiting import TIMEOUT_S

from outrider.cloud.vllm.engine import VllmEngine
from outrider.cloud.vllm.heads import MTP, NUM_DRAFTED
from outrider.models.errors import ConfigError
from outrider.models.picks.sampling import SamplingParams

PROMPTS = ((5, 17, 99), (7, 8), (40,) * 30, tuple(range(30, 130)))
SAMPLED = SamplingParams(temperature=0.8, seed=3)
NUM_TOKENS = 40
"""As in `Text`."""


@pytest.fixture(scope="module", params=["eagle", "mtp"])
def drafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp(request.param)
    heads = str(make_eagle(root)) if request.param == "eagle" else MTP
    if heads == MTP:
        make_mtp(root)
    # Blocks for some seven texts at once.
    given = f"heads={heads}", "max_model_len=256", "block_size=32"
    is_v2 = IS_CUDA or "OUTRIDER_INTERPRET" in os.environ
    engine = start_engine(root, *given, is_v2=is_v2, scheduler=STEADY, kv_cache_bytes=2 << 20)
    engine.calibrate()
    yield Running(engine, Reference(root))
    engine.stop()
    engine.close()


class Running:
    """An engine with heads, and its texts by transformers and `pick`."""

    def __init__(self, engine: VllmEngine, truth: Reference) -> None:
        self.engine, self.truth = engine, truth

    def run(
        self,
        params: SamplingParams,
        guess: Callable[[Sequence[int], int], list[list[int]]],
        prompts: Sequence[tuple[int, ...]] = PROMPTS,
    ) -> list[int]:
        """Generates the texts side by side, and compares them. Returns each one's passes."""
        texts = []
        for prompt in prompts:
            text = Text(self.engine, self.truth(prompt, NUM_TOKENS, params), guess)
            text.submit(flat_request(prompt, params, NUM_TOKENS, patience_ms=0.0))
            texts.append(text)
        passes = []
        for text in texts:
            assert text.ended.wait(4 * TIMEOUT_S) and text.end is not None
            assert text.end.error is None and text.tokens == text._truth
            passes.append(text.end.usage.target_passes)
        return passes


def test_heads_alone_save_their_passes(drafting: Running) -> None:
    """The prompt's pass has one token, each other one all that the heads drafted and one more."""
    assert drafting.run(SamplingParams(), nothing) == [1 + -(-(NUM_TOKENS - 1) // (NUM_DRAFTED + 1))] * len(PROMPTS)


def test_a_sampled_text_is_the_same_with_heads(drafting: Running) -> None:
    """They guess the likeliest token, which the pick often is."""
    assert all(passes < 0.8 * NUM_TOKENS for passes in drafting.run(SAMPLED, nothing))


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED])
@pytest.mark.parametrize("guess", [right, wrong, mixed])
def test_a_device_beside_the_heads_changes_no_text(
    drafting: Running, guess: Callable[[Sequence[int], int], list[list[int]]], params: SamplingParams
) -> None:
    """Whatever it drafts. A wrong one takes few of the passes that the heads save: the likelier draft is verified."""
    passes = drafting.run(params, guess)
    if guess is wrong and params.is_greedy:
        assert max(passes) <= 14


def test_texts_that_end_with_the_context_are_whole(drafting: Running) -> None:
    """There vLLM's proposer does not run, and fills its drafts up."""
    prompts = [tuple(range(1, 217)), (5, 17, 99)]
    drafting.run(SamplingParams(), nothing, prompts)


def test_more_texts_than_have_blocks_are_whole(drafting: Running) -> None:
    """Each that runs has room for its heads' tokens, too."""
    prompts = [tuple((7 * n + k) % 290 + 1 for k in range(130)) for n in range(40)]
    drafting.run(SamplingParams(), nothing, prompts)


def test_a_model_that_is_no_head_does_not_start(tmp_path: Path) -> None:
    """Said before vLLM starts."""
    head = make_eagle(tmp_path)
    config = head / "config.json"
    config.write_text(config.read_text().replace("EagleLlama", "Llama"))
    with pytest.raises(ConfigError, match="not EAGLE heads"):
        start_engine(tmp_path, f"heads={head}")
