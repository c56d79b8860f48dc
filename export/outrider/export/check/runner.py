"""Runs an export in the runtime that will run it, and measures it.

Drafts run behind `SequenceRuntime`, targets behind `BatchRuntime`; both are adapted to steps on one sequence, which the
parity check drives.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from outrider.export.check.advice import TINY_HIDDEN, TINY_LAYERS, Advice, advise, load_measured
from outrider.export.check.parity import (
    BatchSteps,
    RowsRuntime,
    SequenceSteps,
    Steps,
    check_parity,
    log_softmax,
    rounded,
)
from outrider.export.check.source_logits import Truth
from outrider.export.check.timing import machine, time_draft, time_target, timing_prompt
from outrider.export.recipes import ExportOptions
from outrider.export.source.family_facts import is_mixture
from outrider.export.source.model_source import SourceModel
from outrider.models.bundle.manifest import Agreement, Parity, Precision, Timing
from outrider.models.errors import (
    BundleError,
    ExportError,
    ModelFault,
    OutriderError,
    ParityFailure,
    RuntimeUnavailable,
)
from outrider.models.process.extras import missing_extra
from outrider.models.process.machine_load import MachineLoad
from outrider.models.runtimes import open_batch_runtime, open_sequence_runtime, sequence_kind
from outrider.models.runtimes.base import BatchRuntime


def measure_agreement(
    steps: Steps, texts: Sequence[Sequence[int]], expected: Sequence[NDArray[np.float32]], *, num_ids: int
) -> Agreement:
    """Share of equal argmaxes and mean KL from the source, over every position of `texts`.

    expected: the source's logits of each text, [length, vocab_size]. num_ids: ids that the tokenizer knows; columns
    beyond are padding. Tokens go in one at a time, as they do when a model drafts.
    """
    num_equal = num_rows = 0
    divergence = 0.0
    for text, truth in zip(texts, expected, strict=True):
        steps.truncate(0)
        for index, logits in enumerate(truth):
            found = steps.run(text[index : index + 1], 1)[:, :num_ids]
            log_p, log_q = log_softmax(logits[None, :num_ids]), log_softmax(found)
            num_equal += int(found.argmax() == logits[:num_ids].argmax())
            divergence += float((np.exp(log_p) * (log_p - log_q)).sum())
            num_rows += 1
    # Rounding can leave a sum a hair below zero, where no divergence is.
    return Agreement(
        rows=num_rows, argmax=rounded(num_equal / num_rows), mean_kl=rounded(max(0.0, divergence / num_rows))
    )


_CHECK_CACHE_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class CheckedOn:
    """Where an export runs on this machine. device: as the runtime names it. words: for people and the manifest.

    is_real: whether it is the device that the export is for.
    """

    device: str
    emulates_npu: bool
    words: str
    is_real: bool = True


def where_to_check(options: ExportOptions) -> CheckedOn:
    """The device that the export is for, if this machine has it; else the nearest that runs the same files."""
    if options.device == "cpu":
        return CheckedOn("cpu" if options.resolved_runtime == "torch" else "CPU", False, "CPU")
    name, is_here = _find(options)
    if is_here:
        return CheckedOn(name, False, name)
    if options.device == "npu":
        return CheckedOn("NPU", True, "NPU path emulated on the CPU; not run on hardware", is_real=False)
    nearest = "cpu" if options.resolved_runtime == "torch" else "CPU"
    return CheckedOn(nearest, False, "CPU in place of a GPU; not run on hardware", is_real=False)


def _find(options: ExportOptions) -> tuple[str, bool]:
    """The runtime's name for the device, and whether this machine has it."""
    if options.resolved_runtime == "torch":
        import torch

        return "cuda", torch.cuda.is_available()
    if options.resolved_runtime == "onnxruntime":
        import onnxruntime

        name = "CUDAExecutionProvider"
        return name, name in onnxruntime.get_available_providers()
    try:
        import openvino
    except ModuleNotFoundError as error:
        raise missing_extra(error, "checking an OpenVINO model", "export") from error
    name = options.device.upper()
    return name, any(device.split(".")[0] == name for device in openvino.Core().available_devices)


def open_draft(model_file: Path, options: ExportOptions) -> RowsRuntime:
    """The draft whose model is at `model_file`. Raises as `open_sequence_runtime` does."""
    place = where_to_check(options)
    kind = sequence_kind(options.resolved_runtime, options.device)
    loading = options.runtime_options(place.device, emulate_npu=place.emulates_npu)
    return cast(RowsRuntime, open_sequence_runtime(kind, model_file, loading))


def open_target(model_file: Path, options: ExportOptions, *, kv_cache_bytes: int = 0) -> BatchRuntime:
    """The target whose model is at `model_file`, with a cache of that size (0: the usual). Raises as
    `open_batch_runtime` does.
    """
    loading = options.runtime_options(where_to_check(options).device)
    if kv_cache_bytes:
        loading = replace(loading, kv_cache_bytes=kv_cache_bytes)
    return open_batch_runtime(options.resolved_runtime, model_file, loading)


