"""Strikes agents, verifiers, replicas, Redis and links at random for an hour; each text must be its undisturbed twin.

    python -m bench.soak [--minutes 60] [--seed 0] [--only FAULT] [--sessions 3000] [--plant] [--json PATH]

Real processes of the reference pair, the target not widened. Texts run all the while, several at once: greedy and
sampled, with top-p, processors and grammars, in every mode of the agent's API and through the local endpoint, in two
places: at one verifier, and at two replicas on Ray behind TLS, with a Redis. Each place has its own faults: one is
drawn, strikes while a text is under way, and is healed; the next one waits until all texts that met it are over. A text
goes on and is its twin, which the verifier wrote alone before, token by token. Only where a process is killed, or can
hardly allocate, may it end before, by an error that has a name; its beginning is the twin's, and it is asked for again
until it is right. In plain HTTP nobody can see a flipped digit of a token, so bits flip inside TLS; --plant makes such
a wrong token and has to fail.

At the end sessions are dropped at random points (`bench.dropped`) at the verifier that has lived through the last
faults: 1,000 to warm up, 3,000 that count.

Exits 1 where a text differs, ends where it may not or without a name, or hangs: 180 s without anything new; where an
hour, or its share, has fewer than 500 texts or a fault fewer than 20 times; where after a fault that struck so often
the endpoint's device never drafted again; where memory grew by more than 2 % over the last three quarters of the
dropped sessions, or a block, session, thread or descriptor is left when nothing runs. Not seen: leaks of replicas.
Needs Linux and a C compiler; openssl for the faults of replicas, redis-server for its own: the table names what is
missing.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import psutil
from bench import dropped
from bench.report import TO_JSON, figures_table, option, parser, verdict
from bench.soak_faults import FAULTS, Place, away, plain_place, replicated_place, require_preload
from bench.soak_texts import Case, Ledger, Traffic, make_cases
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outrider.edge.lab.laboratory import Lab, open_lab
from outrider.export.make.reference_pair import export_reference_pair
from outrider.reference import load_prompts

TEXTS_AN_HOUR: Final = 500
FAULTS_AN_HOUR: Final = 20
NUM_EACH: Final = 6
MAX_TOKENS: Final = 160
AT_ONCE: Final = 2
"""Texts in each place: more make a process that was killed start slowly, and faults are few then."""
ALONE: Final = ("--no-lookup",)
"""Of the verifier that writes the twins: nothing is guessed."""


def disturb(
    place: Place, traffic: Traffic, names: Sequence[str], chance: random.Random, on_round: Callable[[], bool]
) -> None:
    """Strikes in whole rounds of these faults, each round in an order that is drawn. on_round: whether to go on."""
    while True:
        for name in chance.sample(names, len(names)):
            fault = FAULTS[name]
            traffic.wait_for_middle(0.9 * chance.random(), at_endpoint=fault.is_agents)
            with traffic.struck(name, fault):
                fault.strike(place, chance)
        if not on_round():
            return


def as_table(ledger: Ledger, names: Iterable[str]) -> Table:
    """The faults as a table."""
    columns = ("fault", "injected", "texts met it", "went on, equal", "ended by an error", "different", "drafted after")
    table = figures_table("Faults, and the texts that were under way", *columns, left=("fault",))
    counts = (ledger.injected, ledger.struck, ledger.num_equal, ledger.ended, ledger.different, ledger.accepted)
    for name in names:
        if words := away(name):
            table.add_row(name, escape(words))
            continue
        table.add_row(name, *(str(count[name]) for count in counts))
    table.add_row("none", "", *(str(count[""]) for count in counts[1:]))
    return table


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does. longest_s: that a fault may last. plant: a wrong token. sessions: to be dropped at the end, and
    before these to warm up.
    """

    seed: int = 0
    minutes: float = 0.0
    longest_s: float = 60.0
    plant: bool = False
    sessions: tuple[int, int] = (0, 0)


