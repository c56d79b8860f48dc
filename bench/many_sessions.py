"""Measures 16 sessions at once under the verify policy, with drafts by path and by tree: target passes, tokens/s.

In process, on one core, as `bench/engine_throughput.py`: each session's device answers every commit at once, so no
network and no slow draft decides. A device keeps its tree from commit to commit and expands the same number of nodes
after each, whether it drafts a path (width 1) or a tree. Tokens/s count the engine's steps only, not the drafting.
Exits 1 where a text differs between the two.

    python -m bench.many_sessions [--widen 1200] [--sessions 16] [--calls 8] [--runs 3] [--json PATH]
    python -m bench.many_sessions --emulate 40 1
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Final

from bench.emulated import EmulatedDraft, EmulatedTarget, Emulation
from bench.load import make_orders
from bench.load_devices import Device, Order, Recorded
from bench.report import TO_JSON, option, parser, verdict
from rich.console import Console
from rich.table import Table
from tests.requests import flat_request

from outrider.cloud.engine import Engine, EngineConfig, Policy
from outrider.cloud.engine.config import TreeForm
from outrider.cloud.seam import CommitEvent, Event
from outrider.edge.drafting.drafter import ModelDrafter
from outrider.export.make.reference_pair import export_reference_pair
from outrider.models.bundle.bundle import Bundle
from outrider.models.runtimes import open_batch_runtime, open_sequence_runtime
from outrider.models.runtimes.base import BatchRuntime, RuntimeOptions
from outrider.models.wire.tree_draft import decode_tree

WIDTHS: Final = {"path": 1, "tree": 4}


@dataclass(frozen=True, slots=True)
class Run:
    """One run of all sessions. Per token: passes (one session's part of a step), nodes verified and sent, bytes."""

    tokens_per_s: float
    passes: float
    verified: float
    sent: float
    bytes_up: float


class Session:
    """One session, and its device, which is always in time."""

    def __init__(self, engine: Engine, drafter: ModelDrafter, order: Order, num_calls: int, width: int) -> None:
        self.text: list[int] = []
        self.num_sent = self.bytes_sent = 0
        self._engine, self._is_answered = engine, True
        self._device = Device(Recorded(drafter, order, self.text, width), num_calls, width)
        request = flat_request(order.prompt, order.params, order.max_tokens, patience_ms=0.0)
        self._id = engine.submit(request, self._take)

    def _take(self, event: Event) -> None:
        self._is_answered = not isinstance(event, CommitEvent)
        if isinstance(event, CommitEvent):
            self._device.on_commit(event.base, event.tokens)
            self.text += event.tokens

    def answer(self) -> None:
        """Drafts after the last commit, where it had no answer yet; the draft goes as it comes off the wire."""
        if not self._is_answered and (body := self._device.answer()) is not None:
            message = decode_tree(body)
            self.num_sent += len(message.tokens)
            self.bytes_sent += len(body)
            self._engine.draft_tree(self._id, message)
        self._is_answered = True


def run(
    target: BatchRuntime,
    drafter: ModelDrafter,
    orders: Sequence[Order],
    num_calls: int,
    width: int,
    policy: Policy = Policy.VERIFY,
    form: TreeForm = TreeForm.LINE,
) -> tuple[Run, list[list[int]]]:
    """Generates all texts at once; returns the figures and the texts."""
    engine = Engine(target, EngineConfig(share_prefixes=False, policy=policy, form=form))
    engine.calibrate(max_tokens=32)
    sessions = [Session(engine, drafter, order, num_calls, width) for order in orders]
    took_s = 0.0
    while engine.has_work:
        began_s = time.perf_counter()
        engine.step()
        took_s += time.perf_counter() - began_s
        for session in sessions:
            session.answer()
    totals, count = engine.stats().totals, engine.stats().totals.committed
    figures = Run(
        count / took_s,
        totals.passes / count,
        totals.proposed / count,
        sum(session.num_sent for session in sessions) / count,
        sum(session.bytes_sent for session in sessions) / count,
    )
    return figures, [session.text for session in sessions]


def open_models(options: argparse.Namespace) -> tuple[BatchRuntime, ModelDrafter]:
    """The target and the draft that the options name; this process stays on one core."""
    pair = None if options.emulate else export_reference_pair(widen_mb=options.widen or None)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {options.core})
    if pair is None:
        step_ms, extra_ms = options.emulate
        emulation = Emulation(step_ms, extra_ms, 0.0, temperature=options.temperature)
        return EmulatedTarget(emulation), ModelDrafter(EmulatedDraft(emulation))
    target, draft = Bundle.open(pair.target), Bundle.open(pair.draft)
    loading = RuntimeOptions(num_threads=1, is_batch_invariant=options.form is not TreeForm.TREE)
    runtime = open_sequence_runtime("openvino", draft.model_file, RuntimeOptions(num_threads=1))
    drafter = ModelDrafter(runtime, draft.manifest.architecture.tokenizer_size)
    return open_batch_runtime("openvino", target.model_file, loading), drafter


def main() -> int:
    """Measures and prints."""
    options = parser(
        __doc__,
        {
            "--widen": option(1200, "MB of the widened FP32 target; 0: as trained"),
            "--emulate": option(type=float, nargs=2, metavar=("STEP_MS", "EXTRA_MS"), help="no real pair: sleeps"),
            "--sessions": option(16),
            "--tokens": option(40, "tokens per session"),
            "--calls": option(8, "nodes that a device expands after each commit"),
            "--runs": option(3, "interleaved; medians are shown"),
            "--temperature": option(0.8),
            "--form": option(TreeForm.LINE, "what a step verifies of a tree", choices=tuple(TreeForm)),
            "--core": option(0, "the core to run on"),
            **TO_JSON,
        },
    ).parse_args()
    target, drafter = open_models(options)
    orders = make_orders(options.sessions, options.tokens, options.temperature)
    found: dict[str, list[Run]] = {name: [] for name in WIDTHS}
    num_different = 0
    for _ in range(options.runs):
        texts = {}
        for name, width in WIDTHS.items():
            figures, texts[name] = run(target, drafter, orders, options.calls, width, form=options.form)
            found[name].append(figures)
        num_different += sum(a != b for a, b in zip(texts["path"], texts["tree"], strict=True))
    names = ("drafts", "tokens/s", "passes/token", "tokens/pass", "verified/token", "sent/token", "bytes/token")
    table = Table(*names, title=f"{options.sessions} sessions, verify policy, {options.calls} nodes per commit")
    middle = {name: Run(*(median(getattr(r, f) for r in each) for f in Run.__slots__)) for name, each in found.items()}
    for name, m in middle.items():
        cells = (m.tokens_per_s, m.passes, 1.0 / m.passes, m.verified, m.sent, m.bytes_up)
        table.add_row(name, *(f"{cell:.2f}" for cell in cells))
    console = Console(width=110)
    console.print(table)
    ratio = median(b.tokens_per_s / a.tokens_per_s for a, b in zip(found["path"], found["tree"], strict=True))
    console.print(f"tree over path: {ratio:.3f}x tokens/s, {middle['tree'].passes / middle['path'].passes:.3f}x passes")
    raw = {name: [asdict(each) for each in runs] for name, runs in found.items()}
    facts = {"sessions": options.sessions, "temperature": options.temperature, "form": options.form, "runs": raw}
    missed = [f"{num_different} texts differ between path and tree"] if num_different else []
    return verdict(console, missed, options.json, facts)


if __name__ == "__main__":
    sys.exit(main())
