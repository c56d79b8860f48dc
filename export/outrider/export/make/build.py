"""Converts a source to a model's files, one way per runtime. Expensive stages go through the stage store.

No stage holds more than the source and its own result: the source is loaded when a stage needs it and freed before the
result is quantized.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from outrider.export.check.advice import ADVICE, advise
from outrider.export.check.parity import QUANTIZED
from outrider.export.check.source_logits import (
    PARITY_TEXT,
    Truth,
    compute_truth,
    held_out_texts,
    steady_rotations,
)
from outrider.export.convert.openvino_ir import IR_NAME, convert_to_ir, finish_ir
from outrider.export.convert.safetensors_cast import cast_weights
from outrider.export.convert.weight_check import require_close_weights
from outrider.export.disk import is_one_disk, link_or_copy, require_room
from outrider.export.make.stage_store import StageStore
from outrider.export.progress import Progress, StageEvent
from outrider.export.quiet import quiet_upstream
from outrider.export.recipes import ExportOptions
from outrider.export.source.config_reader import LONGEST_CHECKED
from outrider.export.source.family_facts import is_mixture
from outrider.export.source.model_source import SourceModel
from outrider.export.source.torch_source import load_source_model
from outrider.models.bundle.manifest import Precision, Quantization, Source
from outrider.models.errors import ExportError
from outrider.models.version import outrider_version

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


@dataclass(slots=True)
class Job:
    """One model to build. origin: identifies its weights. directory: of its files. scratch: for temporary files.

    The source model is loaded on first use and freed by `let_go`: no stage holds it beside its own result.
    """

    source: SourceModel
    origin: Source
    directory: Path
    scratch: Path
    options: ExportOptions
    store: StageStore
    progress: Progress
    _model: Any = None

    def model(self) -> Any:
        """The transformers model in FP32."""
        if self._model is None:
            self.tell("load")
            self._model = load_source_model(self.source.path)
        return self._model

    def let_go(self) -> None:
        """Frees the model."""
        self._model = None
        gc.collect()

    def tell(self, stage: str) -> None:
        """Says that a stage begins."""
        self.progress(StageEvent(self.options.role, stage))

    def require_room(self, staging: Path, *more_bytes: float) -> None:
        """Raises DiskFull if there is no room for the bundle and what is built beside it, or at `staging` for the
        converted model and more.
        """
        source, options = self.source, self.options
        converted = converted_bytes(source, options)
        placed = 0.0 if is_one_disk(staging, self.directory) else converted
        if options.resolved_precision in QUANTIZED:
            bundle = finished_bytes(source, options) + placed  # with the twin
        else:
            bundle = placed if options.resolved_runtime == "onnxruntime" else finished_bytes(source, options)
        beside = converted + self._viewed_bytes() if _takes_builder(self) else 0.0
        # What the builder leaves beside the bundle is removed before the bundle is written.
        require_room((staging.parent, converted + sum(more_bytes)), (self.directory.parent, max(bundle, beside)))

    def _viewed_bytes(self) -> float:
        """Bytes of the source that onnxruntime-genai's builder gets a copy of: none where it gets links."""
        files = [path.resolve() for path in self.source.weight_files]
        return sum(path.stat().st_size for path in files if not is_one_disk(path, self.directory))

    def key(self, stage: str, **more: Any) -> dict[str, Any]:
        """Everything that decides the result of a stage: the source, the packages' versions, and `more`."""
        return {
            "stage": stage,
            "source": self.origin.weights_sha256,
            "tokenizer": self.source.tokenizer.fingerprint,
            "versions": package_versions(),
            **more,
        }


def longest_sequence(source: SourceModel, options: ExportOptions) -> int:
    """Tokens that a sequence of the export can have."""
    shapes = options.resolved_shapes
    return source.architecture.max_positions if shapes is None else shapes.max_positions


@contextlib.contextmanager
def _advising(job: Job) -> Iterator[None]:
    """Adds to a converter's failure what to try instead."""
    try:
        yield
    except ExportError as error:
        if type(error) is not ExportError:
            raise  # a full disk, say: another way would fail as well
        raise ExportError(f"{error}\n{ADVICE}: {advise(job.options, job.source.shape.facts).elsewhere}") from error


