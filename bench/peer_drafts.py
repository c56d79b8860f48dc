"""Runs a peer's speculation in this process, for `bench.one_machine`: texts come as JSON lines, figures go back.

    python -m bench.peer_drafts {openvino_genai,transformers} TARGET DRAFT --threads N

`openvino_genai` takes bundles of OpenVINO, with the properties of `bench.peer_engines`; `transformers` takes model
directories, in FP32.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from bench.peer_engines import PROPERTIES, link_for_genai, own_output, serve
from bench.report import option, parser


@dataclass(frozen=True, slots=True)
class Asked:
    """One text. drafted: tokens that the draft guesses for each pass; 0: none, without a draft."""

    prompt: tuple[int, ...]
    max_tokens: int
    drafted: int
    temperature: float
    seed: int


Write = Callable[[Asked], list[int]]


def openvino_genai(target: Path, draft: Path, threads: int, stack: ExitStack) -> Write:
    """Its pipeline, over links to the bundles' files."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    places = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
    for bundle, place in zip((target, draft), places, strict=True):
        link_for_genai(bundle, place)
    properties = PROPERTIES | {"INFERENCE_NUM_THREADS": threads}

    @lru_cache
    def pipeline(is_drafted: bool) -> Any:
        with_draft = {"draft_model": genai.draft_model(str(places[1]), "CPU", **properties)} if is_drafted else {}
        return genai.LLMPipeline(str(places[0]), "CPU", **properties, **with_draft)

    def write(asked: Asked) -> list[int]:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = asked.max_tokens, True
        config.do_sample = asked.temperature > 0.0
        if config.do_sample:
            config.temperature, config.rng_seed = asked.temperature, asked.seed
        if asked.drafted:
            config.num_assistant_tokens = asked.drafted
        ids = ov.Tensor(np.array([asked.prompt], np.int64))
        given = genai.TokenizedInputs(ids, ov.Tensor(np.ones_like(ids.data)))
        return list(pipeline(asked.drafted > 0).generate(given, config).tokens[0])

    return write


def transformers(target: Path, draft: Path, threads: int, stack: ExitStack) -> Write:
    """Its assisted generation."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    models = [
        AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, local_files_only=True)
        for place in (target, draft)
    ]

    def write(asked: Asked) -> list[int]:
        torch.manual_seed(asked.seed)
        sampling = {"do_sample": True, "temperature": asked.temperature, "top_k": 0} if asked.temperature else {}
        assistant = None
        if asked.drafted:
            assistant = models[1]
            assistant.generation_config.num_assistant_tokens = asked.drafted
        ids = torch.tensor([asked.prompt])
        with torch.inference_mode():
            found = models[0].generate(
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=assistant,
                max_new_tokens=asked.max_tokens,
                min_new_tokens=asked.max_tokens,
                **({"do_sample": False} | sampling),
            )
        tokens: list[int] = found[0, ids.shape[1] :].tolist()
        return tokens

    return write


KINDS: Final = {"openvino_genai": openvino_genai, "transformers": transformers}


def main() -> None:
    """The command."""
    options = parser(
        __doc__,
        {
            "kind": {"choices": tuple(KINDS)},
            "target": {"type": Path},
            "draft": {"type": Path},
            "--threads": option(1),
        },
    ).parse_args()
    with own_output() as answers, ExitStack() as stack:
        write = KINDS[options.kind](options.target, options.draft, options.threads, stack)

        def answer(given: Any) -> dict[str, Any]:
            began_s = time.perf_counter()
            return {"tokens": write(Asked(**given)), "took_s": time.perf_counter() - began_s}

        serve(answer, sys.stdin, answers)


if __name__ == "__main__":
    main()
