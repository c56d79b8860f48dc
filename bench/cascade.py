"""Compares a cascade of three (draft on the device, mid-size verifier, target) with two (draft on the device, target).

Four ways to the same text, each at every round trip: the target alone, two levels, the mid-size verifier without a
device's draft, three levels. Two levels cross both distances at once: device to mid-size verifier, and that to target.
Texts are compared token by token. The target's passes do not depend on how busy the machine is.

    python -m bench.cascade                                # emulated: steps and drafts sleep for exact times
    python -m bench.cascade --real [--widen 1450] [--mid BUNDLE]

--real has the reference pair: its draft, its target as the mid-size verifier, and the target widened, which picks the
same tokens, so nothing is ever contradicted; `--mid` names another bundle of the same family, such as one in INT4.
Emulated, the mid-size verifier's logits are the target's plus `--mid-noise` times the emulated draft's noise. Exits 1
where a text differs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import httpx
from bench.attacks.exchange import values_of
from bench.emulated import (
    MAX_POSITIONS,
    VOCAB_SIZE,
    EmulatedTarget,
    Emulation,
    Logits,
    emulated_cloud,
    emulated_draft,
)
from bench.pairs import make_requests
from bench.processes import announce
from bench.report import TO_JSON, figures_table, option, parser, write_json
from bench.verifier import VERIFIER_OPTIONS, verifier_of
from rich.console import Console
from rich.table import Table
from tests.fake_runtime import FakeBatchRuntime

from outrider.cloud.api.app import create_app
from outrider.cloud.api.serving import VerifierServer
from outrider.cloud.api.state import ServedModel
from outrider.cloud.engine import EngineConfig, EngineThread
from outrider.cloud.server.cascade import cascade_model, fetch_facts, show_cascade
from outrider.cloud.upstream.engine import CascadeEngine
from outrider.cloud.upstream.upstream import UpstreamClient
from outrider.edge.drafting.drafter import Drafter, ModelDrafter
from outrider.edge.lab.child_process import child_process
from outrider.edge.lab.cores import CorePlan, plan_cores
from outrider.edge.lab.laboratory import ALONE, cloud_process, network
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import make_agent, open_draft_bundle, open_drafter
from outrider.edge.results import GenerationRequest, GenerationResult, Mode
from outrider.models.client.client import VerifierClient
from outrider.models.ingress.collector import relieve_collector
from outrider.models.ingress.sockets import READY_PREFIX
from outrider.models.runtimes.base import SequenceSlice
from outrider.models.text.tokenizer import Tokenizer
from outrider.reference import target_dir

ALONE_WAY, TWO, MID, THREE = "target alone", "draft, target", "mid, target", "draft, mid, target"
WAYS: Final = (ALONE_WAY, TWO, MID, THREE)


@dataclass(frozen=True, slots=True)
class Cell:
    """One way at one pair of round trips. passes: of the target, per token. different: texts that are not the target's.

    confirmed: of the mid-size verifier's provisional tokens, the share that the target confirmed where it answered.
    """

    device_ms: float
    upstream_ms: float
    way: str
    tokens_per_s: float
    passes_per_token: float
    different: int
    confirmed: float | None = None


class EmulatedMid(EmulatedTarget):
    """The mid-size verifier: the emulated target's logits plus noise."""

    def __init__(self, emulation: Emulation, share: float) -> None:
        super().__init__(emulation)
        self._share = share
        self._noise = FakeBatchRuntime(vocab_size=VOCAB_SIZE, max_positions=MAX_POSITIONS, num_blocks=4096, seed=1)

    def forward(self, batch: Sequence[SequenceSlice]) -> Logits:
        """One step."""
        due_s = time.perf_counter() + self._step_s
        noise = self._noise.forward(batch)
        rows = FakeBatchRuntime.forward(self, batch)
        if rows.size:
            noise *= self._share * self._language.noises(rows)[:, None]
            rows *= self._language.peaks(rows)[:, None]
            rows += noise
        due_s += self._extra_s * (sum(len(item.tokens) for item in batch) - 1)
        time.sleep(max(0.0, due_s - time.perf_counter()))
        return rows

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies slots to slots, the noise's too."""
        super().move(sources, targets)
        self._noise.move(sources, targets)


