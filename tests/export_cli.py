"""`outrider-export` in this process, and the check of one export, for tests."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from outrider.export.cli import main as cli
from outrider.export.make.pipeline import stage_export
from outrider.export.make.stage_store import StageStore
from outrider.export.progress import silent
from outrider.export.recipes import ExportOptions
from outrider.export.source.model_source import SourceModel, read_source
from outrider.models.bundle.manifest import Parity


def run_export(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit status of `outrider-export` with these arguments; the handler of SIGTERM is as before."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["outrider-export", *arguments])
    try:
        cli.main()
    except SystemExit as exit:
        return int(exit.code or 0)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def parity_of(source: Path | SourceModel, tmp_path: Path, options: ExportOptions) -> Parity:
    """The check of one export, which is not put in place; what the next of this test may use is kept."""
    read, store = read_source(source) if isinstance(source, Path) else source, StageStore(tmp_path / "store")
    with stage_export(read, tmp_path / "out", options, silent, store) as staged:
        return staged.manifest.report.parity
