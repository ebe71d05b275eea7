"""A page in headless Chromium, driven through the DevTools protocol; the browser cannot reach any host."""

import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import websocket

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-proxy-server",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
]
NO_HOSTS = "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"


class Page:
    """One tab. `requests` are the addresses that pages asked for, `errors` what they wrote to the console."""

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(address, timeout=20)
        self._numbers = itertools.count(1)
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._loaded = False
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result, keeping the events that come before it."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while (message := self._receive()).get("id") != number:
            pass
        result: dict[str, Any] = message["result"]
        return result

    def open(self, path: Path) -> None:
        """Open a file and wait until it has loaded with everything that it asks for."""
        self._loaded = False
        self.send("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._receive()
        self.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 100)))")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return answer["result"].get("value")

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._socket.recv())
        event, parameters = message.get("method"), message.get("params", {})
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif event == "Log.entryAdded":
            self.errors.append(parameters["entry"]["text"])
        elif event == "Runtime.consoleAPICalled":
            self.errors.append(str([argument.get("value") for argument in parameters["args"]]))
        elif event == "Runtime.exceptionThrown":
            self.errors.append(parameters["exceptionDetails"]["text"])
        return message


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """Start Chromium with a new, empty user-data folder `profile`."""
    assert CHROMIUM
    command = [CHROMIUM, *FLAGS, NO_HOSTS, f"--user-data-dir={profile}", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield Page(_first_tab(profile / "DevToolsActivePort"))
        finally:
            process.terminate()


def _first_tab(port_file: Path) -> str:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if port_file.is_file() and (lines := port_file.read_text().splitlines()):
            with urlopen(f"http://127.0.0.1:{lines[0]}/json/list") as answer:
                for tab in json.load(answer):
                    if tab["type"] == "page":
                        return str(tab["webSocketDebuggerUrl"])
        time.sleep(0.1)
    raise TimeoutError("Chromium opened no tab within 30 s")
