"""Builds one grammar with the library: with limits of time and size, in a thread whose stack its recursion fits in.

Gives its texts their matchers, and new ones where the library's have worn out. All copies of a matcher share its lexer,
whose states only grow in number: every text adds those that it meets. Where they reach the library's limit, no copy
goes on, and no new text begins. Then the grammar is compiled again, at once, if that is cheap; a costly one is worn
out, and the next request has it compiled. A lexer that grows fast is left to the texts that have it, before it is full:
kept, it would hold up to 20 MB.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from outrider.models.errors import RequestError
from outrider.models.grammar.spec import GrammarSpec, dump_schema, invalid_grammar
from outrider.models.process.heap import trim_heap

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
MAX_AGAIN_S: Final = 0.02
"""A grammar that took longer to compile is costly: not compiled again while its texts wait. Schemas take 0.7 ms in the
median.
"""
MAX_GROWING_S: Final = 0.1
"""Of the processor that texts may take beyond what is free (`cost`) before new ones get another lexer: states that are
made take that time, those that are met again do not.
"""


class Matchers:
    """Of one grammar. Safe to share between threads."""

    def __init__(self, first: Any, compile_again: Callable[[], Any], again_s: float, *, is_timed: bool = True) -> None:
        """compile_again: gives a matcher that shares nothing with others. again_s: of the processor, that it takes.
        is_timed: False compiles again however long it takes, so that nothing depends on this process's clock.
        """
        self.again_s = again_s
        self._is_timed = is_timed
        self._lock = threading.Lock()
        self._current: Any = first
        self._compile_again = compile_again
        self._growing_s = 0.0
        self.is_worn_out = False
        """Whether texts have asked in vain for a new one."""

    @property
    def is_costly(self) -> bool:
        """Whether it is not compiled again."""
        return self._is_timed and self.again_s > MAX_AGAIN_S

    @property
    def is_usable(self) -> bool:
        """Whether a new text can begin without compiling."""
        return not self.is_worn_out and self._current is not None

    @property
    def current(self) -> Any:
        """The one to copy: no text changes it. Compiles it where it was left to the texts that have it."""
        with self._lock:
            if self._current is None:
                self._current = self._compile_again()
            return self._current

    def note(self, seconds: float) -> None:
        """Counts time beyond what is free, of any text."""
        with self._lock:
            self._growing_s += seconds
            if self._growing_s > MAX_GROWING_S and not self.is_costly:
                self._current, self._growing_s = None, 0.0

    def replaced(self, worn: Any) -> tuple[Any, bool]:
        """Another to copy than `worn`, which a text's own was a copy of, and whether no other text has had it; None
        where there is none.
        """
        with self._lock:
            if self._current is worn and self.is_costly:
                self.is_worn_out = True
                return None, False
            is_new = self._current is worn or self._current is None
            if is_new:
                self._current = self._compile_again()
                self._growing_s = 0.0
            return self._current, is_new


@dataclass(eq=False)
class Elsewhere:
    """Stands for the matchers of a grammar in an engine's other processes: they last as long as this does.

    number: their name there. taken_s: of the processor, to compile it. is_worn_out: as of `Matchers`.
    """

    number: int
    taken_s: float
    is_worn_out: bool = False

    @property
    def is_costly(self) -> bool:
        """Whether it is not compiled again."""
        return self.taken_s > MAX_AGAIN_S

    @property
    def is_usable(self) -> bool:
        """Whether a new text can begin with it."""
        return not self.is_worn_out


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
    from llguidance import LLMatcher

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
            return str(LLMatcher.grammar_from_lark(_lark_of(spec.text)))
        case "choice":
            texts = dict.fromkeys(json.loads(spec.text))
            written = (json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in texts)
            return "start: " + " | ".join(written)


def _lark_of(text: str) -> str:
    """A grammar in Lark's syntax. The library tells GBNF by the same lines, but with Python's lock held, in time that
    grows with the square of the line breaks in a row: 30 s for 64 KiB of them.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if re.search(r"(?m)^[^\S\n]*(%llguidance\b|start\s*:)", text):
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # of no class of its own
        raise ValueError(f"Failed to convert the grammar from GBNF to Lark: {error}") from None
