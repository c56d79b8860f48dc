"""Opens the engines of `bench.peers`, each in the process that calls it; they generate batches.

`embedded` is our engine without HTTP and without drafts; `openvino_genai` is its continuous batching. Both are compiled
with the same properties: f32 arithmetic, an f32 KV cache, the same threads. Both run the same token budget per step.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.requests import flat_request

STEP_TOKENS: Final = 256
HUGE_PAGES: Final = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""The environment of every contestant (glibc 2.35 or newer; others ignore it). In pages of 4 kB, steps of two processes
with the same engine and the same weights differed by up to 10 %, by where the weights lay; in huge pages by 1.5 %."""
BLOCK_SIZE: Final = 32
"""Of the CPU plugin's KV cache, for both."""
PROPERTIES: Final = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "PERFORMANCE_HINT": "LATENCY",
    "ENABLE_CPU_PINNING": "NO",
}
"""Of openvino_genai; those that our runtime sets (`openvino_graph`)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """All prompts arrive at once; each text has exactly `max_tokens` tokens, greedy."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Done:
    """A finished batch. took_s: from the first submission to the last token. Decoding begins when every text has its
    first token: num_before tokens had come by then, before_s seconds after the submission.
    """

    texts: tuple[object, ...]
    num_tokens: int
    took_s: float
    before_s: float
    num_before: float

    @property
    def rate(self) -> float:
        """Tokens/s, prompts included."""
        return self.num_tokens / self.took_s

    @property
    def decode_rate(self) -> float:
        """Tokens/s of the rest, once every text has begun."""
        return (self.num_tokens - self.num_before) / (self.took_s - self.before_s)


Run = Callable[[Batch], Done]


@contextmanager
def embedded(target: Path, threads: int, num_blocks: int) -> Iterator[Run]:
    """Our engine, as `outrider-cloud serve` configures it, stepped by the caller."""
    from outrider.cloud.engine import Engine, EngineConfig
    from outrider.cloud.seam import CommitEvent, Event
    from outrider.models.bundle.bundle import Bundle
    from outrider.models.picks.sampling import SamplingParams
    from outrider.models.runtimes import open_batch_runtime
    from outrider.models.runtimes.base import RuntimeOptions

    options = RuntimeOptions(num_threads=threads, kv_cache_bytes=num_blocks * _block_bytes(target))
    runtime = open_batch_runtime("openvino", Bundle.open(target).model_file, options)
    assert runtime.num_blocks == num_blocks, f"{runtime.num_blocks} KV blocks; expected {num_blocks}"
    engine = Engine(runtime, EngineConfig(share_prefixes=False, step_tokens=STEP_TOKENS))
    engine.calibrate()

    def run(batch: Batch) -> Done:
        texts: list[list[int]] = [[] for _ in batch.prompts]

        def sink_of(text: list[int]) -> Callable[[Event], None]:
            return lambda event: text.extend(event.tokens) if isinstance(event, CommitEvent) else None

        began_s = time.perf_counter()
        for prompt, text in zip(batch.prompts, texts, strict=True):
            engine.submit(flat_request(prompt, SamplingParams(), batch.max_tokens), sink_of(text))
        while not all(texts):
            engine.step()
        before_s, num_before = time.perf_counter() - began_s, sum(map(len, texts))
        while engine.has_work:
            engine.step()
        took_s = time.perf_counter() - began_s
        return Done(tuple(map(tuple, texts)), sum(map(len, texts)), took_s, before_s, num_before)

    try:
        yield run
    finally:
        runtime.close()


def _block_bytes(target: Path) -> int:
    """f32 keys and values of one block, all layers."""
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_size * 4
    return int(per_token * BLOCK_SIZE)


def link_for_genai(bundle: Path, copy: Path) -> None:
    """Links to a bundle's files in `copy`, and its tokenizer as openvino_genai reads it."""
    import openvino as ov
    import openvino_tokenizers
    from transformers import AutoTokenizer

    for path in bundle.iterdir():
        (copy / path.name).symlink_to(path)
    tokenizer = AutoTokenizer.from_pretrained(bundle, local_files_only=True)
    models = openvino_tokenizers.convert_tokenizer(tokenizer, with_detokenizer=True)
    for model, name in zip(models, ("openvino_tokenizer", "openvino_detokenizer"), strict=True):
        ov.save_model(model, copy / f"{name}.xml")


@contextmanager
def openvino_genai(target: Path, threads: int, num_blocks: int) -> Iterator[Run]:
    """`ContinuousBatchingPipeline` over links to the bundle's files, stepped by the caller as its `generate` does."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    with tempfile.TemporaryDirectory() as copy:
        link_for_genai(target, Path(copy))
        scheduling = genai.SchedulerConfig()
        scheduling.num_kv_blocks = num_blocks
        scheduling.max_num_batched_tokens = STEP_TOKENS
        scheduling.enable_prefix_caching = False
        properties = PROPERTIES | {"INFERENCE_NUM_THREADS": threads}
        pipeline = genai.ContinuousBatchingPipeline(copy, scheduling, "CPU", properties, {}, {})

        def run(batch: Batch) -> Done:
            config = genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = batch.max_tokens, True, False
            texts: list[list[int]] = [[] for _ in batch.prompts]
            began_s = time.perf_counter()
            handles = [
                pipeline.add_request(number, ov.Tensor(np.array([prompt], np.int64)), config)
                for number, prompt in enumerate(batch.prompts)
            ]

            def read() -> None:
                for handle, text in zip(handles, texts, strict=True):
                    while handle.can_read():
                        for output in handle.read().values():
                            text += output.generated_ids

            while not all(texts):
                pipeline.step()
                read()
            before_s, num_before = time.perf_counter() - began_s, sum(map(len, texts))
            while pipeline.has_non_finished_requests():
                pipeline.step()
            took_s = time.perf_counter() - began_s
            read()
            return Done(tuple(map(tuple, texts)), sum(map(len, texts)), took_s, before_s, num_before)

        yield run
