"""Chooses the step sizes that vLLM captures CUDA graphs of, and tells which a configuration has.

A step of ours has 1 to 1 + max_draft tokens of each sequence, and parts of prompts. vLLM has full graphs, attention
included, for steps of any such mix only in its mode FULL, and only where the attention backend can (FlashAttention 3,
Triton). For others it takes FULL_AND_PIECEWISE by itself: a full graph where each sequence has exactly 1 + max_draft
tokens, else graphs between the attentions. All of them run a step as the next captured size, so further drafted tokens
up to it are free: `Drafting` knows the sizes. Knows no vLLM.
"""

from __future__ import annotations

from typing import Any, Final

MOST_TOKENS: Final = 512
"""Of a captured step, vLLM's own bound: the launches of a larger one take less time than its kernels."""
_STRIDES: Final = ((8, 4), (64, 8), (256, 16), (MOST_TOKENS, 32))
"""Up to so many tokens, a size each so many: padding costs less than launches, and a graph takes memory and time."""


def sizes_to_capture(max_draft: int, max_running: int, step_tokens: int) -> list[int]:
    """The sizes for steps of up to `max_running` sequences with `max_draft` drafted tokens each; ascending."""
    one = 1 + max_draft
    most = min(step_tokens, max_running * one, MOST_TOKENS)
    sizes, size = {1, 2, one, most}, 0
    for until, stride in _STRIDES:
        sizes.update(range(size + stride, until + 1, stride))
        size = until
    return sorted(size for size in sizes if size <= most)


def graph_arguments(max_draft: int, max_running: int, step_tokens: int) -> dict[str, Any]:
    """Of vLLM's AsyncEngineArgs, on CUDA. The CPU build has no graphs and wants none of it.

    max_draft: drafted tokens of a sequence and step. max_running: sequences of a step. step_tokens: its tokens.
    """
    sizes = sizes_to_capture(max_draft, max_running, step_tokens)
    return {"compilation_config": {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": sizes}}


def captured_sizes(config: Any) -> list[int]:
    """The sizes as which steps run that have a graph, ascending. config: vLLM's VllmConfig, once it is resolved.

    Nothing without graphs. vLLM's V1 runner rounds them up to multiples of 1 + max_draft where it has full graphs
    (`CompilationConfig.adjust_cudagraph_sizes_for_spec_decode`), in its workers' copy of the configuration.
    """
    compilation = config.compilation_config
    mode, sizes = compilation.cudagraph_mode, sorted(compilation.cudagraph_capture_sizes or ())
    if not mode or not sizes:
        return []
    each = 1 + int(config.num_speculative_tokens)
    if config.use_v2_model_runner or each == 1 or mode.decode_mode().name != "FULL":
        return sizes
    rounded = {-(-size // each) * each for size in sizes}
    return sorted(size for size in rounded if size <= sizes[-1]) or [each]
