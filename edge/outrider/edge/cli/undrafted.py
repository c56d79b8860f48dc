"""Says why a generation got few or no tokens from its draft."""

from __future__ import annotations

from typing import Final

from outrider.edge.drafting.depth import CostModelDepth, FixedDepth
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.modes.assemble import Agent
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationResult

FEW: Final = 0.05
"""A draft that wrote at most this share of a text counts as useless."""


def why_undrafted(result: GenerationResult, agent: Agent, max_positions: int | None, num_prompt: int) -> str | None:
    """One or two sentences for the user; None where drafts were accepted, or nothing was to be drafted.

    max_positions: longest sequence that the draft holds; None: no limit.
    """
    if not isinstance(agent, StreamAgent) or agent.drafter is None or not result.tokens:
        return None
    if result.num_accepted > FEW * len(result.tokens):
        return None
    if result.draft_error is not None:
        return f"Nothing was drafted after the draft failed: {result.draft_error}."
    if max_positions is not None and num_prompt >= max_positions:
        return f"Nothing was drafted: the prompt has {num_prompt} tokens and the draft holds {max_positions}."
    if isinstance(agent.depth, FixedDepth) and agent.depth.plan().depth == 0:
        return "Nothing was drafted: --depth 0 asks for it."
    times = _times(agent.estimates)
    if isinstance(agent.depth, CostModelDepth) and not agent.depth.is_on:
        depth = agent.depth
        if depth.is_slow:
            return f"Drafting would not pay: {times}. The draft is too slow for this target."
        return (
            f"Drafting would not pay: {times}. A drafted token saves {depth.saved_ms:.1f} ms on average "
            f"({agent.estimates.acceptance:.0%} of a step). To draft again it must save "
            f"{depth.doubt * depth.cost_ms:.1f} ms: {depth.doubt:g} times the {depth.cost_ms:.1f} ms that it costs the "
            "server with its message."
        )
    if not result.num_drafted:
        if agent.estimates.lag_ms is None:
            return "Nothing was drafted: the text ended before the first draft, or the draft had no guess."
        return "Nothing was drafted: the draft had no guess."
    if not result.num_tested:
        return f"No draft arrived in time: {times}."
    return (
        f"{result.num_accepted} of {result.num_tested} drafted tokens were accepted: this draft does not fit the text."
    )


def _times(e: Estimates) -> str:
    return (
        f"a target step takes {e.step_ms:.1f} ms, a drafted token {e.draft_ms:.1f} ms, checking it {e.extra_ms:.1f} ms "
        f"more, a round trip {e.round_trip_ms:.0f} ms"
    )
