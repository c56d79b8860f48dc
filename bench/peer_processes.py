"""Makes the peers' forms of the pair, starts a process of `bench.peer_drafts` for each, and reads its texts.

A model that has to be made is kept in the user's cache, in the folder of the pair's bundles.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final, TextIO
from urllib.parse import urlsplit

import psutil
from bench.beside import Written
from bench.pairs import Verifier, safetensors_target
from bench.peer_drafts import LLAMA_SERVER, Asked
from bench.processes import Program, source_path, started
from filelock import FileLock

from outrider.edge.lab.cores import CorePlan
from outrider.edge.lab.laboratory import network
from outrider.edge.results import GenerationRequest
from outrider.export.convert.onnx_builder import build_with_genai
from outrider.export.make.pair import PairPaths
from outrider.export.make.reference_pair import export_reference_pair
from outrider.export.recipes import ExportOptions
from outrider.models.cache_folder import default_cache_dir
from outrider.models.errors import OutriderError
from outrider.reference import draft_dir

_SILENCE_S: Final = 300.0
"""After which a peer that says nothing has failed."""
_SAID: Final = 600
"""Characters of a log that are shown."""
_LINK: Final = """
import sys
from pathlib import Path
from bench.peer_engines import link_for_genai
link_for_genai(*map(Path, sys.argv[1:]))
"""
# llama.cpp's own converter. It knows tokenizers by a hash, and not ours; prompts are ids, so it never splits text.
_CONVERT: Final = """
import sys
from pathlib import Path
root = Path(sys.argv.pop(1))
sys.path[:0] = [str(root), str(root / "gguf-py")]
import conversion.base, conversion.llama
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
conversion.llama.LlamaModel.set_vocab = lambda self: self._set_vocab_gpt2()
import convert_hf_to_gguf
convert_hf_to_gguf.main()
"""


class PeerFailed(Exception):
    """A peer does not run, or gave no text."""


class PeerProcess:
    """One peer at one depth. It is opened by its first text, and stopped while it has no turn."""

    def __init__(self, program: Program, connection: socket.socket, answers: TextIO) -> None:
        self._program, self._connection, self._answers = program, connection, answers
        self._program.signal(signal.SIGSTOP)

    @property
    def peak_mb(self) -> float:
        """Of its process and those that it started."""
        leader = psutil.Process(self._program.pid)
        return peak_mb(leader, *leader.children(recursive=True))

    async def generate(self, request: GenerationRequest) -> Written:
        """One text, each token as it arrives here. Raises PeerFailed."""
        return await asyncio.to_thread(self._write, request)

    def _write(self, request: GenerationRequest) -> Written:
        params, arrived = request.params, list[tuple[int, float]]()
        asked = Asked(request.prompt, request.max_tokens, params.temperature, params.seed)
        self._program.signal(signal.SIGCONT)
        try:
            began_s = time.perf_counter()
            self._connection.sendall(json.dumps(asdict(asked)).encode() + b"\n")
            for line in self._answers:
                at_s, told = time.perf_counter() - began_s, json.loads(line)
                if "error" in told:
                    raise PeerFailed(told["error"])
                if "counts" in told:
                    if len(arrived) != request.max_tokens:
                        raise PeerFailed(f"it wrote {len(arrived)} tokens; expected {request.max_tokens}")
                    tokens, arrival_s = zip(*arrived, strict=True)
                    return Written(tokens, arrival_s, **told["counts"])
                arrived += [(token, at_s) for token in told["tokens"]]
        except TimeoutError:
            raise PeerFailed(f"it said nothing for {_SILENCE_S:g} s") from None
        except OSError:
            pass  # the process ended; its log says why
        finally:
            self._program.signal(signal.SIGSTOP)
        raise PeerFailed(f"it ended: {self._program.said()[-_SAID:]}")


def peak_mb(*processes: psutil.Process) -> float:
    """The sum of the most memory that each had."""
    return sum(_peak_mb(Path(f"/proc/{process.pid}/status").read_text()) for process in processes)


def _peak_mb(status: str) -> float:
    return next(int(line.split()[1]) * 1024 / 1e6 for line in status.splitlines() if line.startswith("VmHWM:"))


@dataclass(frozen=True, slots=True)
class PeerCommand:
    """What a kind is started with. python: the interpreter that has the peer."""

    kind: str
    pair: PairPaths
    python: str
    variables: Mapping[str, str]

    def __call__(self, drafted: int, cores: CorePlan, rtt_ms: float, stack: ExitStack) -> PeerProcess:
        """Starts it on the cloud's cores, a round trip of `rtt_ms` away. Raises PeerFailed."""
        command = ["-m", "bench.peer_drafts", self.kind, str(self.pair.target), str(self.pair.draft)]
        command += ["--drafted", str(drafted), "--threads", str(len(cores.cloud or ()) or os.cpu_count())]
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
        environment = {"PYTHONPATH": source_path()} | dict(self.variables)
        try:
            program = stack.enter_context(started(Program(command, log, cores.cloud, environment, self.python)))
        except (OSError, OutriderError) as error:
            raise PeerFailed(str(error)) from error
        url = urlsplit(stack.enter_context(network(program.url, rtt_ms, cores.agent)))
        connection = stack.enter_context(socket.create_connection((url.hostname or "", url.port or 0)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_SILENCE_S)
        return PeerProcess(program, connection, stack.enter_context(connection.makefile(encoding="utf-8")))


# -- the pair, as each peer reads it -----------------------------------------------------------------------------------


def _openvino(widen_mb: float | None) -> PairPaths:
    pair = Verifier().pair(widen_mb)

    def linked(bundle: Path) -> Path:
        def link(place: Path) -> None:
            _run("openvino_tokenizers", _LINK, str(bundle), str(place))

        return _kept(f"genai-{bundle.parent.name}", link)

    return PairPaths(linked(pair.draft), linked(pair.target))


def _safetensors(widen_mb: float | None) -> PairPaths:
    return PairPaths(draft_dir(), safetensors_target(widen_mb))


def _onnx(widen_mb: float | None) -> PairPaths:
    draft = export_reference_pair(draft=ExportOptions("draft", runtime="onnxruntime")).draft
    source = safetensors_target(widen_mb)

    def build(place: Path) -> None:
        build_with_genai(source, place, "fp32", place.parent, "target")

    return PairPaths(draft, _kept(f"onnx-{widen_mb or 0:g}", build))


def _gguf(llama_cpp: Path, widen_mb: float | None) -> PairPaths:
    def convert(source: Path, kind: str, place: Path) -> None:
        arguments = ["--outfile", str(place / "model.gguf"), "--outtype", kind]
        _run("llama.cpp's converter", _CONVERT, str(llama_cpp), str(source), *arguments)

    target = _kept(f"gguf-{widen_mb or 0:g}", partial(convert, safetensors_target(widen_mb), "f32"))
    draft = _kept("gguf-draft", partial(convert, draft_dir(), "q8_0"))
    return PairPaths(draft / "model.gguf", target / "model.gguf")


def _run(name: str, code: str, *arguments: str) -> None:
    """In a process of its own: what it loads is no memory of ours."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerFailed(f"{name} ended: {done.stderr[-_SAID:]}")


def _kept(name: str, make: Callable[[Path], None]) -> Path:
    """The folder of that name, made where this cache has none."""
    place = default_cache_dir() / "pairs" / name
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(place.with_suffix(".lock")):
        if not place.is_dir():
            with tempfile.TemporaryDirectory(dir=place.parent) as work:
                made = Path(work) / "made"
                made.mkdir()
                make(made)
                shutil.move(made, place)
    return place


def prepare(kind: str, widen_mb: float | None, vllm_python: str | None, llama_cpp: Path | None) -> PeerCommand:
    """Makes what a kind reads. Raises PeerFailed."""
    makers = {"openvino_genai": _openvino, "openvino_lookup": _openvino, "onnxruntime_genai": _onnx}
    make, python, variables = makers.get(kind, _safetensors), sys.executable, dict[str, str]()
    if kind == "vllm":
        if vllm_python is None:
            raise PeerFailed("no --vllm-python was given")
        python = vllm_python
    if kind == "llama_cpp":
        if llama_cpp is None:
            raise PeerFailed("no --llama-cpp was given")
        make, variables = partial(_gguf, llama_cpp), {LLAMA_SERVER: str(llama_cpp / "build" / "bin" / "llama-server")}
    try:
        return PeerCommand(kind, make(widen_mb), python, variables)
    except (ImportError, OutriderError) as error:
        raise PeerFailed(f"{type(error).__name__}: {error}") from error
