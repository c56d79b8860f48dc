"""Tests what the page of the local endpoint asks for, and the events that it is made of."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from tests.local_endpoint import MESSAGES, PROMPT, LocalEndpoint, serve_local
from tests.serving import FakeServer, code_of, fake_tokenizer, serve_fake

from outrider.edge.drafting.calibration import LOOKUP_RANK, Guess
from outrider.edge.drafting.tree import GuessTree, look
from outrider.edge.serve.page_events import MAX_ROUND_TRIP_MS, origin_of
from outrider.edge.serve.page_routes import GENERATE, MAX_GUESSES
from outrider.edge.serve.server import COSTLY_PATHS


def body(**fields: object) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 40, "temperature": 0.8, "seed": 5, **fields}


def completion(local: LocalEndpoint, **fields: object) -> str:
    """The text by the OpenAI endpoint."""
    return str(local.post(body(**fields))["choices"][0]["text"])


def ask(local: LocalEndpoint, headers: dict[str, str] | None = None, **fields: object) -> httpx.Response:
    return httpx.post(f"{local.url}{GENERATE}", json=body(**fields), headers=headers, timeout=60.0)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(block[6:]) for block in answer.text.split("\n\n") if block.startswith("data: ")]


def tokens_of(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All committed tokens."""
    return [token for event in events if event["type"] == "commit" for token in event["tokens"]]


def whole_text(events: Sequence[dict[str, Any]]) -> str:
    return "".join(token["text"] for token in tokens_of(events)) + str(events[-1]["text"])


def test_the_events_add_up_to_the_text_of_the_api(local: LocalEndpoint) -> None:
    """Every token with its origin; the tree, parents first and bounded; calls, messages and passes with times. The
    text of the cloud alone is the same, and no drafts are made for it.
    """
    events = events_of(ask(local))
    tokens, states, end = tokens_of(events), [each for each in events if each["type"] == "state"], events[-1]
    assert end["type"] == "end" and end["num_tokens"] == len(tokens) == 40
    assert whole_text(events) == completion(local) == fake_tokenizer().decode([token["id"] for token in tokens])
    assert states and all(len(state["tree"]) <= MAX_GUESSES for state in states)
    assert all(-1 <= guess["parent"] < place for s in states for place, guess in enumerate(s["tree"]))
    passes = [span for state in states for span in state["passes"]]
    assert len(passes) == end["passes"] and sum(count for _, _, count in passes) == 40
    drafts = [span for state in states for span in state["drafts"]]
    assert drafts and all(0 <= began <= ended for began, ended, _ in [*drafts, *passes])
    alone = events_of(ask(local, is_drafted=False))
    assert {token["origin"] for token in tokens_of(alone)} == {"target"} and whole_text(alone) == whole_text(events)
    assert not any(each.get("drafts") or each.get("tree") for each in alone)


def test_origins() -> None:
    """Accepted first guesses are the draft's; other guesses count also where the target picked them itself."""
    assert [origin_of(0, 1, rank) for rank in (0, 1, LOOKUP_RANK, None)] == ["draft", "alternative", "lookup", "lookup"]
    found = [origin_of(1, 1, rank) for rank in (0, 3, LOOKUP_RANK, None)]
    assert found == ["target", "alternative", "target", "target"]


def test_the_likeliest_guesses_are_visible() -> None:
    """Best first, parents before their children, no more than asked for."""
    tree = GuessTree(lambda cell: (0.5, 0.3, 0.1)[cell])
    first, second = tree.expand(tree.take_best(1, 0.0, 8)[0], [Guess(7, 0, 0), Guess(8, 1, 1)])
    tree.expand(tree.take_best(1, 0.0, 8)[0], [Guess(9, 0, 1)])
    assert [(node.token, parent, node.rank) for node, parent in look(tree, 8)] == [(7, -1, 0), (8, -1, 1), (9, 0, 0)]
    assert len(look(tree, 2)) == 2 and first.number is None and second.number is None


