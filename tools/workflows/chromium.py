"""A headless Chromium, driven over the pipe of its debugging protocol: nothing has to be installed beside it."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ANSWER_SECONDS = 300


def find_chromium() -> str | None:
    """The browser that CHROMIUM_PATH names, or the first usual one on the PATH."""
    return os.environ.get("CHROMIUM_PATH") or next((path for path in map(shutil.which, NAMES) if path), None)


class Chromium:
    """Context manager around one browser with one page; `profile` is a folder for its data."""

    def __init__(self, executable: str, profile: Path, width: int = 1600, height: int = 1000) -> None:
        self._command = [
            executable,
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-sandbox",  # containers forbid the sandbox, and only local pages are opened
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--hide-scrollbars",
            "--no-first-run",
            f"--window-size={width},{height}",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []

    def __enter__(self) -> Chromium:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        def connect() -> None:  # Chromium reads commands from descriptor 3 and writes answers to 4
            high_read, high_write = (os.dup(descriptor) for descriptor in (to_browser, from_browser))
            os.dup2(high_read, 3)
            os.dup2(high_write, 4)

        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=connect,
            close_fds=False,
        )
        os.close(to_browser)
        os.close(from_browser)
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.enable")
        self.call("Runtime.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a command of the protocol; errors of the page that arrive meanwhile are kept in `errors`."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        rest = json.dumps(message).encode() + b"\0"
        while rest:
            rest = rest[os.write(self._out, rest) :]
        while True:
            answer = self._read()
            if answer.get("method") == "Runtime.exceptionThrown":
                details = answer["params"]["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _read(self) -> Any:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], ANSWER_SECONDS)
            chunk = os.read(self._in, 1 << 20) if ready else b""
            if not chunk:
                raise RuntimeError(f"{self._command[0]} gave no answer within {ANSWER_SECONDS} s")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression as JSON; promises are awaited, exceptions raise RuntimeError."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return result["result"].get("value")

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)

    def wait_for(self, condition: str, seconds: float = 300.0) -> None:
        """Return once the JavaScript expression is true."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if self.evaluate(f"!!({condition})"):
                    return
            except RuntimeError:
                pass  # the page is not that far yet
            time.sleep(0.1)
        raise RuntimeError(f"after {seconds} s still not true in the page: {condition}")

    def screenshot(self) -> bytes:
        """The window as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
