"""Chooses sizes and device, and makes the bundles that several parts of `bench.gpu` share."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.pairs import kept_bundle
from bench.report import machine

from outrider.export.make.pipeline import export_model
from outrider.export.recipes import ExportOptions
from outrider.reference import draft_dir, target_dir

DRAFT: Final = ExportOptions("draft", "int8", "onnxruntime", overwrite=True)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. widen_mb: of the target in FP32. layers, hidden, vocab: of the random model."""

    widen_mb: float = 2000.0
    sessions: tuple[int, ...] = (1, 8, 32, 64)
    load_sessions: tuple[int, ...] = (1, 4, 16, 64)
    layers: int = 32
    hidden: int = 4096
    vocab: int = 152_000
    tokens: int = 96
    bitwise_tokens: int = 100_000
    steps: int = 24
    copy_mb: int = 2048
    runs: int = 3
    rtt_ms: tuple[float, ...] = (0.0, 10.0, 25.0, 50.0, 100.0)
    prompts: int = 3
    cores: int = 8


SMALL = Sizes(
    widen_mb=0.0,
    sessions=(1, 2),
    load_sessions=(1,),  # of two short texts, one may be over before the other has begun
    layers=2,
    hidden=128,
    vocab=4200,
    tokens=10,
    bitwise_tokens=40,
    steps=2,
    copy_mb=4,
    runs=1,
    rtt_ms=(0.0,),
    prompts=1,
    cores=1,
)
"""A few seconds on a processor: that the suite runs, not a measurement."""


@dataclass(slots=True)
class Run:
    """One part on its way. out: of the JSON; made: of bundles, kept for the next part. draft: a carried bundle."""

    number: int
    out: Path
    made: Path
    device: str
    sizes: Sizes
    limit_s: float
    draft: Path | None = None
    found: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    _started_s: float = field(default_factory=time.monotonic)

    @property
    def is_cuda(self) -> bool:
        """Whether this runs on a GPU."""
        return self.device != "cpu"

    @property
    def path(self) -> Path:
        """The JSON."""
        return self.out / f"part{self.number}.json"

    def has_time(self, what: str, share: float = 0.8) -> bool:
        """Whether less than this share of the limit is spent; else `what` is noted as left out."""
        if time.monotonic() - self._started_s < share * self.limit_s:
            return True
        self.left_out.append(what)
        return False

    def note(self, name: str, value: Any) -> None:
        """Adds a figure, and writes all so far: a run that is cut off leaves what it has."""
        self.found[name] = value
        head = {"machine": machine(), "device": device_facts(self.device), "part": self.number}
        took = {"took_s": round(time.monotonic() - self._started_s, 1), "left_out": self.left_out}
        self.path.write_text(json.dumps({**head, **took, **self.found}, indent=2) + "\n", encoding="utf-8")
        print(f"part {self.number}: {name} after {took['took_s']:.0f} s", flush=True)

    def target(self) -> Path:
        """The bundle of the widened reference target: bf16 on a GPU, FP32 on a processor."""
        precision = "bf16" if self.is_cuda else "fp32"
        place = self.made / f"target-{precision}-{self.sizes.widen_mb:g}"
        options = ExportOptions(
            "target",
            "bf16" if self.is_cuda else "fp32",
            "torch",
            widen_mb=self.sizes.widen_mb or None,
            overwrite=True,
            device="gpu" if self.is_cuda else "cpu",
        )
        return kept_bundle(place, target_dir(), options)

    def draft_bundle(self) -> Path:
        """The carried draft, or one made here from the reference weights."""
        if self.draft is not None:
            return self.draft
        return kept_bundle(self.made / "draft", draft_dir(), DRAFT)


def make_draft(place: Path) -> None:
    """Exports the reference draft for onnxruntime."""
    export_model(draft_dir(), place, DRAFT)


def device_facts(device: str) -> dict[str, Any]:
    """The GPU's name, memory and driver's CUDA; of a processor only its kind."""
    import torch

    if device == "cpu":
        return {"kind": "cpu", "is_hardware": False}
    facts = torch.cuda.get_device_properties(0)
    return {
        "kind": facts.name,
        "is_hardware": True,
        "memory_gb": round(facts.total_memory / 1e9, 1),
        "multiprocessors": facts.multi_processor_count,
        "cuda": torch.version.cuda,
    }
