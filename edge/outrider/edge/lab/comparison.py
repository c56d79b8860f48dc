"""Compares modes: plans it, measures a mode beside cloud-only, and sums up what each did."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final
from urllib.parse import urlsplit

import psutil

from outrider.edge.lab.laboratory import CLOUD_ONLY, interleave
from outrider.edge.modes.assemble import Agent
from outrider.edge.results import GenerationRequest, GenerationResult, Mode
from outrider.models.client.address import verifier_url
from outrider.models.client.messages import ByteCounts
from outrider.models.counted import counted
from outrider.models.hosts import is_loopback
from outrider.models.process.machine_load import MachineLoad

MIN_GAPS: Final = 8
MIN_COMMITS: Final = 3
MIN_SPAN_S: Final = 0.02
"""A rate needs this many tokens after the first commit, in this many later commits, over this much time.

Below that it is the network's: tokens that were ready long before may arrive in one burst.
"""


def measured_rate(result: GenerationResult) -> float | None:
    """Tokens per second of a text, after its first commit; None where it is too short or came in one burst."""
    return None if why_no_rate(result) else result.tokens_per_s


def why_no_rate(result: GenerationResult) -> str | None:
    """Why a text has no rate, in words; None if it has one."""
    arrivals = result.arrival_s
    if len(arrivals) <= MIN_GAPS:
        return f"only {counted(len(arrivals), 'token')}"
    num_later, span_s = sum(at > arrivals[0] for at in arrivals), arrivals[-1] - arrivals[0]
    is_burst = num_later < MIN_GAPS or len(set(arrivals)) <= MIN_COMMITS or span_s < MIN_SPAN_S
    return "the text came in one burst" if is_burst else None


@dataclass(frozen=True, slots=True)
class ModeFigures:
    """Times are medians over the texts; rates of counts are ratios of sums over all of them.

    tokens_per_s: without the prefill, see `measured_rate`; NaN where no text has a rate. ttft_ms: to the first token.
    itl_ms_p50, itl_ms_p95: inter-token latency; tokens that arrive together are 0 apart.
    acceptance_rate: accepted / tested drafted tokens; 0 if none was tested. accepted_share: accepted drafted tokens per
    token of the text. tokens_per_pass and passes_per_token:
    of the target. bytes_*: bodies, the prompt included; header_bytes_*: HTTP's own.
    hits_per_token: share of the tokens that the device had guessed, as any of its guesses.
    speed_up: median over the texts of tokens_per_s over that of the baseline; NaN likewise.
    identical: every text equals the baseline's; num_different counts those that do not.
    """

    tokens_per_s: float
    ttft_ms: float
    itl_ms_p50: float
    itl_ms_p95: float
    acceptance_rate: float
    accepted_share: float
    tokens_per_pass: float
    passes_per_token: float
    bytes_up_per_token: float
    bytes_down_per_token: float
    header_bytes_up_per_token: float
    header_bytes_down_per_token: float
    hits_per_token: float
    speed_up: float
    identical: bool
    num_different: int
    num_texts: int
    num_tokens: int


def compare(results: Mapping[str, Sequence[GenerationResult]], baseline: str) -> dict[str, ModeFigures]:
    """Figures of each mode; every mode must have generated the same requests in the same order."""
    return {name: _figures(texts, results[baseline]) for name, texts in results.items()}


def _figures(texts: Sequence[GenerationResult], baseline: Sequence[GenerationResult]) -> ModeFigures:
    num_tokens = sum(len(text.tokens) for text in texts)
    num_passes = sum(text.num_passes for text in texts)
    wire = sum((text.wire for text in texts), ByteCounts())
    pairs = list(zip(texts, baseline, strict=True))
    num_different = sum(text.tokens != base.tokens for text, base in pairs)
    return ModeFigures(
        tokens_per_s=median_of(map(_rate, texts)),
        ttft_ms=median_of(text.ttft_ms for text in texts),
        itl_ms_p50=median_of(text.gap_ms(50) for text in texts),
        itl_ms_p95=median_of(text.gap_ms(95) for text in texts),
        acceptance_rate=sum(text.num_accepted for text in texts) / max(1, sum(text.num_tested for text in texts)),
        accepted_share=sum(text.num_accepted for text in texts) / max(1, num_tokens),
        tokens_per_pass=num_tokens / max(1, num_passes),
        passes_per_token=num_passes / max(1, num_tokens),
        bytes_up_per_token=wire.body_up / max(1, num_tokens),
        bytes_down_per_token=wire.body_down / max(1, num_tokens),
        header_bytes_up_per_token=wire.headers_up / max(1, num_tokens),
        header_bytes_down_per_token=wire.headers_down / max(1, num_tokens),
        hits_per_token=sum(sum(text.hits.values()) for text in texts) / max(1, num_tokens),
        speed_up=median_of(_rate(text) / _rate(base) for text, base in pairs),
        identical=num_different == 0,
        num_different=num_different,
        num_texts=len(texts),
        num_tokens=num_tokens,
    )


def _rate(text: GenerationResult) -> float:
    return math.nan if why_no_rate(text) else text.tokens_per_s


def median_of(values: Iterable[float]) -> float:
    """The median of the finite values; NaN if there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else float("nan")


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
        if self.ratio is None:
            return f"Too short to compare: {self.why_not}. Raise --max-tokens. ({texts})"
        spread = f", {min(self.ratios):.2f}x to {max(self.ratios):.2f}x" if self.num_rounds > 1 else ""
        rounds = f"{counted(self.num_rounds, 'round')} in turn{spread}"
        return f"{mode}: {self.ratio:.2f}x the speed of cloud-only ({rounds}), {texts}"


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
    everything: list[GenerationResult] = []

    def take(name: str, result: GenerationResult) -> None:
        everything.append(result)
        if len(everything) % len(modes) == 0:
            on_round(len(everything) // len(modes))

    with measured_load([verifier_url(url) for url in urls]) as load:
        results = await interleave(modes, [request] * num_rounds, take)
    why_not = next(filter(None, map(why_no_rate, everything)), None)
    ratios = tuple(_rate(one) / _rate(other) for one, other in zip(results[DRAFTED], results[CLOUD_ONLY], strict=True))
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
    listening = (each for each in connections if each.status == psutil.CONN_LISTEN and each.laddr.port == port)
    return next((each.pid for each in listening if each.pid), None)


MARGIN: Final = 1.2
"""What is planned takes this much less than the time: texts differ, and so does the machine's speed."""
MIN_TOKENS: Final = 16
"""Texts are not made shorter than this: a rate needs some commits."""


@dataclass(frozen=True, slots=True)
class TextTime:
    """How long a text takes in one mode at a round trip of `rtt_ms`.

    first_s: until its first token. token_s: per token from then on. trips: round trips per token that are waited for.
    """

    rtt_ms: float
    first_s: float
    token_s: float
    trips: float

    @classmethod
    def of(cls, result: GenerationResult, rtt_ms: float) -> TextTime:
        """As a finished text took. Raises ZeroDivisionError for one without tokens."""
        num_tokens, first_s = len(result.tokens), result.arrival_s[0]
        trips = result.num_passes / num_tokens if result.mode is Mode.STOP_AND_WAIT else 0.0
        return cls(rtt_ms, first_s, (result.arrival_s[-1] - first_s) / max(1, num_tokens - 1), trips)

    def at(self, rtt_ms: float, num_tokens: int) -> float:
        """Seconds that a text of so many tokens takes at another round trip."""
        more_s = (rtt_ms - self.rtt_ms) / 1e3
        return max(0.0, self.first_s + more_s + num_tokens * (self.token_s + self.trips * more_s))


@dataclass(frozen=True, slots=True)
class TimePlan:
    """So many texts of so many tokens at each round trip, in every mode. seconds: estimate, the warm-up included."""

    rtts_ms: tuple[float, ...]
    num_texts: int
    max_tokens: int
    seconds: float


def plan_texts(
    times: Collection[TextTime],
    rtts_ms: Sequence[float],
    kept_ms: Collection[float],
    num_texts: int,
    max_tokens: int,
    warm_up: int,
    left_s: float,
) -> TimePlan:
    """As many texts as fit into `left_s`, at most `num_texts`; at least one text at each round trip of `kept_ms`.

    Where not even one text fits, the other round trips are left out; then texts become shorter. times: of each mode.
    warm_up: tokens that each mode generates before, at each round trip.
    """

    def seconds(rtts_ms: Sequence[float], num_tokens: int) -> float:
        return MARGIN * sum(time.at(rtt_ms, num_tokens) for rtt_ms in rtts_ms for time in times)

    kept = [rtt_ms for rtt_ms in rtts_ms if rtt_ms in kept_ms]
    choices = [(tuple(rtts_ms), max_tokens), (tuple(kept), max_tokens)]
    while choices[-1][1] // 2 >= MIN_TOKENS:
        choices.append((tuple(kept), choices[-1][1] // 2))
    for rtts, num_tokens in choices:
        first_s, text_s = seconds(rtts, warm_up), seconds(rtts, num_tokens)
        if first_s + text_s <= left_s:
            break
    num = max(1, min(num_texts, int((left_s - first_s) / text_s)))
    return TimePlan(rtts, num, num_tokens, first_s + num * text_s)
