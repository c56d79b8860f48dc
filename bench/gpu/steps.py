"""Part 2: steps/s of an 8B shape and of the widened target, against the floor; and where a step's time goes.

Part 5: whether `--exact bitwise` keeps its promise: one text alone, in a large batch, in small ones with trees.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from bench.emulated import target_options
from bench.gpu.place import Run
from tests.requests import flat_request

from outrider.cloud.engine import Engine, EngineConfig, Policy
from outrider.cloud.engine.config import TreeForm
from outrider.cloud.seam import CommitEvent, Event
from outrider.models.bundle.bundle import Bundle
from outrider.models.grammar.compiler import CompiledGrammar, GrammarCompiler
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.text_rows import AskedRows
from outrider.models.runtimes import open_batch_runtime
from outrider.models.runtimes.base import BatchRuntime, RuntimeOptions, SequenceSlice
from outrider.models.runtimes.torch_paged import TorchPagedRuntime
from outrider.models.text.tokenizer import Tokenizer
from outrider.reference import load_prompts, target_dir

CONTEXT = 1024
"""Of each sequence; less where the model has no room for it."""
_HEADS = 8
"""Of keys and values, as Llama 3 8B; 4 times as many of queries, each of 128."""
_MOST_SHOWN = 25
PLAIN, WRONG, JSON = "plain", "always wrong", "json"
OTHERS = (WRONG, JSON)
LEAST_OF_FLOOR = 0.75
LEAST_TOKENS_PER_S = 2500
LEAST_BITWISE = 0.6
LEAST_OVER_PLAIN = {WRONG: 0.97, JSON: 0.85}

Texts = list[list[int]]
_AHEAD: Final = 4
WITH_TREES, ALONE = "with trees of drafts", "alone"


def measure(run: Run) -> list[str]:
    """Part 2. Returns what is under the bounds of issue 28, on a GPU."""
    bandwidth = _bandwidth(run)
    run.note("bandwidth_gb_s", bandwidth)
    path = _random_model(run)
    options = RuntimeOptions(device=run.device, properties={"dtype": "bf16" if run.is_cuda else "f32"})
    near = _steps(run, "8B shape", path, options, bandwidth["read"], OTHERS)
    missed = _under(near) if run.is_cuda else []
    if run.is_cuda and run.has_time("8B shape, bitwise", 0.5):
        invariant = _steps(run, "8B shape, bitwise", path, replace(options, is_batch_invariant=True), bandwidth["read"])
        missed += [
            f"{num} sequences, bitwise: {invariant[num]['steps_per_s'] / each['steps_per_s']:.2f} of near's steps/s"
            for num, each in near.items()
            if num in invariant and invariant[num]["steps_per_s"] < LEAST_BITWISE * each["steps_per_s"]
        ]
    if run.has_time("8B shape, INT8", 0.6):
        _steps(run, "8B shape, INT8", path, replace(options, properties={"dtype": "i8"}), bandwidth["read"])
    shutil.rmtree(path)
    if run.has_time("widened target", 0.6):
        path = run.target()
        _steps(run, "widened target", path, target_options(Bundle.open(path)), bandwidth["read"])
    return missed


def _under(told: dict[str, dict[str, Any]]) -> list[str]:
    missed = []
    if "1" in told and (share := 1 / told["1"]["over_floor"]) < LEAST_OF_FLOOR:
        missed.append(f"one sequence: {share:.2f} of the steps/s that the memory allows, under {LEAST_OF_FLOOR}")
    if "32" in told and (rate := 32 * told["32"]["engine_steps_per_s"]) < LEAST_TOKENS_PER_S:
        missed.append(f"32 sequences: {rate:.0f} tokens/s, under {LEAST_TOKENS_PER_S}")
    missed += [
        f"{num} sequences, {kind}: {found:.2f} of plain's tokens/s, under {LEAST_OVER_PLAIN[kind]}"
        for num, each in told.items()
        for kind, found in each["over_plain"].items()
        if found < LEAST_OVER_PLAIN[kind]
    ]
    return missed


def _timed_ms(call: Callable[[], Any], repeats: int, is_cuda: bool) -> float:
    """Median ms of a call, its work on the GPU included."""
    took = []
    for _ in range(repeats):
        if is_cuda:
            torch.cuda.synchronize()
        started_s = time.perf_counter()
        call()
        if is_cuda:
            torch.cuda.synchronize()
        took.append(1e3 * (time.perf_counter() - started_s))
    return median(took)


def _bandwidth(run: Run) -> dict[str, float]:
    """GB/s: of a copy, counting bytes read and written; of a sum, which only reads. The floor takes the larger."""
    size = run.sizes.copy_mb << 20
    source = torch.ones(size // 4, dtype=torch.float32, device=run.device)
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    copied = 2 * size / _timed_ms(lambda: target.copy_(source), 9, run.is_cuda) / 1e6
    source.sum()
    summed = size / _timed_ms(source.sum, 9, run.is_cuda) / 1e6
    return {"copy": copied, "sum": summed, "read": max(copied, summed)}


def _random_model(run: Run) -> Path:
    """A Hugging Face directory of an 8B shape with random weights, fewer layers where memory or disk is short."""
    import transformers

    sizes, place = run.sizes, run.made / "random"
    heads = max(1, sizes.hidden // 128)
    per_layer = sizes.hidden * sizes.hidden * 13.3  # attention with 8 of 32 heads, and a feed-forward of 3.5 times
    free = min(shutil.disk_usage(run.made).free * 0.8, _free_bytes(run) * 0.4)
    fitting = int((free / 2 - 2 * sizes.vocab * sizes.hidden) / per_layer)
    layers = max(1, min(sizes.layers, fitting))
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.hidden * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=min(_HEADS, heads),
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    with torch.device(run.device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if run.is_cuda else torch.float32
        )
    model.save_pretrained(place)
    del model
    _free(run)
    run.note("8B shape's sizes", {"layers": layers, "of": sizes.layers, "hidden": sizes.hidden, "ids": sizes.vocab})
    return place


def _free_bytes(run: Run) -> float:
    if run.is_cuda:
        return float(torch.cuda.mem_get_info()[0])
    import psutil

    return float(psutil.virtual_memory().available)


def _free(run: Run) -> None:
    gc.collect()
    if run.is_cuda:
        torch.cuda.empty_cache()


def _steps(
    run: Run, name: str, path: Path, options: RuntimeOptions, read_gb_s: float, others: tuple[str, ...] = ()
) -> dict[str, dict[str, Any]]:
    """Steps of one token per sequence: with picks on the device, with logits copied out, and by the engine; and of a
    prompt. others: kinds of requests beside plain ones.

    Returns what was found by the number of sequences.
    """
    started_s = time.perf_counter()
    sizes = run.sizes
    tokens = CONTEXT + 3 * sizes.steps + max(sizes.sessions) + 64
    block_bytes = _block_bytes(path, options)
    per = -(-tokens // 32)
    needed = max(sizes.sessions) * per * block_bytes
    runtime = TorchPagedRuntime(path, replace(options, num_threads=1, kv_cache_bytes=needed + block_bytes))
    with closing(runtime):
        weights = _read_bytes(runtime)
        told: dict[str, Any] = {"load_s": time.perf_counter() - started_s, "weight_bytes": weights, "sessions": {}}
        for num in sizes.sessions:
            if not run.has_time(f"{name}: {num} sequences"):
                continue
            context = min(CONTEXT, runtime.limits.max_positions - num - 3 * sizes.steps - 1)
            tables = [list(range(i * per, (i + 1) * per)) for i in range(num)]
            for table in tables:
                runtime.forward([SequenceSlice([1] * context, 0, table, 1)])
            batch = [SequenceSlice([1], context, table, 1) for table in tables]
            asked = [AskedRows(SamplingParams(temperature=0.8, seed=i), [context]) for i in range(num)]

            picked = partial(runtime.forward_picks, batch, partial(list, asked), lambda is_over: None)
            whole = partial(runtime.forward, batch)
            picked()
            whole()
            picked_ms = _timed_ms(picked, sizes.steps, run.is_cuda)
            whole_ms = _timed_ms(whole, sizes.steps, run.is_cuda)
            prompt = [SequenceSlice([1] * context, 0, tables[0], 1)]
            prompt_ms = _timed_ms(partial(runtime.forward, prompt), 3, run.is_cuda)
            kv_bytes = num * (context + 1) * block_bytes // 32
            floor_ms = (weights + kv_bytes) / read_gb_s / 1e6
            kinds = (PLAIN, *others)
            rates = {kind: _engine_rate(runtime, num, context, num + 3 * sizes.steps, kind) for kind in kinds}
            rate = rates[PLAIN]
            told["sessions"][str(num)] = {
                "picks_ms": picked_ms,
                "steps_per_s": 1e3 / picked_ms,
                "logits_ms": whole_ms,
                "prompt_tokens_per_s": 1e3 * context / prompt_ms,
                "engine_steps_per_s": rate / num,
                "over_plain": {kind: each / rate for kind, each in rates.items() if kind != PLAIN},
                "floor_ms": floor_ms,
                "over_floor": picked_ms / floor_ms,
                "profile": _profile(picked, sizes.steps, run.is_cuda),
            }
            run.note(name, told)
    _free(run)
    sessions: dict[str, dict[str, Any]] = told["sessions"]
    return sessions


def _engine_rate(runtime: TorchPagedRuntime, num: int, context: int, count: int, kind: str) -> float:
    """Tokens per second of the engine, from when all sequences decode to when the first has `count` tokens.

    kind: PLAIN; WRONG, where a tree of four wrong guesses is drafted for each token; JSON, a string with no end.
    """
    engine = Engine(runtime, EngineConfig(max_running=num, step_tokens=2 * CONTEXT, share_prefixes=False))
    committed, numbers = [0] * num, []
    asked: dict[str, Any] = {"grammar": _endless_string(runtime.limits.vocab_size)} if kind == JSON else {}
    rng = np.random.default_rng(0)

    def sink(index: int, event: Event) -> None:
        committed[index] += len(event.tokens) if isinstance(event, CommitEvent) else 0

    for index in range(num):
        params = SamplingParams(temperature=0.8, seed=index)
        prompt = tuple(1 + at % 512 for at in range(context))
        numbers.append(engine.submit(flat_request(prompt, params, count, **asked), partial(sink, index)))
    while not all(committed):  # prompts
        engine.step()
    before, took_s = sum(committed), 0.0
    while max(committed) < count:
        # Not timed: a server takes drafts in while the model runs.
        for number, at in zip(numbers, committed, strict=True) if kind == WRONG else ():
            engine.draft(number, at, rng.integers(0, runtime.limits.vocab_size, (4, 1)).tolist())
        started_s = time.perf_counter()
        engine.step()
        took_s += time.perf_counter() - started_s
    return (sum(committed) - before) / took_s


@cache
def _endless_string(vocab_size: int) -> CompiledGrammar:
    tokenizer = Tokenizer.from_dir(target_dir())
    compiler = GrammarCompiler(tokenizer, vocab_size, tokenizer.eos_token_ids)
    return compiler.compile(GrammarSpec("json_schema", '{"type": "string", "minLength": 5000}'))


def _block_bytes(path: Path, options: RuntimeOptions) -> int:
    """Bytes of a block of 32 tokens: read from the configuration, because the cache is made with the runtime."""
    import transformers

    config: Any = transformers.AutoConfig.from_pretrained(path)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    element = 4 if options.properties.get("dtype") == "f32" else 2
    return int(32 * 2 * config.num_hidden_layers * config.num_key_value_heads * size * element)


def _read_bytes(runtime: TorchPagedRuntime) -> int:
    """Bytes of the weights that a step reads: all but the table of embeddings, unless the LM head is the same."""
    model = runtime._model
    head = model.get_output_embeddings().weight
    table = model.get_input_embeddings().weight
    total = sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()))
    return int(total if head is table else total - table.numel() * table.element_size())


def _profile(step: Callable[[], Any], repeats: int, is_cuda: bool) -> dict[str, Any]:
    """Per step, ms: the time on the GPU, that of the host, and the kernels and host calls that take most."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=kinds) as found:
        for _ in range(repeats):
            step()
        if is_cuda:
            torch.cuda.synchronize()
    rows = found.key_averages()

    def told(rows: list[Any], of: str) -> list[dict[str, Any]]:
        rows = sorted(rows, key=lambda row: -getattr(row, of))[:_MOST_SHOWN]
        return [
            {"name": row.key[:120], "calls": row.count / repeats, "ms": getattr(row, of) / 1e3 / repeats}
            for row in rows
            if getattr(row, of) > 0
        ]

    kernels = [row for row in rows if str(row.device_type) == "DeviceType.CUDA"]
    host = [row for row in rows if str(row.device_type) == "DeviceType.CPU"]
    return {
        "gpu_ms": sum(row.self_device_time_total for row in kernels) / 1e3 / repeats,
        "launches": sum(row.count for row in kernels) / repeats,
        "host_ms": sum(row.self_cpu_time_total for row in host) / 1e3 / repeats,
        "kernels": told(kernels, "self_device_time_total"),
        "host": told(host, "self_cpu_time_total"),
    }


