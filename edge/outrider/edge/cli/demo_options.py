"""The options of `outrider demo`, as its parts pass them on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.edge.devices.placement import DraftChoice
from outrider.models.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """rtt_ms: round trip of the table; None takes a short one, and tells of others in a second table.

    widen_mb: size of the widened target in FP32, 10^6 bytes; 0 leaves the target as it is. json_path: where the
    figures go. The text of prompt i is drawn with seed + i.
    """

    rtt_ms: float | None
    widen_mb: float
    json_path: Path | None
    num_prompts: int
    max_tokens: int
    params: SamplingParams
    choice: DraftChoice
