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

from outrider.models.errors import ExportError, OutriderError, RuntimeUnavailable
from outrider.models.telemetry import disable_openvino_telemetry

_LOGGERS: Final = ("transformers", "optimum", "nncf", "huggingface_hub", "openvino", "torch.onnx")
_KEPT_LINES: Final = 12


@contextlib.contextmanager
def quiet_upstream(what: str) -> Iterator[None]:
    """Runs upstream code; `what` says what it is for ("converting the draft to OpenVINO").

    Raises RuntimeUnavailable, with the pip command, for a package that is not installed, and ExportError with the
    upstream message for any other exception but our own.
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
    except ModuleNotFoundError as error:
        raise missing_extra(error, what) from None
    except Exception as error:
        said = "\n".join(heard.getvalue().replace("\r", "\n").splitlines()[-_KEPT_LINES:])
        raise ExportError(
            f"{what} failed: {type(error).__name__}: {error}" + (f"\nits last words:\n{said}" if said else "")
        ) from error
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def missing_extra(error: ModuleNotFoundError, what: str) -> Exception:
    """What to raise for an import that failed while doing `what`: the command that installs the package, if it is one.

    A missing module of our own is a bug and stays what it is.
    """
    if error.name is None or error.name.startswith("outrider"):
        return error
    return RuntimeUnavailable(
        f'{what} needs the package {error.name!r}, which is not installed; run: pip install "outrider[export]"'
    )
