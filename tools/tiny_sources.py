"""Makes tiny model directories of every family with random weights: no hub, no download, a second or less each.

The table of families is measured on them, and the tests export them. A runtime that runs them correctly is correct for
the family's arithmetic; they say nothing about how well a precision suits a trained model. Heavy packages are imported
on first use.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outrider.export.check.advice import TINY_HIDDEN, TINY_LAYERS
from outrider.export.quiet import quiet_upstream
from outrider.models.errors import ExportError

WINDOW: Final = 32
"""The sliding window of the families that have one: short, so that little text is beyond it."""

_LARGEST: Final = 2_000_000

# Text for tiny tokenizers: prose, code, digits, accents, an emoji; merges cross byte boundaries.
SAMPLE_TEXT: Final = (
    "The target's output is a pure function of the prompt, the parameters and the seed.",
    "def verify(tokens, drafts):\n    for token, draft in zip(tokens, drafts):\n        if token != draft:\n",
    "            return False\n    return True\n\n\nclass Session:\n    def __init__(self, prompt):\n",
    "0123456789 3.14159 2026-11-21 naïve café – Größe, 東京, 😀 and a tab\there",
)

# The weights are scaled up so that logits spread over several units and a wrong address shows.
_COMMON: Final[dict[str, Any]] = {
    "hidden_size": TINY_HIDDEN,
    "num_hidden_layers": TINY_LAYERS,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_ROTARY: Final = {"intermediate_size": 128, "max_position_embeddings": 512}
_GROUPED: Final = {**_ROTARY, "num_key_value_heads": 2}
_GEMMA: Final = {
    **_GROUPED,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
}
_FIELDS: Final[dict[str, dict[str, Any]]] = {
    "llama": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": {**_GROUPED, "head_dim": 16},
    # So low that a missing cap shows at once.
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 5.0},
    "gemma3_text": _GEMMA,
    "gpt_neox": _ROTARY,
    "bloom": {"tie_word_embeddings": True},
    "gpt_neo": {**_ROTARY, "window_size": WINDOW, "tie_word_embeddings": True},
    "mistral": {**_GROUPED, "sliding_window": WINDOW},
    "phi3": {**_GROUPED, "sliding_window": WINDOW},
}

# For all other families: values by name, of the names that the family's configuration has.
_SMALL: Final[dict[str, Any]] = {
    "adapter_rank": 8,
    "attention_chunk_size": WINDOW,
    "attention_head_dim": 16,
    "attention_head_size": 16,
    "attention_heads": 4,
    "attention_hidden_size": 64,
    "attention_window_size": WINDOW,
    "d_head": 16,
    "d_inner": 128,
    "d_model": 64,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 128,
    "decoder_layers": 2,
    "dff": 128,
    "dim_ff": 128,
    "dim_head": 16,
    "emb_dim": 64,
    "embedding_initializer_range": 0.15,
    "embedding_size": 64,
    "embed_init_std": 0.15,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "encoder_layers": 2,
    "expert_ffn_hidden_size": 32,
    "ffn_dim": 128,
    "ffn_hidden_size": 128,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "hidden_size": 64,
    "initializer_range": 0.15,
    "init_std": 0.15,
    "input_embedding_size": 64,
    "intermediate_size": 128,
    "is_decoder": True,
    "kv_lora_rank": 16,
    "layer_types": None,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "lru_width": 64,
    "mamba_chunk_size": 16,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "max_position_embeddings": 512,
    "max_seq_len": 512,
    "moe_intermediate_size": 32,
    "moe_num_experts": 4,
    "moe_topk": 2,
    "n_ctx": 512,
    "n_embd": 64,
    "n_group": 1,
    "n_head": 4,
    "n_heads": 4,
    "n_inner": 128,
    "n_layer": 2,
    "n_layers": 2,
    "n_positions": 512,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_layers": 2,
    "num_local_experts": 4,
    "output_embedding_size": 64,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "query_pre_attn_scalar": 16,
    "rotary_dim": 8,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "sliding_window": WINDOW,
    "topk_group": 1,
    "v_head_dim": 24,
    "word_embed_proj_dim": 64,
}
# Multi-head latent attention: as many key/value heads as heads; what is rotated is the configuration's head.
_LATENT: Final = {"num_key_value_heads": 4, "head_dim": 8}
# Positions begin behind the padding's id.
_PADDED: Final = {"pad_token_id": 1, "max_position_embeddings": 514}
_PER_LAYER: Final = {"vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 8}
_OWN: Final[dict[str, dict[str, Any]]] = {
    "camembert": _PADDED,
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0},
    "cwm": {"bos_token_id": 0},
    "data2vec-text": _PADDED,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "ernie4_5_moe": {"moe_k": 2, "moe_layer_end_index": 1},
    "gemma3n_text": {
        **_PER_LAYER,
        "altup_num_inputs": 2,
        "laurel_rank": 8,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": {**_PER_LAYER, "global_head_dim": 32},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": {**_LATENT, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 512},
    "longcat_flash": {**_LATENT, "zero_expert_num": 2},
    "modernbert-decoder": {
        "bos_token_id": 0,
        "pad_token_id": 0,
        "cls_token_id": 0,
        "sep_token_id": 0,
        "local_attention": 2 * WINDOW,
    },
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 32], "attn_layers": ["local", "lsh"]},
    "roberta": _PADDED,
    "roberta-prelayernorm": _PADDED,
    "roc_bert": {"pronunciation_embed_dim": 16, "shape_embed_dim": 16, "shape_vocab_size": 64},
    "xlm-roberta": _PADDED,
    "xlm-roberta-xl": _PADDED,
    "xmod": {**_PADDED, "default_language": "en_XX"},
    "youtu": _LATENT,
}
"""Values that a family needs besides, or otherwise."""


@dataclass(frozen=True, slots=True)
class TinyFamilies:
    """What transformers lists as language models. names: of those to build; left_out: why not, of the others."""

    names: tuple[str, ...]
    left_out: dict[str, str]


def list_tiny_families() -> TinyFamilies:
    """Every model_type of transformers' causal language models, with the well-known ones first."""
    with quiet_upstream("listing the families of transformers"):
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        left_out = {}
        for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
            if name in NO_TINY_MODEL:
                left_out[name] = NO_TINY_MODEL[name]
                continue
            config = transformers.AutoConfig.for_model(name)
            text = config.get_text_config(decoder=True)
            if config.is_encoder_decoder:
                left_out[name] = "an encoder-decoder"
            elif text is not config:
                left_out[name] = f"takes more than text; its decoder is {text.model_type}"
            elif config.model_type != name:
                left_out[name] = f"the same as {config.model_type}"
        names = [name for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if name not in left_out]
    return TinyFamilies(tuple(names), left_out)


