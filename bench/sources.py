"""Compares sources of drafts, each alone and the engine's choice among them, on four kinds of text.

  code         beginnings of Python functions, T 0.6
  json         inside the schemas of bench/data, target and device with the grammar, T 0.3
  grounded     functions of Python's own library, after passages that were retrieved from its files, T 0.3
  hot          the code again, T 1.2

The sources: the device's draft model at no distance (its drafts are there before each step), prompt lookup, the n-gram
pool of lookahead decoding, draft heads, an earlier text (what the same prompt got with another seed), a prediction (the
text itself, every 25th token changed); and all but the prediction, chosen among by the engine, with the device's
drafts and without.

The device drafts inside the grammar; the other sources do not know it. The measure is tokens per pass. It depends on no
clock, because the engine's policy is to save passes. Times are the
processor's own, of this thread. Exits 1 where a text differs from the one without drafts, or the choice has fewer than
0.95 of the best single source's tokens per pass.

    outrider-export heads BUNDLE reference --prompts FILE --out HEADS
    python -m bench.sources --heads HEADS [--texts 6] [--max-tokens 100] [--json PATH]
"""

from __future__ import annotations

import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, Final

import numpy as np
from bench.report import TO_JSON, figures_table, option, parser, verdict
from bench.schemas import load_schemas, prompt_of
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from tests.requests import flat_request

from outrider.cloud.engine import Engine, EngineConfig, Policy
from outrider.cloud.pending.learning import HeadGuesses, NgramPool
from outrider.cloud.pending.lookup import PromptLookup, RecentTextSource
from outrider.cloud.seam import CommitEvent, EndEvent, Event
from outrider.edge.retrieval.documents import Document
from outrider.edge.retrieval.grounding import Library
from outrider.edge.retrieval.index import PassageIndex
from outrider.export.make.reference_pair import export_reference_pair
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.draft_heads import DraftHeads
from outrider.models.grammar.compiler import CompiledGrammar, GrammarCompiler
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.grammar.state import GrammarState
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.runtimes import open_batch_runtime, open_sequence_runtime
from outrider.models.runtimes.base import BatchRuntime, RuntimeOptions, SequenceRuntime
from outrider.models.text.tokenizer import Tokenizer
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

MODULES: Final = ("textwrap", "shlex", "heapq", "configparser", "csv", "queue", "fnmatch", "difflib", "calendar", "cmd")
"""Whose files are the documents."""
PASSAGE_TOKENS: Final = 400
MAX_DRAFTED: Final = 32
"""With a grammar: about as many tokens, forced ones among them."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A text to generate."""

    prompt: tuple[int, ...]
    grammar: CompiledGrammar | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One source on one kind of text. ms: of the verifier's thread, or the device's, per pass."""

    kind: str
    source: str
    tokens_per_pass: float
    acceptance: float
    ms: float
    num_different: int


def texts_of(kind: str, count: int, tokenizer: Tokenizer, compiler: GrammarCompiler) -> list[Asked]:
    """What is asked for of a kind."""
    if kind == "json":
        return [
            Asked(
                tuple(tokenizer.encode(prompt_of(schema))),
                compiler.compile(GrammarSpec.json_schema(schema)),
            )
            for schema in load_schemas(count)
        ]
    texts = _grounded(count, tokenizer) if kind == "grounded" else [prompt.text for prompt in load_prompts(count)]
    return [Asked(tuple(tokenizer.encode(text))) for text in texts]


def _grounded(count: int, tokenizer: Tokenizer) -> list[str]:
    """Beginnings of functions, after the passages that a library of their modules gives."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [folder / f"{name}.py" for name in MODULES]
    library = Library(
        PassageIndex([Document(file.name, file.read_text(encoding="utf-8")) for file in files]),
        tokenizer,
        PASSAGE_TOKENS,
    )
    found = [
        f"{head}\n"
        for file in files
        for head in re.findall(r"^ *def [a-z]\w+\(.*\):$", file.read_text(encoding="utf-8"), re.MULTILINE)[:4]
    ]
    # From one module to the next, so that a few texts are of several.
    heads = [head for first in range(4) for head in found[first::4]][:count]
    return [f"{library.ground(head).before}{head}" for head in heads]


