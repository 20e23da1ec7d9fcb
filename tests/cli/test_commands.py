"""The output of the commands `config`, `program`, `pull`, `models` and `serve`."""

import asyncio
import json
import os
from types import SimpleNamespace

import pytest

from cpuserve.api.lifecycle import serve
from cpuserve.base.errors import ModelError
from cpuserve.cli import listings
from cpuserve.cli import main as cli
from cpuserve.loader.builtin import BUILTIN
from cpuserve.models import MODELS
from cpuserve.platforms.cpu import CpuPlatform
from tests.helpers.tiny import tiny_model

SMALL = ("--max-model-len=128", "--kv-cache-memory=16MiB", "--max-num-batched-tokens=64")


@pytest.fixture(scope="module")
def model():
    return str(tiny_model("llama"))


def run(capsys, *argv):
    code = cli.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def test_models_lists_every_name_and_architecture(capsys):
    code, out, _ = run(capsys, "models")
    lines = out.splitlines()
    lines = lines[lines.index("Built-in models (cpuserve serve NAME):") :]
    split = lines.index("Architectures (safetensors directories, Hugging Face ids, GGUF files):")
    assert code == 0
    assert [line.split()[0] for line in lines[1:split]] == list(BUILTIN)
    assert [line.strip() for line in lines[split + 1 :]] == list(MODELS.names())


def test_models_supported_prints_the_page_of_models_and_the_kernels_of_this_cpu(capsys):
    code, out, _ = run(capsys, "models", "--supported")
    assert code == 0
    assert out.startswith(listings.page())
    kernels = [line.split(" | ") for line in out.splitlines() if line.startswith("| linear.q4_k ")]
    levels = CpuPlatform().host().isa_levels
    assert [row.strip(" |") for row in kernels[0][1:]] == [
        CpuPlatform().kernels(level)["linear.q4_k"] for level in levels
    ]


def test_pull_writes_the_path_and_nothing_else_to_stdout(capsys, monkeypatch, tmp_path):
    seen = []

    def resolve_model(name, *, revision, progress, paths):
        seen.append((name, revision))
        progress("download", 1, 2)
        return tmp_path

    monkeypatch.setattr("cpuserve.loader.hub.resolve_model", resolve_model)
    code, out, err = run(capsys, "pull", "owner/model", "--revision", "v2")
    assert (code, out, err) == (0, f"{tmp_path}\n", "")
    assert seen == [("owner/model", "v2")]


def test_pull_of_what_cannot_be_had_is_one_line(capsys, monkeypatch):
    def resolve_model(name, **_):
        msg = "model owner/model cannot be fetched: the hub cannot be reached"
        raise ModelError(msg)

    monkeypatch.setattr("cpuserve.loader.hub.resolve_model", resolve_model)
    code, out, err = run(capsys, "pull", "owner/model")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "cpuserve: error: model owner/model cannot be fetched: the hub cannot be reached"
    ]


@pytest.mark.parametrize(
    ("command", "name", "told"),
    [
        ("pull", "llama3", "'llama3' is not a model: give a Hugging Face id (owner/model, "),
        ("pull", "qwen2.5:7b", "Ollama's names are not known here"),
        ("pull", "smolm2:135m", "did you mean smollm2:135m? give a Hugging Face id"),
        ("serve", "smolm2:135m", "did you mean smollm2:135m?"),
        ("serve", "llama3", "for GGUF files owner/model:Q4_K_M), a path or a built-in name"),
        ("config", "smolm2:135m", "did you mean smollm2:135m?"),
    ],
)
def test_a_name_that_is_no_model_is_told_what_would_be_one(capsys, command, name, told):
    code, _, err = run(capsys, command, name)
    assert code == 2
    assert told in err
    assert "llama3" in err or "built-in name (smollm2:135m" in err
    assert ("path" in err) == (command != "pull")


