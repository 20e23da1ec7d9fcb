"""Requests that reach the fault points of a server (base/fault_points.py), and their plans."""

import hashlib
import itertools
import json
import os
import signal
from pathlib import Path

from cpuserve.serving.models.recent_prompts import MAX_PROMPTS_OF_CALLER
from tests.helpers.adapter import adapter_of
from tests.helpers.drawn import data_url, picture, saved
from tests.helpers.patience import wait_until
from tests.helpers.sane import ENGINE, GRAMMARS, PICTURES, TEMPLATES, TOKENIZERS
from tests.helpers.tiny import tiny_model

FAULTY = str(Path(__file__).parents[1] / "helpers" / "faulty")
NUMBERS = itertools.count(1000)  # what makes each prompt, grammar and file a new one
KEPT = {"prompt": [*range(20, 150)], "max_tokens": 2}


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


def text(server):
    prompt = [11 + next(NUMBERS) % 300, *range(20, 100)]
    return [server.ask("/v1/completions", {"prompt": prompt, "max_tokens": 4})]


def words(server):
    """A prompt of words, which a tokenizer encodes."""
    prompt = f"hello {next(NUMBERS)}"
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


def talk(server):
    """A conversation whose tokens are kept in a file."""
    return [_say(server, [_question()])]


def continued(server):
    """A conversation that goes on when so many others have come that only its file is left."""
    turns = [_question()]
    answers = [_say(server, turns)]
    for _ in range(MAX_PROMPTS_OF_CALLER):
        answers += chat(server)
    turns += [{"role": "assistant", "content": "So."}, {"role": "user", "content": "And then?"}]
    return [*answers, _say(server, turns)]


def _question():
    return {"role": "user", "content": f"{next(NUMBERS)} " + "a long question, " * 12}


def _say(server, turns):
    return server.ask("/v1/chat/completions", {"messages": turns, "max_tokens": 4})


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
    status, body = sent = sent_file(server, lines)
    if status != 200:
        return [sent]
    return [sent, server.ask(f"/v1/files/{json.loads(body)['id']}", method="DELETE")]


def sent_file(server, data):
    parts = (
        b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        + data
        + b"\r\n--b--\r\n"
    )
    return server.ask(
        "/v1/files", parts, headers={"content-type": "multipart/form-data; boundary=b"}
    )


def named_file(server):
    """A chat that names a file by its id, which is deleted again."""
    status, body = sent = sent_file(server, b"hi")
    if status != 200:
        return [sent]
    file = json.loads(body)["id"]
    part = {"type": "file", "file": {"file_id": file}}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
    told = server.ask("/v1/chat/completions", body)
    return [told, server.ask(f"/v1/files/{file}", method="DELETE")]


def parts(server):
    """A file that is uploaded in a part, and deleted."""
    form = {"filename": "a", "purpose": "user_data", "bytes": 2, "mime_type": "text/plain"}
    status, body = answer = server.ask("/v1/uploads", form)
    if status != 200:
        return [answer]
    path = f"/v1/uploads/{json.loads(body)['id']}"
    head = b'--b\r\ncontent-disposition: form-data; name="data"; filename="a"\r\n\r\n'
    data = head + b"hi\r\n--b--\r\n"
    boundary = {"content-type": "multipart/form-data; boundary=b"}
    status, body = answer = server.ask(f"{path}/parts", data, headers=boundary)
    if status != 200:
        return [answer, server.ask(f"{path}/cancel", b"")]
    done = {"part_ids": [json.loads(body)["id"]]}
    status, body = answer = server.ask(f"{path}/complete", done)
    if status != 200:
        return [answer]
    return [answer, server.ask(f"/v1/files/{json.loads(body)['file']['id']}", method="DELETE")]


def batch(server):
    """A batch of two lines, which completes, however often the disk fails."""
    body = {"model": "m", "prompt": "hi", "max_tokens": 2}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
        for name in "ab"
    ]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    status, sent = answer = sent_file(server, data)
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


def adapted(server):
    """An adapter that a client loads and unloads."""
    adapter = adapter_of(tiny_model("llama"))
    loaded = server.ask("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": str(adapter)})
    if loaded[0] != 200:
        return [loaded]
    return [loaded, server.ask("/v1/unload_lora_adapter", {"lora_name": "a"})]


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
        return {GRAMMARS: grammar, TEMPLATES: chat, PICTURES: seen, TOKENIZERS: words}[kind](server)

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


EVERY = (text, stream, chat, grammar, restored, upload, named_file, parts, batch,
         claude_batch, created, look("/v1/cpu"), look("/metrics"))  # fmt: skip
