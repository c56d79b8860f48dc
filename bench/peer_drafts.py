"""Runs one peer's drafts in this process, for `bench.one_machine`: texts are asked for over a socket, tokens go back.

    PYTHON -m bench.peer_drafts KIND TARGET DRAFT --drafted N --threads N

`--drafted` is the number of tokens that the draft guesses for each pass; 0 is the target alone. A question is a line of
JSON (`Asked`); the answer is a line for each group of tokens as they come, and a last one with the counts, or with the
error. Each engine has the target in FP32, and an FP32 cache where it lets one choose. Its draft is in INT8 where it has
that form.

| kind              | drafts by                                        | target           | draft            |
|-------------------|--------------------------------------------------|------------------|------------------|
| openvino_genai    | its `draft_model`                                | OpenVINO         | OpenVINO, INT8   |
| openvino_lookup   | its prompt lookup, runs of up to 3 tokens        | OpenVINO         | none             |
| transformers      | its assisted generation                          | safetensors      | safetensors, FP32|
| onnxruntime_genai | its draft-model speculation                      | ONNX             | ONNX, INT8       |
| llama_cpp         | `llama-server`'s `draft-simple`                  | GGUF             | GGUF, Q8_0       |
| vllm              | its `draft_model` method, eager, in this process | safetensors      | safetensors, FP32|
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TextIO

from bench.peer_engines import PROPERTIES
from bench.processes import free_port, is_healthy
from bench.report import option, parser

from outrider.models.ingress.sockets import READY_PREFIX

LLAMA_SERVER: Final = "OUTRIDER_LLAMA_SERVER"
"""The variable with the path of `llama-server`."""
_NGRAM: Final = 3
_CONTEXT: Final = 1024
_KV_CACHE_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Asked:
    """One text."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Peer:
    """What a kind is opened with."""

    target: Path
    draft: Path
    drafted: int
    threads: int


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one text; the prompt's pass counts as one."""

    num_passes: int
    num_drafted: int
    num_accepted: int


Emit = Callable[[Sequence[int]], None]
"""Takes tokens as they come."""
Write = Callable[[Asked, Emit], Counts]


def openvino_genai(peer: Peer, stack: ExitStack, *, looks_up: bool = False) -> Write:
    """Its pipeline, with the properties of `bench.peer_engines`."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    properties: dict[str, Any] = PROPERTIES | {"INFERENCE_NUM_THREADS": peer.threads}
    # Its own default but for the cache of prefixes, which would skip the prompts of all runs but the first.
    schedule = genai.SchedulerConfig()
    schedule.enable_prefix_caching, schedule.max_num_batched_tokens = False, 1 << 20
    more: dict[str, Any] = {"scheduler_config": schedule} | ({"prompt_lookup": True} if looks_up else {})
    if peer.drafted and not looks_up:
        more["draft_model"] = genai.draft_model(str(peer.draft), "CPU", **properties)
    pipeline = genai.LLMPipeline(str(peer.target), "CPU", **properties, **more)

    class Streamer(genai.StreamerBase):  # type: ignore[misc]
        def __init__(self, emit: Emit) -> None:
            super().__init__()
            self.emit, self.num_calls = emit, 0

        def write(self, tokens: int | Sequence[int]) -> Any:
            self.num_calls += 1
            self.emit([tokens] if isinstance(tokens, int) else list(tokens))
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    def write(asked: Asked, emit: Emit) -> Counts:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = asked.max_tokens, True
        config.do_sample = asked.temperature > 0.0
        if config.do_sample:
            config.temperature, config.rng_seed = asked.temperature, asked.seed
        if peer.drafted:
            config.num_assistant_tokens = peer.drafted
        if looks_up:
            config.max_ngram_size = _NGRAM
        ids = ov.Tensor(np.array([asked.prompt], np.int64))
        given = genai.TokenizedInputs(ids, ov.Tensor(np.ones_like(ids.data)))
        streamer = Streamer(emit)
        found = pipeline.generate(given, config, streamer)
        figures = found.extended_perf_metrics
        if figures is None:  # no draft: it counts neither lookup's guesses nor its passes
            return Counts(streamer.num_calls, 0, len(found.tokens[0]) - streamer.num_calls)
        num_passes = len(figures.main_model_metrics.raw_metrics.m_durations)
        return Counts(num_passes, figures.get_num_draft_tokens(), figures.get_num_accepted_tokens())

    return write


def openvino_lookup(peer: Peer, stack: ExitStack) -> Write:
    """Its prompt lookup."""
    return openvino_genai(peer, stack, looks_up=True)


def transformers(peer: Peer, stack: ExitStack) -> Write:
    """Its assisted generation."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(peer.threads)
    num_calls = [0, 0]
    models = []
    for index, place in enumerate((peer.target, peer.draft) if peer.drafted else (peer.target,)):
        model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, local_files_only=True)

        def before(*_: Any, index: int = index) -> None:
            num_calls[index] += 1

        model.register_forward_pre_hook(before)
        models.append(model)

    class Streamer:
        def __init__(self, emit: Emit) -> None:
            self.emit, self.is_prompt = emit, True

        def put(self, tokens: Any) -> None:
            if not self.is_prompt:
                self.emit(tokens.flatten().tolist())
            self.is_prompt = False

        def end(self) -> None:
            pass

    def write(asked: Asked, emit: Emit) -> Counts:
        torch.manual_seed(asked.seed)
        more: dict[str, Any] = {"do_sample": False}
        if asked.temperature:
            more = {"do_sample": True, "temperature": asked.temperature, "top_k": 0}
        if peer.drafted:
            models[1].generation_config.num_assistant_tokens = peer.drafted
            more["assistant_model"] = models[1]
        num_calls[:] = [0, 0]
        ids = torch.tensor([asked.prompt])
        with torch.inference_mode():
            models[0].generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=asked.max_tokens,
                min_new_tokens=asked.max_tokens,
                streamer=Streamer(emit),
                **more,
            )
        return Counts(num_calls[0], num_calls[1], asked.max_tokens - num_calls[0])

    return write


