"""Chromium without a screen, driven through its pipe: no package is needed beside the browser itself."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""None where no Chromium is installed."""


class Page:
    """A page of Chromium."""

    def __init__(self, to_browser, from_browser):
        self._to, self._from, self._left = to_browser, from_browser, b""
        self._number, self._session = 0, None
        self.said = []
        """What the page's console said, and errors of its scripts."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for name in ("Page", "Runtime", "Log"):
            self.call(f"{name}.enable")

    def call(self, method, **parameters):
        """Send a command, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _read(self):
        while b"\0" not in self._left:
            assert select.select([self._from], [], [], 60)[0], "Chromium says nothing"
            piece = os.read(self._from, 1 << 16)
            assert piece, "Chromium has ended"
            self._left += piece
        message, _, self._left = self._left.partition(b"\0")
        return json.loads(message)

    def _note(self, event):
        if event.get("method") == "Runtime.exceptionThrown":
            self.said.append(event["params"]["exceptionDetails"]["exception"].get("description", ""))
        elif event.get("method") == "Log.entryAdded":
            entry = event["params"]["entry"]
            self.said.append(f"{entry['text']} {entry.get('url', '')}")

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.wait("document.body && 'ready' in document.body.dataset")

    def run(self, script):
        """Return the value of an expression of JavaScript."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script, timeout_s=60):
        """Wait until an expression is true."""
        end = time.monotonic() + timeout_s
        while not self.run(script):
            assert time.monotonic() < end, f"never true: {script}; the page said {self.said}"
            time.sleep(0.03)

    def press(self, key, **more):
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **more)

    def resize(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, theme):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def save_picture(self, path):
        Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def open_chromium(folder):
    """Give a page of a new Chromium, whose files are in `folder`."""
    (browser_in, to_browser), (from_browser, browser_out) = os.pipe(), os.pipe()
    # Chromium reads from 3 and writes to 4.
    place = (
        "import fcntl, os, sys; source, sink = (fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3]); "
        "os.dup2(source, 3); os.dup2(sink, 4); os.execv(sys.argv[3], sys.argv[3:])"
    )
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--mute-audio", "--no-first-run")
    quiet = ("--disable-dev-shm-usage", "--disable-background-networking", f"--user-data-dir={folder}")
    launch = [sys.executable, "-c", place, str(browser_in), str(browser_out), PROGRAM]
    process = subprocess.Popen(
        [*launch, *options, *quiet, "--remote-debugging-pipe"],
        pass_fds=(browser_in, browser_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(browser_in)
    os.close(browser_out)
    try:
        yield Page(to_browser, from_browser)
    finally:
        os.close(to_browser)
        os.close(from_browser)
        process.kill()
        process.wait()
