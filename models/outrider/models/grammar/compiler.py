"""Compiles grammars for one vocabulary, once each, off the event loop, with limits of time and size."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final
from weakref import WeakSet, WeakValueDictionary

from outrider.models.errors import RequestError
from outrider.models.grammar.matchers import MAX_AGAIN_S, Built, Elsewhere, Matchers, build, deep_pool, refusal
from outrider.models.grammar.spec import GrammarSpec, invalid_grammar
from outrider.models.grammar.state import GrammarCost, GrammarState
from outrider.models.grammar.vocabulary import Vocabulary
from outrider.models.process.heap import HeapTrimmer
from outrider.models.text.tokenizer import Tokenizer

MAX_STRIKES: Final = 3
STRIKE_S: Final = 60.0
"""After so many grammars that took too long, within this time, a client's are refused."""
MAX_CLIENTS: Final = 4
"""Clients behind one owner that may wait, or take too long, as one alone may: a cascade's middle has many."""

Client = tuple[Hashable, bytes]
"""An owner, and the salt that it sent for one of its clients: salts are not secret, so they divide an owner only."""


class Strikes:
    """Who has sent grammars that took too long, and until when nothing of theirs is compiled. Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of: dict[Hashable, list[float]] = {}
        self._lock = threading.Lock()

    def add(self, client: Client) -> None:
        """One more."""
        with self._lock:
            now = self._clock()
            for each in [each for each, times in self._of.items() if now - times[-1] >= STRIKE_S]:
                del self._of[each]
            for key, limit in limits_of(client, MAX_STRIKES):
                self._of[key] = [*self._of.get(key, [])[1 - limit :], now]

    def seconds_left(self, client: Client) -> float:
        """Until a client's grammars are compiled again; at most 0 where they are."""
        with self._lock:
            found = [(self._of.get(key, []), limit) for key, limit in limits_of(client, MAX_STRIKES)]
            ends = [times[0] + STRIKE_S for times, limit in found if len(times) >= limit]
            return max(ends) - self._clock() if ends else 0.0


def limits_of(client: Client, limit: int) -> tuple[tuple[Hashable, int], tuple[Hashable, int]]:
    """What counts for a client: its own, and its owner's, which may have some clients' worth."""
    return (client, limit), ((client[0],), limit * MAX_CLIENTS)


MAX_CACHED: Final = 16
MAX_CACHED_PER_OWNER: Final = 4
"""A grammar has 1 MB at most as people write them, a costly one up to 25 MB: an owner keeps one of those."""
ELSEWHERE_THREADS: Final = 16
"""That wait for grammars built elsewhere."""
MAX_COSTLY: Final = 8
"""Costly grammars that one client may have in use; of 218 schemas of APIs none is costly, at 152,000 tokens either."""
HELD_RETRY_S: Final = 5
LARGE_TEXT: Final = 8192
MAX_WAITING: Final = 4
MAX_JOINED: Final = 64
"""Requests of a client that wait for a grammar which is being compiled for another of its requests."""
SLOW_COMPILE_S: Final = 0.5


