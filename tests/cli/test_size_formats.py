"""`cpuserve size --formats`, `--instance` and `--instances`."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from cpuserve.base.errors import ModelError
from cpuserve.cli.main import main
from cpuserve.cli.size import FORMATS, INSTANCES, Instance, ModelWeights, advice, sizes_on
from cpuserve.loader import hub
from cpuserve.loader.safetensors import SafetensorsStore
from cpuserve.platforms.cpu import CpuPlatform
from tests.helpers.hosts import load_host
from tests.helpers.tiny import tiny_model


@pytest.fixture(scope="module")
def model():
    return Path(tiny_model("llama"))


def printed(capsys, *words):
    assert main(["size", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_the_configuration_alone_gives_the_weights_of_the_files(capsys, model, tmp_path):
    shutil.copy(model / "config.json", tmp_path)
    found = json.loads(printed(capsys, tmp_path, "--instance", "c7i.xlarge", "--json"))
    store = SafetensorsStore(model)
    shapes = [store.get(name).shape for name in store.names()]
    matrices = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    vectors = sum(math.prod(shape) for shape in shapes if len(shape) == 1)
    first = found["formats"][0]
    assert first["format"] == "bf16"
    assert first["weight_bytes"] == 2 * matrices + 4 * vectors


MACHINE = Instance("here", "a CPU", 4, 10_000_000_000, 50e9, "avx2")
WEIGHTS = ModelWeights("m", 4_000_000_000, 3_000_000_000, 0, 100_000, 0, 32_768)


def test_rates_and_contexts_follow_from_bandwidth_and_memory():
    found = {each.format: each for each in sizes_on(MACHINE, WEIGHTS)}
    assert found["bf16"].decode_tokens_per_s == pytest.approx(50e9 / 6e9)
    assert found["int4/q4_k"].decode_tokens_per_s == pytest.approx(50e9 / (3e9 * 4.5 / 8))
    assert found["bf16"].context == 10_000  # 9 GB are usable, and 8 GB are weights
    assert found["int8/q8_0"].context == 32_768  # the model's longest
    larger = ModelWeights("m", 10**10, 10**10, 0, 100_000, 0, 32_768)
    assert [each.context > 0 for each in sizes_on(MACHINE, larger)] == [False] * 2 + [True] * 5


@pytest.mark.parametrize(
    ("billions", "text"),
    [
        (4, "bf16 is the most precise format that fits; int4/q4_k decodes up to 3.6 times as fast"),
        (18, "q3_k is the most precise format that fits, and it loses quality"),
        (99, "no format fits"),
    ],
)
def test_the_advice_names_the_most_precise_format_that_fits(billions, text):
    weights = ModelWeights("m", billions * 10**9, billions * 10**9, 0, 1000, 0, 4096)
    assert text in advice(sizes_on(MACHINE, weights))


def test_a_mixture_reads_only_the_chosen_experts(capsys):
    path = tiny_model("mixtral")
    words = ("--instance", "c7i.xlarge", "--json")
    found = json.loads(printed(capsys, path, *words))["formats"][0]
    read = INSTANCES["c7i.xlarge"].read_bytes_per_s / found["decode_tokens_per_s"]
    assert read < 0.9 * found["weight_bytes"]


def test_the_tables_are_text(capsys, model):
    text = printed(capsys, model, "--instance", "r8g.4xlarge")
    assert "AWS Graviton4" in text
    assert all(name in text for name in FORMATS)
    assert "advice" in text
    text = printed(capsys, model, "--instances")
    assert len([line for line in text.splitlines() if line.split()[:1] and "GiB" in line]) == len(
        INSTANCES
    )
    text = printed(capsys, model, "--formats")
    assert "this machine" in text


def test_an_instance_has_its_share_of_the_memory_channels():
    whole = INSTANCES["m7i.48xlarge"]
    assert (whole.cores, whole.memory_bytes >> 30) == (96, 768)
    assert whole.read_bytes_per_s == pytest.approx(2 * 8 * 4800e6 * 8)
    assert INSTANCES["c7g.16xlarge"].read_bytes_per_s == pytest.approx(307.2e9)


@pytest.mark.parametrize(
    ("name", "threads", "cpus"),
    [
        ("laptop_2core_smt", 2, [[0], [1]]),
        ("pod_quota_6_5_of_64", 6, None),
        ("cpuset_4_11_of_16", 8, [[cpu] for cpu in range(4, 12)]),
    ],
)
def test_this_machine_is_measured_on_the_cpus_that_it_may_use(
    monkeypatch, capsys, model, name, threads, cpus
):
    host, measured = load_host(name), []

    def probe(_, *asked):
        measured.append(asked)
        return SimpleNamespace(bandwidth=lambda: 1e9)

    monkeypatch.setattr(CpuPlatform, "host", lambda _: host)
    monkeypatch.setattr(CpuPlatform, "roofline", probe)
    found = json.loads(printed(capsys, model, "--formats", "--json"))["machine"]
    assert [asked[1:] for asked in measured] == [(threads, cpus)]
    assert (found["cores"], found["memory_bytes"]) == (threads, host.memory_free)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--instance", "c7i.5xlarge"], "did you mean c7i."),
        (["--instances", "--max-model-len", "1k"], "max-model-len"),
        (["--instances", "--formats"], "not allowed with"),
    ],
)
def test_bad_flags_are_one_line(capsys, model, words, text):
    try:
        code = main(["size", str(model), *words])
    except SystemExit as error:  # argparse
        code = error.code
    assert code == 2
    assert text in capsys.readouterr().err


def test_only_config_json_is_downloaded_from_the_hub(monkeypatch, model, tmp_path):
    asked = []

    def download(repo, file, revision=None):
        asked.append((repo, file, revision))
        return str(shutil.copy(model / file, tmp_path))

    monkeypatch.setattr(hub, "_file_names", lambda *_: ["config.json", "model.safetensors"])
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert hub.resolve_config("owner/model", "main") == tmp_path
    assert asked == [("owner/model", "config.json", "main")]
    monkeypatch.setattr(hub, "_file_names", lambda *_: ["model-Q4_0.gguf"])
    with pytest.raises(ModelError, match=r"has no config\.json"):
        hub.resolve_config("owner/model")
    with pytest.raises(ModelError, match="give the id of the original model"):
        hub.resolve_config("owner/model:Q4_0")
