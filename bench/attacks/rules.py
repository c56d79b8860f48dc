"""Attacks by /v1/verify items with probabilities: distributions that are none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from bench.attacks.exchange import ask
from bench.attacks.rows import Row
from bench.attacks.subject import VLLM, NotMeasured, Subject

WHOLE: Final = 1 << 16


def false_distributions(subject: Subject) -> Iterator[Row]:
    """Sends distributions that are none."""
    if subject.engine == VLLM:
        raise NotMeasured("vLLM takes the rules coupled and greedy only")
    item = {"prefix": [1, 2], "draft": [1], "rule": "rejection", "temperature": 1.0}
    half = WHOLE // 2
    bad: dict[str, Any] = {
        "negative": [[1, WHOLE + 1, 2, -1]],
        "NaN": "[[1, NaN]]",
        "not 1 in all": [[1, half, 2, half + 1]],
        "an id twice": [[1, half, 1, half]],
        "17 ids": [[1, WHOLE] + [number for each in range(2, 18) for number in (each, 0)]],
        "not drawn from it": [[2, half, 3, half]],
        "no distribution": [],
        "beyond the vocabulary": [[1, half, 1 << 24, half]],
    }
    codes: dict[str, str] = {}
    with subject.emulated(step_ms=10.0) as server:
        for name, q in bad.items():
            text = json.dumps({"items": [item | {"draft_q": "@"}]}).replace(
                '"@"', q if isinstance(q, str) else json.dumps(q)
            )
            answer = ask(server.port, "POST", "/v1/verify", text.encode())
            codes[name] = f"{answer.status} {json.loads(answer.body).get('error', {}).get('code')}"
    taken = sorted(name for name, code in codes.items() if not code.startswith("4"))
    yield Row(
        "41",
        f"distributions that are none, {len(codes)} kinds: refused by name",
        f"{len(codes) - len(taken)} of {len(codes)} with 4xx" + (f"; not: {', '.join(taken)}" if taken else ""),
        "all with 4xx",
        not taken,
        {"codes": codes},
    )
