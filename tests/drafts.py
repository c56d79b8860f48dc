"""Makes draft bundles for the fake target; their model is only bytes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.serving import fake_tokenizer, save_fake_tokenizer
from tests.test_bundle import make_manifest

from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.bundle_writer import BundleWriter
from outrider.models.bundle.manifest import Acceptance
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
