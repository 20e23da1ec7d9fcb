"""deploy/nginx.conf and deploy/haproxy.cfg in front of two servers, with Debian's proxies."""

import http.client
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.api.server_process import Served, events
from tests.helpers.depth import deep_but
from tests.helpers.patience import PATIENCE_S, wait_until
from tests.helpers.ports import reserve_port

DEPLOY = Path(__file__).parents[2] / "deploy"
CERTIFICATES = DEPLOY.parent / "tests/data/tls"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}


def binary(name):
    """Return the path of the proxy's program; Debian's PATH for ordinary users lacks sbin."""
    path = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if path is None:
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
    """Return `text` with the addresses of `backends` instead of the example addresses."""
    for i, backend in enumerate(backends, 1):
        example = f"10.0.0.{i}:8000"
        assert example in text
        text = text.replace(example, f"127.0.0.1:{backend}")
    return text


PROXIES = {"nginx": start_nginx, "haproxy": start_haproxy}
FILES = {"nginx": "nginx.conf", "haproxy": "haproxy.cfg"}


def drain_delay(name):
    """Return the --drain-delay that the proxy's file says to start the servers with."""
    return int(
        re.search(r"cpuserve serve .*--drain-delay (\d+)", (DEPLOY / FILES[name]).read_text())[1]
    )


class Proxy:
    """A proxy in front of two servers with fake engines, which take 20 ms per token."""

    def __init__(self, start, directory, backends):
        self.backends = backends
        self.port, self._held = reserve_port()
        command = start(directory, self.port, [b.port for b in backends])
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self.until(lambda: self.status() == 200)

    def until(self, condition):
        def holds():
            assert self.process.poll() is None, self.process.stderr.read()
            return condition()

        wait_until(holds)

    def status(self):
        """Return the status of /health through the proxy; 0 while nothing listens on the port."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
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
        """Send a chat request; return the connection and the response, which is not read yet."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        body = json.dumps({**CHAT, **fields})
        connection.request(
            "POST", "/v1/chat/completions", body, {"content-type": "application/json"}
        )
        return connection, connection.getresponse()

    def answer(self):
        """Send a short chat request and return the status of the response."""
        connection, response = self.chat(max_tokens=2)
        response.read()
        connection.close()
        return response.status

    def close(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=PATIENCE_S)
        self._held.close()


class Stream(threading.Thread):
    """Reads a stream to its end."""

    def __init__(self, proxy, tokens):
        super().__init__()
        self.connection, self.response = proxy.chat(stream=True, max_tokens=tokens)
        self.data = b""
        self.broken = False
        self.start()

    def run(self):
        try:
            while data := self.response.read1():
                self.data += data
        except (http.client.IncompleteRead, ConnectionError):
            self.broken = True
        self.connection.close()

    def text(self):
        self.join()
        return self.data.decode()


@pytest.fixture(params=deep_but(["nginx"], PROXIES))
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


class Load:
    """Clients that each send one request after the other; every second one is a stream."""

    def __init__(self, proxy, num_clients):
        self.proxy = proxy
        self.num_answered = 0
        self.lost = []
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._clients = [
            threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(num_clients)
        ]
        for client in self._clients:
            client.start()

    def _run(self, client):
        count = 0
        while not self._stopped.is_set():
            count += 1
            # One request in 20 is a stream of 4 s, so that streams run while their server drains.
            tokens = 200 if count % 20 == client else 1 + count % 4
            stream = tokens > 4 or count % 2 == 0
            try:
                lost = self._ask(tokens, stream)
            except (OSError, http.client.HTTPException) as error:
                lost = repr(error)
            with self._lock:
                self.num_answered += 1
                self.lost += [lost] if lost else []

    def _ask(self, tokens, stream):
        """Send a request; return "" for a complete answer, else a description of the failure."""
        connection, response = self.proxy.chat(max_tokens=tokens, stream=stream)
        text = response.read().decode()
        connection.close()
        if stream and text.endswith("data: [DONE]\n\n"):
            text = text.split("data: ")[-2]
        whole = response.status == 200 and '"finish_reason":"length"' in text
        return "" if whole else f"{response.status} {text[-500:]}"

    def end(self):
        """Stop sending requests, and return when all have been answered."""
        self._stopped.set()
        for client in self._clients:
            client.join()


# In the 20 s of a case, both CPUs mostly wait: for --drain-delay, and for the tokens.
@pytest.mark.deep
@pytest.mark.parametrize("name", PROXIES)
def test_both_servers_are_restarted_under_load_and_no_request_is_lost(name, tmp_path):
    with ExitStack() as stack:

        def start(port=None):
            server = Served("fake:slow", drain_delay_s=drain_delay(name), drain_s=30, port=port)
            stack.callback(server.close)
            return server.ready()

        backends = [start(), start()]
        proxy = Proxy(PROXIES[name], tmp_path, backends)
        stack.callback(proxy.close)
        load = Load(proxy, num_clients=20)
        stack.callback(load.end)
        for i, backend in enumerate(backends):
            proxy.until(lambda backend=backend: prompt_tokens(backend) > 0)
            backend.stop()
            assert backend.process.wait(timeout=PATIENCE_S) == 0
            backends[i] = start(backend.port)
        # Both restarted servers are in use.
        proxy.until(lambda: all(prompt_tokens(b) > 0 for b in backends))
        proxy.until(lambda: load.num_answered >= 1000)
        load.end()
        assert load.lost == []


