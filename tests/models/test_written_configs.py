"""Every family's config as the installed transformers writes it, read back to the same numbers."""

import json
import math

import pytest
import torch
import transformers

from cpuserve.base.errors import ModelError
from cpuserve.loader.load import read_config
from cpuserve.models import MODELS, build_program, spec_from_config
from cpuserve.program.parts import stored_needs
from tests.helpers.depth import deep_but
from tests.helpers.tiny import ENCODERS, FAMILIES, SAMPLE, tiny_config

# Ids that some configs do not name. transformers then writes those of the published models, which
# may be beyond a tiny vocabulary.
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# A family for the part for text of models of images and text. Those whose part is an ordinary text
# model are in tests/models/test_picture_models.py.
PARTS = {
    "AriaForConditionalGeneration": "aria",
    "CohereCompassForConditionalGeneration": "cohere-compass",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma3nForConditionalGeneration": "gemma3n",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4-unified",
    "Glm5NextForConditionalGeneration": "glm5-next",
    "Mistral3ForConditionalGeneration": "mistral",
    "Molmo2ForConditionalGeneration": "molmo2",
    "MuseGlimmerForConditionalGeneration": "muse-glimmer",
    "Qwen3_5ForConditionalGeneration": "qwen3.5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3.5-moe",
    "Qwen4ExpForConditionalGeneration": "qwen4-exp",
}


# Models without a class of this name in transformers.
CONFIGS = {
    "Glm5NextForCausalLM": transformers.Glm5NextTextConfig,
    "Molmo2ForCausalLM": transformers.Molmo2TextConfig,
    "MuseGlimmerForCausalLM": transformers.MuseGlimmerTextConfig,
    "SarvamMLAForCausalLM": transformers.SarvamMLAConfig,
    "SarvamMoEForCausalLM": transformers.SarvamMoEConfig,
    "Step3p5ForCausalLM": transformers.Step3p7TextConfig,
    "ExaoneForCausalLM": transformers.ExaoneConfig,
    "InternLM3ForCausalLM": transformers.InternLM3Config,
    "IQuestCoderForCausalLM": transformers.IQuestCoderConfig,
}

# transformers has neither their configs nor their models (flash-linear-attention, llama.cpp).
UNKNOWN = ("rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7")
WRITTEN = [family for family in (*FAMILIES, *ENCODERS) if family not in UNKNOWN]


def config_class(config):
    if made := CONFIGS.get(config["architectures"][0]):
        return made
    return getattr(transformers, config["architectures"][0]).config_class


def written(config, folder, *, everything=False):
    """The config as transformers writes it; everything: also what has its default."""
    made = config_class(config).from_dict({**config, **IDS})
    if everything:
        made.to_json_file(folder / "config.json", use_diff=False)
    else:
        made.save_pretrained(folder)
    read = read_config(folder)
    return {"architectures": config["architectures"], **read}


@pytest.mark.parametrize(
    "everything", deep_but([True], [False, True]), ids=["differences", "everything"]
)
@pytest.mark.parametrize("family", WRITTEN)
def test_a_tiny_config_has_the_same_numbers(tmp_path, family, everything):
    config = tiny_config(family, **IDS)
    assert spec_from_config(written(config, tmp_path, everything=everything)) == spec_from_config(
        config
    )


# Classes of transformers without a tiny model: the tiny config that fits, and what differs.
OTHERS = {
    "GraniteMoeSharedForCausalLM": (
        "granite-moe",
        {"model_type": "granitemoeshared", "shared_intermediate_size": 64},
    ),
    "CamembertModel": ("xlm-roberta", {"model_type": "camembert"}),
    "RobertaModel": ("xlm-roberta", {"model_type": "roberta"}),
    "MT5EncoderModel": ("t5", {"model_type": "mt5"}),
}


@pytest.mark.parametrize("everything", [False, True], ids=["differences", "everything"])
@pytest.mark.parametrize("architecture", OTHERS)
def test_a_config_without_a_tiny_model_has_the_same_numbers(tmp_path, architecture, everything):
    family, changes = OTHERS[architecture]
    config = {**tiny_config(family, **IDS), **changes, "architectures": [architecture]}
    read = spec_from_config(written(config, tmp_path, everything=everything))
    assert read == spec_from_config(config)


