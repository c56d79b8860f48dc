"""A vLLM worker's choices of a whole step, without vLLM, against the embedded engine's, one text after the other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.cloud.engine.row_choosers import chooser_of
from outrider.cloud.seam import GenerateRequest, PickOptions
from outrider.cloud.vllm.terms import Terms, grammar_terms
from outrider.cloud.vllm.worker_choosers import FOUND, Asked, Found, RequestChoosers, WorkerGrammars, report_found
from outrider.models.grammar.matchers import LIMITS
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.grammar.state import GrammarState
from outrider.models.picks.acceptance import accept_tree
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.chooser import TokenChooser
from outrider.models.processors.options import PLAIN, ProcessorOptions
from outrider.models.processors.rows_torch import DraftedRows
from outrider.models.text.tokenizer import Tokenizer
from outrider.reference import target_dir

CPU = torch.device("cpu")
SPECS = (
    GrammarSpec("json_object", ""),
    GrammarSpec("regex", "[a-c]{3,9}x"),
    GrammarSpec("choice", json.dumps(["yes", "no"])),
)
AMBIGUOUS = 'start: a "."\na: "" | a a | "x" | "xx" a | a "x"'


def compiled(grammars: WorkerGrammars, number: int, spec: GrammarSpec, tokenizer: Tokenizer) -> None:
    built = grammars.compile(number, grammar_terms(spec, tokenizer.eos_token_ids))
    while built is None:
        built = grammars._working[number].result()[1]
    assert built.matchers is not None, built.fault


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[WorkerGrammars]:
    """Those of SPECS, numbered from 1 on."""
    with closing(WorkerGrammars(str(target_dir()), tokenizer.size)) as made:
        for number, spec in enumerate(SPECS, 1):
            compiled(made, number, spec, tokenizer)
        yield made


def row_after(tokens: Sequence[int], size: int) -> NDArray[np.float32]:
    """What a model would say after these tokens: always the same."""
    return np.random.default_rng([len(tokens), *tokens[-8:]]).standard_normal(size).astype(np.float32) * 4


@dataclass
class Request:
    """One text, with the chooser of the embedded engine beside it."""

    name: str
    terms: Terms
    prompt: list[int]
    twin: TokenChooser | None
    output: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    is_over: bool = False

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)

    def rows(self, size: int, drafted: Sequence[int]) -> list[NDArray[np.float32]]:
        tokens = [*self.prompt, *self.output, *drafted]
        return [row_after(tokens[:count], size) for count in range(self.position, len(tokens) + 1)]

    def truth(self, size: int, drafted: Sequence[int] = ()) -> list[int]:
        """The tokens that the embedded engine commits; its chooser moves."""
        rows, parents, stops = self.rows(size, drafted), range(-1, len(drafted) - 1), self.terms.stop_ids
        if self.twin is None:
            params = self.terms.params
            return accept_tree(np.array(rows), drafted, parents, params, self.position, stop_ids=stops).tokens
        return self.twin.choose(rows, drafted, parents, self.position, stop_ids=stops).tokens

    def ahead(self, size: int, count: int) -> list[int]:
        """What would be committed token by token; the text and its chooser stay where they are."""
        states, length = self.twin.states if self.twin else (), len(self.output)
        lengths = [state.length for state in states]
        while len(self.output) < length + count and not self.terms.stop_ids.intersection(self.output[length:]):
            self.output += self.truth(size)
        for state, before in zip(states, lengths, strict=True):
            state.truncate(before)
        found, self.output[length:] = self.output[length:], []
        return found

    def asked(self) -> Asked:
        return Asked(self.name, self.terms, self.position, self.drafted, self.prompt, self.output)


RULES = (
    PLAIN,
    ProcessorOptions(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    ProcessorOptions(logit_bias=((20, 3.0), (31, -5.0)), min_tokens=6),
    ProcessorOptions(typical_p=0.9, xtc_probability=0.5),
    ProcessorOptions(repetition_penalty=0.8, bad_words=((97, 98),), typical_p=0.8),
    ProcessorOptions(allowed_ids=tuple(range(5, 900)), bad_words=((20, 21), (30,))),  # too few for a grammar's texts
)
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=7),
    SamplingParams(temperature=1.0, top_p=0.9, seed=8),
    SamplingParams(temperature=0.7, top_k=40, min_p=0.02, seed=9),
)


def request_of(
    name: str,
    grammars: WorkerGrammars,
    tokenizer: Tokenizer,
    params: SamplingParams,
    rules: ProcessorOptions = PLAIN,
    grammar: int | None = None,
    num_logprobs: int | None = None,
    num_padding: int = 0,
) -> Request:
    prompt = tokenizer.encode(f"def {name}(", add_special_tokens=False)
    stops = frozenset(tokenizer.eos_token_ids)
    terms = Terms(1, params, 99, processors=rules, stop_ids=stops, grammar=grammar, num_logprobs=num_logprobs)
    own = None if grammar is None else grammars.compiled(grammar)
    request = GenerateRequest((), PickOptions(params, rules, own, num_logprobs), 1, stops)
    return Request(name, terms, prompt, chooser_of(request, prompt, tokenizer.size + num_padding))


def step(
    choosers: RequestChoosers, requests: Sequence[Request], size: int, rows: Any = None
) -> tuple[list[list[int]], Found]:
    """What a step commits of each, and what it finds."""
    asked = [request.asked() for request in requests]
    prepared = choosers.prepare(asked, size, CPU)
    drafted = DraftedRows([each.drafted for each in asked], 9, CPU)
    logits = (
        np.stack([row for request in requests for row in request.rows(size, request.drafted)]) if rows is None else rows
    )
    picks = prepared.picks(torch.from_numpy(logits))
    prepared.report_faults(picks)
    tokens = [[token for token in own if token >= 0] for own in drafted.committed(picks).tolist()]
    by_name = {each.key: own for each, own in zip(asked, tokens, strict=True)}
    return [list(each.text_of(by_name[each.key])) for each in asked], choosers.settle(by_name)


@pytest.mark.parametrize("seed", range(6))
def test_steps_of_many_texts_are_the_embedded_engines(
    seed: int, grammars: WorkerGrammars, tokenizer: Tokenizer
) -> None:
    """Rules, grammars, logprobs and plain texts together; no drafts, right ones, and ones that go wrong. The model's
    vocabulary may be wider than the tokenizer's.
    """
    rng, num_padding = np.random.default_rng(seed), (0, 3, 64)[seed % 3]
    choosers, size = RequestChoosers(grammars), tokenizer.size + num_padding
    requests = [
        request_of(
            f"f{index}",
            grammars,
            tokenizer,
            SAMPLINGS[rng.integers(len(SAMPLINGS))],
            RULES[rng.integers(len(RULES) - (not index % 2))] if index % 3 else PLAIN,
            None if index % 2 else int(rng.integers(1, 4)),
            None if rng.random() < 0.5 else int(rng.integers(0, 6)),
            num_padding=num_padding,
        )
        for index in range(8)
    ]
    num_accepted = num_logprobs = 0
    for _ in range(12):
        running = [request for request in requests if not request.is_over]
        truths = []
        for request in running:
            request.drafted = ahead = request.ahead(size, int(rng.integers(0, 5)))
            if ahead and rng.random() < 0.6:
                ahead[rng.integers(len(ahead))] = int(rng.integers(size))
            truths.append(request.truth(size, ahead))
        tokens, found = step(choosers, running, size)
        assert tokens == truths and not found.refusals and not found.faults
        for request, own in zip(running, truths, strict=True):
            logprobs = found.logprobs.get(request.name, ())
            has_logprobs = request.terms.num_logprobs is not None
            assert [each.token for each in logprobs] == own * has_logprobs
            for here, there in zip(logprobs, request.twin.logprobs if request.twin else (), strict=has_logprobs):
                assert [token for token, _ in here.top] == [token for token, _ in there.top]
                assert abs(here.logprob - there.logprob) < 1e-5
            num_logprobs += has_logprobs
            num_accepted += len(own) - 1
            request.output += own
            request.is_over = own[-1] in request.terms.stop_ids
    assert num_accepted > 20 and num_logprobs


def test_tokens_that_vllm_drops_are_seen_by_no_state(grammars: WorkerGrammars, tokenizer: Tokenizer) -> None:
    """A step that is run again, a part of a prompt: what counts is what vLLM says is there at the next step."""
    choosers, size = RequestChoosers(grammars), tokenizer.size
    request = request_of("f", grammars, tokenizer, SAMPLINGS[1], RULES[1], 2, 1)
    prepared = choosers.prepare([Asked("f", request.terms, 3, (1, 2), request.prompt, (), True)], size, CPU)
    prepared.picks(torch.zeros((3, size)))
    assert choosers.settle({"f": []}) == Found()
    truth = request.truth(size)
    for _ in range(3):
        tokens, found = step(choosers, [request], size)
        assert tokens == [truth] and len(found.logprobs["f"]) == 1


def test_a_row_that_is_not_finite_ends_what_is_committed(grammars: WorkerGrammars, tokenizer: Tokenizer) -> None:
    """Also where a grammar masks the one token that is not; behind a wrong guess it matters not."""
    choosers, size = RequestChoosers(grammars), tokenizer.size
    samplings = enumerate((SAMPLINGS[0], SAMPLINGS[1], SAMPLINGS[0]))
    requests = [request_of(f"f{index}", grammars, tokenizer, own, grammar=index or None) for index, own in samplings]
    truths = [request.truth(size) for request in requests]
    for request, truth in zip(requests, truths, strict=True):
        request.drafted = [*truth, 5]
    requests[2].drafted[0] = next(token for token in range(99) if token != truths[2][0])
    rows = np.stack([row for request in requests for row in request.rows(size, request.drafted)])
    rows[1::3, 7] = np.nan
    tokens, found = step(choosers, requests, size, rows)
    assert (tokens, found.faults) == (truths, {request.name: request.position + 1 for request in requests})
    rows[0] = -np.inf
    tokens, found = step(choosers, requests, size, rows)
    assert tokens == [[], *truths[1:]] and found.faults["f0"] == requests[0].position


@pytest.mark.parametrize("is_v2", [False, True])
def test_a_row_that_is_not_finite_is_no_refusal(is_v2: bool, grammars: WorkerGrammars, tokenizer: Tokenizer) -> None:
    """What vLLM has in its place, -1 or (V2) 0, is outside the grammar, and no token of the text."""
    choosers, size = RequestChoosers(grammars), tokenizer.size
    request = request_of("f", grammars, tokenizer, SAMPLINGS[1], grammar=2, num_logprobs=1)
    request.drafted = request.truth(size)
    rows = np.stack(request.rows(size, request.drafted))
    rows[1] = np.nan
    for first in (0, 1):
        asked = Asked("f", request.terms, 9, request.drafted[first:], request.prompt, request.drafted[:first])
        prepared = choosers.prepare([asked], size, CPU)
        picks = prepared.picks(torch.from_numpy(rows[first:].copy()))
        if is_v2:
            prepared.report_faults(picks)
        tokens = [*request.drafted[first:], 0 if is_v2 else -1]
        found = choosers.settle({"f": tokens})
        assert not found.refusals and len(found.logprobs["f"]) == 1 - first
        assert found.faults == ({"f": 10 - first} if is_v2 else {})


def test_a_text_that_no_token_fits_is_refused(grammars: WorkerGrammars, tokenizer: Tokenizer) -> None:
    """A grammar and rules that leave nothing together; a text beside it goes on. So is a resumed text outside its
    grammar.
    """
    choosers, size = RequestChoosers(grammars), tokenizer.size
    other = tokenizer.encode("?", add_special_tokens=False)[0]
    bad = request_of("bad", grammars, tokenizer, SamplingParams(), ProcessorOptions(allowed_ids=(other,)), 3)
    fine = request_of("fine", grammars, tokenizer, SAMPLINGS[1])
    truth = fine.truth(size)
    tokens, found = step(choosers, [bad, fine], size)
    code, message, mark = found.refusals.pop("bad")
    assert (code, mark) == ("grammar_excluded", "") and f"token {other} after 0 tokens" in message
    assert tokens[1] == truth and not found.refusals
    resumed = Terms(1, SamplingParams(), 9, grammar=2, num_generated=1)
    choosers.prepare([Asked("f", resumed, 2, (), [5, 6], ())], size, CPU)
    assert choosers.settle({}).refusals["f"][0] == "grammar_excluded"


def test_a_limit_counts_only_where_the_text_gets_there(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that is too costly some tokens ahead: a wrong guess before it ends nothing, a right one the text."""
    monkeypatch.setitem(LIMITS, "max_items_in_row", 40)
    size, x = tokenizer.size, tokenizer.encode("x", add_special_tokens=False)[0]
    with closing(WorkerGrammars(str(target_dir()), size)) as own:
        compiled(own, 1, GrammarSpec("grammar", AMBIGUOUS), tokenizer)
        choosers = RequestChoosers(own)
        request = request_of("f", own, tokenizer, SamplingParams(), grammar=1)
        request.drafted = [x] * 64
        prepared = choosers.prepare([request.asked()], size, CPU)
        num_fine = len(prepared._paths[0].rows)
        assert 1 < num_fine < 65
        assert choosers.settle({"f": [x] * num_fine}) == Found()
        choosers.prepare([request.asked()], size, CPU)
        assert choosers.settle({"f": [x] * (num_fine + 1)}).refusals["f"][0] == "grammar_too_complex"


