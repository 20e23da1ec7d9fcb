"""A service manager is told when the server starts, serves, lives and stops."""

import os
import signal
import socket

import pytest

from cpuserve.api.lifecycle.service_manager import ServiceManager
from tests.api.server_process import served
from tests.helpers.patience import PATIENCE_S, wait_until

WATCHDOG_S = 0.3


class Manager:
    """The socket of a service manager, and what it was told."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.settimeout(PATIENCE_S)

    def next(self):
        """Return the next message as {name: value}."""
        lines = self.socket.recv(4096).decode().split("\n")
        return dict(line.split("=", 1) for line in lines)

    def until(self, name):
        """Return the messages up to the first with `name`."""
        found = [self.next()]
        while name not in found[-1]:
            found.append(self.next())
        return found

    def is_silent_for(self, seconds):
        self.socket.settimeout(seconds)
        try:
            self.next()
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(PATIENCE_S)
        return False


@pytest.fixture
def manager(tmp_path, monkeypatch):
    made = Manager(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    yield made
    made.socket.close()


def test_it_learns_how_the_start_goes_and_when_the_server_serves_and_stops(manager):
    with served(download="until a line comes") as server:
        first = manager.next()
        assert first["STATUS"] == "The model is loading (download 40 %)"
        assert int(first["EXTEND_TIMEOUT_USEC"]) > 0
        server.process.stdin.write("\n")
        server.process.stdin.flush()
        server.another_engine()
        assert manager.until("READY")[-1] == {"READY": "1", "STATUS": f"Serving at {url(server)}"}
        server.ready()
        assert server.get("/health")[0] == 200
        server.stop()
        (stopping,) = manager.until("STOPPING")
        assert int(stopping["EXTEND_TIMEOUT_USEC"]) == 610 * 10**6  # the drain, and its end
        server.ends_with(0)


def url(server):
    return f"http://127.0.0.1:{server.port}"


def test_signs_of_life_come_while_the_engine_responds(manager, monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_S * 1e6)))
    with served(limits=(0.05, 0.2, 1000.0)) as server:
        server.ready()
        manager.until("READY")
        for _ in range(3):
            assert manager.next() == {"WATCHDOG": "1"}
        os.kill(server.engine_pid, signal.SIGSTOP)
        server.connect().request(
            "POST", "/v1/completions", b'{"prompt": [11]}', {"content-type": "application/json"}
        )
        while not manager.is_silent_for(2 * WATCHDOG_S):
            pass
        os.kill(server.engine_pid, signal.SIGCONT)
        assert manager.next() == {"WATCHDOG": "1"}
        server.stop()
        server.ends_with(0)


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, 0.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 3.0),
        ({"WATCHDOG_USEC": "3000000"}, 3.0),
        ({"WATCHDOG_USEC": "soon"}, 0.0),
        ({}, 0.0),
    ],
)
def test_the_watchdog_is_that_of_this_process(environ, seconds):
    assert ServiceManager({"NOTIFY_SOCKET": "/run/x", **environ}).watchdog_s == seconds
    assert ServiceManager(environ).watchdog_s == 0.0


def test_names_that_are_no_files_work_and_an_absent_manager_harms_nothing(caplog):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as theirs:
        theirs.bind(f"\0cpuserve-{os.getpid()}")
        theirs.settimeout(PATIENCE_S)
        told = ServiceManager({"NOTIFY_SOCKET": f"@cpuserve-{os.getpid()}"})
        told.ready("http://a")
        assert theirs.recv(100) == b"READY=1\nSTATUS=Serving at http://a"
    told.ready("http://a")
    assert "the service manager cannot be told READY" in caplog.text
    caplog.clear()
    ServiceManager({}).ready("http://a")
    assert not caplog.text


@pytest.mark.deep
@pytest.mark.parametrize("how", ["manager", "by hand"])
def test_sighup_loads_the_file_of_callers_and_does_not_stop_the_server(how, tmp_path, request):
    path = tmp_path / "keys"
    path.write_text("alice secret-key-of-alice\n")
    if how == "manager":
        request.getfixturevalue("manager")
    with served(key_file=str(path)) as server:
        server.stop(signal.SIGHUP)  # while the engine loads
        server.ready()
        assert status(server, "secret-key-of-alice") == 200
        path.write_text("alice secret-key-of-today\n")
        server.stop(signal.SIGHUP)
        wait_until(lambda: status(server, "secret-key-of-today") == 200)
        assert status(server, "secret-key-of-alice") == 401
        server.stop()
        assert "secret" not in server.ends_with(0)


def status(server, key):
    connection = server.connect()
    connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status
