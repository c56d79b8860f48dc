"""Compares sources of drafts, each alone and the engine's choice among them, on four kinds of text.

  code         beginnings of Python functions, T 0.6
  json         records after a schema and four examples, T 0.3
  grounded     a passage, then a question whose answer quotes it, T 0.3
  hot          the code again, T 1.2

The sources: the device's draft model at no distance (its drafts are there before each step), prompt lookup, the n-gram
pool of lookahead decoding, draft heads, an earlier text (what the same prompt got with another seed), a prediction (the
text itself, every 25th token changed); and all but the prediction, chosen among by the engine, with the device's
drafts and without.

The measure is tokens per pass. It depends on no clock, because the engine's policy is to save passes. Times are the
processor's own, of this thread. Exits 1 where a text differs from the one without drafts, or the choice has fewer than
0.95 of the best single source's tokens per pass.

    outrider-export heads BUNDLE reference --prompts FILE --out HEADS
    python -m bench.sources --heads HEADS [--texts 6] [--max-tokens 100] [--json PATH]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, Final

from bench.report import write_json
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from outrider.cloud.engine import Engine, EngineConfig, Policy
from outrider.cloud.pending.earlier import EarlierText
from outrider.cloud.pending.head_guesses import HeadGuesses
from outrider.cloud.pending.lookup import PromptLookup
from outrider.cloud.pending.ngram_pool import NgramPool
from outrider.cloud.seam import CommitEvent, EndEvent, Event, GenerateRequest
from outrider.export.make.reference_pair import export_reference_pair
from outrider.models.bundle import Bundle
from outrider.models.draft_heads import DraftHeads
from outrider.models.runtimes import open_batch_runtime, open_sequence_runtime
from outrider.models.runtimes.base import BatchRuntime, RuntimeOptions, SequenceRuntime
from outrider.models.sampling import SamplingParams, pick
from outrider.models.tokenizer import Tokenizer
from outrider.reference import load_prompts

LEAST: Final = 0.95
"""Of the best single source's tokens per pass."""
DEPTH: Final = 6
"""Tokens that the device drafts after each commit."""
ALL, OWN = "chosen", "chosen, no device"
MODEL, LOOKUP, LOOKAHEAD, HEADS, EARLIER = "draft model", "prompt lookup", "lookahead", "draft heads", "earlier text"
PREDICTED: Final = "prediction"
CHOSEN_FROM: Final = (MODEL, LOOKUP, LOOKAHEAD, HEADS, EARLIER)
TEMPERATURES: Final = {"code": 0.6, "json": 0.3, "grounded": 0.3, "hot": 1.2}

NAMES: Final = ("reader", "parser", "buffer", "socket", "header", "message", "thread", "stream", "cursor", "loader")
FIELDS: Final = '{"name": string, "size": integer, "is_open": boolean, "tags": [string]}'
SCHEMA: Final = f"# Each record has the schema {FIELDS}\nRECORDS = [\n"


@dataclass(frozen=True, slots=True)
class Row:
    """One source on one kind of text. ms: of the verifier's thread, or the device's, per pass."""

    kind: str
    source: str
    tokens_per_pass: float
    acceptance: float
    ms: float
    num_different: int


