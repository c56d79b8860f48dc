"""The distilled draft as a Hugging Face directory: put in place whole, or not at all.

Configuration and tokenizer are the draft's own files, byte for byte; only the weights are new, in the dtype in which
the draft's were stored.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any, Final

from outrider.export.quiet import quiet_upstream
from outrider.export.source.model_source import SourceModel
from outrider.export.source.weight_files import read_safetensors_header
from outrider.models.bundle_writer import flush_tree
from outrider.models.errors import ExportError
from outrider.models.tokenizer import TOKENIZER_FILES

RECORD_NAME: Final = "distillation.json"
_COPIED: Final = (
    *TOKENIZER_FILES,
    "config.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)
_TORCH_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def check_output(out: Path, sources: tuple[SourceModel, ...], *, overwrite: bool) -> None:
    """Raises ExportError if `out` may not be written: it is a source, it exists, or it is something else's."""
    for source in sources:
        if out.resolve() == source.path or out.resolve() in source.path.parents:
            raise ExportError(f"{out} is, or holds, {source.name}, which is never altered; choose another --out")
    if not out.exists():
        return
    if not overwrite:
        raise ExportError(f"{out} exists already; choose another place, or say --overwrite")
    is_empty = out.is_dir() and not any(out.iterdir())
    if not is_empty and not (out / RECORD_NAME).is_file():
        raise ExportError(f"{out} exists and is no distilled draft, so it is not replaced; choose another place")


def write_model(model: Any, source: SourceModel, directory: Path) -> None:
    """Writes `model`, cast to the dtype of `source`'s weights, and the source's other files, to a new directory."""
    import torch

    with quiet_upstream(f"writing {directory.name}"):
        model.to(getattr(torch, stored_dtype(source))).save_pretrained(directory)
    for name in ("config.json", "generation_config.json"):
        (directory / name).unlink(missing_ok=True)
    for name in _COPIED:
        if (source.path / name).is_file():
            shutil.copyfile(source.path / name, directory / name)


def stored_dtype(source: SourceModel) -> str:
    """The dtype of most of the source's tensors, as torch names it."""
    count = Counter(
        tensor["dtype"] for path in source.weight_files for tensor in read_safetensors_header(path).values()
    )
    return _TORCH_DTYPES.get(count.most_common(1)[0][0], "float32")


def recover_output(out: Path) -> None:
    """Undoes what a killed process left beside `out`. Only the process that holds the lock of `out` may ask."""
    aside = _aside(out)
    if aside.exists() and not out.exists():
        aside.rename(out)  # it died between the two renames of `put_in_place`
    for leftover in (partial_directory(out), aside):
        shutil.rmtree(leftover, ignore_errors=True)


def partial_directory(out: Path) -> Path:
    """Where the output is built: beside its place."""
    return out.with_name(f".{out.name}.distilled")


def put_in_place(partial: Path, out: Path) -> None:
    """Flushes what was built to the disk and renames it; what was there steps aside first, and back if that fails."""
    flush_tree(partial)
    aside = _aside(out)
    if out.exists():
        out.rename(aside)
    try:
        partial.rename(out)
    except BaseException:
        if aside.exists():
            aside.rename(out)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _aside(out: Path) -> Path:
    return out.with_name(f".{out.name}.replaced")
