"""Part 4: `bench.load` with more kinds of sessions, and `bench.capacity` against the same draft beside the target."""

from __future__ import annotations

import importlib.util
import json

from bench import capacity, load
from bench.gpu.place import Run
from bench.load import FIELDS_OF, JSON, MODES


def measure(run: Run) -> list[str]:
    """The part. Returns what both missed; JSON is left out where llguidance is not there."""
    sizes = run.sizes
    pair = ["--target", str(run.target()), "--draft", str(run.draft_bundle()), "--cores", str(sizes.cores)]
    modes = [*MODES, *FIELDS_OF]
    if importlib.util.find_spec("llguidance") is None:
        modes.remove(JSON)
        run.left_out.append("JSON: llguidance is not there")
    missed: list[str] = []
    runs = ["--runs", str(sizes.runs), "--max-tokens", str(min(64, sizes.tokens))]
    path = run.made / "part4-capacity.json"
    capacity.main(
        [*pair, *runs, "--widen-draft", "0", "--clients", str(max(sizes.load_sessions[:2])), "--json", str(path)]
    )
    run.note("capacity", json.loads(path.read_text(encoding="utf-8")))
    missed += run.found["capacity"]["misses"]
    done = []
    for count in sizes.load_sessions:
        if not run.has_time(f"{count} sessions"):
            continue
        path = run.made / f"part4-{count}.json"
        load.main([*pair, *runs, "--sessions", str(count), "--modes", *modes, "--json", str(path)])
        done.append(json.loads(path.read_text(encoding="utf-8")))
        missed += done[-1]["misses"]
        run.note("load", done)
    return missed
