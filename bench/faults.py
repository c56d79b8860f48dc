"""Strikes a text in the middle with every fault of a laptop's day, and compares it with the undisturbed one.

    python -m bench.faults [--only NAME] [--widen 100] [--max-tokens 600] [--json PATH]

Real processes: `outrider-cloud serve` of the reference target, `outrider serve` with the reference draft on the device.
A client streams one text through the local endpoint, at one seed; the fault strikes when a third of it has arrived. The
text must be byte-identical to the one that the verifier writes alone. Only another model in the verifier's place must
end it, with an error that says so.

The draft runs in the agent's own process, so "the draft is killed" has three rows: its runtime raises once, or always,
and the whole agent is killed and started again. The verifier makes no guesses of its own, so that accepted tokens show
the device's drafting. Needs Linux and a C compiler. Timings include what the fault itself takes; they depend on the
machine. Exits 1 where a text differs, no error is shown, or drafting does not come back. (It need not where the runtime
has failed: the next text drafts again; nor on a link that carries too little; nor where the verifier has written the
whole text while the network was silent.)
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import psutil
from bench.changed_bundle import other_model
from bench.fault_scene import (
    Row,
    Scene,
    Struck,
    WrongClock,
    drafting_of,
    num_met,
    pause,
    require_preload,
    row_of,
    running,
    strike,
)
from bench.processes import Program, device_counts, read_text, started
from bench.report import TO_JSON, option, parser, write_json
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tests.faulty_proxy import FaultyProxy, ProxyOptions

from outrider.edge.lab.child_process import child_process
from outrider.export.make.reference_pair import export_reference_pair
from outrider.reference import load_prompts

RTT_MS: Final = 20.0
CUT_S: Final = 5.0
ASLEEP_S: Final = 20.0
RATE_KBIT_S: Final = 64.0
HOUR_S: Final = 3600
console = Console(width=150)


# -- the faults --------------------------------------------------------------------------------------------------------


def runtime_raises(scene: Scene, fault: str = "call") -> Iterator[Row]:
    """The draft's runtime raises, once or for good; then the next text."""
    with running(scene, fault=fault) as (_, agent):
        struck = strike(scene, agent, lambda: agent.signal(signal.SIGUSR1))
        agent.signal(signal.SIGUSR2)
        following = strike(scene, agent)
        num_struck = num_met(agent)
        row = row_of(
            scene,
            f"the draft's runtime raises {'once' if fault == 'call' else 'until the text ends'}",
            struck,
            f"{num_struck} calls raised; in the next text drafting {drafting_of(following.counts)}",
            is_drafted=False,
        )
        row.is_equal = row.is_equal and following.text.text == scene.whole
        row.is_met = row.is_equal and num_struck > 0 and following.counts["accepted"] > 0
        yield row


def agent_killed(scene: Scene) -> Iterator[Row]:
    """The whole agent is killed; it starts again, and the client sends its request again."""
    with running(scene) as (_, agent):
        began_s = time.monotonic()
        cut = strike(scene, agent, lambda: agent.signal(signal.SIGKILL))
        agent.kill()
        agent.start()
        again = read_text(agent.url, scene.body)
        took_s = time.monotonic() - began_s
        row = row_of(scene, "the agent is killed and started again", Struck(again, device_counts(agent.url), ""))
        row.lost_s, row.saw = took_s - scene.took_s, cut.text.error or "nothing"
        is_prefix = scene.whole.startswith(cut.text.text) and 0 < len(cut.text.text) < len(scene.whole)
        row.notes = f"the cut text is {'a beginning of the whole' if is_prefix else 'NOT its beginning'}"
        row.notes += "; the request was sent again"
        row.is_met = row.is_equal and is_prefix and bool(cut.text.error)
        yield row


def verifier_restarted(scene: Scene) -> Iterator[Row]:
    """The only verifier is killed and starts again at its port."""
    with running(scene) as ([cloud], agent):

        def restart() -> None:
            cloud.kill()
            cloud.start()

        struck = strike(scene, agent, restart)
        yield row_of(
            scene, "the verifier is killed and started again", struck, f"its start takes {cloud.start_s:.1f} s"
        )


def verifier_failed_over(scene: Scene) -> Iterator[Row]:
    """The first of two verifiers is killed for good."""
    with running(scene, num_clouds=2) as (clouds, agent):
        yield row_of(scene, "the verifier is killed; there is a second", strike(scene, agent, clouds[0].kill))


