"""Keeps what drafts have been measured to take on this machine's devices, and compares them.

Nothing is assumed of a kind of device: an NPU, a GPU and a processor are compared by their times, with the runtime that
runs the draft there. This module measures nothing itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from outrider.models.bundle.speed_up import tokens_per_pass
from outrider.models.cache_folder import default_cache_dir

BUSY: Final = 0.6
"""Times taken while the processor is busier than this are used once and not kept."""
DRAFTED: Final = 4
"""Tokens that are drafted one after the other before the first message: the wait that a user sees."""
STEP_MS: Final = 40.0
ACCEPTANCE: Final = 0.6
_MOST_BUSY: Final = 0.95


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
    """Measured times, ms. token_ms: median of one token. eight_ms: median of eight nodes of a tree. open_s: loading."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    token_ms: float
    eight_ms: float
    open_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Profiles:
    """The directory of profiles: a file each."""

    root: Path = field(default_factory=lambda: default_cache_dir() / "profiles")

    def find(self, key: ProfileKey) -> Profile | None:
        """The kept profile; None where there is none, or none that can be read."""
        try:
            return Profile.model_validate_json(self._path(key).read_bytes())
        except (OSError, ValidationError):
            return None

    def keep(self, key: ProfileKey, profile: Profile) -> None:
        """Keeps a profile. A directory that cannot be written is no failure: it is measured again."""
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


def node_ms(profile: Profile, load: Load = Load(), link: Link = Link()) -> float:
    """Expected time of a drafted node, ms.

    On a short link the target waits for the first guesses, which are drafted one after the other. The longer the link,
    the more nodes are drafted while messages travel, eight in a call. A device that is busy, or that tasks wait for,
    takes longer.
    """
    step = link.step_ms or STEP_MS
    share = step / (step + (step if link.round_trip_ms is None else link.round_trip_ms))
    alone = share * profile.token_ms + (1.0 - share) * profile.eight_ms / 8.0
    return alone / (1.0 - min(_MOST_BUSY, load.utilisation)) * (1.0 + load.num_waiting)


def text_token_ms(
    profile: Profile,
    acceptance: float | None = None,
    load: Load = Load(),
    link: Link = Link(),
) -> float:
    """Expected time of a token of the text with this draft, ms: a target's step and the wait for four drafted tokens,
    over the tokens that a pass then commits. The score of a placement: the smallest is the best.
    """
    alpha = min(0.99, ACCEPTANCE if acceptance is None else acceptance)
    step = link.step_ms or STEP_MS
    return (step + DRAFTED * node_ms(profile, load, link)) / tokens_per_pass(alpha, DRAFTED)
