"""Attacks by the name of a model: names that are not served, and one adapter's name for what another has."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from bench.attacks.caches import session
from bench.attacks.subject import COMPLETIONS, VLLM, NotMeasured, Row, Server, Subject, prompt_of
from tests.lora_adapters import shapes_of, write_adapter

_NAMES: Final = ("", "x" * 256, "x" * 257, "x" * 900_000, "../one", "/etc/passwd", "one\x00", "one/../two", "\u202eone")
_WRONG: Final[tuple[Any, ...]] = (0, True, 1.5, ["one"], {"one": 1})
_MAX_ANSWER: Final = 1024
_LEAST: Final[dict[str, dict[str, Any]]] = {
    "/v1/sessions": {"prompt": [5], "max_tokens": 1},
    "/v1/verify": {"items": [{"prefix": [5]}]},
    COMPLETIONS: {"prompt": "a", "max_tokens": 1},
    "/v1/render": {"messages": [{"role": "user", "content": "a"}]},
}


def other_names(subject: Subject) -> Iterator[Row]:
    """Asks for models that are not served, by names of all kinds; with vLLM beside two adapters."""
    with _adapted(subject) as server:
        wrong: list[str] = []
        longest = 0
        for path, body in _LEAST.items():
            for name in (*_NAMES, *_WRONG):
                answer = server.ask("POST", path, body | {"model": name})
                longest = max(longest, len(answer.body))
                is_unset = name == "" and path in (COMPLETIONS, "/v1/render")
                if answer.status not in ((200, 400) if is_unset else (400, 404)):
                    wrong.append(f"{path} {str(name)[:20]!r}: {answer.status}")
        alive = server.ask("POST", COMPLETIONS, _LEAST[COMPLETIONS]).status == 200
    num = len(_LEAST) * (len(_NAMES) + len(_WRONG))
    yield Row(
        "53",
        f"{num} requests with names of models that are not served",
        f"{len(wrong)} answered otherwise{f' ({wrong[0]})' if wrong else ''}; the longest answer has {longest} bytes; "
        f"the server {'serves on' if alive else 'is gone'}",
        f"400 or 404, no answer over {_MAX_ANSWER} bytes, and it serves on",
        not wrong and longest <= _MAX_ANSWER and alive,
        {"wrong": wrong, "longest": longest},
    )


def other_adapters(subject: Subject) -> Iterator[Row]:
    """Uses the prompt, the hash and the text of one adapter's session with another adapter, and with the base."""
    if subject.engine != VLLM:
        return  # the embedded engine has none
    with _adapted(subject) as server:
        prompt = prompt_of(3, 300)
        body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "keep_prefix": True}
        first = session(server, "", body | {"model": "one"})
        name = first.get("prefix_hash")
        if not name:
            raise NotMeasured(f"a session with an adapter got no prefix hash: {first}")
        others: list[dict[str, Any]] = [{"model": "two"}, {}]
        turn = {"prompt": [5], "max_tokens": 4, "ignore_eos": True, "prefix_hash": name}
        taken = sum("error" not in session(server, "", turn | other) for other in others)
        found = [_found(server, body | other) for other in others]
        own, kept = _found(server, body | {"model": "one"}), session(server, "", turn | {"model": "one"})
    yield Row(
        "53",
        "what a session with an adapter left, used with another one and with the base: hashes taken, cached and "
        "looked-up tokens",
        f"{taken} of 2; {found[0]} and {found[1]} (the adapter's own: {own}); the hash "
        f"{'is still good for its adapter' if 'error' not in kept else 'is gone'}",
        "none; the adapter's own are found, and its hash is good",
        not taken and found == [(0, 0)] * 2 and min(own) > 20 and "error" not in kept,
        {"taken": taken, "found": found, "own": own},
    )


def _found(server: Server, body: dict[str, Any]) -> tuple[int, int]:
    """Tokens of a repeated prompt that were cached, and of its text that were looked up."""
    usage = session(server, "", body)["usage"]
    return int(usage["cached_prompt_tokens"]), int(usage["looked_up_tokens"])


@contextmanager
def _adapted(subject: Subject) -> Iterator[Server]:
    """A server; with vLLM beside two adapters of its model, "one" and "two"."""
    with tempfile.TemporaryDirectory() as place:
        options = ["--no-lookup", "--policy", "verify"]  # what is looked up is of earlier texts then
        if subject.engine == VLLM:
            layers = shapes_of(subject.bundles[0])
            for seed, name in enumerate(("one", "two"), 1):
                path = Path(place, name)
                write_adapter(path, layers, ("q_proj", "v_proj"), rank=4, alpha=8, seed=seed, scale=0.1)
                options += ["--lora", f"{name}={path}"]
        with subject.serve(*options) as server:
            yield server
