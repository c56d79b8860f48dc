"""Part 3: `bench.never_slower` with the target on the GPU and the draft in onnxruntime on cores of the processor."""

from __future__ import annotations

import json

from bench import never_slower
from bench.gpu.place import Run
from bench.round_trips import BESIDE

from outrider.edge.lab.laboratory import STOP_AND_WAIT


def measure(run: Run) -> list[str]:
    """The part: a call of `bench.never_slower` per round trip, so that a cut-off run leaves those that are done.

    Returns its misses. Bounds against the simulation are left out with `beside`, whose process would hold the target a
    second time; part 4 has it.
    """
    pair = ["--target", str(run.target()), "--draft", str(run.draft_bundle())]
    missed: list[str] = []
    done = []
    for rtt_ms in run.sizes.rtt_ms:
        if not run.has_time(f"a round trip of {rtt_ms:g} ms"):
            continue
        path = run.made / f"part3-{rtt_ms:g}ms.json"
        sizes = run.sizes
        counts = ["--runs", str(sizes.runs), "--prompts", str(sizes.prompts), "--max-tokens", str(sizes.tokens)]
        leave = ["--leave-out", BESIDE, STOP_AND_WAIT]
        cores = ["--cores", str(sizes.cores)]
        never_slower.main([*pair, *counts, *cores, "--rtt-ms", f"{rtt_ms:g}", "--json", str(path), *leave])
        done.append(json.loads(path.read_text(encoding="utf-8")))
        missed += done[-1]["misses"]
        run.note("round_trips", done)
    return missed
