"""Halves the work of drafting while the machine runs on battery or is hot."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final

import psutil

HOT_C: Final = 90.0
"""A processor is hot from here on, or from what its sensor calls high, if that is less."""
BELIEVED_S: Final = 30.0
_PROCESSORS: Final = frozenset({"coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal", "cpu-thermal"})
"""Sensors of processors, as Linux names them; disks and networks are hot at other temperatures."""


class OnBattery(StrEnum):
    """What the device drafts on battery, or when it is hot."""

    HALF = "half"
    FULL = "full"


def why_ease(
    battery: Callable[[], Any] | None = None, temperatures: Callable[[], dict[str, list[Any]]] | None = None
) -> str | None:
    """Why the device should draft less, in words: "on battery, 40 %", "hot, 93 °C"; None where it need not.

    battery, temperatures: as psutil.sensors_battery and psutil.sensors_temperatures, which some systems lack.
    """
    ask_battery: Any = battery or getattr(psutil, "sensors_battery", None)
    ask_temperatures: Any = temperatures or getattr(psutil, "sensors_temperatures", None)
    state = _asked(ask_battery)
    if state is not None and state.power_plugged is False:
        return f"on battery, {state.percent:.0f} %"
    for name, sensors in (_asked(ask_temperatures) or {}).items():
        for sensor in sensors if name in _PROCESSORS else ():
            if sensor.current is not None and sensor.current >= min(HOT_C, sensor.high or HOT_C):
                return f"hot, {sensor.current:.0f} °C"
    return None


def _asked(ask: Callable[[], Any] | None) -> Any:
    try:
        return ask() if ask is not None else None
    except (OSError, RuntimeError, ValueError, AttributeError):  # broken sensors are common
        return None


class PowerWatch:
    """Remembers for half a minute why the device should draft less: sensors take milliseconds."""

    def __init__(
        self,
        on_battery: OnBattery = OnBattery.HALF,
        ask: Callable[[], str | None] = why_ease,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_watching = on_battery is OnBattery.HALF
        self._ask = ask
        self._clock = clock
        self._seen: tuple[float, str | None] | None = None

    @property
    def reason(self) -> str | None:
        """Why the next text is drafted with half the work; None: with all of it."""
        if not self._is_watching:
            return None
        now = self._clock()
        if self._seen is None or now - self._seen[0] >= BELIEVED_S:
            self._seen = now, self._ask()
        return self._seen[1]
