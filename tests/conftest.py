"""Fixtures that several test modules share. Tests make their models; see tests/tiny_models.py."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import os
import signal
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from importlib import import_module, util
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from filelock import FileLock
from hypothesis import settings
from tests import tiny_models
from tests.waiting import run
from tools import tiny_sources

from outrider.models.process.telemetry import disable_openvino_telemetry

if TYPE_CHECKING:
    from tests.cascades import Cascade
    from tests.chromium import Browser
    from tests.commands import Outrider
    from tests.fronts import FakeReplica, RunningFront
    from tests.local_endpoint import LocalEndpoint
    from tests.serving import FakeServer

    from outrider.edge.store.shelf import Shelf
    from outrider.export.make.pair import PairPaths
    from outrider.models.grammar.compiler import GrammarCompiler
    from outrider.models.text.tokenizer import Tokenizer

disable_openvino_telemetry()  # each conversion would fork this process, for an analytics service
os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub: no test contacts a hub
# The same for Triton, whose kernels are interpreted but where vLLM has a GPU; tests/test_on_gpu.py wants 0.
is_compiled = util.find_spec("vllm") is not None and import_module("torch").cuda.is_available()
os.environ.setdefault("TRITON_INTERPRET", str(int(not is_compiled)))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # beside another process, threads of small operations wait busily
settings.register_profile("outrider", deadline=None)  # with Hypothesis' own a slow machine would be a fault
settings.load_profile("outrider")

# A vocabulary of 96 here, odd sizes elsewhere: nothing should depend on round numbers.
TINY_VOCAB = 96


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine on an event loop of its own, with a limit that only a hang reaches."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


@pytest.fixture(scope="session", autouse=True)
def own_places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This run's own directory for what exports keep between stages, and an empty configuration.

    Whatever the user's are, also in processes that it starts.
    """
    config = tmp_path_factory.mktemp("config") / "config.toml"
    config.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OUTRIDER_CONFIG", str(config))
        yield


