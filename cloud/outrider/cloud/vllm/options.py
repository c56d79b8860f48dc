"""Lists vLLM's options that may be set, and turns them into its engine arguments. All others are refused by name.

Left out on purpose: what runs code of the model's author (`trust_remote_code`) or by path (plug-ins, processors,
loaders), vLLM's own sampling and speculation, and what was not tried with drafts from outside (pipeline parallelism,
data parallelism, LoRA, KV connectors). Knows no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, get_args

from outrider.models.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KvDtype = Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"]
Runner = Literal["v1", "v2"]
Quantization = Literal["", "awq", "gptq", "compressed-tensors", "fp8"]

MAX_DRAFT: Final = 64
"""Most drafted tokens a step; vLLM's own limit is 128, and each place in the batch reserves rows for them."""

_SLOTS_PER_PLACE: Final = 4
"""Sequences that may have blocks, for each that takes part in a step: they take turns without being computed again."""

PROPOSER: Final = "outrider.cloud.vllm.proposer.Empty"
SCHEDULER: Final = "outrider.cloud.vllm.scheduler.OutriderScheduler"
LOGITS_PROCESSOR: Final = "outrider.cloud.vllm.v2:OutriderPick"
EXTENSION: Final = "outrider.cloud.vllm.extension.OutriderExtension"

RUNNER_VARIABLE: Final = "VLLM_USE_V2_MODEL_RUNNER"
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
    """vLLM's options, by vLLM's names; `max_draft` and `runner` are ours.

    max_draft: drafted tokens verified per sequence and step. runner: vLLM's model runner.
    gpu_memory_utilization: sizes the KV cache by the GPU's memory, in place of --kv-cache-mb; None: --kv-cache-mb.
    """

    tensor_parallel_size: int = field(default=1, metadata={"least": 1})
    dtype: Dtype = "auto"
    quantization: Quantization = ""
    kv_cache_dtype: KvDtype = "auto"
    max_model_len: int | None = field(default=None, metadata={"least": 2})
    block_size: int | None = field(default=None, metadata={"least": 8})
    gpu_memory_utilization: float | None = None
    enforce_eager: bool = False
    max_draft: int = field(default=16, metadata={"least": 1, "most": MAX_DRAFT})
    runner: Runner = "v1"

    @classmethod
    def parse(cls, given: Sequence[str]) -> VllmOptions:
        """From NAME=VALUE strings. Raises ConfigError for a name that is not listed, or a value that does not fit."""
        known = {each.name: each for each in fields(cls)}
        values: dict[str, Any] = {}
        for text in given:
            name, separator, value = text.partition("=")
            name = name.strip().replace("-", "_")
            if not separator or name not in known:
                raise ConfigError(
                    f"--vllm-option {text!r} is not allowed; expected NAME=VALUE with one of: {', '.join(known)}"
                )
            values[name] = _read(name, value.strip(), known[name].metadata)
        return replace(cls(), **values)


def _read(name: str, text: str, metadata: Any) -> Any:
    choices = {
        "dtype": get_args(Dtype),
        "quantization": get_args(Quantization),
        "kv_cache_dtype": get_args(KvDtype),
        "runner": get_args(Runner),
    }
    if name in choices:
        if text not in choices[name]:
            raise _refused(name, text, ", ".join(filter(None, choices[name])))
        return text
    if name == "enforce_eager":
        if text.lower() not in ("true", "false"):
            raise _refused(name, text, "true or false")
        return text.lower() == "true"
    if name == "gpu_memory_utilization":
        share = _number(float, name, text, "a number over 0, up to 1")
        if not 0.0 < share <= 1.0:
            raise _refused(name, text, "a number over 0, up to 1")
        return share
    least, most = metadata["least"], metadata.get("most")
    expected = f"a whole number from {least}" + (f" to {most}" if most else "")
    count = _number(int, name, text, expected)
    if count < least or (most is not None and count > most):
        raise _refused(name, text, expected)
    return count


def _number(kind: Callable[[str], Any], name: str, text: str, expected: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise _refused(name, text, expected) from None


def _refused(name: str, text: str, expected: str) -> ConfigError:
    return ConfigError(f"--vllm-option {name}={text!r}: expected {expected}")


def engine_arguments(
    options: VllmOptions,
    model: str,
    *,
    max_running: int,
    step_tokens: int,
    kv_cache_bytes: int,
    shares_prefixes: bool,
    drain_s: float,
) -> dict[str, Any]:
    """The arguments of `AsyncEngineArgs`. drain_s: how long vLLM's processes go on after a signal of their own."""
    arguments: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "load_format": "safetensors",
        "generation_config": "vllm",  # the model's own defaults for sampling are not ours
        "dtype": options.dtype,
        "kv_cache_dtype": options.kv_cache_dtype,
        "tensor_parallel_size": options.tensor_parallel_size,
        "max_num_seqs": min(max(max_running, step_tokens), _SLOTS_PER_PLACE * max_running),
        "max_num_batched_tokens": step_tokens,
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
    if options.runner == "v2":  # it knows no `custom_class`; `v2.install` silences the n-gram proposer
        arguments["speculative_config"] = {"num_speculative_tokens": options.max_draft, "method": "ngram"}
        arguments["logits_processors"] = [LOGITS_PROCESSOR]
    if options.quantization:
        arguments["quantization"] = options.quantization
    if options.max_model_len is not None:
        arguments["max_model_len"] = options.max_model_len
    if options.block_size is not None:
        arguments["block_size"] = options.block_size
    if options.gpu_memory_utilization is not None:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
    else:
        arguments["kv_cache_memory_bytes"] = kv_cache_bytes
    return arguments
