"""The contract of Ollama's endpoints that create, copy, delete and pull models."""

import functools
import hashlib
import json
import tempfile

import pytest

from cpuserve.api.ollama.created.directory import ModelDirectory
from cpuserve.api.ollama.created.store import CreatedModels
from tests.api.fakes import Api
from tests.contract.table import NO_FLAG, NO_OBJECT, NO_TEXT

CREATE, COPY, DELETE, PULL, PUSH = (
    f"/api/{verb}" for verb in ("create", "copy", "delete", "pull", "push")
)


@functools.cache
def server():
    """An app that keeps models in a directory for temporary files."""
    api, place = Api(), tempfile.TemporaryDirectory()
    directory = ModelDirectory(place.name, 1 << 20, 100)
    sources = {"tiny": "/models/tiny"}
    api.state.created = CreatedModels(directory, api.state.models, None, sources)
    api.place = place  # it is deleted with the app
    return api


def names():
    return [model["name"] for model in server().get("/api/tags").json()["models"]]


GOOD = {
    "model": ("new", "new:latest", "owner/new:v1", "N_e.w-1"),
    "from": ("tiny", "tiny:latest", "alias"),
    "system": ("", "Be kind.", None),
    "template": (None, "", "{{ messages[0].content }}"),
    "parameters": (
        None,
        {},
        {"temperature": 0.5, "num_ctx": 4096, "num_predict": -1},
        {"stop": ["a", "b"], "seed": 3, "top_k": 5.0, "repeat_penalty": 1.1},
        {"mirostat": 2, "repeat_last_n": 64},
        {"penalize_newline": True, "tfs_z": 1.0},  # refused with every other value
    ),
    "messages": (None, [], [{"role": "user", "content": "a"}]),
    "license": (None, "Free.", ["a", "b"]),
    "modelfile": ('FROM tiny\nPARAMETER top_k 3\nSYSTEM """a\nb"""', "# a\nfrom tiny"),
    "stream": (True, None),
}
TYPES = {
    "model": NO_TEXT,
    "from": NO_TEXT,
    "files": NO_OBJECT,
    "adapters": NO_OBJECT,
    "template": NO_TEXT,
    "system": NO_TEXT,
    "parameters": NO_OBJECT,
    "messages": ("x", {}, [1]),
    "license": (1, {}, [1]),
    "quantize": NO_TEXT,
    "modelfile": NO_TEXT,
    "stream": NO_FLAG,
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in GOOD.items() for v in values])
def test_a_model_is_created(field, value):
    body = {"model": "new", "from": "tiny", "stream": False, field: value}
    response = server().post(CREATE, **body)
    assert response.status_code == 200, response.text
    last = json.loads(response.text.splitlines()[-1])
    assert last == {"status": "success"}
    name = body["model"].removesuffix(":latest")
    assert name in names()
    assert server().request("DELETE", DELETE, json={"model": name}).status_code == 200
    assert names() == ["tiny", "alias"]


@pytest.mark.parametrize(
    ("field", "value"), [(f, v) for f, values in TYPES.items() for v in values]
)
def test_a_value_of_another_type_is_refused(field, value):
    response = server().post(CREATE, **{"model": "new", "from": "tiny", field: value})
    assert response.status_code == 400, response.text
    assert list(response.json()) == ["error"]
    assert field in response.json()["error"]
    assert names() == ["tiny", "alias"]


ZEROS = "sha256:" + "0" * 64
WRONG = {
    "no name": ({"model": ""}, 400, "model is missing"),
    "dots": ({"model": "../../etc/passwd"}, 400, "no name"),
    "inner dots": ({"model": "a/..b"}, 400, "no name"),
    "start": ({"model": "tiny"}, 400, "server's start"),
    "nothing": ({"from": None}, 400, "from or files"),
    "both": ({"files": {"a.gguf": ZEROS}}, 400, "from or files"),
    "unknown": ({"from": "nobody"}, 404, "does not exist"),
    "path": ({"from": "/etc/passwd"}, 400, "no name"),
    "go": ({"template": '{{ if .Prompt }}{{ printf "%s" .Prompt }}{{ end }}'}, 400, "Go"),
    "jinja": ({"template": "{% for"}, 400, "template"),
    "parameter": ({"parameters": {"tfs_z": 0.5}}, 400, "tfs_z"),
    "unknown parameter": ({"parameters": {"nonsense": 1}}, 400, "nonsense"),
    "range": ({"parameters": {"top_p": 7}}, 400, "top_p"),
    "stops": ({"parameters": {"stop": ["x"] * 65}}, 400, "stop has 65 strings"),
    "long stop": ({"parameters": {"stop": "x" * 5000}}, 400, "stop has a longer string"),
    "type": ({"parameters": {"temperature": "hot"}}, 400, "temperature"),
    "messages": ({"messages": [{"content": 1}]}, 400, "messages"),
    "quantize": ({"quantize": "q4_K_M"}, 400, "int8"),
    "renderer": ({"renderer": "x"}, 400, "renderer"),
    "pickle": ({"from": None, "files": {"pytorch_model.bin": ZEROS}}, 400, "pytorch_model.bin"),
    "folder": ({"from": None, "files": {"../a.gguf": ZEROS}}, 400, "no name of a file"),
    "digest": ({"from": None, "files": {"a.gguf": "sha256:1"}}, 400, "no digest"),
    "absent": ({"from": None, "files": {"a.gguf": ZEROS}}, 404, "/api/blobs"),
    "modelfile": ({"from": None, "modelfile": "SYSTEM x"}, 400, "FROM"),
    "modelfile path": ({"from": None, "modelfile": "FROM ./x.gguf"}, 400, "/api/blobs"),
    "modelfile adapter": ({"modelfile": "FROM tiny\nADAPTER ./a"}, 400, "/api/blobs"),
    "modelfile open": ({"modelfile": 'FROM tiny\nSYSTEM """x'}, 400, "no end"),
    "modelfile word": ({"modelfile": "FROM tiny\nFORM x"}, 400, "no instruction"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_created_is_refused_by_name(case):
    fields, status, told = WRONG[case]
    response = server().post(CREATE, **{"model": "new", "from": "tiny", **fields})
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    assert told in response.json()["error"]
    assert names() == ["tiny", "alias"]


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        (COPY, {"source": "tiny"}, 400, "destination"),
        (COPY, {"source": "nobody", "destination": "a"}, 404, "not found"),
        (COPY, {"source": "tiny", "destination": "../a"}, 400, "destination"),
        (COPY, {"source": "tiny", "destination": "alias"}, 400, "destination"),
        (COPY, {"source": 1, "destination": "a"}, 400, "source"),
        (DELETE, {}, 400, "model is missing"),
        (DELETE, {"model": "nobody"}, 404, "not found"),
        (DELETE, {"model": "tiny"}, 400, "server's start"),
        (DELETE, {"model": "alias:latest"}, 400, "server's start"),
        (DELETE, {"model": ".."}, 400, "no name"),
        (PULL, {}, 400, "model is missing"),
        (PULL, {"model": "nobody"}, 404, "nobody"),
        (PULL, {"model": "../x"}, 400, "no name"),
        (PULL, {"model": "a/b", "insecure": True}, 400, "insecure"),
        (PULL, {"model": "tiny", "stream": "yes"}, 400, "stream"),
        (PUSH, {"model": "tiny"}, 400, "push is not supported"),
    ],
)
def test_other_requests_are_refused_by_name(path, body, status, told):
    method = "DELETE" if path == DELETE else "POST"
    response = server().request(method, path, json=body)
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    assert told in response.json()["error"]
    assert names() == ["tiny", "alias"]


