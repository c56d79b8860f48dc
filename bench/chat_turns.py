"""Measures the time to the first token of a conversation's turns, with and without what both caches hold of it.

    python -m bench.chat_turns [--widen 1450] [--rtt-ms 25] [--turns 10] [--rounds 3] [--json PATH]

The reference pair has no chat template: copies of its bundles get one, in a temporary directory. The server shares no
prefixes by itself, so all that it reuses comes from the hash of the turns before. Without reuse, all ids are sent and
the draft begins each turn with an empty cache. Rounds alternate between both, with the same questions and seeds, and
the answers must be equal. The time counts from the question: it includes the rendering's round trip.

Exits 1 if answers differ, or if the last turn takes more than 1.5 times the first with reuse.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

from bench.changed_bundle import TURNS, change_bundle
from bench.report import TO_JSON, figures_table, option, parser, write_json
from rich.console import Console

from outrider.edge.chat.conversation import Conversation, Turn, read_facts
from outrider.edge.drafting.drafter import ModelDrafter
from outrider.edge.lab.laboratory import Lab, connected, open_lab
from outrider.edge.modes.assemble import make_agent
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import Mode
from outrider.export.make.reference_pair import export_reference_pair
from outrider.models.picks.sampling import SamplingParams
from outrider.reference import load_prompts

MOST_OF_FIRST: Final = 1.5
SHOWN: Final = (1, 5, 10)
"""Turns that are reported, and the last one."""
QUESTION_CHARS: Final = 60
console = Console()


async def converse(lab: Lab, options: argparse.Namespace, *, is_reused: bool) -> list[Turn]:
    """One conversation. is_reused: both caches keep the turns before."""
    assert isinstance(lab.drafter, ModelDrafter)
    lab.drafter.forget()
    questions = [prompt.text[:QUESTION_CHARS].replace("\n", " ") for prompt in load_prompts(options.turns)]
    async with connected(lab.url, lab.cores, options.rtt_ms) as endpoints:
        agent = make_agent(Mode.STREAM, endpoints, lab.drafter)
        assert isinstance(agent, StreamAgent)
        facts = await read_facts(endpoints)
        conversation = Conversation(agent, facts, lab.tokenizer, facts.tokenizer)
        for question in questions:
            if not is_reused:
                conversation.replace(conversation.messages, "all ids are to be sent")
                lab.drafter.forget()
            await conversation.answer(question, SamplingParams(0.8, seed=7), options.max_tokens)
    if conversation.num_dropped:
        raise SystemExit("the context is too short for these turns; lower --turns or --max-tokens")
    return conversation.turns


def measure(lab: Lab, options: argparse.Namespace) -> dict[bool, list[list[Turn]]]:
    """Conversations with and without reuse, in turns."""
    found: dict[bool, list[list[Turn]]] = {True: [], False: []}
    asyncio.run(converse(lab, options, is_reused=True))  # the first one warms everything up
    for _ in range(options.rounds):
        for is_reused in (True, False):
            found[is_reused].append(asyncio.run(converse(lab, options, is_reused=is_reused)))
    return found


def main() -> int:
    """Measures, prints a table, and returns the exit code."""
    options = parser(
        __doc__,
        {
            "--widen": option(1450.0, "MB of the widened FP32 target; 0: as it is"),
            "--rtt-ms": option(25.0),
            "--turns": option(10),
            "--max-tokens": option(40, "of an answer"),
            "--rounds": option(3),
            **TO_JSON,
        },
    ).parse_args()
    pair = export_reference_pair(widen_mb=options.widen or None)
    with ExitStack() as stack:
        root = Path(stack.enter_context(TemporaryDirectory()))
        target = change_bundle(pair.target, root / "target", template=TURNS).path
        lab = stack.enter_context(open_lab(target, pair.draft))
        found = measure(lab, options)
    times = {
        name: [
            median(conversation[turn].first_token_s for conversation in found[is_reused]) * 1e3
            for turn in range(options.turns)
        ]
        for name, is_reused in (("reused", True), ("sent again", False))
    }
    last = found[True][-1]
    title = f"time to first token, ms; target {options.widen:g} MB, round trip {options.rtt_ms:g} ms"
    table = figures_table(title, "turn", "prompt tokens", "sent", "reused", "sent again")
    for turn in sorted({min(turn, options.turns) for turn in SHOWN} | {options.turns}):
        row = last[turn - 1]
        columns = (turn, row.num_prompt, row.num_sent, *(f"{times[name][turn - 1]:.0f}" for name in times))
        table.add_row(*map(str, columns))
    console.print(table)
    texts = {tuple(turn.text for turn in conversation) for rounds in found.values() for conversation in rounds}
    num_lost = sum(turn.num_sent == turn.num_prompt for conversation in found[True] for turn in conversation[1:])
    ratio = times["reused"][-1] / times["reused"][0]
    console.print(f"turn {options.turns} takes {ratio:.2f} times turn 1; limit {MOST_OF_FIRST}")
    verdict = "equal" if len(texts) == 1 else "DIFFERENT"
    console.print(f"turns with reuse that were sent again: {num_lost}; answers are {verdict}")
    write_json(options.json, {"times_ms": times, "ratio": ratio, "num_lost": num_lost, "is_equal": len(texts) == 1})
    return 0 if len(texts) == 1 and ratio <= MOST_OF_FIRST else 1


if __name__ == "__main__":
    sys.exit(main())
