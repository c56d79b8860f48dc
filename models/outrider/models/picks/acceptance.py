"""Accepts drafted tokens by a rule, of a line or of a tree. `rejection` has a module of its own.

| rule      | what is accepted                                   | output                                |
|-----------|----------------------------------------------------|---------------------------------------|
| coupled   | a drafted token that equals the target's pick      | the target's, exactly                 |
| greedy    | the same, with temperature 0                       | the target's, exactly                 |
| rejection | x with probability min(1, p(x) / q(x))             | distributed exactly as the target's   |
| tolerance | x while log p(x) >= log q(x) - delta               | lossy: neither                        |

Never mix shared noise with p/q rejection: the draft's token is not an independent sample then, so the output is biased.

Tolerance is lossy: the text is not the target's. Its p and q are those of target and draft after temperature and
truncation; at temperature 0, those of temperature 1. The target's pick replaces a token that is not accepted. delta is
fixed, or calibrated to an acceptance: after each tested token it moves by step * (acceptance - accepted). So after n
tokens the mean is within |delta_n - delta_0| / (step * n) of the goal, whatever the text (adaptive conformal inference:
Gibbs and Candes 2021, arXiv 2106.00170).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.models.errors import ModelFault
from outrider.models.picks.rejection import probabilities
from outrider.models.picks.sampling import SamplingParams, pick


class Rule(StrEnum):
    """How drafted tokens are accepted; see the table above."""

    COUPLED = "coupled"
    GREEDY = "greedy"
    REJECTION = "rejection"
    TOLERANCE = "tolerance"

    def apply(self, params: SamplingParams) -> SamplingParams:
        """The sampling parameters under this rule."""
        return dataclasses.replace(params, temperature=0.0) if self is Rule.GREEDY else params

    @property
    def needs_evidence(self) -> bool:
        """Whether a draft must also say how likely the draft model found its tokens."""
        return self in (Rule.REJECTION, Rule.TOLERANCE)


DEFAULT_DELTA: Final = 0.5
MAX_DELTA: Final = 30.0
LEAST_LOG: Final = -32.0
"""Of a draft's log-probability: smaller ones are sent as this."""
WARM_UP: Final = 64
"""Tested tokens after which delta moves by the smallest step."""

_FIRST_STEP: Final = 0.5
_LEAST_STEP: Final = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class RuleTerms:
    """A rule and its parameters. Plain values.

    delta: of tolerance, in nats, within MAX_DELTA;
    where `acceptance` is set, the one to start from. acceptance: share of tested tokens that tolerance is calibrated
    to accept; None: `delta` is fixed.
    """

    rule: Rule = Rule.COUPLED
    delta: float = DEFAULT_DELTA
    acceptance: float | None = None

    @property
    def is_lossy(self) -> bool:
        """Whether the text may be another than the target's, also in distribution."""
        return self.rule is Rule.TOLERANCE


PLAIN_TERMS: Final = RuleTerms()


@dataclasses.dataclass(frozen=True, slots=True)
class AcceptedBranch:
    """tokens: the target's. nodes: indices of the drafted tokens that equal all of them but the last."""

    tokens: list[int]
    nodes: list[int]


def accept_tree(
    logits: NDArray[np.float32],
    drafted: Sequence[int],
    parents: Sequence[int],
    params: SamplingParams,
    position: int,
    *,
    stop_ids: Collection[int] = (),
    max_tokens: int | None = None,
) -> AcceptedBranch:
    """The target's tokens from `position` on: the drafted ones that equal its picks, and the one that follows them.

    Goes from each drafted token to the child that equals the target's pick there. Ends early with a token in stop_ids
    or after max_tokens. At least one token; all but the last were drafted.
    drafted, parents: tokens and the index of each one's parent, a lower one; -1: it follows the last committed token.
    logits: [len(drafted) + 1, vocab_size] float32; row 0 is after the last committed token, row i + 1 after drafted
    token i. Picks from the rows that it reaches only; what the others hold does not matter. Raises ModelFault on a
    reached row that is not finite.
    """
    return walk(lambda row, depth: pick(logits[row], params, position + depth), drafted, parents, stop_ids, max_tokens)


def accept_tree_picks(
    picks: Sequence[int | None],
    drafted: Sequence[int],
    parents: Sequence[int],
    *,
    stop_ids: Collection[int] = (),
    max_tokens: int | None = None,
) -> AcceptedBranch:
    """As `accept_tree`, for tokens already picked; None stands for logits that were not finite."""
    return walk(lambda row, depth: finite_pick(picks[row]), drafted, parents, stop_ids, max_tokens)


def walk(
    pick_at: Callable[[int, int], int],
    drafted: Sequence[int],
    parents: Sequence[int],
    stop_ids: Collection[int],
    max_tokens: int | None,
) -> AcceptedBranch:
    """As `accept_tree`, with picks of the caller's own.

    pick_at: the token, given the row's index and the tokens picked before it; called in the text's order, once a token.
    """
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, drafted, strict=True))}
    tokens: list[int] = []
    nodes: list[int] = []
    node: int | None = -1
    while node is not None:
        token = pick_at(node + 1, len(nodes))
        tokens.append(token)
        node = children.get((node, token))
        if token in stop_ids or len(tokens) == max_tokens:
            node = None
        if node is not None:
            nodes.append(node)
    return AcceptedBranch(tokens, nodes)


def finite_pick(token: int | None) -> int:
    """A pick; raises ModelFault for None, which stands for logits that were not finite."""
    if token is None:
        raise ModelFault("the model's logits are not finite; check the export with a parity run")
    return token


def log_probability(row: NDArray[np.float32], params: SamplingParams, token: int) -> float:
    """Natural logarithm of the token's probability, -inf for one that truncation drops; one row, [V] float32."""
    if params.is_greedy:
        params = dataclasses.replace(params, temperature=1.0)
    chance = float(probabilities(row, params)[token])
    return math.log(chance) if chance > 0.0 else -math.inf


def is_tolerated(log_p: float, log_q: float, delta: float) -> bool:
    """The rule."""
    return log_p >= log_q - delta


@dataclasses.dataclass(slots=True)
class DeltaCalibrator:
    """Moves delta so that a share of tested tokens is accepted. goal: that share; None leaves delta as it is."""

    delta: float
    goal: float | None = None
    num_tested: int = 0

    def observe(self, is_accepted: bool) -> None:
        """Takes the outcome of one tested token."""
        if self.goal is None:
            return
        step = max(_LEAST_STEP, _FIRST_STEP * (1.0 - self.num_tested / WARM_UP))
        self.num_tested += 1
        self.delta = min(MAX_DELTA, max(-MAX_DELTA, self.delta + step * (self.goal - is_accepted)))
