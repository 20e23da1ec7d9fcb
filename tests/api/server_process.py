"""A server process over the fake engine, for tests of its start, its end and its crashes."""

import http.client
import json
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import psutil

from tests.helpers.children import child_options
from tests.helpers.patience import PATIENCE_S, wait_gone
from tests.helpers.ports import reserve_port
from tests.helpers.tiny import tiny_model

LONG_S = 600.0  # beyond every wait of a test: who waits for this to pass fails


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


class Served:
    """A server process, with methods to send requests and to end it."""

    def __init__(
        self,
        model="fake",
        uds=None,
        drain_s=LONG_S,
        drain_delay_s=0.0,
        keys=(),
        key_file=None,
        replicas=1,
        restart=True,
        limits=(),
        port=None,
        download="none",
        also=None,
        **config,
    ):
        reserved, self._held = reserve_port()
        self.port = port or reserved
        self.uds = uds
        self._connections = []
        tiny = str(tiny_model("llama"))
        config = {"max_model_len": 1000, "kv_blocks": 512, **config}
        config = {"tokenizer_path": tiny, "served_model_names": ["fake"], **config}
        options = {"model": model, "port": self.port, "uds": uds, "drain_s": drain_s}
        options |= {"drain_delay_s": drain_delay_s, "keys": list(keys), "replicas": replicas}
        options |= {"restart": restart, "limits": limits, "download": download}
        options |= {"also": also, "key_file": key_file}
        options = json.dumps({**options, "config": config})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.api.serve_fake", options],
            **child_options(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert self.process.stdout.readline() == "preparing\n"
            if download == "none":
                self.another_engine()
        except BaseException:
            self.close()  # a process that is left over fails a later test
            raise

    def another_engine(self):
        """Return the pid of the next engine that starts; `ends_with` also waits for its end."""
        self.engine_pid = int(self.process.stdout.readline().split()[1])
        return self.engine_pid

    def ready(self):
        """Wait until the server serves requests."""
        line = self.process.stdout.readline()
        assert line.startswith("ready "), self.process.stderr.read()
        self.url = line.split()[1]
        return self

    def connect(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        if self.uds:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(self.uds)
        self._connections.append(connection)
        return connection

    def close(self):
        """Kill what still runs and close every connection."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self._held.close()
        for connection in self._connections:
            connection.close()

    def get(self, path):
        connection = self.connect()
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return response.status, body

    def post(self, connection=None, **fields):
        """Send a POST to /v1/completions and return the response without reading its body."""
        connection = connection or self.connect()
        body = json.dumps({"prompt": [11, 12, 13], "ignore_eos": True, **fields})
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)
        return connection.getresponse()

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def ends_with(self, code):
        """The process ends with `code`, and so does its engine."""
        _, err = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == code, err
        wait_gone(self.engine_pid)
        assert "Traceback" not in err, err
        return err


@contextmanager
def served(*args, **kwargs):
    server = Served(*args, **kwargs)
    try:
        yield server
    finally:
        server.close()


def events(text):
    lines = [line for line in text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]", lines[-3:]
    return [json.loads(line[6:]) for line in lines[:-1]]


def listening(pid):
    """Return the addresses on which the process accepts connections; none if it has ended."""
    try:
        connections = psutil.Process(pid).net_connections("inet")
    except psutil.NoSuchProcess:  # or a zombie
        return []
    return [tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN]
