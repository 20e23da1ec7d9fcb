"""Each call of the system that can fail has a fault point, and a test lets each point fail."""

import ast
import errno
import os
import re
import subprocess
import sys
from pathlib import Path

from cpuserve.base.fault_points import DELAY, KILL, POINTS, SHORT, VARIABLE
from cpuserve.config.env import read_env
from tests.api import test_api_fault_points as running
from tests.api import test_api_fault_starts as starting
from tests.helpers.children import child_options
from tests.helpers.sources import parsed

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent / "cpuserve"
# Commands besides the server and downloads, which end with what fails, and programs for tests.
OTHER_PROGRAMS = ("bench/", "cli/", "integrations/", "testing/", "webui/")
OTHER_PROGRAMS += ("loader/builtin.py", "loader/hub.py", "loader/quantized.py")
OF_OS = {
    *("fdatasync", "fdopen", "fork", "fsync", "ftruncate", "link", "memfd_create", "open", "pipe"),
    *("posix_fallocate", "pread", "preadv", "pwrite", "read", "rename", "replace", "write"),
}
METHODS = {
    *("Popen", "read_bytes", "read_packed", "read_text", "readinto", "recv", "recv_fds"),
    *("recv_into", "recvmsg", "send_fds", "sendall", "sendmsg", "sendto", "socketpair"),
    *("write_bytes", "write_text"),
}
FUNCTIONS = {"mmap", "mmap.mmap", "open", "super().accept", "self._listener.accept"}
# Functions without a point of their own, and why.
ELSEWHERE = {
    "api/stored/owned_folder.py:__init__": "the lock of the directory, when the server starts",
    "api/batches/service.py:_opened": "open_plain has the point",
    "api/batches/service.py:_run": "open_plain has the point",
    "api/http/audit_file.py:_opened": "its caller has the point",
    "api/http/audit_file.py:_restore": "runs after a failure",
    "api/http/audit_file.py:_sync_folder": "its caller has the point",
    "api/http/audit_file.py:_whole_lines": "its caller has the point",
    "api/http/listener.py:__init__": "a spare descriptor, when the server starts",
    "api/http/listener.py:_refuse": "runs when `accept` has failed, which has the point",
    "api/http/startup_server.py:_accept": "`accept` of the listener has the point",
    "api/http/tls.py:_look": "asyncio closes a connection after an error of its socket",
    "api/http/tls.py:recv": "asyncio closes a connection after an error of its socket",
    "api/http/tls.py:recv_into": "asyncio closes a connection after an error of its socket",
    "api/lifecycle/model_context.py:files_fingerprint": "reads a template for the audit file",
    "api/request/memory_trim.py:trim_asleep": "an error has no effect",
    "core/kv/cache_folder.py:_remove_unused": "an error leaves a directory for later",
    "core/kv/cache_folder.py:create": "an error at the start leaves the engines without it",
    "core/kv/disk.py:_mapped": "its caller has the point",
    "core/kv/disk.py:_remove_abandoned": "an error leaves a file for later",
    "core/regular_file.py:open_regular": "its callers have points",
    "core/regular_file.py:replace_file": "its callers have points",
    "engine/grammars/process.py:_shared_memory": "its caller has the point",
    "engine/grammars/worker.py:_pages": "after an error the size is unknown",
    "engine/grammars/worker.py:main": "an error has no effect",
    "limited/child.py:_serve": "opens /dev/null",
    "limited/child.py:address_space": "after an error the size is unknown",
    "limited/child.py:serve_forks": "its callers have points",
    "limited/server.py:__init__": "its callers have points",
    "limited/server.py:connect": "its callers have points",
    "limited/wire.py:_exactly": "its callers have points",
    "limited/wire.py:send": "its callers have points",
    "loader/packed_files.py:_remove_unused": "an error leaves a file for later",
    "loader/packed_files.py:_sync": "its caller has the point",
    "loader/content.py:sampled": "its callers have points",
    "loader/source_digest.py:samples_of": "its callers have points",
    "loader/source_digest.py:_tree_digest": "its function `part` has the point",
    "loader/source_digest.py:known": "after an error the digest is computed again",
    "models/generic.py:_decoders": "reads the code of transformers",
    "models/generic.py:_keeps_states": "reads the code of transformers",
    "platforms/cpu.py:_machine": "for the text of an error",
    "platforms/tuned.py:store_tuned": "a command stores these sizes",
    "program/lower.py:step_bytes": "a method of weights has the name read_bytes",
    "tokenizer/limited/process.py:prepare": "opens /dev/null",
    "serving/models/kept_responses.py:_created": "its caller has the point",
    "runtime/native.py:_parts": "a method of weights has the name read_bytes",
    "runtime/packed_cache.py:_code_digest": "reads the code of this package",
    "runtime/packed_cache.py:disk_rate": "a measurement for a line of the log",
    "runtime/packed_cache.py:_memory_to_read_into": "a measurement for a line of the log",
    "runtime/packed_cache.py:read_packed": "its caller has the point",
    "runtime/packed_cache.py:read": "a measurement for a line of the log",
}


