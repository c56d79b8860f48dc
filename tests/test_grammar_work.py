"""Tests what a text's grammar may take while it is used, by a clock of the test's own."""

from __future__ import annotations

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