def test_an_artificial_round_trip_is_for_one_text_only(local: LocalEndpoint) -> None:
    """The text is the same and takes longer; what is measured in it is forgotten."""
    events = events_of(ask(local, max_tokens=6, round_trip_ms=400))
    assert next(event for event in events if event["type"] == "commit")["at_ms"] >= 400
    assert min(event["round_trip_ms"] for event in events if event.get("round_trip_ms")) >= 400
    local.wait_until(local.is_at_rest)
    kept = local.core.drafts._experience  # before another text goes on with it
    assert kept and all(estimates.round_trip_ms < 400 for estimates in kept)
    (cloud,) = httpx.get(f"{local.url}/health/ready", timeout=60.0).json()["clouds"]
    assert cloud["round_trip_ms"] < 400
    assert whole_text(events) == completion(local, max_tokens=6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"round_trip_ms": MAX_ROUND_TRIP_MS + 1},
        {"round_trip_ms": -1},
        {"max_tokens": 0},
        {"max_tokens": 5000},
        {"messages": [{"role": "user", "content": "x"}]},
        {"prompt": None},
        {"prompt": ""},
        {"temperature": -1},
        {"seed": "5"},
        {"patience": 1},
    ],
)
def test_requests_of_the_page_are_bounded(local: LocalEndpoint, wrong: dict[str, Any]) -> None:
    """Unknown fields are refused."""
    assert code_of(ask(local, **wrong)) == (400, "invalid_parameter")


def test_requests_of_the_page_are_guarded(local: LocalEndpoint) -> None:
    """Its text's length, and its paths; test_edge_serve_access.py has what guards all routes."""
    assert code_of(ask(local, prompt="x" * 100_000)) == (400, "context_length_exceeded")
    assert GENERATE in COSTLY_PATHS  # which also keeps other users of the machine out
    assert code_of(httpx.get(f"{local.url}/page/nothing.js")) == (404, "not_found")
    assert code_of(httpx.get(f"{local.url}{GENERATE}")) == (405, "method_not_allowed")


def test_the_page_gets_a_strict_policy(local: LocalEndpoint) -> None:
    """On every file: nothing of others, nothing inline."""
    page = httpx.get(f"{local.url}/")
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! type=\"module\" src)|https?:", page.text)
    files = [page, *(httpx.get(local.url + path) for path in re.findall(r"/page/[\w.]+", page.text))]
    assert len(files) == 4
    for file in files:
        policy = file.headers["content-security-policy"]
        assert file.status_code == 200 and "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert not any(word in policy for word in ("unsafe", "http", "*"))
        assert file.headers["x-content-type-options"] == "nosniff" and file.headers["referrer-policy"] == "no-referrer"


def test_prompts_are_not_logged(local: LocalEndpoint, caplog: pytest.LogCaptureFixture) -> None:
    """Neither those that work nor those that are refused."""
    secret = "zip(zip(zip("
    with caplog.at_level("DEBUG"):
        events_of(ask(local, prompt=secret, max_tokens=4))
        ask(local, prompt=secret, patience=1)
    assert secret not in caplog.text


def test_a_reader_that_leaves_frees_its_place(cloud: FakeServer) -> None:
    """The text ends, its session too."""
    with serve_local(cloud.url) as own:
        with httpx.stream("POST", f"{own.url}{GENERATE}", json=body(max_tokens=400, round_trip_ms=50)) as answer:
            next(answer.iter_bytes())
        own.wait_until(own.is_at_rest)
        cloud.wait_until(cloud.is_empty)


def test_a_failure_is_an_event_or_a_status() -> None:
    """Before the text begins it is a status. A target without a template takes no messages, and completes texts."""
    with serve_local("http://127.0.0.1:9") as alone:
        assert code_of(ask(alone)) == (503, "no_verifier")
        assert code_of(httpx.get(f"{alone.url}/v1/outrider/info")) == (503, "no_verifier")
    with serve_fake(has_chat_template=False) as plain, serve_local(plain.url) as own:
        chat = ask(own, prompt=None, messages=[{"role": "user", "content": "x"}])
        assert code_of(chat) == (400, "no_chat_template")
        assert own.refusal(400, {"messages": MESSAGES}, "/v1/chat/completions") == "no_chat_template"
        assert own.text()
