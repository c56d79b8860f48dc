"""Compares our engines with their peers, without drafts: the same target, 16 greedy sequences, batch by batch in turn.

  engine    our own engine beside `openvino_genai`'s continuous batching (`pip install ".[peers]"`), in a process
            each, without HTTP: the same IR, f32 arithmetic, f32 KV cache, threads, step budget
  serving   `outrider-cloud serve --engine vllm` beside vLLM's own OpenAI server: the same safetensors, the same client,
            streamed completions over HTTP; runs with `--vllm-python`, an environment as docs/vllm.md says

    python -m bench.peers [--widen 1200] [--runs 5] [--threads 1] [--json PATH]
    python -m bench.peers --vllm-python PYTHON --only serving
    python -m bench.peers --vllm-python PYTHON --only serving --target ./Qwen3-8B --compiled --kv-cache-mb 16384 \
        --sequences 32 [--ask json]    # on a GPU; while decoding, a step gives each sequence a token

What differs: our engine runs each token of a prompt as a sequence of its own, for bits that do not depend on the batch,
and picks in Python; vLLM behind our API has speculation switched on without drafts, and no asynchronous scheduling.

While one runs, the other processes are stopped (SIGSTOP), so nothing idle takes part; all have huge pages. `decode`
begins when every text has its first token. Exits 1 where ours is under 0.95 of the peer's tokens/s, prompts included or
decode alone (medians of the runs' ratios), or where texts have another length. Texts may differ: other kernels round
differently.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.bare_http import Completion, complete
from bench.pairs import safetensors_target
from bench.peer_engines import HUGE_PAGES, Batch, Done, Run, embedded, openvino_genai
from bench.processes import Remote, end_group, free_port, is_healthy, remote, source_path, start_group, turn_of
from bench.report import TO_JSON, median_ratio, option, parser, verdict
from rich.console import Console
from rich.table import Table

from outrider.export.make.reference_pair import export_reference_pair
from outrider.models.errors import RuntimeUnavailable
from outrider.models.text.tokenizer import Tokenizer
from outrider.reference import load_prompts, target_dir

LEAST: Final = 0.95
CONTEXT: Final = 96
ASKED: Final[Mapping[str, Mapping[str, Any]]] = {
    "plain": {},
    "json": {"structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 4096}}},
    "logprobs": {"logprobs": 20},
}
"""Of each completion by a server. No JSON text ends before its last token."""
OURS, PEER = "ours", "peer"
MODEL: Final = "target"


def done_of(texts: Sequence[Completion]) -> Done:
    """Of a batch. A text's tokens are spread evenly over its pieces."""
    begun_s = max(each.arrival_s[0] for each in texts)
    before = (each.num_tokens * sum(at <= begun_s for at in each.arrival_s) / len(each.arrival_s) for each in texts)
    took_s, num_tokens = max(each.arrival_s[-1] for each in texts), sum(each.num_tokens for each in texts)
    return Done(tuple("".join(each.pieces) for each in texts), num_tokens, took_s, begun_s, sum(before))


@contextmanager
def _serving(
    arguments: Sequence[str], log: Path, more: Mapping[str, str], health: str, asked: Mapping[str, Any]
) -> Iterator[Run]:
    """A server in a process group of its own, stopped while it has no turn. health: answers 200 once it is ready.
    asked: of each completion.

    Raises RuntimeUnavailable with its last lines where it ends before that.
    """
    port, environment = free_port(), {**os.environ, **more}
    with log.open("w") as lines:
        nothing, err = subprocess.DEVNULL, subprocess.STDOUT
        command = [*arguments, "--port", str(port)]
        process = start_group(command, env=environment, stdin=nothing, stdout=lines, stderr=err)

    async def stream_all(batch: Batch) -> Done:
        began_s = time.perf_counter()
        url = f"http://127.0.0.1:{port}"
        streams = (complete(url, {**_body(prompt, batch.max_tokens), **asked}, began_s) for prompt in batch.prompts)
        return done_of(await asyncio.gather(*streams))

    def run(batch: Batch) -> Done:
        with turn_of(process.pid):
            return asyncio.run(stream_all(batch))

    try:
        if not is_healthy(f"http://127.0.0.1:{port}{health}", process):
            said = log.read_text(errors="replace")[-1500:]
            raise RuntimeUnavailable(f"`{' '.join(command[1:4])}` did not start: {said}")
        with turn_of(process.pid):
            pass  # so that it is stopped
        yield run
    finally:
        end_group(process)


