"""Checks the invariant on the reference pair: whatever happens to drafts and network, the tokens are the target's own.

Prompts x {greedy, temperature 0.8, with top-p 0.9, with rules on rows, inside JSON schemas} x every mode of
`bench.invariant_modes`, each text compared token by token with the plain loop of `bench.plain_text` on the same
runtime, same seed (with `--engine vllm`: on transformers). The schemas are those of bench/data, each with a prompt of
its own; every second text has a penalty, too. The cloud shares prefixes and has too few blocks for all
texts at once. Prints the counts, and for each difference whether a near-tie in float32 explains it. Exits 1 when more
than one token in 10,000 differs, or one without such a reason.

    python -m bench.invariant [--prompts 200] [--max-tokens 64] [--widen MB] [--tree tree] [--json PATH]
    python -m bench.invariant --engine vllm --server PYTHON    # verified by vLLM, which this interpreter imports

With `--tree tree` the cloud verifies trees, also on OpenVINO, where this gives up bitwise equal logits.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bench.invariant_modes import CUT, FAULTY, MODES, generate_all
from bench.pairs import VERIFIER_OPTIONS, Verifier, verifier_of
from bench.plain_text import Difference, PlainModel, first_difference, plain_texts
from bench.processes import engine_counts
from bench.report import TO_JSON, figures_table, option, parser, write_json
from rich.console import Console

from outrider.cloud.engine.config import TreeForm
from outrider.edge.devices.placement import DraftChoice
from outrider.edge.lab.laboratory import Lab, open_lab
from outrider.edge.modes.assemble import open_drafter
from outrider.edge.results import GenerationRequest, GenerationResult
from outrider.models.grammar.compiler import GrammarCompiler
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.options import PLAIN, ProcessorOptions
from outrider.reference import load_prompts

SAMPLINGS = {
    "greedy": SamplingParams(),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "processors": SamplingParams(temperature=0.8),
    "grammar": SamplingParams(temperature=0.8),
}
GRAMMAR = "grammar"
RULES = {
    "processors": ProcessorOptions(
        repetition_penalty=1.1,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias=((40, -100.0), (41, 2.0), (42, -3.0)),
        bad_words=((43,), (44, 45)),
        min_tokens=24,
    )
}
"""By sampling; the others have none, but see `make_grammar_requests`."""
PENALTY = ProcessorOptions(frequency_penalty=0.3)
LIMIT = 1e-4
SCHEMAS = Path(__file__).parent / "data" / "schemas.jsonl"
"""Such as people publish, each with a title; written for these benchmarks."""


@dataclass(slots=True)
class Count:
    """Counts of one mode and one sampling. num_tokens: compared, up to the first difference of each text."""

    num_texts: int = 0
    num_tokens: int = 0
    num_accepted: int = 0
    num_tested: int = 0
    num_resumed: int = 0
    num_failed_posts: int = 0
    differences: list[Difference] = field(default_factory=list)

    def add(self, result: GenerationResult, difference: Difference | None) -> None:
        """Takes one text."""
        self.num_texts += 1
        self.num_tokens += len(result.tokens) if difference is None else difference.index + 1
        self.num_accepted += result.num_accepted
        self.num_tested += result.num_tested
        self.num_resumed += result.num_sessions - 1
        self.num_failed_posts += result.num_failed_posts
        if difference is not None:
            self.differences.append(difference)


def make_requests(
    lab: Lab, sampling: SamplingParams, num_prompts: int, max_tokens: int, rules: ProcessorOptions = PLAIN
) -> list[GenerationRequest]:
    """The first prompts, each with its own seed."""
    return [
        GenerationRequest(
            prompt=lab.encode(prompt.text),
            params=SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seed),
            max_tokens=max_tokens,
            stop_ids=frozenset(lab.target.manifest.eos_token_ids),
            tokenizer=lab.tokenizer.fingerprint,
            processors=rules,
        )
        for seed, prompt in enumerate(load_prompts(num_prompts))
    ]


def make_grammar_requests(
    lab: Lab, sampling: SamplingParams, num_prompts: int, max_tokens: int
) -> list[GenerationRequest]:
    """A text inside each of the first schemas; every second one with a penalty. The draft knows the grammar."""
    lines = SCHEMAS.read_text(encoding="utf-8").splitlines()[:num_prompts]
    tokenizer = lab.tokenizer
    requests: list[GenerationRequest] = []
    with closing(GrammarCompiler(tokenizer, tokenizer.size, tokenizer.eos_token_ids)) as compiler:
        # With more prompts than schemas a schema comes again, with another seed.
        for seed, schema in zip(range(num_prompts), itertools.cycle(map(json.loads, lines)), strict=False):
            spec = GrammarSpec.json_schema(schema)
            requests.append(
                GenerationRequest(
                    prompt=lab.encode(f'import json\n\n# {schema["title"]}\nRECORD = json.loads("""'),
                    params=replace(sampling, seed=seed),
                    max_tokens=max_tokens,
                    stop_ids=frozenset(tokenizer.eos_token_ids),
                    tokenizer=tokenizer.fingerprint,
                    processors=PENALTY if seed % 2 else PLAIN,
                    grammar=spec,
                    draft_grammar=compiler.compile(spec),
                )
            )
    return requests