def run(
    lab: Lab, cases: Sequence[Case], names: Sequence[str], plan: Plan, console: Console
) -> tuple[Ledger, dict[str, Any]]:
    """The whole run; what is missed is in the ledger. Also the other figures."""
    ledger, figures = Ledger(), dict[str, Any]()

    def on_round() -> bool:
        minutes = (time.monotonic() - began_s) / 60
        console.print(f"{minutes:5.1f} minutes: {ledger.injected.total()} faults, {ledger.num_equal.total()} texts")
        return minutes < plan.minutes and not ledger.missed

    def strike(is_replicated: bool) -> None:
        place, traffic = places[is_replicated]
        own = [name for name in names if FAULTS[name].is_replicated == is_replicated]
        try:
            disturb(place, traffic, own, random.Random(plan.seed + is_replicated), on_round)
        except BaseException as error:  # that of a place does not wait for the other's hour
            told = str(error) if isinstance(error, SystemExit) else traceback.format_exc()
            with ledger.turn:
                ledger.missed += filter(None, [told])  # empty: a thread of texts has told it

    prompts = [list(lab.encode(prompt.text)) for prompt in load_prompts(64)]
    with ExitStack() as stack:
        places = dict[bool, tuple[Place, Traffic]]()
        for is_replicated in sorted({FAULTS[name].is_replicated for name in names}):
            folder = Path(stack.enter_context(TemporaryDirectory()))
            place = stack.enter_context(
                replicated_place(lab, folder, prompts, plan.longest_s)
                if is_replicated
                else plain_place(
                    lab, folder, prompts, plan.longest_s, "--no-recent", "--kv-cache-mb", dropped.KV_CACHE_MB
                )
            )
            places[is_replicated] = place, Traffic(lab, cases, place.agent, place.url, ledger, place.tls)
        try:
            with ExitStack() as flows:
                for _, traffic in places.values():
                    flows.enter_context(traffic.flowing(lab, AT_ONCE))
                if plan.plant:
                    places[False][0].proxy.plant()
                began_s = time.monotonic()
                with ThreadPoolExecutor() as pool:
                    list(pool.map(strike, places))
        except SystemExit as error:
            ledger.missed.append(str(error))
        if plan.sessions[0] and not ledger.missed and False in places:
            cloud = places[False][0].cloud
            struck, server = replace(lab, url=cloud.url), psutil.Process(cloud.pid)
            missed, figures["dropped_sessions"] = asyncio.run(dropped.measure(struck, server, *plan.sessions, console))
            ledger.missed += missed
        if ledger.missed:
            for place, _ in places.values():
                for program in (place.cloud, place.agent):
                    console.print(program.said()[-2000:], style="dim", markup=False, highlight=False)
    return ledger, figures


def too_few(ledger: Ledger, names: Sequence[str], minutes: float) -> list[str]:
    """What an hour must have, in its share."""
    least_texts, least_each = int(TEXTS_AN_HOUR * minutes / 60), int(FAULTS_AN_HOUR * minutes / 60)
    missed = [
        f"{name}: {ledger.injected[name]} times; expected at least {least_each}"
        for name in names
        if ledger.injected[name] < least_each
    ]
    if least_each >= FAULTS_AN_HOUR:  # after fewer strikes it may be chance
        missed += [f"{name}: nothing was drafted after it" for name in names if not ledger.accepted[name]]
    if (num := ledger.num_equal.total()) < least_texts:
        missed.append(f"{num} texts; expected at least {least_texts}")
    return missed


def main() -> int:
    """The command."""
    options = parser(
        __doc__,
        {
            "--minutes": option(60.0, "0: one round of all faults"),
            "--seed": option(0, "of the faults"),
            "--only": {"action": "append", "choices": tuple(FAULTS), "help": "a fault; repeat for several"},
            "--sessions": option(3000, "to be dropped at the end, in hundreds; 0: none"),
            "--warm-up": option(1000, "sessions before these: what each length of a prompt takes is there then"),
            "--plant": option(False, "change a token on its way, so that the run must fail"),
            **TO_JSON,
        },
    ).parse_args()
    require_preload()
    console, pair = Console(width=120), export_reference_pair()
    asked = options.only or list(FAULTS)
    names = [name for name in asked if not away(name)]
    if options.plant and all(FAULTS[name].is_replicated for name in names):
        raise SystemExit("--plant needs a fault of the verifier without TLS")
    with open_lab(pair.target, pair.draft, cloud_options=ALONE) as lab:
        cases = make_cases(lab, NUM_EACH, MAX_TOKENS)
        sessions = options.sessions, options.warm_up
        plan = Plan(options.seed, options.minutes, plant=options.plant, sessions=sessions)
        ledger, figures = run(lab, cases, names, plan, console)
    console.print(as_table(ledger, asked))
    console.print(f"{ledger.num_equal.total()} texts equal their twins; {ledger.num_accepted} tokens were drafted")
    for name, errors in ledger.errors.items():
        for words, num in errors.most_common():
            console.print(f"{name or 'no fault'}, {num} times: {words}", markup=False, highlight=False)
    missed = [*ledger.missed, *too_few(ledger, names, options.minutes)]
    document = {
        "seed": options.seed,
        "texts": ledger.num_equal.total(),
        "injected": ledger.injected,
        "struck": ledger.struck,
        "equal": ledger.num_equal,
        "ended": ledger.ended,
        "different": ledger.different,
        "accepted_after": ledger.accepted,
        "errors": ledger.errors,
        **figures,
    }
    return verdict(console, missed, options.json, document)


if __name__ == "__main__":
    sys.exit(main())
