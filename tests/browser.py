"""Debian's chromium, headless, driven over its own pipe (DevTools): real clicks, console, network, pictures."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-extensions --hide-scrollbars --disable-dev-shm-usage "
    "--remote-debugging-pipe"
).split()


def find_chromium():
    """The browser's path; on a machine where this is allowed it is installed first. Fails with what to do."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next((p for n in names if (p := shutil.which(n))), None)
    if found:
        return found
    said = "not root, or no apt-get"
    if os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (
            ["apt-get", "update", "-q"],
            ["apt-get", "install", "-y", "-q", "--no-install-recommends", "chromium"],
        ):
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            )
            said = (done.stderr or done.stdout)[-500:]
        found = shutil.which("chromium")
    if not found:
        raise RuntimeError(
            "The tests of the report page need a real browser and there is none here. Install it with "
            f"`apt-get install chromium` (as root) and run again. The attempt to do so said: {said}"
        )
    return found


class Browser:
    """One browser process; `page()` opens tabs."""

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="dampen-chromium-")
        reads, self._write = os.pipe()
        self._read, writes = os.pipe()

        def hand_over():  # chromium reads commands from descriptor 3 and answers on 4
            low, high = os.dup(reads), os.dup(writes)
            os.dup2(low, 3)
            os.dup2(high, 4)

        self.process = subprocess.Popen(
            [find_chromium(), *FLAGS, f"--user-data-dir={self.folder}", "about:blank"],
            preexec_fn=hand_over,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)
        self._buffer, self._next = b"", 0
        self.events = []

    def send(self, method, params=None, session=None, timeout=60):
        """Call a method of the protocol and return its result."""
        self._next += 1
        message = {"id": self._next, "method": method, "params": params or {}}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline, wanted = time.monotonic() + timeout, self._next
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == wanted:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def _receive(self, deadline):
        import select

        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("The browser did not answer in time.")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise RuntimeError(f"The browser is gone (exit code {self.process.poll()}).")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def page(self, width=1280, height=900, dark=False):
        return Page(self, width, height, dark)

    def close(self):
        try:
            self.send("Browser.close", timeout=10)
            self.process.wait(10)
        except (RuntimeError, TimeoutError, OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        finally:
            os.close(self._write)
            os.close(self._read)
            shutil.rmtree(self.folder, ignore_errors=True)


class Page:
    """One tab; collects what its console says and what it asks the network for."""

    def __init__(self, browser, width, height, dark):
        self.browser = browser
        self.target = browser.send("Target.createTarget", {"url": "about:blank"})["targetId"]
        self.session = browser.send(
            "Target.attachToTarget", {"targetId": self.target, "flatten": True}
        )["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        self.resize(width, height)
        self.media(dark=dark)

    def send(self, method, params=None, timeout=60):
        return self.browser.send(method, params, self.session, timeout)

    def resize(self, width, height):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", size)

    def media(self, dark=False, kind=""):
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", {"media": kind, "features": [feature]})

    def open(self, where, wait="document.readyState === 'complete'"):
        self.send(
            "Page.navigate", {"url": where.resolve().as_uri() if isinstance(where, Path) else where}
        )
        self.wait(wait)

    def run(self, script):
        """The value of a JavaScript expression."""
        call = {"expression": script, "returnByValue": True, "awaitPromise": True}
        answer = self.send("Runtime.evaluate", call)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, condition, timeout=60):
        """Until a JavaScript condition holds; while a document is being replaced it may not even be computable."""
        deadline, problem = time.monotonic() + timeout, None
        while True:
            try:
                if self.run(f"Boolean({condition})"):
                    return
            except RuntimeError as error:
                problem = error
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"Never true: {condition}; the console says {self.complaints()[:3]}"
                ) from problem
            time.sleep(0.05)

    def click(self, selector):
        """A real mouse click in the middle of an element."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{find}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.run(
            f"(() => {{ const b = {find}.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; }})()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            where = {"type": kind, "x": box[0], "y": box[1], "button": "left", "clickCount": 1}
            self.send("Input.dispatchMouseEvent", where)

    def press(self, name, code):
        """A key: its name and its virtual key code."""
        text = {"Enter": "\r", " ": " "}.get(name, "")
        for kind in ("keyDown", "keyUp"):
            key = {
                "type": kind,
                "key": name,
                "windowsVirtualKeyCode": code,
                "code": name,
                "text": text,
            }
            self.send("Input.dispatchKeyEvent", key)

    def happened(self, method):
        """The parameters of every event of this kind in this tab so far."""
        self.run("1")
        return [
            e["params"]
            for e in self.browser.events
            if e.get("sessionId") == self.session and e.get("method") == method
        ]

    def complaints(self):
        """Everything the console has against the page: errors, warnings, exceptions."""
        said = [
            c
            for c in self.happened("Runtime.consoleAPICalled")
            if c["type"] in ("error", "warning", "assert")
        ]
        logged = [
            c
            for c in self.happened("Log.entryAdded")
            if c["entry"]["level"] in ("error", "warning")
        ]
        return said + logged + self.happened("Runtime.exceptionThrown")

    def requests(self):
        """Addresses asked for, other than data: and blob: ones."""
        urls = [r["request"]["url"] for r in self.happened("Network.requestWillBeSent")]
        return [u for u in urls if not u.startswith(("data:", "blob:"))]

    def picture(self, path, full=True):
        clip = {}
        if full:
            size = self.run(
                "[document.documentElement.clientWidth, document.documentElement.scrollHeight]"
            )
            clip = {"clip": {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}}
        shot = self.send(
            "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": full, **clip}
        )
        Path(path).write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        self.browser.send("Target.closeTarget", {"targetId": self.target})