def make_tiny_model(
    family: str,
    directory: Path,
    *,
    vocab_size: int = 96,
    seed: int = 0,
    max_parameters: int = _LARGEST,
    **overrides: Any,
) -> Path:
    """Writes a random FP32 model of `family` (a model_type of transformers) to `directory`, and returns it.

    Defaults: 2 layers, hidden 64, 4 query heads of 16, 2 key/value heads where the family has fewer, embeddings tied
    where the family ties them, 512 positions; where it slides, a window of WINDOW in every layer (Mistral, Phi-3) or in
    every other (Gemma, GPT-Neo). `overrides` are fields of the family's config, under its own names or the usual ones
    (`tie_word_embeddings=True`, `num_hidden_layers=3`, ...). Raises ExportError for more than `max_parameters`.
    """
    with quiet_upstream(f"making a tiny {family}"):
        import torch
        import transformers

        kind = type(transformers.AutoConfig.for_model(family))
        known = _FIELDS.get(family)
        fields = {"vocab_size": vocab_size} | (_shrunk(family, kind) if known is None else _COMMON | known) | overrides
        layers = range(fields.get("num_hidden_layers", 2))
        if family == "gemma3_text":
            fields.setdefault("layer_types", [("sliding_attention", "full_attention")[i % 2] for i in layers])
        if family == "gpt_neo":
            fields.setdefault("attention_types", [[[("global", "local")[i % 2]], 1] for i in layers])
        config = kind(**{kind.attribute_map.get(name, name): value for name, value in fields.items()})
        with torch.device("meta"):
            size = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).num_parameters()
        if size > max_parameters:
            raise ExportError(
                f"a {family} model of {size:,} parameters is not tiny; expected at most {max_parameters:,}"
            )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for parameter in model.parameters():
                # Biases and norms begin as zeros and ones, which hide mistakes; some routers as zeros, where all
                # experts are equally good and each device takes others.
                if parameter.dim() == 1 or not parameter.any():
                    parameter.data += 0.1 * torch.randn_like(parameter)
        model.generation_config.eos_token_id = config.eos_token_id
        directory.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(directory)
    return directory