def measure(lab: Lab, options: argparse.Namespace, verifier: Verifier | None = None) -> dict[str, dict[str, Count]]:
    """Counts by sampling and mode."""
    manifest = lab.target.manifest
    counts: dict[str, dict[str, Count]] = {}
    with ExitStack() as stack:
        runtime = (verifier or Verifier()).plain_model(lab.target)
        stack.enter_context(closing(runtime))
        drafters = [lab.drafter]
        for _ in range(options.workers - 1):
            drafter = open_drafter(lab.draft, lab.choice, num_threads=1, target=lab.tokenizer).drafter
            drafters.append(stack.enter_context(closing(drafter)))
        for sampling, params in SAMPLINGS.items():
            if sampling == GRAMMAR:
                requests = make_grammar_requests(lab, params, options.prompts, options.max_tokens)
            else:
                rules = RULES.get(sampling, PLAIN)
                requests = make_requests(lab, params, options.prompts, options.max_tokens, rules)
            expected = plain_texts(runtime, requests)
            counts[sampling] = {}
            for mode in MODES:
                generating = generate_all(mode, lab.url, drafters, manifest.architecture.vocab_size, requests)
                counts[sampling][mode] = count(runtime, requests, expected, asyncio.run(generating))
    return counts


def count(
    runtime: PlainModel,
    requests: Sequence[GenerationRequest],
    expected: Sequence[tuple[int, ...]],
    results: Sequence[GenerationResult],
) -> Count:
    """Compares the texts of one mode with the plain ones."""
    total = Count()
    for request, text, result in zip(requests, expected, results, strict=True):
        total.add(result, first_difference(runtime, request, text, result.tokens))
    return total


def show(console: Console, counts: dict[str, dict[str, Count]]) -> bool:
    """Prints the table and the differences; True when the invariant holds."""
    names = ("sampling", "mode", "texts", "tokens", "accepted", "resumed", "posts lost", "differ")
    table = figures_table("Tokens against target-only generation", *names, left=names[:2])
    for sampling, by_mode in counts.items():
        for mode, c in by_mode.items():
            rate = f"{c.num_accepted / c.num_tested:.2f}" if c.num_tested else "-"
            numbers = (c.num_texts, f"{c.num_tokens:,}", rate, c.num_resumed, c.num_failed_posts, len(c.differences))
            table.add_row(sampling, mode, *map(str, numbers))
    console.print(table)
    cells = [c for by_mode in counts.values() for c in by_mode.values()]
    num_tokens = sum(c.num_tokens for c in cells)
    num_texts = sum(c.num_texts for c in cells)
    differences = [d for c in cells for d in c.differences]
    for sampling, by_mode in counts.items():
        for mode, c in by_mode.items():
            for d in c.differences:
                why = "near-tie" if d.is_near_tie else "UNEXPLAINED"
                console.print(
                    f"{sampling}, {mode}: token {d.index} is {d.found}, expected {d.expected}: {why}, "
                    f"scores {d.score_gap:.2g} apart, mass {d.mass_gap:.2g} from the edge",
                    highlight=False,
                )
    num_unexplained = sum(not d.is_near_tie for d in differences)
    console.print(
        f"{len(differences)} differences in {num_tokens:,} tokens of {num_texts:,} texts "
        f"({len(differences) / num_tokens * 1e4:.3f} in 10,000), {num_unexplained} of them unexplained",
        highlight=False,
    )
    return (not differences or len(differences) < LIMIT * num_tokens) and num_unexplained == 0


