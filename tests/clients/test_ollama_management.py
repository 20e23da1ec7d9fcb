"""The client of Ollama manages models of a server: create, copy, show, run, delete, pull, push."""

import hashlib
from contextlib import contextmanager

import httpx
import ollama
import pytest

from tests.helpers.adapter import adapter_of
from tests.helpers.full_disk import full_disk
from tests.helpers.patience import PATIENCE_S
from tests.helpers.served import running_server
from tests.helpers.tiny import tiny_model

JINJA = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
HI = [{"role": "user", "content": "hi"}]
SHORT = {"num_predict": 4, "temperature": 0}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(place):
    names = ["--served-model-name", "tiny", "--models-dir", str(place), "--models-count", "6"]
    with running_server(tiny_model("llama"), *names) as running:
        yield running


@contextmanager
def client_of(server):
    with ollama.Client(host=server.url) as client:
        yield client


@pytest.fixture
def client(server):
    with client_of(server) as client:
        before = {model.model for model in client.list().models}
        yield client
        for model in client.list().models:
            if model.model not in before:
                client.delete(model.model)


def prompt_of(server, model, messages=HI):
    return server.post("/apply-template", model=model, messages=messages)["prompt"]


def refusal(work):
    def whole():
        result = work()
        if not isinstance(result, ollama.ProgressResponse | ollama.StatusResponse):
            list(result)

    with pytest.raises(ollama.ResponseError) as raised:
        whole()
    return raised.value.status_code, raised.value.error


def files_of(client, folder):
    return {
        path.name: client.create_blob(path) for path in folder.iterdir() if path.suffix != ".txt"
    }


