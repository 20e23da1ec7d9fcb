"""Model files made from public reports of faults in other servers, 2025 and 2026: each shows one of
them is not here."""

import json
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from cpuserve.base.errors import ModelError
from cpuserve.loader.load import open_checkpoint
from tests.helpers.checkpoint_logits import TOKENS, exact_logits, native_logits
from tests.helpers.levels import LEVELS
from tests.helpers.quantized import FORMATS
from tests.helpers.tiny import tiny_model

INTEGERS = "4 bits with zero points"
LLAMA = {"intermediate_size": 192, "tie_word_embeddings": False}
MOE = {"intermediate_size": 192, "moe_intermediate_size": 128}


def copy_of(family, sizes, to, name, chosen, **settings):
    """A checkpoint whose matrices that `chosen` takes are quantized in format `name`."""
    model = tiny_model(family, **sizes)
    pack, known = FORMATS[name]
    tensors = {}
    for file in model.glob("*.safetensors"):
        for key, value in load_file(file).items():
            if not chosen(key):
                tensors[key] = value
                continue
            stem = key.removesuffix("weight")
            more = (stem,) if known["quant_method"] == "gptq" else ()
            parts = pack(value.float(), *more)
            tensors |= {f"{stem}{part}": t.contiguous() for part, t in parts.items()}
    shutil.copytree(model, to, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {**known, **settings}
    (to / "config.json").write_text(json.dumps(config))
    return to


def is_projection(key):
    return key.endswith("_proj.weight")


# The family and sizes, the format, the matrices that are quantized, and what the config says.
CASES = {
    "an output head in compressed-tensors": (
        ("llama", LLAMA),
        INTEGERS,
        lambda key: is_projection(key) or key == "lm_head.weight",
        {"ignore": []},
    ),
    "an output head in GPTQ": (
        ("llama", LLAMA),
        "gptq",
        lambda key: is_projection(key) or key == "lm_head.weight",
        {"lm_head": True},
    ),
    "all experts of a layer left out": (
        ("qwen3-moe", MOE),
        INTEGERS,
        lambda key: is_projection(key) and ".layers.1.mlp.experts." not in key,
        {"ignore": ["lm_head", "re:.*layers.1.mlp.experts.*"]},
    ),
    "keys left out that the config does not ignore": (
        ("llama", LLAMA),
        INTEGERS,
        lambda key: is_projection(key) and "k_proj" not in key,
        {"ignore": ["lm_head"]},
    ),
    "one of two fused matrices left out": (
        ("llama", LLAMA),
        INTEGERS,
        lambda key: is_projection(key) and "up_proj" not in key,
        {"ignore": ["lm_head"]},
    ),
}


@pytest.mark.parametrize(("model", "name", "chosen", "settings"), CASES.values(), ids=CASES)
def test_logits_are_those_of_the_weights_in_the_file(tmp_path, model, name, chosen, settings):
    checkpoint = open_checkpoint(copy_of(*model, tmp_path / "copy", name, chosen, **settings))
    want = exact_logits(checkpoint)
    got, _ = native_logits(checkpoint, LEVELS[-1], [len(TOKENS)])
    assert (np.abs(got - want) / np.ptp(want)).max() < 1e-3


def test_a_layer_of_which_one_expert_is_left_out_is_refused_by_name(tmp_path):
    def chosen(key):
        return is_projection(key) and ".layers.1.mlp.experts.0." not in key

    ignored = ["lm_head", "re:.*layers.1.mlp.experts.0.*"]
    path = copy_of("qwen3-moe", MOE, tmp_path / "copy", INTEGERS, chosen, ignore=ignored)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts\.0\..* must have one kind"):
        native_logits(open_checkpoint(path), LEVELS[-1], [len(TOKENS)])
