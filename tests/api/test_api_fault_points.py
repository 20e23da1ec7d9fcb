"""Each call of the system fails once (cpuserve/fault_points.py), and the server stays sane."""

import errno
import hashlib
import itertools
import json
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from cpuserve.fault_points import POINTS
from tests.api.sees import write_served_model
from tests.helpers.drawn import data_url, picture, saved
from tests.helpers.patience import PATIENCE_S, wait_until
from tests.helpers.sane import (
    ENGINE,
    GRAMMARS,
    PICTURES,
    TEMPLATES,
    WatchedServer,
    assert_server_sane,
    watched_server,
)
from tests.helpers.tiny import tiny_model

pytestmark = pytest.mark.deep
FAULTY = str(Path(__file__).parents[1] / "helpers" / "faulty")
FILES = Path(__file__).parents[1] / "data" / "tls"
NUMBERS = itertools.count(1000)  # what makes each prompt, grammar and file a new one
# What a client may get while something fails: never an error 500 or 400, which blame a bug or it.
KEPT = {"prompt": [*range(20, 150)], "max_tokens": 2}
FINE = frozenset({200, 503, 507})


# --- requests that reach the points ---------------------------------------------------------------


def text(server):
    prompt = [11 + next(NUMBERS) % 300, *range(20, 100)]
    return [server.ask("/v1/completions", {"prompt": prompt, "max_tokens": 4})]


def texts(server):
    """So many requests that the audit file gets another name after some of these."""
    return [answer for _ in range(20) for answer in text(server)]


def stream(server):
    """A stream, which ends with an error event if it cannot go on."""
    status, body = server.ask(
        "/v1/completions",
        {"prompt": [11, 12], "max_tokens": 40, "ignore_eos": True, "stream": True},
    )
    assert status in (0, 503) or body.endswith(b"data: [DONE]\n\n"), body
    return [(status or 200, body)]


def chat(server):
    messages = [{"role": "user", "content": f"hello {next(NUMBERS)}"}]
    return [server.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 4})]


def grammar(server):
    form = {"type": "regex", "regex": f"(ab|{next(NUMBERS)}){{3}}"}
    form = {"structured_outputs": {"regex": form["regex"]}}
    return [server.ask("/v1/completions", {"prompt": [11, 12], "max_tokens": 30, **form})]


def restored(server):
    """A prompt whose blocks are read from the disk, after others have taken their memory."""
    first = server.ask("/v1/completions", KEPT)
    server.whole_cache()
    return [first, server.ask("/v1/completions", KEPT)]


def upload(server, lines=b'{"a": 1}\n'):
    """A file with the lines of a batch, which is deleted again."""
    status, body = sent = _sent(server, lines)
    if status != 200:
        return [sent]
    return [sent, server.ask(f"/v1/files/{json.loads(body)['id']}", method="DELETE")]


def _sent(server, data):
    parts = (
        b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        + data
        + b"\r\n--b--\r\n"
    )
    return server.ask(
        "/v1/files", parts, headers={"content-type": "multipart/form-data; boundary=b"}
    )


def batch(server):
    """A batch of two lines, which completes, however often the disk fails."""
    body = {"model": "m", "prompt": "hi", "max_tokens": 2}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
        for name in "ab"
    ]
    status, sent = answer = _sent(server, b"".join(json.dumps(li).encode() + b"\n" for li in lines))
    if status != 200:
        return [answer]
    file = json.loads(sent)["id"]
    made = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    status, begun = answer = server.ask("/v1/batches", made)
    if status != 200:
        return [answer, server.ask(f"/v1/files/{file}", method="DELETE")]
    number, seen = json.loads(begun)["id"], {}

    def ended():
        seen.update(json.loads(server.ask(f"/v1/batches/{number}")[1]))
        return seen["status"] in ("completed", "failed")

    wait_until(ended, lambda: str(seen))
    assert seen["status"] == "completed", seen
    assert seen["request_counts"] == {"total": 2, "completed": 2, "failed": 0}, seen
    results = server.ask(f"/v1/files/{seen['output_file_id']}/content")
    assert results[1].count(b"\n") == 2
    files = [file, seen["output_file_id"]]
    return [results, *(server.ask(f"/v1/files/{each}", method="DELETE") for each in files)]