def test_a_created_model_adds_its_texts_and_parameters(client, server):
    steps = client.create(
        "mario",
        from_="tiny",
        system="You are Mario.",
        messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        parameters={"num_predict": 3, "temperature": 0, "stop": ["zz", "yy"]},
        license="Free.",
        stream=True,
    )
    assert [step.status for step in steps][-1] == "success"
    own = [{"role": "system", "content": "You are Mario."},
           {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]  # fmt: skip
    assert prompt_of(server, "mario") == prompt_of(server, "tiny", [*own, *HI])
    spoken = {"role": "system", "content": "Be kind."}
    assert prompt_of(server, "mario", [spoken, *HI]) == prompt_of(
        server, "tiny", [spoken, *own[1:], *HI]
    )
    reply = client.chat("mario:latest", HI)
    assert (reply.model, reply.eval_count, reply.done_reason) == ("mario", 3, "length")
    same = client.chat("tiny", [*own, *HI], options={"num_predict": 3, "temperature": 0})
    assert reply.message.content == same.message.content
    longer = server.post("/v1/chat/completions", model="mario", messages=HI, max_tokens=5)
    assert (longer["model"], longer["usage"]["completion_tokens"]) == ("mario", 5)
    shown = client.show("mario")
    assert [line.split()[0] for line in shown.parameters.splitlines()].count("stop") == 2
    assert {"FROM tiny", "PARAMETER num_predict 3"} <= {*shown.modelfile.splitlines()}
    assert (shown.license, shown.details.parent_model) == ("Free.", "tiny")
    assert "mario" in [model.model for model in client.ps().models], "it shares an engine"


@pytest.mark.parametrize("name", ["by-turn", "by-message"])
def test_a_template_in_the_syntax_of_go_renders_the_prompts(client, server, name):
    template = {
        "by-turn": "{{ if .System }}<{{ .System }}>{{ end }}Q: {{ .Prompt }} A: {{ .Response }};",
        "by-message": "{{ range .Messages }}[{{ .Role }}] {{ .Content }} {{- end }}",
    }[name]
    client.create(name, from_="tiny", system="S", template=template)
    talk = [*HI, {"role": "assistant", "content": "yes"}, *HI]
    expected = {
        "by-turn": "<S>Q: hi A: yes;Q: hi A: ",
        "by-message": "[system] S[user] hi[assistant] yes[user] hi",
    }
    assert prompt_of(server, name, talk) == expected[name]
    assert client.chat(name, talk, options=SHORT).eval_count <= 4


def test_a_shown_modelfile_makes_the_same_model(client, server):
    client.create("one", from_="tiny", system='Say "yes".\nNo.', template=JINJA,
                  parameters={"temperature": 0.5, "stop": ["a b"]})  # fmt: skip
    shown = server.post("/api/show", model="one")
    server.post("/api/create", model="two", modelfile=shown["modelfile"], stream=False)
    again = server.post("/api/show", model="two")
    for field in ("system", "template", "parameters"):
        assert again[field] == shown[field]
    expected = '[system] Say "yes".\nNo.\n[user] hi\n[assistant] '
    assert prompt_of(server, "two") == prompt_of(server, "one") == expected


def test_models_are_copied_and_deleted(client, server):
    client.create("mario", from_="tiny", system="You are Mario.")
    assert client.copy("mario", "luigi").status == "success"
    assert client.copy("tiny", "plain").status == "success"
    assert client.delete("mario").status == "success"
    assert refusal(lambda: client.chat("mario", HI))[0] == 404
    assert "You are Mario." in prompt_of(server, "luigi")
    assert prompt_of(server, "plain") == prompt_of(server, "tiny")
    client.create("peach", from_="luigi", parameters={"temperature": 0})
    client.delete("luigi")
    assert "You are Mario." in prompt_of(server, "peach"), "it has all of its own"


@pytest.mark.deep
def test_files_become_a_model_with_an_engine_of_its_own(client, server):
    """As `ollama create -f Modelfile` sends them: HEAD, then POST of each file, then create."""
    folder = tiny_model("qwen2", seed=3)
    files = {}
    for path in folder.iterdir():
        if path.suffix not in (".json", ".safetensors"):
            continue
        digest = "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
        url = f"{server.url}/api/blobs/{digest}"
        assert httpx.head(url).status_code == 404
        assert httpx.post(url, content=path.read_bytes(), timeout=PATIENCE_S).status_code == 201
        assert httpx.head(url).status_code == 200
        files[path.name] = digest
    client.create("own", files=files, system="Be kind.", stream=False)
    assert "own" not in [model.model for model in client.ps().models]
    reply = client.generate("own", "hi", options=SHORT)
    assert "own" in [model.model for model in client.ps().models]
    assert reply.eval_count == 4
    shown = server.post("/api/show", model="own", verbose=True)
    assert shown["details"]["family"] == "qwen2"
    assert "model.embed_tokens.weight" in {tensor["name"] for tensor in shown["tensors"]}
    with running_server(folder, "--served-model-name", "own") as alone:
        same = alone.post("/api/generate", model="own", prompt="hi", system="Be kind.",
                          options=SHORT, stream=False)  # fmt: skip
    assert reply.response == same["response"]


def test_an_adapter_of_this_model_is_used_and_one_of_another_is_refused(client, server, tmp_path):
    good = files_of(client, adapter_of(tiny_model("llama")))
    client.create("polite", from_="tiny", adapters=good)
    asked = {"raw": True, "options": SHORT}
    assert client.generate("polite", "a b c", **asked).response != (
        client.generate("tiny", "a b c", **asked).response
    )
    other = files_of(client, adapter_of(tiny_model("llama", hidden_size=128)))
    status, told = refusal(lambda: client.create("rude", from_="tiny", adapters=other))
    assert status == 400
    assert "adapter" in told
    assert str(tmp_path.parent) not in told
    assert refusal(lambda: client.show("rude"))[0] == 404


@pytest.mark.deep
def test_models_are_there_after_a_restart(tmp_path):
    names = ["--served-model-name", "tiny", "--models-dir", str(tmp_path)]
    with running_server(tiny_model("llama"), *names) as first, client_of(first) as client:
        client.create("mario", from_="tiny", system="You are Mario.")
    with running_server(tiny_model("llama"), *names) as second, client_of(second) as client:
        assert "You are Mario." in prompt_of(second, "mario")
        client.delete("mario")
    assert not list((tmp_path / "models").iterdir())
    (tmp_path / "models" / "x.json").write_text("{")
    other = ["--served-model-name", "other", "--models-dir", str(tmp_path)]
    with running_server(tiny_model("llama"), *other) as third, client_of(third) as client:
        assert [card.model for card in client.list().models] == ["other"]


def test_a_pull_of_a_served_model_succeeds_at_once_and_of_no_model_fails(client):
    assert client.pull("tiny").status == "success"
    assert [step.status for step in client.pull("tiny", stream=True)][-1] == "success"
    for name in ("nobody", "qwen3:4b"):
        status, told = refusal(lambda name=name: client.pull(name))
        assert status == 404
        assert name in told
        assert refusal(lambda name=name: client.pull(name, stream=True))[0] == 404
    assert refusal(lambda: client.push("tiny"))[0] == 400


@pytest.mark.deep
def test_files_are_checked_and_bounded(tmp_path):
    bounds = ["--models-dir", str(tmp_path), "--models-bytes", "2000", "--models-count", "1"]
    with running_server(tiny_model("llama"), "--served-model-name", "tiny", *bounds) as server:
        url = f"{server.url}/api/blobs/"
        digest = "sha256:" + hashlib.sha256(b"abc").hexdigest()
        wrong = httpx.post(url + digest, content=b"abd", timeout=PATIENCE_S)
        assert wrong.status_code == 400
        assert "digest" in wrong.json()["error"]
        assert httpx.post(url + "nonsense", content=b"", timeout=PATIENCE_S).status_code == 400
        assert httpx.head(url + digest).status_code == 404
        large = httpx.post(url + digest, content=b"a" * 3000, timeout=PATIENCE_S)
        assert large.status_code == 413
        assert "--models-bytes" in large.json()["error"]
        page = {"origin": "http://evil.example"}
        sent = httpx.post(url + digest, content=b"abc", headers=page, timeout=PATIENCE_S)
        assert sent.status_code == 415
        assert not list((tmp_path / "blobs").iterdir())
        for method, path, body in (
            ("POST", "/api/create", {"model": "a", "from": "tiny"}),
            ("POST", "/api/copy", {"source": "tiny", "destination": "a"}),
            ("DELETE", "/api/delete", {"model": "tiny"}),
            ("POST", "/api/pull", {"model": "tiny"}),
        ):
            sent = httpx.request(
                method, server.url + path, json=body, headers=page, timeout=PATIENCE_S
            )
            assert sent.status_code == 415
        with client_of(server) as client:
            client.copy("tiny", "a")
            assert "--models-count" in refusal(lambda: client.copy("tiny", "b"))[1]
            served = refusal(lambda: client.delete("tiny"))
            assert served[0] == 400
            assert "start" in served[1]
            assert refusal(lambda: client.delete("nobody"))[0] == 404
            assert refusal(lambda: client.delete("../a"))[0] == 400


def test_on_a_full_disk_nothing_is_created_and_the_error_says_why(client, server):
    data = b"of a model"
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    client.create("kept", from_="tiny", system="A")
    before = [model.model for model in client.list().models]
    with full_disk(server.pid):
        for work in (
            lambda: client.create("other", from_="tiny", system="B"),
            lambda: client.create("kept", from_="tiny", system="B"),
            lambda: client.copy("kept", "other"),
        ):
            status, told = refusal(work)
            assert status == 507
            assert "--models-dir cannot be written, because" in told
        answer = httpx.post(f"{server.url}/api/blobs/{digest}", content=data, timeout=PATIENCE_S)
        assert answer.status_code == 507
        assert "--models-dir cannot be written" in answer.json()["error"]
        assert [model.model for model in client.list().models] == before
    assert 'SYSTEM """A"""' in client.show("kept").modelfile
    answer = httpx.post(f"{server.url}/api/blobs/{digest}", content=data, timeout=PATIENCE_S)
    assert answer.status_code == 201


def test_a_server_without_a_directory_says_how_to_get_one(shared_server):
    with client_of(shared_server(tiny_model("llama"), "--served-model-name", "tiny")) as client:
        status, told = refusal(lambda: client.create("a", from_="tiny"))
        assert (status, "--models-dir" in told) == (404, True)
        assert client.pull("tiny").status == "success"
