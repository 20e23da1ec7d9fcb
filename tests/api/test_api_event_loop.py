"""No request stops the event loop: the largest values of every field of every endpoint.

Each test sends the values of `largest.py` to one operation of a server process, and LoopWatch
watches its event loop. The model has a context of 128k tokens. A stop of 100 ms of CPU time delays
`/live`, and the tokens of all streams, by as much. A value that seems to stop the loop is sent
again, because another program may have taken the caches of the CPU: only a stop that comes back
fails the test.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys

import pytest

from tests.api import largest
from tests.api.post_routes import ROUTES
from tests.api.serve_watched import MOST_BYTES
from tests.helpers.children import child_options
from tests.helpers.patience import PATIENCE_S

# All operations take six minutes and a quiet machine: `.ci/run event-loop` tries them. Other
# runs try two, and only the CPU time of callbacks counts, at any load.
EVERY = "EVENT_LOOP_FULL" in os.environ
A_FEW = ("/detokenize", "/api/create")
LONGEST_S = 0.1
TRIES = 5
POOLINGS = ("none", "last", "classify", "sparse")


class Watched:
    """A server process with a watch on its event loop."""

    def __init__(self, pooling: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.api.serve_watched", pooling],
            **child_options(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self.process.stdout.readline())
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)

    def longest(self) -> tuple[float, str]:
        """Return the longest stop of the event loop since the last call, and where it was."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        seconds, where = json.loads(self.process.stdout.readline())
        return seconds, where

    def send(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Send a request; return the status and the body of its response."""
        headers = {"content-type": "application/json"}
        for again in (False, True):
            try:
                self.connection.request(method, path, body, headers)
                response = self.connection.getresponse()
                return response.status, response.read()
            except (http.client.HTTPException, OSError):
                self.connection.close()
                if again:
                    raise
        raise AssertionError

    def post(self, path: str, **fields) -> dict:
        """Send a valid request, and return the object in its response."""
        status, told = self.send("POST", path, json.dumps(fields).encode())
        assert status == 200, told
        return json.loads(told)

    def stop(self, method: str, path: str, body: bytes) -> tuple[int, float, str]:
        """Send a request up to TRIES times while it stops the loop; return the shortest stop."""
        shortest, place = float("inf"), ""
        for _ in range(TRIES):
            self.longest()
            status, told = self.send(method, path, body)
            assert status < 500 or status in (501, 503), told
            seconds, where = self.longest()
            if seconds < shortest:
                shortest, place = seconds, where
            if shortest <= LONGEST_S:
                break
        return status, shortest, place

    def close(self) -> None:
        self.connection.close()
        self.process.communicate()


@pytest.fixture(scope="module")
def watched():
    """watched(pooling) returns the server with a model of this pooling."""
    with contextlib.ExitStack() as stack:
        known: dict[str, Watched] = {}

        def server(pooling: str) -> Watched:
            if pooling not in known:
                known[pooling] = Watched(pooling)
                stack.callback(known[pooling].close)
            return known[pooling]

        yield server


def address(server: Watched, path: str) -> str:
    """Return the path with the id of a conversation in it."""
    if "{conversation_id}" in path:
        made = server.post("/v1/conversations", items=largest.HI)
        return path.replace("{conversation_id}", made["id"])
    return path


@pytest.mark.deep
@pytest.mark.parametrize("path", largest.posts() if EVERY else A_FEW)
def test_the_largest_value_of_every_field_leaves_the_event_loop_free(watched, path):
    server = watched(ROUTES[path].pooling if path in ROUTES else "none")
    method, found, taken = largest.method(path), [], 0
    fields = largest.tried()[path]
    for field in fields:
        for shape, bodies in largest.bodies(field, MOST_BYTES):
            for body in bodies:
                status, seconds, where = server.stop(method, address(server, path), body)
                if seconds > LONGEST_S:
                    found.append(
                        f"{field.label}, {shape}, {len(body)} bytes, status {status}: the loop "
                        f"stopped for {seconds:.3f} s in {where}"
                    )
                if status < 400:
                    taken += 1
                    break
    assert not found, "\n".join(found)
    assert taken or not fields or path in REFUSED, "no value was taken, so the base body is wrong"


# Operations that refuse every request to the servers of these tests.
REFUSED = {
    "/v1/batches",
    "/v1/uploads",
    "/v1/uploads/{upload_id}/complete",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/api/push",
}


def test_every_operation_with_a_body_has_a_base():
    for path in largest.posts():
        assert largest.base(path) is not None
        assert list(largest.fields(path)) or path == "/lora-adapters"
