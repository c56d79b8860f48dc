"""Tests what a text's grammar may take while it is used, by a clock of the test's own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.engine_harness import refused

from outrider.models.grammar import state as state_module
from outrider.models.grammar.compiler import GrammarCompiler
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.text.tokenizer import Tokenizer

DIGITS = GrammarSpec("regex", "[0-9]+")


class Clock:
    """Goes on by a step each time that it is read: so much each call of the library takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step_s = self._now_s = 0.0
        monkeypatch.setattr(state_module, "time", SimpleNamespace(thread_time=self._read))

    def _read(self) -> float:
        self._now_s += self.step_s
        return self._now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_long_text_is_resumed_in_a_fraction_of_a_second_or_not(
    tokenizer: Tokenizer, compiler: GrammarCompiler, clock: Clock
) -> None:
    text = tokenizer.encode("7")[:1] * 5_000
    grammar = compiler.compile(DIGITS)
    clock.step_s = 5e-6  # JSON's
    state = grammar.state()
    state.replay(text)
    assert state.length == 5_000
    clock.step_s = 1e-4
    slow = grammar.state()
    with refused("grammar_too_complex", match="takes too long"):
        slow.replay(text)
    assert slow.length < 4_000


def test_copies_count_and_pay_for_nothing(tokenizer: Tokenizer, compiler: GrammarCompiler, clock: Clock) -> None:
    """The library keeps all that it has read, and copies all of it: with drafts, at every step."""
    state = compiler.compile(DIGITS).state()
    state.replay(tokenizer.encode("7")[:1] * 1_000)
    clock.step_s = 0.1
    state.fork()
    spent_s = state.cost._excess_s
    assert spent_s == pytest.approx(0.1 - state_module.FREE_S - 1_000 * state_module.FREE_COPY_S)
    clock.step_s = 0.0
    state.fork()
    assert state.cost._excess_s == spent_s
    clock.step_s = 0.1
    state.fork()
    state.fork()
    with refused("grammar_too_complex", match="takes too long"):
        state.fork()


@pytest.mark.parametrize("is_timed", [True, False])
def test_a_text_of_which_the_library_keeps_too_much_ends(
    is_timed: bool, tokenizer: Tokenizer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no engine copies it. One copy that is quick is enough to go on."""
    monkeypatch.setattr(state_module, "COPY_EVERY", 4)
    took_s = iter([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    monkeypatch.setattr(state_module, "_copied", lambda matcher, length: (None, next(took_s)))
    state = replace(compiler.compile(DIGITS), is_timed=is_timed).state()
    for _ in range(8):
        state.mask(tokenizer.size)
        assert state.accept(tokenizer.encode("7")[0])
    if is_timed:
        with refused("grammar_too_complex", match="memory after 8 tokens"):
            state.mask(tokenizer.size)
    else:
        assert state.mask(tokenizer.size).any()
