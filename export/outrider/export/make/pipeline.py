"""Exports one model to one checked bundle.

The order saves memory: the source in FP32 is loaded once, run for its logits, converted and freed before the result is
quantized and run. Nothing is renamed into place until every check has passed.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil

from outrider.export.check.advice import require_runtime
from outrider.export.check.runner import check_export, check_twin, where_to_check
from outrider.export.check.source_logits import LEAST_POSITIONS
from outrider.export.convert.safetensors_cast import config_for
from outrider.export.disk import require_room, telling_of_full_disks
from outrider.export.make.build import (
    Job,
    build,
    build_twin,
    finished_bytes,
    longest_sequence,
    package_versions,
    widened_bytes,
)
from outrider.export.make.stage_store import StageStore
from outrider.export.progress import Progress, StageEvent, silent
from outrider.export.recipes import ExportOptions
from outrider.export.source.model_source import SourceModel, read_source
from outrider.export.source.weight_files import require_range
from outrider.export.source.widen import describe_widening, widen
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.bundle_writer import BundleWriter
from outrider.models.bundle.manifest import ExportReport, Manifest
from outrider.models.cache_folder import default_cache_dir
from outrider.models.errors import ExportError
from outrider.models.runtimes.base import PROMISED_POSITIONS
from outrider.models.text.tokenizer import TOKENIZER_FILES
from outrider.models.visible import visible

_CONTAINER_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")
"""Bytes that a container may take (control groups, version 2); the machine's free memory is not its own."""
_NEVER_RUN: Final = (
    "its blob was compiled on a machine without an NPU and has never run; the check ran the model that it was compiled "
    "from"
)


@dataclass(slots=True)
class StagedExport:
    """A bundle that is built and checked but not yet in place: its files are in the writer's temporary directory."""

    writer: BundleWriter
    manifest: Manifest
    options: ExportOptions

    def commit(self) -> Bundle:
        """Renames the bundle to its destination."""
        return self.writer.commit(self.manifest)


def stage_store() -> StageStore:
    """The store in the user's cache where expensive stages keep results until an export has succeeded."""
    return StageStore(default_cache_dir() / "work")


def export_model(
    model: str | Path, destination: str | Path, options: ExportOptions, progress: Progress = silent
) -> Bundle:
    """Exports a model directory or hub id to a bundle at `destination`, which appears last and whole.

    Raises ExportError if the model cannot be exported or fails the parity check, BundleError if the destination may not
    be replaced, TokenizerError if the model has no usable tokenizer. Then nothing is written, except results of
    expensive stages in the cache for the next try.
    """
    require_ready(destination, options)
    store = stage_store()
    source = read_source(model, max_positions=options.max_positions)
    with stage_export(source, destination, options, progress, store) as staged:
        progress(StageEvent(options.role, "write"))
        bundle = staged.commit()
    store.release()
    return bundle


def require_ready(destination: str | Path, options: ExportOptions) -> None:
    """Raises what can be known before the model is read: BundleError if the destination may not be replaced,
    RuntimeUnavailable if the options compile ahead and this machine has no compiler.
    """
    place = Path(destination)
    with telling_of_full_disks(place):
        BundleWriter(place, overwrite=options.overwrite).check_destination()
    if options.compiles_ahead:
        from outrider.export.convert.ahead_of_time import require_compiler

        require_compiler(options.npu_platform)


@contextlib.contextmanager
def stage_export(
    source: SourceModel, destination: str | Path, options: ExportOptions, progress: Progress, store: StageStore
) -> Iterator[StagedExport]:
    """Builds and checks a bundle beside `destination`; it is removed again unless `commit` is called inside.

    Results of expensive stages stay in `store`: release it when nothing needs them.
    """
    place = Path(destination)
    options = options.fitting(source.architecture.max_positions)
    require_runtime(options, source.shape.facts, source.name)
    if longest_sequence(source, options) < LEAST_POSITIONS:
        raise ExportError(
            f"sequences of {source.name} would end at {longest_sequence(source, options)} tokens; the check needs at "
            f"least {LEAST_POSITIONS}"
        )
    with telling_of_full_disks(place, default_cache_dir()), BundleWriter(place, overwrite=options.overwrite) as writer:
        progress(StageEvent(options.role, "read"))
        origin = source.describe()
        require_room((place, finished_bytes(source, options) + widened_bytes(options)))
        _warn_of_short_memory(source)
        require_range(source.weight_files, options.stored_precision)
        scratch = writer.directory / "work"
        scratch.mkdir()
        built = source
        if options.widen_mb is not None:
            progress(StageEvent(options.role, "widen"))
            widened = widen(source, scratch / "widened", options.widen_mb)
            # The widened files are removed before the manifest is written; names and tokenizer are the original's.
            built = replace(widened, name=source.name, revision=source.revision, tokenizer=source.tokenizer)
        of_built = origin if built is source else built.describe()
        job = Job(built, of_built, writer.directory, scratch, options, store, progress)
        truth, quantization = build(job)
        twin = build_twin(job)
        _copy_texts(built, writer.directory, options)
        progress(StageEvent(options.role, "check"))
        try:
            if twin is not None:
                _copy_texts(built, twin, options)
                check_twin(twin, options, truth, source)
            shutil.rmtree(scratch)
            parity, agreement, timing = check_export(writer.directory, options, truth, source)
        except ExportError:
            store.release()  # a stored result may be the cause
            raise
        notes = built.shape.notes
        if options.compiles_ahead and not where_to_check(options).is_real:
            notes += (_NEVER_RUN,)
        files = writer.list_files()
        report = ExportReport(
            size_bytes=sum(entry.size for entry in files),
            parity=parity,
            agreement=agreement,
            timing=timing,
            notes=notes,
            versions=package_versions(),
        )
        manifest = Manifest(
            name=options.name or built.name,
            role=options.role,
            architecture=built.architecture,
            format=options.format,
            runtime=options.resolved_runtime,
            device=options.device,
            precision=options.resolved_precision,
            quantization=quantization,
            static_shapes=options.resolved_shapes,
            tokenizer_fingerprint=built.tokenizer.fingerprint,
            eos_token_ids=built.tokenizer.eos_token_ids,
            bos_token_id=built.tokenizer.bos_token_id,
            source=origin,
            widened=describe_widening(built),
            files=files,
            report=report,
        )
        yield StagedExport(writer, manifest, options)


def _warn_of_short_memory(source: SourceModel) -> None:
    """One line where the source in FP32 is more than memory and swap have free, or more than a container may take: the
    system may end the export later.
    """
    needed = 4 * source.architecture.parameters
    free = psutil.virtual_memory().available + psutil.swap_memory().free
    with contextlib.suppress(OSError, ValueError):  # no container's limit, or "max"
        free = min(free, int(_CONTAINER_LIMIT.read_text("ascii")))
    if free < needed:
        print(
            f"warning: {visible(source.name)} takes {needed / 1e9:.1f} GB of memory in FP32, and "
            f"{free / 1e9:.1f} GB are free; close other programs, or export it on a larger machine",
            file=sys.stderr,
            flush=True,
        )


def _copy_texts(source: SourceModel, directory: Path, options: ExportOptions) -> None:
    """Writes the configuration, with the precision of safetensors, and the tokenizer."""
    config = source.runtime_config
    if options.format == "safetensors":
        promised = {PROMISED_POSITIONS: source.architecture.max_positions}
        config = config_for(source.config, options.stored_precision) | promised
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8", newline="\n")
    for name in TOKENIZER_FILES:
        if (source.path / name).is_file():
            shutil.copyfile(source.path / name, directory / name)