def serve_mid(options: argparse.Namespace) -> None:
    """The emulated mid's process."""
    emulation = Emulation(options.mid_step, options.extra, 0.0, temperature=options.temperature)
    engine = EngineThread(EmulatedMid(emulation, options.mid_noise), EngineConfig(looks_up=False))
    engine.calibrate()
    facts = fetch_facts(options.serve_mid, None)
    cascade = CascadeEngine(engine, UpstreamClient.to(options.serve_mid), facts)
    cascade.start()
    own = ServedModel("mid", Tokenizer.from_dir(target_dir()), frozenset())
    app = create_app(cascade, cascade_model(own, facts, None))
    show_cascade(app.state.core.metrics, cascade)
    relieve_collector()
    announce(partial(VerifierServer, app))


@contextmanager
def emulated(options: argparse.Namespace) -> Iterator[tuple[str, Drafter, CorePlan]]:
    """The emulated target and draft."""
    emulation = Emulation(options.step, options.extra, options.draft_step, temperature=options.temperature)
    cores = plan_cores()
    with emulated_cloud(emulation, cores.cloud) as url:
        yield url, ModelDrafter(emulated_draft(emulation)), cores


@contextmanager
def real(options: argparse.Namespace) -> Iterator[tuple[str, Drafter, CorePlan]]:
    """The widened reference target, and the reference draft."""
    verifier = verifier_of(options)
    pair, cores = verifier.pair(options.widen or None), plan_cores()
    with ExitStack() as stack:
        url = stack.enter_context(cloud_process(pair.target, cores.cloud, (*ALONE, "--tree", "line")))
        drafter = open_drafter(open_draft_bundle(pair.draft), num_threads=1).drafter
        stack.callback(drafter.close)
        yield url, drafter, cores


