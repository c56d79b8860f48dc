"""Sources looked at: every family's shape, windows, and files that are cut short or do not belong together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tokenizers
import transformers
from tests.tiny_models import copy_source, make_unknown
from tools.tiny_sources import WINDOW, make_tiny_source

from outrider.export.make.pipeline import export_model
from outrider.export.recipes import ExportOptions
from outrider.export.source import config_reader
from outrider.export.source.config_reader import read_shape
from outrider.export.source.family_facts import FAMILIES
from outrider.export.source.model_source import read_source
from outrider.export.source.torch_source import load_source_model
from outrider.export.source.weight_files import find_weight_files
from outrider.models.bundle.manifest import Architecture
from outrider.models.errors import ExportError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def config_of(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "config.json").read_text(encoding="utf-8")))


SIZES: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 32768,
    "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 320,
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_shape_is_read_from_its_own_names(family: str, tiny_source: Callable[[str], Path]) -> None:
    """As transformers counts it."""
    source = read_source(tiny_source(family))
    has_groups, is_bloom = family not in ("gpt_neox", "bloom", "gpt_neo"), family == "bloom"
    assert source.architecture == Architecture(
        name=family,
        layers=2,
        hidden_size=64,
        intermediate_size=256 if is_bloom else 128,
        heads=4,
        kv_heads=2 if has_groups else 4,
        head_size=16,
        vocab_size=320,
        tokenizer_size=300,
        max_positions=2048 if is_bloom else 512,
        parameters=sum(parameter.numel() for parameter in load_source_model(source.path).parameters()),
    )
    slides = family in ("gemma2", "gemma3_text", "gpt_neo", "mistral", "phi3")
    assert source.shape.checked_windows == ((WINDOW,) if slides else ()) and not source.shape.notes


@pytest.mark.parametrize(
    ("config", "windows", "positions"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, (), 4096),
        ({"model_type": "mistral", "sliding_window": 1024}, (1024,), 32768),
        ({"model_type": "mistral", "sliding_window": None}, (), 32768),
        ({"model_type": "mistral", "sliding_window": 40000}, (), 32768),
        ({"model_type": "mistral", "sliding_window": 2000, "use_sliding_window": False}, (), 2000),
        ({"model_type": "phi3", "sliding_window": 512, "layer_types": ["full_attention"] * 2}, (512,), 32768),
        ({"model_type": "llama", "sliding_window": 512}, (512,), 32768),
        ({"model_type": "qwen2", "sliding_window": 2000}, (), 32768),
        ({"model_type": "qwen2", "sliding_window": 512}, (512,), 32768),
        (
            {"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 1},
            (512,),
            32768,
        ),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9000, "max_window_layers": 1}, (), 9000),
        (
            {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 512, "layer_types": ["full_attention"] * 2},
            (512,),
            32768,
        ),
    ],
)
def test_a_window_is_checked_beyond_or_ends_the_sequence(
    config: dict[str, Any], windows: tuple[int, ...], positions: int, tmp_path: Path
) -> None:
    """Up to 1024 tokens the first, whether a layer uses it or not; above the second, by transformers' rule."""
    shape = read_shape(tmp_path, SIZES | config)
    assert (shape.checked_windows, shape.max_positions) == (windows, positions)


def test_what_a_config_leaves_out_is_transformers_default(tiny_source: Callable[[str], Path], tmp_path: Path) -> None:
    """Gemma's head size is 256 unless told, not hidden size over heads; then the weights do not fit."""
    path = copy_source(tiny_source("gemma3_text"), tmp_path / "model", head_dim=None)
    assert read_shape(path, config_of(path)).head_size == 256
    with pytest.raises(ExportError, match=r"has the shape \[16\], config\.json makes it \[256\]"):
        read_source(path)


def test_the_decoder_of_a_model_with_several_parts_is_nested(tiny_source: Callable[[str], Path]) -> None:
    """Its shape is that of `text_config`."""
    path = tiny_source("gemma3_text")
    text = config_of(path)
    assert read_shape(path, {"model_type": "gemma3", "text_config": text}) == read_shape(path, text)


