"""Measures structured output on the reference pair, in process: validity, equality with and without drafts, speed-up.

    python -m bench.structured [--schemas 218] [--widen 1200]

Each schema of bench/data/schemas.jsonl asks for one text of the engine, three times: without drafts, with a draft that
knows the grammar, and with one that does not. The device is in process: it answers each commit at once, with forced
tokens first and then its own picks under the same masks. All three texts must be equal, and satisfy the schema where
they ended. The same on free text (held-out prompts) says what drafts give there: two ways, as there is no
grammar to know.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import jsonschema
import numpy as np
import typer
from bench.schemas import load_schemas, prompt_of
from rich.console import Console
from rich.table import Table
from tests.requests import flat_request

from outrider.cloud.engine import Engine, EngineConfig, Policy
from outrider.cloud.seam import CommitEvent, EndEvent, Event, GenerateRequest
from outrider.export.make.reference_pair import export_reference_pair
from outrider.models.bundle.bundle import Bundle
from outrider.models.grammar.compiler import CompiledGrammar, GrammarCompiler
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.grammar.state import GrammarState
from outrider.models.picks.rejection import probabilities
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.runtimes import open_batch_runtime, open_sequence_runtime
from outrider.models.runtimes.base import RuntimeOptions, SequenceRuntime
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.wire.tree_draft import ROOT, TreeDraft, level_of
from outrider.reference import load_prompts

WAYS = ("no drafts", "draft inside the grammar", "draft unaware of it")
LEAST_RATIO = 1.3
LEAST_CHANCE = 0.05
"""Of a drafted path as a whole; the device drafts no further beyond it."""
console = Console(width=None if sys.stdout.isatty() else 120)


class Device:
    """One text's draft, in process. grammar: what it drafts inside; None: it knows none."""

    def __init__(self, runtime: SequenceRuntime, prompt: Sequence[int], params: SamplingParams, depth: int) -> None:
        self._runtime, self._params, self._depth = runtime, params, depth
        self._held: list[int] = []
        self.text = list(prompt)
        self.num_model = self.num_forced = self.num_sent = 0

    def guesses(self, state: GrammarState | None, num_ids: int) -> tuple[list[int], list[float]]:
        """What follows the text, and the chance of each: at most `depth` tokens of the model's, and those that are
        forced between them, while the whole is likely enough.
        """
        made: list[int] = []
        chances: list[float] = []
        calls = 0
        walker = state.fork() if state is not None else None
        while calls < self._depth and len(made) < 4 * self._depth and math.prod(chances) > LEAST_CHANCE:
            forced = walker.forced() if walker is not None else []
            if forced and walker is not None:
                made += forced[: 4 * self._depth - len(made)]
                chances += [1.0] * (len(made) - len(chances))
                self.num_forced += len(forced)
                for token in forced:
                    walker.accept(token)
                if walker.is_over and walker.length and forced == walker.forced():
                    break
                continue
            row = np.array(self._row([*self.text, *made])[:num_ids], np.float32)
            calls += 1
            if walker is not None:
                walker.apply(row)
            made.append(pick(row, self._params, len(self.text) + len(made)))
            # How sure the draft is: where it is, the target's pick with the same noise is likely to be the same.
            chances.append(float(probabilities(row, self._params).max()))
            self.num_model += 1
            if walker is not None and (not walker.accept(made[-1]) or (walker.is_over and not walker.forced())):
                break
        return made, chances

    def _row(self, tokens: Sequence[int]) -> Any:
        agreed = 0
        for own, other in zip(self._held, tokens[:-1], strict=False):
            if own != other:
                break
            agreed += 1
        self._runtime.truncate(agreed)
        self._held = list(tokens)
        return self._runtime.extend(tokens[agreed:])


@dataclass
class Sums:
    """Of all texts written in one way."""

    tokens: int = 0
    passes: int = 0
    accepted: int = 0
    proposed: int = 0
    seconds: float = 0.0
    texts: list[list[int]] = field(default_factory=list)

    @property
    def per_pass(self) -> float:
        """Tokens of a target pass."""
        return self.tokens / max(1, self.passes)

    @property
    def rate(self) -> float:
        """Tokens per second, the draft's own time left out: a device drafts while the target works."""
        return self.tokens / max(1e-9, self.seconds)


class Text:
    """One sequence of the engine, to its end."""

    def __init__(self, engine: Engine, request: GenerateRequest) -> None:
        self.tokens: list[int] = []
        self.end: EndEvent | None = None
        self._engine = engine
        self.number = engine.submit(request, self._take)

    def _take(self, event: Event) -> None:
        if isinstance(event, CommitEvent):
            self.tokens += event.tokens
        elif isinstance(event, EndEvent):
            self.end = event

    def run(self, device: Device | None, grammar: CompiledGrammar | None, num_ids: int, sums: Sums) -> None:
        """Steps the engine until the text ends; the device answers each commit. grammar: the one the device knows."""
        state = grammar.state() if grammar is not None else None
        num_known = 0
        prompt_length = len(device.text) if device is not None else 0
        while self.end is None:
            if device is not None and len(self.tokens) > num_known:
                for token in self.tokens[num_known:]:
                    if state is not None:
                        state.accept(token)
                num_known = len(self.tokens)
                device.text[prompt_length:] = self.tokens
                guesses, chances = device.guesses(state, num_ids)
                if guesses:
                    numbers = range(device.num_sent, device.num_sent + len(guesses))
                    device.num_sent += len(guesses)
                    parents = [ROOT, *numbers[:-1]]
                    levels = [level_of(chance) for chance in chances]
                    tree = TreeDraft(num_known, numbers[0], guesses, parents, levels)
                    self._engine.draft_tree(self.number, tree)
            before = time.perf_counter()
            self._engine.step()
            sums.seconds += time.perf_counter() - before
        if self.end.reason == "error":
            raise SystemExit(f"a text failed: {self.end.error}")
        usage = self.end.usage
        sums.tokens += usage.completion_tokens
        sums.passes += usage.target_passes
        sums.accepted += usage.accepted_tokens
        sums.proposed += usage.accepted_tokens + usage.rejected_tokens
        sums.texts.append(self.tokens)