def verifier_replaced(scene: Scene) -> Iterator[Row]:
    """Another model starts at the port of the killed verifier: the text must end with an error that says so."""
    with running(scene) as ([cloud], agent), TemporaryDirectory() as root:
        other = scene.cloud(other_model(scene.target, Path(root)))
        other.url = cloud.url  # its port

        def replace() -> None:
            cloud.kill()
            other.start()

        try:
            struck = strike(scene, agent, replace)
            following = read_text(agent.url, scene.body)
            alone = read_text(other.url, scene.body)
        finally:
            other.kill()
        found = struck.text
        row = row_of(scene, "another model answers in the verifier's place", struck)
        is_prefix = scene.whole.startswith(found.text) and found.text != scene.whole
        is_other = alone.text != scene.whole and following.text == alone.text and not following.error
        row.drafting = "the text ends here"
        row.notes = f"the cut text is {'a beginning of the whole' if is_prefix else 'NOT its beginning'}"
        row.notes += f"; a new request gets {'the new model' if is_other else f'NOT the new model: {following.error}'}"
        # Met by the error alone: that it names what was found and what was expected.
        row.is_met = is_prefix and is_other and "another" in found.error
        yield row


def network_refuses(scene: Scene) -> Iterator[Row]:
    """The network drops every connection and refuses new ones for a while."""
    with ExitStack() as stack:
        cloud = stack.enter_context(started(scene.cloud()))
        lines = [stack.enter_context(ExitStack())]
        proxy = lines[0].enter_context(_line(cloud))
        agent = stack.enter_context(started(scene.agent([proxy.url])))

        def cut() -> None:
            lines[0].close()
            time.sleep(CUT_S)
            stack.enter_context(_line(cloud, proxy.port))

        yield row_of(scene, f"the network refuses for {CUT_S:g} s", strike(scene, agent, cut))


def network_silent(scene: Scene) -> Iterator[Row]:
    """The network loses everything for a while, and TCP sends it again: nothing closes, nothing arrives."""
    with ExitStack() as stack:
        cloud = stack.enter_context(started(scene.cloud()))
        module = ["-m", "outrider.edge.lab.proxy", "--target", f"127.0.0.1:{cloud.port}", "--rtt-ms", str(RTT_MS)]
        url = "http" + stack.enter_context(child_process(module, ready_prefix="http"))
        proxy = next(child for child in psutil.Process().children() if "outrider.edge.lab.proxy" in child.cmdline())
        agent = stack.enter_context(started(scene.agent([url])))

        struck = strike(scene, agent, partial(pause, proxy.send_signal, CUT_S))
        yield row_of(scene, f"the network is silent for {CUT_S:g} s", struck, is_drafted=False)


def link_throttled(scene: Scene) -> Iterator[Row]:
    """The link falls to 64 kbit/s each way in mid-text, and stays there; the same without drafts."""
    struck = list[Struck]()
    for depth in ("auto", "0"):
        with ExitStack() as stack:
            proxy = stack.enter_context(_line(stack.enter_context(started(scene.cloud()))))
            agent = stack.enter_context(started(scene.agent([proxy.url], "", None, "--depth", depth)))
            struck.append(strike(scene, agent, partial(proxy.throttle, RATE_KBIT_S)))
    drafted, undrafted = struck
    notes = (
        f"without drafts it loses {undrafted.text.took_s - scene.took_s:.1f} s; longest gap "
        f"{drafted.text.longest_gap_s:.1f} s"
    )
    yield row_of(scene, f"the link falls to {RATE_KBIT_S:g} kbit/s", drafted, notes, is_drafted=False)


def posts_disordered(scene: Scene) -> Iterator[Row]:
    """Half of the drafts arrive twice, and half up to 200 ms late, behind later ones."""
    with running(scene, fault="posts") as (_, agent):
        struck = strike(scene, agent, lambda: agent.signal(signal.SIGUSR1))
        agent.signal(signal.SIGUSR2)
        read_text(agent.url, {**scene.body, "max_tokens": 4})
        num_struck = num_met(agent)
        row = row_of(scene, "drafts arrive twice and out of order", struck, f"{num_struck} messages met the fault")
        row.is_met = row.is_met and num_struck > 0
        yield row


def clock_jumps(scene: Scene) -> Iterator[Row]:
    """The wall clock of agent and verifier jumps an hour ahead, and then two hours back."""
    clock = WrongClock(scene.place)
    with running(scene, environment=clock.environment) as ([cloud], agent):
        struck = strike(scene, agent, lambda: clock.jump_to(HOUR_S), lambda: clock.jump_to(-HOUR_S))
        clocks = [read_text(url, {**scene.body, "max_tokens": 4}).created_s for url in (agent.url, cloud.url)]
        offsets = [seconds - time.time() for seconds in clocks]
        row = row_of(scene, "the clock jumps by +1 h, then by -2 h", struck)
        row.notes = (
            f"agent's and verifier's clocks were {' and '.join(f'{each:+.0f} s' for each in offsets)} in the end"
        )
        row.is_met = row.is_met and all(abs(each + HOUR_S) < 60 for each in offsets)
        yield row


