"""Tests the page of the local endpoint in a real Chromium; also where the context of a chat is full."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from tests.agents import free_port, proxy_to
from tests.chromium import CTRL, SHIFT, Browser, Page
from tests.commands import KEY
from tests.fake_runtime import FakeBatchRuntime
from tests.local_endpoint import PROMPT, LocalEndpoint, serve_local
from tests.serving import FakeServer, StepGate, code_of, fake_tokenizer, serve_fake
from tests.test_edge_page_events import ask, completion, events_of, whole_text

from outrider.edge.serve.state import LocalSettings, OfflineSettings
from outrider.models.http.security import KeyRing
from outrider.models.visible import visible


@contextmanager
def opened(
    browser: Browser, url: str, width: int = 1280, *, complaints: int | None = 0, script: str = ""
) -> Iterator[Page]:
    """The page, looked at; at the end the console has so many errors. script: runs before the page's own."""
    with browser.page(width) as page:
        watch = "addEventListener('securitypolicyviolation', (e) => console.error('policy', e.violatedDirective));"
        page.call("Page.addScriptToEvaluateOnNewDocument", source=watch + script)
        page.open(url + "/")
        page.wait("document.body.dataset.looked === 'yes'")
        yield page
        found = page.complaints()
        assert complaints is None or len(found) == complaints, found


def fill(page: Page, **fields: object) -> None:
    """Sets fields by their ids, as a script."""
    for name, value in fields.items():
        page.js(f"document.getElementById({name.replace('_', '-')!r}).value = {json.dumps(value)}")


def runs(page: Page, count: int) -> None:
    """Waits until so many texts are done; there was no error."""
    page.wait(f"document.body.dataset.runs === '{count}'")
    assert text_of(page, "error") == ""


def click(page: Page, name: str) -> None:
    page.js(f"document.getElementById({name!r}).click()")


def chat(page: Page, **fields: object) -> None:
    """Chooses to chat, and sets fields."""
    click(page, "chat")
    fill(page, seed=5, **fields)


def done(page: Page, count: int, button: str = "go", **fields: object) -> None:
    """Sets fields and clicks the button; returns once so many texts are done, without an error."""
    fill(page, **fields)
    click(page, button)
    runs(page, count)


def text_of(page: Page, name: str) -> str:
    return str(page.js(f"document.getElementById({name!r}).textContent"))


def number_of(page: Page, selector: str) -> int:
    """So many elements match."""
    return int(page.js(f"document.querySelectorAll({selector!r}).length"))


def turns_of(page: Page) -> list[str]:
    """What each turn of a chat says."""
    return list(page.js("[...document.querySelectorAll('.turn')].map((turn) => turn.lastChild.textContent)"))


def test_the_page_by_keyboard_alone(local: LocalEndpoint, browser: Browser) -> None:
    """A prompt is typed and generated with keys; its text is the API's. Enter on a button and Esc work too."""
    with opened(browser, local.url) as page:
        for name in ("text", "prompt", "prompt", "max-tokens", "temperature", "seed", "delay", "go", "compare"):
            page.press("Tab")
            assert page.js("document.activeElement.id || document.activeElement.value") == name
        fill(page, max_tokens=40, seed=5)
        while page.js("document.activeElement.id") != "prompt":
            page.press("Tab", SHIFT)
        page.press("a", CTRL)
        page.js("document.activeElement.select()")
        page.type(PROMPT)
        page.press("Enter", CTRL)
        runs(page, 1)
        assert text_of(page, "text") == PROMPT + visible(completion(local))
        assert "40 tokens" in text_of(page, "status") and "Seed 5" in text_of(page, "status")
        assert sum(page.js("[...document.querySelectorAll('[data-count]')].map((e) => Number(e.textContent))")) == 40
        fill(page, max_tokens=400)
        page.js("document.getElementById('go').focus()")
        page.press("Enter")
        page.wait("document.querySelector('.caret') && document.getElementById('go').textContent === 'Stop'")
        page.press("Escape")
        runs(page, 2)
        assert text_of(page, "status") == "Stopped. Seed 5." and text_of(page, "go") == "Generate"
    local.wait_until(local.is_at_rest)


