"""Defines what `outrider-cloud serve` needs of a target: its facts at once, its engine once it is loaded.

A target's identity is equal where two replicas pick the same tokens, another where they may not. Counted: the bytes of
the model's files, the weights' precision, the runtime and its version, the kind of device, the precision of arithmetic
and KV cache, and the engine. Not counted: names, ports, tokenizer, report, threads, and the processor within one kind
of device. Processors round differently, which may turn a near-tie; replicas on two generations of them are one target
all the same.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np

from outrider.cloud.api.state import ServedModel
from outrider.cloud.seam import ServingEngine
from outrider.models.bundle.manifest import Manifest
from outrider.models.runtimes.base import RuntimeOptions

ENGINE: Final = "outrider 1"
"""Raise the number when a change of engine or sampling can change a token."""
_OLD_HEADS: Final = "draft_heads/heads.safetensors"
_MODEL_SUFFIXES: Final = frozenset({".xml", ".bin", ".onnx", ".data", ".blob", ".safetensors"})


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """A target that can serve. engine: calibrated, not started. summary: what was loaded, in one line."""

    engine: ServingEngine
    summary: str

    @classmethod
    def since(cls, started_s: float, engine: ServingEngine, facts: str) -> LoadedTarget:
        """One whose loading began at `started_s`. facts: the summary's beginning."""
        stats = engine.stats()
        step = f", {stats.step_ms:.1f} ms per step" if stats.step_ms is not None else ""
        return cls(
            engine,
            f"{facts}, loaded in {time.monotonic() - started_s:.1f} s{step}, room for {stats.num_blocks} KV blocks, "
            f"{engine.limits.max_positions} positions",
        )


class Target(ABC):
    """A target that was checked and is not loaded yet.

    path: its directory. source_name: the name that draft bundles know it by; `--name` does not change it. model: what
    clients see of it. num_gpus: GPUs of CUDA that one copy of it opens.
    """

    path: Path
    source_name: str
    model: ServedModel
    num_gpus: int

    @abstractmethod
    def load(self) -> AbstractContextManager[LoadedTarget]:
        """Loads and calibrates it; at the end it is unloaded. Stop the engine before. Raises OutriderError."""


def target_identity(manifest: Manifest, options: RuntimeOptions, engine: str = ENGINE) -> str:
    """16 hexadecimal digits for the bundle, run with these options by `engine`."""
    facts = {
        "files": sorted(entry.sha256 for entry in manifest.files if _is_model(entry.path, manifest.format)),
        "precision": manifest.precision,
        "runtime": [manifest.runtime, _version(manifest.runtime)],
        # A device's number is no kind: GPU.1 and cuda:1 compute as GPU.0 and cuda:0 do.
        "device": re.sub(r"[.:]\d+$", "", options.device.lower()),
        "arithmetic": sorted(options.properties.items()),
        "kv_cache": "auto",
        "is_batch_invariant": (
            manifest.runtime == "openvino" if options.is_batch_invariant is None else options.is_batch_invariant
        ),
        "engine": engine,
    }
    if manifest.runtime == "torch" and options.device.startswith("cuda"):
        facts["kernels"] = "triton 3"  # raise the number when a change of kernels can change a token
    return digest_of(facts)


def digest_of(facts: Mapping[str, Any]) -> str:
    """16 hexadecimal digits for what decides a token."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def instruction_set() -> str:
    """What the processor computes with, as NumPy finds it: keys and values of another one may differ in a bit."""
    found: Any = np.show_config(mode="dicts")
    simd = found["SIMD Extensions"]
    return " ".join([platform.machine(), *simd.get("baseline", ()), *simd.get("found", ())])


def _is_model(path: str, format: str) -> bool:
    """Whether a file of the bundle decides logits. Only safetensors need config.json: the other formats are graphs.

    Draft heads, which versions before this one trained, decide none.
    """
    if path == _OLD_HEADS:
        return False
    suffix = PurePosixPath(path).suffix.lower()
    return suffix in _MODEL_SUFFIXES or (format == "safetensors" and path == "config.json")


def _version(runtime: str) -> str:
    try:
        return version(runtime)
    except PackageNotFoundError:
        return "unknown"
