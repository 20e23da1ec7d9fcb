# ruff: noqa: E501 templates are easier to read on one line
"""Templates render in processes with limits: what is hostile ends there, and harms nobody else."""

import asyncio
import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from cpuserve.base.errors import InvalidRequest, ServiceUnavailable
from cpuserve.limited import server
from cpuserve.serving.threads import run_rendering
from cpuserve.tokenizer.chat import ChatTemplate
from cpuserve.tokenizer.rendering import client
from cpuserve.tokenizer.rendering.client import (
    RENDERER,
    Renderer,
    TemplateRefused,
    TemplateStopped,
)
from tests.helpers.bare_tokens import bare_tokens
from tests.helpers.children import child_options
from tests.helpers.depth import deep_but
from tests.helpers.patience import PATIENCE_S

TOKENS = bare_tokens()
HI = [{"role": "user", "content": "Hi"}]
INDENTED = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson(indent=4) }}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def quick(monkeypatch):
    """Renders may take half a second of CPU time."""
    monkeypatch.setattr(RENDERER, "cpu_s", 0.5)


@pytest.fixture
def renderer():
    """A renderer of its own, whose processes a test may kill."""
    own = Renderer()
    yield own
    own.close()


def own_peak() -> int:
    """The most memory that this process has used, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def forks_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(true) -> None:
    """Wait for a state that comes by itself; a test that waits in vain fails by its timeout."""
    while not true():
        time.sleep(0.005)


def state_of(pid: int) -> str:
    """The letter of a process's state in /proc: R runs, S waits, Z has ended; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    return state_of(pid) not in ("", "Z")


class Peak:
    """The most memory that forks of the shared renderer used, in KiB, while it is entered."""

    def __enter__(self):
        self.kib, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._over.wait(0.002):
            for pid in forks_of(RENDERER.pid) if RENDERER.pid else ():
                try:
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                except OSError:  # it has ended
                    continue
                found = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
                self.kib = max([self.kib, *found])

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


