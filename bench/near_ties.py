"""Counts texts that vLLM changes with the shape of its steps: alone, many at once, with drafts. In half precision.

Each text is first generated alone and without drafts; then all at once, and with right and with mixed drafts. A text
that differs was near a tie somewhere: logits of half precision depend on how many rows a step has. The interpreter has
to have vLLM.

    python -m bench.near_ties MODEL [--dtype bfloat16] [--texts 20] [--max-tokens 40] [--batch-invariant]
"""

from __future__ import annotations

import argparse
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from outrider.cloud.seam import CommitEvent, Event, GenerateRequest
from outrider.cloud.vllm.engine import VllmConfig, VllmEngine, set_environment
from outrider.cloud.vllm.options import VllmOptions, engine_arguments
from outrider.models.errors import RequestError
from outrider.models.sampling import SamplingParams

PROMPT_TOKENS: Final = 24
TIMEOUT_S: Final = 600.0
SAMPLINGS: Final = (
    SamplingParams(),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=0.7, top_k=40),
)
Guess = Callable[[Sequence[int], int], list[int]]


def right(text: Sequence[int], at: int) -> list[int]:
    """What comes next."""
    return list(text[at : at + 8])


def mixed(text: Sequence[int], at: int) -> list[int]:
    """The same with a wrong token at times."""
    rng = random.Random(at)
    return [token if rng.random() < 0.75 else token ^ 1 for token in text[at : at + 8]]


class Text:
    """A text that is being generated; a sink. guess: drafts after each commit, of the text generated alone."""

    def __init__(self, engine: VllmEngine, request: GenerateRequest, known: Sequence[int], guess: Guess | None) -> None:
        self.tokens: list[int] = []
        self._engine, self._known, self._guess = engine, known, guess
        self._begun, self._ended = threading.Event(), threading.Event()
        self._number = engine.submit(request, self)
        self._begun.set()

    def __call__(self, event: Event) -> None:
        if not isinstance(event, CommitEvent):
            self._ended.set()
            return
        self.tokens += event.tokens
        draft = self._guess(self._known, len(self.tokens)) if self._guess else []
        if draft and self._begun.wait(TIMEOUT_S):
            try:
                self._engine.draft(self._number, len(self.tokens), [draft])
            except RequestError:
                pass  # the text has ended, or gone another way

    def wait(self) -> list[int]:
        """The whole text."""
        if not self._ended.wait(TIMEOUT_S):
            raise TimeoutError("the text did not end")
        return self.tokens


def main() -> None:
    """The command."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("model", type=Path)
    cli.add_argument("--dtype", default="bfloat16")
    cli.add_argument("--texts", type=int, default=20)
    cli.add_argument("--max-tokens", type=int, default=40)
    cli.add_argument("--batch-invariant", action="store_true", help="vLLM's mode, for some GPUs")
    given = cli.parse_args()
    if given.batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    options = VllmOptions.parse([f"dtype={given.dtype}", "enforce_eager=true", "max_draft=8"])
    set_environment(options, 0)
    arguments = engine_arguments(
        options,
        str(given.model.resolve()),
        max_running=32,
        step_tokens=1024,
        kv_cache_bytes=256 << 20,
        shares_prefixes=False,
        drain_s=1.0,
    )
    engine = VllmEngine(VllmConfig(arguments=arguments, max_draft=options.max_draft))
    try:
        show(engine, given.texts, given.max_tokens)
    finally:
        engine.stop()
        engine.close()


def show(engine: VllmEngine, num_texts: int, max_tokens: int) -> None:
    """Prints a line for each way of generating the texts."""
    rng = random.Random(7)
    requests = []
    for seed in range(num_texts):
        base = SAMPLINGS[seed % len(SAMPLINGS)]
        prompt = tuple(rng.randrange(1, engine.limits.vocab_size) for _ in range(PROMPT_TOKENS))
        params = SamplingParams(base.temperature, base.top_k, base.top_p, base.min_p, seed)
        requests.append(GenerateRequest(prompt, params, max_tokens, patience_ms=0.0))
    alone = [Text(engine, request, (), None).wait() for request in requests]
    print(f"{num_texts} texts of {max_tokens} tokens; differ from the text alone and without drafts:")
    for name, guess in (("all at once", None), ("right drafts", right), ("mixed drafts", mixed)):
        texts = [Text(engine, request, known, guess) for request, known in zip(requests, alone, strict=True)]
        found = [text.wait() for text in texts]
        firsts = [
            next(i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b)
            for x, y in zip(alone, found, strict=True)
            if x != y
        ]
        num_compared = num_texts * max_tokens - sum(max_tokens - 1 - first for first in firsts)
        print(f"{name}: {len(firsts)} texts, {len(firsts)} differences in {num_compared} tokens")


if __name__ == "__main__":
    main()
