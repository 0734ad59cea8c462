"""Drives a headless Chromium through the DevTools protocol, over a pair of pipes.

Chromium reads commands from file descriptor 3 and writes answers to 4, as JSON that
ends with a zero byte, so that neither a driver nor a WebSocket library is needed.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # in containers, where Chromium's own sandbox cannot start
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--mute-audio",
    "--remote-debugging-pipe",
)
_LAUNCH = """
import fcntl, os, sys
reads, writes, *command = sys.argv[1:]
# Copies above 10 come first, because either may be descriptor 3 or 4 already.
reads, writes = (fcntl.fcntl(int(d), fcntl.F_DUPFD, 10) for d in (reads, writes))
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execvp(command[0], command)
"""


def executable() -> str | None:
    """The path of an installed Chromium or Chrome; None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class BrowserError(RuntimeError):
    """The browser did not answer, or a script in the page failed."""


class Browser:
    """One page in a running Chromium.

    Attributes:
        problems: console errors, uncaught exceptions and refused loads, as text.
        requests: every address that the page asked for.
    """

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self._received = b""
        self._next = 0
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []

    def open(self, width: int, height: int, *, dark: bool = False) -> None:
        """Makes the page, `width` times `height` CSS pixels large."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(width, height)
        feature = {
            "name": "prefers-color-scheme",
            "value": "dark" if dark else "light",
        }
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def resize(self, width: int, height: int) -> None:
        """Changes the size of the window, in CSS pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def load(self, path: Path) -> None:
        """Loads a file and waits until the scripts of the page have run."""
        self.problems, self.requests = [], []
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait(
            "document.readyState === 'complete' && location.href !== 'about:blank'"
        )

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page; promises are awaited.

        Raises:
            BrowserError: the expression threw.
        """
        answer = self.send(
            "Runtime.evaluate",
            expression=script,
            returnByValue=True,
            awaitPromise=True,
        )
        if "exceptionDetails" in answer:
            raise BrowserError(_said(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = 30) -> None:
        """Waits until an expression is true.

        Raises:
            BrowserError: the expression stayed false for `seconds`.
        """
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({script})"):
            if time.monotonic() > end:
                raise BrowserError(f"still false after {seconds} s: {script}")
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """Clicks with the mouse on the middle of the first element that matches."""
        x, y = self.run(
            f"(() => {{ const r = document.querySelector({json.dumps(selector)})"
            ".getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + Math.min(r.height / 2, 15)] })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send(
                "Input.dispatchMouseEvent",
                type=kind,
                x=x,
                y=y,
                button="left",
                clickCount=1,
            )

    def press(self, key: str, *, shift: bool = False) -> None:
        """Presses one key, by its name in JavaScript ("a", "Enter", "ArrowDown")."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        event = {"key": key, "modifiers": 8 if shift else 0}
        self.send(
            "Input.dispatchKeyEvent",
            type="keyDown" if text else "rawKeyDown",
            **event,
            **({"text": text} if text else {}),
        )
        self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        """Types a text where the focus is."""
        self.send("Input.insertText", text=text)

    def picture(self, path: Path) -> None:
        """Saves the window as a PNG file."""
        data = self.send("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command and returns the answer.

        Raises:
            BrowserError: the command failed, or no answer came in 240 s.
        """
        self._next += 1
        number = self._next
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._writes, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") != number:
                self._note(answer)
            elif "error" in answer:
                raise BrowserError(f"{method}: {answer['error']['message']}")
            else:
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            if not select.select([self._reads], [], [], 240)[0]:
                raise BrowserError("no answer in 240 s")
            read = os.read(self._reads, 1 << 20)
            if not read:
                raise BrowserError("the browser ended")
            self._received += read
        line, _, self._received = self._received.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(_said(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(parameters["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] == "error":
            self.problems.append(str(parameters["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])


@contextmanager
def browsing(
    width: int = 1440, height: int = 900, *, dark: bool = False
) -> Iterator[Browser]:
    """A page in a Chromium of its own, which is ended afterwards.

    Raises:
        BrowserError: no Chromium is installed.
    """
    program = executable()
    if program is None:
        raise BrowserError(f"none of {', '.join(NAMES)} is installed")
    from_us, to_browser = os.pipe()
    from_browser, to_us = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        launch = [sys.executable, "-S", "-c", _LAUNCH, str(from_us), str(to_us)]
        process = subprocess.Popen(
            [*launch, program, *_FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(from_us, to_us),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        try:
            browser = Browser(from_browser, to_browser)
            browser.open(width, height, dark=dark)
            yield browser
            browser._session = None
            browser.send("Browser.close")
            process.wait(10)
        finally:
            process.kill()
            process.wait()
            os.close(from_browser)
            os.close(to_browser)


def _said(details: dict[str, Any]) -> str:
    thrown = details.get("exception", {}).get("description", "")
    return f"{details.get('text', '')} {thrown}".strip()
