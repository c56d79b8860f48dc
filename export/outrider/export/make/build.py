"""From a source to a model's files, one way a runtime. Expensive stages go through the work store.

No stage holds the source beside more than its own result: it is loaded when a stage needs it and let go before the
result is quantized.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from outrider.export.check.parity import PARITY_TEXT, QUANTIZED
from outrider.export.check.source_logits import LoadedSource, Truth, held_out_texts
from outrider.export.convert.openvino_ir import IR_NAME, convert_to_ir, finish_ir
from outrider.export.convert.safetensors_cast import cast_weights
from outrider.export.disk import require_room
from outrider.export.make.sizes import converted_bytes, finished_bytes, truth_bytes
from outrider.export.make.stage_store import StageStore
from outrider.export.progress import Progress, StageEvent
from outrider.export.recipes import ExportOptions
from outrider.export.source.model_source import SourceModel
from outrider.models.manifest import Quantization, Source

PACKAGES: Final = (
    "openvino",
    "optimum",
    "optimum-intel",
    "nncf",
    "torch",
    "transformers",
    "numpy",
    "onnx",
    "onnx-ir",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-genai",
)


@dataclass(frozen=True, slots=True)
class Job:
    """One model to build. origin: what identifies its weights. directory: where its files go. scratch: for stages."""

    source: SourceModel
    origin: Source
    directory: Path
    scratch: Path
    options: ExportOptions
    store: StageStore
    progress: Progress
    loaded: LoadedSource = field(init=False)

    def __post_init__(self) -> None:
        loaded = LoadedSource(self.source, lambda: self.tell("load"))
        object.__setattr__(self, "loaded", loaded)  # frozen, and made of the other fields

    def tell(self, stage: str) -> None:
        """Says that a stage begins."""
        self.progress(StageEvent(self.options.role, stage))

    def require_room(self, staging: Path, *more_bytes: float) -> None:
        """Raises DiskFull if there is no room for the bundle, or at `staging` for the converted model and more."""
        # Unquantized ONNX is the converted model itself, linked where the disk is the same.
        is_linked = self.options.resolved_runtime == "onnxruntime" and self.options.resolved_precision not in QUANTIZED
        bundle = 0.0 if is_linked else finished_bytes(self.source, self.options)
        staged = converted_bytes(self.source, self.options) + sum(more_bytes)
        require_room((staging.parent, staged), (self.directory.parent, bundle))

    def key(self, stage: str, **more: Any) -> dict[str, Any]:
        """What decides the result of a stage: the source, the versions of what makes it, and `more`."""
        return {
            "stage": stage,
            "source": self.origin.weights_sha256,
            "tokenizer": self.source.tokenizer.fingerprint,
            "versions": package_versions(),
            **more,
        }


def build(job: Job) -> tuple[Truth, Quantization | None]:
    """Puts the model's files into `job.directory`; returns what the source says, for the checks, and how weights were
    quantized.
    """

    def tell_truth(directory: Path) -> None:
        # For what follows too: not after minutes of loading.
        job.require_room(directory, truth_bytes(job.source))
        job.loaded.tell_truth().save(directory)

    texts = [PARITY_TEXT, *(list(text) for text in held_out_texts(job.source))]
    place = job.store.get(job.key("truth", texts=texts), tell_truth)
    match job.options.resolved_runtime:
        case "openvino":
            quantization = _build_openvino(job)
            _compile_ahead(job)
        case "onnxruntime":
            quantization = _build_onnx(job)
        case "torch":
            job.loaded.let_go()
            job.tell("convert")
            cast_weights(job.source.weight_files, job.directory, job.options.resolved_precision)
            quantization = None
    return Truth.load(place), quantization


def build_twin(job: Job) -> Path | None:
    """The same graph unquantized, in a folder of its own: it shows errors that hide in the noise of quantization.

    None where nothing is quantized.
    """
    if job.options.resolved_precision not in QUANTIZED:
        return None
    graph = _ir(job) if job.options.resolved_runtime == "openvino" else _onnx_graph(job)
    twin = job.scratch / "twin"
    twin.mkdir()
    place_files(graph, twin)
    return twin


def _ir(job: Job) -> Path:
    """The FP32 IR."""

    def convert(directory: Path) -> None:
        job.require_room(directory)
        model = job.loaded.model()
        job.tell("convert")
        convert_to_ir(model, directory, job.source.name)

    ir = job.store.get(job.key("ir"), convert)
    job.loaded.let_go()
    return ir


def _build_openvino(job: Job) -> Quantization | None:
    ir = _ir(job)
    options = job.options
    if options.resolved_precision == "w8a8":
        from outrider.export.convert.calibration import quantize_fully

        job.tell("calibrate")
        # The model writes the text itself, so that none of the held-out texts is spent on what they are to judge.
        bos = job.source.tokenizer.bos_token_id
        quantize_fully(ir, job.directory, [] if bos is None else [[bos]], job.source.name)
        return Quantization(tool=_tool("nncf"), scheme="w8a8", granularity="row, activations per tensor")
    if options.resolved_precision not in ("fp32", "fp16"):
        job.tell("quantize")
    return finish_ir(ir, job.directory, job.source.name, options.resolved_precision, options.device)


def _compile_ahead(job: Job) -> None:
    """Puts an NPU's blob beside the IR, if it was asked for."""
    shapes = job.options.resolved_shapes
    if not job.options.compiles_ahead or shapes is None:
        return
    from outrider.export.convert.ahead_of_time import compile_ahead

    job.tell("compile")
    compile_ahead(job.directory / f"{IR_NAME}.xml", shapes, job.directory, platform=job.options.npu_platform)


