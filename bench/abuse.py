"""Attacks a running server, the agent and its local endpoint, in every way of the list below: who suffers?

    python -m bench.abuse [--only ROW] [--json PATH]
    python -m bench.abuse --server PYTHON --engine vllm    # vLLM verifies, in servers that this interpreter runs
    python -m bench.abuse --ray --only 9      # `outrider-cloud serve --ray`; rows with emulated steps stay as they are

What an attack costs others is measured here; that an attack is refused is said by tests (docs/benchmarks.md, "Abuse").

Black box: it knows wire formats and commands only. Servers are real processes: the reference target, not widened, or
the real server over a model whose steps take a given time (`bench.emulated`) where a limit is a number of steps.
Attackers run in processes of their own. Exits 1 where a limit is missed or a row could not be measured, which the table
says. Needs Linux and two cores. Takes about 30 minutes, half of it for rows 6, 50 and 51, and longer where limits are
missed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final, Literal

import typer
from bench.attacks.bodies import local_bodies, local_documents, wrong_elements
from bench.attacks.connections import (
    downloads,
    floods,
    large_answers,
    local_floods,
    long_requests,
    trickled_requests,
    unread_answers,
    unread_texts,
)
from bench.attacks.generated import generated_local, generated_requests
from bench.attacks.local import greedy_texts, local_hostile
from bench.attacks.subject import Row, Subject
from bench.attacks.texts import (
    cascades,
    draft_floods,
    heavy_rules,
    large_trees,
    large_verify_calls,
    largest_drafts,
    many_choices,
)
from bench.report import write_json
from rich.console import Console
from rich.markup import escape

Attack = Callable[[Subject], Iterator[Row]]
ATTACKS: Final[tuple[tuple[int, Attack], ...]] = (
    (5, large_verify_calls),
    (6, wrong_elements),
    (8, trickled_requests),
    (9, unread_answers),
    (9, unread_texts),
    (10, draft_floods),
    (18, large_trees),
    (21, downloads),
    (24, local_bodies),
    (24, local_documents),
    (25, greedy_texts),
    (29, local_hostile),
    (38, heavy_rules),
    (39, cascades),
    (40, many_choices),
    (41, largest_drafts),
    (43, floods),
    (43, local_floods),
    (44, large_answers),
    (50, generated_requests),
    (51, generated_local),
    (52, long_requests),
)
VERDICTS: Final = {True: "[green]yes[/green]", False: "[red]NO[/red]", None: "[yellow]not measured[/yellow]"}


def main(
    only: Annotated[list[int] | None, typer.Option(help="a row's number; repeat for several")] = None,
    server: Annotated[str | None, typer.Option(help="the Python that runs servers; needed with --engine vllm")] = None,
    engine: Annotated[Literal["embedded", "vllm"], typer.Option(help="of the servers")] = "embedded",
    ray: Annotated[bool, typer.Option("--ray", help="servers with --ray: attacks the front of two replicas")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="also write the raw numbers here")] = None,
) -> None:
    """Runs every attack once."""
    from bench.pairs import make_verifier  # attackers' processes import this module, and not the whole product

    rows_there = {number for number, _ in ATTACKS}
    if unknown := {*(only or ())} - rows_there:
        there = ", ".join(map(str, sorted(rows_there)))
        raise typer.BadParameter(f"there is no row {min(unknown)}; there are {there}", param_hint="--only")
    console = Console()
    options, start_s = (("--ray", "--replicas", "2"), 400.0) if ray else ((), 300.0)
    subject = Subject(make_verifier(engine, server), options, start_s)
    rows: list[Row] = []
    for number, attack in ATTACKS:
        if only and number not in only:
            continue
        began_s = time.monotonic()
        found: list[Row] = []
        try:
            for row in attack(subject):
                found.append(row)
        except Exception as error:  # a fault of one row leaves the others, and those before it
            what = " ".join((attack.__doc__ or "").split(". ")[0].split())
            found.append(Row(str(number), what, f"{type(error).__name__}: {error}", "", None))
        for row in found:
            words = escape(f"{row.number}. {row.what}: {row.measured}; limit: {row.limit}")
            console.print(f"{VERDICTS[row.is_met]} {words}")
        console.print(f"[dim]{attack.__name__}: {time.monotonic() - began_s:.0f} s[/dim]")
        rows += found
    write_json(json_path, {"rows": [asdict(row) for row in rows]})
    if not rows or not all(row.is_met for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
