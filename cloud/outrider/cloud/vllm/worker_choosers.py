"""Chooses a vLLM worker's tokens: all rows of a step at once, on the device that their logits are on.

vLLM's own sampling is never used: this is our engine's, so that a text is the same on both. What the host has to do
for a step's rows, grammars included, it does before it touches their logits (`RequestChoosers.prepare`): on CUDA the
model still runs then. Nothing waits for the device before vLLM itself reads the tokens (`settle`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

import torch

from outrider.cloud.vllm.terms import Mark, Refusal, Terms
from outrider.models.errors import RequestError
from outrider.models.faults import log_fault
from outrider.models.grammar.compiler import CompiledGrammar
from outrider.models.grammar.matchers import Built, build, deep_pool
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.grammar.state import TookTooLong, WornOut
from outrider.models.grammar.vocabulary import Vocabulary
from outrider.models.picks.sampling import SamplingParams
from outrider.models.process.heap import HeapTrimmer
from outrider.models.processors.chooser import TokenLogprobs
from outrider.models.processors.device_copies import HostCopy
from outrider.models.processors.step_choices import StepChoices
from outrider.models.processors.text_rows import AskedRows, TextPath, TextRows
from outrider.models.text.tokenizer import Tokenizer

FOUND: Final = "outrider_found"
"""The attribute of vLLM's `ModelRunnerOutput` with what the step's choosers found beside the tokens, by request."""
FIRST_WAIT_S: Final = 0.01
"""That a worker waits for a grammar, once: nearly all take less, and another look costs a step."""


_NOT_OURS: Final = Terms(0, SamplingParams(), 0)


@dataclass(slots=True)
class Found:
    """What a step has found beside the tokens, by request.

    logprobs: of each token. refusals: of requests whose processors leave no token, or whose grammar is too costly.
    faults: of the V2 runner, the first position whose logits are not finite. prepared_s: of the host before the picks.
    """

    prepared_s: float = field(default=0.0, compare=False)
    logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    refusals: dict[str, Refusal] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)

    def refuse(self, key: str, error: BaseException) -> None:
        """Notes that a request ends with this error; one of ours or a library's is logged."""
        if not isinstance(error, RequestError):
            log_fault(error)
            error = RequestError("internal_error", "the server failed on this request; its log has the details")
        mark: Mark = "slow" if isinstance(error, TookTooLong) else "worn" if isinstance(error, WornOut) else ""
        self.refusals[key] = error.code, str(error), mark


class WorkerGrammars:
    """The grammars that the server's process has asked for, by the numbers that it gave; compiled in a thread of its
    own. The server counts and bounds them: here they stay until it lets them go.

    model: the target's directory. vocab_size: of its logits. is_judge: whether texts end here for the time that their
    grammars take: by one clock, or the workers of a text would differ.
    """

    def __init__(self, model: str, vocab_size: int, *, is_judge: bool = True) -> None:
        self._model = model
        self._is_judge = is_judge
        self._texts: dict[int, WeakSet[RequestText]] = {}
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
                text.rows = None
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

    def follow(self, number: int, text: RequestText) -> None:
        """Notes a text of a grammar."""
        self._texts.setdefault(number, WeakSet()).add(text)

    def _compile(self, terms: list[Any]) -> tuple[CompiledGrammar | None, Built]:
        self._trimmer.trim()
        spec, stop_ids = GrammarSpec.checked(*terms[0]), tuple(terms[1])
        if stop_ids not in self._vocabularies:
            tokenizer = Tokenizer.from_dir(Path(self._model), limit=self._vocab_size)
            self._vocabularies[stop_ids] = Vocabulary(tokenizer, self._vocab_size, stop_ids)
        vocabulary = self._vocabularies[stop_ids]
        built = build(spec, vocabulary.backend, is_timed=self._is_judge)
        if built.matchers is None:
            return None, built
        return CompiledGrammar(spec, built.matchers, vocabulary, is_timed=self._is_judge), built


@dataclass(eq=False)
class RequestText:
    """What changes the rows of one request's text; None once the server has let it go."""

    rows: TextRows | None


@dataclass(frozen=True, slots=True)
class Asked:
    """The rows of one request in a step: the one after its text, and one after each drafted token.

    terms: None for one that is not ours, such as vLLM's warm-up. position: of the token that the first row is for.
    prompt, output: its tokens so far. is_dropped: whether vLLM drops what is picked, as within a prompt.
    """

    key: str
    terms: Terms | None
    position: int
    drafted: Sequence[int] = ()
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    is_dropped: bool = False

    @property
    def num_rows(self) -> int:
        """Its rows."""
        return len(self.drafted) + 1

    def text_of(self, tokens: Sequence[int]) -> Sequence[int]:
        """What of its picks becomes text: up to one that ends it, or before one that is none."""
        stops = () if self.terms is None else self.terms.stop_ids
        for index, token in enumerate(tokens):
            if token < 0 or token in stops:
                return tokens[: index + (token >= 0)]
        return tokens