def claude_batch(server):
    """A batch of Anthropic, whose results are read and which is deleted."""
    params = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    status, body = answer = server.ask(
        "/v1/messages/batches", {"requests": [{"custom_id": "a", "params": params}]}
    )
    if status != 200:
        return [answer]
    path = f"/v1/messages/batches/{json.loads(body)['id']}"
    wait_until(lambda: json.loads(server.ask(path)[1])["processing_status"] == "ended")
    return [server.ask(f"{path}/results"), server.ask(path, method="DELETE")]


def created(server):
    """A model that a client creates of the server's, and deletes."""
    made = {"model": "mine", "from": "m", "system": "Be brief.", "stream": False}
    return [server.ask("/api/create", made), _deleted(server)]


def sent(server):
    """A model that a client creates of its own files, and deletes."""
    files, answers = {}, []
    for file in sorted(tiny_model("llama").iterdir()):
        data = file.read_bytes()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        status, body = server.ask(f"/api/blobs/{digest}", data)
        answers.append((200 if status == 201 else status, body))
        files[file.name] = digest
    if all(status == 200 for status, _ in answers):
        made = {"model": "mine", "files": files, "stream": False}
        answers += [server.ask("/api/create", made), _deleted(server)]
    return answers


def _deleted(server):
    status, body = server.ask("/api/delete", {"model": "mine"}, "DELETE")
    return (200 if status == 404 else status), body


def restart(server):
    """The engine ends, and another one starts."""
    engine = next((p for kind, p in server.processes() if kind == ENGINE), None)
    if engine is not None:
        os.kill(engine.pid, signal.SIGKILL)
        wait_until(lambda: engine.pid not in {p.pid for _, p in server.processes()})
    wait_until(lambda: server.ask("/health")[0] == 200, lambda: server.log()[-3000:])
    return []


def end(kind):
    """Return a request of that kind after the process of that kind was killed."""

    def again(server):
        for found, process in server.processes():
            if found == kind:
                os.kill(process.pid, signal.SIGKILL)
        return {GRAMMARS: grammar, TEMPLATES: chat, PICTURES: seen}[kind](server)

    return again


def _seen(server, url):
    shown = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "this?"}]
    turn = {"messages": [{"role": "user", "content": shown}], "max_tokens": 2}
    return [server.ask("/v1/chat/completions", turn)]


def _new_picture():
    return saved(picture(70, 40, seed=next(NUMBERS)))


def seen(server):
    return _seen(server, data_url(_new_picture()))


def seen_in_file(server):
    (server.folder / "a.png").write_bytes(_new_picture())
    return _seen(server, f"file://{server.folder}/a.png")


def seen_elsewhere(server):
    """The connection to this address fails before it begins."""
    return _seen(server, "http://1.1.1.1/a.png")


def look(path):
    return lambda server: [server.ask(path)]


EVERY = (text, stream, chat, grammar, restored, upload, batch, claude_batch, created,
         look("/v1/cpu"), look("/metrics"))  # fmt: skip


# --- the cases ------------------------------------------------------------------------------------

ENGINE_GONE = (
    r"the engine (ended with|was killed by|closed its connection)",
    "the engine serves again after",
    "the engine: the engine did not start",
    "the engine's process cannot be started",
    "the connection to the front end failed",
    "the memory of the engine cannot be mapped",
)
GRAMMARS_GONE = (
    "the process for grammars has ended and is started again",
    "the process for grammars ends, because the system refuses",
)
BATCHES = (r"batches failed \(",)
AUDIT = ("the audit file .* can",)
# A grammar that two attempts in a row did not compile fails its request, which may be sent again.
UNCOMPILED = (*GRAMMARS_GONE, "completions: 503 ")


@dataclass(frozen=True)
class Case:
    """request: reaches the point, perhaps at its second time. known: what the log may say.

    fine: the statuses that its clients may get. then: what ends a lasting effect.
    also: the point that has to fail before, and how.
    """

    point: str
    request: object
    known: tuple[str, ...] = ()
    fine: frozenset = FINE
    then: tuple = ()
    also: str = ""