def test_stop_always_stops_and_nothing_typed_is_lost(browser: Browser) -> None:
    """Also with an empty box. A message that got no answer comes back before what was typed since, in its own mode."""
    gate = StepGate()
    with (
        serve_fake(gate=gate) as cloud,
        serve_local(cloud.url, LocalSettings(depth="8")) as own,
        opened(browser, own.url) as page,
    ):

        def ask_for_one() -> None:
            fill(page, prompt="one")
            click(page, "go")
            page.wait("document.querySelector('.caret') && document.getElementById('go').textContent === 'Stop'")

        def shown() -> tuple[str, str]:
            """The status, and what stands in the box."""
            return text_of(page, "status"), page.js("document.getElementById('prompt').value")

        chat(page, max_tokens=400)
        for number, (since, kept) in enumerate((("", "one"), ("two", "one\ntwo")), 1):
            ask_for_one()
            done(page, number, prompt=since)
            assert shown() == ("Stopped. Seed 5.", kept)
        ask_for_one()
        page.js("document.querySelector('[value=prompt]').click()")
        done(page, 3, prompt="a prompt")
        assert shown()[1] == "a prompt"
        click(page, "chat")
        assert shown()[1] == "one"
        ask_for_one()
        gate.allow(8)
        page.wait("document.querySelector('.turn:last-child .origin-draft, .turn:last-child .origin-target')")
        done(page, 4)
        assert shown() == ("Stopped. Seed 5.", "")
        click(page, "go")  # nothing to send is still refused
        assert page.js("document.getElementById('prompt').matches(':invalid') && !document.querySelector('.caret')")
        gate.open()
        own.wait_until(own.is_at_rest)


def test_text_without_a_cloud_is_marked_and_checked(cloud: FakeServer, browser: Browser) -> None:
    """With --offline-ok. Once a cloud answers, a button has the target check the text, in a chat too."""
    port, offered = free_port(), "document.getElementById('unverified').checkVisibility()"
    with (
        serve_local(
            f"http://127.0.0.1:{port}", LocalSettings(depth="8"), offline=OfflineSettings("a-draft", 4096)
        ) as own,
        opened(browser, own.url, complaints=None) as page,
    ):
        assert text_of(page, "model") == "a-draft, no cloud"
        chat(page, max_tokens=24)
        done(page, 1, prompt=PROMPT)
        assert "Unverified: 24 tokens." in text_of(page, "status") and page.js(offered)
        assert number_of(page, ".origin-unverified") > 1  # the legend has one
        done(page, 2, prompt="more")  # and it stays marked when it is an earlier turn
        assert number_of(page, "#text .turn:nth-child(2) .origin-unverified") == 1
        shown = "['exact', 'legend-unverified'].map((name) => document.getElementById(name).checkVisibility())"
        assert page.js(shown) == [False, True]
        assert [text_of(page, name) for name in ("f-pass", "f-step", "f-rtt")] == ["–", "–", "–"]
        assert number_of(page, "#timeline .fill-verify") == 0
        page.js("document.querySelector('[value=prompt]').click()")
        click(page, "chat")  # the conversation is back in view, and what was offered for another text is not
        assert len(turns_of(page)) == 4 and page.js(shown) == [False, True] and not page.js(offered)
        click(page, "new")  # the old conversation does not come back
        assert not page.js(offered) and page.js(shown) == [True, False]
        done(page, 3, prompt=PROMPT)
        click(page, "verify")
        page.wait("document.body.dataset.runs === '4'")
        assert text_of(page, "error") and page.js(offered)
        with proxy_to(cloud.url, listen_port=port):
            done(page, 5, "verify")
            page.wait("document.getElementById('model').textContent === 'fake'")
            assert not page.js(offered) and page.js("document.activeElement.id") == "text"
            asked = ask(own, prompt=None, messages=[message("user", PROMPT)], max_tokens=24)
            assert text_of(page, "text").endswith(visible(whole_text(events_of(asked))))
            assert "the same" in text_of(page, "status") or " replaced, " in text_of(page, "status")
        own.wait_until(own.is_at_rest)