class RequestChoosers:
    """What a worker keeps of its requests between steps, by name, and what it found in the present one."""

    def __init__(self, grammars: WorkerGrammars) -> None:
        self.grammars = grammars
        self.found = Found()
        self.steps: list[WorkerChoices] = []
        """Of the present step; several where vLLM samples its rows in parts."""
        self._texts: dict[str, RequestText] = {}

    def kept_terms(self, key: str, terms: Terms) -> Terms:
        """What has to be kept of a request's terms: less where its states are made."""
        return terms.slim if key in self._texts else terms

    def forget(self, key: str) -> None:
        """Lets a request's go."""
        self._texts.pop(key, None)

    def prepare(self, asked: Sequence[Asked], vocab_size: int, device: torch.device) -> WorkerChoices:
        """All that the choice of some rows needs besides their logits: of the host's work nothing is left then."""
        began_s, paths = time.perf_counter(), dict[int, TextPath]()
        for index, each in enumerate(asked):
            if each.is_dropped or each.terms is None:
                continue
            if each.terms.changes_rows:
                path = self._path(each, each.terms, vocab_size)
                if path is not None:
                    paths[index] = path
        step = WorkerChoices(asked, paths, vocab_size, device)
        self.steps.append(step)
        self.found.prepared_s += time.perf_counter() - began_s
        return step

    def settle(self, tokens: Mapping[str, Sequence[int]]) -> Found:
        """What the present step has found; ends it. tokens: that vLLM took from each request's rows."""
        for step in self.steps:
            step.settle(tokens, self.found)
        found, self.found = self.found, Found()
        self.steps.clear()
        return found

    def _path(self, asked: Asked, terms: Terms, vocab_size: int) -> TextPath | None:
        """What changes a request's rows; None, and a refusal, where its first row has no token."""
        try:
            kept = self._texts.get(asked.key) or self._make(asked, terms, vocab_size)
            if kept.rows is None:
                raise _let_go()
            kept.rows.follow(asked.prompt, asked.output)
            return kept.rows.walk(asked.drafted)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a library's bugs are raised past Exception, too
            self.found.refuse(asked.key, error)
            return None

    def _make(self, asked: Asked, terms: Terms, vocab_size: int) -> RequestText:
        """Raises RequestError for a grammar that was let go, or excludes the text so far."""
        made = RequestText(TextRows(terms.plan(self.grammars.compiled), asked.prompt, vocab_size))
        self._texts[asked.key] = made
        if terms.grammar is not None:
            self.grammars.follow(terms.grammar, made)
        return made


class WorkerChoices:
    """Chooses tokens of some rows of a step, on their device, and keeps what is reported of them."""

    def __init__(
        self, asked: Sequence[Asked], paths: Mapping[int, TextPath], vocab_size: int, device: torch.device
    ) -> None:
        """paths: by request, its place in `asked`: of those whose rows are changed."""
        self._asked, self._paths = asked, paths
        rows = []
        for index, each in enumerate(asked):
            terms = _NOT_OURS if each.terms is None or each.is_dropped else each.terms
            options = terms.processors if terms.processors.narrows else None
            positions = range(each.position, each.position + each.num_rows)
            rows.append(AskedRows(terms.params, positions, options, paths.get(index), terms.num_logprobs))
        self._choices = StepChoices(rows, vocab_size, device)
        self._picks: HostCopy | None = None

    def picks(self, logits: torch.Tensor) -> torch.Tensor:
        """As `StepChoices.choose`."""
        return self._choices.choose(logits)

    def report_faults(self, picks: torch.Tensor) -> None:
        """Has `settle` name the rows that are not finite: for a runner that takes a token from them, too."""
        self._picks = HostCopy(picks)

    def settle(self, tokens: Mapping[str, Sequence[int]], found: Found) -> None:
        """Notes what these rows have found, once vLLM has read the tokens."""
        texts = [each.text_of(tokens.get(each.key, ())) for each in self._asked]
        if self._picks is not None:
            picks = iter(self._picks.tolist())
            for index, each in enumerate(self._asked):
                num_fine = next((row for row, pick in enumerate(list(islice(picks, each.num_rows))) if pick < 0), None)
                if num_fine is not None:
                    found.faults[each.key] = each.position + num_fine
                    texts[index] = texts[index][:num_fine]
        for index, path in self._paths.items():
            errors = (path.error_of(row, token, row) for row, token in enumerate(texts[index]))
            error = next(filter(None, errors), None)
            if error is not None:
                found.refuse(self._asked[index].key, error)
        for each, logprobs in zip(self._asked, self._choices.logprobs(texts), strict=True):
            if logprobs is not None:
                found.logprobs[each.key] = logprobs


def report_found(
    runner: Any, choosers: RequestChoosers, took: Callable[[Mapping[str, Sequence[int]]], None] | None = None
) -> Callable[[], None]:
    """Has each step's output carry what was found beside the tokens, once vLLM has read these.

    took: gets each step's tokens by request. Returns what ends the step that vLLM has not read the output of, as on all
    ranks but one: for the beginning of the next.
    """
    sample_tokens = runner.sample_tokens
    unread: list[Callable[[], Any]] = []

    def settled(output: Any) -> Any:
        unread.clear()
        tokens = dict(zip(output.req_ids, output.sampled_token_ids, strict=True)) if choosers.steps else {}
        setattr(output, FOUND, choosers.settle(tokens))
        if took is not None:
            took(tokens)
        return output

    def with_found(grammar_output: Any) -> Any:
        output = sample_tokens(grammar_output)
        if output is None:
            return None
        read = getattr(output, "get_output", None)
        if read is None:
            return settled(output)
        output.get_output = cache(lambda: settled(read()))
        unread.append(output.get_output)
        return output

    def end() -> None:
        for read in tuple(unread):
            read()

    runner.sample_tokens = with_found
    return end


def _let_go() -> RequestError:
    """For a request that the server ended while vLLM began it, or goes on with it: nobody reads it."""
    return RequestError("internal_error", "the request's grammar was let go")
