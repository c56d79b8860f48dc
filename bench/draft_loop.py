"""Times the draft loop against its bare runtime, and against the loops of the runtimes' own packages on the same files.

    pip install openvino-genai==2026.4.1
    python -m bench.draft_loop

A random model of Qwen2's kind with 88M parameters (768 x 12, vocabulary 16k) is exported to INT8 for OpenVINO and for
ONNX Runtime. All contestants run in one process, in turns of changing order, with two threads, from the same prompt
(greedy by default); ratios are medians over the rounds:

  bare      the runtime's `extend` alone, one known token at a time, at the lengths of the loop
  loop      the agent's drafter: noise, pick, gap, and a rollback of three tokens every eight
  straight  the loop without rollbacks, so its contexts are those of the peer
  peer      onnxruntime-genai's generator, openvino_genai's pipeline

Exits 1 if the loop takes more than 1.15 times the bare step, or without rollbacks more than the peer (beyond 2 %, the
noise of an idle machine).
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import typer
from bench.peer_engines import link_for_genai
from bench.report import write_json
from rich.console import Console
from rich.table import Table
from tools.tiny_sources import make_tiny_model, make_tiny_tokenizer

from outrider.edge.drafting.drafter import ModelDrafter
from outrider.export.make.pipeline import export_model
from outrider.export.recipes import ExportOptions, RuntimeName
from outrider.models.bundle.bundle import Bundle
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes import open_sequence_runtime
from outrider.models.runtimes.base import RuntimeOptions, SequenceRuntime

THREADS = 2
CONTEXT = 128
ROUND = 8
ROLLED = 3
MOST_OF_BARE = 1.15
MOST_OF_PEER = 1.02
SIZES: Final[dict[str, Any]] = {
    "vocab_size": 16384,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
console = Console()

Round = Callable[[Sequence[int], int], float]
"""Generates so many tokens after a prompt; gives milliseconds a token, the prompt's own time left out."""


def bare(runtime: SequenceRuntime, prompt: Sequence[int], num_tokens: int) -> float:
    """One `extend` per token, with the tokens known beforehand; nothing else is timed."""
    runtime.truncate(0)
    runtime.extend(prompt)
    spent = 0.0
    for index in range(num_tokens):
        if index % ROUND == ROUND - 1:
            runtime.truncate(runtime.length - ROLLED + 1)
        began = time.perf_counter()
        runtime.extend([index + 300])
        spent += time.perf_counter() - began
    return spent * 1e3 / num_tokens


def loop(
    runtime: SequenceRuntime,
    prompt: Sequence[int],
    num_tokens: int,
    temperature: float,
    num_rolled: int = ROLLED,
) -> float:
    """The agent's work on a path: guesses, some of which are rejected once per round."""
    runtime.truncate(0)
    drafter = ModelDrafter(runtime)
    drafter.begin(prompt, SamplingParams(temperature=temperature))
    drafter.guess([[]], 1)
    branch: list[int] = []
    began = time.perf_counter()
    for index in range(num_tokens):
        (guesses,) = drafter.guess([branch], 1)
        branch.append(guesses[0].token)
        if index % ROUND == ROUND - 1:
            # The target accepts all but the last ones and corrects the first of these.
            kept = len(branch) - num_rolled
            drafter.extend(branch[:kept] + ([index + 300] if num_rolled else []))
            branch = []
    return (time.perf_counter() - began) * 1e3 / num_tokens


