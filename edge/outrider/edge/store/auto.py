"""Names the choice of a draft that is left to the store. Apart from it, so that options load nothing heavy."""

from __future__ import annotations

from typing import Final

AUTO: Final = "auto"
"""In place of a bundle's path: the pulled draft that fits the verifier's target, or else the reference draft."""
