"""Drive a headless Chromium over its debugging pipe: no package, port or network is needed."""

import base64
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from tests.helpers.patience import PATIENCE_S


def executable() -> str | None:
    """Return the path of the installed Chromium, None if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


LAN_NAME = "server.lan"


class Browser:
    """One Chromium with one or more tabs; all methods wait until what they start has happened.

    `console` has the errors that the page logged, and `urls` each URL that it requested.
    """

    def __init__(self, width: int = 1280, height: int = 800) -> None:
        self._home = tempfile.mkdtemp(prefix="chromium-")
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        command = [
            str(executable()),
            "--headless=new",
            # IndexedDB is kept in memory: on a disk, it waits for the disk's other writers.
            "--incognito",
            "--remote-debugging-pipe",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-default-apps",
            "--disable-sync",
            "--no-first-run",
            "--hide-scrollbars",
            # A name that is not this machine's, as a page has on a network without https.
            f"--host-resolver-rules=MAP {LAN_NAME} 127.0.0.1",
            f"--user-data-dir={self._home}",
            f"--window-size={width},{height}",
            "about:blank",
        ]
        # The browser reads commands from descriptor 3 and writes to 4.
        shell = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        self._ids = itertools.count(1)
        self._held = b""
        self._replies: dict[int, dict] = {}
        self._session: str | None = None
        self.console: list[str] = []
        self.urls: list[str] = []
        self.events: list[dict] = []
        self._tabs = [self._attach(self._pages()[0])]

    def _pages(self) -> list[str]:
        targets = self.call("Target.getTargets")["targetInfos"]
        return [info["targetId"] for info in targets if info["type"] == "page"]

    def _attach(self, target: str) -> str:
        self._session = None
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        return attached["sessionId"]

    def new_tab(self) -> None:
        """Open a tab, which all methods use until `use_tab` or `close_tab`."""
        before = self._pages()
        # The page opens it, because the protocol would open it in another profile.
        self.run("void window.open('about:blank', '_blank', 'noopener')")
        end = time.monotonic() + PATIENCE_S
        while not (new := [page for page in self._pages() if page not in before]):
            assert time.monotonic() < end, "no tab was opened"
        self._tabs.append(self._attach(new[0]))

    def use_tab(self, number: int) -> None:
        """Show and use the tab with this number, in the order in which the tabs were opened."""
        self._session = self._tabs[number]
        self.call("Page.bringToFront")

    def close_tab(self) -> None:
        """Close the last tab, and use the first one."""
        self._session = self._tabs.pop()
        target = self.call("Target.getTargetInfo")["targetInfo"]["targetId"]
        self._session = None
        self.call("Target.closeTarget", targetId=target)
        self.use_tab(0)

    def close(self) -> None:
        """End the browser."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        shutil.rmtree(self._home, ignore_errors=True)

    def call(self, method: str, **params) -> dict:
        """Call a method of the DevTools protocol and return its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        end = time.monotonic() + PATIENCE_S
        while number not in self._replies:
            self._receive(end)
        reply = self._replies.pop(number)
        assert "error" not in reply, (method, reply["error"])
        return reply["result"]

    def _receive(self, end: float) -> None:
        ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
        assert ready, "the browser does not respond"
        data = os.read(self._read, 1 << 20)
        assert data, "the browser has ended"
        *messages, self._held = (self._held + data).split(b"\0")
        for text in messages:
            self._handle(json.loads(text))

    def _handle(self, message: dict) -> None:
        if "id" in message:
            self._replies[message["id"]] = message
            return
        params = message["params"]
        match message["method"]:
            case "Network.requestWillBeSent":
                self.urls.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.console.append(json.dumps(params["exceptionDetails"])[:2000])
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.console.append(params["entry"]["text"] + " " + params["entry"].get("url", ""))

    def open(self, url: str) -> None:
        """Load a page and wait until its scripts have run."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str):
        """Return the JSON value of an expression, which may be a promise."""
        result = self.call(
            "Runtime.evaluate",
            expression=script,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        assert "exceptionDetails" not in result, (script, result["exceptionDetails"])
        return result["result"].get("value")

    def until(self, condition: str, seconds: float = PATIENCE_S):
        """Wait until an expression is true, and return its value."""
        end = time.monotonic() + seconds
        while not (value := self.run(condition)):
            assert time.monotonic() < end, (condition, self.console, self.text()[-2000:])
            time.sleep(0.05)
        return value

    def text(self) -> str:
        """Return the text that the page shows."""
        return self.run("document.body.innerText")

    def click(self, selector: str, index: int = 0) -> None:
        """Click an element, which a user must be able to see."""
        self.until(f"document.querySelectorAll({json.dumps(selector)}).length > {index}")
        self.run(
            f"""(() => {{
              const element = document.querySelectorAll({json.dumps(selector)})[{index}];
              element.scrollIntoView({{block: "center"}});
              const box = element.getBoundingClientRect();
              if (!box.width) throw new Error("not visible");
              element.focus();
              element.click();
            }})()"""
        )

    def type(self, text: str) -> None:
        """Write a text where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press a key; modifiers: 1 Alt, 2 Ctrl, 4 Meta, 8 Shift."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9}
        code = codes.get(key, ord(key[0].upper()))
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 and not modifiers & 6 else "")
        values = {"key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **values)
        self.call("Input.dispatchKeyEvent", type="keyUp", **values)

    def choose_files(self, selector: str, *paths: Path) -> None:
        """Choose files for an input."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])

    def emulate(self, *, dark: bool = False, size: tuple[int, int] | None = None) -> None:
        """Show the page in a color scheme, and as on a screen of this size."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        if size is not None:
            width, height = size
            self.call(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=height,
                deviceScaleFactor=1,
                mobile=width < 600,
            )

    def screenshot(self, path: Path, clip: dict | None = None) -> None:
        """Write a picture of the page as PNG, or only of a rectangle of it."""
        part = {} if clip is None else {"clip": clip}
        data = self.call("Page.captureScreenshot", format="png", **part)["data"]
        path.write_bytes(base64.b64decode(data))
