"""`python -m tests.api.explore_schema`: generated requests to every operation of /openapi.json.

It needs the package `schemathesis`, which makes the requests from the schema of a server with all
routes: valid ones, invalid ones, and some to a file, batch or response that exists. Each operation
gets --examples requests, on a connection to a server with a scripted engine. The run fails on a 5xx
status, and on a response that the schema does not describe. --only REGEX limits the operations
("POST /v1/"). --log FILE keeps a line for each operation that has passed; the next run with this
file continues with the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from tests.api.fakes import FakeEngine, make_context
from tests.api.live import live
from tests.api.post_routes import HI, ROUTES, answers, app_with_all_routes, prepare

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
# It does not end.
ENDLESS = "GET /models/sse"
# The most requests with the ids of what exists, and the most invalid ones; the others are valid.
SHARES = {"known": 0.2, "invalid": 0.4, "valid": 1.0}
TIMEOUT_S = 120


@contextmanager
def serving(path: str) -> Iterator[str]:
    """Run a server with all routes, and a model for the route `path`; yield its address."""
    pooling = ROUTES[path].pooling if path in ROUTES else "none"
    context = prepare(make_context(FakeEngine(answers)), pooling)
    context.adapters_change = True
    begun, found = threading.Event(), {}

    async def serve(home: str) -> None:
        options = {"admin_routes": True, "files_dir": str(Path(home) / "files")}
        async with live(context=context, **options) as server:
            found.update(port=server.port, loop=asyncio.get_running_loop(), end=asyncio.Event())
            begun.set()
            await found["end"].wait()

    with tempfile.TemporaryDirectory() as home:
        thread = threading.Thread(target=lambda: asyncio.run(serve(home)))
        thread.start()
        try:
            assert begun.wait(TIMEOUT_S)
            yield f"http://127.0.0.1:{found['port']}"
        finally:
            found["loop"].call_soon_threadsafe(found["end"].set)
            thread.join()


def known_ids(url: str) -> dict[str, str]:
    """Create one of everything that has an id; return the ids by the parameters of paths."""

    def post(path: str, **sent: Any) -> dict[str, Any]:
        response = requests.post(url + path, timeout=TIMEOUT_S, **sent)
        response.raise_for_status()
        return response.json()

    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    upload = {"file": ("a.jsonl", json.dumps(line).encode())}
    file = post("/v1/files", data={"purpose": "batch"}, files=upload)["id"]
    talk = post("/v1/conversations", json={"items": HI})["id"]
    items = requests.get(f"{url}/v1/conversations/{talk}/items", timeout=TIMEOUT_S).json()
    batch = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    message = {"custom_id": "a", "params": {"model": "tiny", "max_tokens": 3, "messages": HI}}
    return {
        "file_id": file,
        "conversation_id": talk,
        "item_id": items["data"][0]["id"],
        "response_id": post("/v1/responses", json={"input": "hi"})["id"],
        "batch_id": post("/v1/batches", json=batch)["id"],
        "message_batch_id": post("/v1/messages/batches", json={"requests": [message]})["id"],
        "name": "tiny",
        "number": "0",
    }


def explore(operation: Any, url: str, examples: int, seed: int) -> dict[str, int]:
    """Send generated requests to an operation; return how many of each kind, and raise failures."""
    named = {*re.findall(r"{(\w+)}", operation.path)}
    ids = known_ids(url) if named else {}
    session = requests.Session()
    counts: dict[str, int] = {}
    for kind, share in SHARES.items():
        more: dict[str, Any] = {}
        if kind == "invalid":
            more["generation_mode"] = GenerationMode.NEGATIVE
        if kind == "known" and named <= ids.keys():
            more["path_parameters"] = {name: ids[name] for name in named}
        strategy = operation.as_strategy(**more)
        most = min(round(examples * share), examples - sum(counts.values()))
        counts[kind] = send_all(strategy, url, session, most, seed)
    return counts


def send_all(strategy: Any, url: str, session: Any, most: int, seed: int) -> int:
    """Send up to `most` requests of a strategy; return how many were sent."""
    count = 0

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=most,
        deadline=None,
        database=None,
        suppress_health_check=[*hypothesis.HealthCheck],
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )
    @hypothesis.given(strategy)
    def send(case: Any) -> None:
        nonlocal count
        count += 1
        response = case.call(base_url=url, session=session, timeout=TIMEOUT_S)
        case.validate_response(response, checks=CHECKS)

    try:
        send()
    except Unsatisfiable:  # no request to this operation can be invalid
        return 0
    return count


def read_log(log: Path | None, examples: int) -> set[str]:
    """Return the operations that have passed with `examples` or more."""
    lines = [] if log is None or not log.exists() else log.read_text("utf-8").splitlines()
    passed = [json.loads(line) for line in lines]
    return {line["operation"] for line in passed if line["examples"] >= examples}


def main() -> int:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--only", default=".")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, default=None)
    args = parser.parse_args()
    failed, done = [], read_log(args.log, args.examples)
    schema = schemathesis.openapi.from_dict(app_with_all_routes().openapi())
    for result in schema.get_all_operations():
        operation = result.ok()
        label = operation.label
        if label in done or label == ENDLESS or not re.search(args.only, label):
            continue
        line = {"operation": label, "examples": args.examples}
        try:
            with serving(operation.path) as url:
                line |= explore(operation, url, args.examples, args.seed)
        except (Exception, FailureGroup) as error:
            failed.append(label)
            print(f"{label}: failed\n{error}\n", *getattr(error, "exceptions", ()), flush=True)
            continue
        print(json.dumps(line), flush=True)
        if args.log is not None:
            with args.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    print(f"{len(failed)} operations failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
