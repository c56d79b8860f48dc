"""Parts 3 and 4: other benches, with the target on the GPU and the draft in onnxruntime on cores of the processor."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from bench import capacity, load, never_slower
from bench.gpu.place import Run
from bench.round_trips import BESIDE

from outrider.edge.lab.laboratory import STOP_AND_WAIT


def round_trips(run: Run) -> list[str]:
    """Part 3: a call of `bench.never_slower` per round trip, so that a cut-off run leaves those that are done.

    Returns its misses. Bounds against the simulation are left out with `beside`, whose process would hold the target a
    second time; part 4 has it.
    """
    more = ["--prompts", str(run.sizes.prompts), "--max-tokens", str(run.sizes.tokens)]
    more += ["--leave-out", BESIDE, STOP_AND_WAIT]
    missed: list[str] = []
    for rtt_ms in run.sizes.rtt_ms:
        if run.has_time(name := f"round trip of {rtt_ms:g} ms"):
            missed += _ran(run, name, never_slower.main, "--rtt-ms", f"{rtt_ms:g}", *more)
    return missed


def sessions(run: Run) -> list[str]:
    """Part 4: `bench.capacity` against the same draft beside the target, and `bench.load`. Returns what both missed."""
    tokens, counts = ("--max-tokens", str(min(64, run.sizes.tokens))), run.sizes.load_sessions
    clients = ("--widen-draft", "0", "--clients", str(max(counts[:2])))
    missed = _ran(run, "capacity", capacity.main, *clients, *tokens)
    for count in counts:
        if run.has_time(name := f"{count} sessions"):
            missed += _ran(run, name, load.main, "--sessions", str(count), *tokens)
    return missed


def _ran(run: Run, name: str, bench: Callable[[Sequence[str]], int], *arguments: str) -> list[str]:
    """Runs a bench with the pair, and notes its JSON under this name. Returns its misses."""
    path = run.made / f"part{run.number}.json"
    pair = ("--target", str(run.target()), "--draft", str(run.draft_bundle()), "--cores", str(run.sizes.cores))
    bench([*pair, "--runs", str(run.sizes.runs), "--json", str(path), *arguments])
    found = json.loads(path.read_text(encoding="utf-8"))
    run.note(name, found)
    return list(found["misses"])