def test_a_comparison_and_a_conversation(local: LocalEndpoint, browser: Browser) -> None:
    """Both times, and that the texts are equal; the slider works by keys and says its value. In a chat each turn is
    sent with those before it, and a new conversation forgets them.
    """
    with opened(browser, local.url) as page:
        fill(page, max_tokens=12, prompt=PROMPT)
        page.js("document.getElementById('delay').focus()")
        for _ in range(5):
            page.press("ArrowRight")
        assert text_of(page, "delay-shown") == page.js("document.getElementById('delay').ariaValueText") == "+ 50 ms"
        done(page, 1, "compare")
        assert re.match(r"The texts are equal: \d+ characters\. ", text_of(page, "verdict"))
        for row in ("run-cloud", "run-draft"):
            times = page.js(f"[...document.querySelectorAll('#{row} td')].map((cell) => cell.textContent)")
            assert re.fullmatch(r"\d+\.\d\d s", times[0]) and re.fullmatch(r"\d+ ms", times[1]), times
            assert int(times[1].removesuffix(" ms")) >= 50
        widths = page.js("[...document.querySelectorAll('#bars rect')].map((bar) => bar.getAttribute('width'))")
        assert "100%" in widths and all(width.endswith("%") for width in widths)
        chat(page)
        messages: list[dict[str, str]] = []
        for number, words in enumerate(("zip(", "drafts"), 2):
            done(page, number, prompt=words)
            messages.append(message("user", words))
            asked = {"messages": messages, "max_tokens": 12, "temperature": 0.8, "seed": 5}
            answer = local.post(asked, "/v1/chat/completions")["choices"][0]["message"]["content"]
            messages.append(message("assistant", answer))
            assert turns_of(page) == [visible(each["content"]) for each in messages]
        page.js("document.querySelector('[value=prompt]').click()")
        done(page, 4, prompt="a\nb")
        assert page.js("document.querySelector('#text div.prompt').textContent") == "a\n"
        assert text_of(page, "text").startswith("a\nb") and turns_of(page) == []
        click(page, "chat")
        assert turns_of(page) == [visible(each["content"]) for each in messages]
        click(page, "new")
        assert turns_of(page) == [] and text_of(page, "f-rate") == "–"


def test_the_policy_stops_what_the_page_does_not_do(local: LocalEndpoint, browser: Browser) -> None:
    """Markup from text, inline styles and requests elsewhere are refused by the browser itself."""
    with opened(browser, local.url, complaints=None) as page:
        assert page.js("try { document.body.innerHTML = '<b>x</b>'; false } catch (e) { true }")
        page.js("const s = document.createElement('style'); s.textContent = '*{color:red}'; document.head.append(s)")
        assert page.js("getComputedStyle(document.body).color") != "rgb(255, 0, 0)"
        assert page.js("fetch('http://127.0.0.1:9/').then(() => false, () => true)")
        found = " ".join(page.complaints())
        assert all(rule in found for rule in ("require-trusted-types-for", "style-src-elem", "connect-src"))


def test_a_key_is_asked_for_and_kept_in_memory_only(cloud: FakeServer, browser: Browser) -> None:
    """The page's files need none; what it asks does."""
    with serve_local(cloud.url, LocalSettings(keys=KeyRing([KEY]))) as own:
        assert httpx.get(f"{own.url}/").status_code == httpx.get(f"{own.url}/page/page.js").status_code == 200
        assert ask(own).status_code == httpx.get(f"{own.url}/v1/outrider/info").status_code == 401
        with opened(browser, own.url, complaints=2) as page:  # the answers 401 are in the console
            assert page.js("document.activeElement.id") == "key" and text_of(page, "model") == "…"
            for key, name, words in (
                ("a-k\u00e9y-\u2019of-the-device", "error", "beyond ASCII"),
                ("a-wrong-key-of-the-device", "error", "not accepted"),
                (KEY, "model", "fake"),
            ):
                page.js("document.getElementById('key').select()")
                page.type(key)
                page.press("Enter")
                page.wait(f"document.getElementById({name!r}).textContent.includes({words!r})")
            assert page.js("document.getElementById('key-form').hidden && document.getElementById('key').value === ''")
            done(page, 1, max_tokens=8)
            kept = page.js("[localStorage.length, sessionStorage.length, document.cookie, location.href, name]")
            assert kept == [0, 0, "", f"{own.url}/", ""]


ASK = """fetch(%s, {
    method: "POST",
    headers: {"Authorization": "Bearer unused", "Content-Type": "application/json", "X-Stainless-Lang": "js"},
    body: JSON.stringify(%s),
}).then((answer) => answer.text().then((text) => [answer.status, text]), (error) => [0, error.name])"""
"""What OpenAI's client does in a page."""


