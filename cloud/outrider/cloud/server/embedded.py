"""Opens a bundle for the embedded engine."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from outrider.cloud.api.state import ServedModel
from outrider.cloud.engine import EngineConfig, EngineThread
from outrider.cloud.engine.config import SpillConfig, TreeForm
from outrider.cloud.server.options import Exactness, ServeOptions
from outrider.cloud.server.signals import ends_at_once
from outrider.cloud.server.target import LoadedTarget, Target, instruction_set, target_identity
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.reference_export import EXPORTER_PACKAGES, REFERENCE, WIDENED_MB, export_reference_pair
from outrider.models.cache_folder import default_cache_dir
from outrider.models.errors import ConfigError
from outrider.models.process.extras import require_packages
from outrider.models.process.huge_pages import begin_huge_pages
from outrider.models.runtimes import open_batch_runtime
from outrider.models.runtimes.base import TORCH_DTYPES, DescribedRuntime, RuntimeOptions


def export_reference_target() -> Path:
    """The widened reference target's bundle in the user's cache, exported if it is not there yet.

    Raises RuntimeUnavailable where the exporter is not installed, or fails.
    """
    require_packages(EXPORTER_PACKAGES, "exporting the reference target", "export")
    print(
        f"Serves the reference target, widened to {WIDENED_MB:g} MB: a step takes as long as a large model's; the text "
        "does not change.",
        file=sys.stderr,
        flush=True,
    )
    return export_reference_pair().target


_CUDA_STEP_TOKENS: Final = 2048
"""A prompt's chunk. A GPU computes some hundred tokens in the time that it reads the weights in."""
_SPILL_MB: Final = 1024


class BundleTarget(Target):
    """A bundle, checked, for the embedded engine. Raises OutriderError for one that cannot be served."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._bundle = Bundle.open(export_reference_target() if options.bundle == REFERENCE else options.bundle)
        self._loading = _loading(self._bundle, options)
        manifest = self._bundle.manifest
        self.path, self.source_name = self._bundle.path, manifest.name
        if manifest.role != "target":
            raise ConfigError(
                f"{self.path} is a {manifest.role} bundle; expected a target, as `outrider-export target` makes it"
            )
        name, eos_ids = options.name or manifest.name, frozenset(manifest.eos_token_ids)
        identity = target_identity(manifest, self._loading)
        self.model = ServedModel(name, self._bundle.tokenizer(), eos_ids, manifest, identity)
        self.num_gpus = int(self._loading.device.startswith("cuda"))

    @contextmanager
    def load(self) -> Iterator[LoadedTarget]:
        """Loads the model, and measures its steps."""
        started_s = time.monotonic()
        manifest = self._bundle.manifest
        with ends_at_once():
            runtime = open_batch_runtime(manifest.runtime, self._bundle.model_file, self._loading)
        step_tokens = _CUDA_STEP_TOKENS if self.num_gpus else None
        try:
            engine = EngineThread(runtime, _config(self._options, self.model.target, step_tokens))
            try:
                with ends_at_once():
                    engine.calibrate()
                if self._loading.device.lower() == "cpu":
                    begin_huge_pages()  # once a step has put the weights where they stay; times are learned anew
                widened = ", widened for measurements" if manifest.widened else ""
                millions = manifest.architecture.parameters / 1e6
                facts = f"{self.model.name}: {millions:.1f}M parameters, {manifest.precision}{widened}"
                if isinstance(runtime, DescribedRuntime):
                    facts += f", {runtime.description}"
                yield LoadedTarget.since(started_s, engine, facts)
            finally:
                engine.close()
        finally:
            runtime.close()


def _config(options: ServeOptions, target: str, step_tokens: int | None = None) -> EngineConfig:
    spill = None
    if options.spill_dir is not None:
        spill = SpillConfig(
            options.spill_dir,
            f"{target} {instruction_set()}",
            (options.spill_mb or _SPILL_MB) << 20,
            always=options.ray,  # replicas find each other's
        )
    return EngineConfig(
        max_running=options.max_running,
        step_tokens=step_tokens,
        looks_up=options.lookup,
        share_prefixes=options.share_prefixes,
        share_between_owners=options.share_caches_between_keys,
        policy=options.policy,
        form=options.tree,
        spill=spill,
    )


def _loading(bundle: Bundle, options: ServeOptions) -> RuntimeOptions:
    """How to load the bundle."""
    manifest = bundle.manifest
    kind = manifest.runtime
    default_device = "CPU" if kind == "openvino" else "cpu"
    if manifest.device == "gpu":
        default_device = "GPU" if kind == "openvino" else "cuda"
    device = options.device or default_device
    compiled = default_cache_dir() / "compiled" / manifest.digest[:16]
    return RuntimeOptions(
        device=device,
        num_threads=options.threads,
        kv_cache_bytes=options.kv_cache_bytes,
        is_batch_invariant=_is_batch_invariant(options, kind, device),
        cache_dir=str(compiled) if kind == "openvino" and device != "CPU" else None,  # where compiling takes long
        # torch loads safetensors in any type; the export was checked in this one.
        properties={"dtype": TORCH_DTYPES[manifest.precision]} if kind == "torch" else {},
    )


def _is_batch_invariant(options: ServeOptions, kind: str, device: str) -> bool:
    """As `RuntimeOptions` has it; True where a runtime has no choice. Raises ConfigError for what cannot be kept."""
    is_cuda = kind == "torch" and device.startswith("cuda")
    is_openvino = kind == "openvino" and device == "CPU"
    if options.exact is Exactness.BITWISE:
        if not (is_cuda or is_openvino):
            raise ConfigError(
                f"{kind} on {device} computes logits by the shape of a step, so texts may differ at near ties; leave "
                "out --exact bitwise, or serve an OpenVINO bundle on the CPU"
            )
        if is_cuda and find_spec("triton") is None:
            raise ConfigError("--exact bitwise on CUDA needs Triton, which is not installed; run: pip install triton")
        if is_openvino and options.tree is TreeForm.TREE:
            raise ConfigError(
                "--tree tree gives up logits that are bitwise equal in all steps; leave it or --exact out"
            )
    if is_cuda:
        return options.exact is Exactness.BITWISE
    return options.tree is not TreeForm.TREE and not (is_openvino and options.exact is Exactness.NEAR)
