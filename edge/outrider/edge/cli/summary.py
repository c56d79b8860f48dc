"""Formats the numbers of a generation or a chat, for people and for programs; says why a draft was of no use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Final

from outrider.edge.chat.conversation import Conversation, Turn
from outrider.edge.devices.placement import Placement
from outrider.edge.drafting.calibration import LOOKUP_RANK, QUOTE_RANK
from outrider.edge.drafting.depth import CostModelDepth, FixedDepth
from outrider.edge.lab.comparison import measured_rate, why_no_rate
from outrider.edge.modes.assemble import Agent
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationResult, Mode
from outrider.models.counted import counted
from outrider.models.picks.sampling import SamplingParams

_SOURCES = {LOOKUP_RANK: "lookup", QUOTE_RANK: "documents"}
"""Ranks that stand for what guessed without a model."""


def result_as_json(result: GenerationResult, text: str) -> dict[str, object]:
    """A generation as plain data: the text, who produced each token, and its numbers; None where one is unknown.

    itl is the inter-token latency: tokens that arrive together have gaps of 0 between them. Bytes are of bodies, but
    for those of the headers.
    """
    num_tokens = max(1, len(result.tokens))
    return {
        "mode": result.mode.value,
        "text": text,
        "tokens": list(result.tokens),
        "sources": [source.value for source in result.sources],
        "finish_reason": result.finish_reason,
        "rule": result.rule.value,
        "lossy": result.is_lossy,
        "tokens_per_s": None if (rate := measured_rate(result)) is None else _number(rate),
        "ttft_ms": _number(result.ttft_ms),
        "itl_ms_p50": _number(result.gap_ms(50)),
        "itl_ms_p95": _number(result.gap_ms(95)),
        "acceptance_rate": None if result.acceptance_rate is None else round(result.acceptance_rate, 4),
        "accepted_share": round(result.accepted_share, 4),
        "tokens_per_pass": _number(result.tokens_per_pass),
        "passes_per_token": _number(result.passes_per_token),
        "bytes_up_per_token": _number(result.bytes_up_per_token),
        "bytes_down_per_token": _number(result.bytes_down_per_token),
        "header_bytes_up_per_token": _number(result.wire.headers_up / num_tokens),
        "header_bytes_down_per_token": _number(result.wire.headers_down / num_tokens),
        "num_sessions": result.num_sessions,
        "num_posts": result.num_posts,
        "num_turns": result.num_turns,
        "turns": result.turns or None,
        "num_drafted": result.num_drafted,
        "num_sent": result.num_sent,
        "num_proposed": result.num_proposed,
        "num_recent": result.num_recent,
        "hits": {_SOURCES.get(rank, str(rank)): num for rank, num in sorted(result.hits.items())},
        "waited_ms": _number(result.waited_ms),
        "joules": None if result.joules is None else _number(result.joules),
        "tokens_per_joule": None if result.tokens_per_joule is None else _number(result.tokens_per_joule),
        "draft_error": result.draft_error,
        "depths": [list(change) for change in result.depths],
    }


def ended_by(finish_reason: str) -> str | None:
    """What cut a text short, in words; None where the model ended it."""
    return {"stop": None, "length": "--max-tokens", "context": "the context"}.get(finish_reason, finish_reason)


def summary_lines(result: GenerationResult, is_verbose: bool = False) -> list[str]:
    """A line for a terminal, one for each thing that went wrong, and all other figures if `is_verbose`.

    docs/glossary.md explains every figure.
    """
    label = "LOSSY, not the target's text: " if result.is_lossy else ""
    cut = ended_by(result.finish_reason)
    end = f" (ended by {cut})" if cut is not None else ""
    rate = measured_rate(result)
    speed = f"{rate:.1f} tokens/s" if rate is not None else f"- tokens/s ({why_no_rate(result)})"
    line = f"{label}{result.mode.value}: {counted(len(result.tokens), 'token')}{end}, {speed}"
    if result.mode is not Mode.CLOUD_ONLY:
        line += f", {result.accepted_share:.0%} from accepted drafts".replace("%", " %")
    passes = f"{result.tokens_per_pass:.2f} tokens per" if result.num_passes else "no"
    lines = [f"{line}, {passes} target pass"]
    if is_verbose:
        lines += _verbose_lines(result)
    if result.num_sessions > 1:
        lines.append(f"the connection was lost and resumed {counted(result.num_sessions - 1, 'time')}")
    if result.draft_error is not None:
        lines.append(f"drafting ended early: {result.draft_error}")
    return lines


def _verbose_lines(result: GenerationResult) -> Iterator[str]:
    num_tokens = max(1, len(result.tokens))
    rate = result.acceptance_rate
    accepted = f" ({rate:.0%} of those tested)".replace("%", " %") if rate is not None else ""
    yield f"first token after {result.ttft_ms:.0f} ms; target passes: {result.num_passes}"
    yield (
        f"drafted tokens, the server's own included: {result.num_proposed} verified, {result.num_tested} tested, "
        f"{result.num_accepted} accepted{accepted}"
    )
    if result.num_drafted:
        yield (
            f"this device: guesses at {result.num_drafted} positions, {result.num_sent} guesses sent; "
            f"{hits_words(result.hits)}"
        )
        if result.turns:
            yield f"in turns with the target: {result.num_turns} of {result.num_passes} target passes ({result.turns})"
    yield (
        f"bytes per token: {result.bytes_up_per_token:.0f} up, {result.bytes_down_per_token:.0f} down; "
        f"headers {result.wire.headers_up / num_tokens:.0f} up, {result.wire.headers_down / num_tokens:.0f} down"
    )
    if result.joules is not None:
        yield (
            f"energy: {result.tokens_per_joule:.2f} tokens per joule; this device's processor took {result.joules:.1f} "
            "J meanwhile, other programs included"
        )


def hits_words(hits: Mapping[int, int]) -> str:
    """Tokens of the text that had been guessed, by the rank of the guess."""
    model = {rank: num for rank, num in hits.items() if rank not in _SOURCES}
    later = sum(num for rank, num in model.items() if rank > 1)
    parts = (
        (model.get(0, 0), "first guess"),
        (model.get(1, 0), "second"),
        (later, "third or later"),
        (hits.get(LOOKUP_RANK, 0), "looked up"),
        (hits.get(QUOTE_RANK, 0), "from documents"),
    )
    return "hits: " + (", ".join(f"{num} {name}" for num, name in parts if num) or "none")


def draft_lines(placement: Placement, num_prompt: int, num_tokens: int) -> list[str]:
    """What drafted, and where drafting stopped, if the text exceeds the draft's length."""
    lines = [f"drafted by: {placement.words}"]
    longest = placement.max_positions
    if longest is not None and num_prompt + num_tokens > longest:
        since = "the whole text" if num_prompt >= longest else f"everything after {longest - num_prompt} tokens"
        lines.append(
            f"the draft holds {longest} tokens, prompt included; the prompt has {num_prompt}, so the cloud wrote "
            f"{since} undrafted"
        )
    return lines


