"""Lists vLLM's options that may be set, and turns them into its engine arguments. All others are refused by name.

Left out on purpose: what runs code of the model's author (`trust_remote_code`) or by path (plug-ins, processors,
loaders), vLLM's own sampling and speculation, and what was not tried with drafts from outside (pipeline parallelism,
data parallelism, KV connectors). Knows no vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter, ValidationError

from outrider.cloud.pending.policy import Policy
from outrider.cloud.vllm.graph_sizes import graph_arguments
from outrider.cloud.vllm.heads import MTP, heads_config
from outrider.models.errors import ConfigError
from outrider.models.wire.protocol import MAX_VERIFY_ITEMS

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KvDtype = Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"]
Quantization = Literal["", "awq", "gptq", "compressed-tensors", "fp8"]

MAX_DRAFT: Final = 64
"""Most drafted tokens a step; vLLM's own limit is 128, and each place in the batch reserves rows for them."""

REMOVED: Final = {"runner": "vLLM's build decides it: V2 on GPUs, V1 with the CPU build."}

_SLOTS_PER_PLACE: Final = 4
"""Sequences that may have blocks, for each that takes part in a step: they take turns without being computed again."""

_KEPT_BY_ONEDNN: Final = 128
"""On the CPU build, oneDNN keeps a kernel for each number of tokens that a step ever had, 1024 of them: 350 MB after
2,000 sessions over the reference target. With this many every size of a decode step is kept."""

_WHAT_FITS: Final = -1
"""For vLLM's `max_model_len`: the model's own length, or the longest that the KV cache holds."""

PROPOSER: Final = "outrider.cloud.vllm.proposer.Empty"
SCHEDULER: Final = "outrider.cloud.vllm.scheduler.OutriderScheduler"
LOGITS_PROCESSOR: Final = "outrider.cloud.vllm.v2:OutriderPick"
EXTENSION: Final = "outrider.cloud.vllm.extension.OutriderExtension"

RUNNER_VARIABLE: Final = "VLLM_USE_V2_MODEL_RUNNER"
INVARIANCE_VARIABLE: Final = "VLLM_BATCH_INVARIANT"
ENVIRONMENT: Final = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",  # the model is a directory
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked process would hold the server's port and its keys
    "VLLM_PLUGINS": "",  # no package may add code by being installed
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",  # no pickle between server and engine process
    "GLOO_SOCKET_IFNAME": "lo",  # torch's process groups listen, else at the host's own address; one machine only
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    # Rows that are not finite are ours to handle: vLLM's count costs a kernel a step, its error ends all sequences.
    "VLLM_COMPUTE_NANS_IN_LOGITS": "0",
    "VLLM_RAISE_ON_LOGIT_NANS": "0",
}
"""Set for vLLM's processes, whatever the user's environment says."""


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """vLLM's options, by vLLM's names; `max_draft` and `heads` are ours.

    max_draft: drafted tokens verified per sequence and step. heads: the target's own, which draft, too.
    gpu_memory_utilization: the share of a GPU's memory that one server may take; None: vLLM's own default. Not with
      --kv-cache-mb, which sizes the KV cache alone.
    """

    tensor_parallel_size: Annotated[int, Field(ge=1, description="a whole number from 1")] = 1
    dtype: Dtype = "auto"
    quantization: Quantization = ""
    kv_cache_dtype: KvDtype = "auto"
    max_model_len: Annotated[int | None, Field(ge=2, description="a whole number from 2")] = None
    block_size: Annotated[int | None, Field(ge=8, description="a whole number from 8")] = None
    gpu_memory_utilization: Annotated[float | None, Field(gt=0.0, le=1.0, description="a number over 0, up to 1")] = (
        None
    )
    enforce_eager: Annotated[bool, Field(description="true or false")] = False
    max_draft: Annotated[int, Field(ge=1, le=MAX_DRAFT, description=f"a whole number from 1 to {MAX_DRAFT}")] = 16
    heads: Annotated[str, Field(description=f"{MTP}, or a directory with EAGLE heads")] = ""

    @classmethod
    def parse(cls, given: Sequence[str]) -> VllmOptions:
        """From NAME=VALUE strings. Raises ConfigError for a name that is not listed, or a value that does not fit."""
        known: dict[str, Any] = _options.json_schema()["properties"]
        values: dict[str, str] = {}
        for text in given:
            name, separator, value = text.partition("=")
            name = name.strip().replace("-", "_")
            if name in REMOVED:
                raise ConfigError(f"--vllm-option {name} is no option any more. {REMOVED[name]}")
            if not separator or name not in known:
                raise ConfigError(
                    f"--vllm-option {text!r} is not allowed; expected NAME=VALUE with one of: {', '.join(known)}"
                )
            values[name] = value.strip()
        try:
            return _options.validate_python(values)
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            expected = known[name].get("description") or ", ".join(filter(None, known[name]["enum"]))
            raise ConfigError(f"--vllm-option {name}={values[name]!r}: expected {expected}") from None