def texts_of(kind: str, count: int, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The prompts of a kind."""
    held_out = [prompt.text for prompt in load_prompts(count)]
    if kind == "json":
        texts = [SCHEMA + "".join(_record(seed + index) for index in range(4)) for seed in range(count)]
    elif kind == "grounded":
        texts = [f"{text}\n\n\n# The same again:\n\n\n{_first_line(text)}" for text in held_out]
    else:
        texts = held_out
    return [tuple(tokenizer.encode(text)) for text in texts]


def _record(number: int) -> str:
    name, other = NAMES[number % len(NAMES)], NAMES[(3 * number + 1) % len(NAMES)]
    is_open = "true" if number % 3 else "false"
    return (
        f'    {{"name": "{name}", "size": {64 * number + 16}, "is_open": {is_open}, "tags": ["{other}", "default"]}},\n'
    )


def _first_line(text: str) -> str:
    return text.partition("\n")[0] + "\n"


class Device:
    """A draft model that is in sync whenever a step begins."""

    def __init__(self, runtime: SequenceRuntime) -> None:
        self._runtime = runtime
        self._text: list[int] = []

    def draft(self, text: Sequence[int], params: SamplingParams) -> list[int]:
        """DEPTH tokens after `text`, by the request's own noise."""
        kept = 0
        while kept < min(len(text) - 1, len(self._text)) and text[kept] == self._text[kept]:
            kept += 1
        self._runtime.truncate(min(kept, self._runtime.length))
        known = self._runtime.length
        self._text = list(text)
        logits = self._runtime.extend(text[known:])
        path: list[int] = []
        while True:
            path.append(pick(logits, params, len(self._text)))
            if len(path) == DEPTH:
                return path
            self._text.append(path[-1])
            logits = self._runtime.extend(path[-1:])


class Subject:
    """Target, draft and heads of one measurement."""

    def __init__(self, runtime: BatchRuntime, device: Device, heads: DraftHeads | None) -> None:
        self.runtime, self.device, self.heads = runtime, device, heads

    def generate(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        count: int,
        sources: Sequence[str],
        earlier: Sequence[int],
    ) -> tuple[list[int], EndEvent, float]:
        """The text, its usage, and the device's seconds."""
        config = EngineConfig(
            policy=Policy.VERIFY,
            looks_up=LOOKUP in sources,
            looks_ahead=LOOKAHEAD in sources,
            heads=self.heads if HEADS in sources else None,
            share_prefixes=False,
        )
        engine = Engine(self.runtime, config)
        text, ends, device_s = list(prompt), list[EndEvent](), 0.0

        def sink(event: Event) -> None:
            if isinstance(event, CommitEvent):
                text.extend(event.tokens)
            elif isinstance(event, EndEvent):
                ends.append(event)

        request = GenerateRequest(prompt, params, count, patience_ms=0, earlier=tuple(earlier))
        number = engine.submit(request, sink)
        while not ends:
            base = len(text) - len(prompt)
            if MODEL in sources and 0 < base < count - 1:
                began = time.thread_time()
                path = self.device.draft(text, params)
                device_s += time.thread_time() - began
                engine.draft(number, base, [path[: count - 1 - base]])
            engine.step()
        return text[len(prompt) :], ends[0], device_s


@contextmanager
def timed(*classes: Any) -> Iterator[Callable[[], float]]:
    """Adds up the thread's seconds in `propose` and `learn` of these classes."""
    seconds = [0.0]

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*given)
            finally:
                seconds[0] += time.thread_time() - began

        return call

    kept = [(one, name, getattr(one, name)) for one in classes for name in ("propose", "learn") if hasattr(one, name)]
    for one, name, method in kept:
        setattr(one, name, wrap(method))
    try:
        yield lambda: seconds[0]
    finally:
        for one, name, method in kept:
            setattr(one, name, method)


