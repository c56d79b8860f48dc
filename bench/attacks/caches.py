"""Attacks on another key's cache: what it holds, how long a prompt took, and hashes computed from a guessed text."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from statistics import median
from typing import Any

from bench.attacks.crowd import first_token_s, prompt_of
from bench.attacks.exchange import ask
from bench.attacks.rows import Row, seconds
from bench.attacks.subject import KEYS, NotMeasured, Server, Subject

FIRST, SECOND = KEYS
LENGTH = 800
"""Tokens of a prompt: long enough that its prefill shows."""


def others_prompts(subject: Subject) -> Iterator[Row]:
    """Asks with one key whether another key's prompt was seen before: by usage, and by the clock."""
    with subject.serve(keys=KEYS) as server:
        prompt = prompt_of(1, LENGTH)
        ask(server.port, "POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1}, key=FIRST)
        own, other = (_cached(server, prompt, key) for key in (FIRST, SECOND))
        yield Row(
            "4",
            "another key's prompt: cached_prompt_tokens",
            f"{other} of {LENGTH} (the key's own: {own})",
            "0",
            other == 0,
            {"own": own, "other": other},
        )
        took: dict[str, list[float]] = {"fresh": [], "seen": []}
        for i in range(7):
            seen, fresh = prompt_of(100 + i, LENGTH), prompt_of(200 + i, LENGTH)
            ask(server.port, "POST", "/v1/completions", {"prompt": seen, "max_tokens": 1}, key=FIRST)
            for kind, tokens in (("fresh", fresh), ("seen", seen)):
                found = first_token_s(server.port, {"prompt": tokens}, 10.0, key=SECOND)
                if found is None:
                    raise NotMeasured("a prompt of 800 tokens had no first token after 10 s")
                took[kind].append(found)
    share = median(took["seen"]) / median(took["fresh"])
    yield Row(
        "4",
        f"another key's prompt of {LENGTH} tokens: time to first token",
        f"{seconds(median(took['seen']))}; a fresh prompt {seconds(median(took['fresh']))} ({share:.2f}x)",
        "0.7x to 1.4x of a fresh prompt",
        0.7 <= share <= 1.4,
        {"took_s": took},
    )


def guessed_hash(subject: Subject) -> Iterator[Row]:
    """Computes the prefix hash of a guessed text, and uses it and the true one with another key."""
    with subject.serve(keys=KEYS) as server:
        for what in ("computed from the guessed text", "as the first key got it"):
            prompt = prompt_of(len(what), 64)
            result = _verify(server, FIRST, prefix=prompt)
            true, text = result.get("prefix_hash"), [*prompt, *result.get("tokens", [])]
            if not true:
                raise NotMeasured(f"the first key got no prefix hash: {result}")
            used = _unsalted(text) if what.startswith("computed") else true
            taken = "error" not in _verify(server, SECOND, prefix_hash=used)
            is_kept = "error" not in _verify(server, FIRST, prefix_hash=true)
            yield Row(
                "4",
                f"a prefix hash {what}, used by the second key",
                f"the second key {'takes the prefix' if taken else 'gets an error'}, the first "
                f"{'still has it' if is_kept else 'gets 409'}; the computed hash {'is' if used == true else 'is not'} "
                "the true one",
                "error, and the first key still has it",
                not taken and is_kept and (used != true or not what.startswith("computed")),
                {"taken": taken, "kept": is_kept},
            )


def _cached(server: Server, prompt: list[int], key: str) -> int:
    answer = ask(server.port, "POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1}, key=key)
    if answer.status != 200:
        raise NotMeasured(f"a completion got status {answer.status}: {answer.body[:200]!r}")
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])


def _verify(server: Server, key: str, **item: Any) -> dict[str, Any]:
    answer = ask(server.port, "POST", "/v1/verify", {"items": [item]}, key=key)
    results: list[dict[str, Any]] = answer.json.get("results", [])
    return results[0] if results else {"error": answer.json}


def _unsalted(tokens: list[int]) -> str:
    """The hash of a text without a salt: BLAKE2b over its ids, eight bytes each."""
    return hashlib.blake2b(struct.pack(f"<{len(tokens)}q", *tokens), digest_size=16).hexdigest()
