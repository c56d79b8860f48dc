"""Grammars that an engine's workers compile: asked for by number, refused by name, let go with what stands for them."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from outrider.cloud.vllm.choosers import WorkerGrammars
from outrider.cloud.vllm.grammars import GrammarsInWorkers, note_refusal
from outrider.cloud.vllm.terms import number_of
from outrider.models.errors import RequestError, TokenizerError
from outrider.models.grammar import matchers as matchers_module
from outrider.models.grammar.compiler import MAX_CACHED_PER_OWNER, MAX_COSTLY, CompiledGrammar, GrammarCompiler
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.grammar.strikes import MAX_STRIKES
from outrider.models.tokenizer import Tokenizer
from outrider.reference import target_dir


class Workers:
    """Two workers without a model, called as vLLM calls its own: by the method's name, on the engine's loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.workers = [WorkerGrammars(str(target_dir()), tokenizer.size) for _ in range(2)]
        self.loop = asyncio.new_event_loop()
        self.forgotten: list[int] = []
        self.has_forgotten = threading.Condition()
        self.fault: Exception | None = None
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    async def call(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        if self.fault is not None:
            raise self.fault
        if method == "outrider_forget":
            for worker in self.workers:
                worker.forget(*args)
            with self.has_forgotten:
                self.forgotten += args[0]
                self.has_forgotten.notify_all()
            return [None] * len(self.workers)
        assert method == "outrider_compile"
        found = [worker.compile(*args) for worker in self.workers]
        return [None if built is None else [built.taken_s, built.fault, False] for built in found]

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        for worker in self.workers:
            worker.close()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(target_dir())


@pytest.fixture
def workers(tokenizer: Tokenizer) -> Iterator[Workers]:
    with closing(Workers(tokenizer)) as made:
        yield made


@pytest.fixture
def compiler(tokenizer: Tokenizer, workers: Workers) -> Iterator[GrammarCompiler]:
    built = GrammarsInWorkers(workers.loop, workers.call)
    with closing(GrammarCompiler(tokenizer, tokenizer.size, tokenizer.eos_token_ids, built.build)) as made:
        yield made


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
    with closing(GrammarCompiler(tokenizer, tokenizer.size, tokenizer.eos_token_ids)) as own:
        truth = own.compile(regex(0)).state()
    for worker in workers.workers:
        state = worker.compiled(number_of(grammar)).state()
        assert state.validate(text) == len(text) == truth.validate(text)
        assert state.forced() == truth.forced()
    assert "backend" not in vars(compiler._vocabulary)
    assert asked(compiler, regex(0)).matchers is grammar.matchers


def test_workers_let_go_what_nothing_stands_for(compiler: GrammarCompiler, workers: Workers) -> None:
    """A text that is in work keeps its grammar; what an owner's later grammars replace goes from all workers."""
    held = asked(compiler, regex(0))
    numbers = [number_of(held)]
    for index in range(1, MAX_CACHED_PER_OWNER + 3):
        numbers.append(number_of(asked(compiler, regex(index))))
    gc.collect()
    gone = set(numbers[1:3])
    with workers.has_forgotten:
        assert workers.has_forgotten.wait_for(lambda: gone <= set(workers.forgotten), 30.0)
    assert workers.workers[0].compiled(numbers[0]) and workers.workers[1].compiled(numbers[-1])
    del held
    with workers.has_forgotten:
        assert workers.has_forgotten.wait_for(lambda: numbers[0] in workers.forgotten, 30.0)
    for number in numbers[:3]:
        with pytest.raises(KeyError):
            workers.workers[0].compiled(number)


def test_what_workers_refuse_is_refused_by_name(compiler: GrammarCompiler, workers: Workers) -> None:
    with pytest.raises(RequestError, match="unclosed group") as refusal:
        asked(compiler, GrammarSpec("regex", "(a"))
    assert (refusal.value.code, refusal.value.status) == ("invalid_grammar", 400)
    with pytest.raises(RequestError, match="no token of the model"):
        asked(compiler, GrammarSpec("regex", "a", after="</think never heard of>"))
    with workers.has_forgotten:
        assert workers.has_forgotten.wait_for(lambda: len(workers.forgotten) == 1, 30.0)


@pytest.mark.parametrize("kind", ["died", "tokenizer"])
def test_a_fault_of_the_workers_reaches_the_client(kind: str, tokenizer: Tokenizer, workers: Workers) -> None:
    async def call(method: str, args: tuple[Any, ...]) -> list[Any]:
        return [[0.0, "", False], [0.0, "its tokens are not bytes", True]]

    if kind == "died":
        workers.fault = RuntimeError("the worker has died")
    made = GrammarsInWorkers(workers.loop, workers.call if kind == "died" else call)
    with closing(GrammarCompiler(tokenizer, tokenizer.size, tokenizer.eos_token_ids, made.build)) as compiler:
        if kind == "died":
            with pytest.raises(RequestError) as refusal:
                asked(compiler, regex(0))
            assert (refusal.value.code, refusal.value.status) == ("engine_failed", 503)
        else:
            with pytest.raises(TokenizerError, match="not bytes"):
                asked(compiler, regex(0))


def test_texts_that_take_too_long_count_against_the_client(compiler: GrammarCompiler) -> None:
    for _ in range(MAX_STRIKES):
        note_refusal(asked(compiler, regex(0)), "grammar_too_complex", True)
    with pytest.raises(RequestError) as refusal:
        asked(compiler, regex(0))
    assert (refusal.value.code, refusal.value.status) == ("too_many_grammars", 429)
    assert asked(compiler, regex(0), b"another")


def test_a_costly_grammar_that_a_text_wore_out_is_compiled_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_refusal(None, "grammar_too_complex", False)
    cheap = asked(compiler, regex(0))
    note_refusal(cheap, "grammar_too_complex", False)  # its worker compiles it again by itself
    assert asked(compiler, regex(0)).matchers is cheap.matchers
    monkeypatch.setattr(matchers_module, "MAX_AGAIN_S", -1.0)
    note_refusal(cheap, "grammar_excluded", False)
    assert asked(compiler, regex(0)).matchers is cheap.matchers
    note_refusal(cheap, "grammar_too_complex", False)
    assert asked(compiler, regex(0)).matchers is not cheap.matchers


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_client_holds_few_costly_grammars(
    is_elsewhere: bool, tokenizer: Tokenizer, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may take 20 MB for as long as a text has it. Another client of the owner, and other owners, go on."""
    monkeypatch.setattr(matchers_module, "MAX_AGAIN_S", -1.0)
    build = GrammarsInWorkers(workers.loop, workers.call).build if is_elsewhere else None
    with closing(GrammarCompiler(tokenizer, tokenizer.size, tokenizer.eos_token_ids, build)) as compiler:
        held = [asked(compiler, regex(index)) for index in range(MAX_COSTLY)]
        assert asked(compiler, regex(0)).spec == held[0].spec  # one that it has
        with pytest.raises(RequestError, match=f"{MAX_COSTLY} grammars of this client are in use") as refusal:
            asked(compiler, regex(9))
        assert (refusal.value.code, refusal.value.status) == ("too_many_grammars", 429)
        assert refusal.value.retry_after_s
        assert asked(compiler, regex(9), b"one", b"another client") and asked(compiler, regex(9), b"another")
        del held[0]
        gc.collect()
        assert asked(compiler, regex(9))
