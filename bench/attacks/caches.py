"""Attacks by the clock on what a server keeps of another key: how long a prompt takes that the other has sent."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Final

from bench.attacks.subject import KEYS, NotMeasured, Row, Subject, prompt_of, seconds

FIRST, SECOND = KEYS
LENGTH: Final = 800
"""Tokens of a prompt: long enough that its prefill shows."""


def others_prompts(subject: Subject) -> Iterator[Row]:
    """Asks with one key whether another key's prompt was seen before."""
    took: dict[str, list[float]] = {"fresh": [], "seen": []}
    with subject.serve(keys=KEYS) as server:
        for i in range(7):
            seen, fresh = prompt_of(100 + i, LENGTH), prompt_of(200 + i, LENGTH)
            server.complete({"prompt": seen, "max_tokens": 1}, FIRST)
            for kind, tokens in (("fresh", fresh), ("seen", seen)):
                found = server.first_token_s({"prompt": tokens}, 10.0, key=SECOND)
                if found is None:
                    raise NotMeasured(f"a prompt of {LENGTH} tokens had no first token after 10 s")
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
