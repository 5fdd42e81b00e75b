"""A real Chromium without a window, driven through its debugging pipe, which needs no library."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.limits import seconds

__all__ = ["Browser", "browser", "chromium"]

# Without a sandbox, because tests may run as root; and without the network that Chromium would use
# at its start.
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip


def chromium() -> str | None:
    """The program, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page. told: what it logged, and the errors of its scripts."""

    def __init__(self, to: Any, back: Any) -> None:
        self._to, self._back = to, back
        self._sent = 0
        self._session: str | None = None
        self.told: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Go to a URL, and wait until its document is loaded."""
        self._call("Page.navigate", url="about:blank")  # or another #place would load nothing
        self._heard("Page.loadEventFired")
        self._call("Page.navigate", url=url)
        self._heard("Page.loadEventFired")

    def evaluate(self, script: str) -> Any:
        """The JSON value of an expression; a promise is waited for."""
        done = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def picture(self, width: int, height: int) -> bytes:
        """The upper part of the page, as a PNG."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def _call(self, method: str, **parameters: Any) -> Any:
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while (answer := self._next()).get("id") != self._sent:
            pass
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def _heard(self, event: str) -> None:
        while self._next().get("method") != event:
            pass

    def _next(self) -> Any:
        data = bytearray()
        while (letter := self._back.read(1)) != b"\0":
            assert letter, "the browser ended"
            data += letter
        message = json.loads(data)
        if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.told.append(json.dumps(message["params"]))
        return message


@contextlib.contextmanager
def browser(program: str, *flags: str) -> Iterator[Browser]:
    """Start a browser; kill it at the end, or after two minutes."""
    hear, say = os.pipe()
    back, tell = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [program, *_FLAGS, *flags, f"--user-data-dir={Path(folder) / 'user'}"]
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{hear} 4>&{tell}', "bash", *command],
            pass_fds=(hear, tell),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(hear)
        os.close(tell)
        try:
            with (
                os.fdopen(say, "wb") as to,
                os.fdopen(back, "rb") as answers,
                _limit(process, seconds(120)),
            ):
                yield Browser(to, answers)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def _limit(process: subprocess.Popen[bytes], after: float) -> Iterator[None]:
    """Kill it after so many seconds; a reader of its pipe then sees the end."""
    timer = threading.Timer(after, lambda: os.killpg(process.pid, signal.SIGKILL))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
