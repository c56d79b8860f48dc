"""Exports models of families whose configurations were once misread, and measures each bundle against its source.

    python -m bench.odd_configurations [--before .venv/bin/python]

Every configuration is a tiny random model with FP32 weights. The error is the largest difference of a logit from
transformers' eager FP32 model, in standard deviations of its logits, over one sequence that goes past every window, up
to the last position. It is measured by this script in the bundle's runtime, whatever the exporter's own check said.
`--before` is the interpreter of another checkout, whose exporter makes the same bundles for comparison.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
from bench.report import write_json
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from tools.tiny_sources import make_tiny_source

from outrider.export.check.parity import BatchSteps, SequenceSteps
from outrider.export.source.torch_source import load_source_model, source_logits
from outrider.models.bundle.bundle import Bundle
from outrider.models.errors import BundleError
from outrider.models.runtimes import open_batch_runtime, open_sequence_runtime, sequence_kind
from outrider.models.runtimes.base import RuntimeOptions

_LONGEST: Final = 200
"""Tokens of the measured sequence, where the bundle takes as many."""
_ORT: Final = ("draft", "--runtime", "onnxruntime", "--precision", "fp32")
_VINO: Final = ("draft", "--runtime", "openvino", "--precision", "fp32")
_TORCH: Final = ("target", "--runtime", "torch", "--precision", "fp32")
_PAGED: Final = ("target", "--runtime", "openvino", "--precision", "fp32")
_ALL: Final = (_ORT, _VINO, _TORCH, _PAGED)
_SHORT: Final = ("--max-positions", "64")


def _scaled(kind: str, where: str = "inside") -> dict[str, Any]:
    """Phi-3 with rotary factors beyond 64 positions."""
    rope = {"type": kind, "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [4.0] * 8}
    inside = {"original_max_position_embeddings": 64} if where == "inside" else {}
    return {"rope_parameters": None, "rope_scaling": rope | inside, "original_max_position_embeddings": 64}


@dataclass(frozen=True, slots=True)
class Configuration:
    """One source. made: fields that the weights are made with. written: of config.json afterwards; None removes one."""

    family: str
    made: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)
    ways: tuple[tuple[str, ...], ...] = _ALL
    more: tuple[str, ...] = ()


_DYNAMIC: Final = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
CONFIGURATIONS: Final = {
    "mistral, use_sliding_window false": Configuration(
        "mistral", {"sliding_window": 80}, {"use_sliding_window": False}
    ),
    "phi3, use_sliding_window false": Configuration("phi3", {"sliding_window": 80}, {"use_sliding_window": False}),
    "phi3, layer_types all full": Configuration(
        "phi3", {"sliding_window": 80}, {"layer_types": ["full_attention"] * 2}
    ),
    "mistral, layer_types mixed": Configuration(
        "mistral", {"sliding_window": 80}, {"layer_types": ["sliding_attention", "full_attention"]}
    ),
    "gemma2, no attn_logit_softcapping": Configuration(
        "gemma2", {"attn_logit_softcapping": 50.0}, {"attn_logit_softcapping": None}
    ),
    "gemma2, no layer_types": Configuration("gemma2", {"sliding_window": 80}, {"layer_types": None}),
    "phi3, longrope": Configuration("phi3", {"sliding_window": None}, _scaled("longrope"), more=_SHORT),
    "phi3, su, top-level original length": Configuration(
        "phi3", {"sliding_window": None}, _scaled("su", "outside"), more=_SHORT
    ),
    "phi3, yarn": Configuration("phi3", {"sliding_window": None}, _scaled("yarn"), more=_SHORT),
    "hunyuan, dynamic with alpha": Configuration(
        "hunyuan_v1_dense", {"head_dim": 16, "rope_parameters": _DYNAMIC | {"alpha": 1000.0}}
    ),
    "llama, dynamic": Configuration("llama", {"rope_parameters": _DYNAMIC}),
    "gpt_neox, num_key_value_heads 2": Configuration("gpt_neox", {}, {"num_key_value_heads": 2}),
    "llama, 40 positions": Configuration("llama", {"max_position_embeddings": 40}),
    "llama, auto_map of another family": Configuration(
        "llama", {}, {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, (_VINO,)
    ),
    "bert, an encoder": Configuration("bert", {"is_decoder": False}, {}, (_ORT, _VINO, _TORCH)),
    "gemma3_text, bidirectional": Configuration(
        "gemma3_text", {"use_bidirectional_attention": True}, {}, (_ORT, _VINO, _TORCH)
    ),
    "falcon": Configuration("falcon"),
    "mpt": Configuration("mpt"),
    "nemotron": Configuration("nemotron"),
    "modernbert-decoder": Configuration("modernbert-decoder"),
}


def main(
    before: Annotated[Path | None, typer.Option(help="interpreter of a checkout to compare with")] = None,
    only: Annotated[str, typer.Option(help="configurations whose names contain this")] = "",
    json_path: Annotated[Path | None, typer.Option("--json", help="also write the figures here")] = None,
) -> None:
    """Exports each configuration in each of its ways."""
    pythons = ({"before": before} if before is not None else {}) | {"after": Path(sys.executable)}
    columns = [f"{name}: {what}" for name in pythons for what in ("error", "message")]
    table = Table("configuration", "way", *columns, title="largest error of a logit, in standard deviations")
    rows: list[dict[str, Any]] = []
    for name, configuration in CONFIGURATIONS.items():
        if only not in name:
            continue
        with tempfile.TemporaryDirectory() as root:
            source = _make(configuration, Path(root) / "model")
            for way in configuration.ways:
                results = {}
                for label, python in pythons.items():
                    more = configuration.more if label == "after" else ()
                    results[label] = _export(python, source, Path(root) / f"{label}-{'-'.join(way)}", (*way, *more))
                rows.append({"configuration": name, "way": " ".join(way)} | results)
                shown = [str(part) for result in results.values() for part in (result["error"], result["said"])]
                table.add_row(name, f"{way[0]} {way[2]}", *shown)
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    Console(width=200).print(table)
    if json_path is not None:
        write_json(json_path, {"rows": rows})


def _make(configuration: Configuration, directory: Path) -> Path:
    source = make_tiny_source(configuration.family, directory, **configuration.made)
    path = source / "config.json"
    fields = json.loads(path.read_text(encoding="utf-8")) | configuration.written
    kept = {key: value for key, value in fields.items() if configuration.written.get(key, 0) is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")
    return source


def _export(python: Path, source: Path, out: Path, way: tuple[str, ...]) -> dict[str, Any]:
    role, *others = way
    command = [str(python), "-m", "outrider.export.cli", role, str(source), "--out", str(out), "--threads", "1"]
    command += others
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    shown = " ".join(ended.stderr.split()).replace(str(source), source.name)
    if ended.returncode:
        return {"error": "refused", "said": shown[-400:]}
    expected, found = _logits(source, out)
    rows = np.abs(found - expected).max(axis=1) / expected.std()
    return {"error": f"{rows.max():.1e}", "said": f"{len(rows)} rows" + _opens(out)}


def _opens(bundle: Path) -> str:
    """Whether today's Outrider takes the bundle, where it does not."""
    try:
        Bundle.open(bundle)
    except BundleError as error:
        return f"; now refused: {str(error).replace(str(bundle), 'bundle')}"
    return ""


def _logits(source: Path, directory: Path) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The source's and the bundle's logits after every token of one sequence, [n, vocab_size]."""
    manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
    length = min(_LONGEST, manifest["architecture"]["max_positions"])
    tokens = np.random.default_rng(0).integers(1, 300, length).tolist()
    model = {"openvino-ir": "*.xml", "onnx": "*.onnx"}.get(manifest["format"])
    path = next(directory.glob(model)) if model is not None else directory
    options = RuntimeOptions(num_threads=1, properties={"dtype": "f32"} if model is None else {})
    if manifest["role"] == "draft":
        kind = sequence_kind(manifest["runtime"], manifest["device"])
        with closing(open_sequence_runtime(kind, path, options)) as draft:
            found = SequenceSteps(draft).run(tokens, length).copy()  # type: ignore[arg-type]  # it gives all rows
    else:
        with closing(open_batch_runtime(manifest["runtime"], path, options)) as target:
            found = BatchSteps(target).run(tokens, length).copy()
    return source_logits(load_source_model(source), tokens), found


if __name__ == "__main__":
    typer.run(main)
