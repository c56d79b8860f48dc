"""Runs chats side by side on one local endpoint: fairness, starvation, memory, and the time to the first token.

    python -m bench.parallel_chats [--chats 8] [--turns 500] [--widen 0] [--max-tokens 24] [--json PATH]

Real processes: `outrider-cloud serve` of the reference target, `outrider serve` with the reference draft. Each chat
streams conversations of ten turns, one after the other, until all chats together have had `--turns`. The reference pair
has no chat template: a copy of its target gets one, in a temporary directory. The verifier's cache is small, so that
all of it is soon used: pages of a larger one, touched late, would look like growth.

Memory is compared after `--warm-up` more turns, in which every chat has had a whole conversation, caches have filled,
and the draft's runtime has seen most lengths. Speeds are of the time in which all chats run. Exits 1 if the slowest has
less than 1/1.5 of the fastest's tokens/s, if a chat gets no text for longer than `--gap-s`, if a turn fails, or if
the resident memory of endpoint or verifier grows by more than 20 MB from the first tenth of the turns to the last.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

from bench.changed_bundle import TURNS, change_bundle
from bench.processes import Program, Text, device_counts, local_endpoint, read_text, started, verifier
from bench.report import write_json
from rich.console import Console
from rich.table import Table

from outrider.edge.lab.cores import plan_cores
from outrider.export.make.reference_pair import export_reference_pair
from outrider.reference import load_prompts

LEAST_OF_FASTEST: Final = 1 / 1.5
MOST_GROWN_MB: Final = 20.0
LENGTH: Final = 10
"""Turns of a conversation."""
QUESTION_CHARS: Final = 60
console = Console(width=120)


@dataclass(slots=True)
class Turn:
    """A turn of a chat. number: in its conversation, from 1. began_s, ended_s: on one clock for all chats."""

    number: int
    began_s: float
    ended_s: float
    text: Text


@dataclass(slots=True)
class Memory:
    """Resident memory after so many turns."""

    turns: int
    endpoint_mb: float
    verifier_mb: float


@dataclass(slots=True)
class Bench:
    """What the chats share. Turns are handed out one by one, so that all chats run until the end."""

    cloud: Program
    agent: Program
    options: argparse.Namespace
    questions: Sequence[str]
    lock: threading.Lock = field(default_factory=threading.Lock)
    num_begun: int = 0
    num_ended: int = 0
    memory: list[Memory] = field(default_factory=list)
    chats: list[list[Turn]] = field(default_factory=list)

    def run(self) -> None:
        """Runs all chats to their end."""
        self.chats = [[] for _ in range(self.options.chats)]
        threads = [threading.Thread(target=self._chat, args=(index,)) for index in range(self.options.chats)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _chat(self, index: int) -> None:
        messages: list[dict[str, str]] = []
        for number in itertools.count():
            with self.lock:
                if self.num_begun == self.options.warm_up + self.options.turns:
                    return
                self.num_begun += 1
            if number % LENGTH == 0:
                messages = []
            question = self.questions[(index * 37 + number) % len(self.questions)]
            messages.append({"role": "user", "content": question})
            body = {
                "messages": messages,
                "max_tokens": self.options.max_tokens,
                "temperature": 0.8,
                "seed": index,
                "ignore_eos": True,
            }
            began_s = time.monotonic()
            text = read_text(self.agent.url, body, path="/v1/chat/completions")
            messages.append({"role": "assistant", "content": text.text})
            self.chats[index].append(Turn(number % LENGTH + 1, began_s, time.monotonic(), text))
            self._ended()
            if text.error:
                return

    def _ended(self) -> None:
        with self.lock:
            self.num_ended += 1
            if self.num_ended in self.marks:
                self.memory.append(Memory(self.num_ended, self.agent.rss_mb(), self.cloud.rss_mb()))
                row = self.memory[-1]
                console.print(
                    f"{row.turns:4d} turns: endpoint {row.endpoint_mb:.1f} MB, verifier {row.verifier_mb:.1f} MB"
                )

    @property
    def marks(self) -> list[int]:
        """Turns after which memory is read: the first, the warm-up, and every tenth of the rest."""
        warm_up, total = self.options.warm_up, self.options.turns
        return [1, *(warm_up + max(1, round(total * part / 10)) for part in range(11))]


def speeds(chats: Sequence[Sequence[Turn]]) -> list[float]:
    """Tokens/s of each chat, from when all had begun until the first had ended.

    A turn that reaches beyond counts by the part of its time inside.
    """
    start, end = max(chat[0].began_s for chat in chats), min(chat[-1].ended_s for chat in chats)
    found = []
    for chat in chats:
        num_tokens = 0.0
        for turn in chat:
            inside = min(turn.ended_s, end) - max(turn.began_s, start)
            num_tokens += turn.text.num_tokens * max(0.0, inside) / (turn.ended_s - turn.began_s)
        found.append(num_tokens / (end - start))
    return found


def report(bench: Bench) -> bool:
    """Prints what was found, and writes it; whether every bound is met."""
    chats, options = bench.chats, bench.options
    rates = speeds(chats)
    gaps = [max(turn.text.longest_gap_s for turn in chat) for chat in chats]
    table = Table("chat", "turns", "tokens/s", "longest gap, s", "drafted", title=f"{options.chats} chats side by side")
    for index, chat in enumerate(chats):
        num_tokens = sum(turn.text.num_tokens for turn in chat)
        drafted = sum(turn.text.num_accepted for turn in chat) / max(1, num_tokens)
        table.add_row(str(index + 1), str(len(chat)), f"{rates[index]:.1f}", f"{gaps[index]:.2f}", f"{drafted:.0%}")
    console.print(table)
    errors = [turn.text.error for chat in chats for turn in chat if turn.text.error]
    firsts = {n: [t.text.first_s for chat in chats for t in chat if t.number == n] for n in range(1, LENGTH + 1)}
    ttft_ms = {number: median(times) * 1e3 for number, times in firsts.items() if times}
    steady = next(row for row in bench.memory if row.turns >= options.warm_up + options.turns // 10)
    grown = {name: getattr(bench.memory[-1], name) - getattr(steady, name) for name in ("endpoint_mb", "verifier_mb")}
    checks = {
        f"slowest {min(rates):.1f} tokens/s, fastest {max(rates):.1f}: {max(rates) / min(rates):.2f}x, limit 1.5": min(
            rates
        )
        >= LEAST_OF_FASTEST * max(rates),
        f"longest time without text {max(gaps):.2f} s, limit {options.gap_s:g}": max(gaps) <= options.gap_s,
        f"memory from {steady.turns} to {bench.memory[-1].turns} turns: endpoint {grown['endpoint_mb']:+.1f} MB, "
        f"verifier {grown['verifier_mb']:+.1f} MB, limit {MOST_GROWN_MB:+g}": max(grown.values()) <= MOST_GROWN_MB,
        f"failed turns: {len(errors)} {errors[:1]}": not errors,
    }
    for words, is_met in checks.items():
        console.print(f"{'met' if is_met else '[red]NOT met[/red]'}: {words}", highlight=False)
    shown = {number: ttft_ms[number] for number in (1, LENGTH // 2, LENGTH) if number in ttft_ms}
    console.print(f"time to first token, median ms by turn: {', '.join(f'{n}: {ms:.0f}' for n, ms in shown.items())}")
    counts = device_counts(bench.agent.url)
    cpu_s = {"endpoint": bench.agent.cpu_s(), "verifier": bench.cloud.cpu_s()}
    console.print("processor time, s: " + ", ".join(f"{name} {seconds:.0f}" for name, seconds in cpu_s.items()))
    document: dict[str, Any] = {
        "tokens_per_s": rates,
        "longest_gap_s": gaps,
        "ttft_ms": ttft_ms,
        "memory": [asdict(row) for row in bench.memory],
        "counts": counts,
        "cpu_s": cpu_s,
        "checks": {words: bool(is_met) for words, is_met in checks.items()},
    }
    write_json(options.json, document)
    return all(checks.values())


def main() -> int:
    """Runs the chats, prints a table, and returns the exit code."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--chats", type=int, default=8)
    cli.add_argument("--turns", type=int, default=500, help="of all chats together")
    cli.add_argument("--warm-up", type=int, default=100, help="turns before those, of all chats together")
    cli.add_argument("--max-tokens", type=int, default=24, help="of an answer")
    cli.add_argument("--widen", type=float, default=0.0, help="MB of the widened FP32 target; 0: as it is")
    cli.add_argument("--gap-s", type=float, default=5.0, help="longest time without text: a stream's keep-alive")
    cli.add_argument("--depth", default="auto", help="of drafts, as `outrider serve` takes it")
    cli.add_argument("--kv-cache-mb", type=int, default=24, help="of the verifier")
    cli.add_argument("--json", type=Path)
    options = cli.parse_args()
    pair, cores = export_reference_pair(widen_mb=options.widen or None), plan_cores()
    questions = [prompt.text[:QUESTION_CHARS].replace("\n", " ") for prompt in load_prompts(100)]
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory()))
        target = change_bundle(pair.target, place / "target", template=TURNS).path
        cloud = verifier(target, place, cores.cloud, "--kv-cache-mb", str(options.kv_cache_mb))
        stack.enter_context(started(cloud))
        more = ("--metrics", "--max-drafting", str(options.chats), "--depth", options.depth)
        agent = local_endpoint(pair.draft, [cloud.url], place, cores.agent, *more)
        stack.enter_context(started(agent))
        bench = Bench(cloud, agent, options, questions)
        bench.run()
        is_fine = report(bench)
        if warnings := [line for line in agent.said().splitlines() if "WARNING" in line]:
            console.print(f"{len(warnings)} warnings of the endpoint, the first: {warnings[0]}", markup=False)
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
