"""Tests the page of the local endpoint in a real Chromium, and the events that it is made of."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from tests.chromium import CTRL, SHIFT, Browser, Page, open_browser
from tests.faulty_proxy import FaultyProxy
from tests.local_endpoint import LocalEndpoint, serve_local
from tests.serving import FakeServer, StepGate, fake_tokenizer, serve_fake

from outrider.cloud.engine import EngineConfig, Policy
from outrider.edge.drafting.calibration import LOOKUP_RANK, Guess
from outrider.edge.drafting.tree import GuessTree, look
from outrider.edge.link.delayed import DelayedClient
from outrider.edge.serve.page_events import MAX_ROUND_TRIP_MS, origin_of
from outrider.edge.serve.page_routes import GENERATE, MAX_GUESSES
from outrider.edge.serve.server import COSTLY_PATHS
from outrider.edge.serve.state import LocalSettings, OfflineSettings
from outrider.models.client.client import VerifierClient
from outrider.models.client.errors import EndpointLost
from outrider.models.http.security import KeyRing
from outrider.models.visible import visible
from outrider.models.wire.protocol import Commit, SessionEnd, SessionOpen, SessionRequest

KEY = "a-key-of-the-device"
LONG = "x" * 400
PROMPT = "def verify(tokens, drafts):"
HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\u202egpj.exe\x1b]0;x\x07"
SHOWN = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\\u202egpj.exe\\x1b]0;x\\x07"
INFO = {
    "model": HOSTILE,
    "is_up": True,
    "has_chat_template": True,
    "max_positions": 512,
    "draft": HOSTILE,
    "max_tokens": 512,
    "max_round_trip_ms": 500,
}


@pytest.fixture(scope="module")
def cloud() -> Iterator[FakeServer]:
    with serve_fake(config=EngineConfig(policy=Policy.VERIFY, looks_up=False)) as running:
        yield running


@pytest.fixture(scope="module")
def local(cloud: FakeServer) -> Iterator[LocalEndpoint]:
    with serve_local(cloud.url, LocalSettings(depth="8")) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as running:
        yield running


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


def text_of(page: Page, name: str) -> str:
    found: str = page.js(f"document.getElementById({name!r}).textContent")
    return found


def body(**fields: object) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 40, "temperature": 0.8, "seed": 5, **fields}


def completion(local: LocalEndpoint, **fields: object) -> str:
    """The text by the OpenAI endpoint."""
    answer = httpx.post(f"{local.url}/v1/completions", json=body(**fields), timeout=60.0)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def ask(local: LocalEndpoint, headers: dict[str, str] | None = None, **fields: object) -> httpx.Response:
    return httpx.post(f"{local.url}{GENERATE}", json=body(**fields), headers=headers, timeout=60.0)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(block[6:]) for block in answer.text.split("\n\n") if block.startswith("data: ")]


def code_of(answer: httpx.Response) -> str:
    code: str = answer.json()["error"]["code"]
    return code


# -- the events --------------------------------------------------------------------------------------------------------


def test_the_events_add_up_to_the_text_of_the_api(local: LocalEndpoint) -> None:
    """Every token with its origin; the tree, parents first and bounded; calls, messages and passes with times."""
    events = events_of(ask(local))
    tokens = [token for event in events if event["type"] == "commit" for token in event["tokens"]]
    end = events[-1]
    assert end["type"] == "end" and end["num_tokens"] == len(tokens) == 40
    assert "".join(token["text"] for token in tokens) + end["text"] == completion(local)
    assert fake_tokenizer().decode([token["id"] for token in tokens]) == completion(local)
    states = [event for event in events if event["type"] == "state"]
    assert states and all(len(state["tree"]) <= MAX_GUESSES for state in states)
    assert all(-1 <= guess["parent"] < place for s in states for place, guess in enumerate(s["tree"]))
    passes = [span for state in states for span in state["passes"]]
    assert len(passes) == end["passes"] and sum(count for _, _, count in passes) == 40
    drafts = [span for state in states for span in state["drafts"]]
    assert drafts and all(0 <= began <= ended for began, ended, _ in [*drafts, *passes])


def test_a_text_of_the_cloud_alone_is_the_same(local: LocalEndpoint) -> None:
    """No drafts are made for it."""
    events = events_of(ask(local, is_drafted=False))
    tokens = [token for event in events if event["type"] == "commit" for token in event["tokens"]]
    assert {token["origin"] for token in tokens} == {"target"}
    assert "".join(token["text"] for token in tokens) + events[-1]["text"] == completion(local)
    assert not any(event["drafts"] or event["tree"] for event in events if event["type"] == "state")


def test_origins() -> None:
    """Accepted first guesses are the draft's; other guesses count also where the target picked them itself."""
    assert [origin_of(0, 1, rank) for rank in (0, 1, LOOKUP_RANK, None)] == ["draft", "alternative", "lookup", "lookup"]
    assert [origin_of(1, 1, rank) for rank in (0, 3, LOOKUP_RANK, None)] == [
        "target",
        "alternative",
        "target",
        "target",
    ]


