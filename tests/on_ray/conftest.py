"""Tests on a real Ray: `make test-ray` runs them. They need 3 GB and a minute, so `make test` leaves them out."""

from __future__ import annotations

import os

collect_ignore_glob: list[str] = [] if os.environ.get("OUTRIDER_TEST_RAY") else ["test_*.py"]
