"""Default sampling: from generation_config.json, a built-in model, or --generation-config."""

import dataclasses
import json

import pytest

from cpuserve.base.errors import ConfigError, InvalidRequest, ModelError
from cpuserve.loader import builtin
from cpuserve.loader.generation import check_ranges, recommended

FILE = "generation_config.json"


def write(folder, **values):
    (folder / FILE).write_text(json.dumps(values))
    return folder


def test_the_models_file_is_read_under_the_names_of_sampling_parameters(tmp_path):
    write(
        tmp_path, temperature=0.6, top_p=0.9, top_k=20, min_p=0, repetition_penalty=1.05,
        max_new_tokens=128, do_sample=True, eos_token_id=[1, 2], transformers_version="4.51",
    )  # fmt: skip
    found = recommended("auto", "org/model", tmp_path)
    assert found.values == {
        "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0, "repetition_penalty": 1.05,
        "max_tokens": 128,
    }  # fmt: skip
    assert found.why == f"the model's {FILE}"


def test_null_and_missing_settings_are_none(tmp_path):
    found = recommended("auto", "m", write(tmp_path, temperature=None, bos_token_id=1))
    assert (found.values, found.why) == ({}, f"the model's {FILE} has no settings")
    (tmp_path / FILE).unlink()
    assert recommended("auto", "m", tmp_path).values == {}
    assert recommended("auto", "m.gguf", tmp_path / "m.gguf").values == {}


def test_cpuserve_leaves_the_models_file_alone(tmp_path):
    (tmp_path / FILE).write_text("not json")
    assert recommended("cpuserve", "m", tmp_path).values == {}


def test_another_directory_or_file_can_be_asked_for(tmp_path):
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    other.mkdir()
    write(model, temperature=0.1)
    write(other, temperature=0.2)
    for source in (other, other / FILE):
        assert recommended(str(source), "m", model).values == {"temperature": 0.2}
    with pytest.raises(ConfigError, match=r"--generation-config .* there is no"):
        recommended(str(tmp_path), "m", model)
    with pytest.raises(ConfigError, match=r"--generation-config .* cannot be read: .*too long"):
        recommended("x" * 300, "m", model)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"temperature": -1}, "temperature must be between 0"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"top_p": -0.5}, r"top_p must be in \[0, 1\]"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"min_p": True}, "min_p must be a number"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1"),
        ({"temperature": float("nan")}, "temperature must be"),
    ],
)
def test_a_value_no_request_could_set_is_refused_in_one_line(tmp_path, values, reason):
    with pytest.raises(ModelError, match=reason) as error:
        recommended("auto", "m", write(tmp_path, **values))
    assert FILE in str(error.value)
    assert "\n" not in str(error.value)


def test_a_built_in_model_brings_its_own(tmp_path):
    model = builtin.BUILTIN["smollm2:135m"]
    found = recommended("auto", model.name, tmp_path / model.file_name)
    assert found.values == {"temperature": 0.0, "max_tokens": 1024}
    assert "do not end by themselves" in found.why
    assert recommended("cpuserve", model.name, tmp_path / model.file_name).values == {}
    # Another file of the same name is not the built-in model.
    assert recommended("auto", model.name, tmp_path / model.name).values == {}


def test_every_built_in_model_has_settings_in_range_and_a_reason_for_them():
    for model in builtin.BUILTIN.values():
        check_ranges(model.generation)
        assert bool(model.generation) == bool(model.generation_why)
    broken = dataclasses.replace(builtin.BUILTIN["smollm2:135m"], generation={"temperature": -1})
    with pytest.raises(InvalidRequest):
        check_ranges(broken.generation)
