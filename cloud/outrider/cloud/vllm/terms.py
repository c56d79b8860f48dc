"""Defines what a request carries to vLLM's engine process and its workers, in `SamplingParams.extra_args`.

vLLM itself gets temperature 0: it refuses min-p together with speculation, and makes no generators. Knows no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Literal

from pydantic import ConfigDict, TypeAdapter

from outrider.cloud.seam import DraftHints
from outrider.models.grammar.compiler import CompiledGrammar
from outrider.models.grammar.matchers import Elsewhere
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.options import PLAIN, ProcessorOptions
from outrider.models.processors.processor_plan import ProcessorPlan

KEY: Final = "outrider"
Mark = Literal["", "slow", "worn"]
"""Of a refusal: the request's grammar took too long, or its lexer is full and is not replaced."""
Refusal = tuple[str, str, Mark]
"""Why a request can have no token: code and message of an error, and its mark."""


@dataclass(frozen=True, slots=True)
class Terms:
    """One sequence, as the engine process and the workers see it.

    number: its id, which drafts name. max_tokens: it ends after as many. once: it ends with the first token that is not
    the drafted one, or after the draft of its hints. probe: drafted tokens that each of its steps
    verifies, whatever they are, to measure steps; None for real sequences. owner: a hash of the key or address that
    sent the request; client: of that and the salt. priority: higher ones go first. grammar: the number by which the
    workers know it. is_slim: what changes rows is left out of `processors`. The rest is as in GenerateRequest.
    """

    __pydantic_config__: ClassVar = ConfigDict(ser_json_bytes="hex", val_json_bytes="hex")

    number: int
    params: SamplingParams
    max_tokens: int
    hints: DraftHints = field(default_factory=DraftHints)
    once: bool = False
    probe: int | None = None
    owner: bytes = b""
    client: bytes = b""
    priority: int = 0
    processors: ProcessorOptions = PLAIN
    num_generated: int = 0
    num_logprobs: int | None = None
    stop_ids: frozenset[int] = frozenset()
    grammar: int | None = None
    is_slim: bool = False

    @property
    def is_probe(self) -> bool:
        """Whether it only measures steps."""
        return self.probe is not None

    @property
    def changes_rows(self) -> bool:
        """Whether rows of logits may change before the pick."""
        return self.is_slim or self.processors.changes_rows or self.grammar is not None

    @property
    def slim(self) -> Terms:
        """The same without what changes rows: for the scheduler, and for a worker once it has a text's states."""
        if not self.processors.changes_rows:
            return self
        return replace(self, processors=self.processors.narrowing_only, is_slim=True)

    def extra_args(self) -> dict[str, str]:
        """The form that vLLM carries. One text: lists would take up to 1 MB in each process that they go through."""
        return {KEY: _terms.dump_json(self, exclude_defaults=True).decode()}

    def plan(self, compiled: Callable[[int], CompiledGrammar]) -> ProcessorPlan:
        """What changes its rows. compiled: gives the grammar of a number."""
        grammar = None if self.grammar is None else compiled(self.grammar)
        return ProcessorPlan(self.processors, self.stop_ids, self.num_generated, grammar)


_terms: Final = TypeAdapter(Terms)


def terms_of(extra_args: Mapping[str, Any] | None) -> Terms | None:
    """The terms of a request; None for one that is not ours, such as vLLM's own warm-up."""
    found = (extra_args or {}).get(KEY)
    return None if found is None else _terms.validate_json(found)


def grammar_terms(spec: GrammarSpec, stop_ids: Sequence[int]) -> list[Any]:
    """What a worker compiles a grammar from: plain types."""
    return [[spec.kind, spec.text, spec.after, spec.opener], list(stop_ids)]


def number_of(grammar: CompiledGrammar) -> int:
    """What the workers know a grammar by."""
    assert isinstance(grammar.matchers, Elsewhere), "compiled by the engine's workers"
    return grammar.matchers.number