def test_the_likeliest_guesses_are_visible() -> None:
    """Best first, parents before their children, no more than asked for."""
    tree = GuessTree(lambda cell: (0.5, 0.3, 0.1)[cell])
    first, second = tree.expand(tree.take_best(1, 0.0, 8)[0], [Guess(7, 0, 0), Guess(8, 1, 1)])
    tree.expand(tree.take_best(1, 0.0, 8)[0], [Guess(9, 0, 1)])
    assert [(node.token, parent, node.rank) for node, parent in look(tree, 8)] == [(7, -1, 0), (8, -1, 1), (9, 0, 0)]
    assert len(look(tree, 2)) == 2 and first.number is None and second.number is None


def test_an_artificial_round_trip_is_for_one_text_only(local: LocalEndpoint, cloud: FakeServer) -> None:
    """The text is the same and takes longer; what is measured in it is forgotten."""
    events = events_of(ask(local, max_tokens=6, round_trip_ms=400))
    first = next(event for event in events if event["type"] == "commit")
    assert first["at_ms"] >= 400
    later = [event["round_trip_ms"] for event in events if event.get("round_trip_ms")]
    assert later and min(later) >= 400
    texts = [token["text"] for event in events if event["type"] == "commit" for token in event["tokens"]]
    assert "".join(texts) + events[-1]["text"] == completion(local, max_tokens=6)
    local.wait_until(local.is_at_rest)
    kept = local.core.drafts._experience
    assert kept and all(estimates.round_trip_ms < 400 for estimates in kept)


def test_a_delayed_link_keeps_order_and_errors() -> None:
    """Events come in order, each late; errors are raised as before, and leaving early ends the session."""
    gate = StepGate()
    request = SessionRequest(prompt=fake_tokenizer().encode(PROMPT), max_tokens=8, ignore_eos=True)

    async def read(cloud: FakeServer) -> None:
        loop = asyncio.get_running_loop()
        async with VerifierClient(cloud.url) as client:
            began = loop.time()
            async with DelayedClient(client, 0.2).open_session(request) as events:
                found = [event async for event in events]
            assert loop.time() - began >= 0.2
            assert isinstance(found[0], SessionOpen) and isinstance(found[-1], SessionEnd)
            assert [event.base for event in found if isinstance(event, Commit)] == sorted(
                event.base for event in found if isinstance(event, Commit)
            )
            long = request.model_copy(update={"max_tokens": 500})
            async with DelayedClient(client, 0.01).open_session(long) as events:
                assert isinstance(await anext(events), SessionOpen)
            await asyncio.to_thread(cloud.wait_until, cloud.is_empty)
        with pytest.raises(EndpointLost):
            async with VerifierClient("http://127.0.0.1:9") as far, DelayedClient(far, 0.01).open_session(request):
                pass

    gate.open()
    with serve_fake(gate=gate) as cloud:
        asyncio.run(read(cloud))


