"""Compiles for an NPU ahead of time, on a build machine where OpenVINO has the NPU's compiler.

The compiler comes with the NPU's driver and with OpenVINO's toolkit archive, not with the pip package on Linux. Without
it only the first run is minutes slower: a bundle holds IR, which the device compiles and keeps.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from outrider.models.bundle.manifest import StaticShapes
from outrider.models.errors import RuntimeUnavailable
from outrider.models.runtimes.base import RuntimeOptions
from outrider.models.runtimes.npu_compile import blob_path, compile_graph, graph_sizes, npu_core, read_ir
from outrider.models.runtimes.openvino_graph import failure_reason, find_ir

_COMPILER: Final = re.compile(r"[\w.-]*npu[\w-]*compiler[\w.-]*", re.IGNORECASE)
_NO_COMPILER: Final = "this machine has no NPU compiler"
_OTHERWISE: Final = (
    "export without --ahead-of-time: the device compiles the model at its first run and keeps the result"
)


def compile_ahead(
    xml: Path, shapes: StaticShapes, destination: Path, *, platform: str | None = None, emulate_npu: bool = False
) -> list[Path]:
    """Compiles the graphs of the stateful IR at `xml` and writes their blobs to the directory `destination`; returns
    the blobs' paths.

    `OpenVinoNpuRuntime` loads them if they are beside the IR, for the same shapes. They hold no weights: the IR's
    `.bin` is still needed. A blob is for one kind of NPU and one version of OpenVINO; elsewhere the IR is compiled.
    platform: the NPU to compile for, as OpenVINO names it ("NPU4000"); None takes this machine's.
    emulate_npu: compile for the emulation on the CPU, to test the handling of blobs.
    Raises RuntimeUnavailable when there is no compiler or it fails; BundleError for an IR that an NPU cannot run.
    """
    xml = find_ir(xml)
    properties = {} if platform is None else {"NPU_PLATFORM": platform}
    options = RuntimeOptions(device="NPU", static_shapes=shapes, emulate_npu=emulate_npu, properties=properties)
    try:
        core = npu_core(options, needs_device=False)
        model = read_ir(core, xml)
        blobs = [
            (num_new, compile_graph(core, model, xml, shapes, num_new, options).export_model())
            for num_new in graph_sizes(shapes)
        ]
    except RuntimeError as error:
        raise _unavailable(xml, platform, str(error), failure_reason(error)) from error
    paths = []
    for num_new, blob in blobs:
        paths.append(destination / blob_path(xml, shapes, num_new, emulated=emulate_npu).name)
        paths[-1].write_bytes(blob.getbuffer())
    return paths


def require_compiler(platform: str | None) -> None:
    """Raises RuntimeUnavailable if this machine has no NPU compiler; tries it with a graph of one operation."""
    import openvino as ov
    from openvino import opset13 as ops

    value = ops.parameter([1, 16], ov.Type.f16)
    model = ov.Model([ops.result(ops.relu(value))], [value], "probe")
    try:
        ov.Core().compile_model(model, "NPU", {} if platform is None else {"NPU_PLATFORM": platform})
    except RuntimeError as error:
        found = _unavailable(Path("a model"), platform, str(error), failure_reason(error))
        if found.args[0].startswith(_NO_COMPILER):
            raise found from error
        # Another failure may be the probe's own; the model's is reported when the model is compiled.


def _unavailable(xml: Path, platform: str | None, message: str, reason: str) -> RuntimeUnavailable:
    """The error for a failed compilation; OpenVINO raises one kind for every cause."""
    library = _COMPILER.search(message)
    if library and ("Cannot load library" in message or "compiler loading failed" in message):
        return RuntimeUnavailable(
            f"{_NO_COMPILER}: OpenVINO finds no {library[0]}, which comes with the NPU's driver and with "
            f"OpenVINO's toolkit archive, not with the pip package; {_OTHERWISE}"
        )
    which = "name the NPU to compile for (such as NPU4000)" if platform is None else f"see that {platform} is an NPU"
    return RuntimeUnavailable(f"OpenVINO cannot compile {xml} ahead of time: {reason}; {which}, or {_OTHERWISE}")
