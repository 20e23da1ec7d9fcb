"""An engine that starts again reads the files of the first start, or does not start at all."""

import json
import os
import shutil
import signal

import psutil
import pytest

from cpuserve.core.results import DAMAGED_STEPS
from tests.api.fakes import Api
from tests.helpers.patience import wait_until
from tests.helpers.served import running_server
from tests.helpers.tiny import tiny_model

ASK = {"prompt": [11, 12, 13], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
OTHER = {"seed": 7}
NAME = "model.safetensors"


def asked(server, path, body=None):
    """Return (status, body as text) of GET or POST `path`."""
    import http.client

    connection = http.client.HTTPConnection(*server.url.removeprefix("http://").split(":"))
    headers = {"content-type": "application/json"}
    how = ("GET", path) if body is None else ("POST", path, json.dumps(body), headers)
    connection.request(*how)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def completion(server, **fields):
    status, text = asked(server, "/v1/completions", {**ASK, **fields})
    return status, json.loads(text)["choices"][0]["text"] if status == 200 else text


@pytest.fixture
def model(tmp_path):
    """A model, and the weights of another one of the same shapes, in the file `other`."""
    path = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    shutil.copyfile(tiny_model("llama", **OTHER) / "model.safetensors", tmp_path / "other")
    return path


def replace(model):
    """Move other weights over the model's; return what puts them back."""
    weights = model / "model.safetensors"
    kept = model.parent / "kept"
    weights.rename(kept)
    shutil.copyfile(model.parent / "other", weights)
    return lambda: kept.replace(weights)


def kill_engine(server):
    """Kill the engine, which is the only child with a model."""
    largest = max(psutil.Process(server.pid).children(), key=lambda child: child.memory_info().rss)
    os.kill(largest.pid, signal.SIGKILL)


def test_a_killed_engine_does_not_serve_a_file_that_was_moved_over_its_model(model):
    with running_server(model, "--served-model-name", "m") as server:
        before = completion(server)
        assert before[0] == 200
        put_back = replace(model)
        kill_engine(server)
        wait_until(lambda: NAME in asked(server, "/health")[1])
        status, text = asked(server, "/health")
        assert status == 503
        assert "replaced or changed" in json.loads(text)["error"]["message"]
        status, text = completion(server)
        assert (status, NAME in text) == (503, True)
        put_back()
        wait_until(lambda: asked(server, "/health")[0] == 200)
        assert completion(server) == before


def overwrite(file):
    """Write other bytes into a file that a server has open."""
    with file.open("r+b") as stream:
        stream.write(bytes(byte ^ 16 for byte in file.read_bytes()))


@pytest.mark.deep
def test_a_server_does_not_go_on_with_a_model_that_was_overwritten(tmp_path):
    made = tiny_model("qwen3-moe", tie_word_embeddings=False)  # reads rows of the file
    model = shutil.copytree(made, tmp_path / "model")
    cache = ("env", f"CPUSERVE_CACHE={tmp_path / 'cache'}")
    on_disk = ("--weights-on-disk", "800KiB", "--served-model-name", "m")
    with running_server(model, *on_disk, prefix=cache) as server:
        assert completion(server)[0] == 200
        overwrite(model / NAME)
        status, text = completion(server)
        assert (status, NAME in text) == (503, True)
        wait_until(lambda: "replaced or changed" in asked(server, "/health")[1])
        status, text = asked(server, "/health")
        assert (status, NAME in text) == (503, True)


@pytest.mark.deep
@pytest.mark.parametrize("change", [overwrite, lambda file: os.truncate(file, 4096)])
def test_packed_weights_that_change_in_use_are_made_anew(tmp_path, change):
    cache = ("env", f"CPUSERVE_CACHE={tmp_path / 'cache'}")
    on_disk = ("--weights-on-disk", "always", "--served-model-name", "m")
    with running_server(tiny_model("qwen3-moe"), *on_disk, prefix=cache) as server:
        before = completion(server)
        assert before[0] == 200
        (file,) = (tmp_path / "cache").rglob("*.weights")
        change(file)
        status, text = completion(server)
        assert (status, "weights" in text) == (503, True)
        wait_until(lambda: asked(server, "/health")[0] == 200)
        assert completion(server) == before


@pytest.mark.deep
def test_a_model_that_sleeps_is_not_woken_with_another_file(model):
    with running_server(model, "--served-model-name", "m", "--admin-routes") as server:
        before = completion(server)
        assert asked(server, "/sleep", {})[0] == 200
        assert asked(server, "/health")[0] == 200
        put_back = replace(model)
        status, text = completion(server)
        assert (status, NAME in text) == (503, True)
        status, text = asked(server, "/health")
        assert (status, json.loads(text)["status"], NAME in text) == (503, "failed", True)
        put_back()
        wait_until(lambda: completion(server)[0] == 200)
        assert completion(server) == before
        assert asked(server, "/health")[0] == 200


@pytest.mark.deep
def test_a_further_model_is_not_loaded_again_from_another_file(model):
    first = tiny_model("qwen2")
    models = ("--served-model-name", "first", "--also-serve", f"m={model}", "--admin-routes")
    with running_server(first, *models) as server:
        before = completion(server, model="m")
        assert before[0] == 200
        assert asked(server, "/sleep", {})[0] == 200
        put_back = replace(model)
        status, text = completion(server, model="m")
        assert (status, NAME in text) == (503, True)
        assert completion(server, model="first")[0] == 200
        put_back()
        wait_until(lambda: completion(server, model="m")[0] == 200)
        assert completion(server, model="m") == before


@pytest.mark.deep
def test_grammars_are_not_compiled_with_another_tokenizer(model):
    schema = {"structured_outputs": {"choice": ["yes", "no"]}}
    with running_server(model, "--served-model-name", "m") as server:
        os.utime(model / "tokenizer.json")
        status, text = completion(server, **schema)
        assert (status, "tokenizer.json" in text) == (503, True)
        assert completion(server)[0] == 200, "the engine has its weights already"


def test_damaged_weights_make_health_503_and_requests_are_still_tried():
    api = Api()
    assert api.request("GET", "/health").status_code == 200
    api.engine.stats.damaged = True
    response = api.request("GET", "/health")
    assert response.status_code == 503
    assert response.json()["status"] == "failed"
    assert "The model's weights are damaged" in response.json()["error"]["message"]
    body = {"prompt": "a", "max_tokens": 1}
    assert api.request("POST", "/v1/completions", json=body).status_code == 200


@pytest.mark.deep
def test_a_checkpoint_of_nan_is_reported_by_health(tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    path = shutil.copytree(tiny_model("llama"), tmp_path / "nan")
    weights = load_file(path / "model.safetensors")
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in weights.items()}
    save_file(broken, path / "model.safetensors", {"format": "pt"})
    with running_server(path, "--served-model-name", "m") as server:
        for _ in range(DAMAGED_STEPS):
            assert asked(server, "/health")[0] == 200
            assert completion(server)[0] == 500
        status, text = asked(server, "/health")
        assert (status, "damaged" in text) == (503, True)