def test_config_as_json_and_as_a_table_say_the_same(capsys, model):
    code, out, _ = run(capsys, "config", model, *SMALL, "--json")
    decided = json.loads(out)
    assert code == 0
    code, table, _ = run(capsys, "config", model, *SMALL)
    assert code == 0
    by_name = {decision["field"]: decision for decision in decided}
    length = by_name["max_model_len"]
    assert (length["asked"], length["source"], length["got"]) == (128, "flag --max-model-len", 128)
    assert length["why"] in table
    assert all(name in table for name in by_name)


def test_config_changed_has_the_options_that_somebody_set_and_no_others(capsys, model, monkeypatch):
    monkeypatch.setenv("CPUSERVE_MAX_NUM_SEQS", "3")
    words = ("config", model, "--api-key", "secret", "--port=9", "--changed")
    monkeypatch.setattr("cpuserve.config.env.environment", lambda: os.environ)
    code, out, _ = run(capsys, *words, "--json")
    assert code == 0
    found = {decision["field"]: decision for decision in json.loads(out)}
    assert found.keys() >= {"model", "max_num_seqs", "api_key", "port"}
    assert found["max_num_seqs"]["source"] == "env CPUSERVE_MAX_NUM_SEQS"
    assert not [name for name, each in found.items() if each["source"] == "default"]
    assert "secret" not in out
    code, table, _ = run(capsys, *words)
    assert len(table.splitlines()) == 2 + len(found)
    assert all(name in table for name in found)


def test_program_lists_the_operations_of_each_layer(capsys, model):
    code, out, _ = run(capsys, "program", model, "--json")
    records = json.loads(out)
    assert code == 0
    code, table, _ = run(capsys, "program", model)
    assert code == 0
    config = json.loads((tiny_model("llama") / "config.json").read_text())
    attention = [r for r in records if "attention" in json.dumps(r)]
    assert len(attention) >= config["num_hidden_layers"]
    assert table.count("attention") >= config["num_hidden_layers"]


def test_a_model_that_is_missing_fails_each_command_with_one_line(capsys, tmp_path):
    for command, *more in (("config",), ("program",), ("serve", "--uds", str(tmp_path / "http"))):
        code, out, err = run(capsys, command, "./nope", *more)
        assert (code, out) == (2, "")
        assert err.splitlines() == ["cpuserve: error: model path ./nope does not exist"]


def test_serve_hands_over_the_options_and_writes_the_banner_when_ready(capsys, monkeypatch, model):
    seen = SimpleNamespace()

    def run_serve(prepare, http, *, on_ready, progress, others, further=None):
        prepared = prepare(progress)

        class Client:
            async def ask(self, what):
                assert what == "roofline"
                assert "\n  API       http://127.0.0.1:7777/v1\n" in capsys.readouterr().out
                print("measured")  # while the engine is busy, this waits
                return {}

        seen.config, seen.http, seen.others = prepared.resolved.config, http, others
        asyncio.run(on_ready(prepared, "http://127.0.0.1:7777", Client()))
        return 1

    monkeypatch.setattr(serve, "serve", run_serve)
    options = ["--port=7777", "--api-key=k", "--max-num-queued-reqs=9", "--request-timeout=33"]
    options += [f"--also-serve=b={model}"]
    code, out, _ = run(capsys, "serve", model, *SMALL, *options)
    assert code == 1, "the engine's death"
    assert seen.config.max_model_len == 128
    assert (seen.http.port, seen.http.api_key) == (7777, ["k"])
    assert (seen.http.max_num_queued_reqs, seen.http.request_timeout) == (9, 33)
    ((other, prepare_other),) = seen.others
    assert (other.name, prepare_other(0).resolved.config.served_model_names) == ("b", ["b"])
    assert out.splitlines()[0] == "measured"
    assert out.splitlines()[1].split()[0] == "roofline"
    assert all(len(line) <= 80 or " " not in line.strip() for line in out.splitlines())
    assert "not measured" in out
