"""Measures a mode and cloud-only in turn, several times, and says why where no ratio can be known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final
from urllib.parse import urlsplit

import psutil

from outrider.edge.lab.comparison import measured_rate, why_no_rate
from outrider.edge.lab.laboratory import interleave
from outrider.edge.modes.assemble import Agent
from outrider.edge.results import GenerationRequest, GenerationResult
from outrider.models.client.client import verifier_url
from outrider.models.hosts import is_loopback
from outrider.models.process.machine_load import MachineLoad

CLOUD_ONLY: Final = "cloud-only"
DRAFTED: Final = "drafted"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of the rounds.

    ratios: drafted over cloud-only in tokens per second, one per round; none where `why_not` says why they cannot be
    known. typical: of each mode, the result with the median speed. is_same: all texts are equal. load: a warning about
    other processes.
    """

    num_rounds: int
    ratios: tuple[float, ...]
    why_not: str | None
    typical: Mapping[str, GenerationResult]
    is_same: bool
    load: str | None

    @property
    def ratio(self) -> float | None:
        """The median of the rounds' ratios."""
        return median(self.ratios) if self.ratios else None

    def sentence(self, mode: str) -> str:
        """For people."""
        texts = "the same text" if self.is_same else "ANOTHER TEXT (a near-tie in rounding, or a bug)"
        rounds = f"{self.num_rounds} round{'s' if self.num_rounds > 1 else ''}"
        if self.ratio is None:
            return f"Too short to compare: {self.why_not}. Raise --max-tokens. ({texts})"
        spread = f", {min(self.ratios):.2f}x to {max(self.ratios):.2f}x" if self.num_rounds > 1 else ""
        return f"{mode}: {self.ratio:.2f}x the speed of cloud-only ({rounds} in turn{spread}), {texts}"


async def compare_modes(
    drafted: Agent,
    cloud_only: Agent,
    request: GenerationRequest,
    num_rounds: int,
    urls: Sequence[str],
    on_round: Callable[[int], None] = lambda number: None,
) -> Comparison:
    """Generates the text `num_rounds` times in each mode, in turn; both agents have generated before, or warm up here.

    urls: the verifiers; what one on this machine computes belongs to the measurement.
    """
    modes = {CLOUD_ONLY: cloud_only, DRAFTED: drafted}
    num_done = 0

    def count(name: str, result: GenerationResult) -> None:
        nonlocal num_done
        num_done += 1
        if num_done % len(modes) == 0:
            on_round(num_done // len(modes))

    with measured_load([verifier_url(url) for url in urls]) as load:
        results = await interleave(modes, [request] * num_rounds, count)
    pairs = list(zip(results[DRAFTED], results[CLOUD_ONLY], strict=True))
    everything = [result for each in results.values() for result in each]
    why_not = next(filter(None, map(why_no_rate, everything)), None)
    rates = [(measured_rate(one), measured_rate(other)) for one, other in pairs]
    ratios = tuple(one / other for one, other in rates if one is not None and other is not None)
    return Comparison(
        num_rounds=num_rounds,
        ratios=() if why_not else ratios,
        why_not=why_not,
        typical={name: typical(each) for name, each in results.items()},
        is_same=len({result.tokens for result in everything}) == 1,
        load=load.warning(),
    )


def typical(results: Sequence[GenerationResult]) -> GenerationResult:
    """The result with the median speed, the slower of the middle two; the first where none has a speed."""
    by_rate = sorted(results, key=lambda result: measured_rate(result) or 0.0)
    return by_rate[(len(by_rate) - 1) // 2]


def measured_load(urls: Sequence[str]) -> MachineLoad:
    """Measures other processes' load; local verifiers at `urls` are not counted."""
    return MachineLoad([pid for url in urls if (pid := _listener(url)) is not None])


def _listener(url: str) -> int | None:
    """The process that listens at `url` on this machine; None elsewhere, or where the system does not say."""
    if not is_loopback(urlsplit(url).hostname or ""):
        return None
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.Error:
        return None  # macOS reports it to root only
    port = urlsplit(url).port
    found = (each.pid for each in connections if each.status == psutil.CONN_LISTEN and each.laddr.port == port)
    return next(filter(None, found), None)