LIES = [
    (
        "llama",
        {"hidden_size": 128},
        r"\.weight has the shape \[320, 64\], config\.json makes it \[320, 128\]",
    ),
    (
        "llama",
        {"vocab_size": 384},
        r"\.weight has the shape \[320, 64\], config\.json makes it \[384, 64\]",
    ),
    ("llama", {"num_hidden_layers": 3}, r"2 layers \(the last has the tensor .*layers\.1\..*config\.json gives 3"),
    ("llama", {"num_hidden_layers": 1}, r"2 layers .*config\.json gives 1"),
    ("llama", {"num_key_value_heads": 4}, r"k_proj\.weight has the shape \[32, 64\], config\.json makes it \[64, 64\]"),
    ("qwen3", {"head_dim": 32}, r"_norm\.weight has the shape \[16\], config\.json makes it \[32\]"),
    (
        "phi3",
        {"intermediate_size": 64},
        r"down_proj\.weight has the shape \[64, 128\], .* \[64, 64\]",
    ),
    ("phi3", {"num_key_value_heads": 4}, r"qkv_proj\.weight has the shape \[128, 64\], .* \[192, 64\]"),
    ("gpt_neox", {"hidden_size": 32}, r"has the shape .*64.*, config\.json makes it .*32"),
    ("bloom", {"n_layer": 4}, r"2 layers .*config\.json gives 4"),
    ("gpt_neo", {"max_position_embeddings": 1024}, r"wpe\.weight has the shape \[512, 64\], .* \[1024, 64\]"),
]


