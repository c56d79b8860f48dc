"""`bench.soak` in small: kills and faults of the link strike real processes, and a wrong token is caught.

The hour, with memory limits, replicas and Redis, is `make soak`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator

import pytest
from bench.soak import ALONE, Plan, run, too_few
from bench.soak_faults import FAULTS
from bench.soak_texts import Case, Ledger, make_cases
from rich.console import Console

from outrider.edge.lab.laboratory import Lab, open_lab
from outrider.export.make.pair import PairPaths

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler"
)
NAMES = [name for name, fault in FAULTS.items() if not fault.is_replicated and "memory" not in name]
LONGEST_S = 0.3


@pytest.fixture(scope="module")
def lab(reference_pair: PairPaths) -> Iterator[Lab]:
    """The pair, with a verifier that writes alone."""
    with open_lab(reference_pair.target, reference_pair.draft, cloud_options=ALONE) as lab:
        yield lab


@pytest.fixture(scope="module")
def cases(lab: Lab) -> list[Case]:
    """One of each sampling, with processors and inside a grammar too."""
    return make_cases(lab, 1, 40)


def test_faults_change_no_text(lab: Lab, cases: list[Case]) -> None:
    """Each kind strikes in mid-text; every text is its twin, and only kills end one before it is asked for again."""
    ledger, _ = run(lab, cases, NAMES, Plan(longest_s=LONGEST_S), Console(quiet=True))
    assert ledger.missed == [] and not ledger.different
    assert {name for name, num in ledger.ended.items() if num} <= {"agent killed", "verifier killed"}
    assert ledger.injected == dict.fromkeys(NAMES, 1)
    assert all(ledger.struck[name] >= 1 for name in NAMES)
    assert ledger.num_accepted > 0


def test_a_wrong_token_is_caught(lab: Lab, cases: list[Case]) -> None:
    """One token that is changed on its way: the run names the text and the place."""
    ledger, _ = run(lab, cases, ["connections cut"], Plan(plant=True), Console(quiet=True))
    assert len(ledger.missed) == 1 and ledger.missed[0].startswith("DIFFERENT: ")
    assert ledger.different.total() == 1


def test_an_hour_has_enough_of_everything() -> None:
    """Texts and each fault, in its share; what cannot be made here is not asked for."""
    ledger = Ledger()
    assert too_few(ledger, NAMES[:1], 0.0) == []
    ledger.injected[NAMES[0]] = 19
    ledger.num_equal[""] = 500
    assert too_few(ledger, NAMES[:1], 60.0) == [f"{NAMES[0]}: 19 times; expected at least 20"]
    assert len(too_few(ledger, NAMES[:2], 90.0)) == 3
