"""Makes tiny Hugging Face directories with random weights for tests, with `tools.tiny_sources`, and their IR.

`export_openvino` and `compress_int8` make the IR with upstream tools only. Heavy packages are imported on first use.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.tiny_sources import SAMPLE_TEXT, make_tiny_model, make_tiny_tokenizer

if TYPE_CHECKING:
    from outrider.export.make.pair import PairPaths

__all__ = [
    "CHAT_TEMPLATE",
    "FAMILIES",
    "SAMPLE_TEXT",
    "ChatPair",
    "compress_int8",
    "copy_source",
    "export_openvino",
    "make_chat_pair",
    "make_chat_target",
    "make_tiny_model",
    "make_tiny_tokenizer",
    "make_unlike_pair",
]

FAMILIES = ("llama", "qwen2", "qwen3")
"""The families in the tests of the runtimes; test_export_families exports all of `tools.tiny_sources`."""


CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""ChatML's form: roles are tokens of their own, and the end token ends each turn."""


@dataclass(frozen=True, slots=True)
class ChatPair:
    """Bundles of a pair with a chat template: draft and target are the same INT8 model, with random weights."""

    draft: Path
    target: Path


def make_chat_pair(directory: Path) -> ChatPair:
    """Makes and exports a tiny pair that can chat, in some seconds. For verifiers that wait for drafts."""
    from outrider.export.make.pipeline import export_model
    from outrider.export.recipes import ExportOptions

    target = make_chat_target(directory / "source", directory / "target", widen_mb=10.0)
    return ChatPair(export_model(directory / "source", directory / "draft", ExportOptions("draft")).path, target)


def make_chat_target(source: Path, directory: Path, widen_mb: float = 150.0) -> Path:
    """Makes a tiny model that can chat in `source`, and exports it as a target.

    It is widened: its steps are long enough that a verifier waits for drafts, also on a busy machine.
    """
    from outrider.export.make.pipeline import export_model
    from outrider.export.recipes import ExportOptions

    roles = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
    make_tiny_tokenizer(source, special_tokens=roles, chat_template=CHAT_TEMPLATE)
    make_tiny_model("llama", source, vocab_size=320, eos_token_id=0)
    return export_model(source, directory, ExportOptions("target", "fp32", widen_mb=widen_mb)).path


def make_unknown(directory: Path, model_type: str, *, seed: int = 0, **fields: Any) -> Path:
    """A complete tiny source of a family that `outrider.export.source.family_facts` does not know."""
    import torch
    import transformers

    size = make_tiny_tokenizer(directory)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(
        model_type, vocab_size=size, bos_token_id=None, eos_token_id=None, pad_token_id=None, **(sizes | fields)
    )
    torch.manual_seed(seed)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


def export_openvino(model_dir: Path, directory: Path) -> Path:
    """Exports a Hugging Face directory as stateful FP32 OpenVINO IR to `directory`, and returns it."""
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    with warnings.catch_warnings():
        # Tracing warns about every shape-dependent branch of the upstream model code.
        warnings.simplefilter("ignore")
        main_export(
            str(model_dir),
            output=directory,
            task="text-generation-with-past",
            ov_config=OVConfig(dtype="fp32"),
            convert_tokenizer=False,
        )
    return directory


def compress_int8(ir: Path, directory: Path) -> Path:
    """Writes a copy of an IR directory with INT8 weights (symmetric, per channel) to `directory`, and returns it."""
    import nncf
    import openvino

    directory.mkdir(parents=True, exist_ok=True)
    model = nncf.compress_weights(
        openvino.Core().read_model(ir / "openvino_model.xml"), mode=nncf.CompressWeightsMode.INT8_SYM
    )
    openvino.save_model(model, directory / "openvino_model.xml", compress_to_fp16=False)
    (directory / "config.json").write_bytes((ir / "config.json").read_bytes())
    return directory


if __name__ == "__main__":  # a directory to try things with: python tests/tiny_models.py qwen2 /tmp/tiny
    make_tiny_model(sys.argv[1], Path(sys.argv[2]), vocab_size=make_tiny_tokenizer(Path(sys.argv[2])))


def make_unlike_pair(root: Path) -> PairPaths:
    """A Qwen3 draft and a Llama target with one tokenizer and embeddings of different padding."""
    from outrider.export.make.pair import PairPaths

    for name, family, width in (("draft", "qwen3", 384), ("target", "llama", 320)):
        make_tiny_tokenizer(root / name)
        make_tiny_model(family, root / name, vocab_size=width)
    return PairPaths(root / "draft", root / "target")


def copy_source(source: Path, target: Path, **config: Any) -> Path:
    """A copy whose config.json has other values (None removes one)."""
    shutil.copytree(source, target)
    raw = json.loads((target / "config.json").read_text(encoding="utf-8")) | config
    kept = {key: value for key, value in raw.items() if value is not None or key not in config}
    (target / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    return target