def build(job: Job) -> tuple[Truth, Quantization | None]:
    """Writes the model's files to `job.directory`; returns the source's logits, for the check, and the quantization."""

    def tell_truth(directory: Path) -> None:
        # Also for what follows, so that it does not fail after minutes of loading.
        job.require_room(directory, 4.0 * _TRUTH_ROWS * job.source.architecture.vocab_size)
        compute_truth(job.model(), job.source, longest_sequence(job.source, job.options)).save(directory)

    texts = [PARITY_TEXT, *(list(text) for text in held_out_texts(job.source))]
    # Sequences of the check are not longer than the longest window that it goes beyond, and some tokens.
    longest = min(longest_sequence(job.source, job.options), 2 * LONGEST_CHECKED)
    place = job.store.get(
        job.key("truth", layout=3, texts=texts, longest=longest, originals=job.source.shape.crossed_originals),
        tell_truth,
    )
    match job.options.resolved_runtime:
        case "openvino":
            with _advising(job):
                quantization = _build_openvino(job)
            _compile_ahead(job)
        case "onnxruntime":
            with _advising(job):
                quantization = _build_onnx(job)
        case "torch":
            job.let_go()
            job.tell("convert")
            cast_weights(job.source.weight_files, job.directory, job.options.stored_precision)
            is_int8 = job.options.resolved_precision == "int8"
            quantization = _WHEN_LOADED if is_int8 else None
    return Truth.load(place), quantization


_WHEN_LOADED: Final = Quantization(
    tool=f"outrider {outrider_version()}", scheme="int8 symmetric, when loaded", granularity="output, LM head in bf16"
)


def build_twin(job: Job) -> Path | None:
    """Writes the same graph unquantized to its own folder, as the noise of quantization can hide an error.

    Returns None where nothing is quantized.
    """
    if job.options.resolved_precision not in QUANTIZED:
        return None
    twin = job.scratch / "twin"
    twin.mkdir()
    if job.options.resolved_runtime == "torch":
        for path in job.directory.glob("model*"):
            link_or_copy(path, twin / path.name)
    else:
        place_files(_ir(job) if job.options.resolved_runtime == "openvino" else _onnx_graph(job), twin)
    return twin


def _converted(job: Job, stage: str, convert: Callable[[Path], None], *, loads: bool = True, **decisive: Any) -> Path:
    """The directory that `convert` fills, now or in an earlier export. loads: whether it needs the source model."""

    def build_it(directory: Path) -> None:
        job.require_room(directory)
        if loads:
            job.model()
        job.tell("convert")
        convert(directory)

    if not loads:
        job.let_go()
    directory = job.store.get(job.key(stage, **decisive), build_it)
    job.let_go()
    return directory


def _ir(job: Job) -> Path:
    """The FP32 IR."""
    return _converted(
        job, "ir", lambda directory: convert_to_ir(steady_rotations(job.model()), directory, job.source.name)
    )


def _build_openvino(job: Job) -> Quantization | None:
    ir = _ir(job)
    options = job.options
    if options.resolved_precision == "w8a8":
        from outrider.export.convert.calibration import quantize_fully

        job.tell("calibrate")
        # The model writes the text itself: held-out texts must not be used for what they judge.
        bos = job.source.tokenizer.bos_token_id
        quantize_fully(ir, job.directory, [] if bos is None else [[bos]], job.source.name)
        return Quantization(tool=_tool("nncf"), scheme="w8a8", granularity="row, activations per tensor")
    if options.resolved_precision not in ("fp32", "fp16"):
        job.tell("quantize")
    quantization = finish_ir(ir, job.directory, job.source.name, options.resolved_precision, options.device)
    if quantization is not None and is_mixture(job.source.shape.facts):
        xml = f"{IR_NAME}.xml"
        require_close_weights(ir / xml, job.directory / xml, options.resolved_precision)
    return quantization


def _compile_ahead(job: Job) -> None:
    """Writes an NPU's blob beside the IR, if the options ask for it."""
    shapes = job.options.resolved_shapes
    if not job.options.compiles_ahead or shapes is None:
        return
    from outrider.export.convert.ahead_of_time import compile_ahead

    job.tell("compile")
    compile_ahead(job.directory / f"{IR_NAME}.xml", shapes, job.directory, platform=job.options.npu_platform)


