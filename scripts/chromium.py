# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven through its DevTools protocol: for tests of the page of a run, and for pictures of it."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_S, ANSWER_S = 60.0, 60.0
# A page may hold some MB of data.
MAX_MESSAGE_BYTES = 2**27


def find_chromium() -> str | None:
    """The path of an installed Chromium; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One tab of a browser."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._num_sent = 0
        self.requests: list[str] = []
        """Addresses that the tab has asked for, data of its own left out."""
        self.errors: list[str] = []
        """Exceptions of its scripts, and what its security policy refused."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict:
        """The answer of a protocol command."""
        self._num_sent += 1
        self._connection.send(json.dumps({"id": self._num_sent, "method": method, "params": parameters}))
        end = time.monotonic() + ANSWER_S
        while True:
            message = json.loads(self._connection.recv(timeout=max(0.1, end - time.monotonic())))
            self._note(message)
            if message.get("id") == self._num_sent:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

    def _note(self, message: dict) -> None:
        content = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(content["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(str(content["exceptionDetails"].get("exception", {}).get("description")))
            case "Log.entryAdded" if content["entry"]["level"] == "error":
                self.errors.append(content["entry"]["text"])

    def open(self, address: str, *, width: int = 1280, height: int = 900) -> None:
        """Opens a page of a run and waits until it is drawn."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=address)
        self.wait("document.documentElement?.dataset.ready && document.querySelector('main')")

    def evaluate(self, expression: str) -> object:
        """The value of a JavaScript expression, JSON alone."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, expression: str, *, timeout_s: float = ANSWER_S) -> object:
        """The value of an expression once it is true. TimeoutError: it never is."""
        end = time.monotonic() + timeout_s
        while True:
            value = self.evaluate(
                f"(() => {{ const found = {expression}; return found instanceof Node ? true : found; }})()"
            )
            if value:
                return value
            if time.monotonic() > end:
                raise TimeoutError(f"{expression}; errors of the page: {self.errors}")
            time.sleep(0.1)

    def move_to(self, selector: str) -> None:
        """Moves the mouse over the middle of an element, scrolled into view."""
        found = f"document.querySelector({json.dumps(selector)})"
        box = self.evaluate(
            f"(() => {{ const e = {found}; e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect(); "
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        assert isinstance(box, list)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def picture(self, *, full: bool = False) -> bytes:
        """The tab as PNG; with `full` the whole page, not only what is visible."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)["data"])


@contextmanager
def open_tab() -> Iterator[Tab]:
    """A tab of a new browser, which ends with the block."""
    program = find_chromium()
    assert program is not None, "no Chromium: apt-get install chromium"
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        # Its sandbox needs namespaces that containers lack; it opens pages of our own alone.
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            "--disable-background-networking",
        ]
        command = [program, *flags, "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
        browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port_file, end = Path(folder) / "DevToolsActivePort", time.monotonic() + START_S
            while not (port_file.exists() and len(port_file.read_text().split()) == 2):
                if time.monotonic() > end or browser.poll() is not None:
                    raise RuntimeError(f"{program} did not start: exit code {browser.poll()}")
                time.sleep(0.1)
            port = port_file.read_text().split()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=ANSWER_S) as answer:
                (target,) = [target for target in json.load(answer) if target["type"] == "page"]
            with connect(target["webSocketDebuggerUrl"], max_size=MAX_MESSAGE_BYTES) as connection:
                yield Tab(connection)
        finally:
            browser.terminate()
            browser.wait(timeout=30)
