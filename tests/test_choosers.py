"""Tests of what stands between a row of logits and a commit, where a plain pick is not enough."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine_harness import SAMPLED, VOCAB, Collector, plain
from tests.fake_runtime import FakeBatchRuntime
from tests.picking_runtime import PickingRuntime
from tests.requests import flat_request
from tests.test_engine import PROMPTS

from outrider.cloud.engine import Engine, EngineConfig, Policy
from outrider.models.errors import ModelFault
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.chooser import TokenChooser, logprobs_of
from outrider.models.processors.processor_plan import LogitProcessor


def run(runtime: FakeBatchRuntime, draft: tuple[int, ...]) -> Collector:
    """Six tokens with logprobs, some of them drafted."""
    engine = Engine(runtime, EngineConfig(policy=Policy.VERIFY))
    found = Collector()
    engine.submit(flat_request(tuple(PROMPTS[1]), SAMPLED, 6, draft=draft, num_logprobs=3), found)
    while engine.has_work:
        engine.step()
    return found


@pytest.mark.parametrize("kind", [FakeBatchRuntime, PickingRuntime])
def test_logprobs_come_with_their_tokens_whatever_was_drafted(kind: type[FakeBatchRuntime]) -> None:
    """The text is the same as without logprobs, and both are the same with drafts; a GPU's picks, too."""
    truth = plain(PROMPTS[1], SAMPLED, 6)
    bare, drafted = run(kind(vocab_size=VOCAB), ()), run(kind(vocab_size=VOCAB), (*truth[:3], (truth[3] + 1) % VOCAB))
    assert bare.tokens == drafted.tokens == truth
    assert drafted.commits[1].accepted == 2
    shown = [each for commit in drafted.commits for each in commit.logprobs]
    assert shown == [each for commit in bare.commits for each in commit.logprobs]
    assert [each.token for each in shown] == truth
    assert all(len(each.top) == 3 and each.top[0][1] >= each.logprob for each in shown)


def test_logprobs_are_those_of_the_model() -> None:
    """Ties by id; a masked id has no chance."""
    row = np.array([*np.log([0.1, 0.4, 0.1, 0.4]), -np.inf], dtype=np.float32)
    found = logprobs_of(row, 2, 3)
    assert found.logprob == pytest.approx(np.log(0.1))
    assert [token for token, _ in found.top] == [1, 3, 0]
    assert found.top[0][1] == pytest.approx(np.log(0.4))
    assert logprobs_of(row, 1, 0).top == ()


@pytest.mark.parametrize("scale", [0.01, 3.0, 1000.0])
def test_logprobs_of_a_large_vocabulary_are_exact_and_cheap(scale: float) -> None:
    """The error of float32 stays under 1e-5, and no row becomes float64: that took 6.9 ms a token."""
    row = ((np.random.default_rng(0).standard_normal(151_936) + 1.0) * scale).astype(np.float32)
    before = row.copy()
    tracemalloc.start()
    try:
        found = logprobs_of(row, 5, 0)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 1.5 * row.nbytes and np.array_equal(row, before)
    wide = row.astype(np.float64) - row.max()
    wide -= np.log(np.exp(wide).sum())
    assert found.logprob == pytest.approx(wide[5], abs=1e-5)
    top = logprobs_of(row, 5, 20).top
    assert [token for token, _ in top] == np.argsort(-wide, kind="stable")[:20].tolist()
    assert all(value == pytest.approx(wide[token], abs=1e-5) for token, value in top)


class NoneTwice:
    """Forbids every token that was seen."""

    def __init__(self, seen: tuple[int, ...] = ()) -> None:
        self.seen = list(seen)

    @property
    def length(self) -> int:
        return len(self.seen)

    def apply(self, row: NDArray[np.float32]) -> None:
        row[self.seen] = -np.inf

    def advance(self, token: int) -> None:
        self.seen.append(token)

    def truncate(self, length: int) -> None:
        del self.seen[length:]

    def fork(self) -> LogitProcessor:
        return NoneTwice(tuple(self.seen))


def test_a_state_follows_the_tokens_that_are_chosen_and_no_others() -> None:
    """Along an accepted branch, not a rejected one; back where a row is not finite."""
    rows = np.zeros((4, 5), dtype=np.float32)
    rows[:, 2], rows[:, 3] = 2.0, 1.0
    state = NoneTwice()
    chooser = TokenChooser(SamplingParams(), [state])
    # 2 then 3 are drafted, beside 4: 2 and 3 are accepted, and 0 follows.
    branch = chooser.choose(rows, [4, 2, 3], [-1, -1, 1], 7)
    assert (branch.tokens, branch.nodes, state.seen) == ([2, 3, 0], [1, 2], [2, 3, 0])
    rows[1] = np.nan
    with pytest.raises(ModelFault):
        chooser.choose(rows, [1], [-1], 10)
    assert state.seen == [2, 3, 0]
    assert np.isfinite(rows[0]).all()