class Device:
    """A draft model that is in sync whenever a step begins."""

    def __init__(self, runtime: SequenceRuntime) -> None:
        self._runtime = runtime
        self._text: list[int] = []

    def draft(self, text: Sequence[int], params: SamplingParams, state: GrammarState | None) -> list[int]:
        """DEPTH picks after `text`, by the request's own noise; with a grammar, what is forced between them, too.

        state: of the grammar after `text`; comes back as it was.
        """
        drafted, num_picks = list(text), 0
        state = state.fork() if state is not None else None
        while num_picks < DEPTH and len(drafted) < len(text) + MAX_DRAFTED and not (state and state.is_over):
            tokens = state.forced() if state is not None else []
            if not tokens:
                row = self._row(drafted)
                if state is not None:
                    state.apply(row)
                tokens, num_picks = [pick(row, params, len(drafted))], num_picks + 1
            for token in tokens if state is not None else ():
                assert state is not None and state.accept(token)
            drafted += tokens
        return drafted[len(text) :]

    def _row(self, text: Sequence[int]) -> NDArray[np.float32]:
        """Logits after `text`, a copy."""
        kept = 0
        while kept < min(len(text) - 1, len(self._text)) and text[kept] == self._text[kept]:
            kept += 1
        self._runtime.truncate(min(kept, self._runtime.length))
        logits = self._runtime.extend(text[self._runtime.length :])
        self._text = list(text)
        return np.array(logits, np.float32)


class Subject:
    """Target, draft and heads of one measurement."""

    def __init__(self, runtime: BatchRuntime, device: Device, heads: DraftHeads | None) -> None:
        self.runtime, self.device, self.heads = runtime, device, heads

    def generate(
        self,
        asked: Asked,
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
        prompt = asked.prompt
        state = asked.grammar.state() if asked.grammar is not None else None
        text, ends, device_s = list(prompt), list[EndEvent](), 0.0

        def sink(event: Event) -> None:
            if isinstance(event, CommitEvent):
                text.extend(event.tokens)
                for token in event.tokens if state is not None else ():
                    assert state is not None and state.accept(token)
            elif isinstance(event, EndEvent):
                ends.append(event)

        stop_ids = frozenset(asked.grammar.stop_ids) if asked.grammar is not None else frozenset()
        request = flat_request(
            prompt, params, count, stop_ids, patience_ms=0, recent=tuple(earlier), grammar=asked.grammar
        )
        number = engine.submit(request, sink)
        while not ends:
            base = len(text) - len(prompt)
            if MODEL in sources and 0 < base < count - 1:
                began = time.thread_time()
                path = self.device.draft(text, params, state)
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
    subject: Subject, kind: str, prompts: Sequence[Asked], count: int, on_text: Callable[[], None]
) -> list[Row]:
    """All sources on one kind of text."""
    temperature = TEMPERATURES[kind]
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(len(prompts))]

    def plain(prompt: Asked, own: SamplingParams) -> list[int]:
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
        with timed(PromptLookup, NgramPool, HeadGuesses, RecentTextSource) as seconds:
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
    kinds = (f"{kind}, T {temperature:g}" for kind, temperature in TEMPERATURES.items())
    table = figures_table("tokens per pass (acceptance)", "source", *kinds, "ms per pass", left=("source",))
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
    o = parser(
        __doc__,
        {
            "--heads": option(type=Path, help="bundle with heads of the reference target; without it, no heads"),
            "--texts": option(6, "of each kind"),
            "--max-tokens": option(100),
            "--threads": option(1),
            "--kinds": option(list(TEMPERATURES), choices=tuple(TEMPERATURES)),
            **TO_JSON,
        },
    ).parse_args()
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
        compiler = GrammarCompiler(tokenizer, runtime.limits.vocab_size, tokenizer.eos_token_ids)
        stack.enter_context(closing(compiler))
        task = progress.add_task("texts", total=len(o.kinds) * o.texts * num_sources)
        rows: list[Row] = []
        for kind in o.kinds:
            prompts = texts_of(kind, o.texts, tokenizer, compiler)
            rows += measure(subject, kind, prompts, o.max_tokens, lambda: progress.advance(task))
            console.print(f"{kind}: measured", highlight=False)
    show(console, rows)
    about = {"texts": o.texts, "max_tokens": o.max_tokens, "depth": DEPTH}
    return verdict(console, misses(rows), o.json, {**about, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    sys.exit(main())
