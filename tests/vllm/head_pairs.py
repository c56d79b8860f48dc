"""Makes small targets with heads of their own that are exact: no training, and passes can be counted.

The next token of such a target depends on its last one only, because its layers add nothing to the embeddings. So do
its heads, and the two agree wherever a token is the likeliest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.serving import EOS_ID, fake_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from outrider.cloud.vllm.heads import MTP

_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": None,
}


def make_eagle(root: Path) -> str:
    """A Llama in `root`, and its EAGLE head: how vLLM is given it."""
    sizes = {"vocab_size": fake_tokenizer().size, **_SIZES}
    model = _silenced(LlamaForCausalLM(LlamaConfig(**sizes)))
    model.save_pretrained(root)
    layer = {f"layers.0.{name}": weight for name, weight in _empty(model.model.layers[0]).items()}
    del layer["layers.0.input_layernorm.weight"]  # EAGLE has none in its first layer
    head = root / "head"
    head.mkdir()
    save_file({"fc.weight": _second_half(of=0), **layer}, head / "model.safetensors")
    own = {"num_hidden_layers": 1, "model_type": "llama", "architectures": ["EagleLlamaForCausalLM"]}
    (head / "config.json").write_text(json.dumps({**sizes, **own, "dtype": "float32"}))
    return str(head)


def make_mtp(root: Path) -> str:
    """A Qwen2 in `root` with an MTP layer among its weights, as MiMo has it."""
    config = Qwen2Config(vocab_size=fake_tokenizer().size, **_SIZES)
    model = _silenced(Qwen2ForCausalLM(config))
    prefix, ones = "model.mtp_layers.0.", torch.ones(config.hidden_size)
    weights = dict(model.state_dict())
    weights |= {f"{prefix}{name}": weight for name, weight in _empty(model.model.layers[0]).items()}
    weights |= {f"{prefix}{name}_layernorm.weight": ones for name in ("token", "hidden", "final")}
    weights[f"{prefix}input_proj.weight"] = _second_half(of=1)
    save_file({name: weight.clone() for name, weight in weights.items()}, root / "model.safetensors")
    own = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1, "dtype": "float32"}
    (root / "config.json").write_text(json.dumps(config.to_dict() | own))
    return MTP


def _silenced(model: Any) -> Any:
    """The model, its weights drawn anew, with layers that add nothing."""
    torch.manual_seed(5)
    model.init_weights()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model.to(torch.float32)


def _empty(layer: Any) -> dict[str, torch.Tensor]:
    """A layer's weights that add nothing."""
    return {
        name: torch.ones_like(weight) if "norm" in name else torch.zeros_like(weight)
        for name, weight in layer.state_dict().items()
    }


def _second_half(of: int) -> torch.Tensor:
    """A projection [H, 2 H] that passes one of two halves on: the embedding of the token before."""
    eye = torch.eye(_SIZES["hidden_size"])
    return torch.cat([eye * (half == of) for half in range(2)], 1)