def test_requests_of_the_page_are_bounded_and_guarded(local: LocalEndpoint) -> None:
    """As the other routes: fields, media type, origin and host; unknown fields are refused."""
    for wrong in (
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
    ):
        answer = ask(local, **wrong)
        assert answer.status_code == 400 and code_of(answer) == "invalid_parameter", wrong
    assert code_of(ask(local, prompt="x" * 100_000)) == "context_length_exceeded"
    assert code_of(ask(local, {"Origin": "https://page.example.com"})) == "origin_not_allowed"
    assert code_of(ask(local, {"Host": "rebound.example.com"})) == "host_not_allowed"
    assert (
        httpx.post(f"{local.url}{GENERATE}", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
    )
    assert GENERATE in COSTLY_PATHS  # which also keeps other users of the machine out
    rebound = httpx.get(f"{local.url}/", headers={"Host": "rebound.example.com"})
    assert rebound.status_code == 403
    assert code_of(httpx.get(f"{local.url}/page/nothing.js")) == "not_found"
    assert code_of(httpx.get(f"{local.url}{GENERATE}")) == "method_not_allowed"


def test_the_page_gets_a_strict_policy(local: LocalEndpoint) -> None:
    """On every file: nothing of others, nothing inline."""
    page = httpx.get(f"{local.url}/")
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! type=\"module\" src)|https?:", page.text)
    files = [page, *(httpx.get(local.url + path) for path in re.findall(r"/page/[\w.]+", page.text))]
    assert len(files) == 4
    for file in files:
        policy = file.headers["content-security-policy"]
        assert file.status_code == 200 and "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and "http" not in policy and "*" not in policy
        assert file.headers["x-content-type-options"] == "nosniff" and file.headers["referrer-policy"] == "no-referrer"


def test_prompts_are_not_logged(local: LocalEndpoint, caplog: pytest.LogCaptureFixture) -> None:
    """Neither those that work nor those that are refused."""
    secret = "zip(zip(zip("
    with caplog.at_level(logging.DEBUG):
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


def test_a_failure_is_an_event_or_a_status(cloud: FakeServer) -> None:
    """Before the text begins it is a status."""
    with serve_local("http://127.0.0.1:9") as alone:
        assert code_of(ask(alone)) == "no_verifier"
        assert code_of(httpx.get(f"{alone.url}/v1/outrider/info")) == "no_verifier"
    with serve_fake(has_chat_template=False) as plain, serve_local(plain.url) as own:
        assert code_of(ask(own, prompt=None, messages=[{"role": "user", "content": "x"}])) == "no_chat_template"


# -- in the browser ----------------------------------------------------------------------------------------------------


def test_the_page_by_keyboard_alone(local: LocalEndpoint, browser: Browser) -> None:
    """A prompt is typed and generated with keys; its text is the API's. Enter on a button and Esc work too."""
    with opened(browser, local.url) as page:
        order: list[str] = []
        for _ in range(9):
            page.press("Tab")
            order.append(page.js("document.activeElement.id || document.activeElement.value"))
        assert order == ["text", "prompt", "prompt", "max-tokens", "temperature", "seed", "delay", "go", "compare"]
        fill(page, max_tokens=40, seed=5)
        while page.js("document.activeElement.id") != "prompt":
            page.press("Tab", SHIFT)
        page.press("a", CTRL)
        page.js("document.activeElement.select()")
        page.type(PROMPT)
        page.press("Enter", CTRL)
        runs(page, 1)
        assert text_of(page, "text").endswith(text_of_completion := visible(completion(local)))
        assert text_of(page, "text") == PROMPT + text_of_completion
        assert "40 tokens" in text_of(page, "status") and "Seed 5" in text_of(page, "status")
        counts = page.js("[...document.querySelectorAll('[data-count]')].map((each) => Number(each.textContent))")
        assert sum(counts) == 40
        fill(page, max_tokens=400)
        page.js("document.getElementById('go').focus()")
        page.press("Enter")
        page.wait("document.querySelector('.caret') && document.getElementById('go').textContent === 'Stop'")
        page.press("Escape")
        runs(page, 2)
        assert text_of(page, "status") == "Stopped." and text_of(page, "go") == "Generate"
    local.wait_until(local.is_at_rest)


