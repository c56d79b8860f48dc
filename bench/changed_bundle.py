"""Copies a bundle with other files: measurements need pairs that nobody ships."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.bundle_writer import BundleWriter

TURNS: Final = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""A template for models that were trained without one: the end token ends each turn."""


def change_bundle(source: Path, place: Path, *, template: str = "", files: Mapping[str, bytes] | None = None) -> Bundle:
    """Writes the copy to `place`, with hard links to large files where the disk allows them. Its report stays the
    source's. template: of chats. files: others that are new or changed, by their paths.
    """
    bundle = Bundle.open(source)
    changed = {**(files or {}), **({"chat_template.jinja": template.encode()} if template else {})}
    with BundleWriter(place) as writer:
        for entry in bundle.manifest.files:
            path = writer.directory / entry.path
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source / entry.path, path)
            except OSError:  # another file system
                shutil.copyfile(source / entry.path, path)
        for name, content in changed.items():
            path = writer.directory / name
            path.unlink(missing_ok=True)
            path.write_bytes(content)
        return writer.commit(bundle.manifest.model_copy(update={"files": writer.list_files()}))


def other_model(bundle: Path, place: Path) -> Path:
    """A copy of the bundle with the sign of some weights turned: a different model in the verifier's place."""
    weights = next(path for path in sorted(bundle.iterdir()) if path.suffix in (".bin", ".safetensors"))
    data = bytearray(weights.read_bytes())
    values = np.frombuffer(data, "<f4", count=len(data) // 4)
    middle = values[values.size // 3 : values.size // 2]
    # Only what looks like a weight: the file also holds shapes and indices.
    looks_real = (np.abs(middle) > 1e-4) & (np.abs(middle) < 1.0)
    middle[looks_real] *= -1.0
    return change_bundle(bundle, place / "other", files={weights.name: bytes(data)}).path
