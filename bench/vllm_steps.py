"""Measures what our scheduler adds between two steps of vLLM's engine: no model, no workers, vLLM's own scheduler.

    PYTHON -m bench.vllm_steps [--sessions 32 128] [--steps 300] [--step-ms 20] [--flood] [--json PATH]

PYTHON is the interpreter of vLLM's environment. The order of calls is that of `EngineCore.step`: `schedule`, the model,
`get_grammar_bitmask` while it runs, `update_from_output`. The model sleeps a step's time, and its picks are looked up.
Each commit is answered with a tree of 24 nodes, whose likeliest guess is right at 7 levels in 10: while the next step
runs, or, for some, when it is over. With --flood another process sends trees of 512 nodes for one of the sessions, as
fast as they are taken.

Afterwards vLLM's own scheduler repeats the run: the same requests, drafts and picks. What a step took longer in ours,
from the model's end to the next order, is our share: "between". "during" is what we do while the model runs. A step
that does not start in time, because that took too long, counts as between. Times are by the clock, so measure on an
idle machine. Tokens per pass tell what drafts that are read late cost.

Exits 1 where the share between steps is over its bound: 0.8 ms with 32 sessions, 2.5 ms with 128; with --flood 1 ms
more.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import zmq
from bench.attacks.attackers import attacking
from bench.known_text import LIKELY, VOCAB_SIZE, nodes_after
from bench.report import TO_JSON, figures_table, option, parser, verdict
from bench.vllm_scheduler import (
    BLOCK_SIZE,
    MAX_DRAFT,
    PROMPT_TOKENS,
    add_requests,
    engine_config,
    open_scheduler,
    picks_of,
    result_of,
    write_model,
)
from rich.console import Console

from outrider.cloud.pending.estimators import StepSize
from outrider.cloud.vllm import engine_messages as wire
from outrider.cloud.vllm.options import VllmConfig
from outrider.cloud.vllm.parent import PLACE_VARIABLE
from outrider.models.wire.tree_draft import ROOT, TreeDraft

MAX_BETWEEN_MS: Final = {32: 0.8, 128: 2.5}
"""Bound on the median of our share between two steps, by sessions."""
MAX_FLOOD_MS: Final = 1.0
"""What a flood may add to it."""

ALTERNATIVES: Final = 2
WARM_UP_STEPS: Final = 30
_ON_THE_WAY_S: Final = 0.002  # through a local socket
# -- the server and the devices, a process of its own ------------------------------------------------------------------


def _is_level_right(token: int) -> bool:
    """Whether the device's likeliest guess after a token is right: the same for every session."""
    return token * 2_654_435_761 % 4_294_967_296 % 10 < 7


@cache
def _nodes_after(token: int) -> tuple[list[int], list[int], list[int]]:
    """Of the device's tree: where its likeliest guess is wrong, the first alternative is right."""
    return nodes_after(token, ALTERNATIVES, lambda token: 0 if _is_level_right(token) else 1)


def tree_after(token: int, base: int, first: int) -> TreeDraft:
    """The device's tree behind a last token; its first node has the number `first`."""
    tokens, parents, levels = _nodes_after(token)
    return TreeDraft(base, first, tokens, [ROOT if parent == ROOT else first + parent for parent in parents], levels)


class Devices:
    """The server and its sessions' devices: the newest commit of each session gets one answer.

    late: share of the answers that come when the model's run is over; which ones, changes from step to step.
    """

    def __init__(self, place: str, num_sessions: int, late: float) -> None:
        self._context = zmq.Context()
        self._reports = wire.open_socket(self._context, zmq.PULL)
        self._reports.bind(wire.reports_address(Path(place)))
        self._orders = wire.open_socket(self._context, zmq.PUSH, wire.MAX_ORDERS)
        self._orders.connect(wire.orders_address(Path(place)))
        self._num_nodes = [0] * (num_sessions + 1)
        self._late, self._num_steps = late, 0
        self._newest: dict[int, tuple[int, int]] = {}  # commits without an answer: tokens so far, and the last one

    def answer(self, *, are_late: bool) -> None:
        """Reads what was reported, and sends those answers that come now."""
        while self._reports.poll(0):
            for commit in wire.decode_report(self._reports.recv()).commits:
                event = commit.event
                self._newest[commit.number] = event.base + len(event.tokens), event.tokens[-1]
        self._num_steps += not are_late
        for number in list(self._newest):
            if are_late == ((number * 7919 + self._num_steps * 31) % 97 < 97 * self._late):
                base, last = self._newest.pop(number)
                message = tree_after(last, base, self._num_nodes[number])
                self._num_nodes[number] += len(message.tokens)
                self._orders.send(wire.encode(wire.TreeOrder(number, message, time.monotonic())))
        time.sleep(_ON_THE_WAY_S)

    def close(self) -> None:
        """Closes the sockets."""
        self._context.destroy(linger=0)


