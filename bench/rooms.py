"""Prints modules and their lengths by room: `python -m bench.rooms`."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from rich.console import Console
from rich.table import Table
from tests.test_layout import DISTRIBUTIONS, ROOMS, module_name, place, sources


def main() -> None:
    """The table; __init__ modules are left out."""
    table = Table("part", "room", "modules", "median lines", "longest", box=None, padding=(0, 2, 0, 0))
    for part in DISTRIBUTIONS:
        lengths: dict[str, list[int]] = defaultdict(list)
        for path in sources(part):
            if path.name != "__init__.py":
                lengths[place(module_name(path))[1]].append(len(path.read_text(encoding="utf-8").splitlines()))
        for room in ROOMS[part]:
            if found := lengths[room]:
                table.add_row(part, room or "ground", str(len(found)), f"{median(found):g}", str(max(found)))
    Console().print(table)


if __name__ == "__main__":
    main()
