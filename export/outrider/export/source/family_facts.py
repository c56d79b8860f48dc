"""Lists what is known of model families. This is no allow-list: an unknown family is exported, and its check decides.

Runtimes that are known not to run a model are refused before any work. Configurations are a decoder's facts, as
`config_reader` reads them from transformers. Knows no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

FAMILIES: Final[tuple[str, ...]] = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "bloom",
    "gpt_neo",
    "mistral",
    "phi3",
)
"""The model_type of families that the tests export: the tensors' shapes are compared with the configuration."""

# Tensor names' ends, and what their shape must be: V vocabulary, H hidden size, Q all query heads, K all key heads, F
# feed-forward, P positions, D one head. Sums are for tensors that lie in one.
SHAPES: Final[dict[str, tuple[str, ...]]] = {
    "embed_tokens.weight": ("V", "H"),
    "word_embeddings.weight": ("V", "H"),
    "embed_in.weight": ("V", "H"),
    "embed_out.weight": ("V", "H"),
    "lm_head.weight": ("V", "H"),
    "wte.weight": ("V", "H"),
    "wpe.weight": ("P", "H"),
    "q_proj.weight": ("Q", "H"),
    "k_proj.weight": ("K", "H"),
    "v_proj.weight": ("K", "H"),
    "o_proj.weight": ("H", "Q"),
    "out_proj.weight": ("H", "Q"),
    "qkv_proj.weight": ("Q+K+K", "H"),
    "query_key_value.weight": ("Q+K+K", "H"),
    "q_norm.weight": ("D",),
    "k_norm.weight": ("D",),
    "gate_proj.weight": ("F", "H"),
    "up_proj.weight": ("F", "H"),
    "gate_up_proj.weight": ("F+F", "H"),
    "down_proj.weight": ("H", "F"),
    "dense_h_to_4h.weight": ("F", "H"),
    "dense_4h_to_h.weight": ("H", "F"),
    "c_fc.weight": ("F", "H"),
    "c_proj.weight": ("H", "F"),
    "input_layernorm.weight": ("H",),
}
"""Only for the families above; others may use the same names for something else."""


MORE_THAN_TEXT: Final = "outrider_more_than_text"
"""Key for a model whose decoder is one of several parts; added to transformers' reading of a configuration."""


def runtime_obstacle(config: Mapping[str, Any], runtime: str, device: str) -> str | None:
    """Why `runtime` cannot run a model of this configuration; None if nothing is known: then its check decides."""
    family = config.get("model_type")
    is_npu = device == "npu"
    obstacles = {
        "it takes more than text, and only torch runs the decoder inside": (
            runtime != "torch" and config.get(MORE_THAN_TEXT)
        ),
        "its attention caps its logits (attn_logit_softcapping), which OpenVINO's paged attention leaves out": (
            runtime == "openvino" and not is_npu and config.get("attn_logit_softcapping")
        ),
        "it has no positions (ALiBi), which an NPU's path needs to place tokens": (
            runtime == "openvino" and is_npu and family == "bloom"
        ),
        "its attention adds ALiBi by itself, outside transformers' attention interface": (
            runtime == "torch" and family == "bloom"
        ),
        "its attention is its own, outside transformers' attention interface": (
            runtime == "torch" and family == "gpt_neo"
        ),
        "its sparse attention keeps keys of its own (index_topk), which cannot be cut back": (
            runtime == "torch" and config.get("index_topk")
        ),
    }
    return next((reason for reason, applies in obstacles.items() if applies), None)


_NUM_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def is_mixture(config: Mapping[str, Any]) -> bool:
    """Whether a model's layers choose experts for each token."""
    counts = [config.get(name) for name in _NUM_EXPERTS]
    return any(isinstance(count, int) and count > 1 for count in counts)
