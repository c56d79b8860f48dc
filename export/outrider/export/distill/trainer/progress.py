"""Defines the progress events of a distillation, and how a caller stops it. Showing them is the caller's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """How far a stage is. share: of its budget, in [0, 1]. is_news: worth a line that stays."""

    stage: str
    share: float
    text: str
    is_news: bool = False


Report = Callable[[Event], None]
Stop = Callable[[], bool]
"""Called between steps; when it returns True, the work is saved and ended."""


def silent(event: Event) -> None:
    """A report that shows nothing."""


def never() -> bool:
    """A `Stop` that never stops."""
    return False
