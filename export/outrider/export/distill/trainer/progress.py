"""What a distillation tells while it runs, and how it is asked to stop. How either looks is the caller's."""

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
"""Asked between steps; when it says True, the work is saved and left."""


def silent(event: Event) -> None:
    """The report of a caller who does not want to know."""


def never() -> bool:
    """The `Stop` of a caller who waits for the end."""
    return False