def onnxruntime_genai(peer: Peer, stack: ExitStack) -> Write:
    """Its draft-model speculation, which wants the draft below the target: links make that folder."""
    import numpy as np
    import onnxruntime_genai as genai

    place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    for path in peer.target.iterdir():
        (place / path.name).symlink_to(path)
    (place / "draft").symlink_to(peer.draft)
    threads = {"session_options": {"intra_op_num_threads": peer.threads}}
    model: dict[str, Any] = {"decoder": threads}
    if peer.drafted:
        drafts = json.loads((peer.draft / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"]
        model["draft"] = drafts | {"filename": "draft/model.onnx"} | threads
    config = genai.Config(str(place))
    config.overlay(json.dumps({"model": model}))
    runtime = genai.Model(config)

    def write(asked: Asked, emit: Emit) -> Counts:
        length, params = len(asked.prompt) + asked.max_tokens, genai.GeneratorParams(runtime)
        sampling = {"temperature": asked.temperature, "top_k": 0, "random_seed": asked.seed}
        more = sampling if asked.temperature else {"top_k": 1}
        # min_length keeps the end token out, as ignore_eos does elsewhere.
        params.set_search_options(max_length=length, min_length=length, do_sample=asked.temperature > 0.0, **more)
        if peer.drafted:
            params.set_speculative_options(max_draft_tokens=peer.drafted)
        generator = genai.Generator(runtime, params)
        generator.append_tokens(np.array([asked.prompt], np.int32))
        while not generator.is_done():
            generator.generate_next_token()
            emit([int(generator.get_next_tokens()[0])])
        if not peer.drafted:
            return Counts(asked.max_tokens, 0, 0)
        figures = generator.get_speculative_stats()
        proposed, accepted = figures["draft_tokens_proposed"], figures["draft_tokens_accepted"]
        return Counts(1 + figures["target_forward_passes"], proposed, accepted)

    return write


def llama_cpp(peer: Peer, stack: ExitStack) -> Write:
    """`llama-server` as a child of this process, so that it is stopped with it; its stream is passed on."""
    port = free_port()
    server = [os.environ[LLAMA_SERVER], "--model", str(peer.target), "--port", str(port), "--parallel", "1"]
    server += ["--threads", str(peer.threads), "--ctx-size", str(_CONTEXT), "--no-webui"]
    server += ["--cache-type-k", "f32", "--cache-type-v", "f32"]
    if peer.drafted:
        server += ["--spec-type", "draft-simple", "--spec-draft-model", str(peer.draft)]
        server += ["--spec-draft-n-max", str(peer.drafted), "--spec-draft-threads", str(peer.threads)]
        server += ["--spec-draft-type-k", "f32", "--spec-draft-type-v", "f32"]
    running = subprocess.Popen(server, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    stack.callback(running.wait)
    stack.callback(running.kill)
    if not is_healthy(f"http://127.0.0.1:{port}/health", running):
        raise RuntimeError(f"`{' '.join(server)}` ended with {running.returncode}")

    def write(asked: Asked, emit: Emit) -> Counts:
        question = {
            "prompt": asked.prompt,
            "n_predict": asked.max_tokens,
            "temperature": asked.temperature,
            "samplers": ["temperature"],
            "seed": asked.seed,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
        }
        told: dict[str, Any] = {}
        # A new connection for each text: the server closes one that is idle, as all are while this process is stopped.
        with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            connection.request("POST", "/completion", json.dumps(question), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                told = json.loads(line.removeprefix(b"data: "))
                if told.get("tokens"):
                    emit(told["tokens"])
        if "timings" not in told:
            raise RuntimeError(f"llama-server answered {answer.status}: {told}")
        accepted = told["timings"].get("draft_n_accepted", 0)
        return Counts(asked.max_tokens - accepted, told["timings"].get("draft_n", 0), accepted)

    return write


def vllm(peer: Peer, stack: ExitStack) -> Write:
    """Its engine, stepped here."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(peer.threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    drafts = {"method": "draft_model", "model": str(peer.draft), "num_speculative_tokens": peer.drafted}
    engine = LLM(
        str(peer.target),
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        async_scheduling=False,
        disable_log_stats=False,
        max_num_seqs=1,
        max_model_len=_CONTEXT,
        kv_cache_memory_bytes=_KV_CACHE_BYTES,
        **({"speculative_config": drafts} if peer.drafted else {}),
    ).llm_engine

    def counted(name: str) -> int:
        return sum(each.value for each in engine.get_metrics() if each.name == f"vllm:spec_decode_num_{name}_tokens")

    def write(asked: Asked, emit: Emit) -> Counts:
        params = SamplingParams(
            temperature=asked.temperature, max_tokens=asked.max_tokens, ignore_eos=True, seed=asked.seed
        )
        before = counted("draft"), counted("accepted")
        engine.add_request("text", TokensPrompt(prompt_token_ids=list(asked.prompt)), params)
        num_steps = num_tokens = 0
        while engine.has_unfinished_requests():
            num_steps += 1
            for found in engine.step():
                tokens = found.outputs[0].token_ids
                emit(list(tokens[num_tokens:]))
                num_tokens = len(tokens)
        return Counts(num_steps, counted("draft") - before[0], counted("accepted") - before[1])

    return write


KINDS: Final[dict[str, Callable[[Peer, ExitStack], Write]]] = {
    each.__name__: each for each in (openvino_genai, openvino_lookup, transformers, onnxruntime_genai, llama_cpp, vllm)
}


def answer(opens: Callable[[], Write], questions: TextIO, answers: TextIO) -> None:
    """Answers each question, to the last. The first one also opens the peer: its errors are answers, too."""
    write: Write | None = None

    def tell(**told: Any) -> None:
        print(json.dumps(told), file=answers, flush=True)

    for question in questions:
        try:
            write = write or opens()
            counts = write(Asked(**json.loads(question)), lambda tokens: tell(tokens=tokens))
        except Exception as error:  # each engine has its own types
            traceback.print_exc()
            tell(error=f"{type(error).__name__}: {error}")
        else:
            tell(counts=asdict(counts))


@contextmanager
def own_output() -> Iterator[TextIO]:
    """Standard output for answers; what libraries print goes to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        yield answers


def main() -> None:
    """The command."""
    options = parser(
        __doc__,
        {
            "kind": {"choices": tuple(KINDS)},
            "target": {"type": Path},
            "draft": {"type": Path},
            "--drafted": option(0),
            "--threads": option(1),
        },
    ).parse_args()
    peer = Peer(options.target, options.draft, options.drafted, options.threads)
    with own_output() as told, ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"{READY_PREFIX}http://127.0.0.1:{listener.getsockname()[1]}", file=told, flush=True)
        asker, _ = listener.accept()
        asker.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with asker, asker.makefile(encoding="utf-8") as questions, asker.makefile("w", encoding="utf-8") as answers:
            answer(partial(KINDS[options.kind], peer, stack), questions, answers)


if __name__ == "__main__":
    main()
