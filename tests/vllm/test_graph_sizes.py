"""vLLM's own dispatchers, without a GPU: every step of ours runs as the captured size that the chooser reckons with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import CUDAGraphMode
from vllm.config.compilation import CompilationConfig
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from outrider.cloud.vllm.graph_sizes import captured_sizes, graph_arguments

MAX_DRAFT, MAX_RUNNING, NUM_SLOTS = 16, 32, 128


def config_of(*, is_v2: bool, support: AttentionCGSupport) -> Any:
    """What vLLM makes of our arguments on CUDA, as far as graphs go: its own classes resolve them."""
    given_arguments = graph_arguments(MAX_DRAFT, MAX_RUNNING, 2048)["compilation_config"]
    compilation = CompilationConfig(**given_arguments)
    compilation.max_cudagraph_capture_size = compilation.cudagraph_capture_sizes[-1]
    compilation.splitting_ops = list(compilation._attention_ops)  # as `set_splitting_ops_for_v1`
    config = SimpleNamespace(
        compilation_config=compilation,
        num_speculative_tokens=MAX_DRAFT,
        use_v2_model_runner=is_v2,
        lora_config=None,
        speculative_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=NUM_SLOTS),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )
    config.sizes = captured_sizes(config)  # the scheduler's process has no more than this
    compilation.resolve_cudagraph_mode_and_sizes(support, "test", 1 + MAX_DRAFT, use_v2_model_runner=is_v2)
    return config


def v2_manager(config: Any) -> CudaGraphManager:
    """The V2 runner's dispatcher as if all its graphs were captured."""
    manager = CudaGraphManager.__new__(CudaGraphManager)
    manager.vllm_config, manager.compilation_config = config, config.compilation_config
    manager.max_num_reqs, manager.decode_query_len = NUM_SLOTS, 1 + MAX_DRAFT
    manager.cudagraph_mode = config.compilation_config.cudagraph_mode
    manager.varlen_decode, manager.ubatch_runner = False, None
    manager.lora_capture_cases, manager._lora_dispatch_map, manager._max_lora_case = [0], {}, 0
    manager._candidates, manager._capture_descs = {}, {}
    manager._graphs_captured = True
    manager._init_candidates()
    return manager


steps = st.lists(st.integers(1, 1 + MAX_DRAFT), min_size=1, max_size=MAX_RUNNING)


def expected(config: Any, num_tokens: int) -> int | None:
    return next((size for size in config.sizes if size >= num_tokens), None)


@given(steps)
@settings(max_examples=200, deadline=None)
def test_v2_has_a_full_graph_for_every_mix_where_the_attention_can(lengths: list[int]) -> None:
    """FlashAttention 3 and Triton: attention is captured, too, whatever each sequence verifies."""
    config = config_of(is_v2=True, support=AttentionCGSupport.ALWAYS)
    found = v2_manager(config).dispatch(len(lengths), sum(lengths), None, 0, max(lengths))
    size = expected(config, sum(lengths))
    assert (found.cg_mode, found.num_tokens) == (
        (CUDAGraphMode.FULL, size) if size else (CUDAGraphMode.NONE, sum(lengths))
    )


@given(steps)
@settings(max_examples=200, deadline=None)
def test_v2_has_piecewise_graphs_of_the_same_sizes_elsewhere(lengths: list[int]) -> None:
    """FlashAttention 2 and FlashInfer: vLLM falls back by itself, and the step's size is the same."""
    config = config_of(is_v2=True, support=AttentionCGSupport.UNIFORM_BATCH)
    assert config.compilation_config.cudagraph_mode is CUDAGraphMode.FULL_AND_PIECEWISE
    uniform = lengths[0] if len(set(lengths)) == 1 else None
    found = v2_manager(config).dispatch(len(lengths), sum(lengths), uniform, 0, max(lengths))
    size = expected(config, sum(lengths))
    if uniform == 1 + MAX_DRAFT and size:
        assert found.cg_mode is CUDAGraphMode.FULL and found.num_tokens <= max(size, sum(lengths))
    elif size:
        assert (found.cg_mode, found.num_tokens) == (CUDAGraphMode.PIECEWISE, size)


@pytest.mark.parametrize("support", [AttentionCGSupport.ALWAYS, AttentionCGSupport.UNIFORM_BATCH])
@given(lengths=steps)
@settings(max_examples=100, deadline=None)
def test_v1_rounds_its_sizes(support: AttentionCGSupport, lengths: list[int]) -> None:
    """To multiples of 1 + max_draft, in the workers only: the scheduler's process reckons with that."""
    config = config_of(is_v2=False, support=support)
    dispatcher = CudagraphDispatcher.__new__(CudagraphDispatcher)
    dispatcher.vllm_config, dispatcher.compilation_config = config, config.compilation_config
    dispatcher.uniform_decode_query_len, dispatcher.specialize_lora_count = 1 + MAX_DRAFT, False
    dispatcher.cudagraph_keys = {CUDAGraphMode.PIECEWISE: set(), CUDAGraphMode.FULL: set()}
    dispatcher.initialize_cudagraph_keys(config.compilation_config.cudagraph_mode, 1 + MAX_DRAFT)
    is_uniform = set(lengths) == {1 + MAX_DRAFT}
    mode, found = dispatcher.dispatch(sum(lengths), uniform_decode=is_uniform)
    size = expected(config, sum(lengths))
    assert found.num_tokens == (size or sum(lengths)) and (mode is CUDAGraphMode.NONE) == (size is None)


def test_without_graphs_there_are_no_sizes() -> None:
    """As on the CPU build, or with enforce_eager."""
    config = config_of(is_v2=True, support=AttentionCGSupport.ALWAYS)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    assert captured_sizes(config) == []
