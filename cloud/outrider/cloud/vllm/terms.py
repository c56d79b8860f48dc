"""Defines what a request carries to vLLM's engine process and its workers, in `SamplingParams.extra_args`.

vLLM itself gets temperature 0: it refuses min-p together with speculation, and makes no generators. Knows no vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from outrider.cloud.seam import GenerateRequest, PickOptions
from outrider.models.grammar.compiler import CompiledGrammar
from outrider.models.grammar.matchers import Elsewhere
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.options import PLAIN, ProcessorOptions

KEY: Final = "outrider"
Mark = Literal["", "slow", "worn"]
"""Of a refusal: the request's grammar took too long, or its lexer is full and is not replaced."""
Refusal = tuple[str, str, Mark]
"""Why a request can have no token: code and message of an error, and its mark."""


@dataclass(frozen=True, slots=True)
class Terms:
    """One sequence, as the engine process sees it.

    number: its id, which drafts name. max_tokens: it ends after as many. draft: guesses to start with. once: it ends
    with the first token that is not the drafted one, or after the draft. recent, is_repeat, is_predicted: as in
    GenerateRequest.
    probe: drafted tokens that each of its steps verifies, whatever they are, to measure steps; None for real sequences.
    owner: a hash of who asks; client: of that and the salt. priority: higher ones go first. processors, num_generated,
    num_logprobs, stop_ids, grammar: as in GenerateRequest; the workers know the grammar by a number.
    """

    number: int
    params: SamplingParams
    max_tokens: int
    patience_ms: float | None = None
    draft_lag_ms: float | None = None
    draft: tuple[int, ...] = ()
    once: bool = False
    probe: int | None = None
    owner: bytes = b""
    client: bytes = b""
    priority: int = 0
    recent: tuple[int, ...] = ()
    is_repeat: bool = False
    is_predicted: bool = False
    processors: ProcessorOptions = PLAIN
    num_generated: int = 0
    num_logprobs: int | None = None
    stop_ids: frozenset[int] = frozenset()
    grammar: CompiledGrammar | None = None

    @property
    def is_probe(self) -> bool:
        """Whether it only measures steps."""
        return self.probe is not None

    def extra_args(self) -> dict[str, Any]:
        """The form that vLLM carries: plain types only."""
        p = self.params
        return {
            KEY: {
                "number": self.number,
                "pick": [p.temperature, p.top_k, p.top_p, p.min_p, p.seed],
                "max_tokens": self.max_tokens,
                "patience_ms": self.patience_ms,
                "draft_lag_ms": self.draft_lag_ms,
                "draft": list(self.draft),
                "once": self.once,
                "probe": self.probe,
                "owner": self.owner.hex(),
                "client": self.client.hex(),
                "priority": self.priority,
                "recent": list(self.recent),
                "is_repeat": self.is_repeat,
                "is_predicted": self.is_predicted,
                **self._choice(),
            }
        }

    def _choice(self) -> dict[str, Any]:
        """What the worker needs where a plain pick is not enough; nothing for the others.

        One text: as lists and numbers it would take up to 1 MB in each process that it goes through.
        """
        if self.processors == PLAIN and self.num_logprobs is None and self.grammar is None:
            return {}
        choice = {
            "processors": asdict(self.processors),
            "num_generated": self.num_generated,
            "num_logprobs": self.num_logprobs,
            "stop_ids": sorted(self.stop_ids),
        }
        number = None if self.grammar is None else number_of(self.grammar)
        return {"choice": json.dumps(choice, separators=(",", ":")), "grammar": number}


def terms_of(extra_args: Mapping[str, Any] | None) -> Terms | None:
    """The terms of a request; None for one that is not ours, such as vLLM's own warm-up."""
    found = (extra_args or {}).get(KEY)
    if found is None:
        return None
    return Terms(
        number=found["number"],
        params=SamplingParams(*found["pick"]),
        max_tokens=found["max_tokens"],
        patience_ms=found["patience_ms"],
        draft_lag_ms=found["draft_lag_ms"],
        draft=tuple(found["draft"]),
        once=found["once"],
        probe=found["probe"],
        owner=bytes.fromhex(found["owner"]),
        client=bytes.fromhex(found["client"]),
        priority=found["priority"],
        recent=tuple(found["recent"]),
        is_repeat=found["is_repeat"],
        is_predicted=found["is_predicted"],
    )


def request_of(
    extra_args: Mapping[str, Any] | None, compiled: Callable[[int], CompiledGrammar]
) -> GenerateRequest | None:
    """What a worker chooses tokens by; None where a plain pick is enough, and for a request that is not ours.

    compiled: gives the grammar of a number.
    """
    choice = ((extra_args or {}).get(KEY) or {}).get("choice")
    if choice is None:
        return None
    found, number = json.loads(choice), grammar_number(extra_args)
    return GenerateRequest(
        prompt=(),
        pick=PickOptions(
            params_of(extra_args),
            ProcessorOptions(**{name: _frozen(value) for name, value in found["processors"].items()}),
            None if number is None else compiled(number),
            found["num_logprobs"],
        ),
        max_tokens=1,
        stop_ids=frozenset(found["stop_ids"]),
        num_generated=found["num_generated"],
    )


def grammar_number(extra_args: Mapping[str, Any] | None) -> int | None:
    """The number of the request's grammar, where it has one."""
    return ((extra_args or {}).get(KEY) or {}).get("grammar")


def needs_chooser(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether a plain pick is not enough for a request."""
    return "choice" in ((extra_args or {}).get(KEY) or {})


def grammar_terms(spec: GrammarSpec, stop_ids: Sequence[int]) -> list[Any]:
    """What a worker compiles a grammar from: plain types."""
    return [[spec.kind, spec.text, spec.after, spec.opener], list(stop_ids)]


def number_of(grammar: CompiledGrammar) -> int:
    """What the workers know a grammar by."""
    assert isinstance(grammar.matchers, Elsewhere), "compiled by the engine's workers"
    return grammar.matchers.number


def _frozen(value: Any) -> Any:
    """Lists as tuples, at any depth: JSON has no tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def params_of(extra_args: Mapping[str, Any] | None) -> SamplingParams:
    """The sampling parameters of a request; greedy for one that is not ours."""
    found = (extra_args or {}).get(KEY)
    return SamplingParams() if found is None else SamplingParams(*found["pick"])