def test_text_without_a_cloud_is_marked_and_checked(cloud: FakeServer, browser: Browser) -> None:
    """With --offline-ok. Once a cloud answers, a button has the target check the text, in a chat too."""
    address = httpx.URL(cloud.url)
    assert address.port is not None
    with FaultyProxy(address.host, address.port) as away:
        port = away.port
    draft = OfflineSettings("a-draft", 4096)
    with (
        serve_local(f"http://127.0.0.1:{port}", LocalSettings(depth="8"), offline=draft) as own,
        opened(browser, own.url, complaints=None) as page,
    ):
        assert text_of(page, "model") == "a-draft, no cloud"
        page.js("document.getElementById('chat').click()")
        fill(page, max_tokens=24, seed=5, prompt=PROMPT)
        page.js("document.getElementById('go').click()")
        runs(page, 1)
        assert "24 tokens are unverified." in text_of(page, "status")
        assert page.js("document.querySelectorAll('.origin-unverified').length") > 1  # the legend has one
        assert page.js("document.getElementById('unverified').checkVisibility()")
        page.js("document.getElementById('verify').click()")
        page.wait("document.body.dataset.runs === '2'")
        assert text_of(page, "error") and page.js("document.getElementById('unverified').checkVisibility()")
        with FaultyProxy(address.host, address.port, listen_port=port):
            page.js("document.getElementById('verify').click()")
            runs(page, 3)
            assert not page.js("document.getElementById('unverified').checkVisibility()")
            messages = [{"role": "user", "content": PROMPT}]
            expected = events_of(ask(own, prompt=None, messages=messages, max_tokens=24))
            shown = "".join(
                token["text"] for event in expected if event["type"] == "commit" for token in event["tokens"]
            )
            assert text_of(page, "text").endswith(visible(shown + expected[-1]["text"]))
            assert "the same" in text_of(page, "status") or "were replaced" in text_of(page, "status")
        own.wait_until(own.is_at_rest)


def test_a_comparison_shows_equal_texts(local: LocalEndpoint, browser: Browser) -> None:
    """Both times, and that the texts are equal; the slider works by keys and says its value."""
    with opened(browser, local.url) as page:
        fill(page, max_tokens=12, prompt=PROMPT)
        page.js("document.getElementById('delay').focus()")
        for _ in range(5):
            page.press("ArrowRight")
        assert text_of(page, "delay-shown") == "+ 50 ms"
        assert page.js("document.getElementById('delay').ariaValueText") == "+ 50 ms"
        page.js("document.getElementById('compare').click()")
        runs(page, 1)
        assert re.match(r"The texts are equal: \d+ characters\. ", text_of(page, "verdict"))
        for row in ("run-cloud", "run-draft"):
            times = page.js(f"[...document.querySelectorAll('#{row} td')].map((cell) => cell.textContent)")
            assert re.fullmatch(r"\d+\.\d\d s", times[0]) and re.fullmatch(r"\d+ ms", times[1]), times
            assert int(times[1].removesuffix(" ms")) >= 50


def scripted(*events: dict[str, Any]) -> str:
    """A script that answers the page's requests with these."""
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    return (
        f"window.fetch = async (path) => path === {GENERATE!r} ? new Response({json.dumps(stream)})"
        f" : Response.json({json.dumps(INFO)});"
    )


def token(text: str, origin: str, rank: int | None = None) -> dict[str, Any]:
    return {"id": len(text), "text": text, "origin": origin} | ({} if rank is None else {"rank": rank})


COMMIT = {
    "type": "commit",
    "at_ms": 10.0,
    "accepted": 3,
    "proposed": 4,
    "tested": 4,
    "tokens": [
        token("one", "draft", 0),
        token("two", "draft", 0),
        token("three", "alternative", 2),
        token("four", "lookup"),
        token(LONG, "target"),
        token(HOSTILE, "target", 0),
        token("five", "unverified"),
    ],
}
STATE = {
    "type": "state",
    "at_ms": 11.0,
    "tree": [
        {"id": 1, "text": HOSTILE, "parent": -1, "chance": 0.5, "reach": 0.5, "rank": 0, "is_sent": True},
        {"id": 2, "text": " b", "parent": 0, "chance": 0.5, "reach": 0.25, "rank": 1, "is_sent": False},
        {"id": 3, "text": "\n", "parent": -1, "chance": 0.1, "reach": 0.04, "rank": 8, "is_sent": False},
    ],
    "num_ahead": 3,
    "depth": 4,
    "drafts": [[0, 4, 1]],
    "posts": [[1, 9, 20]],
    "passes": [[2, 12, 6]],
    "round_trip_ms": 12.0,
}


