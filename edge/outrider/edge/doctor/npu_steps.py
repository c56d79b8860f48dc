"""Runs the steps of `outrider doctor --npu` on a draft: loads it, times it, keeps its scores, forks and cuts back.

Each step runs in a process of its own (`probe`), since a driver that crashes ends that process. Knows no report.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import psutil
from numpy.typing import NDArray

from outrider.edge.devices.placement import DraftChoice
from outrider.edge.drafting.drafter import ModelDrafter
from outrider.edge.drafting.node_times import time_nodes
from outrider.edge.modes.assemble import open_draft_bundle, open_draft_model
from outrider.models.bundle.bundle import Bundle
from outrider.models.process.telemetry import disable_openvino_telemetry
from outrider.models.runtimes import open_sequence_runtime
from outrider.models.runtimes.base import BranchingRuntime, RuntimeOptions, SequenceRuntime

Place = Literal["npu", "cpu"]
Step = Literal["load", "times", "scores", "fork"]

PROMPT: Final = 32
POSITIONS: Final = 64
"""Tokens of the fixed text that are read as a prompt, and positions whose scores are compared; fewer of both for a
draft of shorter texts.
"""
LEAST_POSITIONS: Final = 32
"""A draft of shorter texts is only loaded: calls are timed after up to 28 tokens."""
NUM_CUT: Final = 8
NUM_PROMPTS: Final = 3
TEXT: Final = """A lighthouse keeper writes down what he sees: the hour, the wind, the ships that pass, and the colour
of the water. On most days the list is short. On the third of May he counts twelve ships before noon, and then none.

def count_ships(lines):
    total = 0
    for line in lines:
        if line.startswith("ship"):
            total += 1
    return total

