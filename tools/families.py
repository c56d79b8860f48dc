"""Measures which families of models can be exported in which way, and writes the table and docs/families.md.

    python -m tools.families [--resume] [--device npu] [FAMILY ...]      # about an hour for all families

A tiny random model of each family is exported, and the pipeline's numerical check gives the result: every family that
transformers can build in the ways of `wide_ways`, the well-known ones (FAMILIES) in all ways. `check.advice` reads
the last measurement.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from tools.tiny_sources import list_tiny_families, make_tiny_source

from outrider.export.check.advice import (
    ADVICE,
    MEASURED,
    WIDE,
    Cell,
    Outcome,
    SupportTable,
    load_measured,
    works_somewhere,
)
from outrider.export.cli.families import in_one_line
from outrider.export.make.pipeline import stage_export
from outrider.export.make.stage_store import StageStore
from outrider.export.progress import silent
from outrider.export.recipes import RECIPES, ExportOptions
from outrider.export.source.family_facts import FAMILIES
from outrider.export.source.model_source import read_source
from outrider.models.bundle.manifest import StaticShapes
from outrider.models.cache_folder import default_cache_dir
from outrider.models.errors import OutriderError, ParityFailure

DOCUMENT: Final = Path(__file__).parent.parent / "docs" / "families.md"
_LONGEST_NOTE: Final = 300
_MAX_TRIES: Final = 2
_SHIFTED: Final = "its positions begin behind the padding's id, not at 0 as the positions of a step do"
_FLAT_MASK: Final = "its attention is its own, and takes a mask of two axes only"
NO_PATH: Final[dict[str, str]] = {
    **dict.fromkeys(("camembert", "data2vec-text", "roberta", "roberta-prelayernorm"), _SHIFTED),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl", "xmod"), _SHIFTED),
    "cpmant": "it puts tokens of its own in front of a prompt",
    "ctrl": _FLAT_MASK,
    "doge": "it makes a mask of its own from its values",
    "gemma3n_text": "its configuration has an intermediate size for each layer, which is not understood",
    "glm_moe_dsa": "its sparse attention keeps keys of its own",
    "longcat_flash": "each of its layers has two attentions, which the check of the weights does not understand",
    "llama4_text": "it attends chunks, of which it does not tell the attention interface",
    "megatron-bert": _FLAT_MASK,
    "openai-gpt": "it has no cache of keys and values",
    "rembert": _FLAT_MASK,
    "roformer": _FLAT_MASK,
}
"""Why no path took a family when this was looked into: docs/families.md names it where the measurement agrees."""


@dataclass(frozen=True, slots=True)
class Legend:
    """Messages that cells refer to by number, in the order of their first use."""

    notes: list[str] = field(default_factory=list)

    def mark(self, cell: Cell) -> int:
        """The number of a cell's note, from 1; families share a note that differs in their names only."""
        words = _in_general(cell)
        if words not in self.notes:
            self.notes.append(words)
        return self.notes.index(words) + 1


def _in_general(cell: Cell) -> str:
    """A cell's message without what is particular to the family: names, numbers of a failed check."""
    words = in_one_line(cell.words)
    if cell.outcome == "wrong":
        return words.split(":")[0] if "before" not in words else ":".join(words.split(":")[:2])
    words = re.sub(r" (This is step \d/\d|Next steps:).*", "", words)
    words = re.sub(r"( in)? ?\.?[\w.-]*\.partial-\w+/?", "", words)
    words = re.sub(rf"(?<![\w-]){re.escape(cell.family)}(?![\w-])", "*family*", words)
    words = re.sub(r"\b\w+(ForCausalLM|LMHeadModel|Decoder|LMHead)\b", "*Family*", words)
    return words if len(words) <= _LONGEST_NOTE else words[: _LONGEST_NOTE - 3].rsplit(" ", 1)[0] + " ..."


def ways() -> Iterator[ExportOptions]:
    """All ways of exporting."""
    for (role, device, runtime), precisions in RECIPES.items():
        shapes = StaticShapes(prompt_len=128, response_len=128) if device == "npu" else None
        for precision in precisions:
            yield ExportOptions(role, precision, runtime, num_threads=1, device=device, static_shapes=shapes)


def wide_ways() -> Iterator[ExportOptions]:
    """The ways in which every family is measured: each path once, so that all families take about an hour."""
    return (o for o in ways() if (o.role, o.device, o.resolved_runtime, o.resolved_precision) in WIDE)


def ways_of(family: str) -> tuple[ExportOptions, ...]:
    """The ways in which `family` is measured."""
    return tuple(ways() if family in FAMILIES else wide_ways())


