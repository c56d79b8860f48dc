"""Attacks by rules: sessions that have as many of each as a request may have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from bench.attacks.crowd import crowd_of, prompt_of
from bench.attacks.exchange import OTHER_ADDRESS, ask
from bench.attacks.probes import memory_of
from bench.attacks.rows import Row, middle, seconds
from bench.attacks.subject import NotMeasured, Subject

CAP_S: Final = 30.0
NUM_SESSIONS: Final = 31
LONG: Final = 300
MAX_GROWTH_MB: Final = 64.0


def worst_rules() -> dict[str, Any]:
    """Every rule at its bound; all bad words share their first 31 tokens, so that all are compared."""
    return {
        "temperature": 0.8,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "logit_bias": {str(token): 0.5 for token in range(1024)},
        "bad_words": [[1] * 31 + [token] for token in range(256)],
        "min_tokens": LONG,
        "allowed_token_ids": [1 + token % 4000 for token in range(8192)],
        "typical_p": 0.99,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.01,
    }


def heavy_rules(subject: Subject) -> Iterator[Row]:
    """Has 31 sessions with as many rules as a request may have; another client's text of 40 tokens beside them."""
    took: dict[str, list[float | None]] = {"none": [], "worst": []}
    with subject.emulated(step_ms=10.0) as server:
        asked = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}
        before_mb, peaks_mb = server.memory_mb(), list[float]()
        for _ in range(3):
            for kind, rules in (("none", {"temperature": 0.8}), ("worst", worst_rules())):
                server.wait_until_idle()
                common = {"max_tokens": LONG, "ignore_eos": True, "patience_ms": 0}
                bodies = [{"prompt": prompt_of(i), **common, **rules} for i in range(NUM_SESSIONS)]
                with memory_of(server) as memory, crowd_of(server.port, bodies, keeps=True) as crowd:
                    if not crowd.wait(lambda: crowd.num_running() >= NUM_SESSIONS - 1, CAP_S):
                        raise NotMeasured(f"of {NUM_SESSIONS} sessions few ran within {CAP_S:.0f} s")
                    # A new prompt each time: a repeated one is drafted from its earlier text.
                    body = {"prompt": prompt_of(100 + len(peaks_mb)), **asked}
                    answer = ask(server.port, "POST", "/v1/completions", body, address=OTHER_ADDRESS, timeout_s=CAP_S)
                    took[kind].append(answer.took_s if answer.status == 200 else None)
                peaks_mb.append(memory.peak_mb)
    plain, worst = (middle(took[kind], CAP_S) for kind in ("none", "worst"))
    growth, plain_growth = max(peaks_mb) - before_mb, peaks_mb[0] - before_mb
    yield Row(
        "38",
        f"{NUM_SESSIONS} sessions with every rule at its bound, steps of 10 ms: another client's text of 40 tokens",
        f"{seconds(worst)}; beside {NUM_SESSIONS} sessions without rules {seconds(plain)}; +{growth:.0f} MB, "
        f"the first sessions without rules +{plain_growth:.0f} MB",
        f"at most 2x; +{MAX_GROWTH_MB:.0f} MB",
        worst < CAP_S and worst <= 2.0 * plain and growth <= MAX_GROWTH_MB,
        {"took_s": took, "growth_mb": growth, "plain_growth_mb": plain_growth},
    )