@dataclass(frozen=True, eq=False, slots=True)
class CompiledGrammar:
    """A grammar for one vocabulary; texts begin with `state()`. Safe to share between threads.

    excess: called where a text's grammar takes too long. is_timed: False ends no text for that.
    """

    spec: GrammarSpec
    matchers: Matchers | Elsewhere
    vocabulary: Vocabulary
    excess: Callable[[], None] = lambda: None
    is_timed: bool = True

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a text, ascending."""
        return self.vocabulary.stop_ids

    def state(self) -> GrammarState:
        """A new state, before the first token of the answer; only where the matchers are here."""
        assert isinstance(self.matchers, Matchers)
        cost = GrammarCost(self.excess, self.matchers.note, is_timed=self.is_timed)
        return GrammarState(self.vocabulary, self.matchers, *_delimiters(self.spec, self.vocabulary), cost)


BuildElsewhere = Callable[[GrammarSpec, tuple[int, ...]], Built]
"""Builds a grammar for these stop ids where an engine makes its masks: in other processes. Blocking."""


class GrammarCompiler:
    """Compiles specs into grammars, and keeps the latest ones.

    vocab_size: ids of the model's logits. stop_ids: those that end a text. elsewhere: None builds here, one grammar at
    a time. An owner has one in work (elsewhere `MAX_WAITING`), and `MAX_CACHED_PER_OWNER` kept. A client may have
    `MAX_WAITING` waiting and `MAX_COSTLY` in use, and `MAX_JOINED` requests that wait for a grammar of another one of
    its requests; an owner, `MAX_CLIENTS` times as many.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        stop_ids: Sequence[int],
        elsewhere: BuildElsewhere | None = None,
    ) -> None:
        self._vocabulary = Vocabulary(tokenizer, vocab_size, stop_ids)
        self._elsewhere = elsewhere
        self._known: OrderedDict[tuple[Client, str], Matchers | Elsewhere] = OrderedDict()
        self._live: WeakValueDictionary[tuple[Client, str], Matchers | Elsewhere] = WeakValueDictionary()
        self._building: dict[tuple[Client, str], Future[CompiledGrammar]] = {}
        self._lock = threading.Lock()  # of these
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: Counter[Hashable] = Counter()
        self._asked: dict[tuple[Client, str], asyncio.Future[CompiledGrammar | BaseException | None]] = {}
        self._turns: dict[Hashable, asyncio.Semaphore] = {}
        self._strikes = Strikes()
        self._costly: dict[Hashable, WeakSet[Matchers | Elsewhere]] = {}
        self._trimmer = HeapTrimmer()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a text, ascending."""
        return self._vocabulary.stop_ids

    def find(self, spec: GrammarSpec, owner: Hashable = None, salt: bytes = b"") -> CompiledGrammar | None:
        """The grammar, where it is compiled already for this client: kept, or in use by a text."""
        with self._lock:
            key = (owner, salt), spec.hash
            matchers = self._live.get(key)
            if matchers is None or not matchers.is_usable:
                return None
            if key in self._known:
                self._known.move_to_end(key)
            return CompiledGrammar(spec, matchers, self._vocabulary)

    def compile(self, spec: GrammarSpec, owner: Hashable = None) -> CompiledGrammar:
        """The grammar, compiled in a thread of its own where it is not known; blocks until it is there.

        Raises RequestError `invalid_grammar`, TokenizerError where the tokenizer cannot be held to any grammar.
        """
        return self.find(spec, owner) or self._start(spec, (owner, b"")).result()

    def require_calm(self, client: Client) -> None:
        """Raises RequestError `too_many_grammars` (429) for a client whose grammars took too long a moment ago."""
        if (wait_s := self._strikes.seconds_left(client)) > 0:
            raise RequestError(
                "too_many_grammars",
                f"{MAX_STRIKES} grammars of this client took too long within {STRIKE_S:.0f} s; try again later",
                status=429,
                retry_after_s=math.ceil(wait_s),
            )

    async def compile_for(self, spec: GrammarSpec, owner: Hashable = None, salt: bytes = b"") -> CompiledGrammar:
        """As `compile`, without holding the event loop. salt: which of the owner's clients asks.

        Raises RequestError `too_many_grammars` (429) where too many of the owner's are waiting, or are costly and held.
        """
        client = owner, salt
        self.require_calm(client)
        if found := self.find(spec, *client):
            return self._held(found, client)
        key = client, spec.hash
        while (asked := self._asked.get(key)) is not None:  # one compilation serves all who ask for it meanwhile
            with self._counted(client, MAX_JOINED):
                outcome = await asyncio.shield(asked)
            if isinstance(outcome, CompiledGrammar):
                return self._held(outcome, client)
            if outcome is not None:
                raise _again(outcome)
        asked = self._asked[key] = asyncio.get_running_loop().create_future()
        try:
            found = await self._compile_in_turn(spec, client)
            asked.set_result(found)
            return found
        except asyncio.CancelledError:
            asked.set_result(None)  # this client has left: another of them begins anew
            raise
        except BaseException as error:  # a library may raise anything
            asked.set_result(error)
            raise
        finally:
            del self._asked[key], asked

    @contextmanager
    def _counted(self, client: Client, most: int) -> Iterator[None]:
        """One more request of the client that waits. Raises RequestError `too_many_grammars`."""
        keys = limits_of(client, most)
        if full := next((key for key, limit in keys if self._waiting[most, key] > limit), None):
            raise RequestError(
                "too_many_grammars",
                f"{self._waiting[most, full]} requests of this {'client' if full == client else 'key'} wait for "
                "grammars that are being compiled; try again later",
                status=429,
                retry_after_s=1,
            )
        self._waiting.update((most, key) for key, _ in keys)
        try:
            yield
        finally:
            self._waiting.subtract((most, key) for key, _ in keys)
            for each in [(most, key) for key, _ in keys if not self._waiting[most, key]]:
                del self._waiting[each]

    async def _compile_in_turn(self, spec: GrammarSpec, client: Client) -> CompiledGrammar:
        owner = client[0]
        try:
            with self._counted(client, MAX_WAITING):
                num_at_once = 1 if self._elsewhere is None else MAX_WAITING
                async with self._turns.setdefault(owner, asyncio.Semaphore(num_at_once)):
                    return await self._compile_now(spec, client)
        finally:
            if (MAX_WAITING, (owner,)) not in self._waiting:
                self._turns.pop(owner, None)

    async def _compile_now(self, spec: GrammarSpec, client: Client) -> CompiledGrammar:
        # Shielded: a client that leaves does not free its turn before the work is done.
        work = asyncio.ensure_future(asyncio.wrap_future(self._start(spec, client)))
        try:
            found = await asyncio.shield(work)
            try:
                return self._held(found, client)
            except RequestError:
                with self._lock:
                    self._known.pop((client, spec.hash), None)
                raise
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise
        finally:
            del work  # with its error it would be a cycle, which holds what the library had built

    def close(self) -> None:
        """Ends the thread; grammars that exist stay usable."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=True, cancel_futures=True)

    def _held(self, found: CompiledGrammar, client: Client) -> CompiledGrammar:
        """The grammar for one more text of the client. Raises RequestError `too_many_grammars`."""
        if found.matchers.is_costly:
            for key in [each for each, live in self._costly.items() if not live]:
                del self._costly[key]
            for key, limit in limits_of(client, MAX_COSTLY):
                live = self._costly.setdefault(key, WeakSet())
                if found.matchers not in live and len(live) >= limit:
                    raise RequestError(
                        "too_many_grammars",
                        f"{len(live)} grammars of this {'client' if key == client else 'key'} are in use that took "
                        f"over {MAX_AGAIN_S * 1e3:.0f} ms to compile; try again when one of their texts has ended",
                        status=429,
                        retry_after_s=HELD_RETRY_S,
                    )
                live.add(found.matchers)
        return replace(found, excess=partial(self._strikes.add, client))

    def _start(self, spec: GrammarSpec, client: Client) -> Future[CompiledGrammar]:
        with self._lock:
            if self._thread is None:
                self._thread = deep_pool() if self._elsewhere is None else ThreadPoolExecutor(ELSEWHERE_THREADS)
            key = client, spec.hash
            work = self._building.get(key)
            if work is None:  # elsewhere several of an owner are in work
                work = self._building[key] = self._thread.submit(partial(self._compile, spec, client))
                work.add_done_callback(lambda _: self._building.pop(key, None))
            return work

    def _compile(self, spec: GrammarSpec, client: Client) -> CompiledGrammar:
        if found := self.find(spec, *client):
            return found
        _delimiters(spec, self._vocabulary)  # before the work
        if len(spec.text) > LARGE_TEXT:
            self._drop_costly(client)
        if self._elsewhere is None:
            self._trimmer.trim()  # what the grammars of ended texts have left; in this thread only
            built = build(spec, self._vocabulary.backend)
        else:
            built = self._elsewhere(spec, self._vocabulary.stop_ids)
        if built.taken_s > SLOW_COMPILE_S:
            self._strikes.add(client)
        if built.matchers is None:
            raise refusal(built.fault)
        with self._lock:
            key = client, spec.hash
            self._known[key], self._live[key] = built.matchers, built.matchers
            own = [key for key in self._known if key[0][0] == client[0]]
            costly = [key for key in own if self._known[key].is_costly]
            for key in {*own[:-MAX_CACHED_PER_OWNER], *costly[:-1]}:
                del self._known[key]
            while len(self._known) > MAX_CACHED:
                self._known.popitem(last=False)
        return CompiledGrammar(spec, built.matchers, self._vocabulary)

    def _drop_costly(self, client: Client) -> None:
        """Makes room for a grammar that is most likely costly, and takes twice what it leaves to compile."""
        with self._lock:
            for key in [key for key, kept in self._known.items() if key[0] == client and kept.is_costly]:
                del self._known[key]


def _again(error: BaseException) -> BaseException:
    """The error for one more request, without the frames of the first."""
    if isinstance(error, RequestError):
        return RequestError(error.code, str(error), status=error.status, retry_after_s=error.retry_after_s)
    return RuntimeError(f"{type(error).__name__}: {error}")


def _delimiters(spec: GrammarSpec, vocabulary: Vocabulary) -> tuple[int | None, int | None]:
    """The tokens after which, and with which, the grammar begins. Raises RequestError for what is no token."""
    return _token("after", spec.after, vocabulary), _token("opener", spec.opener, vocabulary)


def _token(name: str, spelling: str, vocabulary: Vocabulary) -> int | None:
    if not spelling:
        return None
    token = vocabulary.tokenizer.token_id(spelling)
    if token is None:
        raise invalid_grammar(f"`{name}` is no token of the model; expected the spelling of one, such as </think>")
    return token
