"""Streams texts through real processes, again and again, and compares each with its undisturbed twin, for `bench.soak`.

Knows when a fault strikes, and not what it does.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import ssl
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
from bench.invariant import GRAMMAR, RULES, SAMPLINGS, make_grammar_requests, make_requests
from bench.invariant_modes import MODES, STEADY, generate_all
from bench.processes import Program, metrics_of, read_text
from bench.soak_faults import Fault

from outrider.edge.drafting.drafter import Drafter
from outrider.edge.lab.laboratory import Lab
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import open_drafter
from outrider.edge.results import GenerationRequest, TokenBatch
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.errors import OutriderError
from outrider.models.processors.options import PLAIN

HANG_S: Final = 180.0
"""A text that is not over so long after its fault hangs, and so does one that brings nothing for so long."""
_UNNAMED: Final = ("the stream ended", "HTTP 500", "the server failed on this request")
"""How errors begin that say nothing of what happened."""
ENDPOINT: Final = "local endpoint"
WAYS: Final = (*MODES, *[ENDPOINT] * (len(MODES) // 2))
"""How a text is asked for: the agent's modes, and every third time the endpoint."""
_FIELDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "processors": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "logit_bias": {"40": -100, "41": 2, "42": -3},
        "min_tokens": 24,
    }
}
"""What a client of HTTP sends for a sampling's rules; words that are forbidden by ids it cannot."""


@dataclass(frozen=True, slots=True)
class Case:
    """A request: the agent's own, and its body in HTTP. tokens, text: what the verifier alone writes for each."""

    name: str
    request: GenerationRequest
    body: Mapping[str, Any]
    tokens: tuple[int, ...]
    text: str


def make_cases(lab: Lab, num_each: int, max_tokens: int) -> list[Case]:
    """So many cases of each sampling of `bench.invariant`, with the texts of the lab's verifier, which drafts nothing.

    Raises SystemExit where it fails to write one.
    """
    cases = []
    for name, sampling in SAMPLINGS.items():
        if name == GRAMMAR:
            requests = make_grammar_requests(lab, sampling, num_each, max_tokens)
        else:
            requests = make_requests(lab, sampling, num_each, max_tokens, RULES.get(name, PLAIN))
        vocab_size = lab.target.manifest.architecture.vocab_size
        texts = asyncio.run(generate_all("no draft", lab.url, [lab.drafter], vocab_size, requests))
        for request, own in zip(requests, texts, strict=True):
            body = _body(name, request)
            found = read_text(lab.url, body)
            if found.error:
                raise SystemExit(f"the undisturbed text of {name} failed: {found.error}")
            cases.append(Case(f"{name}, seed {request.params.seed}", request, body, own.tokens, found.text))
    return cases


def _body(name: str, request: GenerationRequest) -> dict[str, Any]:
    params = request.params
    sampling = {"temperature": params.temperature, "top_p": params.top_p, "seed": params.seed}
    body = {"prompt": list(request.prompt), "max_tokens": request.max_tokens, **sampling, **_FIELDS.get(name, {})}
    if request.grammar is not None:
        body["structured_outputs"] = {"json": json.loads(request.grammar.text)}
        body["frequency_penalty"] = request.processors.frequency_penalty
    return body


@dataclass(slots=True, eq=False)
class Attempt:
    """A text that is being written. num: of its characters or tokens that have come. fault: that struck it.

    may_end, may_break: as in Fault. longest_s: without anything new.
    """

    case: Case
    way: str
    num: int = 0
    num_accepted: int = 0
    fault: str = ""
    may_end: bool = False
    may_break: bool = False
    longest_s: float = 0.0
    _last_s: float = field(default_factory=time.monotonic)

    def meet(self, name: str, fault: Fault) -> None:
        """Notes a fault that strikes while it is written, if it can meet it."""
        if self.way == ENDPOINT or not fault.is_agents:
            self.fault, self.may_end, self.may_break = name, fault.may_end, fault.may_break

    def came(self, num: int) -> None:
        """Takes so many characters or tokens in all."""
        now = time.monotonic()
        self.longest_s, self._last_s = max(self.longest_s, now - self._last_s), now
        self.num = num

    @property
    def share(self) -> float:
        """Of the text, that has come."""
        return self.num / max(1, len(self.case.text if self.way == ENDPOINT else self.case.tokens))


