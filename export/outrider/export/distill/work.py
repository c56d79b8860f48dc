"""Keeps the state of a distillation, so that a killed one continues and a changed one begins again.

Every result is in a folder named by a hash of all that decides it: the pool by the target, the prompts and the
sampling; the training by the pool, the draft and the training options. So a state is never continued with other inputs;
states of other inputs are kept and reported, with what differs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

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
