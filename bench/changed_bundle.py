"""Copies a bundle with other files: measurements need pairs that nobody ships."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

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
