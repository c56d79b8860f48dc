"""Compares libraries for structured output at a large vocabulary: compiling, masks, forks, rollback, validity.

    python -m bench.grammars [--vocab 152000] [--schemas 218]

The one that we keep is llguidance; xgrammar is measured where it is installed (with torch). Each writes a random text
for each schema of bench/data/schemas.jsonl: a random row of logits, the library's mask, the best token; so both follow
texts of their own. A text that ends must satisfy its schema. The
vocabulary is made of the reference tokenizer's tokens and of pairs of them.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Protocol

import jsonschema
import numpy as np
import typer
from bench.schemas import load_schemas
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from outrider.models.errors import OutriderError
from outrider.models.grammar.compiler import GrammarCompiler
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.grammar.state import GrammarState
from outrider.models.text.tokenizer import Tokenizer
from outrider.reference import target_dir

MAX_TOKENS = 150
console = Console()


def write_large_tokenizer(directory: Path, size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of `size` tokens: the reference one's, and merges of two of them."""
    data = json.loads((target_dir() / "tokenizer.json").read_text(encoding="utf-8"))
    vocab, merges = data["model"]["vocab"], data["model"]["merges"]
    own = [token for token in vocab if not token.startswith("<|")]
    rng = np.random.default_rng(0)
    while len(vocab) < size:
        left, right = (own[int(index)] for index in rng.integers(0, len(own), 2))
        if left + right not in vocab and len(left + right) < 24:
            vocab[left + right] = len(vocab)
            merges.append([left, right])
    (directory / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        (directory / name).write_text((target_dir() / name).read_text(encoding="utf-8"), encoding="utf-8")
    return Tokenizer.from_dir(directory)


class Matcher(Protocol):
    """One text in a grammar, of either library."""

    def mask(self, row: NDArray[np.float32]) -> None:
        """Masks a row in place."""

    def advance(self, token: int) -> bool:
        """Consumes a token."""

    def rollback(self, count: int) -> None:
        """Takes the last `count` tokens back."""

    def fork(self) -> Matcher:
        """A second one at the same place."""


class Ours:
    """llguidance, as the engine uses it."""

    def __init__(self, state: GrammarState) -> None:
        self.state = state
        self.mask, self.advance = state.apply, state.accept

    def rollback(self, count: int) -> None:
        """Takes the last `count` tokens back."""
        self.state.truncate(self.state.length - count)

    def fork(self) -> Ours:
        """A second one at the same place."""
        return Ours(self.state.fork())


class Xgrammar:
    """xgrammar's matcher."""

    def __init__(self, matcher: Any, size: int) -> None:
        xgrammar = importlib.import_module("xgrammar")
        self._matcher, self._size = matcher, size
        self._bits = xgrammar.allocate_token_bitmask(1, size)

    def mask(self, row: NDArray[np.float32]) -> None:
        """Masks a row in place."""
        self._matcher.fill_next_token_bitmask(self._bits)
        packed = self._bits.numpy().view(np.uint8)[0]
        allowed = np.unpackbits(packed, count=row.size, bitorder="little").view(np.bool_)
        np.copyto(row, -np.inf, where=~allowed)

    def advance(self, token: int) -> bool:
        """Consumes a token."""
        return bool(self._matcher.accept_token(token))

    def rollback(self, count: int) -> None:
        """Takes the last `count` tokens back."""
        self._matcher.rollback(count)

    def fork(self) -> Xgrammar:
        """A second one at the same place."""
        return Xgrammar(self._matcher.fork(), self._size)


Compile = Callable[[dict[str, Any]], Callable[[], Matcher]]


def open_ours(tokenizer: Tokenizer) -> Compile:
    """Compiles with llguidance."""
    compiler = GrammarCompiler(tokenizer, tokenizer.size, tokenizer.eos_token_ids)

    def compile_one(schema: dict[str, Any]) -> Callable[[], Matcher]:
        grammar = compiler.compile(GrammarSpec.json_schema(schema))
        return lambda: Ours(grammar.state())

    compile_one({"type": "null"})  # opens the vocabulary
    return compile_one


def open_xgrammar(tokenizer: Tokenizer) -> Compile:
    """Compiles with xgrammar, one thread, no cache, JSON without spaces."""
    xgrammar = importlib.import_module("xgrammar")
    spelled = [tokenizer.token(index) or "" for index in range(tokenizer.size)]
    info = xgrammar.TokenizerInfo(
        spelled,
        vocab_type=xgrammar.VocabType.BYTE_LEVEL,
        vocab_size=tokenizer.size,
        stop_token_ids=list(tokenizer.eos_token_ids),
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile_one(schema: dict[str, Any]) -> Callable[[], Matcher]:
        text = json.dumps(schema)
        grammar = compiler.compile_json_schema(text, any_whitespace=False, separators=(",", ":"), strict_mode=False)
        return lambda: Xgrammar(xgrammar.GrammarMatcher(grammar), tokenizer.size)

    return compile_one


@dataclass
class Found:
    """What a library did with all schemas. Times in seconds."""

    compiled: list[float] = field(default_factory=list)
    masks: list[float] = field(default_factory=list)
    first_masks: list[float] = field(default_factory=list)
    forks: list[float] = field(default_factory=list)
    backs: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    ended: int = 0
    back_faults: int = 0


class _Timer:
    def __init__(self, into: list[float]) -> None:
        self._into = into

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._into.append(time.perf_counter() - self._began)


def rows(rng: np.random.Generator, size: int, stops: Sequence[int]) -> Iterator[NDArray[np.float32]]:
    """Random rows that like to end."""
    while True:
        row = rng.standard_normal(size, dtype=np.float32)
        row[list(stops)] += 9
        yield row


def follow(matcher: Matcher, schema: dict[str, Any], tokenizer: Tokenizer, seed: int, found: Found) -> None:
    """Writes a text with the masks, going back and forking on the way."""
    made = rows(np.random.default_rng(seed), tokenizer.size, tokenizer.eos_token_ids)
    tokens: list[int] = []
    for index in range(MAX_TOKENS):
        row = next(made)
        with _Timer(found.masks if index else found.first_masks):
            matcher.mask(row)
        token = int(row.argmax())
        if index % 10 == 9:  # where a draft was rejected: the last tokens again, in a fork and in place
            last = tokens[-4:]
            with _Timer(found.backs):
                matcher.rollback(len(last))
                is_same = all(map(matcher.advance, last))
            with _Timer(found.forks):
                twin = matcher.fork()
                is_same &= twin.advance(token)
            found.back_faults += not is_same
        if not matcher.advance(token):
            found.invalid.append(f"{schema['title']}: refuses a token of its own mask")
            return
        if token in tokenizer.eos_token_ids:
            break
        tokens.append(token)
    else:
        return
    found.ended += 1
    text = tokenizer.decode(tokens)
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        found.invalid.append(f"{schema['title']}: {str(error).splitlines()[0][:90]}")


def measure(compile_one: Compile, schemas: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> Found:
    """Every schema once."""
    found = Found()
    for seed, schema in enumerate(schemas):
        began = time.perf_counter()
        try:
            make = compile_one(schema)
        except (OutriderError, RuntimeError, ValueError) as error:
            found.refused.append(f"{schema['title']}: {str(error).splitlines()[0][:90]}")
            continue
        found.compiled.append(time.perf_counter() - began)
        follow(make(), schema, tokenizer, seed, found)
    return found


def _ms(values: Sequence[float], share: float | None = None) -> str:
    if not values:
        return "-"
    return f"{(np.mean(values) if share is None else np.quantile(values, share)) * 1e3:.3f}"


def main(
    vocab: Annotated[int, typer.Option(help="tokens of the vocabulary")] = 152_000,
    schemas: Annotated[int, typer.Option(help="schemas to measure")] = 218,
) -> None:
    """Prints one table, a column per library, and what each refuses or gets wrong."""
    with TemporaryDirectory() as place:
        tokenizer = write_large_tokenizer(Path(place), vocab)
        libraries = {"llguidance": open_ours}
        if find_spec("xgrammar") and find_spec("tvm_ffi"):
            libraries["xgrammar"] = open_xgrammar
        chosen, found, opened = load_schemas(schemas), dict[str, Found](), dict[str, float]()
        for name, opening in libraries.items():
            began = time.perf_counter()
            compile_one = opening(tokenizer)
            opened[name] = time.perf_counter() - began
            found[name] = measure(compile_one, chosen, tokenizer)
    table = Table(title=f"{len(chosen)} schemas, {tokenizer.size:,} tokens; ms")
    for column in ("", *found):
        table.add_column(column, justify="right")
    lines: dict[str, Callable[[str, Found], str]] = {
        "open the vocabulary": lambda name, _: _ms([opened[name]]),
        "compile, mean": lambda _, each: _ms(each.compiled),
        "compile, largest": lambda _, each: _ms(each.compiled, 1.0),
        "first mask, mean": lambda _, each: _ms(each.first_masks),
        "mask, mean": lambda _, each: _ms(each.masks),
        "mask, 99 %": lambda _, each: _ms(each.masks, 0.99),
        "mask, largest": lambda _, each: _ms(each.masks, 1.0),
        "4 tokens back and again": lambda _, each: _ms(each.backs),
        "fork and a token": lambda _, each: _ms(each.forks),
        "schemas compiled": lambda _, each: str(len(each.compiled)),
        "texts that ended": lambda _, each: str(each.ended),
        "invalid of them": lambda _, each: str(len(each.invalid)),
        "wrong after rollback or fork": lambda _, each: str(each.back_faults),
    }
    for label, show in lines.items():
        table.add_row(label, *(show(name, each) for name, each in found.items()))
    console.print(table)
    for name, each in found.items():
        for kind, entries in (("refuses", each.refused), ("is wrong on", each.invalid)):
            for entry in entries:
                console.print(f"{name} {kind} {entry}")


if __name__ == "__main__":
    typer.run(main)
