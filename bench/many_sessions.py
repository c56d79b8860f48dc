"""Measures 16 sessions at once under the verify policy, with drafts by path and by tree: target passes, tokens/s.

In process, on one core, as `bench/engine_throughput.py`: each session's device answers every commit at once, so no
network and no slow draft decides. A device keeps its tree from commit to commit and expands the same number of nodes
after each, whether it drafts a path (width 1) or a tree. Tokens/s count the engine's steps only, not the drafting.
Exits 1 where a text differs between the two.

    python -m bench.many_sessions [--widen 1200] [--sessions 16] [--calls 8] [--runs 3] [--json PATH]
    python -m bench.many_sessions --emulate 40 1
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Final

import typer
from bench.emulated import EmulatedDraft, EmulatedTarget, Emulation
from bench.report import write_json
from rich.console import Console
from rich.table import Table
from tests.requests import flat_request

from outrider.cloud.engine import Engine, EngineConfig, Policy
from outrider.cloud.engine.config import TreeForm
from outrider.cloud.seam import CommitEvent, Event
from outrider.edge.drafting.belief import Belief
from outrider.edge.drafting.calibration import Calibration
from outrider.edge.drafting.drafter import ModelDrafter
from outrider.edge.modes.stream import tree_message
from outrider.export.make.reference_pair import export_reference_pair
from outrider.models.bundle.bundle import Bundle
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes import open_batch_runtime, open_sequence_runtime
from outrider.models.runtimes.base import BatchRuntime, RuntimeOptions, SequenceRuntime
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.wire.tree_draft import TreeDraft, decode_tree
from outrider.reference import load_prompts, target_dir

CONTEXT: Final = 96
LEAST_REACH: Final = 5e-4
SEND_FLOOR: Final = 0.01
MAX_DEPTH: Final = 64
MAX_SENT: Final = 256
WIDTHS: Final = {"path": 1, "tree": 4}


class Device:
    """One session's draft, always in time. The runtime is shared, so it reads the text again for every answer."""

    def __init__(
        self, runtime: SequenceRuntime, num_ids: int, prompt: tuple[int, ...], params: SamplingParams, width: int
    ) -> None:
        self._runtime, self._num_ids, self._prompt, self._params, self._width = runtime, num_ids, prompt, params, width
        self._calibration = Calibration()
        self._belief = Belief(self._calibration.chance, LEAST_REACH if width > 1 else 0.0)
        self.num_sent = self.bytes_sent = 0

    @property
    def text(self) -> list[int]:
        """Committed tokens."""
        return list(self._belief.known)

    def on_commit(self, base: int, tokens: tuple[int, ...]) -> None:
        """Takes a commit."""
        for guesses, token in self._belief.on_commit(base, tokens).tested:
            self._calibration.observe(guesses, token)
        self._belief.tree.replant()

    def answer(self, num_calls: int) -> TreeDraft | None:
        """The new nodes after `num_calls` more expansions, as they come off the wire; None without any."""
        tree = self._belief.tree
        self._runtime.truncate(0)
        drafter = ModelDrafter(self._runtime, self._num_ids)
        drafter.begin([*self._prompt, *self._belief.known], self._params)
        for _ in range(num_calls):
            nodes = tree.take_best(1, 0.0, MAX_DEPTH)
            if not nodes:
                break
            (guesses,) = drafter.guess([nodes[0].path()], self._width)
            tree.expand(nodes[0], guesses)
        unsent = tree.take_unsent(SEND_FLOOR if self._width > 1 else 0.0, MAX_SENT)
        if not unsent:
            return None
        body = tree_message(len(self._belief.known), unsent).body
        self.num_sent += len(unsent)
        self.bytes_sent += len(body)
        return decode_tree(body)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of all sessions. Per token: passes (one session's part of a step), nodes verified and sent, bytes."""

    tokens_per_s: float
    passes: float
    verified: float
    sent: float
    bytes_up: float


def run(
    target: BatchRuntime,
    draft: SequenceRuntime,
    num_ids: int,
    prompts: list[tuple[int, ...]],
    num_tokens: int,
    num_calls: int,
    width: int,
    temperature: float,
    form: TreeForm,
) -> tuple[Run, list[list[int]]]:
    """Generates `num_tokens` after each prompt; returns the figures and the texts."""
    engine = Engine(target, EngineConfig(share_prefixes=False, policy=Policy.VERIFY, form=form))
    engine.calibrate(max_tokens=32)
    devices: dict[int, Device] = {}
    fresh: set[int] = set()
    for seed, prompt in enumerate(prompts):
        params = SamplingParams(temperature=temperature, seed=seed)
        state: dict[str, int] = {}

        def sink(event: Event, state: dict[str, int] = state) -> None:
            if isinstance(event, CommitEvent):
                devices[state["id"]].on_commit(event.base, tuple(event.tokens))
                fresh.add(state["id"])
            else:
                fresh.discard(state["id"])

        state["id"] = engine.submit(flat_request(prompt, params, num_tokens, patience_ms=0.0), sink)
        devices[state["id"]] = Device(draft, num_ids, prompt, params, width)
    took_s = 0.0
    while engine.has_work:
        began_s = time.perf_counter()
        engine.step()
        took_s += time.perf_counter() - began_s
        for sequence_id in fresh:
            message = devices[sequence_id].answer(num_calls)
            if message is not None:
                engine.draft_tree(sequence_id, message)
        fresh.clear()
    totals = engine.stats().totals
    count = totals.committed
    sent = sum(device.num_sent for device in devices.values())
    num_bytes = sum(device.bytes_sent for device in devices.values())
    figures = Run(count / took_s, totals.passes / count, totals.proposed / count, sent / count, num_bytes / count)
    return figures, [device.text for device in devices.values()]


def main(
    widen: Annotated[int, typer.Option(help="MB of the widened FP32 target; 0: as trained")] = 1200,
    emulate: Annotated[
        tuple[float, float] | None, typer.Option(metavar="STEP_MS EXTRA_MS", help="no real pair: sleeps")
    ] = None,
    sessions: Annotated[int, typer.Option(min=1)] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="tokens per session")] = 40,
    calls: Annotated[int, typer.Option(min=1, help="nodes that a device expands after each commit")] = 8,
    runs: Annotated[int, typer.Option(min=1, help="interleaved; medians are shown")] = 3,
    temperature: Annotated[float, typer.Option()] = 0.8,
    form: Annotated[TreeForm, typer.Option(help="what a step verifies of a tree")] = TreeForm.LINE,
    core: Annotated[int, typer.Option(help="the core to run on")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measures and prints."""
    target: BatchRuntime
    draft: SequenceRuntime
    if emulate is not None:
        emulation = Emulation(*emulate, 0.0, temperature=temperature)
        target, draft = EmulatedTarget(emulation), EmulatedDraft(emulation)
        num_ids, tokenizer = draft.limits.vocab_size, Tokenizer.from_dir(target_dir())
    else:
        pair = export_reference_pair(widen_mb=widen or None)
        bundles = Bundle.open(pair.target), Bundle.open(pair.draft)
        tokenizer = bundles[0].tokenizer()
        num_ids = bundles[1].manifest.architecture.tokenizer_size
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    if emulate is None:
        loading = RuntimeOptions(num_threads=1, is_batch_invariant=form is not TreeForm.TREE)
        target = open_batch_runtime("openvino", bundles[0].model_file, loading)
        draft = open_sequence_runtime("openvino", bundles[1].model_file, RuntimeOptions(num_threads=1))
    prompts = [tuple(tokenizer.encode(prompt.text)[:CONTEXT]) for prompt in load_prompts(sessions)]
    found: dict[str, list[Run]] = {name: [] for name in WIDTHS}
    num_different = 0
    for _ in range(runs):
        texts = {}
        for name, width in WIDTHS.items():
            figures, texts[name] = run(target, draft, num_ids, prompts, tokens, calls, width, temperature, form)
            found[name].append(figures)
        num_different += sum(a != b for a, b in zip(texts["path"], texts["tree"], strict=True))
    names = ("drafts", "tokens/s", "passes/token", "tokens/pass", "verified/token", "sent/token", "bytes/token")
    table = Table(*names, title=f"{sessions} sessions, verify policy, {calls} nodes expanded per commit")
    middle = {name: Run(*(median(getattr(r, f) for r in each) for f in Run.__slots__)) for name, each in found.items()}
    for name, m in middle.items():
        cells = (m.tokens_per_s, m.passes, 1.0 / m.passes, m.verified, m.sent, m.bytes_up)
        table.add_row(name, *(f"{cell:.2f}" for cell in cells))
    console = Console(width=110)
    console.print(table)
    ratio = median(b.tokens_per_s / a.tokens_per_s for a, b in zip(found["path"], found["tree"], strict=True))
    fewer = middle["tree"].passes / middle["path"].passes
    console.print(f"tree over path: {ratio:.3f}x tokens/s, {fewer:.3f}x passes; {num_different} texts differ")
    raw = {name: [asdict(each) for each in runs] for name, runs in found.items()}
    write_json(
        json_path,
        {"sessions": sessions, "temperature": temperature, "form": form, "runs": raw, "different": num_different},
    )
    if num_different:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
