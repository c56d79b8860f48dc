"""States the options that choose how the target accepts drafted tokens, as a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from outrider.edge.cli.draft_flags import given, refuse_idle
from outrider.models.acceptance import DEFAULT_DELTA, MAX_DELTA, Rule


@dataclass(frozen=True, kw_only=True)
class AcceptanceOptions:
    """The rule, and tolerance's parameters."""

    __slots__ = ()

    rule: Annotated[
        Rule,
        typer.Option(
            help="How the target accepts drafted tokens. coupled, greedy: exactly its text; rejection: a text of the "
            "same distribution; tolerance: LOSSY, and the server must allow it. The last two need --mode stop-and-wait."
        ),
    ] = Rule.COUPLED
    delta: Annotated[
        float, typer.Option(min=0.0, max=MAX_DELTA, help="tolerance: accept while log p >= log q - delta.")
    ] = DEFAULT_DELTA
    acceptance: Annotated[
        float | None,
        typer.Option(min=0.01, max=0.99, help="tolerance: calibrate delta until this share is accepted."),
    ] = None

    def _refuse_idle_acceptance(self) -> None:
        """Raises ConfigError for typed options that have no effect under the rule."""
        if self.rule is not Rule.TOLERANCE:
            refuse_idle(f"the rule is {self.rule.value}", given(self, "delta", "acceptance"))