def test_every_family_that_transformers_has_is_written_and_read():
    tested = {name for f in (*FAMILIES, *ENCODERS) for name in tiny_config(f)["architectures"]}
    rest = set(MODELS.names()) - tested - OTHERS.keys()
    assert not [name for name in rest if hasattr(transformers, name)]


@pytest.mark.parametrize(
    "ropes",
    [
        {},
        {"rope_theta": None},
        {"rope_theta": 3e4},
        {"rope_theta": 3e4, "rope_parameters": {"rope_theta": None, "rope_type": "default"}},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 3e4, "rope_type": "default"}},
        {"rope_scaling": {"rope_theta": None, "rope_type": "default"}},
    ],
)
def test_olmo_hybrid_has_the_rope_base_of_transformers_or_none(ropes):
    config = tiny_config("olmo-hybrid", **IDS)
    config = {**{k: v for k, v in config.items() if not k.startswith("rope")}, **ropes}
    theta = config_class(config).from_dict(config).rope_parameters["rope_theta"]
    rope = spec_from_config(config).rope
    base = rope and rope.inv_freq[1] ** (-rope.rotary / 2)
    assert base == (theta and pytest.approx(theta, rel=1e-4))


@pytest.mark.parametrize("architecture", PARTS)
def test_a_config_of_images_and_text_has_the_numbers_of_its_part_for_text(tmp_path, architecture):
    text = tiny_config(PARTS[architecture], **IDS)
    config = {
        "architectures": [architecture],
        "text_config": text,
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
    }
    assert spec_from_config(written(config, tmp_path)) == spec_from_config(config)


# Attributes of transformers' configs, which may have an older name for them.
NUMBERS = {
    "vocab": ("vocab_size",),
    "width": ("hidden_size",),
    "layers": ("num_hidden_layers",),
    "q_heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate": ("intermediate_size", "hidden_dim", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "max_position": ("max_position_embeddings", "max_seq_len"),
    "norm_eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"),
    "tied": ("tie_word_embeddings",),
    "bos_ids": ("bos_token_id",),
    "eos_ids": ("eos_token_id",),
}
# What means something else there: a latent cache has one row for all heads.
OTHERWISE = {
    **dict.fromkeys(
        (
            "deepseek-v2",
            "deepseek-v3",
            "deepseek-v3.2",
            "glm5-next",
            "glm4-moe-lite",
            "mistral4",
            "kimi-linear",
            *("axk2", "hy-v4"),
            *("youtu", "axk1", "glm-moe-dsa", "bailing-hybrid", "sarvam-mla"),
        ),
        ("kv_heads", "head_dim"),
    ),
    "diffllama": {"head_dim"},  # with the zeros after keys
    "biogpt": {"norm_eps"},  # transformers does not read its layer_norm_eps
    "longcat": {"kv_heads", "head_dim", "layers"},  # there a layer has one attention
    "llama4": {"intermediate"},  # of its experts
    "minicpm3": {"kv_heads", "head_dim", "norm_eps"},  # the epsilon is of scaled residuals
    "lfm2": {"intermediate"},  # adjusted by block_auto_adjust_ff_dim
    "falcon": {"kv_heads"},  # one with multi_query
    "falcon-40b": {"kv_heads"},
    **dict.fromkeys(("mamba", "falcon-mamba"), ("intermediate",)),  # the values of a token
    "mamba2": {"head_dim"},  # of its states
    "gemma3n": {"intermediate"},  # a list
    # those of two kinds of layers
    **dict.fromkeys(("gemma4", "gemma4-moe", "gemma4-unified"), ("head_dim",)),
    # these end no text
    **dict.fromkeys(("modernbert", "jina-v3", "gte", "t5", "umt5"), ("bos_ids", "eos_ids")),
    # the first two rows of their tables are no positions
    **dict.fromkeys(("xlm-roberta", "mpnet"), ("max_position", "bos_ids", "eos_ids")),
}
# Defaults with which transformers' own class makes no model, and the published values.
MENDED = {
    "deepseek-v2": {"num_experts_per_tok": 6},
    "glm4-moe": {"head_dim": 128},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
}