@dataclass(slots=True)
class Ledger:
    """Counts texts by the fault that they met, "" for none. injected: faults. errors: what clients got.

    missed: what failed, in sentences. struck: texts that met it. num_equal: those that are their twin's. ended: those
    that ended with an error, and were asked for again. accepted: drafted tokens of the endpoint's texts, from the end
    of a fault to the next strike in its place; "" before the first one. turn: held to change any of it.
    """

    injected: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    different: Counter[str] = field(default_factory=Counter)
    errors: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    num_equal: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    num_accepted: int = 0
    missed: list[str] = field(default_factory=list)
    turn: threading.Condition = field(default_factory=threading.Condition)

    def differs(self, attempt: Attempt, found: Sequence[Any], expected: Sequence[Any]) -> None:
        """Takes a text that is no beginning of its twin, or ends too early."""
        self.different[attempt.fault] += 1
        pairs = enumerate(itertools.zip_longest(found, expected))
        at, (wrong, right) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
        what = "character" if attempt.way == ENDPOINT else "token"
        self.missed.append(
            f"DIFFERENT: {attempt.case.name}, {attempt.way}, {attempt.fault or 'no fault'}: {what} {at} is {wrong!r}, "
            f"expected {right!r}"
        )


class Traffic:
    """Texts through one agent and one verifier, several at once, each in a thread of its own, until it is closed.

    url: of the verifier, over the network in between. tls: trusts it.
    """

    def __init__(
        self, lab: Lab, cases: Sequence[Case], agent: Program, url: str, ledger: Ledger, tls: ssl.SSLContext | None
    ) -> None:
        self._vocab_size = lab.target.manifest.architecture.vocab_size
        self._agent, self._url, self._tls = agent, url, tls
        self._ledger = ledger
        self._turn = ledger.turn
        self._running: list[Attempt] = []
        self._fault: tuple[str, Fault] | None = None
        self._healed: tuple[str, int] | None = None  # the last fault, and what the agent had drafted until then
        self._is_over = False
        pairs = list(itertools.product(cases, WAYS))
        random.Random(len(pairs)).shuffle(pairs)
        self._next = itertools.cycle(pairs)

    @contextmanager
    def flowing(self, lab: Lab, num: int) -> Iterator[None]:
        """Texts run meanwhile, `num` at a time. Raises what a thread of them raised."""
        with ExitStack() as stack:
            threads = []
            for _ in range(num):
                drafter = open_drafter(lab.draft, lab.choice, num_threads=1, target=lab.tokenizer).drafter
                stack.enter_context(closing(drafter))
                threads.append(threading.Thread(target=self._flow, args=(drafter,), daemon=True))
            for thread in threads:
                thread.start()
            try:
                yield
                if not self._ledger.missed:
                    self._settle()
            finally:
                with self._turn:
                    self._is_over = True
                    self._turn.notify_all()
                for thread in threads:
                    thread.join(HANG_S)
                    if thread.is_alive():
                        raise SystemExit(f"texts hang at the end: {self._names()}")

    def wait_for_middle(self, share: float, *, at_endpoint: bool) -> None:
        """Returns while a text of which this share has come goes on. at_endpoint: one of the local endpoint."""

        def is_there() -> bool:
            under_way = (each for each in self._running if each.num and share <= each.share < 1)
            return any(each.way == ENDPOINT or not at_endpoint for each in under_way)

        self._wait(is_there, "nothing comes")

    @contextmanager
    def struck(self, name: str, fault: Fault) -> Iterator[None]:
        """A fault strikes meanwhile. Returns when all texts that met it are over."""
        self._settle()
        with self._turn:
            self._fault = name, fault
            for each in self._running:
                each.meet(name, fault)
        try:
            yield
            with self._turn:
                self._ledger.injected[name] += 1
            self._healed = name, self._accepted()
        finally:
            with self._turn:
                self._fault = None
                self._turn.notify_all()
        self._wait(lambda: not any(each.fault for each in self._running), f"after {name}")

    def _settle(self) -> None:
        if self._healed is not None:
            name, before = self._healed
            num_accepted = max(0, self._accepted() - before)  # less where the agent is a new process
            with self._turn:
                self._ledger.accepted[name] += num_accepted
            self._healed = None

    def _accepted(self) -> int:
        return int(metrics_of(self._agent.url)["outrider_device_accepted_total"])

    def _wait(self, is_so: Any, words: str) -> None:
        with self._turn:
            if not self._turn.wait_for(lambda: self._is_over or is_so(), HANG_S):
                raise SystemExit(f"HANG: {words} for {HANG_S:g} s: {self._names()}")
            if self._is_over and self._ledger.missed:
                raise SystemExit  # the miss is in the list already

    def _names(self) -> str:
        return "; ".join(f"{each.case.name}, {each.way}, {each.num} come" for each in self._running)

    def _flow(self, drafter: Drafter) -> None:
        try:
            while not self._is_over:
                with self._turn:
                    case, way = next(self._next)
                while not self._is_over and not self._write(Attempt(case, way), drafter):
                    self._wait(lambda: not self._fault, "a fault lasts")
        except BaseException as error:
            with self._turn:
                if not isinstance(error, SystemExit) or str(error):
                    self._ledger.missed.append(traceback.format_exc())
                self._is_over = True
                self._turn.notify_all()

    def _write(self, attempt: Attempt, drafter: Drafter) -> bool:
        """Whether it is its twin; it is asked for again where a fault ended it."""
        case, ledger, found, expected = attempt.case, self._ledger, list[Any](), list[Any]()
        with self._turn:
            if self._fault is not None:
                attempt.meet(*self._fault)
            self._running.append(attempt)
        try:
            if attempt.way == ENDPOINT:
                expected.extend(case.text)
                read = read_text(self._agent.url, case.body, lambda text: self._came(attempt, len(text)))
                found.extend(read.text)
                error, is_named = read.error, has_name(read.error) or attempt.may_break
                attempt.num_accepted = read.num_accepted
            else:
                expected.extend(case.tokens)
                error, is_named = asyncio.run(self._generate(attempt, drafter, found)), True
        finally:
            with self._turn:
                self._running.remove(attempt)
                self._turn.notify_all()
        fault = attempt.fault
        with self._turn:
            ledger.struck[fault] += 1
            ledger.num_accepted += attempt.num_accepted
            if found != (expected[: len(found)] if error else expected):
                ledger.differs(attempt, found, expected)
                return True
            attempt.came(attempt.num)
            if attempt.longest_s > HANG_S:
                ledger.missed.append(
                    f"HANG: {case.name}, {attempt.way}, {fault or 'no fault'}: nothing came for so long"
                )
            if not error:
                ledger.num_equal[fault] += 1
                self._turn.notify_all()
                return True
            ledger.ended[fault] += 1
            ledger.errors[fault][error] += 1
            if not attempt.may_end or not is_named:
                about = f"{case.name}, {attempt.way}, {fault or 'no fault'}"
                ledger.missed.append(f"{'UNNAMED' if attempt.may_end else 'FAILED'}: {about}: {error}")
            return not fault

    async def _generate(self, attempt: Attempt, drafter: Drafter, found: list[Any]) -> str:
        """The error that ended it, if one did."""

        def on_tokens(batch: TokenBatch) -> None:
            found.extend(batch.tokens)
            self._came(attempt, len(found))

        options = ClientOptions(is_steady=attempt.way == STEADY, tls=self._tls)
        try:
            async with VerifierClient(self._url, options) as client:
                agent = MODES[attempt.way](Endpoints([client]), drafter, self._vocab_size)
                result = await agent.generate(attempt.case.request, on_tokens)
        except OutriderError as error:
            return f"{type(error).__name__}: {error}"
        if result.draft_error is not None:
            raise AssertionError(f"the draft failed, which no fault touches: {result.draft_error}")
        attempt.num_accepted = result.num_accepted
        return ""

    def _came(self, attempt: Attempt, num: int) -> None:
        with self._turn:
            attempt.came(num)
            self._turn.notify_all()


def has_name(error: str) -> bool:
    """Whether an error that a client of the endpoint got names anything: no lost connection, no failure inside."""
    return not hasattr(httpx, error.partition(":")[0]) and not error.startswith(_UNNAMED)