BOMBS = {
    "multiply": "{{ 'a' * 10**9 }}",
    "multiply bytes": "{{ 'a'.encode() * 10**9 }}",
    "multiply list": "{{ ([0] * 10**9) | length }}",
    "power": "{{ 10**(10**10) }}",
    "power chain": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}"
    "{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "doubling +": "{% set ns = namespace(x='aa') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling ~": "{% set ns = namespace(x='aa') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling set": "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set y %}{{ ns.x }}"
    "{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "doubling list": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "doubling compare": "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "doubling dict": "{% set ns = namespace(x=1) %}{% for i in range(60) %}"
    "{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x | tojson }}",
    "repeated text": "{{ ['a' * 1000000] * 100000 }}",
    "repeated string": "{{ (['a' * 1000000] * 100000) | string | length }}",
    "repeated join": "{{ (['a' * 1000000] * 100000) | join | length }}",
    "repeated method": "{{ ','.join(['a' * 1000000] * 100000) | length }}",
    "center filter": "{{ 'a' | center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ '1'.zfill(10**9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "percent width": "{{ '%999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (999999999, 1) }}",
    "format width": "{{ '{:999999999}'.format(1) }}",
    "format nested": "{{ '{:{}}'.format(1, 999999999) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "replace filter": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "translate": "{{ ('a' * 100000).translate({97: 'b' * 10000}) }}",
    "join filter": "{{ range(1000) | join('x' * 500000) }}",
    "join of a generator": "{{ ('x' * 500000).join(range(1000) | map('string')) }}",
    "message of an error": "{{ raise_exception('x' * 10**9) }}",
    "compiled": "{{ 'a' * 10**9 ~ 'b' }}",
    "map": "{{ range(99999) | map('center', 99999) | list | length }}",
    "json indent": "{{ [1] | tojson(indent=10**8) }}",
    "output": "{% for i in range(99999) %}{{ 'a' * 10000 }}{% endfor %}",
    "lorem": "{{ lipsum(n=10**6) }}",
    "deep": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "deep blocks": "{% if 1 %}" * 2_000 + "{% endif %}" * 2_000,
}


# One for each bound, and for each way to make a long text; the others take a second or two each.
KEPT = [
    "multiply",
    "power chain",
    "endless recursion",
    "doubling ~",
    "center filter",
    "percent width",
    "format nested",
    "replace filter",
    "translate",
    "join filter",
    "message of an error",
    "json indent",
    "output",
    "deep",
]


@linux
@pytest.mark.parametrize("bomb", deep_but(KEPT, BOMBS))
def test_template_bombs_get_400_in_bounded_memory(bomb, quick):
    RENDERER.render("", {})
    before = own_peak()
    with (
        Peak() as peak,
        pytest.raises(InvalidRequest, match="the chat template was stopped: it") as caught,
    ):
        ChatTemplate(BOMBS[bomb], TOKENS).render(HI)
    assert caught.value.status == 400
    assert "--chat-template" in caught.value.message
    assert own_peak() - before < 10_000
    assert peak.kib < 64 * 1024 + 40_000  # the limit, and what the process has at first
    assert ChatTemplate(INDENTED, TOKENS).render(HI) == "Hinull"


def nested(levels: int, numbers: int) -> list:
    inner: list = [7] * numbers
    for _ in range(levels):
        inner = [inner]
    return inner


@linux
@pytest.mark.parametrize("levels", deep_but([400], [400, 800]))
@pytest.mark.parametrize("numbers", deep_but([100_000], [100_000, 500_000]), ids=["202kB", "1MB"])
def test_bodies_that_a_template_makes_large_get_400_in_bounded_memory(levels, numbers):
    template = ChatTemplate(INDENTED, TOKENS)
    tools = [{"x": nested(levels, numbers)}]
    template.render(HI)
    before = own_peak()
    with Peak() as peak, pytest.raises(TemplateStopped, match=r"more than \d+ MB of memory"):
        template.render(HI, tools=tools)
    assert own_peak() - before < 10_000
    assert peak.kib < 64 * 1024 + 40_000 + 24 * 2 * numbers // 1024


def test_a_text_too_long_for_its_request_is_not_sent_back(monkeypatch):
    monkeypatch.setattr(client, "WRITTEN_BYTES", 1000)
    monkeypatch.setattr(client, "WRITTEN_PER_BYTE", 0)
    with pytest.raises(TemplateStopped, match="it writes 24000 characters; at most 1000 are"):
        ChatTemplate("{{ messages[0].content * 3000 }}", TOKENS).render(HI)


def test_the_text_of_an_error_is_cut():
    with pytest.raises(InvalidRequest, match=r"cannot render these messages: x{500}$"):
        ChatTemplate("{{ raise_exception('x' * 10**6) }}", TOKENS).render(HI)


def test_what_nests_too_deeply_to_be_sent_is_400():
    with pytest.raises(InvalidRequest, match="nest too deeply"):
        ChatTemplate(INDENTED, TOKENS).render(HI, tools=[nested(5000, 1)])


def test_values_pass_unchanged_that_msgpack_does_not_have():
    values = [10**30, -(2**70), 1.5, None, True, "\ud800", "é\N{WAVING HAND SIGN}"]
    shown = ChatTemplate("{{ x }}", TOKENS).render(HI, x=values)
    assert shown == str(values)
    assert ChatTemplate("{{ x }}", TOKENS).render(HI, x="\ud800") == "\ud800"
    assert (
        ChatTemplate("{{ x }}", TOKENS).render(HI, x=SimpleMapping({"a": range(2)}))
        == "{'a': [0, 1]}"
    )


class SimpleMapping(dict):
    """A mapping of another class."""


@pytest.mark.parametrize("value", [object(), 1j, len])
def test_values_that_json_does_not_have_are_the_callers_error(value):
    with pytest.raises(InvalidRequest, match="takes texts, numbers, lists and objects only"):
        ChatTemplate("{{ x }}", TOKENS).render(HI, x=value)


def test_many_templates_and_large_chats_share_few_processes(renderer):
    for n in range(3 * client.MAX_TEMPLATES):
        assert renderer.render(f"{n}{{{{ x }}}}", {"x": "y"}) == f"{n}y"
    big = "x" * (2 * client.LARGE_BYTES)
    for _ in range(3):
        assert renderer.render("{{ x }}", {"x": big}) == big
    assert len(renderer._idle) <= 1


def in_thread(work) -> tuple[threading.Thread, list]:
    """Start `work`; its result or error will be in the list."""
    found: list = []

    def run():
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


SLOW = "{% for i in range(99999) %}{% for j in range(20) %}{% endfor %}{% endfor %}done"


@linux
def test_a_process_killed_twice_in_the_middle_fails_its_request_alone(renderer, monkeypatch):
    renderer.cpu_s = renderer.wall_s = PATIENCE_S  # a busy machine may kill it late
    renderer.check(ENDLESS)
    (fork,), ask, asked = forks_of(renderer.pid), client.Fork.ask, []

    def killed_again(self, job):
        asked.append(self)
        if len(asked) == 2:
            for other in forks_of(renderer.pid):
                os.kill(other, signal.SIGKILL)
        return ask(self, job)

    monkeypatch.setattr(client.Fork, "ask", killed_again)
    wait_until(lambda: state_of(fork) == "S")
    thread, found = in_thread(lambda: renderer.render(ENDLESS, {}))
    wait_until(lambda: state_of(fork) == "R")  # it renders: an idle one would be replaced
    os.kill(fork, signal.SIGKILL)
    thread.join()
    assert len(asked) == 2
    assert isinstance(found[0], TemplateStopped)
    assert "memory, or nests too deeply" in found[0].message
    assert renderer.render("{{ x }}", {"x": 1}) == "1"


@linux
def test_a_job_whose_process_is_killed_once_is_done_by_another(renderer, monkeypatch):
    renderer.check("x")
    (fork,), ask, killed = forks_of(renderer.pid), client.Fork.ask, []

    def killed_first(self, job):
        if not killed:
            killed.append(fork)
            os.kill(fork, signal.SIGKILL)
        return ask(self, job)

    monkeypatch.setattr(client.Fork, "ask", killed_first)
    assert renderer.render("{{ x }}", {"x": 1}) == "1"
    assert killed


@linux
def test_requests_survive_the_death_of_the_process_that_forks(renderer):
    renderer.check(SLOW)
    first = renderer.pid
    thread, found = in_thread(lambda: renderer.render(SLOW, {}))
    wait_until(lambda: not renderer._idle)
    os.kill(first, signal.SIGKILL)
    thread.join()
    assert found == ["done"]
    assert renderer.pid != first
    os.kill(renderer.pid, signal.SIGKILL)  # with a fork that is idle
    assert renderer.render("{{ x }}", {"x": 1}) == "1"


@linux
def test_a_job_whose_process_died_while_no_socket_can_be_made_is_503(renderer, monkeypatch):
    def dies(_self, _job):
        monkeypatch.setattr(socket, "socketpair", refuse)
        raise client.RenderProcessLost

    def refuse():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    renderer.check("x")
    monkeypatch.setattr(client.Fork, "ask", dies)
    with pytest.raises(ServiceUnavailable, match=r"cannot be started: .*Too many open files"):
        renderer.render("x", {})
    monkeypatch.undo()
    assert renderer.render("{{ x }}", {"x": 1}) == "1"


@linux
def test_a_job_whose_process_is_killed_again_and_again_is_503(renderer, monkeypatch):
    def dies(_self, _job):
        os.kill(renderer.pid, signal.SIGKILL)
        raise client.RenderProcessLost

    renderer.check("x")
    monkeypatch.setattr(client.Fork, "ask", dies)
    with pytest.raises(ServiceUnavailable, match="killed twice: try again"):
        renderer.render("x", {})
    monkeypatch.undo()
    assert renderer.render("x", {}) == "x"


def test_a_process_with_more_than_1024_files_renders(renderer):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this process may not have so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        for n in range(2):  # the second time, an idle process is used again
            assert renderer.render("{{ x }}", {"x": n}) == str(n)
    finally:
        for number in held:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_fork_of_this_process_does_not_share_its_connections():
    """multiprocessing forks, for example; the lock may be held by a thread that it does not get."""
    code = """
import os, sys
from cpuserve.tokenizer.rendering.client import RENDERER
RENDERER.check("{{ x }}")
pid = RENDERER.pid
RENDERER._lock.acquire()
child = os.fork()
if child:
    RENDERER._lock.release()
who = os.getpid()
for n in range(300):
    assert RENDERER.render("{{ x }}", {"x": [who, n]}) == str([who, n])
assert (RENDERER.pid == pid) == bool(child)
if child:
    assert os.waitpid(child, 0)[1] == 0  # it has run atexit
    assert RENDERER.render("{{ x }}", {"x": "still here"}) == "still here"
    assert RENDERER.pid == pid
"""
    command = [sys.executable, "-c", code]
    options = {**child_options(), "capture_output": True, "text": True}
    done = subprocess.run(command, **options, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")


@linux
def test_a_render_that_gets_too_little_cpu_time_is_no_error_of_the_client():
    own = Renderer(cpu_s=PATIENCE_S)
    try:
        own.check("{{ x }}")
        own.wall_s = 0.2
        with pytest.raises(ServiceUnavailable, match="too busy: try again"):
            own.render(ENDLESS, {})
    finally:
        own.close()


@linux
def test_a_silent_process_is_ended_and_started_again(monkeypatch):
    monkeypatch.setattr(client, "SILENT_S", 0.2)
    own = Renderer()
    try:
        own.check("{{ x }}")
        first = own.pid
        (fork,) = forks_of(first)
        os.kill(fork, signal.SIGSTOP)
        own.wall_s = 0.3  # of this render only: a busy machine may need as long for another
        with pytest.raises(ServiceUnavailable, match="too busy: try again"):
            own.render("{{ x }}", {"x": 1})
        own.wall_s = client.MAX_WALL_S
        assert own.render("{{ x }}", {"x": 1}) == "1"
        assert own.pid != first
        wait_until(lambda: not is_running(fork))
    finally:
        own.close()


def test_closing_ends_renders_and_a_later_one_starts_anew(renderer):
    renderer.check(ENDLESS)
    thread, found = in_thread(lambda: renderer.render(ENDLESS, {}))
    wait_until(lambda: not renderer._idle)
    renderer.close()
    thread.join()
    assert isinstance(found[0], ServiceUnavailable)
    assert renderer.pid is None
    assert renderer.render("{{ x }}", {"x": 1}) == "1"


@linux
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_the_processes_end_with_their_parent(end):
    code = f"""
import os, sys, threading, time
from cpuserve.tokenizer.rendering.client import RENDERER
RENDERER.check({ENDLESS!r})
pid = RENDERER.pid
print(pid, open(f"/proc/{{pid}}/task/{{pid}}/children").read(), flush=True)
threading.Thread(target=RENDERER.render, args=({ENDLESS!r}, {{}}), daemon=True).start()
while RENDERER._idle: time.sleep(0.01)
print("renders", flush=True)
time.sleep(600)
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, **child_options(), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert parent.stdout.readline() == "renders\n"
        assert all(map(is_running, pids))
        parent.send_signal(end)
    wait_until(lambda: not any(map(is_running, pids)))


def test_a_process_that_cannot_be_started_is_503_with_the_reason(renderer, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ServiceUnavailable, match=r"cannot be started: .*ulimit") as caught:
        renderer.check("x")
    assert caught.value.status == 503


def test_a_system_without_limits_of_memory_is_told_once(renderer, monkeypatch, caplog):
    without = server.BOOTSTRAP.replace(
        "sys.exit", f"import {client.MODULE} as m; m.address_space = lambda: 0\nsys.exit"
    )
    monkeypatch.setattr(server, "BOOTSTRAP", without)
    client._tell_unlimited.cache_clear()
    for n in range(2 * client.MAX_TEMPLATES):
        assert renderer.render(f"{n}", {}) == f"{n}"
    (line,) = caplog.messages
    assert "cannot limit the memory" in line


def test_errors_of_a_template_are_told_apart_from_limits(renderer):
    with pytest.raises(TemplateRefused, match="no"):
        renderer.render("{{ raise_exception('no') }}", {})
    for _ in range(2):  # a process does not take it for one that it knows
        with pytest.raises(TemplateRefused, match="unexpected 'end of template'"):
            renderer.check("{% if")


def test_small_requests_pass_large_hostile_ones_and_the_loop_goes_on(renderer):
    renderer.cpu_s = renderer.wall_s = PATIENCE_S  # the small requests are over before that

    async def all_of_them():
        def endless():
            with suppress(ServiceUnavailable):
                renderer.render(ENDLESS, {})

        hostile = [asyncio.create_task(run_rendering(10**6, endless)) for _ in range(6)]
        for _ in range(20):
            assert await run_rendering(100, lambda: renderer.render("{{ x }}", {"x": 1})) == "1"
        assert not any(task.done() for task in hostile)
        for task in hostile:
            task.cancel()
        await asyncio.gather(*hostile, return_exceptions=True)
        await asyncio.to_thread(renderer.close)

    asyncio.run(all_of_them())


@linux
def test_renders_that_wait_for_a_thread_do_not_start_after_the_renderer_is_closed():
    async def all_of_them():
        def endless():
            return RENDERER.render(ENDLESS, {})

        tasks = [asyncio.create_task(run_rendering(100, endless)) for _ in range(9)]
        while RENDERER.pid is None or len(forks_of(RENDERER.pid)) < 4:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(RENDERER.close)
        return await asyncio.gather(*tasks, return_exceptions=True)

    RENDERER.close()
    found = asyncio.run(all_of_them())
    assert [type(error) for error in found] == [ServiceUnavailable] * 9
    assert RENDERER.pid is None


def test_the_wire_takes_json_of_any_size():
    values = {"messages": [{"role": "user", "content": "ä" * 3_000_000}]}
    assert json.loads(RENDERER.render("{{ messages | tojson }}", values)) == values["messages"]
