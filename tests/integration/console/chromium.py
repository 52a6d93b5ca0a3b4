"""A headless Chromium, driven over the DevTools protocol: JSON over a WebSocket on loopback.

Everything the page logs, every script error and every violation of its content security policy is
kept in `complaints`.
"""

import itertools
import json
import os
import shutil
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

PATIENCE_S = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    # One renderer for all pages: to start another takes a quarter of a test's CPU.
    "--renderer-process-limit=1",
    "--disable-features=IsolateOrigins,site-per-process",
    "--disable-site-isolation-trials",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


class Navigated(AssertionError):
    """The page that was asked has made room for another."""


class Chromium:
    """One browser with one page. A context manager."""

    def __init__(self, program: str, profile: Path) -> None:
        self._program, self._profile = program, profile

    def __enter__(self) -> "Chromium":
        self._ids = itertools.count(1)
        self.complaints: list[str] = []
        self.expected: list[str] = []  # substrings of complaints that a test provokes
        self.requested: list[str] = []
        self._session: str | None = None
        with ExitStack() as stack:
            self._process = subprocess.Popen(
                [self._program, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
                env=os.environ | {"TMPDIR": str(self._profile)},  # it leaves a folder there
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(self._end)
            port, path = self._wait_for_port()
            url = f"ws://127.0.0.1:{port}{path}"
            # Without pings: their thread draws from `random`, which Hypothesis reports as a flaw of
            # a test that happens to run meanwhile.
            self._socket = stack.enter_context(
                connect(url, max_size=None, compression=None, ping_interval=None)
            )
            self._attach()
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_for_port(self) -> list[str]:
        port_file = self._profile / "DevToolsActivePort"
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if port_file.exists() and len(found := port_file.read_text().split()) == 2:
                return found
            assert self._process.poll() is None, "Chromium ended"
            time.sleep(0.02)
        raise TimeoutError("Chromium did not listen")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            response = json.loads(self._socket.recv(timeout=PATIENCE_S))
            if response.get("id") == number:
                error = response.get("error", {})
                if "navigated" in error.get("message", ""):
                    raise Navigated(error["message"])
                assert not error, (method, error)
                return response["result"]
            self._note(response)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:500])
        elif event.get("method") == "Log.entryAdded":
            self.complaints.append(f"{params['entry']['level']}: {params['entry']['text']}")
        elif event.get("method") == "Runtime.consoleAPICalled":
            self.complaints.append(f"console.{params['type']}: {json.dumps(params['args'])[:300]}")
        elif event.get("method") == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])

    # --- user actions -----------------------------------------------------------------------------

    def open(self, url: str) -> None:
        """Open a page, and forget what the last one logged and requested."""
        self.call("Page.navigate", url="about:blank")
        self.complaints.clear()
        self.requested.clear()
        self.call("Page.navigate", url=url)

    def emulate(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Set the window size and the preferred color scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.prefer(dark=dark)

    def prefer(self, *, dark: bool) -> None:
        """Change the preferred color scheme, also of an open page."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, "End": 35}
        common = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0].upper()))}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def run(self, script: str) -> Any:
        """Evaluate an expression; a promise is awaited."""
        response = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in response, response["exceptionDetails"]
        return response["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait for an expression to be true."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            with suppress(Navigated):
                if self.run(f"Boolean({condition})"):
                    return
            time.sleep(0.03)
        raise AssertionError(f"not within {PATIENCE_S} s: {condition}\n{self.text()[:2000]}")

    def text(self) -> str:
        """The visible text of the page."""
        return str(self.run("document.body.innerText"))
