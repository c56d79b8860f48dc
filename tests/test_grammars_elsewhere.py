"""Grammars that an engine's workers compile: asked for by number, refused by name, let go with what stands for them."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from tests.engine_harness import refused

from outrider.cloud.vllm.grammars import GrammarsInWorkers, note_refusal
from outrider.cloud.vllm.terms import Terms, number_of
from outrider.cloud.vllm.worker_choosers import Asked, RequestChoosers, WorkerGrammars
from outrider.models.errors import RequestError, RuntimeUnavailable, TokenizerError
from outrider.models.grammar import matchers as matchers_module
from outrider.models.grammar.compiler import (
    MAX_CACHED_PER_OWNER,
    MAX_COSTLY,
    MAX_STRIKES,
    CompiledGrammar,
    GrammarCompiler,
)
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.picks.sampling import SamplingParams
from outrider.models.text.tokenizer import Tokenizer
from outrider.reference import target_dir


class Workers:
    """Two workers without a model, called as vLLM calls its own: by the method's name, on the engine's loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.workers = [WorkerGrammars(str(target_dir()), tokenizer.size) for _ in range(2)]
        self.loop, self.has_forgotten = asyncio.new_event_loop(), threading.Condition()
        self.compiled, self.forgotten = list[int](), list[int]()
        self.fault: Exception | None = None
        self.has_failed_to_forget = False
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    async def call(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        if method == "outrider_forget":
            with self.has_forgotten:
                self.has_forgotten.notify_all()
                if self.fault is not None:
                    self.has_failed_to_forget = True
                    raise self.fault
                self.forgotten += args[0]
                for worker in self.workers:
                    worker.forget(*args)
                return [None] * len(self.workers)
        assert method == "outrider_compile"
        if self.fault is not None:
            raise self.fault
        if args[1] is not None:
            self.compiled.append(args[0])
        found = [worker.compile(*args) for worker in self.workers]
        return [None if built is None else [built.taken_s, built.fault, "grammar"] for built in found]

    def grammars(self) -> GrammarsInWorkers:
        return GrammarsInWorkers(self.loop, self.call, lambda: None)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        with self.has_forgotten:
            assert self.has_forgotten.wait_for(is_so, 30.0)

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        gc.collect()  # what is let go now is let go on a loop that still runs
        asyncio.run_coroutine_threadsafe(self._end(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        for worker in self.workers:
            worker.close()


@pytest.fixture
def workers(tokenizer: Tokenizer) -> Iterator[Workers]:
    with closing(Workers(tokenizer)) as made:
        yield made


@pytest.fixture
def compiler(tokenizer: Tokenizer, workers: Workers) -> Iterator[GrammarCompiler]:
    with compiling(tokenizer, workers.grammars()) as made:
        yield made


def compiling(tokenizer: Tokenizer, elsewhere: GrammarsInWorkers | None) -> closing[GrammarCompiler]:
    """A compiler that has grammars built there, or here."""
    build = None if elsewhere is None else elsewhere.build
    return closing(GrammarCompiler(tokenizer, tokenizer.size, tokenizer.eos_token_ids, build))


def regex(index: int) -> GrammarSpec:
    return GrammarSpec("regex", f"elsewhere{index}[0-9]+")


def asked(compiler: GrammarCompiler, spec: GrammarSpec, owner: bytes = b"one", salt: bytes = b"") -> CompiledGrammar:
    return asyncio.run(compiler.compile_for(spec, owner, salt))


def test_workers_hold_what_the_server_asked_for(
    tokenizer: Tokenizer, compiler: GrammarCompiler, workers: Workers
) -> None:
    """The same text is allowed there as where the server compiles for itself; the server opens no library."""
    grammar = asked(compiler, regex(0))
    text = tokenizer.encode("elsewhere0123", add_special_tokens=False)
    with compiling(tokenizer, None) as own:
        truth = own.compile(regex(0)).state()
    for worker in workers.workers:
        state = worker.compiled(number_of(grammar)).state()
        assert state.validate(text) == len(text) == truth.validate(text) and state.forced() == truth.forced()
    assert "backend" not in vars(compiler._vocabulary) and asked(compiler, regex(0)).matchers is grammar.matchers


def test_workers_let_go_what_nothing_stands_for(compiler: GrammarCompiler, workers: Workers) -> None:
    """A text that is in work keeps its grammar; what an owner's later grammars replace goes from all workers."""
    held = asked(compiler, regex(0))
    numbers = [number_of(asked(compiler, regex(index))) for index in range(MAX_CACHED_PER_OWNER + 3)]
    gc.collect()
    workers.wait_until(lambda: set(numbers[1:3]) <= set(workers.forgotten))
    assert workers.workers[0].compiled(numbers[0]) and workers.workers[1].compiled(numbers[-1])
    del held
    workers.wait_until(lambda: numbers[0] in workers.forgotten)
    for number in numbers[:3]:
        with pytest.raises(RequestError, match="let go"):
            workers.workers[0].compiled(number)


def test_what_workers_refuse_is_refused_by_name(compiler: GrammarCompiler, workers: Workers) -> None:
    with refused("invalid_grammar", 400, "unclosed group"):
        asked(compiler, GrammarSpec("regex", "(a"))
    with pytest.raises(RequestError, match="no token of the model"):
        asked(compiler, GrammarSpec("regex", "a", after="</think never heard of>"))
    assert workers.compiled == [1]  # a delimiter that is no token is refused before
    workers.wait_until(lambda: workers.forgotten == [1])


@pytest.mark.parametrize("kind", ["tokenizer", "unavailable"])
def test_what_the_workers_lack_reaches_the_client(kind: str, tokenizer: Tokenizer, workers: Workers) -> None:
    async def call(method: str, args: tuple[Any, ...]) -> list[Any]:
        return [[0.0, "", "grammar"], [0.0, "it is not there", kind]]

    made = GrammarsInWorkers(workers.loop, call, lambda: None)
    error = TokenizerError if kind == "tokenizer" else RuntimeUnavailable
    with compiling(tokenizer, made) as compiler, pytest.raises(error, match="not there"):
        asked(compiler, regex(0))


def test_a_call_that_fails_fails_one_grammar_and_loses_no_number(compiler: GrammarCompiler, workers: Workers) -> None:
    """What could not be let go then is let go with the next."""
    workers.fault = RuntimeError("a bug")
    with refused("internal_error", 500):
        asked(compiler, regex(0))
    workers.wait_until(lambda: workers.has_failed_to_forget)
    workers.fault = None
    with pytest.raises(RequestError, match="unclosed group"):
        asked(compiler, GrammarSpec("regex", "(a"))
    workers.wait_until(lambda: {1, 2} <= set(workers.forgotten))


def test_an_engine_that_ends_ends_all_builds(tokenizer: Tokenizer, workers: Workers) -> None:
    """Those in work, those that wait for a turn, and those that come later; no thread stays behind."""
    asked_once = threading.Event()

    async def never(method: str, args: tuple[Any, ...]) -> list[Any]:
        asked_once.set()
        await asyncio.Event().wait()
        raise AssertionError

    made = GrammarsInWorkers(workers.loop, never, lambda: None)
    with compiling(tokenizer, made) as compiler:

        async def run() -> list[Any]:
            texts = [compiler.compile_for(regex(index), b"%d" % (index % 3)) for index in range(15)]
            work = asyncio.gather(*texts, return_exceptions=True)
            await asyncio.to_thread(asked_once.wait)
            made.end()
            return await work

        assert {(r.code, r.status) for r in asyncio.run(run())} == {("engine_failed", 503)}
        with pytest.raises(RequestError, match="engine has failed"):
            asked(compiler, regex(99))


def test_a_dead_engine_is_asked_for_nothing(tokenizer: Tokenizer, workers: Workers) -> None:
    dead = GrammarsInWorkers(workers.loop, workers.call, lambda: "vLLM's engine process has died")
    with compiling(tokenizer, dead) as compiler, pytest.raises(RequestError, match="engine has failed"):
        asked(compiler, regex(0))
    assert workers.compiled == []


def test_one_grammar_asked_for_by_many_is_built_once(compiler: GrammarCompiler, workers: Workers) -> None:
    async def run() -> list[Any]:
        return await asyncio.gather(*(compiler.compile_for(regex(0), b"one") for _ in range(32)))

    assert len({number_of(each) for each in asyncio.run(run())}) == len(workers.compiled) == 1


def test_what_is_let_go_frees_its_texts(tokenizer: Tokenizer, compiler: GrammarCompiler, workers: Workers) -> None:
    """A worker may keep a request's chooser until its place is used again: the text is over, so it holds nothing."""
    grammar, worker = asked(compiler, regex(0)), workers.workers[0]
    terms = Terms(1, SamplingParams(), 9, stop_ids=frozenset(grammar.stop_ids), grammar=number_of(grammar))
    choosers = RequestChoosers(worker)
    rows = [Asked(name, terms, 2, (), [1, 2]) for name in ("request", "one that begins later")]
    choosers.prepare(rows[:1], tokenizer.size, torch.device("cpu"))
    assert not choosers.settle({}).refusals
    worker.forget([number_of(grammar)])
    choosers.prepare(rows, tokenizer.size, torch.device("cpu"))
    refusals = choosers.settle({}).refusals
    found = [refusals[each.key] for each in rows]
    assert all(code == "internal_error" and "let go" in message for code, message, _ in found)


def test_texts_that_take_too_long_count_against_the_client(compiler: GrammarCompiler) -> None:
    for _ in range(MAX_STRIKES):
        note_refusal(asked(compiler, regex(0)), "slow")
    with refused("too_many_grammars", 429):
        asked(compiler, regex(0))
    assert asked(compiler, regex(0), b"another")


def test_a_grammar_that_a_text_wore_out_is_compiled_again(compiler: GrammarCompiler) -> None:
    note_refusal(None, "worn")
    grammar = asked(compiler, regex(0))
    note_refusal(grammar, "")
    assert asked(compiler, regex(0)).matchers is grammar.matchers
    note_refusal(grammar, "worn")
    assert asked(compiler, regex(0)).matchers is not grammar.matchers


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_client_holds_few_costly_grammars(
    is_elsewhere: bool, tokenizer: Tokenizer, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may take 20 MB for as long as a text has it. Another client of the owner, and other owners, go on."""
    monkeypatch.setattr(matchers_module, "MAX_AGAIN_S", -1.0)
    with compiling(tokenizer, workers.grammars() if is_elsewhere else None) as compiler:
        held = [asked(compiler, regex(index)) for index in range(MAX_COSTLY)]
        assert asked(compiler, regex(0)).spec == held[0].spec  # one that it has
        for _ in range(MAX_STRIKES + 1):  # who tries again as told is not locked out for it
            with refused("too_many_grammars", 429, f"{MAX_COSTLY} grammars of this client are in use") as refusal:
                asked(compiler, regex(99))
        assert refusal.value.retry_after_s
        assert asked(compiler, regex(99), b"one", b"another client") and asked(compiler, regex(99), b"another")
        del held[0], refusal
        gc.collect()
        assert asked(compiler, regex(99))