_RECURRENT: Final = "keeps a recurrent state, which cannot be cut back to a position after a rejected draft"
NO_TINY_MODEL: Final[dict[str, str]] = {
    **dict.fromkeys(
        (
            "bamba",
            "falcon_h1",
            "falcon_mamba",
            "granitemoehybrid",
            "jamba",
            "lfm2",
            "lfm2_moe",
            "mamba",
            "mamba2",
            "minimax",
            "nemotron_h",
            "olmo_hybrid",
            "qwen3_5_moe_text",
            "qwen3_5_text",
            "qwen3_next",
            "recurrent_gemma",
            "rwkv",
            "xlstm",
            "zamba",
            "zamba2",
        ),
        _RECURRENT,
    ),
    "big_bird": "attends blocks of a whole text, not one token after the other",
    "blt": "several models for bytes and patches of bytes",
    "dbrx": "transformers cannot build its own default configuration: its attention lacks rope_theta",
    "git": "takes pictures, which cannot be left out",
    "moshi": "speaks: its text decoder has one id more for audio than its configuration says",
    "musicgen": "makes music",
    "musicgen_melody": "makes music",
    "reformer": "attends by hashes of a whole text, not one token after the other",
    "xlm": "made for filling gaps; not causal without a language id and a mask",
    "xlnet": "made for any order of tokens; its longest sequence is not bounded (-1)",
}
"""Why families that transformers lists as causal language models are not measured."""


def _shrunk(family: str, kind: Any) -> dict[str, Any]:
    """The fields of a small configuration of a family that has none of its own here."""
    named = kind().to_dict()
    fields = {name: value for name, value in _SMALL.items() if name in named}
    fields |= {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}  # 0 is the tiny tokenizer's
    if kinds := list(dict.fromkeys(named.get("layer_types") or ())):  # one layer of each kind, two at least
        fields["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
        fields["num_hidden_layers"] = len(fields["layer_types"])
    return fields | _OWN.get(family, {})


def make_tiny_tokenizer(
    directory: Path,
    *,
    vocab_size: int = 300,
    special_tokens: tuple[str, ...] = ("<|end|>",),
    chat_template: str | None = None,
    text: tuple[str, ...] = SAMPLE_TEXT,
) -> int:
    """Trains a byte-level BPE, writes it to `directory` as transformers does; returns its vocabulary size.

    `vocab_size` is an upper bound, at least 256 + the special tokens; the specials have ids 0, 1, ..., and
    the first of them is the end-of-text token. Deterministic: same arguments, same files.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special_tokens[0])
    if chat_template is not None:
        fast.chat_template = chat_template
    fast.save_pretrained(directory)
    return int(tokenizer.get_vocab_size())


def make_tiny_source(family: str, directory: Path, *, vocab_size: int = 320, seed: int = 0, **overrides: Any) -> Path:
    """Writes a whole source, tokenizer and model, for `read_source`; returns the directory.

    `vocab_size` is the model's: columns beyond the tokenizer's are padding.
    """
    make_tiny_tokenizer(directory)
    return make_tiny_model(family, directory, vocab_size=vocab_size, seed=seed, **overrides)
