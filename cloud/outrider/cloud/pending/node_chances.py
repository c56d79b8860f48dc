"""Measures how likely a pending node is to be picked where its parent was, by its kind: the device's level, or how
sure a source of the verifier's own is.

A commit tests every child of each node that it passes, verified or not: at most one of them is hit. The rate of a kind
is shrunk to its nominal chance times the session's own ratio of hits to promised chances. So a device that promises too
much is soon believed in nothing that it promises, and slows only its own session.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from outrider.cloud.pending.trie import (
    EARLIER_KINDS,
    HEAD_KINDS,
    NUM_KINDS,
    PREDICTED_KINDS,
    PROMPT_KINDS,
    REPEATED,
    UNHINTED,
    PendingNode,
)
from outrider.models.wire.tree_draft import CHANCES

Test = tuple[Sequence[PendingNode], int, PendingNode | None]
"""The children of a node, the token that was committed there, and the likeliest of the children."""

NOMINAL: Final = (
    *(0.2, 0.35, 0.5, 0.7, 0.85),
    *(0.4, 0.7, 0.85),
    *(0.4, 0.7, 0.85),
    0.6,
    *(0.0, *CHANCES),
    0.98,
)
"""By kind. Unhinted nodes have none: `AcceptanceEstimator` measures them by position."""
assert len(NOMINAL) == NUM_KINDS

_SOURCES: Final = (PROMPT_KINDS, (*EARLIER_KINDS, REPEATED), PREDICTED_KINDS, HEAD_KINDS)
"""Kinds that keep or break their promises together: those of each source of the verifier's own."""
_DEVICE: Final = len(_SOURCES)
_SOURCE_OF: Final = tuple(
    next((source for source, kinds in enumerate(_SOURCES) if kind in kinds), _DEVICE) for kind in range(NUM_KINDS)
)

_KIND_WEIGHT: Final = 4.0  # of the nominal chance, in nodes tested
_KIND_MEMORY: Final = 0.97  # weight of a test after a newer one of its kind
_RATIO_WEIGHT: Final = 1.0  # of the ratio in earlier sessions, in promised chances
_OWN_MEMORY: Final = 0.95  # weight of a commit after a newer one, in the sums of a session
_COMMON_MEMORY: Final = 0.999  # and in those over all sessions
_LEAST_PRIOR: Final = 0.5  # whatever earlier sessions did: no client spoils it for later ones
_LEAST_COVERED: Final = 0.1
_MOST_RATIO: Final = 1.2
_MOST_RATE: Final = 0.995


class _Ratio:
    """A ratio of sums with forgetting, drawn to that of all sessions (`parent`), or to `first`."""

    __slots__ = ("_first", "_hits", "_least", "_memory", "_most", "_of", "_parent", "_weight")

    def __init__(self, first: float, weight: float, *, least: float, most: float, parent: _Ratio | None) -> None:
        """weight: of the prior, in the unit of what is divided by. least: of the prior. most: of the ratio."""
        self._first, self._weight, self._least, self._most = first, weight, least, most
        self._parent = parent
        self._memory = _COMMON_MEMORY if parent is None else _OWN_MEMORY
        self._hits = self._of = 0.0

    def observe(self, hits: float, of: float, *, is_common: bool = True) -> None:
        """Adds to both sums. is_common: also to those of all sessions."""
        self._hits = self._memory * self._hits + hits
        self._of = self._memory * self._of + of
        if is_common and self._parent is not None:
            self._parent.observe(hits, of)

    def value(self, weight: float | None = None) -> float:
        """The ratio; weight: of the prior, where it is another than usual."""
        prior = self._first if self._parent is None else max(self._least, self._parent.value())
        weight = self._weight if weight is None else weight
        total = self._of + weight
        return min(self._most, (self._hits + weight * prior) / total) if total else 0.0


class NodeChances:
    """The rates of a session's nodes by kind, and of misses that an alternative covers. parent: of all sessions."""

    def __init__(self, parent: NodeChances | None = None) -> None:
        promise = partial(_Ratio, 1.0, _RATIO_WEIGHT, least=_LEAST_PRIOR, most=_MOST_RATIO)
        # Hits for each promised chance, by source; the last is the device.
        self._kept: list[_Ratio] = [
            promise(parent=parent._kept[source] if parent is not None else None) for source in range(_DEVICE + 1)
        ]
        self._covered: _Ratio = _Ratio(
            0.3, 5.0, least=_LEAST_COVERED, most=0.95, parent=parent._covered if parent is not None else None
        )
        self._accepted = [0.0] * NUM_KINDS
        self._tested = [0.0] * NUM_KINDS
        self._rates: list[float] | None = None  # by kind; None: out of date
        self.has_hints = False  # whether the device has sent any

    def observe(self, tests: Sequence[Test]) -> None:
        """Learns from a commit: what was pending at each of its tokens."""
        promised, hits = [0.0] * (_DEVICE + 1), [0.0] * (_DEVICE + 1)
        covered = missed = 0.0
        accepted, tested = self._accepted, self._tested
        for children, token, best in tests:
            has_guess = False
            for child in children:
                kind, is_hit = child.kind, child.token == token
                tested[kind] = _KIND_MEMORY * tested[kind] + 1.0
                accepted[kind] = _KIND_MEMORY * accepted[kind] + is_hit
                source = _SOURCE_OF[kind]
                has_guess = has_guess or (is_hit and source == _DEVICE)
                if kind != UNHINTED:
                    promised[source] += NOMINAL[kind]
                    hits[source] += is_hit
            if best is not None and UNHINTED <= best.kind < REPEATED and best.token != token:
                missed += 1.0
                covered += has_guess
        for ratio, kept, of in zip(self._kept, hits, promised, strict=True):
            if of:
                ratio.observe(kept, of)
        if missed:
            self._covered.observe(covered, missed, is_common=self.has_hints)
        self._rates = None

    @property
    def beta(self) -> float:
        """Share of the likeliest path's misses where another pending node is picked.

        A session whose device sends paths without hints has no prior: without alternatives it is 0.
        """
        return self._covered.value(None if self.has_hints else 0.0)

    def rates(self) -> list[float]:
        """By kind: the chance that a node is picked where its parent was. That of unhinted nodes means nothing."""
        if self._rates is None:
            weights = [_KIND_WEIGHT * ratio.value() for ratio in self._kept]
            rates = [
                (accepted + nominal * weights[source]) / (tested + _KIND_WEIGHT)
                for accepted, tested, nominal, source in zip(
                    self._accepted, self._tested, NOMINAL, _SOURCE_OF, strict=True
                )
            ]
            if max(rates) > _MOST_RATE:
                rates = [min(_MOST_RATE, rate) for rate in rates]
            self._rates = rates
        return self._rates
