"""Each task of the server is awaited where it starts, or kept by cpuserve/base/background.py."""

import ast
from pathlib import Path

from tests.helpers.sources import nodes

ROOT = Path(__file__).parents[2] / "cpuserve"
STARTS = {"create_task", "ensure_future"}
# Functions whose task is awaited elsewhere, and where its errors go.
ELSEWHERE = {
    "base/background.py:keep": "the task of `keep` itself",
    "api/batches/service.py:_start": "run takes each task that is done, and _settle logs its error "
    "or raises it",
    "api/http/startup_server.py:_accept": "_serve waits for all connections; errors are "
    "those of one client, which it drops",
    "api/openai/responses/recording.py:_in_background": "_Background.run makes an error a part "
    "of the stored response, settle() finishes it in every case, and its RequestWork ends with it",
    "api/response/stream.py:_send_events": "the pings of a stream end with the stream",
    "bench/driver.py:run_open": "the load generator is no server",
    "serving/models/registry.py:_loaded": "the requests that wait for the model get its error, "
    "_load logs it, and the next request loads again",
}


def functions(text=""):
    """Yield (file, function) of all files that contain a text."""
    for path in sorted(ROOT.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for node in nodes(source) if text in source else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path.relative_to(ROOT).as_posix(), node


def called(node):
    """The name of the function that a call calls; "" of other nodes."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def own(function):
    """The nodes of a function without those of functions inside it."""
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += ast.iter_child_nodes(node)


def starts(function):
    return [node for node in own(function) if called(node) in STARTS]


def is_awaited(function):
    """Whether the function has a name for each of its tasks, and awaits it or takes its result."""
    named = set()
    for node in own(function):
        if isinstance(node, ast.Assign) and any(called(n) in STARTS for n in ast.walk(node.value)):
            named |= {ast.unparse(target) for target in node.targets}
    waits = [
        node.value if isinstance(node, ast.Await) else node
        for node in own(function)
        if isinstance(node, ast.Await) or called(node) == "result"
    ]
    used = {ast.unparse(name) for wait in waits for name in ast.walk(wait)}
    return bool(named) and named <= used


def kept_names():
    """The names of all tasks that the server keeps, for a server with one engine."""
    names = set()
    for path, function in functions("keep("):
        for node in own(function):
            if called(node) == "keep" and isinstance(node.func, ast.Name):
                name = node.args[0]
                if isinstance(name, ast.JoinedStr):
                    assert ast.unparse(name) == "f'restarting {r.name}'", path
                    names.add("restarting the engine")
                elif isinstance(name, ast.Constant):
                    names.add(name.value)
    return names


def unwatched():
    return {
        f"{path}:{function.name}"
        for path, function in functions()
        if starts(function) and not is_awaited(function)
    }


def test_no_task_ends_without_anybody_noticing():
    found = unwatched()
    assert found - set(ELSEWHERE) == set(), "start it with base.background.keep, or await it"
    assert set(ELSEWHERE) - found == set(), "take it off the list"


def test_the_check_finds_a_task_that_nobody_awaits():
    lost, kept = ast.parse(
        "async def lost():\n    self.task = asyncio.create_task(work())\n"
        "async def kept():\n    task = asyncio.create_task(work())\n    await task\n"
    ).body
    assert starts(lost)
    assert not is_awaited(lost)
    assert is_awaited(kept)