def metric(backend, name):
    lines = backend.get("/metrics")[1].decode().splitlines()
    line = next(line for line in lines if line.startswith(f"vllm:{name}{{"))
    return int(float(line.split()[-1]))


def running(backend):
    return metric(backend, "num_requests_running")


def prompt_tokens(backend):
    """Return the prompt tokens of all requests that the server has answered."""
    return metric(backend, "prompt_tokens_total")


@pytest.mark.deep
def test_a_streamed_chat_passes_event_by_event(proxy):
    connection, response = proxy.chat(stream=True, max_tokens=900)
    assert response.headers["content-type"].startswith("text/event-stream")
    received = b""
    while received.count(b"\n\n") < 10:
        received += response.read1()
    assert sum(map(running, proxy.backends)) == 1, "the proxy held the stream back"
    connection.close()
    chunks = events(Stream(proxy, 4).text())
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.deep
def test_streams_use_both_servers_and_requests_survive_the_death_of_one(proxy):
    one, two = proxy.backends
    streams = [Stream(proxy, 150) for _ in range(4)]
    proxy.until(lambda: (running(one), running(two)) == (2, 2))
    one.process.kill()
    ends = [stream.text().endswith("data: [DONE]\n\n") for stream in streams]
    assert ends.count(True) == 2, "streams of the other server end normally"
    assert [proxy.answer() for _ in range(10)] == [200] * 10


@pytest.mark.deep
def test_a_server_that_drains_gets_no_new_requests(proxy):
    one, two = proxy.backends
    stream = Stream(proxy, 100)
    proxy.until(lambda: running(one) + running(two) == 1)
    busy, idle = (one, two) if running(one) else (two, one)
    busy.stop()
    assert [proxy.answer() for _ in range(6)] == [200] * 6
    assert stream.text().endswith("data: [DONE]\n\n")
    assert idle.get("/health") == (200, b"")


# The lines of the files that are comments until a proxy has a certificate.
OF_TLS = re.compile(
    r"^( +)# (?=bind :8443|http-request redirect|listen 8443|ssl_|if \()", re.MULTILINE
)


def with_tls(name, directory, port, tls_port):
    """Return the proxy's file with HTTPS, as its comments say, in front of no hosts."""
    pair = [(CERTIFICATES / f"first.{kind}").read_text() for kind in ("crt", "key")]
    for file, text in (("api.crt", pair[0]), ("api.key", pair[1]), ("api.pem", "".join(pair))):
        (directory / file).write_text(text)
    text = (DEPLOY / FILES[name]).read_text()
    assert len(OF_TLS.findall(text)) == {"nginx": 6, "haproxy": 2}[name]
    text = OF_TLS.sub(r"\1", text)
    text = re.sub(r"/etc/(nginx|haproxy)/", f"{directory}/", text)
    for written, here in ((8080, port), (8443, tls_port)):
        text = re.sub(rf"(listen |bind :){written}", listening_at(name, here), text)
    return text


def listening_at(name, port):
    return f"listen 127.0.0.1:{port}" if name == "nginx" else f"bind 127.0.0.1:{port}"


@pytest.mark.parametrize("name", deep_but(["haproxy"], PROXIES))
def test_https_ends_at_the_proxy_and_the_host_sees_the_client(name, tmp_path):
    with ExitStack() as stack:
        backend = Served("fake")
        stack.callback(backend.close)
        backend.ready()
        ports = []
        for _ in range(2):
            port, held = reserve_port()
            stack.callback(held.close)
            ports.append(port)
        text = placed(with_tls(name, tmp_path, *ports), [backend.port, backend.port])
        (tmp_path / FILES[name]).write_text(text)
        (tmp_path / "logs").mkdir()
        command = {
            "nginx": ["-p", tmp_path, "-g", "daemon off;", "-c", tmp_path / "nginx.conf"],
            "haproxy": ["-db", "-f", tmp_path / "haproxy.cfg"],
        }[name]
        process = subprocess.Popen([binary(name), *command], stderr=subprocess.PIPE, text=True)
        stack.callback(process.communicate)
        stack.callback(process.terminate)
        context = ssl.create_default_context(cafile=CERTIFICATES / "authority.crt")
        context.check_hostname = False

        def asked(path, body=None):
            assert process.poll() is None, process.stderr.read()
            source = ("127.0.0.2", 0)  # which is no address of a proxy
            client = http.client.HTTPSConnection(
                "127.0.0.1", ports[1], timeout=PATIENCE_S, context=context, source_address=source
            )
            try:
                client.request("POST" if body else "GET", path, body)
                return client.getresponse().status
            except OSError:
                return 0
            finally:
                client.close()

        wait_until(lambda: asked("/health") == 200)
        assert asked("/v1/chat/completions", json.dumps({**CHAT, "max_tokens": 2})) == 200
        plain = http.client.HTTPConnection("127.0.0.1", ports[0], timeout=PATIENCE_S)
        plain.request("GET", "/v1/models")
        redirect = plain.getresponse()
        plain.close()
        assert redirect.status in (302, 308)
        assert redirect.headers["location"].startswith("https://")
        assert 'caller="127.0.0.2"' in backend.get("/metrics")[1].decode()
