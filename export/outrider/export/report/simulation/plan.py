"""Defines the settings of a tree simulation: times, and how a tree is drafted, sent and verified."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from outrider.export.report.simulation.ranks import MOST_GUESSES
from outrider.models.errors import ConfigError


class Form(StrEnum):
    """What a step verifies: the likeliest path of the tree, or any part of it (tree attention)."""

    LINE = "line"
    TREE = "tree"


@dataclass(frozen=True, slots=True)
class Times:
    """step_ms: of the target; extra_ms: what a verified node adds. draft_ms: of a draft call that expands one node.

    A draft call expands up to nodes_per_call nodes; each further one adds the share `call_extra` of draft_ms.
    Raises ConfigError for values out of range.
    """

    step_ms: float
    extra_ms: float
    draft_ms: float
    nodes_per_call: int = 1
    call_extra: float = 0.1

    def __post_init__(self) -> None:
        times = (self.extra_ms, self.draft_ms, self.call_extra, self.step_ms)
        if not all(math.isfinite(time) and time >= 0.0 for time in times) or not self.step_ms or not self.draft_ms:
            raise ConfigError(f"the times are {self}; expected finite ones, step and draft more than 0")
        if self.nodes_per_call < 1:
            raise ConfigError(f"a draft call expands {self.nodes_per_call} nodes; expected at least 1")


@dataclass(frozen=True, slots=True)
class Plan:
    """How the tree is drafted, sent and verified. Raises ConfigError for values out of range.

    width: guesses per position; budget: nodes of the device's tree at most.
    floor: no node is expanded that is less likely to be reached. bytes_per_token: the device raises the floor so that
    it sends so many; None: as many as come.
    patience_ms: how long the server waits where nothing is pending; None: the better of none and one that suits.
    message_bytes: of a message without its nodes; id_bytes: of a token id.
    """

    form: Form = Form.TREE
    width: int = 4
    budget: int = 400
    floor: float = 0.004
    bytes_per_token: float | None = None
    patience_ms: float | None = None
    message_bytes: int = 4
    id_bytes: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.width <= MOST_GUESSES:
            raise ConfigError(f"the width is {self.width}; expected 1 to {MOST_GUESSES}")
        if self.budget < 1 or not 0.0 <= self.floor < 1.0:
            raise ConfigError(f"the plan is {self}; expected a budget of 1 or more, a floor from 0 to 1")
        if self.bytes_per_token is not None and not self.bytes_per_token > 0.0:
            raise ConfigError(f"{self.bytes_per_token} bytes per token were given; expected more than 0")
