"""Keeps the choosers of a vLLM worker's requests: for logit processors, grammars and logprobs.

vLLM's own are never used: these are our engine's, so that a text is the same on both. A worker sees tokens that vLLM
drops later (of a part of a prompt, of a step that is run again), so before each step a chooser's states are brought to
what vLLM has kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from outrider.cloud.engine.row_choosers import chooser_of
from outrider.cloud.vllm.terms import Mark, Refusal, grammar_number, request_of
from outrider.models.errors import ModelFault, RequestError
from outrider.models.faults import log_fault
from outrider.models.grammar.building import Built, build, deep_pool
from outrider.models.grammar.compiler import CompiledGrammar, compiled_of
from outrider.models.grammar.cost import TookTooLong
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.grammar.state import WornOut
from outrider.models.grammar.vocabulary import Vocabulary
from outrider.models.process.heap import HeapTrimmer
from outrider.models.processors.chooser import TokenChooser
from outrider.models.text.tokenizer import Tokenizer

LOGPROBS: Final = "outrider_logprobs"
"""The attribute of vLLM's `ModelRunnerOutput`, by request: of each token itself, its logprob, the likeliest tokens and
theirs.
"""
REFUSALS: Final = "outrider_refusals"
"""The same: the refusal of a request whose processors leave no token, or whose grammar is too costly."""
FAULTS: Final = "outrider_faults"
"""The same, of the V2 runner: the first position whose logits are not finite."""

Logprobs = list[tuple[int, float, list[int], list[float]]]
FIRST_WAIT_S: Final = 0.01
"""That a worker waits for a grammar, once: nearly all take less, and another look costs a step."""


@dataclass(slots=True)
class Found:
    """What a step's choosers found, by request (V2: by its slot)."""

    logprobs: dict[Any, Logprobs] = field(default_factory=dict)
    refusals: dict[Any, Refusal] = field(default_factory=dict)
    faults: dict[Any, int] = field(default_factory=dict)

    def refuse(self, key: Any, error: RequestError) -> None:
        """Notes that a request ends with this error."""
        mark: Mark = "slow" if isinstance(error, TookTooLong) else "worn" if isinstance(error, WornOut) else ""
        self.refusals[key] = error.code, str(error), mark

    def refuse_fault(self, key: Any, error: BaseException) -> None:
        """The same for a bug, ours or a library's: it costs the text that met it, not vLLM's engine."""
        log_fault(error)
        self.refuse(key, RequestError("internal_error", "the server failed on this request; its log has the details"))

    def clear(self) -> None:
        """Begins a step."""
        self.logprobs.clear()
        self.refusals.clear()
        self.faults.clear()

    def attach(self, output: Any, names: Callable[[Any], str | None]) -> None:
        """Puts it on the runner's output. names: the request of a key."""
        everything: tuple[tuple[str, dict[Any, Any]], ...] = (
            (LOGPROBS, self.logprobs),
            (REFUSALS, self.refusals),
            (FAULTS, self.faults),
        )
        for attribute, found in everything:
            if found:
                setattr(output, attribute, {name: v for key, v in found.items() if (name := names(key)) is not None})


