"""SIGTERM while `outrider-cloud serve` loads: the process ends at once, with 143, also as process 1 of a container."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from outrider.cloud.server import serve as serve_module
from outrider.cloud.server.options import ServeOptions
from outrider.cloud.server.serve import serve

pytestmark = pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
TIMEOUT_S = 60.0
PROCESS_1 = ["unshare", "--pid", "--fork", "--kill-child"]
LOADS = """
import ctypes
from types import SimpleNamespace
from outrider.cloud.server import embedded, serve
from outrider.cloud.server.options import ServeOptions

def load(*_):
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    print("loads", flush=True)
    lock(mutex)  # for ever, in native code, and again after each signal

target = object.__new__(embedded.BundleTarget)
target.path, target.source_name, target.model = None, "slow", None
target._bundle = SimpleNamespace(manifest=SimpleNamespace(runtime="openvino"), model_file=None)
target._loading = None
target._options = ServeOptions("slow")
embedded.open_batch_runtime, serve.open_target = load, lambda options: target
serve.serve(ServeOptions("slow", port=0, share_tokenizer=False))
"""


@pytest.mark.parametrize("prefix", [[], PROCESS_1], ids=["a process", "process 1"])
def test_a_server_ends_while_native_code_loads_its_model(prefix: list[str]) -> None:
    """Python's own handlers would wait for that code, and process 1 has no default."""
    if prefix and (not shutil.which(prefix[0]) or subprocess.run([*prefix, "true"], capture_output=True).returncode):
        pytest.skip("no right to make a process 1")
    with subprocess.Popen([*prefix, sys.executable, "-c", LOADS], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "loads\n"
            outside = psutil.Process(process.pid)
            (outside.children()[0] if prefix else outside).send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
        finally:
            process.kill()


def test_what_was_begun_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that loads in Python, such as vLLM with processes of its own, is left by SystemExit."""
    was_left: list[bool] = []

    @contextmanager
    def load() -> Iterator[Any]:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            yield
        finally:
            was_left.append(True)

    target = SimpleNamespace(load=load, model=None, path=tmp_path, source_name="slow")
    monkeypatch.setattr(serve_module, "open_target", lambda options: target)
    monkeypatch.setattr(serve_module, "configure_logging", lambda _: None)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        serve(ServeOptions("slow", port=0, share_tokenizer=False))
    assert ended.value.code == 128 + signal.SIGTERM and was_left
    assert signal.getsignal(signal.SIGTERM) is before
