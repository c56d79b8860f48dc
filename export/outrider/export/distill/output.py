"""Writes the distilled draft as a Hugging Face directory, whole or not at all.

Configuration and tokenizer are the draft's own files, byte for byte; only the weights are new, in the dtype of the
draft's stored weights.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any, Final

from outrider.export.quiet import quiet_upstream
from outrider.export.source.model_source import SourceModel
from outrider.export.source.weight_files import read_safetensors_header
from outrider.models.bundle.build_site import BuildSite
from outrider.models.bundle.bundle_writer import flush_tree
from outrider.models.errors import ExportError
from outrider.models.text.tokenizer import TOKENIZER_FILES

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
    """Raises ExportError if `out` may not be written: it is a source, it exists, or it is not a distilled draft."""
    for source in sources:
        if out.resolve() == source.path or out.resolve() in source.path.parents:
            raise ExportError(f"{out} is, or contains, the source {source.name}; choose another --out")
    if not out.exists():
        return
    if not overwrite:
        raise ExportError(f"{out} exists already; add --overwrite to replace it")
    is_empty = out.is_dir() and not any(out.iterdir())
    if not is_empty and not (out / RECORD_NAME).is_file():
        raise ExportError(f"{out} exists and is not a distilled draft, so it is not replaced; choose another --out")


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


def put_in_place(site: BuildSite, out: Path) -> None:
    """Flushes the new directory to the disk and renames it; an old one is set aside first, and restored on failure."""
    partial, aside = site.path("partial"), site.path("old")
    flush_tree(partial)
    if out.exists():
        out.rename(aside)
    try:
        partial.rename(out)
    except BaseException:
        if aside.exists():
            aside.rename(out)
        raise
    shutil.rmtree(aside, ignore_errors=True)