He reads the numbers twice, and adds them up again in the evening, because a sum that is wrong once is wrong for good.
"""
"""The fixed text: the same on every machine."""


def openvino_facts(properties: Sequence[str]) -> dict[str, Any]:
    """OpenVINO's version and devices, the processor's name, and these properties of each NPU, None where not reported.

    Raises ModuleNotFoundError without OpenVINO.
    """
    disable_openvino_telemetry()
    import openvino

    core: Any = openvino.Core()
    devices = list(core.available_devices)
    npus = [name for name in devices if name.partition(".")[0] == "NPU"]
    return {
        "version": str(openvino.__version__),
        "devices": devices,
        "processor": _property(core, "CPU", "FULL_DEVICE_NAME") if "CPU" in devices else None,
        "npus": {name: {each: _property(core, name, each) for each in properties} for name in npus},
    }


def _property(core: Any, device: str, name: str) -> str | None:
    try:
        found = core.get_property(device, name)
    except RuntimeError:
        return None  # this driver does not report it
    return ", ".join(map(str, found)) if isinstance(found, (list, tuple)) else str(found).strip()


def run_step(step: Step, place: Place, bundle: str, choice: DraftChoice, num_threads: int, folder: str) -> Any:
    """Opens the draft and runs a step; plain data. Raises what the runtimes raise.

    place: "npu" opens it as `choice` says; "cpu" opens the same files in OpenVINO's runtime for the CPU, to compare.
    folder: gets the scores, in a file named as the place.
    """
    draft = open_draft_bundle(bundle)
    tokens = fixed_tokens(draft)
    began = time.perf_counter()
    if place == "npu":
        model = open_draft_model(draft, choice, num_threads)
        assert model.runtime is not None, "lookup has no steps"
        runtime = model.runtime
    else:
        runtime = open_sequence_runtime("openvino", draft.model_file, RuntimeOptions(num_threads=num_threads))
    found: dict[str, Any] = {
        "open_s": time.perf_counter() - began,
        "memory_mb": psutil.Process().memory_info().rss / 1e6,
        "max_branches": _max_branches(runtime),
        "max_positions": runtime.limits.max_positions,
    }
    tokens = tokens[: runtime.limits.max_positions]
    try:
        if step == "times":
            found |= time_calls(runtime, draft, tokens)
        elif step == "scores":
            np.save(Path(folder) / place, scores(runtime, tokens)[:, : draft.manifest.architecture.tokenizer_size])
        elif step == "fork":
            found |= fork(runtime, tokens)
    finally:
        runtime.close()
    return found


def fixed_tokens(draft: Bundle) -> list[int]:
    """The first PROMPT + POSITIONS tokens of the fixed text, again and again where it has fewer; as many as the draft's
    shapes take, on the CPU too, so that both places compare the same.
    """
    tokens, shapes = draft.tokenizer().encode(TEXT), draft.manifest.static_shapes
    count = PROMPT + POSITIONS if shapes is None else min(PROMPT + POSITIONS, shapes.max_positions)
    return [tokens[index % len(tokens)] for index in range(count)]


def num_prompt(tokens: Sequence[int]) -> int:
    """How many of these tokens are read as a prompt."""
    return min(PROMPT, len(tokens) // 2)


def _max_branches(runtime: SequenceRuntime) -> int:
    return runtime.max_branches if isinstance(runtime, BranchingRuntime) else 1


def time_calls(runtime: SequenceRuntime, draft: Bundle, tokens: Sequence[int]) -> dict[str, Any]:
    """prompt_ms: the fastest of NUM_PROMPTS readings of `prompt_tokens`. The rest as in `NodeTimes`, by its names."""
    shapes = draft.manifest.static_shapes
    length = min(len(tokens) if shapes is None else shapes.prompt_len, runtime.limits.max_positions // 2)
    prompt = [tokens[index % len(tokens)] for index in range(length)]
    times: list[float] = []
    for _ in range(NUM_PROMPTS):
        runtime.truncate(0)
        began = time.perf_counter()
        runtime.extend(prompt)
        times.append(1e3 * (time.perf_counter() - began))
    nodes = time_nodes(ModelDrafter(runtime, draft.manifest.architecture.tokenizer_size))
    return {"prompt_tokens": length, "prompt_ms": min(times)} | asdict(nodes)


def scores(runtime: SequenceRuntime, tokens: Sequence[int]) -> NDArray[np.float32]:
    """The logits after the prompt and after each further token but the last: [POSITIONS or fewer, vocab_size]."""
    count = num_prompt(tokens)
    rows = [runtime.extend(tokens[:count]).copy()]
    rows += [runtime.extend([token]).copy() for token in tokens[count:-1]]
    return np.stack(rows)


def fork(runtime: SequenceRuntime, tokens: Sequence[int]) -> dict[str, Any]:
    """Runs two siblings after a text and a token after each, keeps one, cuts back into the prompt and goes on.

    num_equal, num_rows: rows whose best token is that of a fresh run of the same tokens. delta, scale: the largest
    difference of a logit, and the largest logit; None for delta where a logit is not finite. tokens: LEAST_POSITIONS or
    more.
    """
    count = num_prompt(tokens)
    text, (first, second, third) = list(tokens[:count]), tokens[count : count + 3]
    other = second if second != first else (first + 1) % runtime.limits.vocab_size
    kept, end = text[:-NUM_CUT], list(tokens[count - NUM_CUT : count + NUM_CUT])
    found = [([*text], runtime.extend(text).copy())]
    for branches in ([[first], [other]], [[first, third], [other, third]]):
        rows = branch_rows(runtime, branches)
        found += [([*text, *branch], row) for branch, row in zip(branches, rows, strict=True)]
    found.append(([*text, other, third], runtime.extend([other, third]).copy()))
    runtime.truncate(len(kept))
    found.append(([*kept, *end], runtime.extend(end).copy()))
    equal, delta, scale = 0, 0.0, 0.0
    for sequence, row in found:
        runtime.truncate(0)
        fresh = runtime.extend(sequence)
        equal += int(row.argmax() == fresh.argmax())
        delta = float(np.maximum(delta, np.abs(row - fresh).max()))  # keeps NaN
        scale = max(scale, float(np.abs(fresh).max()))
    is_finite = bool(np.isfinite(delta) and np.isfinite(scale))
    return {"num_equal": equal, "num_rows": len(found), "delta": delta if is_finite else None, "scale": scale}


def branch_rows(runtime: SequenceRuntime, branches: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
    """The logits after each branch: in one pass where the runtime takes several, else by cutting back."""
    if isinstance(runtime, BranchingRuntime) and runtime.max_branches >= len(branches):
        return list(runtime.extend_branches(branches).copy())
    length, rows = runtime.length, list[NDArray[np.float32]]()
    for branch in branches:
        rows.append(runtime.extend(branch).copy())
        runtime.truncate(length)
    return rows
