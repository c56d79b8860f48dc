"""Compiles grammars for one vocabulary, once each, off the event loop, with limits of time and size."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from outrider.models.errors import RequestError
from outrider.models.grammar.cost import GrammarCost
from outrider.models.grammar.matchers import Matchers
from outrider.models.grammar.spec import GrammarSpec, dump_schema, invalid_grammar
from outrider.models.grammar.state import GrammarState
from outrider.models.grammar.strikes import MAX_STRIKES, STRIKE_S, Client, Strikes, limits_of
from outrider.models.grammar.vocabulary import Vocabulary
from outrider.models.heap import trim_heap
from outrider.models.tokenizer import Tokenizer

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
MAX_CACHED: Final = 16
MAX_CACHED_PER_OWNER: Final = 4
"""A kept grammar has 1 MB at most as people write them; a costly one has up to 25 MB, and an owner one of those kept. A
lexer that texts have used has 10 to 20 MB at most, however it began."""
MAX_WAITING: Final = 4
SLOW_COMPILE_S: Final = 0.5
MAX_AGAIN_S: Final = 0.02
"""A grammar that took longer is not compiled again while its texts wait. Schemas take 0.7 ms in the median."""
TRIM_EVERY_S: Final = 1.0
STACK_BYTES: Final = 64 * 1024 * 1024
"""Of the thread that compiles: the library recurses; `bounds` keeps it far below."""


class CompiledGrammar:
    """A grammar for one vocabulary; texts begin with `state()`. Safe to share between threads."""

    def __init__(
        self,
        spec: GrammarSpec,
        matchers: Matchers,
        vocabulary: Vocabulary,
        after: int | None,
        opener: int | None,
        on_excess: Callable[[], None] = lambda: None,
    ) -> None:
        """on_excess: called where a text's grammar takes too long."""
        self.spec = spec
        self.matchers = matchers
        self._on_excess = on_excess
        self._vocabulary = vocabulary
        self._after = after
        self._opener = opener

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a text, ascending."""
        return self._vocabulary.stop_ids

    def charged_to(self, on_excess: Callable[[], None]) -> CompiledGrammar:
        """The same grammar, for texts of the client that `on_excess` is about."""
        grammar = copy.copy(self)
        grammar._on_excess = on_excess
        return grammar

    def state(self) -> GrammarState:
        """A new state, before the first token of the answer."""
        cost = GrammarCost(self._on_excess)
        return GrammarState(self._vocabulary, self.matchers, self._after, self._opener, cost)


class GrammarCompiler:
    """Compiles specs into grammars, and keeps the latest ones.

    vocab_size: ids of the model's logits. stop_ids: those that end a text. One grammar is compiled at a time, owners in
    turn: an owner has one in work, and `MAX_CACHED_PER_OWNER` kept. `MAX_WAITING` of one client may wait, and those of
    `MAX_CLIENTS` of one owner.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self._vocabulary = Vocabulary(tokenizer, vocab_size, stop_ids)
        self._known: OrderedDict[tuple[Hashable, str], CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()  # of `_known`
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: Counter[Hashable] = Counter()
        self._turns: dict[Hashable, asyncio.Lock] = {}
        self._strikes = Strikes()
        self._trimmed_s = time.monotonic()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a text, ascending."""
        return self._vocabulary.stop_ids

    def find(self, spec: GrammarSpec, owner: Hashable = None) -> CompiledGrammar | None:
        """The grammar, where it is compiled already."""
        with self._lock:
            found = self._known.get((owner, spec.hash))
            if found is not None and found.matchers.is_worn_out:
                found = None
            if found is not None:
                self._known.move_to_end((owner, spec.hash))
            return found

    def compile(self, spec: GrammarSpec, owner: Hashable = None) -> CompiledGrammar:
        """The grammar, compiled in a thread of its own where it is not known; blocks until it is there.

        Raises RequestError `invalid_grammar`, TokenizerError where the tokenizer cannot be held to any grammar.
        """
        return self.find(spec, owner) or self._start(spec, (owner, b"")).result()

    async def compile_for(self, spec: GrammarSpec, owner: Hashable = None, salt: bytes = b"") -> CompiledGrammar:
        """As `compile`, without holding the event loop. salt: which of the owner's clients asks.

        Raises RequestError `too_many_grammars` (429) where too many of the owner's are waiting.
        """
        client = owner, salt
        if (wait_s := self._strikes.seconds_left(client)) > 0:
            raise RequestError(
                "too_many_grammars",
                f"{MAX_STRIKES} grammars of this client took too long within {STRIKE_S:.0f} s; try again later",
                status=429,
                retry_after_s=math.ceil(wait_s),
            )
        if found := self.find(spec, owner):
            return found.charged_to(partial(self._strikes.add, client))
        keys = limits_of(client, MAX_WAITING)
        if full := next((key for key, limit in keys if self._waiting[key] > limit), None):
            raise RequestError(
                "too_many_grammars",
                f"{self._waiting[full]} grammars of this {'client' if full == client else 'key'} are being compiled; "
                "try again later",
                status=429,
                retry_after_s=1,
            )
        self._waiting.update(key for key, _ in keys)
        try:
            async with self._turns.setdefault(owner, asyncio.Lock()):
                # Shielded: a client that leaves does not free its turn before the work is done.
                work = asyncio.ensure_future(asyncio.wrap_future(self._start(spec, client)))
                try:
                    found = await asyncio.shield(work)
                    return found.charged_to(partial(self._strikes.add, client))
                except asyncio.CancelledError:
                    await asyncio.wait([work])
                    raise
                finally:
                    del work  # with its error it would be a cycle, which holds what the library had built
        finally:
            for key, _ in keys:
                self._waiting[key] -= 1
                if not self._waiting[key]:
                    del self._waiting[key]
            if (owner,) not in self._waiting:
                self._turns.pop(owner, None)

    def close(self) -> None:
        """Ends the thread; grammars that exist stay usable."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=True, cancel_futures=True)

    def _start(self, spec: GrammarSpec, client: Client) -> Future[CompiledGrammar]:
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "grammars")
                _start_deep(self._thread)
            return self._thread.submit(partial(self._compile, spec, client))

    def _compile(self, spec: GrammarSpec, client: Client) -> CompiledGrammar:
        if found := self.find(spec, client[0]):
            return found
        self._trim()
        backend = self._vocabulary.backend  # before the clock: the first grammar would pay for opening the tokenizer
        began_s = time.thread_time()
        try:
            matcher = _matcher_of(spec, backend)
        finally:
            taken_s = time.thread_time() - began_s
            if taken_s > SLOW_COMPILE_S:
                self._strikes.add(client)
        again = partial(_in_deep_thread, partial(_matcher_of, spec, backend)) if taken_s <= MAX_AGAIN_S else None
        matchers = Matchers(matcher, again, taken_s)
        after, opener = (_token(name, getattr(spec, name), self._vocabulary) for name in ("after", "opener"))
        compiled = CompiledGrammar(spec, matchers, self._vocabulary, after, opener)
        with self._lock:
            self._known[client[0], spec.hash] = compiled
            own = [key for key in self._known if key[0] == client[0]]
            costly = [key for key in own if self._known[key].matchers.is_costly]
            for key in {*own[:-MAX_CACHED_PER_OWNER], *costly[:-1]}:
                del self._known[key]
            while len(self._known) > MAX_CACHED:
                self._known.popitem(last=False)
        return compiled

    def _trim(self) -> None:
        """Returns what the grammars of ended texts have left; in this thread only, and at most once a second."""
        if (now := time.monotonic()) - self._trimmed_s >= TRIM_EVERY_S:
            self._trimmed_s = now
            trim_heap()


