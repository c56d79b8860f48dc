"""Keeps what drafts have been measured to take on this machine's devices, and compares them.

Nothing is assumed of a kind of device: an NPU, a GPU and a processor are compared by their times, with the runtime that
runs the draft there. This module measures nothing itself.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import psutil
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from outrider.models.bundle.speed_up import Setting, stream
from outrider.models.cache_folder import default_cache_dir

BUSY: Final = 0.6
"""Times taken while the processor is busier than this are used once and not kept."""
CALL_SIZES: Final = (1, 4, 8, 16)
"""Nodes of the calls that are timed, as far as the runtime takes so many."""
BELIEVED_S: Final = 86_400.0
"""So long a place that could not be profiled is not tried again: a driver that hangs takes minutes each time."""
STEP_MS: Final = 40.0
ACCEPTANCE: Final = 0.6
_MOST_BUSY: Final = 0.95
_EXTRA: Final = 0.03
"""What a verified token adds to a step, of a step, until the server has measured it."""
_WIDTHS: Final = (1, 2, 4, 8, 16)
_SPREAD: Final = 0.3


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a profile is of. Another version of runtime, driver or Outrider may have other times.

    bundle: the digest of its manifest. place: device as it is opened, with NPU emulation and threads. device: its
    product name and driver.
    """

    bundle: str
    runtime: str
    version: str
    place: str
    device: str
    outrider: str


class Profile(BaseModel):
    """A draft in one place, as measured.

    calls_ms: the median time of a call by the number of nodes that it drafts: those of CALL_SIZES that the runtime
    takes in one, 1 among them. open_s: loading. nodes_per_joule: drafted nodes by the energy of the processor's package
    in calls of the most nodes, its idle power not subtracted; None where the system does not count it.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    calls_ms: dict[int, float] = Field(min_length=1)
    open_s: float = 0.0
    nodes_per_joule: float | None = None

    @property
    def token_ms(self) -> float:
        """The time of one node, as on a path of first guesses."""
        return self.calls_ms[1]


class Failure(BaseModel):
    """Why a draft could not be profiled in one place. at_s: when, in seconds of Unix time."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    error: str
    at_s: float = Field(default_factory=time.time)


_KEPT: Final = TypeAdapter[Profile | Failure](Profile | Failure)


@dataclass(frozen=True, slots=True)
class Profiles:
    """The directory of profiles, and of failures: a file each."""

    root: Path = field(default_factory=lambda: default_cache_dir() / "profiles")

    def find(self, key: ProfileKey) -> Profile | Failure | None:
        """What is kept, a failure for a day; None where there is nothing, or nothing that can be read."""
        try:
            found = _KEPT.validate_json(self._path(key).read_bytes())
        except (OSError, ValidationError):
            return None
        is_past = isinstance(found, Failure) and not 0.0 <= time.time() - found.at_s < BELIEVED_S
        return None if is_past else found

    def keep(self, key: ProfileKey, profile: Profile | Failure) -> None:
        """Keeps a profile, or a failure. A directory that cannot be written is no failure: it is measured again."""
        path = self._path(key)
        partial = path.with_suffix(".part")
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(asdict(key) | profile.model_dump(), indent=2) + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError:
            pass

    def _path(self, key: ProfileKey) -> Path:
        text = json.dumps(asdict(key), sort_keys=True)
        return self.root / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a device is with other work. utilisation: 0 to 1. num_waiting: tasks that wait for it, per core."""

    utilisation: float = 0.0
    num_waiting: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """The way to the cloud, ms; None: unknown."""

    round_trip_ms: float | None = None
    step_ms: float | None = None


def processor_load(
    percent: Callable[[float], float] = lambda seconds: float(psutil.cpu_percent(seconds)),
    waiting: Callable[[], Sequence[float]] = psutil.getloadavg,
    num_cores: int | None = None,
) -> Load:
    """The processor's load now; takes a tenth of a second."""
    cores = num_cores or psutil.cpu_count() or 1
    try:
        queue = max(0.0, waiting()[0] / cores - 1.0)
    except OSError:
        queue = 0.0
    return Load(min(1.0, percent(0.1) / 100.0), queue)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a draft is expected to reach.

    tokens_per_s: of the text. nodes: drafted for each position that the draft goes ahead; nodes_ms: what they take now,
    load included. step_ms, round_trip_ms: for which this holds.
    """

    tokens_per_s: float
    nodes: int
    nodes_ms: float
    step_ms: float
    round_trip_ms: float


def forecast(profile: Profile, acceptance: float | None = None, load: Load = Load(), link: Link = Link()) -> Forecast:
    """Accepted tokens per second with this draft on this link: the score of a placement, the larger the better.

    A path of first guesses is drafted one after the other, so each position that the draft goes ahead costs a call,
    however many nodes the call drafts. With w nodes for a position the draft holds the target's token there with

        alpha(w) = 1 - (1 - acceptance) / w ** 0.3

    and takes level(w), the fewest ms that calls of measured sizes need for w nodes. `speed_up.stream`, the exact
    expectation of streamed drafts, gives the tokens of the passes over the time of passes, round trips and waiting for
    a draft with that chance and that time; the best w counts. Many nodes per call win where they widen the tree sooner
    than one node per call does, and lose where the next first guess is waited for.

    The exponent is fitted to the tree simulation (`test_the_score_is_near_the_simulation`). It is small because the
    nodes of a position have several parents, so that each has few of the guesses, and a step verifies few of all.

    acceptance: of the draft's first guess. A device that is busy, or that tasks wait for, takes longer.
    """
    alpha = min(0.99, ACCEPTANCE if acceptance is None else acceptance)
    step_ms = link.step_ms or STEP_MS
    round_trip_ms = step_ms if link.round_trip_ms is None else link.round_trip_ms
    slower = (1.0 + load.num_waiting) / (1.0 - min(_MOST_BUSY, load.utilisation))

    def at(width: int) -> Forecast:
        level_ms = slower * min(-(-width // size) * call_ms for size, call_ms in profile.calls_ms.items())
        chance = 1.0 - (1.0 - alpha) / width**_SPREAD
        speed_up = stream(Setting(chance, level_ms, step_ms, _EXTRA * step_ms, round_trip_ms)).speed_up
        return Forecast(1e3 * speed_up / step_ms, width, level_ms, step_ms, round_trip_ms)

    return max(map(at, _WIDTHS), key=lambda each: each.tokens_per_s)
