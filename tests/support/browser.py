"""Headless Chromium driven over its debugging pipe: page sizes, colour schemes, scripts and screenshots."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip
DEADLINE_SECONDS = 300.0  # only a hang takes this long


class Browser:
    """A browser process with one page."""

    def __init__(self, profile: Path):
        found = next(path for path in map(shutil.which, BROWSERS) if path)
        ours_read, theirs_write = os.pipe()
        theirs_read, ours_write = os.pipe()
        # The browser reads commands from descriptor 3 and writes replies to 4. Pipes that already have these numbers
        # are moved first.
        shell = f'exec "$0" "$@" 3<&{theirs_read} 4>&{theirs_write}'
        if {theirs_read, theirs_write} & {3, 4}:
            shell = f'exec 8<&{theirs_read} 9>&{theirs_write}; exec "$0" "$@" 3<&8 4>&9'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, found, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs_read, theirs_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_read)
        os.close(theirs_write)
        self._answers, self._commands = os.fdopen(ours_read, "rb"), os.fdopen(ours_write, "wb", buffering=0)
        self._numbers, self._rest = itertools.count(1), b""
        self.page_errors: list[str] = []
        self._session: str | None = None
        (page,) = (each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._answers.close()
        self._commands.close()

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command of the DevTools protocol and return its result; errors of the page are kept meanwhile."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                chunk = os.read(self._answers.fileno(), 1 << 20)
                assert chunk, "the browser has ended"
                self._rest += chunk
            line, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            if answer.get("method") == "Runtime.exceptionThrown":
                self.page_errors.append(json.dumps(answer["params"]["exceptionDetails"])[:1000])
            if answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.page_errors.append(json.dumps(answer["params"]["entry"])[:1000])

    def set_viewport(self, width: int, is_dark: bool = False, height: int = 900) -> None:
        """Set the window size and the colour scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        """Navigate to a page and wait until its script has drawn it."""
        self.call("Page.navigate", url=address)
        self.wait_for("document.querySelector('footer') && document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript expression in the page is true."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < deadline, condition
            time.sleep(0.1)

    def save_screenshot(self, path: Path, is_whole: bool = False) -> None:
        """Save the visible part of the page, or the whole page, as PNG."""
        options: dict[str, Any] = {"format": "png"}
        if is_whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options |= {"captureBeyondViewport": True, "clip": {**size, "scale": 1}}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))
