"""Hides the output of converters unless they fail.

optimum, nncf and transformers print tables, progress bars and tracer warnings that say nothing about the model. While
they run, their output is captured; if they fail, its end becomes part of the error.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import warnings
from collections.abc import Iterator
from typing import Final
from unittest.mock import patch

from outrider.models.errors import ExportError, OutriderError
from outrider.models.process.extras import missing_extra
from outrider.models.process.telemetry import disable_openvino_telemetry

_LEVELS: Final = {
    **dict.fromkeys(("transformers", "optimum", "nncf", "huggingface_hub", "openvino"), logging.ERROR),
    **dict.fromkeys(("onnxruntime", "onnxscript", "onnx_ir", "torch.onnx"), logging.CRITICAL),
}
_KEPT_LINES: Final = 12
_KEPT_CHARACTERS: Final = 1500
_ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# What optimum advises: its documentation for programmers, an issue there.
_UPSTREAM_ADVICE: Final = re.compile(r" Please (refer to|open an issue)\b.*", re.DOTALL)
# torch.onnx writes pages of advice about its own flags, then its causes, the first one first.
_TORCH_SUMMARY: Final = re.compile(r"## Exception summary\s+(?:<class '(?P<kind>[\w.]+)'>: )?(?P<cause>[^\n]+)")


@contextlib.contextmanager
def quiet_upstream(what: str) -> Iterator[None]:
    """Runs upstream code; `what` names its purpose ("converting the draft to OpenVINO").

    Raises RuntimeUnavailable, with the pip command, for a package that is not installed, and ExportError with the
    upstream message for any other exception but our own.
    """
    disable_openvino_telemetry()
    heard = io.StringIO()
    levels = {name: logging.getLogger(name).level for name in _LEVELS}
    stand_in = logging.NullHandler()
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            contextlib.redirect_stdout(heard),
            contextlib.redirect_stderr(heard),
            _no_network(),
        ):
            for name, level in _LEVELS.items():
                logging.getLogger(name).setLevel(level)
            logging.getLogger().addHandler(stand_in)  # the ONNX packages' `basicConfig` does nothing if there is one
            yield
    except OutriderError:
        raise
    except ModuleNotFoundError as error:
        raise missing_extra(error, what, "export") from None
    except Exception as error:
        said = "\n".join(_plain(heard.getvalue()).replace("\r", "\n").splitlines()[-_KEPT_LINES:])
        raise ExportError(
            f"{what} failed: {_cause(error)}" + (f"\nits last output:\n{said}" if said else "")
        ) from error
    finally:
        logging.getLogger().removeHandler(stand_in)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _plain(text: str) -> str:
    """`text` without colours."""
    return _ANSI.sub("", text)


def _cause(error: Exception) -> str:
    """An upstream error's kind and message: the first cause where torch.onnx lists several; not more than a page."""
    kind, message = type(error).__name__, _UPSTREAM_ADVICE.sub("", _plain(str(error)))
    if found := _TORCH_SUMMARY.search(message):
        return f"{(found['kind'] or kind).rpartition('.')[2]}: {found['cause'].strip()}"
    lines = "\n".join(message.splitlines()[:_KEPT_LINES])
    short = lines[:_KEPT_CHARACTERS].rstrip()
    return f"{kind}: {short}" + (" ..." if len(short) < len(message.rstrip()) else "")


@contextlib.contextmanager
def _no_network() -> Iterator[None]:
    """Keeps upstream code off the model hub, and its progress bars out of error messages.

    huggingface_hub reads its settings once, at import. It is imported here with the user's own settings, which are put
    back for downloads (`hub`).
    """
    import huggingface_hub.constants as hub
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    before = os.environ.get("HF_HUB_OFFLINE")
    with contextlib.ExitStack() as undo, patch.object(hub, "HF_HUB_OFFLINE", True):
        if not are_progress_bars_disabled():
            disable_progress_bars()
            undo.callback(enable_progress_bars)
        if before is None:
            undo.callback(os.environ.pop, "HF_HUB_OFFLINE")
        else:
            undo.callback(os.environ.__setitem__, "HF_HUB_OFFLINE", before)
        os.environ["HF_HUB_OFFLINE"] = "1"  # for processes that upstream starts
        yield