@pytest.fixture(scope="module")
def scene(local: LocalEndpoint, browser: Browser) -> Iterator[Page]:
    """The page after a text of a hostile server that failed, with everything shown that can be."""
    failure = {"type": "error", "error": {"code": "x", "message": HOSTILE, "type": "server_error"}}
    with opened(browser, local.url, script=scripted(COMMIT, STATE, failure)) as page:
        fill(page, prompt=HOSTILE, seed=1)
        page.js("document.getElementById('go').click()")
        page.wait("document.body.dataset.runs === '1'")
        for name in ("comparison", "key-form", "new", "unverified"):
            page.js(f"document.getElementById({name!r}).hidden = false")
        yield page


def test_colours_say_who_produced_a_token(scene: Page) -> None:
    """And lines under them: not by colour alone."""
    found = scene.js("[...document.querySelectorAll('#text span')].map((each) => [each.className, each.textContent])")
    assert found == [
        ["prompt", SHOWN],
        ["origin-draft", "onetwo"],
        ["origin-alternative", "three"],
        ["origin-lookup", "four"],
        ["origin-target", LONG + SHOWN],
        ["origin-unverified", "five"],
    ]
    colours = scene.js(
        "['prompt', 'draft', 'alternative', 'lookup', 'target', 'unverified'].map((name) => getComputedStyle("
        "document.querySelector(`#text .origin-${name}, #text .${name}`)).color)"
    )
    assert len(set(colours)) == 6
    lines = scene.js(
        "['draft', 'alternative', 'lookup', 'target', 'unverified'].map((name) => getComputedStyle("
        "document.querySelector(`#text .origin-${name}`)).textDecorationStyle)"
    )
    assert lines == ["solid", "dotted", "dashed", "solid", "wavy"]
    assert text_of(scene, "f-accepted") == "43 %" and text_of(scene, "f-pass") == "7.00"
    assert text_of(scene, "f-rtt") == "12 ms"
    nodes = scene.js("[...document.querySelectorAll('#tree rect:not(.cursor)')].map((n) => n.getAttribute('class'))")
    assert nodes == ["stroke-draft", "stroke-alternative unsent", "stroke-lookup unsent"]
    assert scene.js("document.querySelectorAll('#timeline rect:not(.lane)').length") == 4


def test_a_commit_moves_the_tree(scene: Page) -> None:
    """What hangs below the committed tokens stays, with its chances from there; else nothing."""
    found = scene.js(
        f"""import("/page/tree.js").then(({{advance}}) => [[1], [1, 2], [3], [9], []].map((ids) =>
        advance({json.dumps(STATE["tree"])}, ids).map((guess) => [guess.id, guess.parent, guess.reach])))"""
    )
    assert found == [[[2, -1, 0.5]], [], [], [], [[1, -1, 0.5], [2, 0, 0.25], [3, -1, 0.04]]]


def test_hostile_text_is_inert(scene: Page) -> None:
    """Text, tree, names and errors of a server are shown as text; control and bidi characters as escapes."""
    assert all(text_of(scene, name) == SHOWN for name in ("error", "model", "draft"))
    words = scene.js("[...document.querySelectorAll('#tree .token')].map((node) => node.textContent)")
    assert words[0].startswith("<scr") and words[1:] == ["·b", "↵"]
    assert scene.js("window.hacked === undefined && document.querySelectorAll('img, script').length === 1")


def test_the_policy_stops_what_the_page_does_not_do(local: LocalEndpoint, browser: Browser) -> None:
    """Markup from text, inline styles and requests elsewhere are refused by the browser itself."""
    with opened(browser, local.url, complaints=None) as page:
        assert page.js("try { document.body.innerHTML = '<b>x</b>'; false } catch (e) { true }")
        page.js("const s = document.createElement('style'); s.textContent = '*{color:red}'; document.head.append(s)")
        assert page.js("getComputedStyle(document.body).color") != "rgb(255, 0, 0)"
        assert page.js("fetch('http://127.0.0.1:9/').then(() => false, () => true)")
        found = " ".join(page.complaints())
        assert all(rule in found for rule in ("require-trusted-types-for", "style-src-elem", "connect-src"))


