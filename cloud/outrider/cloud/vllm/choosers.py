"""Keeps the choosers of a vLLM worker's requests: what rules, grammars and logprobs need beyond a plain pick.

vLLM's own processing of logits is never used: the rules are our engine's, so that a text is the same on both. A worker
sees tokens that vLLM drops later (of a part of a prompt, of a step that is run again), so before each step a chooser's
states are brought to what vLLM has kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from outrider.cloud.engine.choosers import chooser_of
from outrider.cloud.vllm.terms import request_of
from outrider.models.errors import ModelFault, RequestError
from outrider.models.faults import log_fault
from outrider.models.grammar.compiler import CompiledGrammar, GrammarCompiler
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.tokenizer import Tokenizer
from outrider.models.transforms.chooser import RowChooser

LOGPROBS: Final = "outrider_logprobs"
"""The attribute of vLLM's `ModelRunnerOutput`, by request: of each token itself, its logprob, the likeliest tokens and
theirs.
"""
REFUSALS: Final = "outrider_refusals"
"""The same: code and message of the error of a request whose rules leave no token, or whose grammar is too costly."""

MAX_READY: Final = 64
"""Grammars that a worker holds compiled; each takes 10 to 20 MB at most."""

Logprobs = list[tuple[int, float, list[int], list[float]]]


@dataclass(slots=True)
class Found:
    """What a step's choosers found, by request (V2: by its slot)."""

    logprobs: dict[Any, Logprobs] = field(default_factory=dict)
    refusals: dict[Any, tuple[str, str]] = field(default_factory=dict)

    def clear(self) -> None:
        """Begins a step."""
        self.logprobs.clear()
        self.refusals.clear()

    def attach(self, output: Any, names: Callable[[Any], str | None]) -> None:
        """Puts it on the runner's output. names: the request of a key."""
        for attribute, found in ((LOGPROBS, self.logprobs), (REFUSALS, self.refusals)):
            if found:
                setattr(output, attribute, {name: v for key, v in found.items() if (name := names(key)) is not None})


class WorkerGrammars:
    """The grammars that a worker has compiled, or compiles in its own thread.

    model: the target's directory. vocab_size: of its logits.
    """

    def __init__(self, model: str, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._compilers: dict[tuple[int, ...], GrammarCompiler] = {}
        self._working: OrderedDict[tuple[Any, ...], Future[CompiledGrammar]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._model = model

    def is_ready(self, terms: list[Any]) -> bool:
        """Whether `compiled` answers at once; begins to compile where not. A fault is an answer, too.

        What is ready stays so until `MAX_READY` others came after it: its request may wait in the queue.
        """
        key = _key(terms)
        work = self._working.get(key)
        if work is None or _is_worn_out(work):
            while len(self._working) >= MAX_READY:
                self._working.popitem(last=False)
            work = self._working[key] = self._thread.submit(self._compile, terms)
        self._working.move_to_end(key)
        return work.done()

    def compiled(self, terms: list[Any]) -> CompiledGrammar:
        """The grammar; compiles nothing, so that no step waits. Raises RequestError as `GrammarCompiler.compile`, and
        `too_many_grammars` where the grammar has made room for others.
        """
        work = self._working.get(_key(terms))
        if work is None or not work.done():
            raise RequestError(
                "too_many_grammars",
                f"{MAX_READY} grammars came while this one waited; try again later",
                status=429,
            )
        return work.result()

    def _compile(self, terms: list[Any]) -> CompiledGrammar:
        return self._compiler(terms).compile(_spec(terms), terms[2])

    def _compiler(self, terms: list[Any]) -> GrammarCompiler:
        stop_ids = tuple(terms[1])
        if stop_ids not in self._compilers:
            tokenizer = Tokenizer.from_dir(Path(self._model))  # here: a text without a grammar needs none
            self._compilers[stop_ids] = GrammarCompiler(tokenizer, self._vocab_size, stop_ids)
        return self._compilers[stop_ids]


def _is_worn_out(work: Future[CompiledGrammar]) -> bool:
    return work.done() and work.exception() is None and work.result().matchers.is_worn_out


def _key(terms: list[Any]) -> tuple[Any, ...]:
    return (*terms[0], tuple(terms[1]), terms[2])


def _spec(terms: list[Any]) -> GrammarSpec:
    return GrammarSpec(*terms[0])


class Choosing:
    """One request's chooser, and where its text begins in its tokens."""

    def __init__(self, chooser: RowChooser, first: int, stop_ids: frozenset[int]) -> None:
        self._chooser = chooser
        self._first = first
        self._stop_ids = stop_ids

    def choose(
        self, rows: NDArray[np.float32], drafted: Sequence[int], tokens: Sequence[int], key: Any, found: Found
    ) -> list[int] | None:
        """The tokens that follow `tokens`, prompt and text; None if a row is not finite, or there is a refusal.

        rows: [len(drafted) + 1, V]. key: under which `found` gets the rest.
        """
        parents = range(-1, len(drafted) - 1)
        try:
            self._chooser.follow(tokens, self._first)
            branch = self._chooser.choose(rows, drafted, parents, len(tokens), stop_ids=self._stop_ids)
        except ModelFault:
            return None
        except RequestError as error:
            found.refusals[key] = error.code, str(error)
            return None
        except BaseException as error:  # a library's bug, also past Exception, costs the text that met it
            log_fault(error)
            found.refusals[key] = "internal_error", "the server failed on this request; its log has the details"
            return None
        logprobs = [
            (each.token, each.logprob, [token for token, _ in each.top], [value for _, value in each.top])
            for each in self._chooser.logprobs
        ]
        if logprobs:
            found.logprobs[key] = logprobs
        return branch.tokens


def choosing_of(extra_args: Any, prompt: Sequence[int], vocab_size: int, grammars: WorkerGrammars) -> Choosing | None:
    """None where a plain pick is enough, and for a request that is not ours. prompt: of the request.

    Raises RequestError for a grammar that cannot be compiled, or excludes the text so far.
    """
    request = request_of(extra_args, grammars.compiled)
    if request is None:
        return None
    chooser = chooser_of(request, prompt, vocab_size)
    if chooser is None:
        return None
    return Choosing(chooser, len(prompt) - request.num_generated, request.stop_ids)


class Choosings:
    """The choosers of a worker, by request."""

    def __init__(self) -> None:
        self._found: dict[str, Choosing | None] = {}

    def of(self, name: str, make: Callable[[], Choosing | None]) -> Choosing | None:
        """A request's; made when it is first asked for."""
        if name not in self._found:
            self._found[name] = make()
        return self._found[name]

    def keep(self, names: Collection[str]) -> None:
        """Forgets those of all other requests."""
        for name in [each for each in self._found if each not in names]:
            del self._found[name]
