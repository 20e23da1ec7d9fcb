"""deploy/nginx.conf and deploy/haproxy.cfg in front of two servers, with the proxies of Debian."""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.api.test_api_server import Served, events, free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}


def binary(name):
    """Where the proxy is; on Debian a plain user's PATH lacks sbin."""
    path = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if path is None:
        if "CI_HAS_EVERYTHING" in os.environ:
            pytest.fail(f"{name} is not installed: .ci/run does that")
        pytest.skip(f"{name} is not installed (apt-get install {name})")
    return path


def start_nginx(directory, port, backends):
    text = (DEPLOY / "nginx.conf").read_text()
    text = re.sub(r"listen \d+;", f"listen 127.0.0.1:{port};", text)
    text = "daemon off;\nmaster_process off;\n" + placed(text, backends)
    (directory / "nginx.conf").write_text(text)
    (directory / "logs").mkdir()
    return [binary("nginx"), "-p", str(directory), "-c", str(directory / "nginx.conf")]


def start_haproxy(directory, port, backends):
    text = (DEPLOY / "haproxy.cfg").read_text()
    text = placed(text.replace("bind :8080", f"bind 127.0.0.1:{port}"), backends)
    (directory / "haproxy.cfg").write_text(text)
    return [binary("haproxy"), "-db", "-f", str(directory / "haproxy.cfg")]


def placed(text, backends):
    """`text` with these hosts in place of the examples."""
    for i, backend in enumerate(backends, 1):
        example = f"10.0.0.{i}:8000"
        assert example in text
        text = text.replace(example, f"127.0.0.1:{backend}")
    return text


PROXIES = {"nginx": start_nginx, "haproxy": start_haproxy}


class Proxy:
    """A proxy in front of two servers whose engines are fake: 20 ms a token."""

    def __init__(self, start, directory, backends):
        self.backends = backends
        self.port = free_port()
        command = start(directory, self.port, [b.port for b in backends])
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self.until(lambda: self.status() == 200)

    def until(self, condition, timeout_s=10.0):
        end = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.process.stderr.read()
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.05)

    def status(self):
        """Of /health through the proxy; 0 while nobody listens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            return response.status
        except OSError:
            return 0
        finally:
            connection.close()

    def chat(self, **fields):
        """The connection and the response, unread."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        body = json.dumps({**CHAT, **fields})
        connection.request(
            "POST", "/v1/chat/completions", body, {"content-type": "application/json"}
        )
        return connection, connection.getresponse()

    def answer(self):
        """A whole answer's status."""
        connection, response = self.chat(max_tokens=2)
        response.read()
        connection.close()
        return response.status

    def close(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=10)


class Stream(threading.Thread):
    """Reads a stream to its end and notes when each piece came."""

    def __init__(self, proxy, tokens):
        super().__init__()
        self.connection, self.response = proxy.chat(stream=True, max_tokens=tokens)
        self.pieces = []
        self.broken = False
        self.start()

    def run(self):
        try:
            while data := self.response.read1():
                self.pieces.append((time.monotonic(), data))
        except (http.client.IncompleteRead, ConnectionError):
            self.broken = True
        self.connection.close()

    def text(self):
        self.join()
        return b"".join(data for _, data in self.pieces).decode()


@pytest.fixture(params=PROXIES)
def proxy(request, tmp_path):
    with ExitStack() as stack:
        backends = []
        for _ in range(2):
            backends.append(Served("fake:slow"))
            stack.callback(backends[-1].close)
        for backend in backends:
            backend.ready()
        proxy = Proxy(PROXIES[request.param], tmp_path, backends)
        stack.callback(proxy.close)
        yield proxy


def running(backend):
    lines = backend.get("/metrics")[1].decode().splitlines()
    line = next(line for line in lines if line.startswith("vllm:num_requests_running{"))
    return int(float(line.split()[-1]))


def test_a_streamed_chat_passes_event_by_event(proxy):
    stream = Stream(proxy, 40)
    chunks = events(stream.text())
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert stream.response.headers["content-type"].startswith("text/event-stream")
    assert len(stream.pieces) > 10, "the proxy collected events"
    first, last = stream.pieces[0][0], stream.pieces[-1][0]
    assert last - first > 0.3, "the proxy held the stream back"


def test_streams_are_spread_over_both_and_the_death_of_one_is_survived(proxy):
    one, two = proxy.backends
    streams = [Stream(proxy, 150) for _ in range(4)]
    proxy.until(lambda: (running(one), running(two)) == (2, 2))
    one.process.kill()
    ends = [stream.text().endswith("data: [DONE]\n\n") for stream in streams]
    assert ends.count(True) == 2, "those of the other server end as they should"
    assert [proxy.answer() for _ in range(10)] == [200] * 10


def test_a_server_that_drains_gets_no_new_requests(proxy):
    one, two = proxy.backends
    stream = Stream(proxy, 100)
    proxy.until(lambda: running(one) + running(two) == 1)
    busy, idle = (one, two) if running(one) else (two, one)
    busy.stop()
    assert [proxy.answer() for _ in range(6)] == [200] * 6
    assert stream.text().endswith("data: [DONE]\n\n")
    assert idle.get("/health") == (200, b"")
