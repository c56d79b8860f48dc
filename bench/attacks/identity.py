"""Makes another model of a bundle, for what happens when it answers in a verifier's place."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np


def other_model(bundle: Path, place: Path) -> Path:
    """A copy of the bundle with the sign of some weights turned, and a manifest that fits: a different model."""
    other = place / "other"
    shutil.copytree(bundle, other)
    weights = next(path for path in sorted(other.iterdir()) if path.suffix in (".bin", ".safetensors"))
    data = bytearray(weights.read_bytes())
    values = np.frombuffer(data, "<f4", count=len(data) // 4)
    middle = values[values.size // 3 : values.size // 2]
    # Only what looks like a weight: the file also holds shapes and indices.
    looks_real = (np.abs(middle) > 1e-4) & (np.abs(middle) < 1.0)
    middle[looks_real] *= -1.0
    weights.write_bytes(data)
    path = other / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    for entry in manifest["files"]:
        if entry["path"] == weights.name:
            entry["sha256"] = hashlib.sha256(data).hexdigest()
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return other
