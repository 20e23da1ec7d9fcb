"""--access-log-format json: every line that a server writes is a JSON object."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import warnings
from types import SimpleNamespace

import psutil
import pytest

from cpuserve.base import log
from tests.helpers.children import child_options
from tests.helpers.patience import PATIENCE_S, wait_until
from tests.helpers.tiny import tiny_model


def told(text):
    """Return the objects of all lines."""
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def as_json(monkeypatch):
    """Let this process write JSON, as a server does; everything is restored at the end."""
    root, ours = logging.getLogger(), logging.getLogger("cpuserve")
    for name in ("excepthook", "unraisablehook"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr(log.threading, "excepthook", log.threading.excepthook)
    monkeypatch.setattr(log, "_json_lines", False)
    kept = root.handlers[:], ours.handlers[:], ours.level, ours.propagate
    ours.handlers = []
    log.configure("info", as_json=True)
    yield
    logging.captureWarnings(False)
    root.handlers, ours.handlers, ours.level, ours.propagate = kept


def test_errors_warnings_and_lines_of_children_become_objects(as_json, capsys):
    handler = logging.getLogger("cpuserve").handlers[0]
    handler.setStream(sys.stderr)
    log.get_logger("serve").info("two\nlines")
    logging.getLogger("asyncio").error("of a library")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("soon", stacklevel=1)
    try:
        raise ValueError("bad")
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
        gone = SimpleNamespace(exc_value=error, err_msg=None, object="x", exc_type=ValueError)
        sys.unraisablehook(gone)
    log.relay("2026-11-30 10:00:00 WARNING of an engine\n", "engine")
    log.relay("Fatal Python error: Aborted\n", "engine")
    log.relay("\n", "engine")
    found = told(capsys.readouterr().err)
    assert [(each["level"], each["logger"]) for each in found] == [
        ("info", "serve"), ("error", "asyncio"), ("warning", "py.warnings"),
        ("critical", "python"), ("error", "python"), ("warning", "engine"), ("error", "engine"),
    ]  # fmt: skip
    assert found[0]["message"] == "two\nlines"
    assert "raise ValueError" in found[3]["traceback"]
    assert found[5]["message"] == "of an engine"


def test_every_line_of_a_server_is_an_object(tmp_path):
    model = str(tiny_model("llama"))
    words = ("serve", model, "--port", "0", "--access-log-format", "json", "--access-log", "all")
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "cpuserve", *words, "--max-num-seqs", "2", "--no-webui"],
            **child_options(),
            stdout=out,
            stderr=err,
        )

    def lines():
        return told((tmp_path / "err").read_text())

    def has(text):
        assert process.poll() is None, (tmp_path / "err").read_text()
        found = (tmp_path / "err").read_text()
        return found.endswith("\n") and any(text in str(each) for each in lines())

    try:
        wait_until(lambda: has("is ready"))
        ready = next(each for each in lines() if "is ready" in each["message"])
        assert "LlamaForCausalLM" in ready["model"]
        port = int(ready["message"].split(":")[-1].split("/")[0])
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"nonsense\r\n\r\n")
            assert client.recv(100)
        wait_until(lambda: has("invalid HTTP"))
        (engine,) = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "cpuserve.engine.child" in " ".join(child.cmdline())
        ]
        os.kill(engine.pid, signal.SIGABRT)  # its crash report has lines of its own
        wait_until(lambda: has("Fatal Python error"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate()
    assert (tmp_path / "out").read_text() == ""
    assert {each["level"] for each in lines() if "level" in each} >= {"info", "error"}
    assert "stopped with exit code 0" in lines()[-1]["message"]


def test_a_start_that_fails_says_why_in_an_object(tmp_path):
    words = ("serve", str(tmp_path / "absent"), "--access-log-format=json", "--port=0")
    command = [sys.executable, "-m", "cpuserve", *words]
    done = subprocess.run(
        command, **child_options(), capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = told(done.stderr)
    assert line["level"] == "error"
    assert "absent" in line["message"]
