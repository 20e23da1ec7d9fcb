"""Dockerfile.cpu's HEALTHCHECK, with servers on other addresses than the default one."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cpuserve.cli import healthcheck
from cpuserve.config import env
from tests.api.server_process import served
from tests.helpers.children import child_options
from tests.helpers.ports import reserve_port

LISTENER = """
from http.server import BaseHTTPRequestHandler, HTTPServer

class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *words):
        pass

with HTTPServer(("127.0.0.1", 0), Health) as server:
    print("listening", flush=True)
    server.serve_forever()
"""
IN_CONTAINER = ["tini", "--", "/opt/cpuserve/bin/cpuserve", "serve", "--host", "0.0.0.0"]


@pytest.fixture(scope="module")
def server():
    with served() as server:
        yield server.ready()


@pytest.mark.deep
def test_it_finds_the_port_in_the_flags_of_process_1(server, capsys):
    for flags in (["--port", str(server.port)], ["model", f"--port={server.port}", "--seed", "1"]):
        assert healthcheck.main([*IN_CONTAINER, *flags]) == 0
    port, held = reserve_port()  # nobody listens, and no other process can
    with held:
        assert healthcheck.main([*IN_CONTAINER, "--port", str(port)]) == 1
    assert "refused" in capsys.readouterr().out


def test_it_finds_the_port_that_the_system_chose(server, capsys):
    # The fixture's server listens on a port of its own; here the flags do not say which.
    flags = [*IN_CONTAINER, "--port", "0"]
    assert healthcheck.main(flags, pid=server.process.pid) == 0
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert healthcheck.main(flags, pid=other.pid) == 1
        other.stdin.close()
    assert f"neither process {other.pid} nor a child of it listens" in capsys.readouterr().out
    assert healthcheck.main(flags, pid=other.pid) == 1
    assert "cannot be read" in capsys.readouterr().out


def test_it_finds_the_port_of_a_child_of_the_init_program():
    init = subprocess.Popen(
        ["sh", "-c", '"$0" -c "$1"; exit', sys.executable, LISTENER],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert init.stdout.readline() == "listening\n"
        assert healthcheck.main([*IN_CONTAINER, "--port=0"], pid=init.pid) == 0
    finally:
        os.killpg(init.pid, signal.SIGKILL)
        init.communicate()


def test_it_finds_the_port_in_the_environment_and_in_a_config_file(server, monkeypatch, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"port": server.port}))
    assert healthcheck.main([*IN_CONTAINER, "--config", str(file)]) == 0
    variables = {"CPUSERVE_HTTP_PORT": str(server.port)}
    monkeypatch.setattr(env, "environment", lambda: variables)
    assert healthcheck.main(IN_CONTAINER) == 0
    assert healthcheck.main(["an-init-of-somebody", "else"]) == 0


@pytest.mark.deep
def test_it_finds_a_unix_socket(tmp_path):
    with served(uds=str(tmp_path / "s")) as server:
        server.ready()
        assert healthcheck.main([*IN_CONTAINER, "--uds", server.uds]) == 0


def test_a_server_that_loads_is_not_healthy(capsys):
    with served("fake:hang") as server:
        assert healthcheck.main([*IN_CONTAINER, "--port", str(server.port)]) == 1
        assert json.loads(capsys.readouterr().out)["status"] == "loading"


def test_flags_that_no_server_starts_with_are_not_healthy(capsys):
    assert healthcheck.main([*IN_CONTAINER, "--port", "x"]) == 1
    assert "--port" in capsys.readouterr().out


def test_the_dockerfile_runs_the_healthcheck(server):
    text = (Path(__file__).parents[2] / "Dockerfile.cpu").read_text().replace("\\\n", " ")
    command = json.loads(re.search(r"HEALTHCHECK .* CMD (\[.*\])", text)[1])
    assert command[0] == "python3"
    options = child_options(CPUSERVE_HTTP_PORT=str(server.port))
    run = subprocess.run([sys.executable, *command[1:]], **options, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