@pytest.mark.parametrize(("family", "lie", "message"), LIES, ids=[f"{family}-{lie}" for family, lie, _ in LIES])
def test_a_config_that_lies_about_its_shapes_is_told_from_the_headers(
    family: str, lie: dict[str, Any], message: str, tiny_source: Callable[[str], Path], tmp_path: Path
) -> None:
    """Before anything is loaded: the tensor, its shape, what it should be; the destination is left alone."""
    path, progress = copy_source(tiny_source(family), tmp_path / "model", **lie), Mock()
    with pytest.raises(ExportError, match=message):
        export_model(path, tmp_path / "out", ExportOptions("target", "fp32"), progress)
    assert not progress.called and [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_what_headers_cannot_tell_loading_does(tiny_source: Callable[[str], Path], tmp_path: Path) -> None:
    """An unknown family's other tensors, and weights that are not there, which transformers would make up."""
    made = make_unknown(tmp_path / "made", "olmo2", num_key_value_heads=2)
    unknown = copy_source(made, tmp_path / "olmo2", intermediate_size=256)
    untied = copy_source(tiny_source("gpt_neo"), tmp_path / "untied", tie_word_embeddings=False)
    other_shape = r"mlp\.\w+_proj\.weight has the shape \[\d+, \d+\], config\.json makes it \[(256, 64|64, 256)\]"
    lacking = r"the weights lack the tensor lm_head\.weight \(1 in all\)"
    for path, message in ((unknown, other_shape), (untied, lacking)):
        with pytest.raises(ExportError, match=message):
            export_model(path, tmp_path / "out", ExportOptions("target", "fp32"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kept", [0, 7, 100, 50_000, -1])
def test_a_file_that_is_cut_short_is_never_loaded(
    kept: int, tiny_source: Callable[[str], Path], tmp_path: Path
) -> None:
    """Wherever it ends, also by one byte; told from its header."""
    path = copy_source(tiny_source("llama"), tmp_path / "model")
    (path / SINGLE).write_bytes((path / SINGLE).read_bytes()[:kept])
    with pytest.raises(ExportError, match=r"model\.safetensors .*truncated.*download it again"):
        export_model(path, tmp_path / "out", ExportOptions("target", "fp32"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "header",
    [
        b"{}",
        b"[]",
        b'{"x": 3}',
        b'{"x": {"shape": [-2], "dtype": "F32", "data_offsets": [0, 0]}}',
        b"\xff\xfe",
        b"null",
        pytest.param(b"[" * 100_000, id="nested"),
    ],
)
def test_a_header_that_says_nothing_is_refused(
    header: bytes, tiny_source: Callable[[str], Path], tmp_path: Path
) -> None:
    """Whatever JSON it is, or is not."""
    path = copy_source(tiny_source("llama"), tmp_path / "model")
    (path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ExportError, match=r"truncated|no tensors"):
        read_source(path)


def test_which_files_are_the_model(tiny_source: Callable[[str], Path], tmp_path: Path) -> None:
    """Those that transformers would load, no others; where that is in doubt, none."""
    path = copy_source(tiny_source("llama"), tmp_path / "model")
    shutil.copyfile(path / SINGLE, path / "consolidated.safetensors")
    assert find_weight_files(path) == (path / SINGLE,)

    (path / INDEX).write_text('{"weight_map": {"0": "consolidated.safetensors"}}')
    with pytest.raises(ExportError, match=r"has model\.safetensors and an index of other files"):
        find_weight_files(path)
    (path / SINGLE).unlink()
    assert find_weight_files(path) == (path / "consolidated.safetensors",)
    for content in ('{"weight_map": {"0": "../model/consolidated.safetensors"}}', "[]", "[" * 100_000):
        (path / INDEX).write_text(content)
        with pytest.raises(ExportError, match="is not an index of safetensors files beside it"):
            find_weight_files(path)
    (path / INDEX).unlink()
    with pytest.raises(ExportError, match=r"neither model\.safetensors nor"):
        find_weight_files(path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"is_encoder_decoder": True}, "expected a decoder"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "longrope rotary scaling"),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}},
            r"is a 'own' model .*the code that comes with it \(auto_map in config\.json\) is never run; choose",
        ),
        ({"model_type": "distilbert"}, "is a 'distilbert' model, an encoder: it generates no text"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is beyond 10,000"),
        (
            {"model_type": "gemma3", "vision_config": {"num_hidden_layers": 10**12}},
            "num_hidden_layers is beyond 10,000",
        ),
        ({"parts": [{"text_config": {"n_layer": 10**12}}]}, "n_layer is beyond 10,000"),
        # Said without building it.
        ({"model_type": "clip", "vision_config": "x"}, "is a 'clip' model, no language model"),
        # Sizes that are none.
        ({"hidden_size": "64"}, "hidden_size is '64'; expected a positive whole number"),
        ({"hidden_size": True}, "hidden_size is True; expected a positive whole number"),
        ({"hidden_size": 0}, "hidden_size is 0; expected a positive whole number"),
    ],
)
def test_what_no_runtime_does_rightly_is_refused(
    config: dict[str, Any], message: str, tiny_source: Callable[[str], Path], tmp_path: Path
) -> None:
    """Also where it is said for one kind of layer only."""
    with pytest.raises(ExportError, match=message):
        read_source(copy_source(tiny_source("llama"), tmp_path / "model", **config))


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("bert", {"is_decoder": False}, r"is an encoder \(is_decoder is false\)"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attends both ways"),
    ],
)
def test_a_model_whose_earlier_logits_depend_on_later_tokens_is_named(
    family: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Before anything is converted; the message gives no advice, because no runtime would help."""
    source = read_source(make_tiny_source(family, tmp_path / "model", **fields))
    with pytest.raises(ExportError, match=message) as refused:
        export_model(source.path, tmp_path / "out", ExportOptions("draft", "fp32"))
    assert "--runtime" not in str(refused.value) and not (tmp_path / "out").exists()


def test_fields_that_a_family_does_not_read_are_ignored(tmp_path: Path) -> None:
    """GPT-NeoX has no grouped heads; Gemma 2 makes its kinds of layers itself where config.json names none."""
    neox = make_tiny_source("gpt_neox", tmp_path / "neox")
    gemma = make_tiny_source("gemma2", tmp_path / "gemma2", sliding_window=80)
    stray = copy_source(neox, tmp_path / "stray", num_key_value_heads=2)
    none = copy_source(gemma, tmp_path / "none", layer_types=None)
    for path in (stray, none):
        read_source(path)
    shapes = [read_shape(path, config_of(path)) for path in (neox, stray, gemma, none)]
    assert shapes[0] == shapes[1] and shapes[2] == shapes[3] and shapes[3].checked_windows == (80,)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        (
            "config.json",
            {"eos_token_id": 400},
            r"config\.json eos_token_id is 400, outside .* of 320; expected 0 to 319",
        ),
        ("config.json", {"eos_token_id": [1, 320]}, r"config\.json eos_token_id\[1\] is 320, outside"),
        ("config.json", {"bos_token_id": 999}, "bos_token_id is 999, outside"),
        ("config.json", {"pad_token_id": 320}, "pad_token_id is 320, outside"),
        ("config.json", {"decoder_start_token_id": 320}, "decoder_start_token_id is 320, outside"),
        ("config.json", {"eos_token_id": "2"}, "eos_token_id is '2'; expected token ids or null"),
        ("config.json", {"eos_token_id": [True]}, r"eos_token_id is \[True\]; expected token ids or null"),
        ("config.json", {"bos_token_id": -1}, "bos_token_id is -1; expected token ids or null"),
        ("config.json", {"pad_token_id": 1.5}, r"pad_token_id is 1\.5; expected token ids or null"),
        (
            "generation_config.json",
            {"eos_token_id": [2, 400]},
            r"generation_config\.json eos_token_id\[1\] is 400, out",
        ),
        ("generation_config.json", [], r"generation_config\.json holds no JSON object"),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused_before_work(
    file: str, fields: Any, message: str, tiny_source: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of every special token, in both files; -1 for padding is an old way to write none."""
    path = copy_source(tiny_source("llama"), tmp_path / "model", pad_token_id=-1)
    assert read_source(path).tokenizer.eos_token_ids == (0,)
    before = json.loads((path / file).read_text(encoding="utf-8"))
    content = before | fields if isinstance(fields, dict) else fields
    (path / file).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ExportError, match=message):
        read_source(path)


