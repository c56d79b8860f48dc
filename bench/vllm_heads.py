"""Compares a device's drafts, the target's own heads, and both, on vLLM: passes per token.

    PYTHON -m bench.vllm_heads HEADS [--distance 0 1 2] [--texts 8] [--max-tokens 64] [--json PATH]

PYTHON is the interpreter of vLLM's environment, HEADS a directory of EAGLE heads for the reference target
(`training.eagle_head` in reference/ trains some). The device is the reference draft. It sees a commit, and its drafts
of it count, so many steps later: 0 is in sync with every step, 1 a round trip of one step. Steps run when all drafts
are there and seem to take 20 ms, so nothing depends on the clock. The policy is the one that saves passes; with `auto`,
which saves time, a token that is unlikely to be accepted is not verified. The rows:

  nothing   no drafts
  stock     vLLM's own server with the same heads, which draft as many tokens after each step
  heads     ours with heads, no device
  device    ours without heads
  both      ours with heads and device

Exits 1 where a text differs from the one without drafts, "both" takes more than 1.03 times the passes of the better of
"heads" and "device", or, at temperature 0, "heads" more than 1.03 times those of "stock".
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from bench.report import TO_JSON, figures_table, option, parser, verdict
from rich.console import Console
from tests.requests import flat_request
from tests.vllm.gated import SteadyScheduler
from tests.vllm.serving import start_engine
from transformers import AutoModelForCausalLM, DynamicCache

from outrider.cloud.pending.policy import Policy
from outrider.cloud.seam import CommitEvent, EndEvent, Event
from outrider.cloud.vllm.engine import VllmEngine
from outrider.cloud.vllm.heads import NUM_DRAFTED, heads_config
from outrider.models.errors import RequestError
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.text.tokenizer import Tokenizer
from outrider.reference import draft_dir, load_prompts, target_dir

SLACK: Final = 1.03
DEPTH: Final = 8
"""Tokens that the device is ahead of what it knows, beyond those that are committed meanwhile."""
_ARRIVAL_S: Final = 0.005
"""For drafts on their way to the engine process."""
_VARIABLE: Final = "OUTRIDER_BENCH_LOCK_STEP"
_SHARED: Final = struct.Struct("qqq")
"""The step that the scheduler is ready for, the last that it may run (negative: all), tokens committed before."""


class Device:
    """The draft model over one text. params: the request's, so that its noise is the target's."""

    def __init__(self, model: Any, params: SamplingParams) -> None:
        self._model, self._params = model, params
        self._cache, self._read = DynamicCache(), list[int]()

    @torch.inference_mode()
    def draft(self, text: Sequence[int], count: int) -> list[int]:
        """`count` picks after `text`."""
        drafted = list(text)
        while len(drafted) < len(text) + count:
            same = next((i for i, (a, b) in enumerate(zip(self._read, drafted, strict=False)) if a != b), None)
            kept = min(len(self._read) if same is None else same, len(drafted) - 1)
            if kept < len(self._read):
                self._cache.crop(kept - len(self._read))
            new = drafted[kept:]
            row = self._model(torch.tensor([new]), past_key_values=self._cache, use_cache=True).logits[0, -1]
            self._read = list(drafted)
            drafted.append(pick(row.float().numpy(), self._params, len(drafted)))
        return drafted[len(text) :]


class Text:
    """One text: a sink, and the device's view of it."""

    def __init__(self, prompt: Sequence[int], params: SamplingParams, device: Device | None) -> None:
        self.prompt, self.params, self.device = tuple(prompt), params, device
        self.number = 0
        self.tokens: list[int] = []
        self.lengths: list[int] = [0]  # after each step
        self.end: EndEvent | None = None
        self.ended = threading.Event()

    def __call__(self, event: Event) -> None:
        if isinstance(event, CommitEvent):
            self.tokens += event.tokens
        elif isinstance(event, EndEvent):
            self.end = event
            self.ended.set()

    def post(self, engine: VllmEngine, distance: int) -> None:
        """Drafts behind what the device knows, `distance` steps late."""
        self.lengths.append(len(self.tokens))
        if self.device is None or self.ended.is_set() or not self.tokens:
            return
        known = self.lengths[max(0, len(self.lengths) - 1 - distance)]
        # A device goes on from its own guesses: it is as far ahead as it would be without a network.
        path = self.device.draft([*self.prompt, *self.tokens[:known]], DEPTH + len(self.tokens) - known)
        try:
            engine.draft(self.number, known, [path])
        except RequestError as error:
            if error.code != "stale_draft":  # a wrong guess, which is known by now
                raise