def test_older_clients_call_the_model_name():
    assert server().post(CREATE, name="new", modelfile="FROM tiny").status_code == 200
    assert server().post("/api/show", name="new").status_code == 200
    assert server().request("DELETE", DELETE, json={"name": "new"}).status_code == 200


def test_a_file_is_there_after_it_was_sent():
    digest = "sha256:" + hashlib.sha256(b"abc").hexdigest()
    path = f"/api/blobs/{digest}"
    assert server().request("HEAD", path).status_code == 404
    assert server().request("POST", path, content=b"abd").status_code == 400
    assert server().request("POST", path, content=b"abc").status_code == 201
    assert server().request("HEAD", path).status_code == 200
    assert server().request("POST", "/api/blobs/sha256:1", content=b"").status_code == 400


def test_a_large_body_and_a_web_page_are_refused():
    large = {"model": "new", "from": "tiny", "system": "x" * (1 << 25)}
    assert server().post(CREATE, **large).status_code == 413
    page = {"origin": "http://evil.example"}
    for method, path in (("POST", CREATE), ("POST", COPY), ("DELETE", DELETE), ("POST", PULL)):
        body = {"model": "tiny", "source": "tiny", "destination": "b"}
        response = server().request(method, path, json=body, headers=page)
        assert response.status_code == 415, path
        assert "change what the server keeps" in response.json()["error"]


def test_a_created_model_of_every_dialect_has_its_messages():
    api = server()
    assert api.post(CREATE, model="kind", **{"from": "tiny"}, system="Be kind.").status_code == 200
    messages = [{"role": "user", "content": "hi"}]
    asked = len(api.engine.asked)
    own = {"model": "kind", "messages": messages, "max_tokens": 5}
    given = {**own, "model": "tiny", "messages": [{"role": "system", "content": "Be kind."}]}
    given["messages"] += messages
    for body in (own, given):
        assert api.post("/v1/chat/completions", **body).status_code == 200
    for body in (own, {**own, "model": "tiny", "system": "Be kind."}):
        assert api.post("/v1/messages", **body).status_code == 200
    for body in (own, given):
        assert api.post("/api/chat", **body).status_code == 200
    prompts = [ids for ids, _ in api.engine.asked[asked:]]
    assert len(prompts) == 6
    assert all(prompt == prompts[0] for prompt in prompts)
    assert api.request("DELETE", DELETE, json={"model": "kind"}).status_code == 200


@pytest.mark.parametrize(
    "text",
    [
        'FROM tiny\nSYSTEM """\n' + "\n" * (1 << 20),
        'FROM tiny\nLICENSE a\nMESSAGE user """' + "a\n" * (1 << 20),
    ],
)
def test_a_modelfile_with_an_open_text_is_read_once(text):
    """Each of the lines is read once: to search all earlier ones again would take hours."""
    response = server().post(CREATE, model="new", modelfile=text)
    assert response.status_code == 400
    assert "has no end: close it with" in response.json()["error"]


def test_a_text_of_many_lines_ends_at_its_closing_quotes():
    text = 'FROM tiny\nSYSTEM """a\n""\nb"""\nMESSAGE user "c\nd"\nPARAMETER top_k 3'
    assert server().post(CREATE, model="new", modelfile=text, stream=False).status_code == 200
    shown = server().post("/api/show", model="new").json()
    assert shown["system"] == 'a\n""\nb'
    assert shown["messages"] == [{"role": "user", "content": "c\nd"}]
    assert server().request("DELETE", DELETE, json={"model": "new"}).status_code == 200
