"""Keeps the converters' chatter from the user and their errors in sight.

optimum, nncf and transformers print tables, progress bars and tracer warnings that say nothing about the
model. While they run, output is kept aside; if they fail, its end becomes part of the error.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Final

from outrider.models.errors import ExportError, OutriderError
from outrider.models.telemetry import disable_openvino_telemetry

_LOGGERS: Final = ("transformers", "optimum", "nncf", "huggingface_hub", "openvino", "torch.onnx")
_KEPT_LINES: Final = 12


@contextlib.contextmanager
def quiet_upstream(what: str) -> Iterator[None]:
    """Runs upstream code; `what` says what it is for ("converting the draft to OpenVINO").

    Raises ExportError with the upstream message for any exception but our own.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # only local directories are exported
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    disable_openvino_telemetry()
    heard = io.StringIO()
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
            warnings.simplefilter("ignore")
            for name in _LOGGERS:
                logging.getLogger(name).setLevel(logging.ERROR)
            yield
    except OutriderError:
        raise
    except Exception as error:
        said = "\n".join(heard.getvalue().replace("\r", "\n").splitlines()[-_KEPT_LINES:])
        raise ExportError(
            f"{what} failed: {type(error).__name__}: {error}" + (f"\nits last words:\n{said}" if said else "")
        ) from error
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