def onnxruntime_genai_round(directory: Path, copy: Path) -> Round:
    """onnxruntime-genai's own loop over links to a bundle's files in `copy`."""
    import onnxruntime_genai as og

    config = json.loads((directory / "genai_config.json").read_text(encoding="utf-8"))
    threads = {"intra_op_num_threads": THREADS}
    config["model"]["decoder"]["session_options"] = config["model"]["decoder"].get("session_options", {}) | threads
    for path in directory.iterdir():
        if path.name != "genai_config.json":
            (copy / path.name).symlink_to(path)
    (copy / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
    model = og.Model(str(copy))

    def generate(prompt: Sequence[int], num_tokens: int) -> float:
        params = og.GeneratorParams(model)
        total = len(prompt) + num_tokens + 1
        params.set_search_options(do_sample=False, max_length=total, min_length=total)
        generator = og.Generator(model, params)
        generator.append_tokens(list(prompt))
        generator.generate_next_token()
        began = time.perf_counter()
        for _ in range(num_tokens):
            generator.generate_next_token()
        return (time.perf_counter() - began) * 1e3 / num_tokens

    return generate


def openvino_genai_round(directory: Path, copy: Path) -> Round:
    """openvino_genai's own loop over links to a bundle's files in `copy`, timed by its own metrics."""
    import numpy as np
    import openvino as ov
    import openvino_genai

    link_for_genai(directory, copy)
    # Its defaults except threads and arithmetic: the default, bf16, is slower with INT8 weights.
    properties = {"INFERENCE_NUM_THREADS": THREADS, "INFERENCE_PRECISION_HINT": "f32"}
    pipeline = openvino_genai.LLMPipeline(str(copy), "CPU", **properties)

    def generate(prompt: Sequence[int], num_tokens: int) -> float:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_tokens + 1, True, False
        ids = ov.Tensor(np.array([prompt], np.int64))
        result = pipeline.generate(openvino_genai.TokenizedInputs(ids, ov.Tensor(np.ones_like(ids.data))), config)
        return float(result.perf_metrics.get_tpot().mean)

    return generate


PEERS: dict[RuntimeName, Callable[[Path, Path], Round]] = {
    "openvino": openvino_genai_round,
    "onnxruntime": onnxruntime_genai_round,
}


def measure(bundle: Bundle, peer: Round, runs: int, num_tokens: int) -> dict[str, list[float]]:
    """Milliseconds per token of each contestant in each round.

    Every round has its own order: the order decides what is in the processor's caches.
    """
    prompt = [(7 * i) % 250 + 2 for i in range(CONTEXT)]
    options = RuntimeOptions(num_threads=THREADS)
    found: dict[str, list[float]] = {}
    order = random.Random(0)
    with closing(open_sequence_runtime(bundle.manifest.runtime, bundle.model_file, options)) as runtime:
        contestants: dict[str, Callable[[], float]] = {
            "bare": lambda: bare(runtime, prompt, num_tokens),
            "loop": lambda: loop(runtime, prompt, num_tokens, 0.0),
            "loop, T 0.8": lambda: loop(runtime, prompt, num_tokens, 0.8),
            "straight": lambda: loop(runtime, prompt, num_tokens, 0.0, num_rolled=0),
            "peer": lambda: peer(prompt, num_tokens),
        }
        for contestant in contestants.values():
            contestant()  # warms up
        for _ in range(runs):
            for name in order.sample(list(contestants), len(contestants)):
                found.setdefault(name, []).append(contestants[name]())
    return found


def ratio(times: dict[str, list[float]], name: str, base: str) -> float:
    """The median over rounds of one contestant's time over another's in the same round."""
    return median(mine / its for mine, its in zip(times[name], times[base], strict=True))


def main(
    runs: Annotated[int, typer.Option(min=1, help="rounds of every contestant")] = 60,
    tokens: Annotated[int, typer.Option(min=16, help="tokens a round")] = 64,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Measures; exits 1 if a bound is missed."""
    table = Table("runtime", "ms: bare", "loop", "straight", "peer", "loop/bare", "T 0.8/bare", "straight/peer")
    rows: dict[str, dict[str, float]] = {}
    is_fine = True
    with tempfile.TemporaryDirectory() as root:
        source = Path(root) / "model"
        make_tiny_tokenizer(source)
        make_tiny_model("qwen2", source, max_parameters=1 << 30, **SIZES)
        for kind, peer in PEERS.items():
            options = ExportOptions("draft", "int8", kind, num_threads=THREADS)
            bundle = export_model(source, Path(root) / kind, options)
            copy = Path(root) / f"{kind}-peer"
            copy.mkdir()
            times = measure(bundle, peer(bundle.path, copy), runs, tokens)
            ms = {name: median(values) for name, values in times.items()}
            ratios = {
                "loop of bare": ratio(times, "loop", "bare"),
                "loop of bare, T 0.8": ratio(times, "loop, T 0.8", "bare"),
                "straight of peer": ratio(times, "straight", "peer"),
            }
            rows[kind] = ms | ratios
            is_fine = is_fine and ratios["straight of peer"] <= MOST_OF_PEER
            is_fine = is_fine and max(ratios["loop of bare"], ratios["loop of bare, T 0.8"]) <= MOST_OF_BARE
            shown = (ms["bare"], ms["loop"], ms["straight"], ms["peer"], *ratios.values())
            table.add_row(kind, *(f"{value:.2f}" for value in shown))
    console.print(table)
    write_json(json_path, {"threads": THREADS, "context": CONTEXT, "found": rows})
    raise typer.Exit(0 if is_fine else 1)


if __name__ == "__main__":
    typer.run(main)
