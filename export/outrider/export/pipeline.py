"""One model in, one checked bundle out.

The order is chosen for memory: the source in FP32 is loaded once, tells its logits, is converted and let go
before the result is quantized and run. Nothing is put in place until every check has passed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

from outrider.export.openvino_ir import convert_to_ir, finish_ir
from outrider.export.parity import ParityReference, make_reference
from outrider.export.progress import Progress, StageEvent, silent
from outrider.export.run_export import check_export
from outrider.export.safetensors_cast import cast_weights, config_for
from outrider.export.source import SourceModel, read_source
from outrider.export.torch_source import load_source_model, source_logits
from outrider.export.widen import describe_widening, widen
from outrider.models.bundle import Bundle
from outrider.models.bundle_writer import BundleWriter
from outrider.models.errors import ConfigError
from outrider.models.manifest import (
    Acceptance,
    ExportReport,
    FileEntry,
    Format,
    Manifest,
    Precision,
    Quantization,
    Role,
    Source,
)
from outrider.models.runtimes.base import RuntimeOptions
from outrider.models.tokenizer import TOKENIZER_FILES

RuntimeName = Literal["openvino", "torch"]
PRECISIONS: Final[dict[tuple[Role, RuntimeName], tuple[Precision, ...]]] = {
    ("draft", "openvino"): ("int8", "fp32"),
    ("target", "openvino"): ("int8", "fp32"),
    ("target", "torch"): ("fp32", "bf16", "fp16"),
}
"""What can be made, the default first."""

_TORCH_DTYPES: Final = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
_PACKAGES: Final = ("openvino", "optimum-intel", "nncf", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What to make of a model.

    precision: None takes the first of PRECISIONS. widen_mb: widen the target to this many MB in FP32 first.
    name: what the bundle is called; None takes the source's. num_threads: for the check; 0 leaves it to the runtime.
    Raises ConfigError for what cannot be made.
    """

    role: Role
    precision: Precision | None = None
    runtime: RuntimeName = "openvino"
    widen_mb: float | None = None
    name: str | None = None
    num_threads: int = 0
    overwrite: bool = False

    def __post_init__(self) -> None:
        possible = PRECISIONS.get((self.role, self.runtime))
        if possible is None:
            raise ConfigError(f"a {self.role} cannot be exported for {self.runtime}; drafts run on openvino")
        if self.precision is not None and self.precision not in possible:
            raise ConfigError(
                f"precision {self.precision} is not made for a {self.role} on {self.runtime}; expected "
                f"{' or '.join(possible)}"
            )
        if self.widen_mb is not None and not (self.role == "target" and self.widen_mb > 0):
            raise ConfigError("only targets are widened, and to a positive number of megabytes")

    @property
    def resolved_precision(self) -> Precision:
        """The precision that will be made."""
        return self.precision or PRECISIONS[self.role, self.runtime][0]

    @property
    def format(self) -> Format:
        """The format that the runtime reads."""
        return "safetensors" if self.runtime == "torch" else "openvino-ir"

    @property
    def runtime_options(self) -> RuntimeOptions:
        """How the check opens the result."""
        dtype = {"dtype": _TORCH_DTYPES[self.resolved_precision]} if self.runtime == "torch" else {}
        return RuntimeOptions(num_threads=self.num_threads, properties=dtype)


class StagedExport:
    """A bundle that is built and checked but not yet in place."""

    def __init__(self, writer: BundleWriter, manifest: Manifest, options: ExportOptions) -> None:
        self._writer = writer
        self.manifest = manifest
        self.options = options

    @property
    def directory(self) -> Path:
        """Where its files are for now."""
        return self._writer.directory

    def add_acceptance(self, measured: tuple[Acceptance, ...]) -> None:
        """Puts measured acceptance rates into the report."""
        report = self.manifest.report.model_copy(update={"acceptance": measured})
        self.manifest = self.manifest.model_copy(update={"report": report})

    def commit(self) -> Bundle:
        """Puts the bundle in its place."""
        return self._writer.commit(self.manifest)


