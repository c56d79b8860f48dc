"""Says in numbers what a chat has taken, for /stats."""

from __future__ import annotations

from statistics import median

from outrider.edge.chat.conversation import Conversation, Turn
from outrider.edge.cli.summary import summary_lines
from outrider.models.counted import counted
from outrider.models.picks.sampling import SamplingParams


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
        lines += [_first_tokens(turns), _reuse(len(turns), last), *_sent_again(turns)]
        lines += [f"last answer, {line}" for line in summary_lines(last.result, is_verbose)]
    return lines


def _first_tokens(turns: list[Turn]) -> str:
    times = [turn.first_token_s * 1e3 for turn in turns]
    middle = f"median {median(times):.0f} ms"
    return f"time to first token: {times[0]:.0f} ms in answer 1, {times[-1]:.0f} ms in the last, {middle}"


def _reuse(number: int, turn: Turn) -> str:
    return (
        f"answer {number}: {turn.result.cached_prompt_tokens} of {turn.num_prompt} prompt tokens were in the server's "
        f"cache; {turn.num_sent} were sent"
    )


def _sent_again(turns: list[Turn]) -> list[str]:
    again = [(number, turn.sent_again) for number, turn in enumerate(turns, start=1) if turn.sent_again is not None]
    if not again:
        return ["no turn was sent again"]
    number, why = again[-1]
    return [f"all was sent again for {counted(len(again), 'answer')}, last for answer {number}: {why}"]
