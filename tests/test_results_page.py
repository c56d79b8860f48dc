"""docs/results.md, its plot and README's table are what `bench.page` writes from docs/results.json."""

from __future__ import annotations

import copy
import json
from typing import Any

import matplotlib
import pytest
from bench import page


@pytest.fixture(scope="module")
def results() -> Any:
    return json.loads(page.FIGURES.read_text("utf-8"))


def test_no_figure_of_the_page_is_typed_by_hand(results: Any) -> None:
    """Neither there nor in README."""
    assert page.page(results) == page.PAGE.read_text("utf-8")
    assert page.section(results) in page.README.read_text("utf-8")


def test_the_plot_is_that_of_the_figures(results: Any) -> None:
    """Byte for byte where matplotlib is the version that drew it. Its text has a colour for dark pages, too."""
    kept = page.PLOT.read_text("utf-8")
    if matplotlib.__version__ == results["matplotlib"]:
        assert page.plot(results) == kept
    assert "prefers-color-scheme:dark" in kept and "stop-and-wait" in kept


def test_other_figures_make_another_page(results: Any) -> None:
    other = copy.deepcopy(results)
    for place in other["parts"]["round trips"]["figures"]["round_trips"]:
        place["modes"]["tree"]["ratios"] = [0.5]
    assert page.section(other) != page.section(results) and page.plot(other) != page.plot(results)
    assert "at none of the round trips" in page.page(other)
