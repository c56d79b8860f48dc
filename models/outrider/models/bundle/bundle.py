"""Opens bundles: a model, its tokenizer and a manifest in one directory, verified when opened.

A bundle holds nothing that executes code on load: safetensors, OpenVINO IR, ONNX and JSON only. `bundle_writer` writes
bundles, `manifest` has the schema. This module loads no model.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from outrider.models.bundle.manifest import MANIFEST_NAME, SCHEMA_VERSION, FileEntry, Manifest
from outrider.models.errors import BundleError
from outrider.models.text.tokenizer import Tokenizer

DATA_SUFFIXES: Final = frozenset(
    {".xml", ".bin", ".onnx", ".data", ".blob", ".safetensors", ".json", ".jinja", ".txt", ".model", ".md"}
)
"""Suffixes that a manifest may list. `.bin` only for the weights of the `.xml` beside it: elsewhere it is a pickle.
`.data` holds an ONNX model's weights, `.blob` an IR compiled for an NPU."""

UNSAFE_SUFFIXES: Final = frozenset(
    {".py", ".pyc", ".pyo", ".so", ".dll", ".dylib", ".exe", ".sh", ".bat", ".ps1"}
    | {".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".bin", ".npy", ".npz", ".joblib"}
)
"""Suffixes that a bundle must not contain, listed or not: code, and formats that can carry code."""

_FINDER_FILE: Final = ".DS_Store"
_FINDER_PREFIX: Final = "._"

# Files whose hash this process has verified, by (path, sha256, size, mtime_ns, inode).
_verified: set[tuple[str, str, int, int, int]] = set()


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle: its directory and its manifest."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> Bundle:
        """Reads the manifest and, unless `verify` is off, checks every file's size and SHA-256.

        A file that this process has verified is hashed again only when its size or time changes.
        Raises BundleError naming the file that is missing, truncated, altered or not in the manifest, and for a bundle
        that an earlier exporter is known to have made wrong.
        """
        root = Path(path)
        bundle = cls(root, _read_manifest(root))
        _refuse_misread(root, bundle.manifest)
        if verify:
            _refuse_strangers(root, {entry.path for entry in bundle.manifest.files})
            for entry in bundle.manifest.files:
                _check_file(root, entry)
        return bundle

    @property
    def model_file(self) -> Path:
        """The IR's `.xml`, the `.onnx`, or the directory itself for safetensors (config and weights lie in it).

        Raises BundleError where the manifest lists none.
        """
        if self.manifest.format == "safetensors":
            return self.path
        suffix = ".onnx" if self.manifest.format == "onnx" else ".xml"
        for entry in self.manifest.files:
            if entry.path.endswith(suffix):
                return self.path / entry.path
        raise BundleError(
            f"{self.path / MANIFEST_NAME} lists no {suffix} file, which holds the model of a bundle in "
            f"{self.manifest.format}; export the model again"
        )

    def tokenizer(self) -> Tokenizer:
        """Loads the tokenizer. Raises BundleError if its fingerprint is not the manifest's."""
        manifest = self.manifest
        tokenizer = Tokenizer.from_dir(self.path, name=manifest.name, limit=manifest.architecture.vocab_size)
        if tokenizer.fingerprint != manifest.tokenizer_fingerprint:
            raise BundleError(
                f"{self.path / 'tokenizer.json'} has fingerprint {tokenizer.fingerprint[:12]}, the manifest "
                f"says {manifest.tokenizer_fingerprint[:12]}; export the model again"
            )
        return tokenizer


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_finder_file(path: Path) -> bool:
    """Whether macOS made the file by itself, as it does on disks of other systems. It is never read."""
    return path.name == _FINDER_FILE or path.name.startswith(_FINDER_PREFIX)


def refuse_unsafe(relative: str, listed: set[str]) -> None:
    """Raises BundleError if the file is code, or of a format that can carry code."""
    path = Path(relative)
    if path.suffix.lower() not in UNSAFE_SUFFIXES:
        return
    if path.suffix == ".bin" and relative in listed and path.with_suffix(".xml").as_posix() in listed:
        return  # the weights of an OpenVINO IR
    raise BundleError(
        f"the bundle contains {relative}, which could execute code on load; a bundle holds safetensors, "
        "OpenVINO IR, ONNX and JSON only; export the model again"
    )


def _read_manifest(root: Path) -> Manifest:
    path = root / MANIFEST_NAME
    if not root.is_dir():
        raise BundleError(f"{root} is not a directory; expected a bundle, as `outrider-export` writes it")
    try:
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text)
    except FileNotFoundError:
        draft, target = root / "draft", root / "target"
        if (draft / MANIFEST_NAME).is_file() and (target / MANIFEST_NAME).is_file():
            raise BundleError(
                f"{root} is a pair of bundles; did you mean {target}, for a server, or {draft}, for a device?"
            ) from None
        raise BundleError(
            f"{root} has no {MANIFEST_NAME}, so it is not a bundle; make one with `outrider-export` (a Hugging "
            "Face directory is its input, not a bundle)"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{path} cannot be read as JSON ({error}); export the model again") from None
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise BundleError(
            f"{path} has schema version {version!r}, this Outrider reads {SCHEMA_VERSION}; export the model "
            "again with this version"
        )
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the manifest"
        raise BundleError(f"{path}: {where}: {first['msg']}; export the model again") from None


def _refuse_misread(root: Path, manifest: Manifest) -> None:
    """Raises BundleError for a bundle whose exporter misread its source's configuration, and whose check missed it.

    Until 0.1.0, keys that the family does not know switched off its window for ONNX Runtime, and Gemma 2's cap of 50
    was left out on OpenVINO where config.json leaves it to the default. A check that got beyond the window is in the
    manifest.
    """
    family, runtime = manifest.architecture.name, manifest.runtime
    windows = {"mistral": 4096, "phi3": None}  # transformers' defaults
    if not (runtime == "onnxruntime" and family in windows) and (runtime, family) != ("openvino", "gemma2"):
        return
    try:
        config = json.loads((root / "config.json").read_text(encoding="utf-8"))
        window = config.get("sliding_window", windows.get(family))
    except (OSError, ValueError, AttributeError, RecursionError):
        return  # the bundle's files are checked elsewhere
    if family == "gemma2":
        is_wrong = manifest.device != "npu" and config.get("attn_logit_softcapping", 50.0) is not None
        why = "leaves out the cap of its attention's logits"
    else:
        checked = any(f"beyond the window of {window}" in stage.name for stage in manifest.report.parity.stages)
        is_wrong = isinstance(window, int) and 0 < window < manifest.architecture.max_positions and not checked
        why = f"may ignore its sliding window of {window} tokens"
    if is_wrong:
        device = f" --device {manifest.device}" if manifest.device != "cpu" else ""
        other = " --runtime onnxruntime" if manifest.role == "draft" else " --runtime torch"
        raise BundleError(
            f"{root} was made by an earlier exporter that misread {family}: it {why}; export it again: outrider-export "
            f"{manifest.role} {manifest.source.name}{device}{other} --out {root} --overwrite"
        )


def _refuse_strangers(root: Path, listed: set[str]) -> None:
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root).as_posix()
        if path.is_symlink():
            raise BundleError(f"{path} is a symbolic link; a bundle holds its own files: replace the link by a copy")
        if not path.is_file() or relative == MANIFEST_NAME or (is_finder_file(path) and relative not in listed):
            continue
        refuse_unsafe(relative, listed)
        if relative not in listed and not path.name.startswith(".") and path.suffix not in (".md", ".txt"):
            # A chat template or another shard of weights would be used although no hash covers it.
            raise BundleError(f"{path} is not in the manifest; remove it")
    for relative in sorted(listed):
        if Path(relative).suffix.lower() not in DATA_SUFFIXES:
            raise BundleError(f"the manifest lists {relative}, whose format is not allowed; export the model again")


def _check_file(root: Path, entry: FileEntry) -> None:
    path = root / entry.path
    if not path.is_file():
        raise BundleError(f"{path} is missing; copy the bundle again")
    stat = path.stat()
    if stat.st_size != entry.size:
        kind = "truncated" if stat.st_size < entry.size else "altered"
        raise BundleError(
            f"{path} is {kind}: {stat.st_size} bytes, the manifest says {entry.size}; copy the bundle again"
        )
    key = (str(path.resolve()), entry.sha256, stat.st_size, stat.st_mtime_ns, stat.st_ino)
    if key in _verified:
        return
    found = hash_file(path)
    if found != entry.sha256:
        raise BundleError(
            f"{path} is altered: its SHA-256 is {found[:16]}..., the manifest says {entry.sha256[:16]}...; "
            "copy the bundle again"
        )
    _verified.add(key)