def functions(node):
    """Yield each function with the nodes that are its own, and not of a function in it."""
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            own, waiting = [], list(child.body)
            while waiting:
                each = waiting.pop()
                own.append(each)
                if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                    waiting += ast.iter_child_nodes(each)
            yield child.name, own


def is_call_of_the_system(node):
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    of, _, last = name.rpartition(".")
    # Of paths, and not of texts or structures: path.open("rb"), path.replace(other).
    first = node.args[0] if node.args else None
    opens = last == "open" and isinstance(first, ast.Constant) and set(first.value) <= set("rwxab+")
    moves = last in ("rename", "replace") and len(node.args) == 1 and not node.keywords
    if of and of != "msgspec.structs" and (opens or moves):
        return True
    return (of == "os" and last in OF_OS) or (bool(of) and last in METHODS) or name in FUNCTIONS


def points_of(nodes):
    """The names of the fault points that these nodes call."""
    return {
        node.args[0].value
        for node in nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "fault"
    }


def found():
    """Yield (file:function, its fault points, whether it calls the system) of the server."""
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(OTHER_PROGRAMS):
            for function, own in functions(parsed(path.read_text(encoding="utf-8"))):
                calls = any(map(is_call_of_the_system, own))
                yield f"{name}:{function}", points_of(own), calls


def test_each_call_of_the_system_has_a_fault_point():
    without = {where for where, points, calls in found() if calls and not points}
    assert without - set(ELSEWHERE) == set(), (
        "add a point to base/fault_points.py, call fault() before the call, and let it fail in "
        "tests/api/test_api_fault_points.py or test_api_fault_starts.py"
    )
    assert set(ELSEWHERE) - without == set(), "take it off the list"


def test_each_point_of_the_table_is_called_and_each_that_is_called_is_in_the_table():
    assert {point for _, points, _ in found() for point in points} == set(POINTS)


def in_whole_servers():
    """The points and the ways in which tests let them fail in servers of their own."""
    tables = (running.CASES, running.SEEN, running.LIMITED, running.ADAPTED)
    cases = [case for table in tables for case in table]
    every = [*(case.point for case in cases), *starting.EXPERTS, *starting.BLIND]
    yield from ((point, action) for point in every for action in POINTS[point].actions)
    yield from (
        (point, action) for point, _, action in (c.also.split(":") for c in cases if c.also)
    )
    yield from (*starting.SAVING, *starting.WITHOUT.items(), *starting.ANEW, *starting.DIRECTORIES)
    yield from ((point, action) for point, action, _ in starting.REFUSED)


def test_each_point_fails_in_each_way_in_a_whole_server():
    every = {(point, action) for point, found in POINTS.items() for action in found.actions}
    assert set(in_whole_servers()) == every, (
        "add a Case to tests/api/test_api_fault_points.py, or a row to test_api_fault_starts.py"
    )


def test_the_actions_of_points_exist():
    actions = {action for point in POINTS.values() for action in point.actions}
    assert [a for a in actions - {KILL, DELAY, SHORT} if not hasattr(errno, a)] == []


def test_a_server_ignores_the_variable_and_says_so():
    (note,) = read_env({VARIABLE: "engine.send:1:kill"}).notes
    assert note == f"env {VARIABLE} is ignored: only the tests of cpuserve can make calls fail"


def test_only_the_code_of_tests_lets_a_call_fail():
    code = "from cpuserve.base.fault_points import fault; print(fault('engine.send', 8))"
    faulty = TESTS / "helpers" / "faulty"
    printed = {}
    for name, path in (("server", []), ("test", [str(faulty)])):
        options = child_options(**{VARIABLE: "engine.send:1:short"})
        options["env"]["PYTHONPATH"] = os.pathsep.join([*path, options["env"]["PYTHONPATH"]])
        ran = subprocess.run(
            [sys.executable, "-c", code], **options, capture_output=True, text=True
        )
        printed[name] = ran.stdout
    assert printed == {"server": "8\n", "test": "4\n"}


def test_the_check_finds_a_call_without_a_point():
    (name, own), *_ = functions(ast.parse("def f(fd):\n    os.fsync(fd)\n"))
    assert (name, any(map(is_call_of_the_system, own)), points_of(own)) == ("f", True, set())
    assert re.fullmatch(r"[a-z_]+\.[a-z_]+", "engine.send")
