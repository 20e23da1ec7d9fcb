"""How a checkpoint says that it gives embeddings."""

import json
import shutil

import pytest

from cpuserve.base.errors import ModelError
from cpuserve.loader import modules
from cpuserve.loader.pooling import checkpoint_pooling, module_head, prompts_of, usual_length
from tests.helpers.embedder import embedding_model
from tests.helpers.encoders import with_modules
from tests.helpers.gguf_file import STRING, U32, gguf
from tests.helpers.tiny import tiny_model


@pytest.mark.parametrize("pooling", ["last", "mean", "first"])
def test_sentence_transformers_files_are_read(pooling):
    assert checkpoint_pooling(embedding_model(pooling)) == (pooling, "1_Pooling says so")


def test_a_checkpoint_without_them_generates_text():
    assert checkpoint_pooling(tiny_model("qwen3"))[0] == "none"


def write(path, modules, config):
    (path / "modules.json").write_text(modules if isinstance(modules, str) else json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return path


TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}
POOLING = [TRANSFORMER, {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]


@pytest.mark.parametrize(
    ("modules", "config", "message"),
    [
        ("[", {}, "is not valid JSON"),
        ({"a": 1}, {}, "is not a list of JSON objects"),
        (POOLING, {"pooling_mode": "median"}, "not supported, only cls, max, mean"),
        (POOLING, {"pooling_mode": ["mean", "median"]}, "Choose one with --pooling"),
        (POOLING, {"pooling_mode": []}, "Choose one with --pooling"),
        ([TRANSFORMER, {**POOLING[1], "path": "../elsewhere"}], {}, "elsewhere"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(tmp_path, modules, config, message):
    with pytest.raises(ModelError, match=message) as raised:
        checkpoint_pooling(write(tmp_path, modules, config))
    assert "\n" not in str(raised.value)


def test_the_list_of_modules_is_parsed_once(tmp_path, monkeypatch):
    path = write(tmp_path, POOLING, {"pooling_mode": "mean"})
    read, parsed = modules.read_any_json, []
    monkeypatch.setattr(modules, "read_any_json", lambda *a: parsed.append(a[0]) or read(*a))
    assert checkpoint_pooling(path)[0] == "mean"
    assert parsed == [path / "modules.json"]


def test_newer_files_name_the_mode(tmp_path):
    path = write(tmp_path, POOLING, {"pooling_mode": "lasttoken", "embedding_dimension": 64})
    assert checkpoint_pooling(path)[0] == "last"


def gguf_of(kind):
    values = [("general.architecture", STRING, "qwen3"), ("qwen3.pooling_type", U32, kind)]
    return gguf(values)


@pytest.mark.parametrize(("kind", "pooling"), [(0, "none"), (1, "mean"), (2, "first"), (3, "last")])
def test_gguf_metadata_are_read(tmp_path, kind, pooling):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_of(kind))
    assert checkpoint_pooling(path)[0] == pooling


def test_an_unknown_kind_in_gguf_metadata_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_of(4))
    with pytest.raises(ModelError, match=r"qwen3\.pooling_type is 4"):
        checkpoint_pooling(path)


def test_dense_modules_are_read_in_order():
    path, expected = with_modules("bert")
    layers = module_head(path, "mean").layers
    assert [layer.activation for layer in layers] == ["none", "tanh"]
    for layer, (weight, bias) in zip(layers, expected, strict=True):
        assert (layer.weight == weight.numpy()).all()
        assert (layer.bias is None) == (bias is None)
    assert module_head(embedding_model("mean"), "mean").layers == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_function": "torch.nn.ELU"}, "the activation ELU is not supported, only"),
        ({"activation_function": "mine.Tanh"}, "the activation Tanh is not supported, only"),
        ({"out_features": 97}, r"has the shape \[96, 64\], its config \[97, 64\]"),
        ({"bias": True}, "have no linear.bias"),
    ],
)
def test_dense_modules_that_do_not_fit_are_refused_in_one_line(tmp_path, change, message):
    path = tmp_path / "m"
    shutil.copytree(with_modules("bert")[0], path)
    file = path / "2_Dense" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ModelError, match=message) as raised:
        module_head(path, "mean")
    assert "\n" not in str(raised.value)


SETTINGS = "config_sentence_transformers.json"
PROMPTS = {"query": "search_query: ", "document": "search_document: "}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (None, {}),
        ({}, {}),
        ({"prompts": {}, "default_prompt_name": None}, {}),
        ({"prompts": PROMPTS}, PROMPTS),
        (
            {"prompts": PROMPTS, "default_prompt_name": "query"},
            {**PROMPTS, "": "search_query: "},
        ),
    ],
)
def test_prompts_are_read_with_the_default_one(tmp_path, settings, expected):
    if settings is not None:
        (tmp_path / SETTINGS).write_text(json.dumps(settings))
    assert prompts_of(tmp_path) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": ["a"]}, "prompts is not an object of texts"),
        ({"prompts": {"a": 5}}, "prompts is not an object of texts"),
        ({"prompts": PROMPTS, "default_prompt_name": "x"}, "default_prompt_name is 'x', which"),
    ],
)
def test_broken_prompts_are_refused(tmp_path, settings, message):
    (tmp_path / SETTINGS).write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=message):
        prompts_of(tmp_path)


def test_the_length_of_sentence_transformers_is_read(tmp_path):
    file = tmp_path / "sentence_bert_config.json"
    assert usual_length(tmp_path) is None
    file.write_text('{"max_seq_length": null}')
    assert usual_length(tmp_path) is None
    file.write_text('{"max_seq_length": 256, "do_lower_case": false}')
    assert usual_length(tmp_path) == 256
    for broken in ("0", "-1", '"256"', "true", "1.5"):
        file.write_text(f'{{"max_seq_length": {broken}}}')
        with pytest.raises(ModelError, match=r"max_seq_length is .*, but it must be at least 1"):
            usual_length(tmp_path)
