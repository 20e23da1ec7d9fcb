"""Every family reads its tensors by their published names and by those of transformers' modules."""

from __future__ import annotations

import json

import numpy as np
import pytest
import transformers

from cpuserve.loader.load import open_checkpoint
from cpuserve.loader.lora import AdapterReader
from cpuserve.models import MODELS, architecture_of, build_program, families, spec_from_config
from tests.helpers.adapter import adapter_of
from tests.helpers.depth import deep_but
from tests.helpers.pictures import write_picture_model
from tests.helpers.quantized import quantized_copy
from tests.helpers.saved_forms import (
    FORMS,
    output_of,
    output_of_transformers,
    random_model,
    save,
    weights_of,
)
from tests.helpers.tiny import ENCODERS, FAMILIES, tiny_config

# Families that transformers has no class for; their files are only called as published.
WITHOUT_CLASS = {"rwkv6", "rwkv7", "arwkv7", "rwkv6qwen2"}
WITHOUT_CLASS |= {"molmo2"}  # the whole model is saved, below
KNOWN = [family for family in (*FAMILIES, *ENCODERS) if family not in WITHOUT_CLASS]
# The forms of these families differ, each in another way: names, stacks, joined and cut matrices.
SAMPLE = ("mixtral", "exaone-moe", "kolibri1", "exaone", "gte", "olmo-hybrid", "step3.5")
# transformers rotates halves in Hunyuan 4, and published files need rotated pairs
# (tests/helpers/hy_v4.py).
OTHER_ROPE = ("hy-v4",)


@pytest.mark.parametrize("family", deep_but(SAMPLE, KNOWN))
def test_published_files_and_those_of_transformers_modules_give_its_logits(family, tmp_path):
    model = random_model(family)
    read = [weights_of(save(model, form, tmp_path / form)) for form in FORMS]
    program, published = read[0]
    for name, value in published.items():
        assert np.array_equal(value, read[1][1][name]), name
    if family in OTHER_ROPE:
        return
    got, want = output_of(program, published), output_of_transformers(model)
    assert (got[:, : want.shape[1]] - want).abs().max() < 1e-4 * (want.max() - want.min())


# Models of pictures whose text part has other names in transformers' modules, or in the files that
# transformers saves (tests/models/test_picture_models.py compares the logits of these files).
WHOLE = [
    ("Molmo2ForConditionalGeneration", "molmo2_text"),
    ("Step3p7ForConditionalGeneration", "step3p5"),
    ("Ernie4_5_VLMoeForConditionalGeneration", "ernie4_5_vl_moe_text"),
    ("HYV4VLForConditionalGeneration", "hy_v4_vl_text"),
    ("Kimi_K25ForConditionalGeneration", "deepseek_v3"),
    ("Lfm2VlForConditionalGeneration", "lfm2_moe"),
    ("Lfm3VlForConditionalGeneration", "lfm3"),
    ("MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl_text"),
    ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text"),
]


@pytest.mark.parametrize("model", deep_but(WHOLE[:1], WHOLE), ids=":".join)
def test_text_parts_are_read_by_published_names_and_by_those_of_modules(model, tmp_path):
    whole = write_picture_model(*model, tmp_path / "published")
    save(whole, "modules", tmp_path / "modules")
    (_, published), (_, modules) = (weights_of(tmp_path / form) for form in FORMS)
    assert published
    for name, value in published.items():
        assert np.array_equal(value, modules[name]), name


def test_every_architecture_that_transformers_has_is_read_in_both_forms():
    compared = {architecture_of(tiny_config(family)) for family in KNOWN}
    compared |= {families.FAMILIES.text_types[kind][0].name for _, kind in WHOLE} | {
        "MT5EncoderModel"
    }
    compared |= set(map(families.FAMILIES.shown, compared))
    known = {
        families.FAMILIES.shown(name) for name in MODELS.names() if hasattr(transformers, name)
    }
    assert known <= compared


@pytest.mark.parametrize(("saved", "kind"), sorted(families.FAMILIES.saved_as))
def test_files_saved_as_another_class_are_of_the_family_of_their_model_type(saved, kind):
    family = next(f for f in KNOWN if tiny_config(f).get("model_type") == kind)
    config = json.loads(random_model(family).config.to_json_string(use_diff=False))
    config["architectures"] = [type(random_model(family)).__name__]
    assert config["architectures"] == [saved]
    assert architecture_of(config) == tiny_config(family)["architectures"][0]
    assert architecture_of({**config, "model_type": "llama"}) == saved


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8"])
@pytest.mark.parametrize("family", ["exaone-moe", "kolibri1"])
def test_quantized_files_have_the_published_names_as_well(family, method, tmp_path):
    sizes = dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64)
    plain = save(random_model(family, **sizes), "published", tmp_path / "plain")
    _, published = weights_of(plain)
    _, quantized = weights_of(quantized_copy(plain, method, tmp_path / method))
    # Vectors, such as the biases of routers and the norms, stay as they are.
    vectors = [name for name, value in published.items() if value.ndim == 1]
    assert vectors
    assert all(np.array_equal(published[name], quantized[name]) for name in vectors)


def test_adapters_are_read_by_the_names_of_modules_and_by_published_ones(tmp_path):
    """PEFT calls the linears of EXAONE 3 as the Llama that transformers makes of it."""
    parts = ("q_proj", "v_proj", "o_proj", "out_proj", "down_proj", "c_proj")
    read = []
    for form in FORMS:
        path = save(random_model("exaone"), form, tmp_path / form)
        spec = spec_from_config(open_checkpoint(path).config)
        adapter = adapter_of(path, parts)
        read.append(AdapterReader(spec, build_program(spec)).open("a", adapter).modules)
    assert read[0] == read[1]
    assert len(read[0]) == 4 * spec.layers