def _in_deep_thread(work: Callable[[], Found]) -> Found:
    """What the work returns, in a thread with `STACK_BYTES`, and waits for it; raises what it raises."""
    with ThreadPoolExecutor(1, "grammars") as pool:
        _start_deep(pool)
        return pool.submit(work).result()


def _start_deep(pool: ThreadPoolExecutor) -> None:
    """Starts the pool's thread with a stack that the library's recursion fits in."""
    with _stack_size:
        before = threading.stack_size(STACK_BYTES)
        try:
            pool.submit(int).result()
        finally:
            threading.stack_size(before)


_stack_size = threading.Lock()  # it is the process's


def _matcher_of(spec: GrammarSpec, backend: Any) -> Any:
    """The library's matcher, at the beginning of a text. backend: its tokenizer. Raises RequestError."""
    matcher, fault = _built(spec, backend)
    if matcher is None:
        raise invalid_grammar(f"the grammar is refused: {' '.join(fault.split())[:300]}")
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


def _token(name: str, spelling: str, vocabulary: Vocabulary) -> int | None:
    if not spelling:
        return None
    token = vocabulary.tokenizer.token_id(spelling)
    if token is None:
        raise invalid_grammar(f"`{name}` is no token of the model; expected the spelling of one, such as </think>")
    return token


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
