"""Compares two ways for a cascade's mid to go back to the target's text: cancel and resume, or rewind in the engine.

    python -m bench.going_back [--rounds 60] [--context 200] [--back 6] [--json PATH]

The reference target runs one sequence. A round: 8 steps, then the last `--back` tokens are void and another token
follows what is left. The time from there to the next commit is measured, in turns:

  resume   the sequence is cancelled, another begins with the text as its prompt; the prefix cache has its full blocks
  rewind   the same sequence loses the tokens; it keeps its blocks but those known by hash that hold a void token

Both must give the same next token. A plain step is the least that either can take. Prints medians and tokens run.
"""

from __future__ import annotations

import sys
import time
from contextlib import closing
from statistics import median
from typing import Final

from bench.report import TO_JSON, option, parser, write_json
from tests.requests import flat_request

from outrider.cloud.engine import Engine, EngineConfig
from outrider.cloud.seam import CommitEvent, Event, Sink
from outrider.export.make.reference_pair import export_reference_pair
from outrider.models.bundle.bundle import Bundle
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes import open_batch_runtime
from outrider.models.runtimes.base import RuntimeOptions

STEPS: Final = 8


class Text:
    """One text of a way, and the sink of its sequence."""

    def __init__(self, engine: Engine, prompt: list[int], is_rewinding: bool) -> None:
        self._engine, self._is_rewinding = engine, is_rewinding
        self.tokens = list(prompt)
        self._start = len(prompt)
        self._id = 0
        self._run = object()
        self._submit()

    def _submit(self) -> None:
        request = flat_request(tuple(self.tokens), SamplingParams(), 100_000, owner=bytes([self._is_rewinding]))
        self._start = len(self.tokens)
        self._id = self._engine.submit(request, self._new_sink())

    def _new_sink(self) -> Sink:
        run = self._run = object()

        def sink(event: Event) -> None:
            if isinstance(event, CommitEvent) and run is self._run:
                self.tokens += event.tokens

        return sink

    def grow(self, length: int) -> None:
        """Steps until the text is so long."""
        while len(self.tokens) < length:
            self._engine.step()

    def go_back(self, num_void: int, token: int) -> tuple[float, int]:
        """ms to the next commit, and the tokens that ran for it."""
        totals = self._engine.stats().totals
        before, began = totals.step_tokens, time.perf_counter()
        kept = len(self.tokens) - num_void
        self.tokens[kept:] = [token]
        if self._is_rewinding:
            self._engine.rewind(self._id, kept - self._start, [token], self._new_sink())
        else:
            self._engine.cancel(self._id)
            self._submit()
        self.grow(kept + 2)
        return (time.perf_counter() - began) * 1e3, self._engine.stats().totals.step_tokens - before

    def close(self) -> None:
        """Ends the sequence."""
        self._engine.cancel(self._id)
        self._engine.step()


def main() -> None:
    """Measures."""
    options = parser(
        __doc__, {"--rounds": option(60), "--context": option(200), "--back": option(6), **TO_JSON}
    ).parse_args()
    bundle = Bundle.open(export_reference_pair().target)
    loading = RuntimeOptions(device="CPU", num_threads=1, kv_cache_bytes=256 << 20)
    took: dict[str, list[float]] = {"step": [], "resume": [], "rewind": []}
    ran: dict[str, list[int]] = {"resume": [], "rewind": []}
    num_different = 0
    with closing(open_batch_runtime(bundle.manifest.runtime, bundle.model_file, loading)) as runtime:
        engine = Engine(runtime, EngineConfig(looks_up=False))
        prompt = [10 + (7 * i) % 200 for i in range(options.context)]
        for number in range(options.rounds):
            texts = []
            for name in ("resume", "rewind") if number % 2 else ("rewind", "resume"):
                text = Text(engine, [*prompt, 10 + number], name == "rewind")
                length = len(text.tokens)
                text.grow(length + STEPS - 1)
                began = time.perf_counter()
                text.grow(length + STEPS)
                took["step"].append((time.perf_counter() - began) * 1e3)
                ms, num_run = text.go_back(options.back, 300 + number)
                took[name].append(ms)
                ran[name].append(num_run)
                text.grow(len(text.tokens) + 4)
                texts.append(text.tokens)
                text.close()
            num_different += texts[0] != texts[1]
    found = {name: median(values) for name, values in took.items()}
    for name, value in found.items():
        tokens = f", {sum(ran[name]) / len(ran[name]):.1f} tokens run" if name in ran else ""
        print(f"{name:8} {value:6.2f} ms{tokens}")
    print(f"{num_different} of {options.rounds} texts differ")
    write_json(options.json, {"ms": found, "tokens": ran, "different": num_different})
    sys.exit(1 if num_different else 0)


if __name__ == "__main__":
    main()