class WorkerGrammars:
    """The grammars that the server's process has asked for, by the numbers that it gave; compiled in a thread of its
    own. The server counts and bounds them: here they stay until it lets them go.

    model: the target's directory. vocab_size: of its logits. is_judge: whether texts end here for the time that their
    grammars take: by one clock, or the workers of a text would differ.
    """

    def __init__(self, model: str, vocab_size: int, *, is_judge: bool = True) -> None:
        self._model = model
        self._is_judge = is_judge
        self._texts: dict[int, WeakSet[RequestChooser]] = {}
        self._vocab_size = vocab_size
        self._vocabularies: dict[tuple[int, ...], Vocabulary] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._trimmer = HeapTrimmer()
        self._working: dict[int, Future[tuple[CompiledGrammar | None, Built]]] = {}

    def compile(self, number: int, terms: list[Any] | None) -> Built | None:
        """Begins to compile a grammar where it gets its terms; None until it is done.

        Raises TokenizerError, RuntimeUnavailable.
        """
        if terms is not None:
            self._pool = self._pool or deep_pool()  # here: most servers see no grammar
            is_next = all(work.done() for work in self._working.values())
            self._working[number] = self._pool.submit(self._compile, terms)
            if is_next:
                wait([self._working[number]], FIRST_WAIT_S)
        work = self._working.get(number)
        return work.result()[1] if work is not None and work.done() else None

    def forget(self, numbers: Collection[int]) -> None:
        """Lets grammars go, and what is left of their texts: the server has ended those."""
        for number in numbers:
            work = self._working.pop(number, None)
            if work is not None:
                work.cancel()
            for text in self._texts.pop(number, ()):
                text.let_go()
        if self._pool is not None:
            self._pool.submit(self._trimmer.trim)

    def close(self) -> None:
        """Ends the thread."""
        if self._pool is not None:
            self._pool.shutdown()

    def compiled(self, number: int) -> CompiledGrammar:
        """A grammar that is compiled. Raises RequestError for one that was let go."""
        work = self._working.get(number)
        grammar = None if work is None else work.result(0)[0]
        if grammar is None:
            raise _let_go()
        return grammar

    def follow(self, number: int, text: RequestChooser) -> None:
        """Notes a text of a grammar."""
        self._texts.setdefault(number, WeakSet()).add(text)

    def _compile(self, terms: list[Any]) -> tuple[CompiledGrammar | None, Built]:
        self._trimmer.trim()
        spec, stop_ids = GrammarSpec(*terms[0]), tuple(terms[1])
        if stop_ids not in self._vocabularies:
            tokenizer = Tokenizer.from_dir(Path(self._model))
            self._vocabularies[stop_ids] = Vocabulary(tokenizer, self._vocab_size, stop_ids)
        vocabulary = self._vocabularies[stop_ids]
        built = build(spec, vocabulary.backend, is_timed=self._is_judge)
        if built.matchers is None:
            return None, built
        return compiled_of(spec, built.matchers, vocabulary, is_timed=self._is_judge), built


class RequestChooser:
    """One request's chooser, and where its text begins in its tokens."""

    def __init__(self, chooser: TokenChooser, first: int, stop_ids: frozenset[int]) -> None:
        self._chooser: TokenChooser | None = chooser
        self._first = first
        self._stop_ids = stop_ids

    def let_go(self) -> None:
        """Frees what it holds: its text is over."""
        self._chooser = None

    def choose(
        self, rows: NDArray[np.float32], drafted: Sequence[int], tokens: Sequence[int], key: Any, found: Found
    ) -> list[int] | None:
        """The tokens that follow `tokens`, prompt and text; None if a row is not finite, or there is a refusal.

        rows: [len(drafted) + 1, V]. key: under which `found` gets the rest.
        """
        parents = range(-1, len(drafted) - 1)
        try:
            if self._chooser is None:
                raise _let_go()
            self._chooser.follow(tokens, self._first)
            branch = self._chooser.choose(rows, drafted, parents, len(tokens), stop_ids=self._stop_ids)
        except ModelFault:
            return None
        except RequestError as error:
            found.refuse(key, error)
            return None
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a library's bugs are raised past Exception, too
            found.refuse_fault(key, error)
            return None
        logprobs = [
            (each.token, each.logprob, [token for token, _ in each.top], [value for _, value in each.top])
            for each in self._chooser.logprobs
        ]
        if logprobs:
            found.logprobs[key] = logprobs
        return branch.tokens


def make_request_chooser(
    extra_args: Any, prompt: Sequence[int], vocab_size: int, grammars: WorkerGrammars
) -> RequestChooser | None:
    """None where a plain pick is enough, and for a request that is not ours. prompt: of the request.

    Raises RequestError for a grammar that was let go, or excludes the text so far.
    """
    request = request_of(extra_args, grammars.compiled)
    if request is None:
        return None
    chooser = chooser_of(request, prompt, vocab_size)
    if chooser is None:
        return None
    choosing = RequestChooser(chooser, len(prompt) - request.num_generated, request.stop_ids)
    if (number := grammar_number(extra_args)) is not None:
        grammars.follow(number, choosing)
    return choosing


def _let_go() -> RequestError:
    """For a request that the server ended while vLLM began it, or goes on with it: nobody reads it."""
    return RequestError("internal_error", "the request's grammar was let go")


class RequestChoosers:
    """The choosers of a worker, by request."""

    def __init__(self) -> None:
        self._found: dict[str, RequestChooser | None] = {}

    def of(self, name: str, make: Callable[[], RequestChooser | None]) -> RequestChooser | None:
        """A request's; made when it is first asked for."""
        if name not in self._found:
            self._found[name] = make()
        return self._found[name]

    def keep(self, names: Collection[str]) -> None:
        """Forgets those of all other requests."""
        for name in [each for each in self._found if each not in names]:
            del self._found[name]