@dataclass(frozen=True, slots=True)
class Row:
    """distance: None without a device."""

    temperature: float
    drafts: str
    distance: int | None
    passes_per_token: float
    num_different: int


class LockStepScheduler(SteadyScheduler):
    """Says that it is ready for a step, and waits for leave. vLLM's engine process imports it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shared = _shared_memory(Path(os.environ[_VARIABLE]))
        self._num_steps = 0

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """A step."""
        _, allowed, _ = _SHARED.unpack(self._shared[:])
        if allowed >= 0 and self.get_num_unfinished_requests():
            self._num_steps += 1
            self._shared[:8] = struct.pack("q", self._num_steps)
            self._shared[16:] = struct.pack("q", self._book.totals.committed)
            while 0 <= _SHARED.unpack(self._shared[:])[1] < self._num_steps:
                time.sleep(0.0005)
        return super().schedule(throttle_prefills)


def _shared_memory(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), _SHARED.size)


class Bench:
    """One vLLM, with heads or without, whose steps wait for all drafts."""

    def __init__(self, heads: str, place: Path, policy: Policy) -> None:
        place.write_bytes(_SHARED.pack(0, -1, 0))
        self._shared = _shared_memory(place)
        os.environ[_VARIABLE] = str(place)
        given = [f"heads={heads}"] if heads else []
        scheduler = "bench.vllm_heads.LockStepScheduler"
        self.engine = start_engine(Path(target_dir()), *given, scheduler=scheduler, policy=policy)
        self.engine.calibrate()
        self._committed = 0

    def run(self, texts: Sequence[Text], max_tokens: int, distance: int) -> float:
        """Generates them side by side. Returns passes per token."""
        self._allow(_SHARED.unpack(self._shared[:])[0])
        for text in texts:
            request = flat_request(text.prompt, text.params, max_tokens, patience_ms=0.0)
            text.number = self.engine.submit(request, text)
        while any(not text.ended.is_set() for text in texts):
            ready, allowed, committed = _SHARED.unpack(self._shared[:])
            if ready == allowed or sum(len(text.tokens) for text in texts) < committed - self._committed:
                time.sleep(0.0005)
                continue
            for text in texts:
                text.post(self.engine, distance)
            time.sleep(_ARRIVAL_S)
            self._allow(ready)
        self._committed += sum(len(text.tokens) for text in texts)
        passes = sum(text.end.usage.target_passes for text in texts if text.end)
        return passes / sum(len(text.tokens) for text in texts)

    def _allow(self, number: int) -> None:
        self._shared[8:16] = struct.pack("q", number)

    def close(self) -> None:
        """Ends vLLM."""
        self._allow(-1)
        self.engine.stop()
        self.engine.close()


@contextmanager
def opened(heads: str, policy: Policy) -> Iterator[Bench]:
    """A vLLM of ours."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(heads, Path(folder) / "steps", policy)
        try:
            yield bench
        finally:
            bench.close()