def flood(report: Any, place: str, number: int) -> None:
    """Sends the largest trees for one session, as fast as they are taken."""
    report.send("begun")
    context = zmq.Context()
    orders = wire.open_socket(context, zmq.PUSH, wire.MAX_ORDERS)
    orders.connect(wire.orders_address(Path(place)))
    count, first = 512, 1 << 20
    parents = [ROOT, *range(first, first + count - 1)]
    while True:
        message = TreeDraft(1, first, [(first + i) % VOCAB_SIZE for i in range(count)], parents, [LIKELY] * count)
        try:
            orders.send(wire.encode(wire.TreeOrder(number, message, time.monotonic())), zmq.NOBLOCK)
        except zmq.ZMQError:
            time.sleep(0.001)


# -- steps -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Model:
    """The emulated one. step_s: of a step; token_s: of each token in it."""

    step_s: float
    token_s: float

    def seconds(self, num_tokens: int) -> float:
        """Of a step; one without tokens is vLLM's pause."""
        return self.step_s + self.token_s * num_tokens if num_tokens else 0.001


@dataclass(slots=True)
class Step:
    """What a step was, and what it took. drafts: by request. picks: of each request, in order.

    before_s, during_s, after_s: of `schedule`, `get_grammar_bitmask` and `update_from_output`; late_s: that the second
    ended after the model.
    """

    drafts: dict[str, list[int]]
    picks: dict[str, list[int]]
    before_s: float = 0.0
    during_s: float = 0.0
    after_s: float = 0.0
    late_s: float = 0.0


def steady(scheduler: Any, model: Model) -> None:
    """Has the scheduler learn the model's own times: how busy this machine is must not decide what is drafted."""
    drafting, stepped = scheduler._book.drafting, scheduler._book.drafting.stepped
    drafting.stepped = lambda size, seconds, has_trees: stepped(size, model.seconds(size.tokens), has_trees)
    for tokens in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64) * 4:  # as `VllmEngine.calibrate`
        drafting.stepped(StepSize.of(tokens, PROMPT_TOKENS), 0.0, False)


def run_step(scheduler: Any, devices: Devices, model: Model) -> Step:
    """One step, as `EngineCore.step` runs it; the model sleeps, and what the devices do takes no time of it."""
    clock, began = time.perf_counter, time.perf_counter()
    output = scheduler.schedule()
    ordered = clock()
    devices.answer(are_late=False)
    asked, asked_at = clock(), time.monotonic()
    if hasattr(scheduler, "_ordered_s"):
        scheduler._ordered_s = asked_at  # the model begins now
    scheduler.get_grammar_bitmask(output)
    helped = clock()
    step = Step(output.scheduled_spec_decode_tokens, picks_of(scheduler, output))
    result = result_of(step.picks)
    step_s = model.seconds(output.total_num_scheduled_tokens)
    left_s = asked + step_s - clock()
    if left_s > 0.0:
        time.sleep(left_s)
    step.late_s = max(0.0, helped - asked - step_s)
    if hasattr(scheduler, "_ordered_s"):
        answered = time.monotonic()
        devices.answer(are_late=True)
        shift = time.monotonic() - answered
        scheduler._ordered_s += shift
        if hasattr(scheduler, "_reader"):
            scheduler._reader._left_off_s += shift
    again = clock()
    scheduler.update_from_output(output, result)
    step.after_s = clock() - again
    step.before_s, step.during_s = ordered - began, helped - asked
    return step


def repeat(scheduler: Any, steps: Sequence[Step], model: Model) -> list[Step]:
    """The same steps in vLLM's own scheduler; the model sleeps as long, so what the processor forgets is the same."""
    done, clock = list[Step](), time.perf_counter
    for step in steps:
        everyone = scheduler.running
        for request in everyone:
            request.spec_token_ids = list(step.drafts.get(request.request_id, ()))
        if len(step.picks) < len(everyone):
            scheduler.running = [each for each in everyone if each.request_id in step.picks]
        began = clock()
        output = scheduler.schedule()
        ordered = clock()
        if len(scheduler.running) < len(everyone):
            here = set(scheduler.running)
            scheduler.running += [each for each in everyone if each not in here]
        result = result_of({name: step.picks[name] for name in output.num_scheduled_tokens})
        time.sleep(model.seconds(output.total_num_scheduled_tokens))
        again = clock()
        scheduler.update_from_output(output, result)
        done.append(Step({}, {}, before_s=ordered - began, after_s=clock() - again))
    return done


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds of a step: our share between two steps (median, 95th percentile), vLLM's own, and what we do while
    the model runs. Tokens per pass.
    """

    sessions: int
    between_ms: float
    between_95_ms: float
    vllm_ms: float
    during_ms: float
    tokens_per_pass: float


def between_s(steps: Sequence[Step]) -> list[float]:
    """From the model's end to the next order, by step; a late order counts, too."""
    return [a.after_s + a.late_s + b.before_s for a, b in pairwise(steps)]


