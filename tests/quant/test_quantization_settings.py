"""Settings of quantization with wrong values: they are refused in one line, or change no weight."""

import copy
import json
import random
import zlib

import numpy as np
import pytest

from cpuserve.base.errors import StartupError
from cpuserve.config.options import EngineOptions
from cpuserve.loader.load import check_weights, open_checkpoint
from cpuserve.models import build_program, spec_from_config
from cpuserve.prepare import model_facts
from cpuserve.quant import dequantize
from tests.helpers.depth import deep_but
from tests.helpers.quantized import FORMATS, quantized_copy
from tests.helpers.tiny import tiny_model

TRIED = 40  # settings that are tried of each format
DEEP = json.loads("[" * 200 + "]" * 200)
# Names of modules, among them expressions that take exponential time if they are tried in order.
SLOW = ("re:(a+)+$", "*a*a*a*a*a*a*a*a*a*b", "(.*_proj)*x", "re:(", "[", "+:.*", "\0", "")
MANY = [
    f"model.layers.{i}.mlp" if i % 9 else SLOW[i // 9 % len(SLOW)] + str(i) for i in range(10_000)
]
WRONG = (
    *(None, True, False, 0, -1, 1, 7, 2**40, 10**30, 4.0, 0.5, -1e308, float("nan")),
    *("", "4", "no such thing", "\n", "x" * 10_000, [], [[]], [4], {}, {"a": {"b": 1}}),
    *(DEEP, MANY, {name: {"bits": 3} for name in MANY}),
)
# Settings that libraries write beside those of FORMATS, by method.
BESIDE = {
    "awq": {"zero_point": True, "modules_to_not_convert": ["lm_head"]},
    "gptq": {
        "group_size": 32,
        "sym": False,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "dynamic": {"-:lm_head": {}},
        "is_marlin_format": False,
    },
    "auto-round": {"group_size": 32, "sym": False, "data_type": "int", "extra_config": {}},
    "fp8": {"activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]},
    "bitsandbytes": {"llm_int8_skip_modules": ["lm_head"], "bnb_4bit_quant_type": "nf4"},
    "modelopt": {"ignore": ["lm_head"], "config_groups": {"group_0": {"targets": ["Linear"]}}},
    "modelopt_fp4": {"exclude_modules": ["lm_head"], "kv_cache_scheme": {"num_bits": 8}},
    "compressed-tensors": {
        "ignore": ["re:.*lm_head"],
        "sparsity_config": {"format": "dense"},
        "transform_config": {},
        "kv_cache_scheme": None,
    },
    "torchao": {"modules_to_not_convert": None, "include_input_output_embeddings": False},
    "hqq": {"skip_modules": ["lm_head"], "dynamic_config": {"self_attn.q_proj": {"nbits": 4}}},
    "bitnet": {"quantization_mode": "offline", "use_rms_norm": False, "rms_norm_eps": 1e-6},
    "fbgemm_fp8": {"modules_to_not_convert": ["lm_head"]},
    "quark": {"algo_config": [{"name": "awq"}], "layer_type_quant_config": {}},
}


def places(settings, at=()):
    """The path of each value in settings, from the whole down."""
    yield at
    inner = settings.items() if isinstance(settings, dict) else ()
    inner = enumerate(settings) if isinstance(settings, list) else inner
    for key, value in inner:
        yield from places(value, (*at, key))


def changed(settings, at, value):
    """A copy of settings with another value at a path; it is removed if value is `...`."""
    if not at:
        return None if value is ... else value
    copied = copy.deepcopy(settings)
    parent = copied
    for key in at[:-1]:
        parent = parent[key]
    if value is ...:
        del parent[at[-1]]
    else:
        parent[at[-1]] = value
    return copied


def values_of(path):
    """All weights of a checkpoint in fp32, after what a start reads of it."""
    model_facts(EngineOptions(model=str(path)), path)
    checkpoint = open_checkpoint(path)
    check_weights(build_program(spec_from_config(checkpoint.config)), checkpoint.weights)
    weights = checkpoint.weights
    return {name: dequantize(weights.get(name)) for name in sorted(weights.names())}


@pytest.mark.parametrize("name", deep_but([*FORMATS][::9], FORMATS))
def test_wrong_settings_are_refused_or_change_no_weight(name, tmp_path):
    """No tensor changes, and no value of WRONG is another setting that would fit the tensors."""
    path = quantized_copy(tiny_model("llama", intermediate_size=192), name, tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    found = config["quantization_config"]
    settings = {**BESIDE.get(found.get("quant_method"), {}), **found}
    config["quantization_config"] = settings
    (path / "config.json").write_text(json.dumps(config))
    want = values_of(path)
    tries = [(at, value) for at in places(settings) for value in (..., *WRONG)]
    if name == "bitnet":
        tries.remove((("linear_class",), ...))  # a scale is its inverse then
    drawn = random.Random(zlib.crc32(name.encode()))
    said = []
    for at, value in drawn.sample(tries, min(TRIED, len(tries))):
        config["quantization_config"] = changed(settings, at, value)
        (path / "config.json").write_text(json.dumps(config))
        what = f"{name}: {'.'.join(map(str, at))} = {value!r:.60}"
        try:
            got = values_of(path)
        except StartupError as error:
            said.append((what, str(error)))
            continue
        except Exception as error:
            raise AssertionError(what) from error
        assert got.keys() == want.keys(), what
        assert all(np.array_equal(got[key], want[key]) for key in want), what
    assert said
    assert not [(what, text) for what, text in said if "\n" in text or not 20 < len(text) < 1000]
