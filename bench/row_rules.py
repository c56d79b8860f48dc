"""Measures rules on rows: what a device that knows them has accepted, and what a row costs.

For each kind of rule the reference pair writes the same texts twice, in stop-and-wait with four tokens a block: the
draft with the rules, and the draft without. Both texts are the target's; acceptance and tokens per pass differ.
Acceptance counts: it does not depend on the machine. Then times, per row of 152k logits: a plain pick, penalties after
a prompt of 4,000 tokens, and every rule at its bound; the least of 60.

    python -m bench.row_rules [--prompts 12] [--max-tokens 48]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import numpy as np
from bench.attacks.heavy_rules import worst_rules
from bench.invariant import make_requests
from bench.verifier import Verifier
from rich.console import Console

from outrider.edge.drafting.depth import FixedDepth
from outrider.edge.drafting.drafter import Drafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.lab.laboratory import ALIKE, Lab, open_lab
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import open_drafter
from outrider.edge.modes.stop_and_wait import StopAndWaitAgent
from outrider.edge.results import GenerationRequest, GenerationResult
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.processors.options import ProcessorOptions, processors_of
from outrider.models.processors.processor_plan import ProcessorPlan, apply_all
from outrider.models.wire.fields import ProcessorFields

PARAMS = SamplingParams(temperature=0.8)
DEPTH = 4
VOCAB = 152_064


def kinds(common: list[int]) -> dict[str, ProcessorOptions]:
    """Rules by name. common: the commonest ids of the texts, the commonest first."""
    return {
        "frequency 0.5, presence 0.5": ProcessorOptions(frequency_penalty=0.5, presence_penalty=0.5),
        "repetition 1.3": ProcessorOptions(repetition_penalty=1.3),
        "8 common ids at -100": ProcessorOptions(logit_bias=tuple((token, -100.0) for token in common[:8])),
        "8 common ids as bad words": ProcessorOptions(bad_words=tuple((token,) for token in common[:8])),
        "200 allowed ids": ProcessorOptions(allowed_ids=tuple(common[:200])),
        "typical-p 0.8": ProcessorOptions(typical_p=0.8),
        "XTC 0.5, threshold 0.1": ProcessorOptions(xtc_probability=0.5, xtc_threshold=0.1),
    }


async def write(lab: Lab, drafter: Drafter, requests: list[GenerationRequest]) -> list[GenerationResult]:
    """The texts, one after the other."""
    async with VerifierClient(lab.url, ClientOptions(no_store=True)) as client:
        agent = StopAndWaitAgent(Endpoints([client]), drafter, FixedDepth(DEPTH), Estimates())
        return [await agent.generate(request) for request in requests]


def compare(lab: Lab, requests: list[GenerationRequest], console: Console) -> None:
    """Prints a line for each kind of rule."""
    plain = asyncio.run(write(lab, lab.drafter, requests))
    ids, counts = np.unique([token for each in plain for token in each.tokens], return_counts=True)
    common = ids[np.argsort(-counts, kind="stable")].tolist()
    console.print(f"no rules: {shown(plain)}", highlight=False)
    # It drafts as if there were no rules: only the cloud gets them.
    with closing(open_drafter(lab.draft, lab.choice, num_threads=1).drafter) as blind:
        begin = blind.begin
        blind.begin = lambda prompt, params, plan=None: begin(prompt, params)  # type: ignore[method-assign]
        for name, rules in kinds(common).items():
            ruled = [replace(request, processors=rules) for request in requests]
            knowing = asyncio.run(write(lab, lab.drafter, ruled))
            unaware = asyncio.run(write(lab, blind, ruled))
            same = sum(a.tokens == b.tokens for a, b in zip(knowing, unaware, strict=True))
            console.print(
                f"{name}: knows {shown(knowing)}; does not {shown(unaware)}; {same} of {len(ruled)} texts equal",
                highlight=False,
            )


def shown(results: list[GenerationResult]) -> str:
    """Acceptance, and tokens per pass."""
    accepted, tested = sum(each.num_accepted for each in results), sum(each.num_tested for each in results)
    tokens, passes = sum(len(each.tokens) for each in results), sum(each.num_passes for each in results)
    return f"{accepted / max(1, tested):.2f} accepted, {tokens / passes:.2f} tokens per pass"


def least_ms(call: Callable[[], object]) -> float:
    """Of 60 calls."""
    times = []
    for _ in range(60):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times) * 1e3


def costs(console: Console) -> None:
    """Prints what a row costs."""
    random = np.random.default_rng(0)
    row = (random.standard_normal(VOCAB) * 3).astype(np.float32)
    row[:50] += 12.0
    prompt, text = random.integers(0, VOCAB, 4000).tolist(), random.integers(0, VOCAB, 1000).tolist()
    worst = processors_of(ProcessorFields.model_validate(worst_rules()))
    console.print(f"a plain pick of {VOCAB} ids: {least_ms(lambda: pick(row, PARAMS, 7)):.2f} ms", highlight=False)
    for name, rules in (("penalties", ProcessorOptions(1.2, 0.5, 0.5)), ("every rule at its bound", worst)):
        plan = ProcessorPlan(rules, frozenset({0}), len(text))
        states = plan.states([*prompt, *text], VOCAB)
        for state in states:
            for _ in range(31):
                state.advance(1)  # the text ends as all bad words begin
        changed = apply_all(states, row)
        apply_ms = least_ms(lambda states=states: apply_all(states, row))  # type: ignore[misc]
        pick_ms = least_ms(lambda row=changed, plan=plan: pick(row, PARAMS, 7, plan.narrowing))  # type: ignore[misc]
        console.print(f"{name}: {apply_ms:.2f} ms for the row, then a pick of {pick_ms:.2f} ms", highlight=False)


def main() -> None:
    """The command."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--prompts", type=int, default=12)
    cli.add_argument("--max-tokens", type=int, default=48)
    options = cli.parse_args()
    console = Console(width=150)
    pair = Verifier().pair(None)
    with open_lab(pair.target, pair.draft, cloud_options=ALIKE) as lab:
        compare(lab, make_requests(lab, PARAMS, options.prompts, options.max_tokens), console)
    costs(console)


if __name__ == "__main__":
    main()