_options: Final = TypeAdapter(VllmOptions)


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """How the engine runs; names as in EngineConfig. arguments: of vLLM's AsyncEngineArgs. adapters: their directories,
    by name. is_bitwise: its kernels are to be batch-invariant, and are tried at the start.
    """

    arguments: Mapping[str, Any]
    max_running: int = 32
    max_queue: int = 1024
    max_draft: int = 16
    max_kept: int = MAX_VERIFY_ITEMS
    max_kept_s: float = 600.0
    looks_up: bool = False
    share_between_owners: bool = False
    policy: Policy = Policy.AUTO
    adapters: Mapping[str, str] = field(default_factory=dict)
    is_bitwise: bool = False


def set_environment(num_threads: int, *, is_v2: bool, is_bitwise: bool = False) -> None:
    """Sets what vLLM reads from the environment. Call it before vLLM is imported.

    num_threads: 0 leaves it to vLLM. is_v2: vLLM's V2 model runner. is_bitwise: its batch-invariant kernels.
    """
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_KEPT_BY_ONEDNN))
    os.environ[RUNNER_VARIABLE] = str(int(is_v2))
    os.environ[INVARIANCE_VARIABLE] = str(int(is_bitwise))
    if num_threads:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["OMP_NUM_THREADS"] = str(num_threads)


def engine_arguments(
    options: VllmOptions,
    model: str,
    *,
    is_v2: bool,
    max_running: int,
    step_tokens: int,
    kv_cache_bytes: int | None,
    shares_prefixes: bool,
    drain_s: float,
) -> dict[str, Any]:
    """The arguments of `AsyncEngineArgs`.

    is_v2: as in `set_environment`. kv_cache_bytes: None leaves the size to `gpu_memory_utilization`, and the longest
    sequence, where that is not set, to what fits. drain_s: how long vLLM's processes go on after a signal of their own.
    """
    arguments: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "load_format": "safetensors",
        "generation_config": "vllm",  # the model's own defaults for sampling are not ours
        "dtype": options.dtype,
        "kv_cache_dtype": options.kv_cache_dtype,
        "tensor_parallel_size": options.tensor_parallel_size,
        "distributed_executor_backend": "mp" if options.tensor_parallel_size > 1 else "uni",  # never a Ray around us
        "max_num_seqs": min(max(max_running, step_tokens), _SLOTS_PER_PLACE * max_running),
        "max_num_batched_tokens": max(step_tokens, max_running),  # vLLM wants one for each sequence at least
        "enable_chunked_prefill": True,
        "enable_prefix_caching": shares_prefixes,
        "async_scheduling": False,
        "enforce_eager": options.enforce_eager,
        "disable_log_stats": True,
        "shutdown_timeout": max(1, round(drain_s)),
        "scheduler_cls": SCHEDULER,
        "worker_extension_cls": EXTENSION,
        "speculative_config": {
            "num_speculative_tokens": options.max_draft,
            "method": "custom_class",
            "model": PROPOSER,
        },
    }
    if is_v2:  # it knows no `custom_class`; `v2.install` silences the n-gram proposer
        arguments["speculative_config"] = {"num_speculative_tokens": options.max_draft, "method": "ngram"}
        arguments["logits_processors"] = [LOGITS_PROCESSOR]
    if is_v2 and not options.enforce_eager:  # on a GPU
        arguments |= graph_arguments(options.max_draft, max_running, arguments["max_num_batched_tokens"])
    if options.heads:
        arguments["speculative_config"] = heads_config(options.heads, options.max_draft, arguments["max_num_seqs"])
    optional = {
        "quantization": options.quantization or None,
        "max_model_len": options.max_model_len or (_WHAT_FITS if kv_cache_bytes is None else None),
        "block_size": options.block_size,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "kv_cache_memory_bytes": kv_cache_bytes,
    }
    return arguments | {name: value for name, value in optional.items() if value is not None}