def model_file(directory: Path, options: ExportOptions) -> Path:
    """The file or directory that a runtime opens, of the files built in `directory`."""
    if options.format == "safetensors":
        return directory
    return next(directory.glob("*.onnx" if options.format == "onnx" else "*.xml"))


def usual_delta(source: SourceModel, options: ExportOptions, precision: Precision) -> float | None:
    """The usual error of this recipe, measured on tiny models, for a model of this size; None if unknown.

    Rounding errors of layers, and of the terms of a dot product, are independent: they grow with the roots.
    """
    usual = load_measured().usual_error(options.role, options.device, options.resolved_runtime, precision)
    shape = source.architecture
    growth = math.sqrt(max(1.0, shape.layers / TINY_LAYERS) * max(1.0, shape.hidden_size / TINY_HIDDEN))
    return None if usual is None else usual * growth


def check_export(
    directory: Path, options: ExportOptions, truth: Truth, source: SourceModel
) -> tuple[Parity, Agreement, Timing]:
    """Checks the files in `directory`, then measures agreement and times; loads the model once.

    Raises ExportError if they fail the check, or the runtime refuses them.
    """
    place, precision = where_to_check(options), options.resolved_precision
    with _opened(directory, options, source) as (steps, runtime):
        parity = check_parity(
            steps,
            truth.reference,
            precision,
            type(runtime).__name__,
            advise(options, source.shape.facts),
            is_mixture=is_mixture(source.shape.facts),
            usual_delta=usual_delta(source, options, precision),
        )
        agreement = measure_agreement(steps, truth.texts, truth.logits, num_ids=source.tokenizer.size)
        prompt = timing_prompt(truth.reference.near.main, steps.max_positions)
        with MachineLoad() as load:
            times = time_target(runtime, prompt) if isinstance(runtime, BatchRuntime) else time_draft(runtime, prompt)
            load.lengthen()  # a small model's steps take a few milliseconds in all
        timing = Timing(
            machine=machine(options.num_threads),
            provider=getattr(runtime, "provider", place.words),
            is_on_device=place.is_real,
            context=len(prompt),
            token_ms=rounded(times.token_ms),
            extend_tokens=times.extend_tokens,
            extend_ms=rounded(times.extend_ms),
            extra_ms=None if times.extra_ms is None else rounded(times.extra_ms),
            load_warning=load.warning(),
        )
    return parity.model_copy(update={"checked_on": place.words}), agreement, timing


def check_twin(directory: Path, options: ExportOptions, truth: Truth, source: SourceModel) -> None:
    """Checks the same graph unquantized, in the runtime that will run it quantized.

    Raises ExportError as `check_export` does.
    """
    place = where_to_check(options)
    # An NPU computes in FP16 and a GPU may; the NPU's path has its cache in FP16 where it is emulated too, and ONNX
    # Runtime's graph for CUDA is in FP16 wherever it runs.
    computes_fp32 = place.device == "CPU" and (options.device, options.resolved_runtime) != ("gpu", "onnxruntime")
    elsewhere = advise(options, source.shape.facts).elsewhere
    advice = Advice(elsewhere, elsewhere)  # the graph is wrong in any precision
    precision: Precision = "fp32" if computes_fp32 else "fp16"
    if options.resolved_runtime == "torch":
        precision = options.stored_precision
        options = replace(options, precision=precision)
    with _opened(directory, options, source) as (steps, runtime):
        try:
            check_parity(
                steps,
                truth.reference,
                precision,
                type(runtime).__name__,
                advice,
                is_mixture=is_mixture(source.shape.facts),
                usual_delta=usual_delta(source, options, precision),
            )
        except ParityFailure as error:
            raise ParityFailure(f"already before quantization: {error}", error.relative_delta) from None


@contextmanager
def _opened(
    directory: Path, options: ExportOptions, source: SourceModel
) -> Iterator[tuple[Steps, RowsRuntime | BatchRuntime]]:
    path = model_file(directory, options)
    try:
        if options.role == "draft":
            with closing(open_draft(path, options)) as draft:
                yield SequenceSteps(draft), draft
            return
        # The check runs more tokens than the default cache would hold of a large model.
        with closing(open_target(path, options, kv_cache_bytes=_CHECK_CACHE_BYTES)) as target:
            yield BatchSteps(target), target
    except (BundleError, ModelFault, RuntimeUnavailable) as error:
        # Without the names of directories that will be gone.
        said = (
            str(error).replace(str(path), source.name).replace(f"{directory}{os.sep}", "").replace(str(directory), "")
        )
        if isinstance(error, RuntimeUnavailable) and where_to_check(options).is_real:
            raise RuntimeUnavailable(said) from error
        raise _cannot_run(options, source, said) from error
    except OutriderError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:  # what a model's own code raises in a step
        first_line = next(iter(str(error).splitlines()), "")
        raise _cannot_run(options, source, f"{type(error).__name__}: {first_line}") from error


def _cannot_run(options: ExportOptions, source: SourceModel, why: str) -> ExportError:
    return ExportError(
        f"{options.resolved_runtime} cannot run the exported model: {why}; nothing was written: "
        f"{advise(options, source.shape.facts).elsewhere}"
    )