def measure(
    subject: Subject, kind: str, prompts: Sequence[tuple[int, ...]], count: int, on_text: Callable[[], None]
) -> list[Row]:
    """All sources on one kind of text."""
    temperature = TEMPERATURES[kind]
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(len(prompts))]

    def plain(prompt: tuple[int, ...], own: SamplingParams) -> list[int]:
        tokens, _, _ = subject.generate(prompt, own, count, (), ())
        on_text()
        return tokens

    truths = [plain(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    others = [plain(prompt, replace(own, seed=own.seed + 1000)) for prompt, own in zip(prompts, params, strict=True)]
    vocab_size = subject.runtime.limits.vocab_size
    edited = [[(t + 1) % vocab_size if i % 25 == 24 else t for i, t in enumerate(truth)] for truth in truths]
    singles = [source for source in CHOSEN_FROM if source != HEADS or subject.heads is not None]
    rows = []
    chosen = {ALL: tuple(singles), OWN: tuple(source for source in singles if source != MODEL)}
    for name in (*singles, PREDICTED, ALL, OWN):
        sources = chosen.get(name, (name,))
        earlier = edited if name == PREDICTED else others if EARLIER in sources else [()] * len(prompts)
        passes = accepted = rejected = different = 0
        device_s = 0.0
        with timed(PromptLookup, NgramPool, HeadGuesses, EarlierText) as seconds:
            for prompt, own, truth, text in zip(prompts, params, truths, earlier, strict=True):
                tokens, end, drafting_s = subject.generate(prompt, own, count, sources, text)
                different += tokens != truth
                passes += end.usage.target_passes
                accepted += end.usage.accepted_tokens
                rejected += end.usage.rejected_tokens
                device_s += drafting_s
                on_text()
            took_s = seconds() + device_s
        num_tokens = sum(map(len, truths))
        proposed = accepted + rejected
        rows.append(Row(kind, name, num_tokens / passes, accepted / max(1, proposed), 1e3 * took_s / passes, different))
    return rows


def misses(rows: Sequence[Row]) -> list[str]:
    """What a bound says against these figures."""
    found = [f"{row.kind}, {row.source}: {row.num_different} texts differ" for row in rows if row.num_different]
    for kind in TEMPERATURES:
        own = {row.source: row.tokens_per_pass for row in rows if row.kind == kind}
        for name, without in ((ALL, ""), (OWN, MODEL)):
            singles = [source for source in own if source in CHOSEN_FROM and source != without]
            if singles:
                best = max(singles, key=own.__getitem__)
                if own[name] < LEAST * own[best]:
                    found.append(f"{kind}: {own[name]:.2f} tokens per pass {name}, {own[best]:.2f} by {best} alone")
    return found


def show(console: Console, rows: Sequence[Row]) -> None:
    """One line per source, one column per kind."""
    table = Table(title="tokens per pass (acceptance)", title_justify="left", box=None)
    table.add_column("source")
    for kind, temperature in TEMPERATURES.items():
        table.add_column(f"{kind}, T {temperature:g}", justify="right")
    table.add_column("ms per pass", justify="right")
    cells = {(row.source, row.kind): row for row in rows}
    for source in dict.fromkeys(row.source for row in rows):
        own = [cells[source, kind] for kind in TEMPERATURES if (source, kind) in cells]
        table.add_row(
            source,
            *(f"{row.tokens_per_pass:.2f} ({row.acceptance:.2f})" for row in own),
            f"{mean(row.ms for row in own):.2f}",
        )
    console.print(table)


def main() -> int:
    """The command."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--heads", type=Path, help="bundle with heads of the reference target; without it, no heads")
    cli.add_argument("--texts", type=int, default=6, help="of each kind")
    cli.add_argument("--max-tokens", type=int, default=100)
    cli.add_argument("--threads", type=int, default=1)
    cli.add_argument("--kinds", nargs="+", choices=tuple(TEMPERATURES), default=list(TEMPERATURES))
    cli.add_argument("--json", type=Path)
    o = cli.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(console=console, transient=True))
        pair = export_reference_pair(widen_mb=None, target_precision="fp32")
        target, draft = Bundle.open(pair.target), Bundle.open(pair.draft)
        heads = None
        if o.heads is not None:
            trained = Bundle.open(o.heads)
            assert trained.manifest.draft_heads is not None, f"{o.heads} has no heads"
            assert trained.manifest.source == target.manifest.source, f"{o.heads} has heads of another target"
            heads = DraftHeads.load(trained.path / trained.manifest.draft_heads.file)
        options = RuntimeOptions(num_threads=o.threads, keeps_hidden=heads is not None)
        runtime = open_batch_runtime(target.manifest.runtime, target.model_file, options)
        stack.enter_context(closing(runtime))
        drafting = open_sequence_runtime(
            draft.manifest.runtime, draft.model_file, RuntimeOptions(num_threads=o.threads)
        )
        stack.enter_context(closing(drafting))
        subject, tokenizer = Subject(runtime, Device(drafting), heads), target.tokenizer()
        num_sources = 2 + len(CHOSEN_FROM) + 3 - (heads is None)
        task = progress.add_task("texts", total=len(o.kinds) * o.texts * num_sources)
        rows: list[Row] = []
        for kind in o.kinds:
            prompts = texts_of(kind, o.texts, tokenizer)
            rows += measure(subject, kind, prompts, o.max_tokens, lambda: progress.advance(task))
            console.print(f"{kind}: measured", highlight=False)
    show(console, rows)
    found = misses(rows)
    for miss in found:
        console.print(miss, style="red", highlight=False)
    about = {"texts": o.texts, "max_tokens": o.max_tokens, "depth": DEPTH}
    write_json(o.json, {**about, "misses": found, "rows": [asdict(row) for row in rows]})
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
