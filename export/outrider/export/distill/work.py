"""Keeps the state of a distillation, so that a killed one continues and a changed one begins again; writes the result.

Every state is in a folder named by a hash of all that decides it: the pool by the target, the prompts and the sampling;
the training by the pool, the draft and the training options. So a state is never continued with other inputs; states of
other inputs are kept and reported, with what differs.

The result is a Hugging Face directory, whole or not at all. Configuration and tokenizer are the draft's own files, byte
for byte; only the weights are new, in the dtype of the draft's stored weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from outrider.export.quiet import quiet_upstream
from outrider.export.source.model_source import TEXT_FILES, SourceModel
from outrider.export.source.weight_files import DTYPES, read_safetensors_header
from outrider.models.errors import ExportError

INPUTS: Final = "inputs.json"


def default_work(out: Path) -> Path:
    """The hidden folder beside the output."""
    return out.with_name(f".{out.name}.distillation")


@contextlib.contextmanager
def locked(work: Path) -> Iterator[None]:
    """Holds the folder for this process. Raises ExportError if another distillation has it."""
    work.mkdir(parents=True, exist_ok=True)
    path = work / "lock"
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ExportError(f"another distillation is at work in {work}; wait for it, or use another --work") from None
    try:
        yield
    finally:
        lock.release()
        if all(child == path for child in work.iterdir()):
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another process has begun there
                work.rmdir()


class StateFolder:
    """The folder of one result, `kind` ("pool" or "training") for these inputs.

    others: for each state of the same kind for other inputs, its folder and what differs, in words.
    """

    def __init__(self, work: Path, kind: str, inputs: Mapping[str, Any]) -> None:
        self._kind = kind
        self._inputs = dict(inputs)
        key = hashlib.sha256(json.dumps(self._inputs, sort_keys=True).encode()).hexdigest()[:16]
        self.path = work / f"{kind}-{key}"
        self.is_resumed = self.path.is_dir()
        self.others = [
            (path, self._difference(path)) for path in sorted(work.glob(f"{kind}-*")) if path.name != self.path.name
        ]

    def open(self, *, resume: bool) -> Path:
        """Creates the folder, emptied unless it may be resumed, and returns it."""
        if not resume:
            shutil.rmtree(self.path, ignore_errors=True)
            self.is_resumed = False
        self.path.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self._inputs, indent=1, sort_keys=True) + "\n"
        (self.path / INPUTS).write_text(text, encoding="utf-8")
        return self.path

    def remove(self) -> None:
        """Removes it: the result is in place."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _difference(self, other: Path) -> str:
        try:
            theirs = json.loads((other / INPUTS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return "unknown inputs"
        names = sorted(name for name in self._inputs | theirs if self._inputs.get(name) != theirs.get(name))
        return ", ".join(f"{name} {_short(theirs.get(name))}, now {_short(self._inputs.get(name))}" for name in names)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _short(value: Any) -> str:
    text = json.dumps(value)
    is_hash = isinstance(value, str) and len(value) == 64
    return value[:12] if is_hash else text if len(text) <= 60 else text[:57] + "..."


RECORD_NAME: Final = "distillation.json"


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
    """Writes `model`, in the dtype of most of `source`'s weights, and the source's other files, to a new directory."""
    import torch
    from transformers import GenerationConfig

    # transformers writes none that contradicts itself, as many published ones do; the draft's own file takes its place.
    model.generation_config = GenerationConfig()
    headers = (read_safetensors_header(path) for path in source.weight_files)
    most_common = Counter(tensor["dtype"] for header in headers for tensor in header.values()).most_common(1)[0][0]
    with quiet_upstream(f"writing {directory.name}"):
        model.to(getattr(torch, dict(DTYPES.values()).get(most_common, "float32"))).save_pretrained(directory)
    for name in ("config.json", "generation_config.json"):
        (directory / name).unlink(missing_ok=True)
    for name in TEXT_FILES:
        if (source.path / name).is_file():
            shutil.copyfile(source.path / name, directory / name)