@pytest.mark.parametrize(("length", "num_tokens", "refused"), [(0, 1, ["bad"]), (1, 1, []), (1, 2, ["bad"])])
def test_a_bug_ends_one_text(
    length: int,
    num_tokens: int,
    refused: list[str],
    grammars: WorkerGrammars,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also a library's, which is raised past Exception; at the first row at once, at a guess where it is reached."""
    panic, mask = type("PanicException", (BaseException,), {}), GrammarState.mask

    def failing(self: GrammarState, size: int) -> Any:
        if self.length == length:
            raise panic("a bug")
        return mask(self, size)

    monkeypatch.setattr(GrammarState, "mask", failing)
    choosers, a = RequestChoosers(grammars), tokenizer.encode("a", add_special_tokens=False)[0]
    bad = request_of("bad", grammars, tokenizer, SamplingParams(), grammar=2)
    fine, bad.drafted = request_of("fine", grammars, tokenizer, SamplingParams()), [a]
    choosers.prepare([bad.asked(), fine.asked()], tokenizer.size, CPU)
    refusals = choosers.settle({"bad": [a] * num_tokens, "fine": [1]}).refusals
    assert list(refusals) == refused and {code for code, *_ in refusals.values()} <= {"internal_error"}
    assert refused == [] or "a bug" in caplog.text


def test_an_output_carries_what_was_found(grammars: WorkerGrammars, tokenizer: Tokenizer) -> None:
    """Both runners'; one that vLLM does not read, as on other ranks, is read at the beginning of the next step."""
    choosers, size = RequestChoosers(grammars), tokenizer.size
    request = request_of("f", grammars, tokenizer, SamplingParams(), num_logprobs=2)
    truth = request.truth(size)

    def sample_tokens(kind: str | None) -> Any:
        if kind is None:
            return None
        choosers.prepare([request.asked()], size, CPU).picks(
            torch.from_numpy(np.stack(request.rows(size, request.drafted)))
        )
        output = SimpleNamespace(req_ids=["f"], sampled_token_ids=[truth])
        return output if kind == "v1" else SimpleNamespace(get_output=lambda: output)

    taken: list[Any] = []
    runner = SimpleNamespace(sample_tokens=sample_tokens)
    end = report_found(runner, choosers, taken.append)
    assert runner.sample_tokens(None) is None
    assert [each.token for each in getattr(runner.sample_tokens("v1"), FOUND).logprobs["f"]] == truth
    output = runner.sample_tokens("v2")
    assert len(taken) == 1 and choosers.steps
    read = output.get_output()
    assert output.get_output() is read and len(getattr(read, FOUND).logprobs["f"]) == 1
    end()
    assert taken == [{"f": truth}] * 2
    runner.sample_tokens("v2")
    end()
    assert len(taken) == 3 and not choosers.steps