def export_model(
    model: str | Path, destination: str | Path, options: ExportOptions, progress: Progress = silent
) -> Bundle:
    """Exports a local Hugging Face directory to a bundle at `destination`, which is written last and whole.

    Raises ExportError if the model cannot be exported or fails the parity check, BundleError if the
    destination may not be replaced, TokenizerError if the model has no usable tokenizer; then nothing is
    written.
    """
    with stage_export(read_source(model), destination, options, progress) as staged:
        progress(StageEvent(options.role, "write"))
        return staged.commit()


@contextlib.contextmanager
def stage_export(
    source: SourceModel, destination: str | Path, options: ExportOptions, progress: Progress
) -> Iterator[StagedExport]:
    """Builds and checks a bundle beside `destination`; it is removed again unless `commit` is called inside."""
    with BundleWriter(destination, overwrite=options.overwrite) as writer:
        progress(StageEvent(options.role, "read"))
        origin = source.describe()
        work = writer.directory / "work"
        work.mkdir()
        if options.widen_mb is not None:
            progress(StageEvent(options.role, "widen"))
            widened = widen(source.path, work / "widened", options.widen_mb)
            # The widened files go away before the manifest is written; names and tokenizer are the original's anyway.
            source = replace(widened, name=source.name, revision=source.revision, tokenizer=source.tokenizer)
        reference = _build(source, writer.directory, work, options, progress)
        shutil.rmtree(work)
        progress(StageEvent(options.role, "check"))
        parity = check_export(
            writer.directory,
            role=options.role,
            runtime=options.runtime,
            precision=options.resolved_precision,
            reference=reference,
            options=options.runtime_options,
        )
        files = writer.list_files()
        report = ExportReport(size_bytes=sum(entry.size for entry in files), parity=parity, versions=package_versions())
        yield StagedExport(writer, _manifest(source, origin, options, files, report), options)


def _build(
    source: SourceModel, directory: Path, work: Path, options: ExportOptions, progress: Progress
) -> ParityReference:
    """Puts model and tokenizer files into `directory`; returns what the source says, for the check."""
    progress(StageEvent(options.role, "load"))
    model = load_source_model(source.path)
    reference = make_reference(source.tokenizer, partial(source_logits, model))
    progress(StageEvent(options.role, "convert"))
    if options.runtime == "openvino":
        convert_to_ir(model, work / "ir", source.name)
    del model
    gc.collect()
    config = source.config
    if options.runtime == "torch":
        cast_weights(source.weight_files, directory, options.resolved_precision)
        config = config_for(config, options.resolved_precision)
    else:
        is_int8 = options.resolved_precision == "int8"
        if is_int8:
            progress(StageEvent(options.role, "quantize"))
        finish_ir(work / "ir", directory, source.name, is_int8=is_int8)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8", newline="\n")
    for name in TOKENIZER_FILES:
        if (source.path / name).is_file():
            shutil.copyfile(source.path / name, directory / name)
    return reference


def _manifest(
    source: SourceModel,
    origin: Source,
    options: ExportOptions,
    files: tuple[FileEntry, ...],
    report: ExportReport,
) -> Manifest:
    tool = f"nncf {importlib.metadata.version('nncf')}"
    return Manifest(
        name=options.name or source.name,
        role=options.role,
        architecture=source.architecture,
        format=options.format,
        runtime=options.runtime,
        device="cpu",
        precision=options.resolved_precision,
        quantization=Quantization(tool=tool, scheme="int8_asym", granularity="row")
        if options.resolved_precision == "int8"
        else None,
        tokenizer_fingerprint=source.tokenizer.fingerprint,
        eos_token_ids=source.tokenizer.eos_token_ids,
        bos_token_id=source.tokenizer.bos_token_id,
        source=origin,
        widened=describe_widening(source),
        files=files,
        report=report,
    )


def package_versions() -> dict[str, str]:
    """The versions of what makes a bundle."""
    return {name: importlib.metadata.version(name) for name in _PACKAGES} | {"outrider": outrider_version()}


def outrider_version() -> str:
    """Outrider's own; "source" for a checkout that was never installed."""
    try:
        return importlib.metadata.version("outrider")
    except importlib.metadata.PackageNotFoundError:
        return "source"