def asleep(scene: Scene, *, is_agent: bool) -> Iterator[Row]:
    """The laptop sleeps: the agent stops for a while; or the only verifier does."""
    with running(scene) as ([cloud], agent):
        struck = strike(scene, agent, partial(pause, (agent if is_agent else cloud).signal, ASLEEP_S))
        yield row_of(scene, f"the {'agent' if is_agent else 'verifier'} is asleep for {ASLEEP_S:g} s", struck)


FAULTS: Final[dict[str, Callable[[Scene], Iterator[Row]]]] = {
    "runtime_raises": runtime_raises,
    "runtime_gone": partial(runtime_raises, fault="runtime"),
    "agent_killed": agent_killed,
    "verifier_restarted": verifier_restarted,
    "verifier_failed_over": verifier_failed_over,
    "verifier_replaced": verifier_replaced,
    "network_refuses": network_refuses,
    "network_silent": network_silent,
    "link_throttled": link_throttled,
    "posts_disordered": posts_disordered,
    "clock_jumps": clock_jumps,
    "agent_asleep": partial(asleep, is_agent=True),
    "verifier_asleep": partial(asleep, is_agent=False),
}


def _line(cloud: Program, port: int = 0) -> FaultyProxy:
    return FaultyProxy("127.0.0.1", cloud.port, ProxyOptions(RTT_MS), port)


def undisturbed(scene: Scene) -> None:
    """Sets what is true without faults. Raises SystemExit where the endpoint's text is not the verifier's own."""
    with running(scene) as ([cloud], agent):
        alone = read_text(cloud.url, scene.body)
        read_text(agent.url, scene.body)
        drafted = read_text(agent.url, scene.body)
    if alone.error or drafted.error or alone.text != drafted.text or not drafted.num_accepted:
        raise SystemExit(f"the undisturbed texts are not usable: {alone.error or drafted.error or 'they differ'}")
    scene.whole, scene.took_s = drafted.text, drafted.took_s
    console.print(
        f"undisturbed: {drafted.num_tokens} tokens in {drafted.took_s:.1f} s, {drafted.num_accepted} of them drafted; "
        f"the verifier alone: {alone.took_s:.1f} s"
    )


def as_table(rows: Sequence[Row]) -> Table:
    """The rows as a table."""
    table = Table("fault", "text", "time lost, s", "the client saw", "drafting", "notes", "met", show_lines=True)
    for row in rows:
        text = "identical" if row.is_equal else "[bold]cut[/bold]" if row.is_met else "[red]DIFFERENT[/red]"
        cells = (escape(each) for each in (f"{row.lost_s:.1f}", row.saw, row.drafting, row.notes))
        table.add_row(escape(row.fault), text, *cells, "[green]yes[/green]" if row.is_met else "[red]NO[/red]")
    return table


def main() -> int:
    """Strikes, prints a table, and returns the exit code."""
    options = parser(
        __doc__,
        {
            "--only": {"action": "append", "choices": tuple(FAULTS), "help": "a fault; repeat for several"},
            "--widen": option(100.0, "MB of the widened FP32 target; 0: as it is"),
            "--max-tokens": option(600),
            **TO_JSON,
        },
    ).parse_args()
    require_preload()
    pair = export_reference_pair(widen_mb=options.widen or None)
    prompt = load_prompts(1)[0].text
    body = {"prompt": prompt, "max_tokens": options.max_tokens, "temperature": 0.8, "seed": 7, "ignore_eos": True}
    rows: list[Row] = []
    with TemporaryDirectory() as place:
        scene = Scene(pair.target, pair.draft, Path(place), body)
        undisturbed(scene)
        for name in options.only or FAULTS:
            for row in FAULTS[name](scene):
                rows.append(row)
                verdict = "met" if row.is_met else "NOT met"
                console.print(f"{verdict}: {row.fault}: {row.lost_s:+.1f} s; {row.saw}; {row.drafting}; {row.notes}")
                for line in row.log:
                    console.print(f"    {line}", style="dim", markup=False, highlight=False)
    console.print(as_table(rows))
    write_json(options.json, {"tokens": options.max_tokens, "took_s": scene.took_s, "rows": [asdict(r) for r in rows]})
    return 0 if all(row.is_met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