CASES = (
    Case("children.start", restart, ENGINE_GONE),
    Case("children.connect", restart, ENGINE_GONE),
    Case("engine.configure", restart, ENGINE_GONE),
    Case("engine.receive", stream, ENGINE_GONE),
    Case("engine.send", stream, ENGINE_GONE),
    Case("engine.map", restart, ENGINE_GONE),
    Case("engine.step", stream, ENGINE_GONE),
    Case("front_end.receive", stream, ENGINE_GONE),
    Case("grammars.share", end(GRAMMARS), UNCOMPILED),
    Case("grammars.send", grammar, GRAMMARS_GONE),
    Case("grammars.receive", grammar, GRAMMARS_GONE),
    Case("grammar_process.map", end(GRAMMARS), UNCOMPILED),
    Case("grammar_process.receive", grammar, GRAMMARS_GONE),
    Case("grammar_process.send", grammar, GRAMMARS_GONE),
    Case("grammar_process.fork", grammar, GRAMMARS_GONE),
    Case("grammar_process.thread", grammar, GRAMMARS_GONE),
    Case("grammar_process.read", grammar, GRAMMARS_GONE),
    Case("grammar_fork.write", grammar, GRAMMARS_GONE),
    Case("templates.start", end(TEMPLATES)),
    Case("templates.connect", end(TEMPLATES)),
    Case("templates.send", chat),
    Case("templates.receive", chat),
    Case("template_process.accept", end(TEMPLATES)),
    Case("template_process.fork", end(TEMPLATES)),
    Case("template_fork.receive", chat),
    Case("template_fork.send", chat),
    Case("kv_block.read", restored),
    Case("kv_block.write", text, (*ENGINE_GONE, "prefix cache"), then=(restart,)),
    Case("record.write", batch, BATCHES),
    Case("record.sync", batch, BATCHES),
    Case("content.open", batch, BATCHES),
    Case("content.write", batch, BATCHES),
    Case("content.sync", batch, BATCHES),
    Case("content.cut", batch, BATCHES, also="content.write:2:ENOSPC"),
    Case("content.read", claude_batch),
    Case("model_file.rename", sent),
    Case("model_file.link", sent),
    Case("audit.write", text, AUDIT),
    Case("audit.sync", text, AUDIT),
    Case("audit.rename", texts, ("the audit file .* cannot be renamed",)),
    Case("client.accept", text, ("new connections are closed",)),
    Case("client.receive", text),
    Case("system.read", look("/v1/cpu")),
)
# Those of a model that reads pictures.
SEEN = (
    Case("pictures.start", end(PICTURES)),
    Case("pictures.connect", end(PICTURES)),
    Case("pictures.send", seen),
    Case("pictures.receive", seen),
    Case("pictures.read", seen),
    Case("picture_process.accept", end(PICTURES)),
    Case("picture_process.fork", end(PICTURES)),
    Case("picture_fork.receive", seen),
    Case("picture_fork.map", seen),
    Case("picture_fork.write", seen),
    Case("picture_fork.send", seen),
    Case("media_file.open", seen_in_file),
    Case("media.connect", seen_elsewhere, fine=FINE | {400}),
)


def runs(cases):
    """The parameters of a test: each case with each way in which its point can fail."""
    made = [(case, action) for case in cases for action in POINTS[case.point].actions]
    ids = [f"{case.point}-{action}" for case, action in made]
    return pytest.mark.parametrize(("case", "action"), made, ids=ids)


def arm(folder, plan):
    """Let the call at a point fail; return the file that says that it has."""
    point, _, how = plan.partition(":")
    fired = folder / f"{point}.fired"
    fired.unlink(missing_ok=True)
    if point:
        new = folder / f"{point}.new"
        new.write_text(how, encoding="ascii")
        new.rename(folder / point)
    return fired


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    (folder / "plans").mkdir()
    options = [
        *("--served-model-name", "m", "--max-model-len", 512, "--kv-cache-memory", "256KiB"),
        *("--prefix-cache-dir", folder / "prefixes", "--files-dir", folder / "files"),
        *("--models-dir", folder / "models"),
        *("--audit", folder / "audit", "--audit-bytes", "64KiB"),
        *("--omp-threads-bind", "nobind"),
    ]
    faults = {"PYTHONPATH": FAULTY, "CPUSERVE_FAULT": str(folder / "plans")}
    with watched_server(folder, tiny_model("llama"), *options, **faults) as made:
        for request in EVERY * 2:
            for status, body in request(made):
                assert status == 200, body
        made.settle()
        yield made
        made.stop()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeing")
    (folder / "plans").mkdir()
    options = [
        *("--served-model-name", "m", "--max-model-len", 256, "--kv-cache-memory", "1MiB"),
        *("--allowed-local-media-path", folder, "--allowed-media-domains", "*"),
        *("--omp-threads-bind", "nobind"),
    ]
    faults = {"PYTHONPATH": FAULTY, "CPUSERVE_FAULT": str(folder / "plans")}
    model = write_served_model(folder / "model").path
    with watched_server(folder, model, *options, **faults) as made:
        for request in (text, chat, seen, seen_in_file) * 2:
            for status, body in request(made):
                assert status == 200, body
        made.settle()
        yield made
        made.stop()