@pytest.mark.parametrize("width", [320, 360, 768])
def test_a_narrow_window_has_no_sideways_scroll(scene: Page, width: int) -> None:
    """Also with long words in the text, in the names and in the tree; what is pressed is large enough."""
    scene.resize(width, 800)
    try:
        scene.wait(f"document.documentElement.clientWidth === {width}")
        scene.wait(  # drawn again for this width
            "[...document.querySelectorAll('#timeline .lane')]"
            f".every((lane) => lane.getBoundingClientRect().right <= {width})"
        )
        assert scene.js("document.documentElement.scrollWidth") == width
        outside = scene.js(
            "[...document.querySelectorAll('body *')].filter((each) => !each.closest('.unseen') &&"
            f" each.getBoundingClientRect().right > {width}).map((each) => each.outerHTML.slice(0, 80))"
        )
        assert outside == []
        small = scene.js(
            "[...document.querySelectorAll('button, input:not([type=range]), textarea')]"
            ".map((each) => each.closest('label') || each)"
            ".filter((each) => each.offsetHeight && each.offsetHeight < 24).map((each) => each.outerHTML)"
        )
        assert small == []  # WCAG 2.2, 2.5.8: 24 pixels
    finally:
        scene.resize(1280, 900)


CONTRAST = """(() => {
  const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ratio = (one, other) => {
    const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  const ground = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const [r, g, b, alpha = 1] = parse(getComputedStyle(each).backgroundColor);
      if (alpha > 0) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const low = [];
  const check = (element, colour, behind, least) => {
    const found = ratio(parse(colour), behind);
    if (found < least) low.push([element.tagName, element.className.baseVal ?? element.className, colour, found]);
  };
  let count = 0;
  for (const element of document.querySelectorAll("body *")) {
    if (!element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const hasText = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    const inPicture = element instanceof SVGElement;
    if (hasText || element.matches("input[type=number], input[type=password], textarea")) {
      count += 1;
      check(element, inPicture ? style.fill : style.color, ground(element), 4.5);
    }
    if (element.matches("button, input[type=number], input[type=password], textarea")) {
      check(element, style.borderColor, ground(element.parentElement), 3);
    }
    if (inPicture && /stroke-/.test(element.getAttribute("class"))) check(element, style.stroke, ground(element), 3);
    if (inPicture && /fill-(draft|verify)|begin/.test(element.getAttribute("class"))) {
      check(element, style.fill, ground(element), 3);
    }
  }
  return { low, count };
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_is_enough_in_both_schemes(scene: Page, scheme: str) -> None:
    """WCAG AA: 4.5 for text, 3 for borders of controls and for what the pictures say."""
    scene.prefer(scheme)
    found = scene.js(CONTRAST)
    assert found["low"] == [] and found["count"] > 50
    ground = scene.js("getComputedStyle(document.body).backgroundColor")
    assert (int(ground.strip("rgb()").split(",")[0]) < 60) is (scheme == "dark")


def test_a_screen_reader_gets_names_and_roles(scene: Page) -> None:
    """Every control and picture has a name, regions have headings, the status is live and the text is not."""
    nodes = scene.call("Accessibility.getFullAXTree")["nodes"]
    found = [
        (node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node.get("ignored")
    ]
    named = {"button", "textbox", "spinbutton", "slider", "radio", "img", "image", "region", "form", "group"}
    assert [each for each in found if each[0] in named and not each[1]] == []
    names = {name for _, name in found}
    assert {"Generated text", "Prompt", "Seed", "Artificial round trip", "Compare with cloud-only"} <= names
    assert any(name.startswith("Guesses of the next token: ") for name in names)
    assert "In the last seconds: 1 calls of the draft, 1 messages, 1 passes of the target" in names
    assert [name for role, name in found if role == "heading"] == [
        "Outrider",
        "Text",
        "Drafted here, against the cloud alone",
        "Request",
        "Now",
        "Guesses after the cursor",
        "The last 4 seconds",
    ]
    assert scene.js("document.documentElement.lang") == "en"
    assert scene.js("document.getElementById('status').role") == "status"
    assert scene.js("document.getElementById('error').role") == "alert"
    assert scene.js("document.querySelectorAll('[aria-live]').length") == 0  # tokens would drown the rest
    ids = scene.js("[...document.querySelectorAll('[id]')].map((each) => each.id)")
    assert len(ids) == len(set(ids))


def test_a_key_is_asked_for_and_kept_in_memory_only(cloud: FakeServer, browser: Browser) -> None:
    """The page's files need none; what it asks does."""
    settings = LocalSettings(keys=KeyRing([KEY]))
    with serve_local(cloud.url, settings) as own:
        assert httpx.get(f"{own.url}/").status_code == httpx.get(f"{own.url}/page/page.js").status_code == 200
        assert ask(own).status_code == httpx.get(f"{own.url}/v1/outrider/info").status_code == 401
        with opened(browser, own.url, complaints=2) as page:  # the answers 401 are in the console
            assert page.js("document.activeElement.id") == "key" and text_of(page, "model") == "…"
            page.type("a-wrong-key-of-the-device")
            page.press("Enter")
            page.wait("document.getElementById('error').textContent.includes('not accepted')")
            page.js("document.getElementById('key').select()")
            page.type(KEY)
            page.press("Enter")
            page.wait("document.getElementById('model').textContent === 'fake'")
            assert page.js("document.getElementById('key-form').hidden && document.getElementById('key').value === ''")
            fill(page, max_tokens=8)
            page.js("document.getElementById('go').click()")
            runs(page, 1)
            kept = page.js("[localStorage.length, sessionStorage.length, document.cookie, location.href, name]")
            assert kept == [0, 0, "", f"{own.url}/", ""]


