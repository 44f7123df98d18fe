"""A headless Chromium, driven over its own protocol."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from websockets.sync.client import connect

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from websockets.sync.client import ClientConnection

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SECONDS = 60.0
_COMPLAINTS = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")


class Tab:
    """`complaints`: what the page threw, or wrote to its console."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self.complaints: list[Any] = []
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(timeout=SECONDS))
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            if message["method"] in _COMPLAINTS:
                self.complaints.append(message)

    def run(self, script: str) -> Any:
        """The value of an expression."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, script: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not self.run(script):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.02)

    def text(self, element: str) -> str:
        text: str = self.run(f"document.getElementById({element!r}).textContent")
        return text

    def press(self, key: str, *, control: bool = False) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, modifiers=2 if control else 0)

    def resize(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def screenshot(self, path: Path) -> None:
        picture = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))


@contextmanager
def tab(url: str) -> Iterator[Tab]:
    """The page, as soon as it is there."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        command = [
            *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
            *("--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
        ]
        environment = os.environ | {"XDG_RUNTIME_DIR": profile, "HOME": profile}
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
            try:
                line = next(line for line in process.stderr if "DevTools listening on" in line)
                address = line.split("ws://")[1].split("/")[0]
                with urllib.request.urlopen(f"http://{address}/json", timeout=SECONDS) as reply:
                    target = next(each for each in json.load(reply) if each["type"] == "page")
                with connect(target["webSocketDebuggerUrl"], max_size=None) as connection:
                    page = Tab(connection)
                    page.send("Page.navigate", url=url)
                    page.wait_for(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")
                    yield page
                    page.send("Browser.close")
            finally:
                process.kill()
