"""Attacks on what a server keeps of another key: its cache and how long a prompt took, hashes computed from a guessed
text, recent texts; and on how much it keeps.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from statistics import median
from typing import Any

from bench.attacks.subject import KEYS, NotMeasured, Row, Server, Subject, prompt_of, seconds

FIRST, SECOND = KEYS
LENGTH = 800
"""Tokens of a prompt: long enough that its prefill shows."""
NUM_PROMPTS = 600
MAX_TEXTS = 256
MAX_MB = 9.0


def others_prompts(subject: Subject) -> Iterator[Row]:
    """Asks with one key whether another key's prompt was seen before: by usage, and by the clock."""
    with subject.serve(keys=KEYS) as server:
        prompt = prompt_of(1, LENGTH)
        server.ask("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1}, key=FIRST)
        own, other = (cached(server, prompt, key) for key in (FIRST, SECOND))
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
            server.ask("POST", "/v1/completions", {"prompt": seen, "max_tokens": 1}, key=FIRST)
            for kind, tokens in (("fresh", fresh), ("seen", seen)):
                found = server.first_token_s({"prompt": tokens}, 10.0, key=SECOND)
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


def session_hash(subject: Subject) -> Iterator[Row]:
    """Uses the hash of one key's session with another key, in a session and in a verify call."""
    with subject.serve(keys=KEYS) as server:
        text = {"max_tokens": 4, "ignore_eos": True}
        name = session(server, FIRST, text | {"prompt": prompt_of(7, 64), "keep_prefix": True}).get("prefix_hash")
        if not name:
            raise NotMeasured("the first key's session got no prefix hash: this version keeps none for sessions")
        in_session = session(server, SECOND, text | {"prompt": [5], "prefix_hash": name})
        in_verify = _verify(server, SECOND, prefix=[5], prefix_hash=name)
        own = session(server, FIRST, text | {"prompt": [5], "prefix_hash": name})
    is_refused = "error" in in_session and "error" in in_verify
    is_kept = own.get("reason") == "length"
    yield Row(
        "4",
        "the prefix hash of a session, used by the second key",
        f"the second key {'gets errors' if is_refused else 'takes the prefix'}, the first "
        f"{'still has it' if is_kept else 'gets 409'}",
        "errors, and the first key still has it",
        is_refused and is_kept,
        {"session": in_session, "verify": in_verify, "own": own},
    )


def kept_sessions(subject: Subject) -> Iterator[Row]:
    """Leaves more kept sessions than an owner may, then asks how many the server holds."""
    with subject.emulated(1.0) as server:
        for index in range(300):
            body = {"prompt": prompt_of(index), "max_tokens": 1, "keep_prefix": True, "ignore_eos": True}
            if not session(server, "", body).get("prefix_hash"):
                raise NotMeasured("a session got no prefix hash: this version keeps none for sessions")
        names = ("outrider_kv_cache_parked_prefixes", "outrider_engine_parked")
        found = [value for name in names for value in server.metrics(name)]
    if not found:
        raise NotMeasured("/metrics shows no parked prefixes")
    held = found[0]
    yield Row(
        "5", "300 sessions whose end is kept: held by the server", f"{held:.0f}", "256", held <= 256, {"held": held}
    )


def recent_texts(subject: Subject) -> Iterator[Row]:
    """Repeats one key's prompt with another key, and with another salt; then floods the store with one key."""
    with subject.serve("--no-lookup", "--policy", "verify", keys=KEYS) as server:
        prompt = prompt_of(1, 40)
        _repeated(server, [prompt], SECOND, 64)
        num_stores = len(_held(server, "texts"))  # each replica has its own
        if not num_stores:
            raise NotMeasured("/metrics shows no recent texts: this version keeps none")
        other, own = (_repeated(server, [prompt], key, 64) for key in (FIRST, SECOND))
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
            _repeated(server, [prompt_of(1000 + first + i, 40) for i in range(20)], FIRST, 32)
        held, held_mb = sum(_held(server, "texts")), sum(_held(server, "bytes")) / 1e6
        own = _repeated(server, [prompt], SECOND, 64)
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


def session(server: Server, key: str, body: dict[str, Any]) -> dict[str, Any]:
    """The last event of a session, or the error that refused it."""
    answer = server.ask("POST", "/v1/sessions", body, key=key or None)
    if answer.status != 200:
        return dict(answer.json)
    events = [line for line in answer.body.decode().splitlines() if line.startswith("data: ")]
    return dict(json.loads(events[-1].removeprefix("data: ")))


def cached(server: Server, prompt: list[int], key: str, max_tokens: int = 1) -> int:
    """Tokens of a prompt that a greedy completion found in the cache."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return _usage(server.complete(body, key), "prompt", "cached_tokens")


def _usage(answer: Any, kind: str, name: str) -> int:
    """A detail of the usage; 0 where there is none."""
    details = answer["usage"].get(f"{kind}_tokens_details") or {}
    return int(details.get(name) or 0)


def _repeated(server: Server, prompts: list[list[int]], key: str, max_tokens: int) -> int:
    """Completes the prompts; how many tokens were drafted from an earlier text and right."""
    body = {"prompt": prompts, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return _usage(server.complete(body, key), "completion", "accepted_prediction_tokens")


def _held(server: Server, name: str) -> list[float]:
    """What the store of recent texts holds: one value, or one of each replica."""
    return server.metrics(f"outrider_recent_{name}", key=FIRST)


def _verify(server: Server, key: str, **item: Any) -> dict[str, Any]:
    answer = server.ask("POST", "/v1/verify", {"items": [item]}, key=key)
    results: list[dict[str, Any]] = answer.json.get("results", [])
    return results[0] if results else {"error": answer.json}


def _unsalted(tokens: list[int]) -> str:
    """The hash of a text without a salt: BLAKE2b over its ids, eight bytes each."""
    return hashlib.blake2b(struct.pack(f"<{len(tokens)}q", *tokens), digest_size=16).hexdigest()