def main(
    schemas: Annotated[int, typer.Option(help="schemas to write a text for")] = 218,
    free: Annotated[int, typer.Option(help="free texts")] = 24,
    depth: Annotated[int, typer.Option(help="tokens that the draft's model picks per commit")] = 6,
    tokens: Annotated[int, typer.Option(help="longest text")] = 256,
    temperature: Annotated[float, typer.Option()] = 0.8,
    widen: Annotated[float, typer.Option(help="MB of a widened target; 0: as it is")] = 0.0,
    policy: Annotated[Policy, typer.Option(help="verify saves passes, auto saves time")] = Policy.VERIFY,
) -> None:
    """Prints tokens per target pass and tokens/s of each way, the ratio of speed-ups, and what is wrong."""
    paths = export_reference_pair(widen_mb=widen or None)
    target, draft = Bundle.open(paths.target), Bundle.open(paths.draft)
    tokenizer = Tokenizer.from_dir(target.path)
    runtime = open_batch_runtime("openvino", target.model_file, RuntimeOptions(num_threads=1))
    drafting = open_sequence_runtime("openvino", draft.model_file, RuntimeOptions(num_threads=1))
    vocab = runtime.limits.vocab_size
    compiler = GrammarCompiler(tokenizer, vocab, tokenizer.eos_token_ids)
    stops = frozenset(tokenizer.eos_token_ids)
    engine = Engine(runtime, EngineConfig(share_prefixes=False, policy=policy, looks_up=False))
    engine.calibrate(max_tokens=32)
    written: dict[str, dict[str, Sums]] = {"schemas": {way: Sums() for way in WAYS}, "free text": {}}
    written["free text"] = {way: Sums() for way in WAYS[:2]}
    forced = [0, 0]
    failures: list[str] = []
    cut = 0

    def write(kind: str, prompt: list[int], seed: int, grammar: CompiledGrammar | None) -> list[list[int]]:
        params = SamplingParams(temperature=temperature, seed=seed)
        for way, sums in written[kind].items():
            device = None if way == WAYS[0] else Device(drafting, prompt, params, depth)
            request = flat_request(tuple(prompt), params, tokens, stops, patience_ms=0.0, recent=(), grammar=grammar)
            known = grammar if way == WAYS[1] else None
            Text(engine, request).run(device, known, min(tokenizer.size, drafting.limits.vocab_size), sums)
            if device is not None and way == WAYS[1] and grammar is not None:
                forced[0] += device.num_forced
                forced[1] += device.num_forced + device.num_model
        return [sums.texts[-1] for sums in written[kind].values()]

    for seed, schema in enumerate(load_schemas(schemas)):
        grammar = compiler.compile(GrammarSpec.json_schema(schema))
        found = write("schemas", tokenizer.encode(prompt_of(schema)), seed, grammar)
        if any(each != found[0] for each in found):
            failures.append(f"{schema['title']}: the text with drafts is another one")
        if found[0][-1] not in stops:
            cut += 1
            continue
        try:
            jsonschema.Draft202012Validator(schema).validate(json.loads(tokenizer.decode(found[0])))
        except (ValueError, jsonschema.ValidationError) as error:
            failures.append(f"{schema['title']}: {str(error).splitlines()[0]}")
    for seed, prompt in enumerate(load_prompts(free)):
        found = write("free text", tokenizer.encode(prompt.text)[:96], seed, None)
        if any(each != found[0] for each in found):
            failures.append(f"free text {seed}: the text with drafts is another one")
    show(written, failures, cut, forced, schemas)


def show(
    written: dict[str, dict[str, Sums]], failures: list[str], cut: int, forced: Sequence[int], num_schemas: int
) -> None:
    """The tables; exits with 1 where a text is wrong, or drafts give less than they should."""
    table = Table(title=f"{num_schemas} schemas, {cut} of their texts ended by length")
    for column in ("", "way", "tokens", "target passes", "tokens per pass", "accepted", "tokens/s", "speed-up"):
        table.add_column(column, justify="right")
    for kind, ways in written.items():
        base = ways[WAYS[0]]
        for way, sums in ways.items():
            share = f"{sums.accepted / sums.proposed:.2f}" if sums.proposed else "-"
            speed = (f"{sums.per_pass:.2f}", share, f"{sums.rate:.0f}", f"{sums.rate / base.rate:.2f}")
            table.add_row(kind, way, str(sums.tokens), str(sums.passes), *speed)
    console.print(table)
    ratios = {}
    for name in ("per_pass", "rate"):
        gains = {kind: getattr(ways[WAYS[1]], name) / getattr(ways[WAYS[0]], name) for kind, ways in written.items()}
        ratios[name] = gains["schemas"] / gains["free text"]
    console.print(f"forced of the tokens drafted inside grammars: {forced[0] / max(1, forced[1]):.2f}")
    console.print(
        f"speed-up by drafts on schemas / on free text: {ratios['per_pass']:.2f} (tokens per pass), "
        f"{ratios['rate']:.2f} (tokens/s); expected at least {LEAST_RATIO}"
    )
    for failure in failures:
        console.print(f"WRONG {failure}")
    if failures or ratios["per_pass"] < LEAST_RATIO:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
