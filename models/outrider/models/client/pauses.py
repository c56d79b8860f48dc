"""Spreads the pauses of clients that lost the same server: they would all come back at the same moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

Jitter = Callable[[], float]
"""`random.random`, or what a test gives: from 0 to 1."""
CLEARING_TOKENS: Final = 8
"""A pause doubles until so many tokens have come: a server that ends each text after one is not asked faster."""


def spread_s(pause_s: float, jitter: Jitter) -> float:
    """From half to one and a half times the pause."""
    return pause_s * (0.5 + jitter())


def later_s(asked_s: float, jitter: Jitter) -> float:
    """What a server asks for (Retry-After), or up to a quarter more."""
    return asked_s * (1.0 + jitter() / 4.0)