def measure(options: argparse.Namespace, model: Path, num_sessions: int) -> Figures:
    """Runs the steps, and repeats them in vLLM's own scheduler."""
    from vllm.config import set_current_vllm_config

    num_blocks = num_sessions * (PROMPT_TOKENS + (MAX_DRAFT + 1) * (options.steps + WARM_UP_STEPS)) // BLOCK_SIZE + 64
    with tempfile.TemporaryDirectory(prefix="outrider-") as place:
        settings = VllmConfig({}, max_running=num_sessions, max_draft=MAX_DRAFT, looks_up=True)
        (Path(place) / wire.SETTINGS_NAME).write_bytes(msgspec.json.encode(settings))
        os.environ[PLACE_VARIABLE] = place
        config = engine_config(model, num_sessions, "outrider.cloud.vllm.scheduler.OutriderScheduler")
        with set_current_vllm_config(config):
            scheduler = open_scheduler(config, num_blocks)
        emulated = Model(options.step_ms / 1e3, options.token_us / 1e6)
        steady(scheduler, emulated)
        add_requests(scheduler, num_sessions)
        gc.collect()
        gc.freeze()  # as EngineCore does
        others = attacking(flood, place, 1) if options.flood else nullcontext()
        with closing(Devices(place, num_sessions, options.late)) as devices, others:
            for _ in range(WARM_UP_STEPS):
                run_step(scheduler, devices, emulated)
            steps = [run_step(scheduler, devices, emulated) for _ in range(options.steps)]
        scheduler.shutdown()
    config = engine_config(model, num_sessions, None)
    with set_current_vllm_config(config):
        plain = open_scheduler(config, num_blocks)
    add_requests(plain, num_sessions)
    while not all(request.num_output_tokens for request in plain.requests.values()):
        output = plain.schedule()
        plain.update_from_output(output, result_of(picks_of(plain, output)))
    worked = [step for step in steps if step.picks]
    repeated = repeat(plain, worked, emulated)
    plain.shutdown()
    ours, theirs = np.array(between_s(worked)), np.array(between_s(repeated))
    share_ms = 1e3 * (ours - np.median(theirs))
    return Figures(
        num_sessions,
        float(np.median(share_ms)),
        float(np.quantile(share_ms, 0.95)),
        1e3 * float(np.median(theirs)),
        1e3 * float(np.median([step.during_s for step in worked])),
        float(np.mean([len(found) for step in worked for found in step.picks.values()])),
    )


def main() -> int:
    """Measures and prints."""
    options = parser(
        __doc__,
        {
            "--sessions": option([32, 128]),
            "--steps": option(300),
            "--step-ms": option(20.0, "time of the emulated model"),
            "--token-us": option(20.0, "and for each token in it"),
            "--late": option(0.25, "share of the answers that come when the model's run is over"),
            "--flood": option(False, "floods one session with drafts"),
            **TO_JSON,
        },
    ).parse_args()
    with tempfile.TemporaryDirectory(prefix="outrider-") as directory:
        model = write_model(Path(directory))
        found = [measure(options, model, count) for count in options.sessions]
    table = figures_table(
        f"milliseconds of a step of {options.step_ms:g} ms{', one session floods' if options.flood else ''}",
        *("sessions", "between", "p95", "vLLM's own", "during", "tokens/pass"),
    )
    for each in found:
        cells = (each.between_ms, each.between_95_ms, each.vllm_ms, each.during_ms, each.tokens_per_pass)
        table.add_row(str(each.sessions), *(f"{cell:.2f}" for cell in cells))
    console = Console(width=110)
    console.print(table)
    missed = []
    for each in found:
        bound = MAX_BETWEEN_MS.get(each.sessions, float("inf")) + (MAX_FLOOD_MS if options.flood else 0.0)
        if each.between_ms > bound:
            missed.append(f"{each.sessions} sessions: {each.between_ms:.2f} ms between two steps, over {bound:g}")
    return verdict(console, missed, options.json, {"figures": [asdict(each) for each in found]})


if __name__ == "__main__":
    sys.exit(main())
