"""Sends what a strict server refuses by name, and asks for what OpenAI's clients ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.attacks.subject import Row, Server, Subject, listed


def booleans(subject: Subject) -> Iterator[Row]:
    """Sends true and false in place of each number, `prompt_logprobs: 0`, and asks for the served model by name."""
    with subject.serve() as server:
        taken = [what for what, path, body in _booleans() if _status(server, path, body) == 200]
        cases = len(_booleans())
        answer = server.ask("POST", "/v1/completions", {"prompt": [1, 2], "max_tokens": 1, "prompt_logprobs": 0})
        param = answer.json.get("error", {}).get("param")
        names = [card["id"] for card in server.ask("GET", "/v1/models").json["data"]]
        found = server.ask("GET", f"/v1/models/{names[0]}")
        missing = server.ask("GET", "/v1/models/no-such-model")
    yield Row(
        "14",
        f"booleans as numbers, {cases} fields",
        listed(taken, "accepted"),
        "all refused",
        not taken,
        {"accepted": taken},
    )
    yield Row(
        "14",
        "prompt_logprobs: 0",
        f"status {answer.status}, param {param}",
        "400, param prompt_logprobs",
        answer.status == 400 and param == "prompt_logprobs",
    )
    yield Row(
        "14",
        "GET /v1/models/{name}: the served model, another",
        f"{found.status}, {missing.status}",
        "200 with its id, 404",
        found.status == 200 and found.json.get("id") == names[0] and missing.status == 404,
    )


def _booleans() -> list[tuple[str, str, dict[str, Any]]]:
    """(field, path, body)."""
    base: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 1}
    fields = {"prompt": [1, True], "max_tokens": True, "temperature": True, "top_k": True, "top_p": True}
    fields |= {"min_p": False, "seed": True, "stop_token_ids": [True]}
    cases = [(f"completions {name}", "/v1/completions", {**base, name: value}) for name, value in fields.items()]
    fields = {name: value for name, value in fields.items() if name != "stop_token_ids"}
    fields |= {"stop_ids": [True], "patience_ms": True, "draft_lag_ms": True}
    cases += [(f"sessions {name}", "/v1/sessions", {**base, name: value}) for name, value in fields.items()]
    items: dict[str, Any] = {"prefix": [1, True], "draft": [True], "temperature": True, "max_tokens": True}
    cases += [
        (f"verify {name}", "/v1/verify", {"items": [{"prefix": [1, 2], name: value}]}) for name, value in items.items()
    ]
    return cases


def _status(server: Server, path: str, body: dict[str, Any]) -> int:
    return server.ask("POST", path, body).status