@contextmanager
def mid_of(options: argparse.Namespace, upstream: str, cores: CorePlan) -> Iterator[str]:
    """The mid-size verifier before the target at `upstream`."""
    if options.real:
        bundle = options.mid or verifier_of(options).pair(None).target
        opened = cloud_process(bundle, cores.agent, (*ALONE, "--tree", "line", "--upstream", upstream))
    else:
        names = ("mid_step", "extra", "mid_noise", "temperature")
        values = [part for name in names for part in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
        opened = child_process(
            ["-m", "bench.cascade", "--serve-mid", upstream, *values], ready_prefix=READY_PREFIX, cores=cores.agent
        )
    with opened as url:
        yield url


async def texts(
    url: str, rtt_ms: float, cores: CorePlan, requests: Sequence[GenerationRequest], drafter: Drafter | None
) -> list[GenerationResult]:
    """The requests' texts, one after the other; a first one warms up, and shows the agent that a server has a mid."""
    with network(url, rtt_ms, cores.agent) as near:
        async with VerifierClient(near) as client:
            mode = Mode.STREAM if drafter is not None else Mode.CLOUD_ONLY
            agent = make_agent(mode, Endpoints([client]), drafter)
            await agent.generate(requests[0])
            return [await agent.generate(request) for request in requests]


def counted(url: str) -> list[float]:
    """The cascade's counters: tokens confirmed and contradicted."""
    text = httpx.get(url + "/metrics", timeout=30.0).text
    kinds = ("confirmed", "contradicted")
    return [sum(values_of(text, "outrider_cascade_tokens_total", f'kind="{kind}"')) for kind in kinds]


def cell(
    way: str, rtts: tuple[float, float], results: Sequence[GenerationResult], truth: Sequence[tuple[int, ...]]
) -> Cell:
    """What these texts show."""
    later = sum(len(r.tokens) - sum(at == r.arrival_s[0] for at in r.arrival_s) for r in results)
    took_s = sum(r.arrival_s[-1] - r.arrival_s[0] for r in results)
    passes = sum(r.num_passes for r in results) / sum(len(r.tokens) for r in results)
    different = sum(r.tokens != text for r, text in zip(results, truth, strict=True))
    return Cell(*rtts, way, later / took_s, passes, different)


def measure(options: argparse.Namespace) -> list[Cell]:
    """All ways at all round trips."""
    requests, found = make_requests(options), list[Cell]()
    with (real if options.real else emulated)(options) as (url, drafter, cores):
        truth = [result.tokens for result in asyncio.run(texts(url, 0.0, cores, requests, None))]
        for upstream_ms in options.rtt_upstream:
            with network(url, upstream_ms, cores.agent) as far, mid_of(options, far, cores) as mid:
                for device_ms in options.rtt_device:
                    rtts = device_ms, upstream_ms
                    for way in WAYS:
                        is_direct = way in (ALONE_WAY, TWO)
                        draft = drafter if way in (TWO, THREE) else None
                        had = counted(mid)
                        where, rtt_ms = (url, device_ms + upstream_ms) if is_direct else (mid, device_ms)
                        results = asyncio.run(texts(where, rtt_ms, cores, requests, draft))
                        shown = cell(way, rtts, results, truth)
                        if not is_direct:
                            confirmed, contradicted = (
                                after - before for before, after in zip(had, counted(mid), strict=True)
                            )
                            shown = replace(shown, confirmed=confirmed / max(1.0, confirmed + contradicted))
                        found.append(shown)
                        print(shown, file=sys.stderr, flush=True)
    return found


def show(found: Sequence[Cell]) -> Table:
    """The table."""
    names = ("device-mid ms", "mid-target ms", "way", "tokens/s", "over two", "passes/token", "confirmed", "different")
    table = figures_table("tokens/s, and passes of the target per token", *names, left=("way",))
    for each in found:
        two = next(
            c.tokens_per_s
            for c in found
            if c.way == TWO and (c.device_ms, c.upstream_ms) == (each.device_ms, each.upstream_ms)
        )
        confirmed = "-" if each.confirmed is None else f"{each.confirmed:.2f}"
        table.add_row(
            f"{each.device_ms:g}",
            f"{each.upstream_ms:g}",
            each.way,
            f"{each.tokens_per_s:.1f}",
            f"{each.tokens_per_s / two:.2f}x",
            f"{each.passes_per_token:.2f}",
            confirmed,
            str(each.different),
        )
    return table


def main() -> None:
    """Measures, or serves the emulated mid."""
    options = parser(
        __doc__,
        {
            "--real": option(False, "the reference pair; default: emulated"),
            "--widen": option(1450.0, "with --real: MB of the widened FP32 target"),
            "--mid": option(type=Path, help="with --real: another bundle as the mid-size verifier"),
            "--step": option(120.0, "emulated: ms of a step of the target"),
            "--mid-step": option(20.0, "of the mid-size verifier"),
            "--draft-step": option(4.0, "of the draft"),
            "--extra": option(0.3, "of a further token of a step"),
            "--mid-noise": option(0.25, "of the mid-size verifier, over the draft's"),
            "--rtt-device": option([0.0, 5.0]),
            "--rtt-upstream": option([25.0, 50.0]),
            "--prompts": option(3),
            "--max-tokens": option(100),
            "--temperature": option(0.8),
            "--serve-mid": option(metavar="URL", help=argparse.SUPPRESS),
            **VERIFIER_OPTIONS,
            **TO_JSON,
        },
    ).parse_args()
    if options.serve_mid:
        return serve_mid(options)
    found = measure(options)
    Console(width=110).print(show(found))
    write_json(
        options.json, {"options": {k: str(v) for k, v in vars(options).items()}, "cells": list(map(asdict, found))}
    )
    if any(each.different for each in found):
        sys.exit(1)
    return None


if __name__ == "__main__":
    main()
