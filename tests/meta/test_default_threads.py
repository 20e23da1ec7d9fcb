"""Requests do not use the threads that asyncio shares between all callers and the server."""

import ast
from pathlib import Path

from tests.helpers.sources import nodes

ROOT = Path(__file__).parents[2] / "cpuserve"
SHARED = {"to_thread", "run_in_executor", "run_in_threadpool", "getaddrinfo"}
# Files that use them, and for whom. All other work of requests has threads where no
# caller can take all (serving/threads.py).
USERS = {
    "engine/inline.py": "the end of an engine",
    "engine/process.py": "the end of an engine",
    "engine/replicas.py": "the operator empties or ends the store of prefixes",
    "api/callers/known_callers.py": "the server looks at its file of keys",
    "api/http/listener.py": "the start of the server, before it accepts requests",
    "api/http/tls.py": "the server looks at its certificates",
    "api/lifecycle/front_end.py": "the start and the end of the server",
    "api/lifecycle/loaders.py": "a model is loaded or unloaded, for all callers",
    "api/request/memory_trim.py": "one call for all requests, some seconds after the last one",
    "cli/chat.py": "a client",
    "cli/run_batch.py": "the end of a command",
    "media/sources.py": "on the threads that fetch pictures (serving/media/reader.py)",
    "serving/models/context.py": "a model is unloaded, for all callers",
    "serving/models/kept_responses.py": "one task of the server writes them",
    "serving/models/loaders.py": "a model is loaded, for all callers",
}


def users():
    for path in sorted(ROOT.rglob("*.py")):
        for node in nodes(path.read_text(encoding="utf-8")):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in SHARED:
                    yield path.relative_to(ROOT).as_posix()


def test_only_the_work_of_the_server_itself_uses_the_shared_threads():
    assert set(users()) == set(USERS)
