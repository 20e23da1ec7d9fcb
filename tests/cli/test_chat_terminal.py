"""`cpuserve chat` on a pseudo-terminal, and Ctrl-C in all commands."""

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import contextmanager

import psutil
import pytest

from tests.helpers.children import child_options
from tests.helpers.depth import deep_but
from tests.helpers.patience import wait_until
from tests.helpers.tiny import tiny_model

SMALL = ["--kv-cache-memory", "16MiB", "--max-model-len", "128"]
READY = "is ready. Type /help"
PROMPT = "\x1b[?2004h"  # the editor asks the terminal to mark what is pasted


class Terminal:
    """A process on a pseudo-terminal."""

    def __init__(self, *words):
        self.ours, theirs = pty.openpty()
        # So wide that the line with the path of the model is not wrapped.
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 300, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cpuserve", *words],
            **child_options(TERM="xterm"),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.shown = ""

    def type(self, keys):
        os.write(self.ours, keys.encode())

    def read(self, timeout_s=0.1):
        """Read what is shown; False if there is nothing."""
        if not select.select([self.ours], [], [], timeout_s)[0]:
            return False
        try:
            data = os.read(self.ours, 65536)
        except OSError:  # the other end is closed
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)

    def until(self, text):
        """Read until `text` is shown, and return what came before it."""

        def is_shown():
            self.read()
            return text in self.shown

        wait_until(is_shown, lambda: self.shown, poll_s=0)
        shown, _, self.shown = self.shown.partition(text)
        return shown

    def until_prompted(self):
        """Read until the editor shows its prompt and gets each key as it is typed."""
        self.until(PROMPT)
        by_lines = termios.ICANON
        wait_until(lambda: not termios.tcgetattr(self.ours)[3] & by_lines, "keys come in lines")

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)  # nothing if it has ended

    def end(self):
        """Wait for the end, and return the exit code."""

        def has_ended():
            self.read()
            return self.process.poll() is not None

        wait_until(has_ended, lambda: self.shown, poll_s=0)
        while self.read():
            pass
        return self.process.returncode


@contextmanager
def terminal(*words):
    made = Terminal(*words)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        os.close(made.ours)


@pytest.fixture(scope="module")
def model():
    return str(tiny_model("llama"))


@contextmanager
def chatting(model):
    with terminal("chat", model, *SMALL, "--max-tokens", "2") as chat:
        chat.until(READY)
        chat.until_prompted()
        yield chat


def saved(chat, path):
    """Return what the user has said so far."""
    chat.until("tokens/s")
    chat.type(f"/save {path}\r")
    chat.until("saved ")
    return [m["content"] for m in json.loads(path.read_text()) if m["role"] == "user"]


def test_a_line_can_be_edited_and_recalled(model, tmp_path):
    left, up, home = "\x1b[D", "\x1b[A", "\x01"
    with chatting(model) as chat:
        chat.type(f"wrld{left}{left}{left}o{home}hello \r")
        assert saved(chat, tmp_path / "1") == ["hello world"]
        chat.type(f"{up}{up}!\r")
        assert saved(chat, tmp_path / "2") == ["hello world", "hello world!"]


@pytest.mark.deep
def test_a_pasted_block_is_one_message(model, tmp_path):
    with chatting(model) as chat:
        chat.type("\x1b[200~one\ntwo\nthree\x1b[201~\r")
        assert saved(chat, tmp_path / "1") == ["one\ntwo\nthree"]


def test_ctrl_d_ends_the_chat_on_a_line_of_its_own(model):
    with chatting(model) as chat:
        chat.type("\x04")
        assert chat.end() == 0
        assert chat.shown.replace("\r", "").endswith("\n") or "\r\n" in chat.shown


@pytest.mark.deep
def test_ctrl_c_twice_at_the_prompt_ends_the_chat(model):
    with chatting(model) as chat:
        chat.type("unfinished\x03")
        chat.until("press Ctrl-C again")
        chat.until(PROMPT)
        for _ in range(20):  # two may take longer than 2 s
            if chat.process.poll() is not None:
                break
            chat.type("\x03")
            chat.read(0.3)
        assert chat.end() in (130, -signal.SIGINT)  # a third one may come at the end
        assert "Traceback" not in chat.shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["hello"],
            "'hello' is not a model; to send it as a message, run `cpuserve chat --message ",
        ),
        (["tell me a joke"], "--message 'tell me a joke'`"),
        (["smolm2:135m"], "did you mean smollm2:135m?"),
    ],
)
def test_a_message_in_the_place_of_a_model_gets_a_hint(words, told):
    done = subprocess.run(
        [sys.executable, "-m", "cpuserve", "chat", *words],
        **child_options(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


COMMANDS = {
    "serve": ["serve", "MODEL", *SMALL, "--port", "0"],
    "generate": ["generate", "MODEL", *SMALL, "--prompt", "a", "--max-tokens", "100"],
    "chat": ["chat", "MODEL", *SMALL, "--message", "a"],
    "config": ["config", "MODEL"],
    "program": ["program", "MODEL"],
    "doctor": ["doctor"],
    "models": ["models", "--supported"],
    "bench roofline": ["bench", "roofline"],
    "bench step": ["bench", "step", "MODEL", *SMALL, "--context", "64", "--prefill", "64"],
    "quantize": ["quantize", "MODEL", "OUT"],
}


# CPU time of the interpreter's start, which prints a traceback by itself. A busy machine gives a
# process little of it in a second.
STARTED_S = 0.2


def has_used(process, cpu_s):
    """Whether a process has used so much CPU time, or has ended."""
    try:
        used = psutil.Process(process.pid).cpu_times()
    except psutil.Error:
        return True
    return used.user + used.system >= cpu_s or process.poll() is not None


@pytest.mark.matrix
@pytest.mark.parametrize("command", deep_but(["serve", "chat", "doctor"], COMMANDS))
@pytest.mark.parametrize("after_s", [0.0, 0.3, 0.6, 1.2])
def test_ctrl_c_at_any_moment_shows_no_traceback(model, tmp_path, command, after_s):
    known = {"MODEL": model, "OUT": str(tmp_path / "out")}
    with terminal(*(known.get(word, word) for word in COMMANDS[command])) as running:

        def has_started():
            running.read(0)  # a program whose output is not read would wait for ever
            return has_used(running.process, STARTED_S)

        wait_until(has_started, poll_s=0.005)
        time.sleep(after_s)
        running.interrupt()
        code = running.end()
        assert "Traceback" not in running.shown, running.shown
        assert "KeyboardInterrupt" not in running.shown, running.shown
        assert code in (0, 130, -signal.SIGINT)
