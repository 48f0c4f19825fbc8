"""Headless Chromium over its debugging pipe: pages at any width, light and dark, measured and photographed."""

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
DEADLINE_SECONDS = 300.0  # for a hang


class Browser:
    """One browser with one page."""

    def __init__(self, profile: Path):
        found = next(path for path in map(shutil.which, BROWSERS) if path)
        ours_read, theirs_write = os.pipe()
        theirs_read, ours_write = os.pipe()
        # The browser reads commands from descriptor 3 and writes to 4, and the numbers of the pipes may be these.
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
        self.complaints: list[str] = []
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
        """Return the result of a command of the debugging protocol."""
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
                self.complaints.append(json.dumps(answer["params"]["exceptionDetails"])[:1000])
            if answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.complaints.append(json.dumps(answer["params"]["entry"])[:1000])

    def look(self, width: int, is_dark: bool = False, height: int = 900) -> None:
        """Set the size of the window and the colour scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        """Go to a page, and wait until its script has drawn it."""
        self.call("Page.navigate", url=address)
        self.wait_for("document.querySelector('footer') && document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until an expression in the page is true."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < deadline, condition
            time.sleep(0.1)

    def photograph(self, path: Path, is_whole: bool = False) -> None:
        """Save what the window shows, or the whole page, as PNG."""
        options: dict[str, Any] = {"format": "png"}
        if is_whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options |= {"captureBeyondViewport": True, "clip": {**size, "scale": 1}}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))