def measure(
    families: Sequence[str],
    work: Path,
    on_cell: Callable[[Cell], None] = lambda cell: None,
    journal: Path | None = None,
    device: str | None = None,
) -> SupportTable:
    """Exports a tiny model of each family, in `work`; `on_cell` is called with each result.

    journal: a file that every result is added to, and that results are taken from: an interrupted measurement goes on.
    device: only ways for this one.
    """
    listed = list_tiny_families()
    done = _Journal(journal)
    left_out: dict[str, str] = {}
    for family in families:
        options_left = [o for o in ways_of(family) if device in (None, o.device) and done.find(family, o) is None]
        if family in listed.left_out or family not in listed.names:
            left_out[family] = listed.left_out.get(family, "transformers has no such family of language models")
            continue
        if not options_left:
            continue
        source = work / family
        try:
            make_tiny_source(family, source)
        except OutriderError as error:
            left_out[family] = " ".join(str(error).split())[:_LONGEST_NOTE]
            continue
        store = StageStore(work / "stages")
        for options in options_left:
            on_cell(done.run(family, options, partial(measure_one, family, source, options, work, store)))
        store.release()
    cells = (done.find(family, options) for family in families for options in ways_of(family))
    return SupportTable(cells=tuple(cell for cell in cells if cell is not None), left_out=left_out)


class _Journal:
    """Results by family and way, in a file of lines. A line also says what begins: it may end the process."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._cells: dict[tuple[str, str], Cell] = {}
        self._begun: dict[tuple[str, str], int] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path is not None and path.is_file() else ():
            entry = json.loads(line)
            key = (entry["family"], entry["way"])
            if "cell" in entry:
                self._cells[key] = Cell(**entry["cell"])
            else:
                self._begun[key] = self._begun.get(key, 0) + 1

    def find(self, family: str, options: ExportOptions) -> Cell | None:
        return self._cells.get((family, _way(options)))

    def run(self, family: str, options: ExportOptions, measure_it: Callable[[], Cell]) -> Cell:
        key = (family, _way(options))
        if self._begun.get(key, 0) >= _MAX_TRIES:
            cell = _cell(family, options, "refused", 0.0, "it ends the process: a library crashes")
        else:
            self._write({"family": family, "way": key[1]})
            cell = measure_it()
        self._cells[key] = cell
        self._write({"family": family, "way": key[1], "cell": cell.model_dump()})
        return cell

    def _write(self, entry: Mapping[str, object]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


def _way(options: ExportOptions) -> str:
    return f"{options.role} {options.device} {options.resolved_runtime} {options.resolved_precision}"


def measure_one(family: str, source: Path, options: ExportOptions, work: Path, store: StageStore) -> Cell:
    """The result of exporting a family's tiny model, which is at `source`. store: what a family's ways share."""
    outcome: Outcome
    try:
        with stage_export(read_source(source), work / "bundle", options, silent, store) as staged:
            parity = staged.manifest.report.parity
            error = max(stage.max_delta / stage.scale for stage in parity.stages)
            outcome, words = "works", parity.checked_on
    except ParityFailure as failure:
        outcome, error, words = "wrong", failure.relative_delta, str(failure)
    except OutriderError as refusal:
        outcome, error, words = "refused", 0.0, str(refusal)
    except Exception as crash:  # a mistake of ours, which must not end the measurement of the others
        outcome, error, words = "refused", 0.0, f"the exporter crashes: {type(crash).__name__}: {crash}"
    words = words.partition(ADVICE)[0].rstrip("; \n")  # it names what this table says
    return _cell(family, options, outcome, error, words.replace(str(source), family).replace(f"{source.parent}/", ""))


def _cell(family: str, options: ExportOptions, outcome: Outcome, error: float, words: str) -> Cell:
    return Cell(
        family=family,
        role=options.role,
        device=options.device,
        runtime=options.resolved_runtime,
        precision=options.resolved_precision,
        outcome=outcome,
        error=float(f"{error:.2g}"),
        words=words,
    )


def in_short(cell: Cell, legend: Legend) -> str:
    """A cell of the table: the error where it works, otherwise the number of its note."""
    if cell.outcome == "works":
        return f"{cell.error:.1g}"
    return f"{'WRONG ' if cell.outcome == 'wrong' else ''}[{legend.mark(cell)}]"


_HEAD: Final = """\
# Families

Each cell: the largest logit error of a tiny random model, relative to FP32, in prefill, cached steps, multi-token
steps, steps after a rollback and, for drafts, nodes of a tree, in the runtime that will run it. Random models are the
hardest case for quantization: a trained model has smaller errors.

* **[n]**: it cannot be exported; the note says why.
* **WRONG [n]**: it computes other logits than its source, so the check refuses the export; the note says in which kind
  of step.