def _build_onnx(job: Job) -> Quantization | None:
    with quiet_upstream("exporting to ONNX"):
        from outrider.export.convert.onnx_builder import CONFIG_FILE
        from outrider.export.convert.onnx_quantize import quantize_weights

    precision, graph = job.options.resolved_precision, _onnx_graph(job)
    if precision == _wide_precision(job):
        place_files(graph, job.directory)
        return None
    assert precision in ("int8", "int4")
    job.tell("quantize")
    quantize_weights(graph / "model.onnx", job.directory, 8 if precision == "int8" else 4)
    if (graph / CONFIG_FILE).is_file():
        shutil.copyfile(graph / CONFIG_FILE, job.directory / CONFIG_FILE)
    granularity = "block of 32" if precision == "int8" else "block of 32, LM head in int8"
    return Quantization(tool=_tool("onnxruntime"), scheme=f"{precision} symmetric", granularity=granularity)


def _wide_precision(job: Job) -> Literal["fp32", "fp16"]:
    """The precision before quantization: FP16 for CUDA, as attention there has no FP32 kernel."""
    return "fp16" if job.options.device == "gpu" else "fp32"


def _takes_builder(job: Job) -> bool:
    """Whether onnxruntime-genai's builder converts the model."""
    if job.options.resolved_runtime != "onnxruntime" or "text_config" in job.source.config:
        return False
    from outrider.export.convert.onnx_builder import supports

    return supports(job.source.shape.facts)


def _onnx_graph(job: Job) -> Path:
    """The unquantized graph: from onnxruntime-genai's builder where it is correct, otherwise from torch's exporter.

    The builder loads the source by itself.
    """
    from outrider.export.convert.onnx_builder import build_with_genai

    precision = _wide_precision(job)

    def build_it(directory: Path) -> None:
        build_with_genai(job.source.path, directory, precision, job.scratch, job.source.name)

    def export_it(directory: Path) -> None:
        with quiet_upstream("exporting to ONNX"):
            from outrider.export.convert.onnx_dynamo import export_with_dynamo

        export_with_dynamo(steady_rotations(job.model()), directory, job.source.name, precision)

    if _takes_builder(job):
        return _converted(job, "genai", build_it, loads=False, precision=precision)
    return _converted(job, "onnx", export_it, precision=precision)


def place_files(source: Path, destination: Path) -> None:
    """Links the files of one directory into another, or copies them where the disk has no links."""
    destination.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.rglob("*")):  # copytree changes the directories' modes, which not every disk allows
        place = destination / path.relative_to(source)
        if path.is_dir():
            place.mkdir(parents=True, exist_ok=True)
        else:
            link_or_copy(path, place)


def _tool(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"


def package_versions() -> dict[str, str]:
    """The versions of the packages that make a bundle; packages that are not installed are left out."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions | {"outrider": outrider_version()}


# Of the stored weights; scales and weights that keep more bits come on top.
_BYTES_PER_WEIGHT: Final[dict[Precision, float]] = {
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "int8": 1.0,
    "w8a8": 1.0,
    "int4": 0.5,
}
# Rows of logits that `Truth` keeps: of the parity check's two pairs, about 70 each, and of six held-out texts.
_TRUTH_ROWS: Final = 2 * 70 + 6 * 24


def finished_bytes(source: SourceModel, options: ExportOptions) -> float:
    """Bytes of the bundle of `source`."""
    return source.architecture.parameters * _BYTES_PER_WEIGHT[options.stored_precision]


def widened_bytes(options: ExportOptions) -> float:
    """Bytes that widening adds: a temporary copy in FP32, and the bundle's growth."""
    copies = 1.0 + _BYTES_PER_WEIGHT[options.stored_precision] / _BYTES_PER_WEIGHT["fp32"]
    return 1e6 * options.widen_mb * copies if options.widen_mb is not None else 0.0


def converted_bytes(source: SourceModel, options: ExportOptions) -> float:
    """Bytes of the converted model in the stage store, before it is quantized: FP32, or FP16 for CUDA.

    The torch runtime's weights are cast straight into the bundle.
    """
    if options.resolved_runtime == "torch":
        return 0.0
    is_half = (options.device, options.resolved_runtime) == ("gpu", "onnxruntime")
    return (2.0 if is_half else 4.0) * source.architecture.parameters
