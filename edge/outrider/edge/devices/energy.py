"""Reads the energy that this machine's processor has taken, where the system counts it.

Linux: powercap's package domains. Windows: the performance counter `Energy Meter`, not run on hardware. A package is
what its maker counts of the processor's chip: cores, and built-in graphics and an NPU where they are on it. Memory,
screen and a graphics card are not in it, and no counter tells one program's share from another's. Knows nothing of
drafts.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

POWERCAP: Final = Path("/sys/class/powercap")
_ZONE: Final = re.compile(r"intel-rapl:\d+")
"""The zones of whole packages, AMD's too. `intel-rapl:0:0` is a part of one, `intel-rapl-mmio:0` is the same again."""
_NO_WRAP: Final = 1 << 63
_PDH_PATH: Final = r"\Energy Meter(RAPL_Package0_PKG)\Energy"
_PICOWATT_HOUR_J: Final = 3.6e-9


@dataclass(frozen=True, slots=True)
class EnergyMeter:
    """Counters of energy. read: all of them; raises OSError. unit_j: of one count. ranges: where each begins again."""

    read: Callable[[], tuple[int, ...]]
    unit_j: float
    ranges: tuple[int, ...]

    def joules(self, before: tuple[int, ...], after: tuple[int, ...]) -> float:
        """Between two readings that are less than a range apart: some minutes at full load, hours at rest."""
        counts = ((end - start) % size for start, end, size in zip(before, after, self.ranges, strict=True))
        return self.unit_j * sum(counts)


class EnergySpan:
    """What the processor takes from here on. meter: by default this system's."""

    def __init__(self, meter: EnergyMeter | str | None = None) -> None:
        self._meter = energy_meter() if meter is None else meter
        self._before = self._read()

    @property
    def joules(self) -> float | None:
        """Until now; None where the system does not count it, or the counter has not moved."""
        after = self._read()
        if isinstance(self._meter, str) or self._before is None or after is None:
            return None
        return self._meter.joules(self._before, after) or None

    def _read(self) -> tuple[int, ...] | None:
        try:
            return None if isinstance(self._meter, str) else self._meter.read()
        except OSError:
            return None


@cache
def energy_meter() -> EnergyMeter | str:
    """This system's, or why there is none, in words."""
    if sys.platform == "win32":
        return windows_meter(ctypes.WinDLL("pdh"))
    if sys.platform == "linux":
        return powercap_meter()
    return f"{sys.platform} shows programs no energy counter"


def powercap_meter(root: Path = POWERCAP) -> EnergyMeter | str:
    """The sum of all packages, or why there is none.

    `psys`, which some laptops have, is left out: it is what the maker wired to it, often screen and charger, so two
    machines would not compare, and with the packages it would count twice.
    """
    zones = sorted(
        zone for zone in root.glob("intel-rapl:*") if _ZONE.fullmatch(zone.name) and _name(zone).startswith("package")
    )
    if not zones:
        return f"{root} has no package domain: a virtual machine, or a processor or kernel without RAPL"
    files = [zone / "energy_uj" for zone in zones]

    def read() -> tuple[int, ...]:
        return tuple(map(_number, files))

    try:
        read()
        ranges = tuple(_number(zone / "max_energy_range_uj") for zone in zones)
    except PermissionError:
        return (
            f"only root may read {files[0]} (Linux since 5.10: it can betray what others compute, CVE-2020-8694); "
            f"`sudo chmod a+r {root}/intel-rapl:*/energy_uj` opens it to all users until the next start"
        )
    except OSError as error:
        return f"{files[0]} cannot be read: {error}"
    if min(ranges) <= 0:
        return f"{zones[ranges.index(min(ranges))]} says no range of its counter"
    return EnergyMeter(read, 1e-6, ranges)


def _name(zone: Path) -> str:
    try:
        return (zone / "name").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _number(file: Path) -> int:
    """Raises OSError, too, where it holds no number: a reader has one failure to expect."""
    try:
        return int(file.read_text(encoding="ascii"))
    except ValueError as error:
        raise OSError(f"{file} holds no number: {error}") from None


class _RawCounter(ctypes.Structure):
    """PDH_RAW_COUNTER."""

    _fields_ = (
        ("status", ctypes.c_uint32),
        ("time", ctypes.c_uint32 * 2),
        ("first", ctypes.c_int64),
        ("second", ctypes.c_int64),
        ("count", ctypes.c_uint32),
    )


def windows_meter(pdh: Any) -> EnergyMeter | str:
    """Package 0 by Windows' performance counters, in picowatt-hours; or why there is none. Not run on hardware.

    pdh: the system's library of that name.
    """
    query, counter = ctypes.c_void_p(), ctypes.c_void_p()
    nothing = f"Windows has no counter {_PDH_PATH}: its driver of energy meters (EMI) shows no processor package"
    if pdh.PdhOpenQueryW(None, ctypes.c_size_t(0), ctypes.byref(query)):
        return nothing
    if pdh.PdhAddEnglishCounterW(query, _PDH_PATH, ctypes.c_size_t(0), ctypes.byref(counter)):
        return nothing

    def read() -> tuple[int, ...]:
        raw = _RawCounter()
        failed = pdh.PdhCollectQueryData(query) or pdh.PdhGetRawCounterValue(counter, None, ctypes.byref(raw))
        if failed or raw.status not in (0, 1):  # valid, or valid and new
            raise OSError(f"{_PDH_PATH} gave no value")
        return (raw.first,)

    try:
        read()
    except OSError:
        return nothing
    return EnergyMeter(read, _PICOWATT_HOUR_J, (_NO_WRAP,))
