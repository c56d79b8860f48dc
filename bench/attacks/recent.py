"""Attacks on the store of recent texts: another key's texts, another salt's, and a flood of long ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.attacks.caches import session
from bench.attacks.crowd import prompt_of
from bench.attacks.exchange import ask, values_of
from bench.attacks.rows import Row
from bench.attacks.subject import KEYS, NotMeasured, Server, Subject

FIRST, SECOND = KEYS
NUM_PROMPTS = 600
MAX_TEXTS = 256
MAX_MB = 9.0


def recent_texts(subject: Subject) -> Iterator[Row]:
    """Repeats one key's prompt with another key, and with another salt; then floods the store with one key."""
    with subject.serve("--no-lookup", "--policy", "verify", keys=KEYS) as server:
        prompt = prompt_of(1, 40)
        _complete(server, SECOND, [prompt], 64)
        num_stores = len(_gauge(server, "texts"))  # each replica has its own
        if not num_stores:
            raise NotMeasured("/metrics shows no recent texts: this version keeps none")
        other, own = (_accepted(_complete(server, key, [prompt], 64)) for key in (FIRST, SECOND))
        yield Row(
            "36",
            "another key's prompt, repeated: tokens drafted from its text",
            f"{other} of 64 (the key's own: {own})",
            "0, and the key's own are drafted",
            other == 0 and own > 40,
            {"own": own, "other": other},
        )
        yield from _other_salts(server)
        for first in range(0, NUM_PROMPTS, 20):
            _complete(server, FIRST, [prompt_of(1000 + first + i, 40) for i in range(20)], 32)
        held, held_mb = sum(_gauge(server, "texts")), sum(_gauge(server, "bytes")) / 1e6
        own = _accepted(_complete(server, SECOND, [prompt], 64))
    yield Row(
        "36",
        f"{NUM_PROMPTS} texts of one key: what another key's repeated prompt is drafted from, and what is held",
        f"{own} of 64 tokens drafted; {held:.0f} texts, {held_mb:.1f} MB",
        f"over 40 tokens; {num_stores * MAX_TEXTS} texts of a key, {num_stores * MAX_MB:g} MB",
        own > 40 and held <= num_stores * MAX_TEXTS + 1 and held_mb <= num_stores * MAX_MB,
        {"own": own, "held": held, "held_mb": held_mb},
    )


def _other_salts(server: Server) -> Iterator[Row]:
    """Repeats a prompt of one `cache_salt` with another of the same key, and continues its kept prefix."""
    body = {"prompt": prompt_of(2, 40), "max_tokens": 40, "ignore_eos": True, "keep_prefix": True}
    first = session(server, FIRST, body | {"cache_salt": "one"})
    name = first.get("prefix_hash")
    if not name:
        raise NotMeasured(f"a session with a cache_salt got no prefix hash: {first}")
    other, own = (
        int(session(server, FIRST, body | {"cache_salt": salt})["usage"].get("looked_up_tokens", 0))
        for salt in ("two", "one")
    )
    yield Row(
        "36",
        "another cache_salt's prompt, repeated: tokens looked up in its text",
        f"{other} of 40 (the salt's own: {own})",
        "0, and the salt's own are",
        other == 0 and own > 30,
        {"own": own, "other": other},
    )
    turn = {"prompt": [5], "max_tokens": 4, "ignore_eos": True, "prefix_hash": name}
    taken, kept = ("error" not in session(server, FIRST, turn | {"cache_salt": salt}) for salt in ("two", "one"))
    yield Row(
        "36",
        "the prefix hash of one cache_salt, used with another",
        f"the other salt {'takes the prefix' if taken else 'gets an error'}, the first "
        f"{'still has it' if kept else 'gets 409'}",
        "error, and the first salt still has it",
        kept and not taken,
        {"taken": taken, "kept": kept},
    )


def _complete(server: Server, key: str, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    body = {"prompt": prompts, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = ask(server.port, "POST", "/v1/completions", body, key=key)
    if answer.status != 200:
        raise NotMeasured(f"a completion got status {answer.status}: {answer.body[:200]!r}")
    return dict(answer.json)


def _accepted(answer: dict[str, Any]) -> int:
    details = answer["usage"].get("completion_tokens_details") or {}
    return int(details.get("accepted_prediction_tokens") or 0)


def _gauge(server: Server, name: str) -> list[float]:
    """The values of a gauge: one, or one of each replica."""
    return values_of(ask(server.port, "GET", "/metrics", key=FIRST).body.decode(), f"outrider_recent_{name}")