def _build_onnx(job: Job) -> Quantization | None:
    precision, graph = job.options.resolved_precision, _onnx_graph(job)
    if precision == _wide_precision(job):
        place_files(graph, job.directory)
        return None
    from outrider.export.convert.onnx_builder import CONFIG_FILE
    from outrider.export.convert.onnx_quantize import quantize_weights

    assert precision in ("int8", "int4")
    job.tell("quantize")
    quantize_weights(graph / "model.onnx", job.directory, 8 if precision == "int8" else 4)
    if (graph / CONFIG_FILE).is_file():
        shutil.copyfile(graph / CONFIG_FILE, job.directory / CONFIG_FILE)
    granularity = "block of 32" if precision == "int8" else "block of 32, LM head in int8"
    return Quantization(tool=_tool("onnxruntime"), scheme=f"{precision} symmetric", granularity=granularity)


def _wide_precision(job: Job) -> Literal["fp32", "fp16"]:
    """Of the graph before it is quantized: for CUDA FP16, as attention there has no FP32 kernel."""
    return "fp16" if job.options.device == "gpu" else "fp32"


def _onnx_graph(job: Job) -> Path:
    """The unquantized graph: by onnxruntime-genai's builder, which loads the source by itself, where it is right; else
    by torch's exporter.
    """
    from outrider.export.convert.onnx_builder import build_with_genai, supports

    precision = _wide_precision(job)

    def build_it(directory: Path) -> None:
        job.require_room(directory)
        job.tell("convert")
        build_with_genai(job.source.path, directory, precision, job.scratch, job.source.name)

    def export_it(directory: Path) -> None:
        from outrider.export.convert.onnx_dynamo import export_with_dynamo

        job.require_room(directory)
        model = job.loaded.model()
        job.tell("convert")
        export_with_dynamo(model, directory, job.source.name, precision)

    if supports(job.source.config):
        job.loaded.let_go()
        return job.store.get(job.key("genai", precision=precision), build_it)
    graph = job.store.get(job.key("onnx", precision=precision), export_it)
    job.loaded.let_go()
    return graph


def place_files(source: Path, destination: Path) -> None:
    """Puts the files of one directory into another, without a second copy of the bytes where the disk allows it."""
    for path in sorted(source.rglob("*")):
        target = destination / path.relative_to(source)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
            continue
        try:
            os.link(path, target)
        except OSError:  # another disk, or one that has no links
            shutil.copyfile(path, target)


def _tool(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"


def package_versions() -> dict[str, str]:
    """The versions of what makes a bundle; of a package that is not installed, none."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions | {"outrider": outrider_version()}


def outrider_version() -> str:
    """Outrider's own; "source" for a checkout that was never installed."""
    try:
        return importlib.metadata.version("outrider")
    except importlib.metadata.PackageNotFoundError:
        return "source"
