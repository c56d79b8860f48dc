"""Makes vLLM's schedulers without an engine, a model or workers, for `bench.vllm_steps`: its own, and ours in it.

The model is that of `bench.known_text`: its picks are looked up. vLLM is imported where it is used, by the interpreter
of its environment.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from bench.known_text import SUCCESSOR, VOCAB_SIZE

from outrider.cloud.vllm.options import PROPOSER
from outrider.cloud.vllm.terms import Terms
from outrider.models.picks.sampling import SamplingParams

MAX_DRAFT: Final = 16
PROMPT_TOKENS: Final = 64
BLOCK_SIZE: Final = 16
_MAX_MODEL_LEN: Final = 1 << 15
_CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": _MAX_MODEL_LEN,
    "torch_dtype": "float32",
}


def write_model(place: Path) -> Path:
    """A directory with the configuration of a model that is never loaded."""
    (place / "config.json").write_text(json.dumps(_CONFIG))
    return place


def engine_config(model: Path, num_sessions: int, scheduler: str | None) -> Any:
    """vLLM's configuration for a scheduler of so many sessions."""
    from vllm import AsyncEngineArgs

    arguments: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "float32",
        "max_num_seqs": 4 * num_sessions,
        "max_num_batched_tokens": 4096,
        "max_model_len": _MAX_MODEL_LEN,
        "block_size": BLOCK_SIZE,
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "enforce_eager": True,
        "disable_log_stats": True,
        "speculative_config": {"num_speculative_tokens": MAX_DRAFT, "method": "custom_class", "model": PROPOSER},
    }
    if scheduler is not None:
        arguments["scheduler_cls"] = scheduler
    return AsyncEngineArgs(**arguments).create_engine_config()


def open_scheduler(config: Any, num_blocks: int) -> Any:
    """The scheduler that a configuration names, as EngineCore makes it."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.float32)
    config.cache_config.num_gpu_blocks = num_blocks
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )


def add_requests(scheduler: Any, num_sessions: int) -> None:
    """One request for each session, with our terms."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    for number in range(1, num_sessions + 1):
        terms = Terms(number, SamplingParams(), _MAX_MODEL_LEN // 2, owner=b"%d" % (number % 16))
        params = VllmSamplingParams(
            temperature=0.0,
            max_tokens=terms.max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=terms.extra_args(),
        )
        prompt = [(number * 131 + i) % VOCAB_SIZE for i in range(PROMPT_TOKENS)]
        scheduler.add_request(
            Request(f"outrider-{number}", prompt, params, None, cache_salt=str(number), block_hasher=hasher)
        )


def picks_of(scheduler: Any, output: Any) -> dict[str, list[int]]:
    """What the model picks in a step: nothing for parts of prompts."""
    picks: dict[str, list[int]] = {}
    for name in output.num_scheduled_tokens:
        request = scheduler.requests[name]
        drafts = output.scheduled_spec_decode_tokens.get(name, [])
        if request.num_computed_tokens < request.num_tokens:
            picks[name] = []
            continue
        token = SUCCESSOR[request.all_token_ids[-1]]
        found = [token]
        for drafted in drafts:
            if drafted != token:
                break
            found.append(token := SUCCESSOR[token])
        picks[name] = found
    return picks


def result_of(picks: dict[str, list[int]]) -> Any:
    """The same as vLLM's workers return it."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(picks)
    return ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, [list(picks[name]) for name in names])