def exercised(
    counts: dict[str, dict[str, Count]], engine: dict[str, float], *, with_trees: bool = False
) -> dict[str, float]:
    """How often each event happened that must not change the texts."""
    trees = {"steps with trees": engine["tree_steps"]} if with_trees else {}
    return trees | {
        "preemption": engine["preempted"],
        "shared prefixes": engine["prefix_hit_tokens"],
        "cut sessions": sum(by_mode[CUT].num_resumed for by_mode in counts.values()),
        "earlier texts": engine["hits"],
        "lost posts": sum(by_mode[FAULTY].num_failed_posts for by_mode in counts.values()),
    }


def main() -> int:
    """The command."""
    options = parser(
        __doc__,
        {
            "--prompts": option(200),
            "--max-tokens": option(64),
            "--workers": option(8, "texts at once"),
            "--widen": option(0.0, "MB of the widened target; 0: as it is, which is faster"),
            "--target": option(type=Path, help="another target bundle of the embedded engine, such as one for torch"),
            "--draft": option(type=Path, help="another draft bundle; it may have another tokenizer"),
            "--emulate-npu": option(False, "the draft is an NPU's, and runs on the CPU"),
            "--kv-cache-mb": option(4, "of the cloud; small, so that sequences are preempted"),
            "--tree": option(TreeForm.AUTO, "what the cloud verifies", choices=tuple(TreeForm)),
            **VERIFIER_OPTIONS,
            **TO_JSON,
        },
    ).parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    verifier = verifier_of(options)
    pair = verifier.pair(options.widen or None)
    started = time.monotonic()
    # Shared prefixes, and too few blocks for all running texts: neither may change a text.
    small = ("--vllm-option", "block_size=32", "--vllm-option", "max_model_len=512") if verifier.is_vllm else ()
    cloud_options = (
        *verifier.options,
        *small,
        "--kv-cache-mb",
        str(options.kv_cache_mb),
        "--tree",
        options.tree,
        "--recent",
    )
    draft = options.draft or pair.draft
    choice = DraftChoice(emulate_npu=options.emulate_npu)
    with open_lab(options.target or pair.target, draft, choice, cloud_options, verifier.python) as lab:
        console.print(lab.cores.note, highlight=False)
        counts = measure(lab, options, verifier)
        engine = engine_counts(lab.url, "preempted", "prefix_hit_tokens", "tree_steps", "hits")
    console.print(f"{engine['preempted']:.0f} preemptions, {engine['prefix_hit_tokens']:,.0f} prompt tokens shared")
    is_held = show(console, counts)
    if idle := [
        name for name, value in exercised(counts, engine, with_trees=options.tree == TreeForm.TREE).items() if not value
    ]:
        console.print(f"shows nothing about {', '.join(idle)}: none happened; give it more prompts or less cache")
        is_held = False
    took_s = time.monotonic() - started
    console.print(f"{took_s:.0f} s", style="dim", highlight=False)
    told = {sampling: {mode: asdict(c) for mode, c in by_mode.items()} for sampling, by_mode in counts.items()}
    write_json(options.json, {"is_held": is_held, "took_s": round(took_s, 1), "engine": engine, "counts": told})
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main())
