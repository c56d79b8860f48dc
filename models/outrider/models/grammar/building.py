"""Builds one grammar with the library: with limits of time and size, in a thread whose stack its recursion fits in."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from outrider.models.errors import RequestError
from outrider.models.grammar.matchers import MAX_AGAIN_S, Elsewhere, Matchers
from outrider.models.grammar.spec import GrammarSpec, dump_schema, invalid_grammar
from outrider.models.process.heap import trim_heap

Found = TypeVar("Found")

# With the library's own a step may take 15 ms, and one grammar may hold 500 MB.
LIMITS: Final[dict[str, Any]] = {
    "initial_lexer_fuel": 50_000,  # 25 ms and 13 MB; schemas as people write them take a fiftieth
    "step_lexer_fuel": 100_000,  # about 14,000 a millisecond
    "step_max_items": 50_000,  # about 20,000 a millisecond
    "max_items_in_row": 8_000,  # an object of 500 optional properties takes 2,000
    "max_lexer_states": 10_000,  # 1 to 2 kB each
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
MAX_FIRST_MASK_S: Final = 0.25
STACK_BYTES: Final = 64 * 1024 * 1024
"""Of the thread that builds: the library recurses; `bounds` keeps it far below."""


@dataclass(frozen=True, slots=True)
class Built:
    """A grammar's matchers, here or elsewhere, or what is wrong with it. taken_s: of the processor."""

    matchers: Matchers | Elsewhere | None
    fault: str
    taken_s: float


def build(spec: GrammarSpec, backend: Any, *, is_timed: bool = True) -> Built:
    """Builds a grammar; in a thread of `deep_pool`. backend: the library's tokenizer. is_timed: as of Matchers."""
    began_s = time.thread_time()
    matcher, fault = _built(spec, backend)
    taken_s = time.thread_time() - began_s
    if taken_s > MAX_AGAIN_S:
        trim_heap()  # building takes twice what it leaves
    if matcher is None:
        return Built(None, fault, taken_s)
    return Built(Matchers(matcher, partial(_again, spec, backend), taken_s, is_timed=is_timed), "", taken_s)


def deep_pool() -> ThreadPoolExecutor:
    """One thread with a stack that the library's recursion fits in."""
    pool = ThreadPoolExecutor(1, "grammars")
    with _stack_size:
        before = threading.stack_size(STACK_BYTES)
        try:
            pool.submit(int).result()
        finally:
            threading.stack_size(before)
    return pool


_stack_size = threading.Lock()  # it is the process's


def refusal(fault: str) -> RequestError:
    """For the client whose grammar it is."""
    return invalid_grammar(f"the grammar is refused: {' '.join(fault.split())[:300]}")


def _again(spec: GrammarSpec, backend: Any) -> Any:
    """Another matcher, which shares nothing with the first."""
    with deep_pool() as pool:
        matcher, fault = pool.submit(_built, spec, backend).result()
    if matcher is None:
        raise refusal(fault)
    return matcher


def _built(spec: GrammarSpec, backend: Any) -> tuple[Any, str]:
    """The matcher, or what is wrong. Apart, because an error's traceback would keep a bad matcher: up to 240 MB."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        matcher = LLMatcher(backend, _grammar_of(spec), log_level=0, limits=LLParserLimits(**LIMITS))
        if not matcher.is_error():
            begun = time.thread_time()
            matcher.compute_bitmask()  # builds most of the lexer, here and not in an engine's step
            taken_s = time.thread_time() - begun
            if taken_s > MAX_FIRST_MASK_S:
                return None, f"its first mask takes {taken_s:.2f} s; expected at most {MAX_FIRST_MASK_S} s"
        return (None, matcher.get_error()) if matcher.is_error() else (matcher, "")
    except (ValueError, TypeError, RecursionError) as error:
        return None, str(error) or type(error).__name__
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the library's own bugs, raised past Exception
            raise
        return None, "the library cannot read it"


def _grammar_of(spec: GrammarSpec) -> str:
    """The spec as the library takes it."""
    from llguidance import LLMatcher, grammar_from

    compact: Any = {"whitespace_flexible": False}
    match spec.kind:
        case "json_schema":
            # Written again: what the bounds have seen is what the library sees, also of an object with a key twice.
            text = dump_schema(json.loads(spec.text))
            return str(LLMatcher.grammar_from_json_schema(text, defaults=compact))
        case "json_object":
            return str(LLMatcher.grammar_from_json_schema('{"type":"object"}', defaults=compact))
        case "regex":
            return str(LLMatcher.grammar_from_regex(spec.text))
        case "grammar":
            return str(grammar_from("grammar", spec.text))
        case "choice":
            texts = dict.fromkeys(json.loads(spec.text))
            return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
