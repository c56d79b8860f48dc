"""Tests the page's chat where the context is full: the oldest turns are dropped, and the page says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.chromium import CTRL, Browser
from tests.fake_runtime import FakeBatchRuntime
from tests.local_endpoint import LocalEndpoint, serve_local
from tests.serving import FakeServer, code_of, fake_tokenizer, serve_fake
from tests.test_edge_page import fill, opened, runs, text_of
from tests.test_edge_page_events import ask, events_of

from outrider.edge.serve.state import LocalSettings
from outrider.models.wire.protocol import RenderAnswer

CONTEXT = 160
COUNT_REQUESTS = """
window.asked = [];
const real = window.fetch;
window.fetch = (path, options) => {
  if (options?.body) window.asked.push(JSON.parse(options.body));
  return real(path, options);
};
"""


@pytest.fixture(scope="module")
def cloud() -> Iterator[FakeServer]:
    """A target with a small context."""
    runtime = FakeBatchRuntime(vocab_size=fake_tokenizer().size, max_positions=CONTEXT)
    with serve_fake(runtime=runtime) as running:
        yield running


@pytest.fixture(scope="module")
def local(cloud: FakeServer) -> Iterator[LocalEndpoint]:
    with serve_local(cloud.url, LocalSettings(depth="4")) as running:
        yield running


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def num_tokens(cloud: FakeServer, messages: list[dict[str, str]]) -> int:
    """By the target's template."""
    answer = httpx.post(f"{cloud.url}/v1/render", json={"messages": messages}, timeout=30.0)
    return len(RenderAnswer.model_validate_json(answer.content).tokens)


def test_the_oldest_turns_are_dropped_and_the_system_message_stays(cloud: FakeServer, local: LocalEndpoint) -> None:
    """The first event says how many; the text is that of the messages that are left."""
    system = message("system", "zip")
    turns = [message(role, f"{number} {'drafts ' * 8}") for number in range(6) for role in ("user", "assistant")]
    messages = [system, *turns, message("user", "tokens")]
    assert num_tokens(cloud, [system]) < CONTEXT / 4

    def told(messages: list[dict[str, str]]) -> list[dict[str, Any]]:
        return events_of(ask(local, prompt=None, messages=messages, max_tokens=12))

    first, *others = told(messages)
    assert first["type"] == "dropped" and first["max_positions"] == CONTEXT
    assert first["num_messages"] == 2 * first["num_turns"] > 0
    kept = [system, *messages[1 + first["num_messages"] :]]
    end, alone = others[-1], told(kept)[-1]
    assert end["type"] == "end" and end["num_prompt"] == alone["num_prompt"] == num_tokens(cloud, kept) <= CONTEXT / 2
    assert told(kept)[0]["type"] != "dropped"
    long = [message("user", "drafts " * 400)]
    assert code_of(ask(local, prompt=None, messages=long)) == (400, "context_length_exceeded")
    followed = ask(local, prompt=None, messages=[*long, message("assistant", "x"), message("user", "tokens")])
    assert events_of(followed)[0]["num_turns"] == 1


def test_the_page_goes_on_with_a_notice(local: LocalEndpoint, browser: Browser) -> None:
    """What was dropped stays readable above the notice, and is not sent again. A new conversation has no notice."""
    with opened(browser, local.url, script=COUNT_REQUESTS) as page:
        page.js("document.getElementById('chat').click()")
        fill(page, max_tokens=16, seed=5)
        number = 0
        while not page.js("document.querySelectorAll('.dropped').length"):
            number += 1
            assert number < 12, "the context is never full"
            fill(page, prompt=f"{number} drafts tokens")
            page.js("document.getElementById('prompt').focus()")
            page.press("Enter", CTRL)
            runs(page, number)
        turns = page.js("[...document.querySelectorAll('.turn')].map((turn) => turn.lastChild.textContent)")
        assert len(turns) == 2 * number and turns[0] == "1 drafts tokens"
        notice = text_of(page, "text").split(f"The context of {CONTEXT} tokens is full: the ")[1]
        assert "The model no longer sees what stands above." in notice
        above = page.js("[...document.getElementById('text').children].findIndex((each) => each.matches('.dropped'))")
        assert 0 < above < 2 * number - 1 and above % 2 == 0
        fill(page, prompt="more")
        page.js("document.getElementById('go').click()")
        runs(page, number + 1)
        sent = page.js("window.asked.at(-1).messages.map((each) => each.content)")
        assert sent[0] == turns[above] and sent[-1] == "more" and len(sent) == 2 * number + 1 - above
        assert page.js("document.querySelectorAll('.turn').length") == 2 * number + 2
        page.js("document.getElementById('new').click()")
        fill(page, prompt="again")
        page.js("document.getElementById('go').click()")
        runs(page, number + 2)
        assert page.js("document.querySelectorAll('.dropped').length") == 0
        assert page.js("window.asked.at(-1).messages.length") == 1


def test_a_comparison_in_a_full_chat_shows_each_turn_once(local: LocalEndpoint, browser: Browser) -> None:
    """Both texts have the same prompt, and both requests begin at the same message."""
    with opened(browser, local.url, script=COUNT_REQUESTS) as page:
        page.js("document.getElementById('chat').click()")
        fill(page, max_tokens=8, seed=5)
        for number, words in enumerate(("drafts " * 20, "zip " * 20), 1):
            fill(page, prompt=words)
            page.js("document.getElementById('go').click()")
            runs(page, number)
        fill(page, prompt="tokens " * 20)
        page.js("document.getElementById('compare').click()")
        runs(page, 3)
        assert page.js("document.querySelectorAll('.dropped').length") == 1
        assert page.js("document.querySelectorAll('.turn').length") == 6
        first, second = page.js("window.asked.slice(-2).map((each) => each.messages.length)")
        assert first == second and "The texts are equal" in text_of(page, "verdict")