@pytest.fixture(scope="session", autouse=True)
def roots_read_once() -> Iterator[None]:
    """Lets httpx read the roots of TLS once: it takes 15 ms for each client, also for one that speaks plain HTTP."""
    from httpx import create_ssl_context

    @functools.cache
    def usual(trust_env: bool, *roots: str | None) -> ssl.SSLContext:
        return create_ssl_context(trust_env=trust_env)

    def created(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is not True or cert is not None:
            return create_ssl_context(verify, cert, trust_env)
        return usual(trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", created)
        yield


@pytest.fixture(scope="session", autouse=True)
def servers_end_at_once() -> Iterator[None]:
    """uvicorn looks every 0.1 s whether it is to end, and then waits 0.1 s: that is long for a thousand servers.

    Not on vLLM, whose engine ends what is open at once: there a test could not ask a server any more that drains.
    """
    import uvicorn.server

    least_s = 0.1 if util.find_spec("vllm") else 0.01

    async def soon(delay: float) -> None:
        await asyncio.sleep(min(delay, least_s))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": soon}))
        yield


@pytest.fixture(autouse=True)
def blocks_returned() -> Iterator[None]:
    """After each test, whatever happened in it, all blocks of the engines that it drove by hand must be free."""
    yield
    if (harness := sys.modules.get("tests.engine_harness")) is not None:
        harness.Harness.check_made()


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect() -> None:
    """Hides all objects imported so far from the garbage collector. Exports run it at every stage; at 0.5 s per run it
    took a fifth of all tests' time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all processes of this run: what takes long to make is made by one of them."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def made_once(place: Path, make: Callable[[Path], object]) -> Path:
    """The folder that `make` makes; other processes wait for it."""
    with FileLock(place.with_suffix(".lock")):
        if not place.is_dir():
            unfinished = place.with_suffix(".unfinished")
            make(unfinished)
            unfinished.rename(place)
    return place


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_model("qwen2")` is the Hugging Face directory of a random FP32 model, made once per session.

    Qwen2's embeddings are tied, the others' are not.
    """
    root = tmp_path_factory.mktemp("tiny")
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            tied = family == "qwen2"
            made[family] = tiny_models.make_tiny_model(
                family, root / family, vocab_size=TINY_VOCAB, tie_word_embeddings=tied
            )
        return made[family]

    return make


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_source("phi3")` is a whole source of that family, made once."""
    root = tmp_path_factory.mktemp("tiny-sources")
    return functools.cache(lambda family: tiny_sources.make_tiny_source(family, root / family))


@pytest.fixture(scope="session")
def tiny_ir(tiny_model: Callable[[str], Path], shared_folder: Path) -> Callable[..., Path]:
    """`tiny_ir("qwen2", int8=True)` is the directory of that model's OpenVINO IR, exported once."""

    def export(family: str, *, int8: bool = False) -> Path:
        if int8:
            make = partial(tiny_models.compress_int8, export(family))
            return made_once(shared_folder / f"tiny-ir-{family}-int8", make)
        return made_once(shared_folder / f"tiny-ir-{family}", partial(tiny_models.export_openvino, tiny_model(family)))

    return export


@pytest.fixture(scope="session")
def reference_cache(shared_folder: Path) -> Path:
    """A cache directory (for OUTRIDER_CACHE) that holds the bundled pair's exports, made once."""
    from outrider.export.make.reference_pair import export_reference_pair

    root = shared_folder / "reference-cache"
    export_reference_pair(root)
    return root


@pytest.fixture(scope="session")
def reference_pair(reference_cache: Path) -> PairPaths:
    """The bundled pair's two bundles: FP32 target, INT8 draft."""
    from outrider.export.make.reference_pair import export_reference_pair

    return export_reference_pair(reference_cache)


@pytest.fixture(scope="session")
def npu_pair(reference_cache: Path) -> PairPaths:
    """The pair that `outrider demo --emulate-npu --widen 0` runs: that target, and an INT8 draft for an NPU."""
    from outrider.edge.cli.draft_source import NPU_SHAPES
    from outrider.export.make.reference_pair import export_reference_pair
    from outrider.export.recipes import ExportOptions

    draft = ExportOptions("draft", device="npu", static_shapes=NPU_SHAPES)
    return export_reference_pair(reference_cache, draft=draft)


@pytest.fixture(scope="session")
def onnx_draft(shared_folder: Path) -> Path:
    """The bundled draft in INT8 for ONNX Runtime on the CPU."""
    from outrider.export.make.pair import reference_directories
    from outrider.export.make.pipeline import export_model
    from outrider.export.recipes import ExportOptions

    options = ExportOptions("draft", runtime="onnxruntime")
    return made_once(
        shared_folder / "onnx-draft", lambda place: export_model(reference_directories().draft, place, options)
    )


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The reference target's."""
    from outrider.models.text.tokenizer import Tokenizer
    from outrider.reference import target_dir

    return Tokenizer.from_dir(target_dir())


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    """Of grammars, for a model whose logits are 33 ids wider than that tokenizer."""
    from outrider.models.grammar.compiler import GrammarCompiler

    with closing(GrammarCompiler(tokenizer, tokenizer.size + 33, tokenizer.eos_token_ids)) as made:
        yield made


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    """One verifier for the tests of a module that only read from it."""
    from tests.serving import serve_fake

    with serve_fake() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: FakeServer) -> Iterator[httpx.Client]:
    """A client of it."""
    with httpx.Client(base_url=server.url) as opened:
        yield opened


@pytest.fixture(scope="module")
def cloud() -> Iterator[FakeServer]:
    """One that verifies what devices send and nothing else."""
    from tests.agents import SURE
    from tests.serving import serve_fake

    with serve_fake(config=SURE) as running:
        yield running


@pytest.fixture(scope="module")
def local(cloud: FakeServer) -> Iterator[LocalEndpoint]:
    """A local endpoint that drafts for it."""
    from tests.local_endpoint import DRAFTS, serve_local

    with serve_local(cloud.url, DRAFTS) as running:
        yield running


@pytest.fixture(scope="module")
def usual() -> Iterator[Cascade]:
    """A cascade for the tests that only read from it."""
    from tests.cascades import cascade

    with cascade() as running:
        yield running


@pytest.fixture(scope="module")
def group() -> Iterator[list[FakeReplica]]:
    """Two replicas for the tests that only read from them."""
    from tests.fronts import replicas

    with replicas(2) as running:
        yield running


@pytest.fixture(scope="module")
def front(group: list[FakeReplica]) -> Iterator[RunningFront]:
    """A front before them."""
    from tests.fronts import serve_front

    with serve_front(group) as running:
        yield running


@pytest.fixture(scope="session")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    """Two random models with one tokenizer: they agree by chance only."""
    from outrider.export.make.pair import PairPaths

    root = tmp_path_factory.mktemp("strangers")
    for name, seed in (("draft", 1), ("target", 2)):
        tiny_models.make_tiny_tokenizer(root / name)
        tiny_models.make_tiny_model("llama", root / name, vocab_size=320, seed=seed)
    return PairPaths(root / "draft", root / "target")


@pytest.fixture
def signals_reach_children() -> Iterator[None]:
    """A background job starts with SIGINT ignored, one under nohup with SIGHUP ignored: children would inherit that."""
    ignored = [
        number
        for name in ("SIGINT", "SIGHUP")
        if (number := getattr(signal, name, None)) is not None and signal.getsignal(number) is signal.SIG_IGN
    ]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def outrider(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Outrider:
    """Runs the device's commands in this process."""
    from tests.commands import Outrider

    return Outrider(monkeypatch, capsys)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration file that the commands read, empty, and no variable beside it; write it."""
    path = tmp_path / "config" / "outrider.toml"
    path.parent.mkdir()
    path.touch()
    monkeypatch.setenv("OUTRIDER_CONFIG", str(path))
    for name in list(os.environ):
        if name.startswith("OUTRIDER_") and name not in ("OUTRIDER_CONFIG", "OUTRIDER_CACHE"):
            monkeypatch.delenv(name)
    return path


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """An empty cache of this test's own."""
    from outrider.edge.store.shelf import Shelf

    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return Shelf()


@pytest.fixture
def fake_bundle(tmp_path: Path) -> Path:
    """A draft bundle with the fake server's tokenizer and a model that nothing can run."""
    from tests.drafts import make_draft

    return make_draft(tmp_path / "draft").path


@pytest.fixture
def opened_models(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Opens a fake model in the place of any draft's; the files that it was asked for."""
    from tests.fake_runtime import FakeSequenceRuntime
    from tests.serving import fake_tokenizer

    asked: list[Path] = []

    def open_fake(kind: str, model_file: Path, options: object) -> FakeSequenceRuntime:
        asked.append(model_file)
        return FakeSequenceRuntime(vocab_size=fake_tokenizer().size)

    monkeypatch.setattr("outrider.edge.modes.assemble.open_sequence_runtime", open_fake)
    return asked


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real Chromium; skips where there is none."""
    from tests.chromium import open_browser

    with open_browser() as running:
        yield running
