"""Keeps the choosers of a vLLM worker's requests: for logit processors, grammars and logprobs.

vLLM's own are never used: these are our engine's, so that a text is the same on both. A worker sees tokens that vLLM
drops later (of a part of a prompt, of a step that is run again), so before each step a chooser's states are brought to
what vLLM has kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from outrider.cloud.engine.row_choosers import chooser_of
from outrider.cloud.vllm.terms import Mark, Refusal, Terms
from outrider.models.errors import ModelFault, RequestError
from outrider.models.faults import log_fault
from outrider.models.grammar.compiler import CompiledGrammar
from outrider.models.grammar.matchers import Built, build, deep_pool
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.grammar.state import TookTooLong, WornOut
from outrider.models.grammar.vocabulary import Vocabulary
from outrider.models.process.heap import HeapTrimmer
from outrider.models.processors.chooser import TokenChooser, TokenLogprobs
from outrider.models.text.tokenizer import Tokenizer

FOUND: Final = "outrider_found"
"""The attribute of vLLM's `ModelRunnerOutput` with what the step's choosers found beside the tokens, by request."""
FIRST_WAIT_S: Final = 0.01
"""That a worker waits for a grammar, once: nearly all take less, and another look costs a step."""


@dataclass(slots=True)
class Found:
    """What a step's choosers found, by request (V2: by its slot).

    logprobs: of each token. refusals: of requests whose processors leave no token, or whose grammar is too costly.
    faults: of the V2 runner, the first position whose logits are not finite.
    """

    logprobs: dict[Any, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    refusals: dict[Any, Refusal] = field(default_factory=dict)
    faults: dict[Any, int] = field(default_factory=dict)

    def refuse(self, key: Any, error: RequestError) -> None:
        """Notes that a request ends with this error."""
        mark: Mark = "slow" if isinstance(error, TookTooLong) else "worn" if isinstance(error, WornOut) else ""
        self.refusals[key] = error.code, str(error), mark

    def by_name(self, names: Mapping[Any, str]) -> Found:
        """The same by the requests' names; what has none is left out."""
        everything: tuple[dict[Any, Any], ...] = (self.logprobs, self.refusals, self.faults)
        return Found(*({names[key]: each for key, each in found.items() if key in names} for found in everything))


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
                text.chooser = None
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
        return CompiledGrammar(spec, built.matchers, vocabulary, is_timed=self._is_judge), built


@dataclass(eq=False)
class RequestChooser:
    """One request's chooser, None once its text is over, and where its text begins in its tokens."""

    chooser: TokenChooser | None
    first: int


class RequestChoosers:
    """The choosers of a worker, by request (V2: by its slot), and what they found in the present step."""

    def __init__(self, grammars: WorkerGrammars | None = None) -> None:
        self.grammars = grammars
        self.found = Found()
        self._choosers: dict[Any, RequestChooser] = {}

    def forget(self, key: Any) -> None:
        """Lets a request's go."""
        self._choosers.pop(key, None)

    def choose(
        self,
        key: Any,
        terms: Terms,
        rows: NDArray[np.float32],
        drafted: Sequence[int],
        tokens: Sequence[int],
        first: int,
    ) -> list[int] | None:
        """The tokens that follow `tokens`, prompt and text; None if a row is not finite, or there is a refusal.

        rows: [len(drafted) + 1, V]. first: tokens of the request's prompt.
        """
        try:
            kept = self._choosers.get(key) or self._make(key, terms, tokens[:first], rows.shape[1])
            if (chooser := kept.chooser) is None:
                raise _let_go()
            chooser.follow(tokens, kept.first)
            parents = range(-1, len(drafted) - 1)
            branch = chooser.choose(rows, drafted, parents, len(tokens), stop_ids=terms.stop_ids)
        except ModelFault:
            return None
        except RequestError as error:
            self.found.refuse(key, error)
            return None
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a library's bugs are raised past Exception, too
            # Ours or a library's: it ends that text only, and not vLLM's engine.
            log_fault(error)
            said = "the server failed on this request; its log has the details"
            self.found.refuse(key, RequestError("internal_error", said))
            return None
        if chooser.logprobs:
            self.found.logprobs[key] = tuple(chooser.logprobs)
        return branch.tokens

    def _make(self, key: Any, terms: Terms, prompt: Sequence[int], vocab_size: int) -> RequestChooser:
        """Raises RequestError for a grammar that was let go, or excludes the text so far."""
        assert self.grammars is not None, "`install` comes first"
        chooser = chooser_of(terms.request(self.grammars.compiled), prompt, vocab_size)
        assert chooser is not None, "`Terms.needs_chooser`"
        made = self._choosers[key] = RequestChooser(chooser, len(prompt) - terms.num_generated)
        if terms.grammar is not None:
            self.grammars.follow(terms.grammar, made)
        return made


def report_found(runner: Any, choosers: RequestChoosers, names: Callable[[], Mapping[Any, str]] | None = None) -> None:
    """Has each step's output carry what choosers found beside the tokens.

    names: the requests' names by the choosers' keys; None where these are the names.
    """
    sample_tokens = runner.sample_tokens

    def with_found(grammar_output: Any) -> Any:
        found = choosers.found = Found()
        output = sample_tokens(grammar_output)
        if output is not None:
            found = found if names is None else found.by_name(names())
            setattr(getattr(output, "model_runner_output", output), FOUND, found)
        return output

    runner.sample_tokens = with_found


def _let_go() -> RequestError:
    """For a request that the server ended while vLLM began it, or goes on with it: nobody reads it."""
    return RequestError("internal_error", "the request's grammar was let go")