def check(server, case, action):
    """The server is sane after the point has failed once in this way."""
    for plan in (case.also, f"{case.point}:1:{action}"):
        fired = arm(server.folder / "plans", plan)

    def has_fired():
        wait_until(lambda: server.ask("/health")[0] == 200, lambda: server.log()[-3000:])
        for status, body in case.request(server):
            assert status in case.fine, body
        return fired.exists()

    server.new_log()
    wait_until(has_fired, f"{case.point} was not reached")
    for after in case.then:
        after(server)
    assert_server_sane(server, *case.known)


@runs(CASES)
def test_the_server_is_sane_after(case, action, server):
    check(server, case, action)


@runs(SEEN)
def test_a_server_with_pictures_is_sane_after(case, action, seeing):
    check(seeing, case, action)


# --- experts that are read from the disk ----------------------------------------------------------


def test_requests_end_with_503_when_their_experts_cannot_be_read(tmp_path):
    plans = tmp_path / "plans"
    plans.mkdir()
    options = [
        *("--max-model-len", 256, "--kv-cache-memory", "256KiB", "--omp-threads-bind", "nobind"),
        *("--weights-on-disk", "600KiB"),
    ]
    faults = {"PYTHONPATH": FAULTY, "CPUSERVE_FAULT": str(plans)}
    fired = arm(plans, ":".join(("expert_heat.read", "1", "EIO")))
    with watched_server(tmp_path, tiny_model("qwen3-moe"), *options, **faults) as server:
        wait_until(fired.exists, "the use of experts was not read")
        assert text(server)[0][0] == 200
        server.settle()
        for action in POINTS["expert.read"].actions:
            fired = arm(plans, ":".join(("expert.read", "1", action)))
            status, body = text(server)[0]
            assert status == (503 if action == "EIO" else 200), body
            assert action != "EIO" or b"cannot be read from the disk" in body
            assert fired.exists()
            assert text(server)[0][0] == 200
            assert_server_sane(server, "an expert cannot be read from the packed weights")
        metrics = server.ask("/metrics")[1]
        assert b"cpuserve:expert_read_errors_total" in metrics
        assert b"cpuserve:expert_misses_total" in metrics
        fired = arm(plans, ":".join(("expert_heat.write", "1", "ENOSPC")))
        server.stop()
        assert fired.exists()
        assert "the use of experts is not kept" in server.log()


# --- faults while the server starts ---------------------------------------------------------------

# What a start goes on without, when it fails once: all of these in one start.
WITHOUT = {
    "system.read": "EIO",
    "tuned.read": "EIO",
    "kv_folder.read": "EIO",
    "kv_scan.read": "EIO",
    "kv_shared.read": "EIO",
    "record.read": "EIO",
    "packed.open": "EIO",
    "packed.read": "EIO",
    "source.sample": "EIO",
    "manager.send": "ECONNREFUSED",
    "page.read": "EIO",
}
KNOWN_WITHOUT = (
    "is damaged and left out",
    "tuned.* is ignored, because",
    "packed weights.* (is|are) made anew",
    "the service manager cannot be told",
    "GET /: 507 ",
)
ON_DISK = ("--weights-on-disk", "always")


def options_of(folder):
    return [
        *("--served-model-name", "m", "--max-model-len", 512, "--kv-cache-memory", "256KiB"),
        *("--prefix-cache-dir", folder / "prefixes", "--files-dir", folder / "files"),
        *("--omp-threads-bind", "nobind", *ON_DISK),
    ]