The first table has every family that transformers {version} can build a tiny model of and that some path takes. A
quantized export's graph is checked unquantized first, so what works in INT8 works in FP32. The other tables have all
ways for ten well-known families. INT4 of a random model is mostly noise, which could hide an error of the graph: its
steps are also compared with its own prefill.

Where a device was not in the machine, the list below says what ran in its place. Generated by
`python -m tools.families`. A family that is not listed is exported and checked like any other, and refused if the check
fails.
"""


def as_markdown(table: SupportTable) -> str:
    """The document docs/families.md."""
    legend = Legend()
    rows = table.rows()
    wide = [_way(options) for options in wide_ways()]
    working = {family: row for family, row in rows.items() if works_somewhere(row)}
    lines = [_HEAD.format(version=importlib.metadata.version("transformers")), f"## {len(working)} families", ""]
    lines += _markdown_rows(wide, working, legend)
    for role in ("draft", "target"):
        columns = [way for way in map(_way, ways()) if way.startswith(role)]
        known = {family: rows[family] for family in FAMILIES if family in rows}
        lines += [f"## All {role}s of well-known families", "", *_markdown_rows(columns, known, legend)]
    lines += ["## Families that no path takes", ""]
    for family, row in rows.items():
        if family not in working:
            marks = "; ".join(f"{way.split(' ', 1)[1]} {in_short(row[way], legend)}" for way in wide if way in row)
            cause = f"{NO_PATH[family]}; " if family in NO_PATH else ""
            lines.append(f"* {family}: {cause}{marks}")
    lines += ["", "Without a tiny model:", ""]
    reasons: dict[str, list[str]] = {}
    for family, reason in table.left_out.items():
        reasons.setdefault(reason, []).append(family)
    lines += [f"* {', '.join(families)}: {reason}" for reason, families in reasons.items()]
    places = {cell.way: cell.words for cell in table.cells if cell.outcome == "works" and cell.words != "CPU"}
    lines += ["", "## Where it ran", ""]
    lines += [f"* {way}: {words}" for way, words in sorted(places.items())] + ["", "## Notes", ""]
    lines += [f"{number}. {words}" for number, words in enumerate(legend.notes, 1)]
    return "\n".join(lines) + "\n"


def _markdown_rows(columns: Sequence[str], rows: Mapping[str, Mapping[str, Cell]], legend: Legend) -> list[str]:
    lines = ["| family | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for family, row in rows.items():
        shown = (in_short(row[way], legend) if way in row else "" for way in columns)
        lines.append(f"| {family} | " + " | ".join(shown) + " |")
    return [*lines, ""]


def updated(stored: SupportTable, newer: SupportTable) -> SupportTable:
    """The stored table with the families of `newer` in place of its own."""
    again = {cell.family for cell in newer.cells} | set(newer.left_out)
    kept = stored.only([family for family in (*stored.rows(), *stored.left_out) if family not in again])
    return SupportTable(
        cells=(*kept.cells, *newer.cells), left_out=dict(sorted((kept.left_out | newer.left_out).items()))
    )


def main() -> None:
    """Measures, and writes what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="only these; else all")
    parser.add_argument("--resume", action="store_true", help="go on with a measurement that was interrupted")
    parser.add_argument("--device", choices=("cpu", "gpu", "npu"), help="only this device's ways; keeps the others")
    arguments = parser.parse_args()
    listed = list_tiny_families()
    known = sorted((*listed.names, *listed.left_out), key=lambda name: (name not in FAMILIES, name))
    if unknown := [name for name in arguments.families if name not in known]:
        parser.error(f"transformers has no language models of the family {unknown[0]!r}; expected one such as llama")
    journal = default_cache_dir() / "families.jsonl"
    journal.parent.mkdir(parents=True, exist_ok=True)
    if not arguments.resume:
        journal.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="outrider-families-") as work:
        newer = measure(arguments.families or known, Path(work), _report, journal, arguments.device)
    stored = load_measured()
    if arguments.device:
        again = {(cell.family, cell.way): cell for cell in newer.cells}
        measured = {cell.family for cell in newer.cells}
        kept = [again.pop((cell.family, cell.way), cell) for cell in stored.cells if cell.family in measured]
        newer = SupportTable(cells=(*kept, *again.values()), left_out=newer.left_out)
    table = updated(stored, newer) if arguments.families else newer
    MEASURED.write_text(table.to_json(), encoding="utf-8", newline="\n")
    DOCUMENT.write_text(as_markdown(table), encoding="utf-8", newline="\n")
    journal.unlink()


def _report(cell: Cell) -> None:
    print(f"{cell.family}: {cell.way}: {cell.outcome} {cell.error:.1g}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
