"""`cpuserve list`, `show` and `rm` with a cache of the hub as its library makes it."""

import json
import shutil

import pytest

from cpuserve.cli import main as cli
from cpuserve.loader.builtin import BUILTIN
from cpuserve.loader.packed_files import FOLDER
from tests.helpers.gguf_convert import convert
from tests.helpers.tiny import tiny_model


def run(capsys, *argv):
    code = cli.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Return a function that puts a file into a revision of a repository in the hub's cache."""
    root = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(root))
    cache = tmp_path / "cache"
    cache.mkdir()
    for module in ("config.env", "loader.hub", "loader.on_disk", "cli.disk_models"):
        monkeypatch.setattr(f"cpuserve.{module}.cache_dir", lambda: cache)

    def put(repo, name, source, revision="a" * 40):
        home = root / f"models--{repo.replace('/', '--')}"
        for folder in ("blobs", "refs"):
            (home / folder).mkdir(parents=True, exist_ok=True)
        (home / "refs/main").write_text(revision)
        blob = home / "blobs" / f"{abs(hash(source.read_bytes())):x}"
        shutil.copy(source, blob)
        link = home / "snapshots" / revision / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
        return home

    put.cache = cache
    return put


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    """Return a tiny model in a GGUF file."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    convert("llama", path)
    return path


@pytest.fixture
def stored(hub, gguf):
    """Put a model in safetensors and two GGUF files of another repository into the cache."""
    for file in tiny_model("llama").iterdir():
        hub("owner/tensors", file.name, file)
    other = hub.cache / "other"
    other.write_bytes(gguf.read_bytes() + b"\0")
    hub("owner/files", "tiny-Q4_0.gguf", gguf)
    return hub("owner/files", "tiny-Q8_0.gguf", other)


def names(capsys):
    _, out, _ = run(capsys, "list", "--json")
    return {model["name"]: model["size"] for model in json.loads(out)}


def test_the_list_has_each_model_with_the_size_of_its_files(capsys, stored, gguf):
    found = names(capsys)
    assert found == {
        "owner/tensors": sum(file.stat().st_size for file in tiny_model("llama").iterdir()),
        "owner/files:tiny-Q4_0.gguf": gguf.stat().st_size,
        "owner/files:tiny-Q8_0.gguf": gguf.stat().st_size + 1,
    }
    for command in ("list", "ls", "models"):
        code, out, _ = run(capsys, command)
        assert code == 0
        assert all(name in out for name in found)


def test_an_empty_disk_and_a_missing_cache_are_no_errors(capsys, hub):
    code, out, err = run(capsys, "list")
    assert (code, out.split()) == (0, ["NAME", "FORMAT", "SIZE", "MODIFIED"])
    assert "cpuserve pull NAME" in err


def test_rm_removes_one_model_and_leaves_the_others(capsys, stored):
    code, _, err = run(capsys, "rm", "owner/files:Q4_0")
    assert code == 0
    assert "removed owner/files:tiny-Q4_0.gguf" in err
    assert set(names(capsys)) == {"owner/tensors", "owner/files:tiny-Q8_0.gguf"}
    assert len(list((stored / "blobs").iterdir())) == 1
    assert run(capsys, "rm", "owner/files", "owner/tensors")[0] == 0
    assert names(capsys) == {}
    assert not (stored / "blobs").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["owner/files"], "'owner/files' is not on this machine; there are: owner/files:tiny-"),
        (["owner/tensor"], "did you mean owner/tensors"),
        (["owner/tensors", "nope"], "'nope' is not on this machine"),
        ([], "give the NAME of a model"),
        (["/"], "is a path of your own"),
    ],
)
def test_rm_of_an_unclear_name_removes_nothing(capsys, stored, words, said):
    before = names(capsys)
    code, _, err = run(capsys, "rm", *words)
    assert code != 0
    assert said in err
    assert names(capsys) == before


def test_rm_of_packed_weights_keeps_the_models(capsys, stored, hub):
    folder = hub.cache / FOLDER
    folder.mkdir()
    (folder / "a-b.weights").write_bytes(b"x" * 2048)
    assert "packed weights, for faster starts: 2.00 KiB" in run(capsys, "list")[2]
    assert "removed packed weights (2.00 KiB)" in run(capsys, "rm", "--packed")[2]
    assert list(folder.iterdir()) == []
    assert len(names(capsys)) == 3


def test_a_built_in_model_is_removed_with_what_belongs_to_it(capsys, hub):
    (name, model), *_ = BUILTIN.items()
    path = hub.cache / model.file_name
    for file in (path, path.with_suffix(".checked.json"), path.with_suffix(".lock")):
        file.write_bytes(b"x")
    assert names(capsys) == {name: 1}
    assert run(capsys, "rm", name)[0] == 0
    assert list(hub.cache.iterdir()) == []


@pytest.mark.parametrize("name", ["owner/tensors", "owner/files:Q4_0"])
def test_show_has_the_facts_of_the_files(capsys, stored, name):
    code, out, _ = run(capsys, "show", name, "--json")
    assert code == 0
    found = json.loads(out)
    config = json.loads((tiny_model("llama") / "config.json").read_text())
    assert found["Model"]["architecture"] == "LlamaForCausalLM"
    assert found["Model"]["embedding length"] == config["hidden_size"]
    assert found["Model"]["context length"] == config["max_position_embeddings"]
    assert "completion" in found["Capabilities"]
    code, text, _ = run(capsys, "show", name)
    assert code == 0
    assert all(f"  {title}" in text for title in found)


def test_show_prints_the_template_and_downloads_nothing(capsys, stored, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked"))
    settings = json.loads((tiny_model("llama") / "tokenizer_config.json").read_text())
    _, out, _ = run(capsys, "show", "owner/tensors", "--template")
    assert out.strip() == (settings.get("chat_template") or "").strip()
    for name, said in (
        ("owner/absent", "`cpuserve pull owner/absent` downloads it"),
        (next(iter(BUILTIN)), "cpuserve pull"),
        ("absent", "is no model on this machine"),
    ):
        code, _, err = run(capsys, "show", name)
        assert code == 2
        assert said in err
