"""Tests stop-and-wait on a server that runs fewer drafted tokens than sent, as it may when its step is full."""

from __future__ import annotations

import json
from collections.abc import Sequence

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.agents import VOCAB, Clock, drafter, generate, scripted_client, whole
from tests.always_wrong import AlwaysWrongDrafter
from tests.serving import serve_fake, target_tokens
from tests.waiting import run

from outrider.cloud.engine import EngineConfig
from outrider.edge.drafting.depth import FixedDepth
from outrider.edge.drafting.drafter import Drafter, ModelDrafter, NgramDrafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.stop_and_wait import StopAndWaitAgent
from outrider.edge.results import GenerationRequest, GenerationResult, Mode
from outrider.models.client.client import VerifierClient
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes.base import ModelLimits
from outrider.models.wire.verify import VerifyAnswer, VerifyRequest, VerifyResult

PERIOD = 5


class LoopRuntime:
    """A `SequenceRuntime` that repeats 0, 1, ... PERIOD - 1: after token t comes t + 1, modulo PERIOD."""

    limits = ModelLimits(vocab_size=PERIOD, max_positions=4096)

    def __init__(self) -> None:
        self._tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        self._tokens.extend(tokens)
        return np.where(np.arange(PERIOD) == (self._tokens[-1] + 1) % PERIOD, 10.0, 0.0).astype(np.float32)

    def truncate(self, length: int) -> None:
        del self._tokens[length:]

    def close(self) -> None:
        """Nothing to release."""


class LoopServer:
    """Verifies texts in that language, at most `max_run` drafted tokens per item."""

    def __init__(self, max_run: int) -> None:
        self._max_run = max_run
        self.drafts: list[list[int]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        (item,) = VerifyRequest.model_validate(json.loads(request.content)).items
        self.drafts.append(item.draft)
        last = item.prefix[-1]
        tokens: list[int] = []
        for drafted in [*item.draft[: self._max_run], None]:
            last = (last + 1) % PERIOD
            tokens.append(last)
            if drafted != last:
                break
        answer = VerifyAnswer(results=[VerifyResult(accepted=len(tokens) - 1, tokens=tokens)])
        return httpx.Response(200, text=answer.model_dump_json())


async def blocks(
    cloud: str | VerifierClient, request: GenerationRequest, draft: Drafter, depth: int = 8
) -> GenerationResult:
    """One text, `depth` drafted tokens per block."""
    return await generate([cloud], request, draft, mode=Mode.STOP_AND_WAIT, depth=FixedDepth(depth))


@pytest.mark.parametrize("max_run", [0, 1, 3])
@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_what_was_not_verified_is_drafted_again_in_its_place(kind: str, max_run: int) -> None:
    """In a repeating text every block has full depth and is accepted, so no pass is wasted."""
    draft: Drafter = ModelDrafter(LoopRuntime()) if kind == "model" else NgramDrafter()
    server, prompt = LoopServer(max_run), tuple(i % PERIOD for i in range(2 * PERIOD))
    result = run(blocks(scripted_client(server), GenerationRequest(prompt, max_tokens=40), draft))
    assert result.tokens == tuple((len(prompt) + i) % PERIOD for i in range(40))
    assert result.num_passes == 40 // (max_run + 1)
    known = 0
    for drafted in server.drafts:
        assert drafted == [(known + i) % PERIOD for i in range(min(8, 40 - known - 1))]
        known += max_run + 1
    assert result.num_accepted == result.num_tested == max_run * result.num_passes


async def test_the_time_of_a_step_is_learned_from_the_answers() -> None:
    """It was 40 ms for ever. What a call takes beyond its step and its drafted tokens is the round trip."""
    estimates, clock = Estimates(), Clock()

    def verify(request: httpx.Request) -> httpx.Response:
        clock.now += 0.030
        answer = VerifyAnswer(results=[VerifyResult(tokens=[1])], step_ms=8.0, draft_token_ms=0.5)
        return httpx.Response(200, text=answer.model_dump_json())

    async with scripted_client(verify) as client:
        agent = StopAndWaitAgent(Endpoints([client]), None, FixedDepth(0), estimates, clock)
        await agent.generate(GenerationRequest((1, 2), max_tokens=2))
    assert (estimates.step_ms, estimates.extra_ms) == (8.0, 0.5)
    assert estimates.round_trip_ms == pytest.approx(22.0)


@pytest.mark.parametrize("step_tokens", [1, 2, 4, 7])
@pytest.mark.parametrize("kind", ["perfect", "good", "wrong", "ngram"])
def test_a_server_with_small_steps_commits_the_same_text(kind: str, step_tokens: int) -> None:
    """A real engine whose step budget is smaller than a block."""
    prompt = (5, 6, 7, 5, 6, 7, 5, 6)
    drafts: dict[str, Drafter] = {
        "perfect": drafter(1.0),
        "good": drafter(0.8),
        "wrong": AlwaysWrongDrafter(drafter(1.0), VOCAB),
        "ngram": NgramDrafter(),
    }
    request = whole(prompt, SamplingParams(), 30)
    with serve_fake(config=EngineConfig(step_tokens=step_tokens)) as server:
        result = run(blocks(server.url, request, drafts[kind]))
    assert result.tokens == tuple(target_tokens(prompt, 30))
    if kind == "perfect":
        assert result.num_tested == result.num_accepted


def test_a_prompt_that_leaves_no_room_for_its_draft_loses_no_pass() -> None:
    """A prompt of almost a whole step shortens the first block's draft; later blocks are full."""
    prompt = tuple(1 + i % (VOCAB - 1) for i in range(250))
    request = whole(prompt, SamplingParams(), 28)
    with serve_fake(config=EngineConfig(step_tokens=256)) as server:
        result = run(blocks(server.url, request, drafter(1.0)))
    assert result.tokens == tuple(target_tokens(prompt, 28))
    assert result.num_passes == 4  # 7, 9, 9 and the 3 that are left