def stock(
    heads: str, prompts: Sequence[Sequence[int]], max_tokens: int, temperatures: Sequence[float]
) -> Iterator[tuple[float, float]]:
    """Each temperature, and passes per token of vLLM itself. Sampled texts are its own, not ours."""
    from vllm import LLM
    from vllm import SamplingParams as Stock

    llm = LLM(
        model=str(target_dir()),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=256 << 20,
        disable_log_stats=False,
        speculative_config=heads_config(heads, NUM_DRAFTED, 16),
    )

    def verified() -> float:
        """Passes with drafts. Accepted tokens say less: vLLM counts those behind the text's end, too."""
        return float(sum(each.value for each in llm.get_metrics() if each.name == "vllm:spec_decode_num_drafts"))

    for temperature in temperatures:
        before = verified()
        params = [
            Stock(temperature=temperature, seed=index, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
            for index in range(len(prompts))
        ]
        outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        yield temperature, (len(prompts) + verified() - before) / tokens  # a prompt's pass has none
    llm.llm_engine.engine_core.shutdown()


def main(given: Sequence[str] | None = None) -> int:
    """The command."""
    options = parser(
        __doc__,
        {
            "heads": {"help": "their directory"},
            "--distance": option([0, 1, 2], "steps of a round trip"),
            "--temperature": option([0.0, 0.8]),
            "--texts": option(8),
            "--policy": option(Policy.VERIFY.value, "of the server", choices=[each.value for each in Policy]),
            "--max-tokens": option(64),
            **TO_JSON,
        },
    ).parse_args(given)
    console = Console(width=None if sys.stdout.isatty() else 120)
    tokenizer = Tokenizer.from_dir(Path(target_dir()))
    prompts = [tokenizer.encode(prompt.text, add_special_tokens=False) for prompt in load_prompts(options.texts)]
    draft = AutoModelForCausalLM.from_pretrained(draft_dir(), dtype=torch.float32).eval()
    rows: list[Row] = []
    plain: dict[float, list[list[int]]] = {}

    def measure(bench: Bench, drafts: str, temperature: float, distance: int | None) -> None:
        params = [SamplingParams(temperature=temperature, seed=index) for index in range(len(prompts))]
        texts = [
            Text(prompt, own, None if distance is None else Device(draft, own))
            for prompt, own in zip(prompts, params, strict=True)
        ]
        found = bench.run(texts, options.max_tokens, distance or 0)
        tokens = [text.tokens for text in texts]
        different = sum(a != b for a, b in zip(plain.setdefault(temperature, tokens), tokens, strict=True))
        rows.append(Row(temperature, drafts, distance, found, different))
        console.print(rows[-1], highlight=False)

    for temperature, found in stock(options.heads, prompts, options.max_tokens, options.temperature):
        rows.append(Row(temperature, "stock", None, found, 0))
        console.print(rows[-1], highlight=False)
    for heads in ("", options.heads):
        with opened(heads, Policy(options.policy)) as bench:
            for temperature in options.temperature:
                measure(bench, "heads" if heads else "nothing", temperature, None)
                for distance in options.distance:
                    measure(bench, "both" if heads else "device", temperature, distance)
    table = figures_table("passes per token", "temperature", "drafts", "distance", "passes per token", left=("drafts",))
    for row in sorted(rows, key=lambda row: (row.temperature, -1 if row.distance is None else row.distance)):
        distance = "-" if row.distance is None else str(row.distance)
        table.add_row(f"{row.temperature:g}", row.drafts, distance, f"{row.passes_per_token:.3f}")
    console.print(table)
    return verdict(
        console, misses(rows), options.json, {"policy": options.policy, "rows": [asdict(row) for row in rows]}
    )


def misses(rows: Sequence[Row]) -> list[str]:
    """The bounds that are missed, in words."""
    wrong = [row for row in rows if row.num_different]
    missed = [f"{row.drafts} at {row.temperature:g}: {row.num_different} texts differ" for row in wrong]
    found = {(row.temperature, row.drafts, row.distance): row.passes_per_token for row in rows}
    for (temperature, drafts, distance), passes in found.items():
        of: list[tuple[str, int | None]] = []
        if drafts == "both":
            of = [("heads", None), ("device", distance)]
        elif drafts == "heads" and temperature == 0.0:
            of = [("stock", None)]
        for name, at in of:
            other = found.get((temperature, name, at))
            if other is not None and passes > SLACK * other:
                missed.append(f"{drafts} at {temperature:g}, {distance}: {passes:.3f}, {name} {other:.3f}")
    return missed


if __name__ == "__main__":
    sys.exit(main())
