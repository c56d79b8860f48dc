"""Drives Debian's Chromium, headless, by its DevTools protocol over a pipe: no driver, no package, no port.

with open_browser() as browser, browser.page() as page:
    page.open(url)
    page.wait("document.title === 'Outrider'")
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 30.0
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    "about:blank",
)
KEYS = {
    "Enter": {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"},
    "Tab": {"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9},
    "Escape": {"key": "Escape", "code": "Escape", "windowsVirtualKeyCode": 27},
    "Space": {"key": " ", "code": "Space", "windowsVirtualKeyCode": 32, "text": " "},
    "ArrowRight": {"key": "ArrowRight", "code": "ArrowRight", "windowsVirtualKeyCode": 39},
    "a": {"key": "a", "code": "KeyA", "windowsVirtualKeyCode": 65},
}
CTRL, SHIFT = 2, 8


class Browser:
    """A running Chromium. Its answers and events are read by a thread."""

    def __init__(self, pid: int, to_browser: int, from_browser: int) -> None:
        self._pid = pid
        self._to = to_browser
        self._from = os.fdopen(from_browser, "rb", buffering=0)
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._answers: dict[int, dict[str, Any]] = {}
        self._is_gone = False
        self.events: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, name="outrider-test-chromium")
        self._reader.start()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol and returns its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        with self._changed:
            assert self._changed.wait_for(lambda: number in self._answers or self._is_gone, TIMEOUT_S), method
            assert number in self._answers, "Chromium has ended"
            answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer.get('error')}"
        result: dict[str, Any] = answer["result"]
        return result

    @contextmanager
    def page(self, width: int = 1280, height: int = 900) -> Iterator[Page]:
        """A new, empty tab, in a context of its own."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        page.resize(width, height)
        try:
            yield page
        finally:
            self.call("Target.disposeBrowserContext", browserContextId=context)

    def close(self) -> None:
        """Ends it."""
        try:
            self.call("Browser.close")
        except (AssertionError, OSError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._reader.join(TIMEOUT_S)
        os.close(self._to)
        self._from.close()

    def _read(self) -> None:
        rest = b""
        while chunk := self._from.read(1 << 16):
            *messages, rest = (rest + chunk).split(b"\0")
            with self._changed:
                for message in map(json.loads, messages):
                    if "id" in message:
                        self._answers[message["id"]] = message
                    else:
                        self.events.append(message)
                self._changed.notify_all()
        with self._changed:
            self._is_gone = True
            self._changed.notify_all()


class Page:
    """A tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol for this tab."""
        return self._browser.call(method, self._session, **params)

    def open(self, url: str) -> None:
        """Navigates, and waits until the page's scripts have run."""
        self.call("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    def js(self, expression: str) -> Any:
        """The value of an expression; of its promise, if it is one."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Returns once the condition is true; fails the test after TIMEOUT_S."""
        script = f"""new Promise((done, failed) => {{
            const until = Date.now() + {TIMEOUT_S * 800};
            const look = () => {{
                if ({condition}) done(true);
                else if (Date.now() > until) failed(new Error("it did not come true in time"));
                else setTimeout(look, 10);
            }};
            look();
        }})"""
        for _ in range(20):  # a navigation ends what runs in the old document
            try:
                self.js(script)
                return
            except AssertionError as error:
                if "navigated" not in str(error) and "context" not in str(error).lower():
                    raise
        raise AssertionError("the page navigates again and again")

    def press(self, key: str, modifiers: int = 0) -> None:
        """A key, down and up."""
        up = {name: value for name, value in KEYS[key].items() if name != "text"}
        is_typed = "text" in KEYS[key] and not modifiers & CTRL
        down = {"type": "keyDown", **KEYS[key]} if is_typed else {"type": "rawKeyDown", **up}
        for event in (down, {"type": "keyUp", **up}):
            self.call("Input.dispatchKeyEvent", modifiers=modifiers, **event)

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self.call("Input.insertText", text=text)

    def resize(self, width: int, height: int, *, is_mobile: bool = False) -> None:
        """Sets the size of the window."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=is_mobile,
        )

    def prefer(self, scheme: str) -> None:
        """The user's colour scheme: light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path, *, is_whole: bool = False) -> None:
        """Saves a picture, PNG."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and violations of the content policy."""
        found = [(e["method"], e["params"]) for e in [*self._browser.events] if e.get("sessionId") == self._session]
        entries = [params["entry"] for method, params in found if method == "Log.entryAdded"]
        calls = [params for method, params in found if method == "Runtime.consoleAPICalled"]
        return [
            *(str(entry["text"]) for entry in entries if entry["level"] in ("error", "warning")),
            *(str(call["args"]) for call in calls if call["type"] in ("error", "warning", "assert")),
            *(str(params) for method, params in found if method == "Runtime.exceptionThrown"),
        ]


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Starts Chromium with an empty profile; skips the test where there is none."""
    programs = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    if (program := next(filter(None, programs), None)) is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        ours_in, theirs_out = _pipe()
        theirs_in, ours_out = _pipe()
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, theirs_in, 3),
            (os.POSIX_SPAWN_DUP2, theirs_out, 4),
        ]
        home = {**os.environ, "HOME": profile}
        arguments = [program, *_FLAGS[:-1], f"--user-data-dir={profile}/data", _FLAGS[-1]]
        pid = os.posix_spawn(program, arguments, home, file_actions=actions, setpgroup=0)
        os.close(theirs_in)
        os.close(theirs_out)
        browser = Browser(pid, ours_out, ours_in)
        try:
            yield browser
        finally:
            browser.close()


def _pipe() -> tuple[int, int]:
    """Read and write end, with numbers that the child's own do not overwrite."""
    ends: list[int] = []
    for end in os.pipe():
        ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10))
        os.close(end)
    return ends[0], ends[1]
