"""Makes draft bundles for the fake target; their model is only bytes. And machines that they may run on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, get_args

from tests.serving import fake_tokenizer, save_fake_tokenizer
from tests.test_bundle import make_manifest

from outrider.edge.devices.discovery import FoundDevice, FoundRuntime
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.bundle_writer import BundleWriter
from outrider.models.bundle.manifest import Acceptance, Device, FileEntry, Manifest, StaticShapes
from outrider.models.text.tokenizer import Tokenizer


def make_draft(
    place: Path,
    *,
    rate: float | None = None,
    content: bytes = b"weights",
    tokenizer: Tokenizer | None = None,
    **changes: Any,
) -> Bundle:
    """A draft bundle with the fake target's tokenizer, or another. content: of its weights.

    rate: its acceptance by the target "fake". changes: of its manifest.
    """
    with BundleWriter(place) as writer:
        if tokenizer is None:
            save_fake_tokenizer(writer.directory)
        else:
            shutil.copytree(tokenizer.directory, writer.directory, dirs_exist_ok=True)
        (writer.directory / "openvino_model.xml").write_text("<net/>", encoding="utf-8")
        (writer.directory / "openvino_model.bin").write_bytes(content)
        fingerprint = (tokenizer or fake_tokenizer()).fingerprint
        manifest = make_manifest(writer.list_files(), fingerprint, "tiny-draft")
        measured = () if rate is None else (Acceptance(target="fake", temperature=0.8, tested_tokens=100, rate=rate),)
        report = manifest.report.model_copy(update={"acceptance": measured})
        return writer.commit(manifest.model_copy(update={"report": report, **changes}))


def files_of(root: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


CPU_ONLY = FoundRuntime("openvino", "1", (FoundDevice("CPU", "Some Processor", "cpu"),))


def manifest_for(runtime: str, device: str, checked_on: str) -> Manifest:
    """A draft's manifest."""
    manifest = make_manifest((FileEntry(path="openvino_model.xml", size=1, sha256="0" * 64),), "0" * 64)
    parity = manifest.report.parity.model_copy(update={"checked_on": checked_on})
    return manifest.model_copy(
        update={
            "runtime": runtime,
            "device": device,
            "precision": "int8",
            "static_shapes": StaticShapes() if device == "npu" else None,
            "report": manifest.report.model_copy(update={"parity": parity}),
        }
    )


ALL_DEVICES = {
    "openvino": FoundRuntime(
        "openvino", "1", tuple(FoundDevice(name.upper(), "a " + name, name) for name in get_args(Device))
    ),
    "onnxruntime": FoundRuntime(
        "onnxruntime",
        "1",
        (
            FoundDevice("CUDAExecutionProvider", "a gpu", "gpu"),
            FoundDevice("CPUExecutionProvider", "a cpu", "cpu"),
            FoundDevice("QNNExecutionProvider", "an npu", "npu"),
        ),
    ),
}
