"""Opens what the local hop is compared by, for `bench.one_machine --served`: `outrider serve`, the agent, cloud-only.

POST /v1/completions with "stream": true goes to a process on the agent's cores with a draft of its own, over a network
of its own. No other way drafts with stream's draft, and each run has prompts of its own, so no draft finds its prompt
in its cache. Prompt lookup is on in the device, as by default, and off in the verifier. All three make text as tokens
come, and a text's time is until its last piece is here. Each piece of a served text counts as a pass; its `MB` leave
the endpoint out.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from bench.bare_http import Wire
from bench.beside import Written
from bench.processes import endpoint_arguments
from bench.round_trips import Subject

from outrider.edge.lab.child_process import child_process
from outrider.edge.lab.laboratory import CLOUD_ONLY, STREAM, network
from outrider.edge.modes.assemble import Agent
from outrider.edge.results import GenerationRequest, GenerationResult
from outrider.models.http.answer_text import TextAssembler, TextStyle
from outrider.models.ingress.sockets import READY_PREFIX
from outrider.models.text.tokenizer import Tokenizer
from outrider.reference import target_dir

SERVED = "served"
Text = GenerationResult | Written
Write = Callable[[GenerationRequest], Awaitable[Text]]
Said = defaultdict[GenerationRequest, set[str]]
"""What the ways wrote on each request. The endpoint brings text, so texts are compared, not tokens."""


def open_endpoint(
    modes: Mapping[str, Agent], draft: Path, subject: Subject, rtt_ms: float, said: Said, stack: ExitStack
) -> dict[str, tuple[Write, str]]:
    """The ways for `bench.one_machine`, which add their texts to `said`; with whose tokens their own are compared."""
    tokenizer, cores = Tokenizer.from_dir(target_dir()), subject.cores.agent
    cloud = stack.enter_context(network(subject.url, rtt_ms, cores))
    command = ["-m", "outrider.edge.cli", *endpoint_arguments(draft, [cloud])]
    url = stack.enter_context(child_process(command, ready_prefix=READY_PREFIX, cores=cores))
    ours = {name: (aloud(modes[name], tokenizer, said), CLOUD_ONLY) for name in (CLOUD_ONLY, STREAM)}
    return {**ours, SERVED: (over_http(url, tokenizer, said), "")}


def aloud(agent: Agent, tokenizer: Tokenizer, said: Said) -> Write:
    """The agent, whose commits become text as they arrive, as `outrider run` and the endpoint make it."""

    async def write(request: GenerationRequest) -> GenerationResult:
        assembler, pieces = TextAssembler(tokenizer.detokenizer(context=request.prompt), TextStyle()), list[str]()
        found = await agent.generate(request, lambda batch: pieces.append(assembler.push(batch.tokens)))
        said[request].add("".join(pieces) + assembler.finish())
        return found

    return write


def over_http(url: str, tokenizer: Tokenizer, said: Said) -> Write:
    """A streamed completion of the endpoint. Its tokens are counted, not known."""

    async def write(request: GenerationRequest) -> Written:
        body = {
            "prompt": tokenizer.decode(request.prompt),
            "max_tokens": request.max_tokens,
            "temperature": request.params.temperature,
            "seed": request.params.seed,
            "ignore_eos": True,
            "stream": True,
        }
        pieces, arrival_s, began_s = list[str](), list[float](), time.perf_counter()
        async with Wire(url) as wire:
            await wire.post("/v1/completions", body)
            while (event := await wire.event()) is not None:
                if "error" in event:
                    raise SystemExit(f"the endpoint's stream ended with an error: {event['error']}")
                if text := "".join(choice["text"] for choice in event["choices"]):
                    pieces.append(text)
                    arrival_s.append(time.perf_counter() - began_s)
        said[request].add("".join(pieces))
        num_more = request.max_tokens - len(pieces)  # tokens that came together with others
        return Written((), (*arrival_s, *arrival_s[-1:] * num_more), len(pieces), 0, num_more, 0.0)

    return write