def test_a_start_goes_on_without_what_cannot_be_read(tmp_path):
    first, plans = tmp_path / "first", tmp_path / "plans"
    first.mkdir()
    plans.mkdir()
    cache = {"CPUSERVE_CACHE": str(tmp_path / "cache")}
    with watched_server(first, tiny_model("llama"), *options_of(first), **cache) as server:
        assert _sent(server, b"{}\n")[0] == 200
        assert server.ask("/v1/completions", KEPT)[0] == 200
        server.stop()
    for point, action in WITHOUT.items():
        arm(plans, f"{point}:1:{action}")
    options = [*options_of(first), "--kv-tiers", f"shared={first / 'prefixes'}"]
    options[options.index(first / "prefixes")] = tmp_path / "prefixes"
    faults = {"PYTHONPATH": FAULTY, "CPUSERVE_FAULT": str(plans), "NOTIFY_SOCKET": "/nowhere"}
    with watched_server(tmp_path, tiny_model("llama"), *options, **faults, **cache) as server:
        assert server.ask("/", headers={"accept": "text/html"})[0] in (200, 507)
        assert server.ask("/v1/completions", KEPT)[0] == 200
        for request in (text, chat, grammar):
            assert {status for status, _ in request(server)} == {200}
        assert {path.stem for path in plans.glob("*.fired")} == set(WITHOUT)
        server.settle()
        assert_server_sane(server)
        server.stop()
        lines = [line for line in server.log().splitlines() if "WARNING" in line or "ERROR" in line]
        known = re.compile("|".join(KNOWN_WITHOUT))
        assert [line for line in lines if not known.search(line)] == []
    fired = arm(plans, ":".join(("packed.load", "1", "EIO")))
    with watched_server(tmp_path, tiny_model("llama"), *options, **faults, **cache) as server:
        assert {status for status, _ in text(server)} == {200}
        assert fired.exists()
        server.stop()
        assert "made anew" in server.log()


@pytest.mark.parametrize(
    ("point", "action"),
    [("secret.read", "EIO"), ("secret.write", "ENOSPC"), ("kv_folder.write", "EROFS")],
)
def test_a_start_goes_on_without_a_directory_that_cannot_be_used(point, action, tmp_path):
    options = ["--prefix-cache-dir", tmp_path / "prefixes", "--max-model-len", 512]
    faults = {"PYTHONPATH": FAULTY, "CPUSERVE_FAULT": f"{point}:1:{action}"}
    with watched_server(tmp_path, tiny_model("llama"), *options, **faults) as server:
        server.settle()
        assert_server_sane(server)
        server.stop()


# What no start goes on without.
TLS = ("--ssl-certfile", f"{FILES}/first.crt", "--ssl-keyfile", f"{FILES}/first.key")
REFUSED = (
    ("options.read", "EIO", ("--config", "FOLDER/options.yaml")),
    ("template_file.read", "EIO", ("--chat-template", "FOLDER/template.jinja")),
    ("weights.read", "EIO", ()),
    ("weights.map", "EMFILE", ()),
    ("weights.map", "ENOMEM", ()),
    ("engine.map", "ENOMEM", ()),
    ("children.start", "EAGAIN", ()),
    ("keys.read", "EIO", ("--api-key-file", "FOLDER/keys")),
    ("audit.open", "EIO", ("--audit", "FOLDER/audit")),
    ("certificate.read", "EIO", TLS),
    ("certificate.read", "EMFILE", TLS),
    ("packed.allocate", "ENOSPC", ON_DISK),
    ("packed.sync", "EIO", ON_DISK),
    ("source.read", "EIO", ON_DISK),
    ("source.sample", "EIO", ("--prefix-cache-dir", "FOLDER/prefixes")),
)


@pytest.mark.parametrize(("point", "action", "options"), REFUSED)
def test_a_start_is_refused_in_one_line(point, action, options, tmp_path):
    (tmp_path / "options.yaml").write_text("seed: 1\n")
    (tmp_path / "keys").write_text("somebody 0123456789abcdef0123456789abcdef\n")
    (tmp_path / "template.jinja").write_text("x")
    options = [option.replace("FOLDER", str(tmp_path)) for option in options]
    faults = {"PYTHONPATH": FAULTY, "CPUSERVE_FAULT": f"{point}:1:{action}"}
    server = WatchedServer(tmp_path, tiny_model("llama"), *options, **faults)
    try:
        assert server.process.wait(PATIENCE_S) == 2, server.log()
    finally:
        server.close()
    *_, last = server.log().splitlines()
    assert last.startswith("cpuserve: error: "), server.log()
    assert "Traceback" not in server.log(), server.log()
    assert "(on purpose)" in last or os.strerror(getattr(errno, action)) in last, last
    assert not server.unfinished()
