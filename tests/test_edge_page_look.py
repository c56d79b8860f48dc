"""Tests how the page shows a text in a real Chromium: colours, contrast, narrow windows, names; and hostile text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.chromium import Browser, Page
from tests.local_endpoint import LocalEndpoint
from tests.test_edge_page import click, fill, number_of, opened, text_of

from outrider.edge.serve.page_routes import GENERATE

LONG = "x" * 400
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
        {"id": 1, "text": HOSTILE, "parent": -1, "reach": 0.5, "rank": 0, "is_sent": True},
        {"id": 2, "text": " b", "parent": 0, "reach": 0.25, "rank": 1, "is_sent": False},
        {"id": 3, "text": "\n", "parent": -1, "reach": 0.04, "rank": 8, "is_sent": False},
    ],
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
        click(page, "go")
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
    styles = scene.js(
        "['prompt', 'draft', 'alternative', 'lookup', 'target', 'unverified'].map((name) => getComputedStyle("
        "document.querySelector(`#text .origin-${name}, #text .${name}`)))"
        ".map((style) => [style.color, style.textDecorationStyle])"
    )
    assert len({colour for colour, _ in styles}) == 6
    assert [line for _, line in styles[1:]] == ["solid", "dotted", "dashed", "solid", "wavy"]
    assert [text_of(scene, name) for name in ("f-accepted", "f-pass", "f-rtt")] == ["43 %", "6.00", "12 ms"]
    nodes = scene.js("[...document.querySelectorAll('#tree rect:not(.cursor)')].map((n) => n.getAttribute('class'))")
    assert nodes == ["stroke-draft", "stroke-alternative unsent", "stroke-lookup unsent"]
    assert number_of(scene, "#timeline rect:not(.lane)") == 4


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


def test_an_answer_that_breaks_off_is_said_and_a_click_meant_for_stop_starts_nothing(
    local: LocalEndpoint, browser: Browser
) -> None:
    """The page goes on: its text stays, its verifier is looked for until it answers."""
    broken = f"""const stream = {json.dumps(f"data: {json.dumps(COMMIT)}" + chr(10) * 2)};
    let looks = 0;
    const later = window.setTimeout;
    window.setTimeout = (work, ms) => later(work, ms === 5000 ? 0 : ms);
    window.now = 0;
    performance.now = () => window.now;
    const refusal = {{ error: {{ code: "no_cloud", message: "No verifier answers" }} }};
    window.fetch = async (path) => path !== {GENERATE!r}
      ? looks++ ? Response.json({json.dumps(INFO)}) : Response.json(refusal, {{ status: 503 }})
      : new Response(new ReadableStream({{
          pull: (to) => {{
            if (to.sent) to.error(new TypeError("network error"));
            else to.enqueue(new TextEncoder().encode(stream));
            to.sent = true;
          }},
        }}, {{ highWaterMark: 0 }}));"""
    with opened(browser, local.url, script=broken) as page:
        page.wait("document.getElementById('draft').textContent !== '…'")
        assert text_of(page, "error") == "" and text_of(page, "model") == SHOWN
        fill(page, seed=1)
        click(page, "go")
        page.wait("document.body.dataset.runs === '1'")
        assert text_of(page, "error") == "The connection broke before the answer ended. Try again."
        assert number_of(page, "#text .origin-draft") == 1
        pressed = "document.getElementById('go').dispatchEvent(new MouseEvent('click', {cancelable: true, detail: %d}))"
        assert not page.js(pressed % 1)  # the text ended just now
        page.js("window.now = 1000")
        assert not page.js(pressed % 2)  # the second click of two
        assert page.js("document.body.dataset.runs") == "1" and text_of(page, "go") == "Generate"
        assert page.js(pressed % 1)
        page.wait("document.body.dataset.runs === '2'")


@pytest.mark.parametrize("width", [320, 360, 768])
def test_a_narrow_window_has_no_sideways_scroll(scene: Page, width: int) -> None:
    """Also with long words in the text, in the names and in the tree; what is pressed is large enough."""
    scene.resize(width, 800)
    try:
        scene.wait(  # until it is drawn again for this width
            f"document.documentElement.clientWidth === {width} && [...document.querySelectorAll('#timeline .lane')]"
            f".every((lane) => lane.getBoundingClientRect().right <= {width})"
        )
        outside = scene.js(
            "[...document.querySelectorAll('body *')].filter((each) => !each.closest('.unseen') &&"
            f" each.getBoundingClientRect().right > {width}).map((each) => each.outerHTML.slice(0, 80))"
        )
        assert (scene.js("document.documentElement.scrollWidth"), outside) == (width, [])
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
    found = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in scene.call("Accessibility.getFullAXTree")["nodes"]
        if not node.get("ignored")
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
    roles = scene.js("['status', 'error'].map((name) => document.getElementById(name).role)")
    assert (scene.js("document.documentElement.lang"), roles) == ("en", ["status", "alert"])
    assert number_of(scene, "[aria-live]") == 0  # tokens would drown the rest
    ids = scene.js("[...document.querySelectorAll('[id]')].map((each) => each.id)")
    assert len(ids) == len(set(ids))