def test_a_conversation(local: LocalEndpoint, browser: Browser) -> None:
    """Each turn is sent with those before it, and a new conversation forgets them."""
    with opened(browser, local.url) as page:
        page.js("document.getElementById('chat').click()")
        fill(page, max_tokens=12, seed=5)
        answers: list[str] = []
        messages: list[dict[str, str]] = []
        for number, words in enumerate(("zip(", "drafts"), 1):
            fill(page, prompt=words)
            page.js("document.getElementById('prompt').focus()")
            page.press("Enter", CTRL)
            runs(page, number)
            messages.append({"role": "user", "content": words})
            chat = {"messages": messages, "max_tokens": 12, "temperature": 0.8, "seed": 5}
            answer = httpx.post(f"{local.url}/v1/chat/completions", json=chat, timeout=60.0).json()
            answers.append(answer["choices"][0]["message"]["content"])
            messages.append({"role": "assistant", "content": answers[-1]})
            turns = page.js("[...document.querySelectorAll('.turn')].map((turn) => turn.lastChild.textContent)")
            assert turns == [visible(message["content"]) for message in messages]
        page.js("document.getElementById('new').click()")
        assert page.js("document.querySelectorAll('.turn').length") == 0


ASK = """fetch(%s, {
    method: "POST",
    headers: {"Authorization": "Bearer unused", "Content-Type": "application/json", "X-Stainless-Lang": "js"},
    body: JSON.stringify(%s),
}).then((answer) => answer.text().then((text) => [answer.status, text]), (error) => [0, error.name])"""
"""What OpenAI's client does in a page."""


def test_a_chat_program_in_the_browser(cloud: FakeServer, browser: Browser) -> None:
    """A page of an allowed origin streams a chat and reads errors; a page of another one gets nothing."""
    chat = {"model": "fake", "messages": [{"role": "user", "content": "zip("}], "max_tokens": 12, "stream": True}
    chat["seed"] = 1  # another text may end by itself
    other = cloud.url.replace("127.0.0.1", "localhost")
    with serve_local(cloud.url, LocalSettings(allowed_origins=(cloud.url,))) as local, browser.page() as page:
        path = json.dumps(f"{local.url}/v1/chat/completions")
        page.open(f"{cloud.url}/health/live")
        status, events = page.js(ASK % (path, json.dumps(chat)))
        assert status == 200 and events.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in events
        status, answer = page.js(ASK % (path, json.dumps(chat | {"n": 129})))
        assert status == 400 and json.loads(answer)["error"]["param"] == "n"
        page.open(f"{other}/health/live")
        assert page.js(ASK % (path, json.dumps(chat))) == [0, "TypeError"]
