"""Makes the pictures of the page: a real `outrider serve`, the widened reference target, a headless Chromium.

    python -m tools.page_pictures

Writes docs/images/page-*.png: while a text is generated (light, dark), a comparison with cloud-only, a phone. Cloud and
agent have a core each; the pictures show what is measured then, on this machine.
"""

from __future__ import annotations

import time
from pathlib import Path

from tests.chromium import CTRL, Browser, Page, open_browser

from outrider.edge.cli.draft_source import export_reference_pair
from outrider.edge.devices.placement import AS_BUNDLED
from outrider.edge.lab.child_process import child_process
from outrider.edge.lab.cores import plan_cores, running_on
from outrider.edge.lab.laboratory import cloud_process

PICTURES = Path(__file__).parents[1] / "docs/images"
PROMPT = "def walk(path):"
SEED = 7
TEMPERATURE = 0.5
NUM_TOKENS = 600  # so many that the text is still running when its picture is taken
NUM_COMPARED = 120
ROUND_TRIP_MS = 50
IN_FULL_SWING = (
    "document.querySelectorAll('#tree .token').length > 3 && document.querySelectorAll('#timeline .begin').length > 8"
    " && document.getElementById('text').textContent.length > 250"
)


def main() -> None:
    """Takes the pictures."""
    PICTURES.mkdir(exist_ok=True)
    pair, cores = export_reference_pair(AS_BUNDLED), plan_cores()
    with cloud_process(pair.target, cores.cloud) as cloud:
        serve = ["-m", "outrider.edge.cli", "serve", "--cloud", cloud, "--draft", str(pair.draft), "--port", "0"]
        serving = child_process([*serve, "--threads", "1"], ready_prefix="OUTRIDER_READY ", cores=cores.agent)
        with serving as url, running_on(cores.agent), open_browser() as browser:
            take(browser, url)


def take(browser: Browser, url: str) -> None:
    """All pictures; the first text warms everything up."""
    with browser.page(1280, 880) as page:
        begin(page, url)
        finish(page, 1)
        for number, scheme in enumerate(("light", "dark"), 2):
            page.prefer(scheme)
            page.press("Enter", CTRL)
            save_running(page, scheme)
            finish(page, number)
        page.prefer("light")
        page.js(f"document.getElementById('max-tokens').value = {NUM_COMPARED}")
        page.resize(1280, 930)
        page.js("document.getElementById('compare').click()")
        finish(page, 4)
        save(page, "comparison", is_whole=False)
        print(page.js("document.getElementById('verdict').textContent"))
    with browser.page() as page:
        page.resize(390, 844, is_mobile=True)
        page.call("Emulation.setTouchEmulationEnabled", enabled=True)
        begin(page, url)
        save_running(page, "phone")
        finish(page, 1)


def begin(page: Page, url: str) -> None:
    """Opens the page and generates."""
    page.open(url + "/")
    page.wait("document.body.dataset.looked === 'yes'")
    fields = {
        "prompt": PROMPT,
        "seed": SEED,
        "temperature": TEMPERATURE,
        "max-tokens": NUM_TOKENS,
        "delay": ROUND_TRIP_MS,
    }
    for name, value in fields.items():
        page.js(f"document.getElementById({name!r}).value = {value!r}")
    page.js("document.getElementById('delay').dispatchEvent(new Event('input'))")
    page.js("document.getElementById('prompt').focus()")
    page.press("Enter", CTRL)


def finish(page: Page, count: int) -> None:
    """Waits until so many texts, or comparisons, have ended."""
    while page.js("document.body.dataset.runs") != str(count):
        time.sleep(0.5)
    print(page.js("document.getElementById('status').textContent"))


def save_running(page: Page, name: str) -> None:
    """Saves a moment in which there are guesses: the picture is taken a little later than asked for."""
    is_shown = False
    while not is_shown:
        page.wait(IN_FULL_SWING)
        save(page, name)
        is_shown = page.js(IN_FULL_SWING)
    page.press("Escape")


def save(page: Page, name: str, *, is_whole: bool = True) -> None:
    """Saves the whole page, or what is in the window."""
    path = PICTURES / f"page-{name}.png"
    page.screenshot(path, is_whole=is_whole)
    print(f"wrote {path.name}, {path.stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    main()