@pytest.mark.parametrize("family", WRITTEN)
def test_a_full_size_config_of_defaults_has_the_numbers_of_its_class(tmp_path, family):
    named = {"architectures": tiny_config(family)["architectures"]}
    made = config_class(named)(**MENDED.get(family, {}))
    made.save_pretrained(tmp_path)
    spec = spec_from_config({**named, **read_config(tmp_path)})
    compared = 0
    for ours, names in NUMBERS.items():
        if ours in OTHERWISE.get(family, ()):
            continue
        value = next((v for n in names if (v := getattr(made, n, None)) is not None), None)
        if value is None:
            continue
        if ours.endswith("_ids"):
            value = tuple(i for i in ([value] if isinstance(value, int) else value))
            value = tuple(i for i in value if i < spec.vocab)
        assert getattr(spec, ours) == value, ours
        compared += 1
    assert compared >= 7


# transformers makes projections of that width and norms (OLMoE, BitNet) or outputs (Helium) of
# another or adapters (Zamba2), refuses the key (Falcon, Mamba), or drops it (GLM-5.3). GPT-NeoX
# changes its RoPE only, so the key is refused here (test_config_keys.py).
ANOTHER_WIDTH = {
    "gpt-neox",
    "olmoe",
    "bitnet",
    "helium",
    "falcon",
    "falcon-40b",
    "glm5-next",
    "mamba2",
}
ANOTHER_WIDTH |= {"mamba", "falcon-mamba", "zamba2"}
ANOTHER_WIDTH.add("deepseek-v4")  # 48 columns of an entry are not 32 equal parts
# transformers has no class for them
ANOTHER_WIDTH |= {"sarvam", "sarvam-mla", "step3.5", "internlm3", "iquestcoder", "exaone", *UNKNOWN}
ANOTHER_WIDTH |= {"muse-glimmer", "molmo2"}


@pytest.mark.parametrize(
    "family",
    deep_but(SAMPLE, sorted({*FAMILIES, *ENCODERS} - ANOTHER_WIDTH)),
)
def test_a_width_of_heads_is_obeyed_where_transformers_obeys_it(family):
    config = tiny_config(family, **IDS, head_dim=48)
    if family == "glm4-moe-lite":  # there it is another name of this key
        config["qk_rope_head_dim"] = 48
    model = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        theirs = model(config_class(config).from_dict(config)).state_dict()
    mine = {n.name: n.shape for n in stored_needs(build_program(spec_from_config(config)).weights)}
    shared = [name for name in mine.keys() & theirs.keys() if "attn" in name or "attention" in name]
    assert {name: mine[name] for name in shared} == {
        name: tuple(theirs[name].shape) for name in shared
    }


@pytest.mark.parametrize(
    ("written_as", "value"),
    [("Infinity", math.inf), ("-Infinity", -math.inf), ("NaN", math.nan)],
)
def test_numbers_that_json_has_not_are_read_wherever_they_are(tmp_path, written_as, value):
    special = {"__float__": written_as}
    text = json.dumps({"architectures": ["X"], "a": special, "b": [1, {"c": [special]}]})
    (tmp_path / "config.json").write_text(text)
    config = read_config(tmp_path)
    for found in (config["a"], config["b"][1]["c"][0]):
        assert found == value or (math.isnan(found) and math.isnan(value))


def test_another_object_of_that_form_is_left_alone(tmp_path):
    (tmp_path / "config.json").write_text('{"a": {"__float__": "1e5"}, "b": {"__float__": 3}}')
    assert read_config(tmp_path) == {"a": {"__float__": "1e5"}, "b": {"__float__": 3}}


@pytest.mark.parametrize("family", ["qwen2", "qwen2-moe", "qwen3", "qwen3-moe", "gemma2", "olmo3"])
def test_a_window_of_no_tokens_is_none_unless_layers_have_one(family):
    plain = tiny_config(family, use_sliding_window=False)
    layers = plain["num_hidden_layers"]
    full = {**plain, "sliding_window": 0, "layer_types": ["full_attention"] * layers}
    spec = spec_from_config(full)
    assert not spec.window
    assert not any(spec.parts.get("windows", ()))
    asked = {**full, "use_sliding_window": True, "layer_types": ["sliding_attention"] * layers}
    with pytest.raises(ModelError, match="sliding_window is 0, but it must be"):
        spec_from_config(asked)