@contextmanager
def open_servers(options: argparse.Namespace, place: Path) -> Iterator[tuple[Run, Run]]:
    """vLLM behind our API, and vLLM's own server, on all cores.

    The server's own options stay at their defaults: ours runs steps in turn, vLLM's may schedule ahead.
    """
    python, asked, places = options.vllm_python, ASKED[options.ask], str(options.sequences)
    target = str(options.target or safetensors_target(options.widen or None))
    dtype = "auto" if options.target else "float32"
    more = {
        "PYTHONPATH": source_path(),
        "OMP_NUM_THREADS": str(options.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as ours sets it: or vLLM's own server ties them to a core
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    budget = [python, "-c", "from outrider.cloud.server.vllm_target import step_tokens; print(step_tokens())"]
    ours = [
        *(python, "-m", "outrider.cloud.server", "serve", target, "--engine", "vllm", "--name", MODEL),
        *("--threads", str(options.threads), "--max-running", places, "--kv-cache-mb", str(options.kv_cache_mb)),
        *("--no-share-prefixes", "--no-lookup", "--drain-s", "0", "--vllm-option", f"dtype={dtype}"),
        *("--vllm-option", f"enforce_eager={not options.compiled}"),
    ]
    peer = [
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--served-model-name", MODEL),
        *("--host", "127.0.0.1", "--dtype", dtype, "--max-num-seqs", places, "--max-num-batched-tokens"),
        *(subprocess.check_output(budget, env={**os.environ, **more}, text=True).strip(), "--kv-cache-memory-bytes"),
        *(str(options.kv_cache_mb << 20), "--no-enable-prefix-caching"),
        *("--gpu-memory-utilization", "0.3"),  # with a cache of that size: what has to be free beside ours
        *(() if options.compiled else ("--enforce-eager",)),
    ]
    with (
        _serving(ours, place / "ours.log", more, "/health/ready", asked) as first,
        _serving(peer, place / "peer.log", more, "/health", asked) as second,
    ):
        yield first, second


def _body(prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tokens/s of each run, ours and the peer's. num_same: texts that are equal, of num_texts, in the last run."""

    name: str
    ours: tuple[float, ...]
    peer: tuple[float, ...]
    ours_decode: tuple[float, ...]
    peer_decode: tuple[float, ...]
    num_same: int
    num_texts: int

    @property
    def ratio(self) -> float:
        """Median of the runs' ratios, prompts included."""
        return median_ratio(self.ours, self.peer)

    @property
    def decode_ratio(self) -> float:
        """The same for decoding alone."""
        return median_ratio(self.ours_decode, self.peer_decode)

    @property
    def misses(self) -> list[str]:
        """The bounds that it misses, in words."""
        found = {"tokens/s": self.ratio, "tokens/s while decoding": self.decode_ratio}
        return [
            f"{self.name}: {what} is {ratio:.3f} of the peer's, expected at least {LEAST:g}"
            for what, ratio in found.items()
            if ratio < LEAST
        ]


def compare(name: str, ours: Run, peer: Run, batch: Batch, num_runs: int) -> Comparison:
    """Runs the batch with each in turn, in changing order, after one run that warms up."""
    found: dict[str, list[Done]] = {OURS: [], PEER: []}
    runs, expected = {OURS: ours, PEER: peer}, len(batch.prompts) * batch.max_tokens
    for index in range(num_runs + 1):
        for side in sorted(runs, reverse=bool(index % 2)):
            done = runs[side](batch)
            if done.num_tokens != expected:
                raise RuntimeUnavailable(f"{name}: {side} gave {done.num_tokens} tokens; expected {expected}")
            if index:
                found[side].append(done)
    return Comparison(
        name=name,
        ours=tuple(done.rate for done in found[OURS]),
        peer=tuple(done.rate for done in found[PEER]),
        ours_decode=tuple(done.decode_rate for done in found[OURS]),
        peer_decode=tuple(done.decode_rate for done in found[PEER]),
        num_same=sum(a == b for a, b in zip(found[OURS][-1].texts, found[PEER][-1].texts, strict=True)),
        num_texts=len(batch.prompts),
    )


@contextmanager
def open_engines(target: Path, threads: int, num_blocks: int) -> Iterator[tuple[Run, Run]]:
    """Our engine and openvino_genai, each stopped while it has no turn."""
    cores = frozenset(sorted(os.sched_getaffinity(0))[:threads])
    with ExitStack() as stack:
        ours, peer = (
            stack.enter_context(remote(partial(make, target, threads, num_blocks), cores))
            for make in (embedded, openvino_genai)
        )
        yield partial(_in_turn, ours), partial(_in_turn, peer)


def _in_turn(engine: Remote, batch: Batch) -> Done:
    with turn_of(engine.pid):
        done: Done = engine.call("__call__", batch)
    return done


def make_batch(sequences: int, max_tokens: int, context: int = CONTEXT) -> Batch:
    """Held-out prompts, cut to `context` tokens."""
    tokenizer = Tokenizer.from_dir(target_dir())
    prompts = tuple(tuple(tokenizer.encode(prompt.text)[:context]) for prompt in load_prompts(sequences))
    return Batch(prompts, max_tokens)


def as_table(comparisons: Sequence[Comparison]) -> Table:
    """Medians."""
    names = ("", "tokens/s: ours", "peer", "ratio", "decode: ours", "peer", "ratio", "same texts")
    table = Table(*names, title="medians of the runs")
    for each in comparisons:
        table.add_row(
            each.name,
            f"{median(each.ours):.1f}",
            f"{median(each.peer):.1f}",
            f"{each.ratio:.3f}",
            f"{median(each.ours_decode):.1f}",
            f"{median(each.peer_decode):.1f}",
            f"{each.decode_ratio:.3f}",
            f"{each.num_same} of {each.num_texts}",
        )
    return table


def main(given: Sequence[str] | None = None) -> int:
    """The command."""
    cli = parser(
        __doc__,
        {
            "--widen": option(1200.0, "MB of the widened FP32 target; 0: as it is"),
            "--sequences": option(16),
            "--max-tokens": option(64),
            "--runs": option(5),
            "--threads": option(1, "of the model, one core each"),
            "--kv-blocks": option(512, "of 32 tokens"),
            "--target": option(type=Path, help="another model for vLLM, a directory of safetensors, in its own type"),
            "--kv-cache-mb": option(256, "of vLLM; at least one text of the model's full length"),
            "--ask": option("plain", "of vLLM's texts", choices=tuple(ASKED)),
            "--only": option(choices=("engine", "serving")),
            "--vllm-python": option(help="the interpreter of an environment with vLLM and Outrider"),
            "--compiled": option(False, "vLLM without enforce_eager, both"),
            **TO_JSON,
        },
    )
    options = cli.parse_args(given)
    if options.only == "serving" and not options.vllm_python:
        cli.error("--only serving needs --vllm-python")
    os.environ |= HUGE_PAGES  # of all processes that are started here
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or stopped processes would stay behind
    batch, console = make_batch(options.sequences, options.max_tokens), Console(width=130)
    comparisons: list[Comparison] = []
    if options.only != "serving":
        target = export_reference_pair(widen_mb=options.widen or None).target
        with open_engines(target, options.threads, options.kv_blocks) as (ours, peer):
            comparisons.append(compare("our engine / openvino_genai", ours, peer, batch, options.runs))
    if options.only != "engine" and options.vllm_python:
        with tempfile.TemporaryDirectory() as place, open_servers(options, Path(place)) as (ours_server, peer_server):
            name = f"vLLM behind our API / vLLM's own, {options.ask}"
            comparisons.append(compare(name, ours_server, peer_server, batch, options.runs))
    console.print(as_table(comparisons))
    misses = [miss for each in comparisons for miss in each.misses]
    document = {
        "widen_mb": options.widen,
        "threads": options.threads,
        "comparisons": [asdict(each) | {"ratio": each.ratio} for each in comparisons],
    }
    return verdict(console, misses, options.json, document)


if __name__ == "__main__":
    sys.exit(main())