# -- part 5 ------------------------------------------------------------------------------------------------------------


def bitwise(run: Run) -> list[str]:
    """Part 5. Returns what should not be, in words."""
    sizes = run.sizes
    tokenizer = Tokenizer.from_dir(target_dir())
    given = [tuple(tokenizer.encode(prompt.text)[:64]) for prompt in load_prompts(sizes.prompts * 4)]
    count = -(-sizes.bitwise_tokens // sizes.tokens)
    prompts = [given[number % len(given)] for number in range(count)]
    largest = max(sizes.sessions)
    options = RuntimeOptions(
        device=run.device,
        is_batch_invariant=True if run.is_cuda else None,  # the kernels need a GPU
        properties={"dtype": "bf16" if run.is_cuda else "f32"},
    )
    with closing(open_batch_runtime("torch", target_dir(), options)) as runtime:
        told, counts = Counter[str](), Counter(accepted=0, rejected=0)
        alone = _sampled(runtime, prompts[: sizes.prompts], sizes.tokens, 1)
        for first in range(0, count, largest):
            if not run.has_time(f"bitwise: {count - first} texts", 0.95):
                break
            group = prompts[first : first + largest]
            batched = _sampled(runtime, group, sizes.tokens, largest, first=first)
            drafted = _sampled(runtime, group, sizes.tokens, max(1, largest // 2), batched, counts, first)
            told["tokens"] += sum(map(len, batched))
            told[WITH_TREES] += _different(batched, drafted)
            told[ALONE] += 0 if first else _different(alone, batched[: sizes.prompts])
            run.note("bitwise", dict(told) | {"drafted tokens": dict(counts)})
    missed = [
        f"bitwise: no drafted token was {name}" for name, number in counts.items() if told["tokens"] and not number
    ]
    if told["tokens"] < sizes.bitwise_tokens and run.is_cuda:
        missed.append(f"bitwise: {told['tokens']} tokens in the time there was, of {sizes.bitwise_tokens}")
    wrong = {name: told[name] for name in (WITH_TREES, ALONE) if told[name]}
    return [*missed, *(f"bitwise: other tokens {name}: {number}" for name, number in wrong.items() if run.is_cuda)]


def _sampled(
    runtime: BatchRuntime,
    prompts: Sequence[tuple[int, ...]],
    length: int,
    at_once: int,
    drafted: Texts | None = None,
    counts: Counter[str] | None = None,
    first: int = 0,
) -> Texts:
    """Sampled texts of so many sequences at once. drafted: what they are drafted from, with wrong guesses beside.
    counts: gets the drafted tokens that were accepted, and those that were not. first: the seed of the first text.
    """
    engine = Engine(
        runtime,
        EngineConfig(max_running=at_once, max_queue=len(prompts), policy=Policy.VERIFY, form=TreeForm.TREE),
    )
    rng, vocab_size = np.random.default_rng(0), runtime.limits.vocab_size
    texts: Texts = [[] for _ in prompts]
    numbers: dict[int, int] = {}
    for index, prompt in enumerate(prompts):

        def sink(event: Event, index: int = index) -> None:
            if isinstance(event, CommitEvent):
                texts[index] += event.tokens
                if counts is not None:
                    counts["accepted"] += event.accepted
                    counts["rejected"] += event.proposed - event.accepted

        params = SamplingParams(temperature=0.8, seed=first + index)
        numbers[index] = engine.submit(flat_request(prompt, params, length, patience_ms=0.0), sink)
    while engine.has_work:
        engine.step()
        for index, text in enumerate(texts) if drafted is not None else ():
            if 0 < len(text) < length - 1 and drafted is not None:
                right = drafted[index][len(text) : len(text) + int(rng.integers(1, _AHEAD + 1))]
                wrong = [*right[:-1], (right[-1] + 1) % vocab_size]
                engine.draft(numbers[index], len(text), [wrong, right] if rng.integers(2) else [right, wrong])
    return texts


def _different(expected: Texts, found: Texts) -> int:
    """Tokens from the first one on that differs."""
    pairs = zip(expected, found, strict=True)
    firsts = (next((at for at, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0])) for pair in pairs)
    return sum(len(text) - first for text, first in zip(expected, firsts, strict=True))
