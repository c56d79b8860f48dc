"""Writes a number with its noun."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """The number and the noun, in the plural unless it is one."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