def test_a_chat_program_in_the_browser(cloud: FakeServer, browser: Browser) -> None:
    """A page of an allowed origin streams a chat and reads errors; a page of another one gets nothing."""
    fields = {"model": "fake", "messages": [message("user", "zip(")], "max_tokens": 12, "stream": True}
    with serve_local(cloud.url, LocalSettings(allowed_origins=(cloud.url,))) as local, browser.page() as page:

        def asked(**more: object) -> Any:
            whole = fields | {"seed": 1} | more  # another text may end by itself
            return page.js(ASK % (json.dumps(f"{local.url}/v1/chat/completions"), json.dumps(whole)))

        page.open(f"{cloud.url}/health/live")
        status, events = asked()
        assert status == 200 and events.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in events
        status, answer = asked(n=129)
        assert status == 400 and json.loads(answer)["error"]["param"] == "n"
        page.open(cloud.url.replace("127.0.0.1", "localhost") + "/health/live")
        assert asked() == [0, "TypeError"]


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
def small() -> Iterator[LocalEndpoint]:
    """For a target with a small context."""
    runtime = FakeBatchRuntime(vocab_size=fake_tokenizer().size, max_positions=CONTEXT)
    with serve_fake(runtime=runtime) as cloud, serve_local(cloud.url, LocalSettings(depth="4")) as running:
        yield running


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def num_tokens(local: LocalEndpoint, messages: list[dict[str, str]]) -> int:
    """By the target's template."""
    (cloud,) = local.core.upstream.fleet.clients
    return len(httpx.post(f"{cloud.url}/v1/render", json={"messages": messages}, timeout=30.0).json()["tokens"])


def test_the_oldest_turns_are_dropped_and_the_system_message_stays(small: LocalEndpoint) -> None:
    """The first event says how many; the text is that of the messages that are left."""
    system = message("system", "zip")
    turns = [message(role, f"{number} {'drafts ' * 8}") for number in range(6) for role in ("user", "assistant")]
    messages = [system, *turns, message("user", "tokens")]
    assert num_tokens(small, [system]) < CONTEXT / 4

    def told(messages: list[dict[str, str]]) -> list[dict[str, Any]]:
        return events_of(ask(small, prompt=None, messages=messages, max_tokens=12))

    first, *_, end = told(messages)
    assert (first["type"], first["max_positions"], end["type"]) == ("dropped", CONTEXT, "end")
    assert first["num_messages"] == 2 * first["num_turns"] > 0
    kept = [system, *messages[1 + first["num_messages"] :]]
    begun, *_, alone = told(kept)
    assert end["num_prompt"] == alone["num_prompt"] == num_tokens(small, kept) <= CONTEXT / 2
    assert begun["type"] != "dropped"
    long = [message("user", "drafts " * 400)]
    assert code_of(ask(small, prompt=None, messages=long)) == (400, "context_length_exceeded")
    followed = ask(small, prompt=None, messages=[*long, message("assistant", "x"), message("user", "tokens")])
    assert events_of(followed)[0]["num_turns"] == 1


def test_the_page_goes_on_with_a_notice(small: LocalEndpoint, browser: Browser) -> None:
    """What was dropped stays readable above the notice, and is not sent again. A new conversation has no notice.

    The texts of a comparison have the same prompt, both requests begin at the same message; each turn is shown once.
    """
    with opened(browser, small.url, script=COUNT_REQUESTS) as page:
        chat(page, max_tokens=16)
        number = 0
        while not number_of(page, ".dropped"):
            number += 1
            assert number < 12, "the context is never full"
            done(page, number, prompt=f"{number} drafts tokens")
        turns = turns_of(page)
        assert len(turns) == 2 * number and turns[0] == "1 drafts tokens"
        _, notice = text_of(page, "text").split(f"The context of {CONTEXT} tokens is full: the ")
        assert "The model no longer sees what stands above." in notice
        above = page.js("[...document.getElementById('text').children].findIndex((each) => each.matches('.dropped'))")
        assert 0 < above < 2 * number - 1 and above % 2 == 0
        done(page, number + 1, prompt="more")
        sent = page.js("window.asked.at(-1).messages.map((each) => each.content)")
        assert sent[0] == turns[above] and sent[-1] == "more" and len(sent) == 2 * number + 1 - above
        assert number_of(page, ".turn") == 2 * number + 2
        click(page, "new")
        for count, words in enumerate(("drafts " * 20, "zip " * 20), 1):
            done(page, number + 1 + count, prompt=words, max_tokens=8)
            assert page.js("window.asked.at(-1).messages.length") == 2 * count - 1
        assert number_of(page, ".dropped") == 0
        done(page, number + 4, "compare", prompt="tokens " * 20)
        assert (number_of(page, ".dropped"), number_of(page, ".turn")) == (1, 6)
        first, second = page.js("window.asked.slice(-2).map((each) => each.messages.length)")
        assert first == second and "The texts are equal" in text_of(page, "verdict")
