"""Opens what measurements by round trip compare: the widened reference pair, or the emulated one; and their texts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from bench.beside import EmulatedPair, RealPair, open_beside
from bench.emulated import VOCAB_SIZE, Emulation, emulated_cloud, emulated_draft
from bench.report import Options, option
from bench.round_trips import Subject
from bench.verifier import VERIFIER_OPTIONS, VLLM, Verifier, verifier_of

from outrider.edge.devices.placement import AS_BUNDLED
from outrider.edge.drafting.drafter import ModelDrafter
from outrider.edge.lab.cores import plan_cores, running_on
from outrider.edge.lab.laboratory import ALIKE, open_lab
from outrider.edge.results import GenerationRequest
from outrider.export.make.pair import PairPaths
from outrider.export.report.simulation.world import Form
from outrider.models.errors import ConfigError
from outrider.models.picks.sampling import SamplingParams
from outrider.models.text.tokenizer import Tokenizer
from outrider.reference import load_prompts, target_dir

BUNDLE_OPTIONS: Final[Options] = {
    "--target": option(type=Path, help="another target bundle; it runs where it was exported for"),
    "--draft": option(type=Path, help="another draft bundle"),
    "--cores": option(1, "of the verifier, and of the devices; 0: both share all"),
}
"""For other bundles than the reference pair's, such as a target for a GPU, which is then used."""
REAL_OPTIONS: Final[Options] = {
    "--widen": option(1450.0, "MB of the widened FP32 target; 0: as it is"),
    **BUNDLE_OPTIONS,
    **VERIFIER_OPTIONS,
    "--prompts": option(3, "texts of a run, the same in every run"),
    "--max-tokens": option(100),
    "--temperature": option(0.8),
}
"""Of a real pair and its texts."""
_TIMES: Final = ("STEP_MS", "EXTRA_MS", "DRAFT_MS")
PAIR_OPTIONS: Final[Options] = {
    "--emulate": option(type=float, nargs=3, metavar=_TIMES, help="no real pair: sleeps for these times"),
    "--nodes-per-call": option(1, "of an emulated draft, at most"),
    "--node-extra": option(0.0, "of each further node of such a call", metavar="MS"),
    "--form": option(Form.LINE, "what a step verifies of a tree", choices=tuple(Form)),
    **REAL_OPTIONS,
}
"""Of a pair, real or emulated."""


def pair_of(options: argparse.Namespace, verifier: Verifier | None = None) -> PairPaths:
    """The bundles that the options name, or the reference pair, its target in a format that the verifier runs."""
    if options.target is not None and options.draft is not None:
        return PairPaths(options.draft, options.target)
    pair = (verifier or Verifier()).pair(options.widen or None)
    return PairPaths(options.draft or pair.draft, options.target or pair.target)


@contextmanager
def open_pair(options: argparse.Namespace, *, beside: bool = True) -> Iterator[Subject]:
    """The pair that the options name. beside: also in one process."""
    if options.engine == VLLM and (beside or options.emulate):
        raise ConfigError("vLLM's target runs on no runtime of ours; use --leave-out beside, and no --emulate")
    with _emulated(options, beside) if options.emulate else _real(options, beside) as subject:
        yield subject


@contextmanager
def _emulated(options: argparse.Namespace, beside: bool) -> Iterator[Subject]:
    step_ms, extra_ms, draft_ms = options.emulate
    emulation = Emulation(step_ms, extra_ms, draft_ms, options.nodes_per_call, options.node_extra, options.temperature)
    cores, form = plan_cores(), ["--form", str(options.form)]
    with ExitStack() as stack:
        url = stack.enter_context(emulated_cloud(emulation, cores.cloud, form))
        turns = stack.enter_context(open_beside(EmulatedPair(emulation), cores.cloud)) if beside else None
        stack.enter_context(running_on(cores.agent))
        yield Subject(url, cores, ModelDrafter(emulated_draft(emulation)), VOCAB_SIZE, turns)


@contextmanager
def _real(options: argparse.Namespace, beside: bool) -> Iterator[Subject]:
    verifier = verifier_of(options)
    pair = pair_of(options, verifier)
    cores = plan_cores(options.cores)
    # The simulation knows no prompt lookup, so the verifier that is compared with it makes no guesses of its own.
    cloud_options = [*ALIKE, "--no-lookup", *verifier.options, "--tree", str(options.form)]
    if options.cores == 0:
        cloud_options += ["--threads", str(os.cpu_count())]
    with ExitStack() as stack:
        opener = RealPair(pair.target, pair.draft, is_batch_invariant=options.form != Form.TREE)
        turns = stack.enter_context(open_beside(opener, cores.cloud)) if beside else None
        lab = stack.enter_context(
            open_lab(pair.target, pair.draft, AS_BUNDLED, cloud_options, verifier.python, options.cores)
        )
        num_ids = lab.target.manifest.architecture.vocab_size
        yield Subject(lab.url, lab.cores, lab.drafter, num_ids, turns)


def make_requests(options: argparse.Namespace, count: int | None = None) -> list[GenerationRequest]:
    """Held-out prompts, each with its own seed. count: how many, where not `--prompts`. Raises SystemExit."""
    count = count or options.prompts
    if len(prompts := load_prompts(count)) < count:
        raise SystemExit(f"there are {len(prompts)} prompts, {count} are asked for")
    tokenizer = Tokenizer.from_dir(target_dir())
    return [
        GenerationRequest(
            prompt=tuple(tokenizer.encode(prompt.text)),
            params=SamplingParams(temperature=options.temperature, seed=seed),
            max_tokens=options.max_tokens,
            stop_ids=frozenset(),
            ignore_eos=True,
        )
        for seed, prompt in enumerate(prompts)
    ]