@pytest.mark.parametrize(
    "family",
    [
        *("mamba", "mamba2", "falcon_mamba", "jamba", "zamba2", "bamba", "recurrent_gemma", "rwkv"),
        *("lfm2", "minimax", "qwen3_next", "granitemoehybrid", "nemotron_h", "falcon_h1"),
    ],
)
def test_a_running_state_is_refused_by_its_name(family: str, tmp_path: Path) -> None:
    """State-space, recurrent and hybrid models: nothing can take a rejected token out of their state."""
    fields = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]} if family == "lfm2" else {}
    transformers.AutoConfig.for_model(family, **fields).save_pretrained(tmp_path)
    with pytest.raises(ExportError, match=rf"'{family}' model, which keeps a running state.*; choose a model whose"):
        read_shape(tmp_path, config_of(tmp_path))


def test_feed_forward_sizes_of_each_layer_are_read(tmp_path: Path) -> None:
    """Gemma 3n lists them; the largest is reported."""
    config = transformers.Gemma3nTextConfig(num_hidden_layers=20, intermediate_size=[64, 128] * 10)
    config.save_pretrained(tmp_path)
    assert read_shape(tmp_path, config_of(tmp_path)).intermediate_size == 128
    with pytest.raises(ExportError, match=r"intermediate_size is 'x'; expected a positive whole number"):
        config_reader._feed_forward(tmp_path, {"intermediate_size": [64, "x"]}, 64)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3_text"])
@pytest.mark.parametrize("lie", ["x", [], [1], {"a": 1}, -1, 1.5, True, None, 0, 10**12])
def test_whatever_a_config_says_there_is_no_traceback(
    family: str, lie: Any, tiny_source: Callable[[str], Path], tmp_path: Path
) -> None:
    """Every field in turn, and some of other families, with an unexpected type: read, or refused with a message."""
    source = tiny_source(family)
    fields = config_of(source)
    others = ("text_config", "rope_scaling", "num_nextn_predict_layers", "sliding_window", "layer_types", "head_dim")
    refused = set()
    for index, name in enumerate(dict.fromkeys((*fields, *others))):
        path = copy_source(source, tmp_path / str(index), **{name: lie})
        try:
            assert read_source(path).runtime_config
        except ExportError:
            refused.add(name)
    sizes = {"hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings"}
    if lie not in (None, 0, True, 10**12):
        assert sizes | {"num_key_value_heads"} & fields.keys() <= refused
    assert lie != "x" or {"text_config", "rope_scaling"} <= refused


def test_added_tokens_beyond_the_vocabulary_are_left_out(tiny_source: Callable[[str], Path], tmp_path: Path) -> None:
    """Gemma 3's text models have one for images; any other id beyond it is of another model's tokenizer."""
    path = copy_source(tiny_source("gemma3_text"), tmp_path / "model")
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.add_special_tokens([f"<{index}>" for index in range(21)])
    backend.save(str(path / "tokenizer.json"))
    source = read_source(path)
    assert (source.tokenizer.size, source.architecture.tokenizer_size) == (320, 320)
    assert source.tokenizer.token_id("<19>") == 319 and source.tokenizer.token_id("<20>") is None
    raw = json.loads(backend.to_str())
    raw["model"]["vocab"]["another"] = 320
    (path / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(ExportError, match="the tokenizer has 321 ids, the model only 320"):
        read_source(path)


def test_an_adapter_is_no_model(tiny_source: Callable[[str], Path], tmp_path: Path) -> None:
    """It would be left out without a word."""
    path = copy_source(tiny_source("llama"), tmp_path / "model")
    (path / "adapter_config.json").write_text("{}", encoding="utf-8")
    for _ in range(2):
        with pytest.raises(ExportError, match="merge the two first"):
            read_source(path)
        (path / "config.json").unlink(missing_ok=True)  # many have none