def _number(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None


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
    found = agent.estimates
    times = (
        f"a target step takes {found.step_ms:.1f} ms, a drafted token {found.draft_ms:.1f} ms, checking it "
        f"{found.extra_ms:.1f} ms more, a round trip {found.round_trip_ms:.0f} ms"
    )
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
        early = "the text ended before the first draft, or " if agent.estimates.lag_ms is None else ""
        return f"Nothing was drafted: {early}the draft had no guess."
    if not result.num_tested:
        return f"No draft arrived in time: {times}."
    return (
        f"{result.num_accepted} of {result.num_tested} drafted tokens were accepted: this draft does not fit the text."
    )


def stats_lines(
    conversation: Conversation, params: SamplingParams, drafted_by: str | None, is_verbose: bool = False
) -> list[str]:
    """Lines for a terminal. drafted_by: what drafts, and where; None where nothing does. is_verbose: all figures."""
    limit, turns = conversation.facts.max_positions, conversation.turns
    lines = [
        f"target: {conversation.model}; drafted by: {drafted_by or 'nothing'}",
        f"seed {params.seed}, temperature {params.temperature:g}, top_k {params.top_k}, top_p {params.top_p:g}, min_p "
        f"{params.min_p:g}",
        f"{counted(len(turns), 'answer')}; the conversation has {conversation.num_tokens} of {limit} tokens",
    ]
    if conversation.num_dropped:
        lines.append(f"{counted(conversation.num_dropped, 'turn')} dropped, because the context was full")
    if turns:
        last = turns[-1]
        times = [turn.first_token_s * 1e3 for turn in turns]
        lines += [
            f"time to first token: {times[0]:.0f} ms in answer 1, {times[-1]:.0f} ms in the last, median "
            f"{median(times):.0f} ms",
            f"answer {len(turns)}: {last.result.cached_prompt_tokens} of {last.num_prompt} prompt tokens were in the "
            f"server's cache; {last.num_sent} were sent",
            _sent_again(turns),
            *(f"last answer, {line}" for line in summary_lines(last.result, is_verbose)),
        ]
    return lines


def _sent_again(turns: list[Turn]) -> str:
    again = [(number, turn.sent_again) for number, turn in enumerate(turns, start=1) if turn.sent_again is not None]
    if not again:
        return "no turn was sent again"
    number, why = again[-1]
    return f"all was sent again for {counted(len(again), 'answer')}, last for answer {number}: {why}"
