"""Models of images and text answer texts as the installed transformers computes and writes them."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.hunyuan_vl import modeling_hunyuan_vl

from cpuserve.base.errors import ModelError
from cpuserve.loader.load import check_weights, open_checkpoint
from cpuserve.models import FAMILIES, build_program, spec_from_config
from cpuserve.models.generic import read_spec
from cpuserve.models.text_parts import text_config
from cpuserve.program.interpret import Interpreter
from cpuserve.quant import dequantize
from tests.helpers.depth import deep_but
from tests.helpers.pictures import write_picture_model
from tests.helpers.rounding import program_bound
from tests.helpers.steps import Sequence, all_rows, step
from tests.helpers.tiny import tiny_model

TOKENS = [(i * 37 + i * i * 5) % 96 for i in range(70)]
# Other tests have these: transformers writes Kimi's layers under a wrong name, needs Pillow for
# Gemma 3n and timm for PerceptionLM, has no class for the model (tests/llm/test_text_parts.py,
# below), or refuses a small vocabulary (Apertus 1.5, below), or saves Hunyuan 4's MLPs under wrong
# names (below). LightOnOCR has a second name.
ELSEWHERE = {
    "Apertus1p5ForConditionalGeneration",
    "BailingMoeV3VLForConditionalGeneration",
    "DotsOCRForCausalLM",
    "FastVlmForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "Glm5NextForConditionalGeneration",
    "HCXVisionV2ForCausalLM",
    "HYV4VLForConditionalGeneration",
    "InternVLChatModel",
    "KimiK25ForConditionalGeneration",
    "KimiVLForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",
    "LightOnOCRForConditionalGeneration",
    "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Nano_VL_V2",
    "NemotronH_Super_Omni_Reasoning_V3",
    "PerceptionLMForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniModel",
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen4ExpForConditionalGeneration",
}
# Classes that published files name, and those of transformers that have their tied heads.
PUBLISHED = {
    "HCXVisionV2ForCausalLM": "HyperCLOVAXVisionV2ForConditionalGeneration",
    "LightOnOCRForConditionalGeneration": "LightOnOcrForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration": "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen2_5OmniModel": "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
KINDS = [
    (name, kind)
    for name, whole in FAMILIES.wholes.items()
    for kind in dict.fromkeys((whole.text, *whole.others))
    if name not in ELSEWHERE and kind != "mistral4"
]
ALWAYS = [
    ("SmolVLMForConditionalGeneration", "llama"),
    ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text"),
    ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text"),
    ("LlavaForConditionalGeneration", "mistral"),
    ("GlmOcrForConditionalGeneration", "glm_ocr_text"),
    ("Lfm2VlForConditionalGeneration", "lfm2"),
]


def logits_of(path):
    """Return (logits of all tokens by the interpreter in fp32, how far off they may be)."""
    checkpoint = open_checkpoint(path)
    spec, weights = spec_from_config(checkpoint.config), checkpoint.weights
    program = build_program(spec)
    if spec.tower is None:
        check_weights(program, weights)  # no tensor is unknown
    tensors = {
        need.name: torch.from_numpy(dequantize(weights.get(need.name)).reshape(need.shape))
        for need in program.weights
    }
    states = {"num_states": 16} if program.states else {}
    interpreter = Interpreter(program, tensors, num_blocks=8, **states)
    sequence = Sequence(0, TOKENS, [5, 2, 7], 8 if program.states else 0)
    arrays = step(sequence.chunk(None, all_rows(len(TOKENS))))
    with torch.inference_mode():
        got = interpreter.logits(interpreter.hidden(arrays)).numpy()
    return got, program_bound(program, len(TOKENS))


@pytest.mark.parametrize("model", deep_but(ALWAYS, KINDS), ids=":".join)
def test_the_text_part_computes_the_logits_of_transformers(model, tmp_path):
    architecture, kind = model
    model = write_picture_model(architecture, kind, tmp_path)
    if kind == "llama4_text":  # the whole model of transformers 5.24 needs pictures
        model = model.language_model
    with torch.inference_mode():
        want = model(input_ids=torch.tensor([TOKENS])).logits[0].numpy()
    if kind == "cohere2":
        # transformers multiplies by logit_scale in the text model only, not in Aya and Command A.
        want *= model.config.text_config.logit_scale
    got, bound = logits_of(tmp_path)
    assert abs(got - want).max() <= bound * abs(want).max()
    assert abs(got - np.roll(want, 1, axis=0)).max() > 0.01 * abs(want).max()


def test_the_text_part_of_apertus_computes_the_logits_of_its_text_model(tmp_path):
    source = tiny_model("apertus1.5", vocab_size=600, output_vocab_size=512)
    text = json.loads((source / "config.json").read_text())
    whole = {"architectures": ["Apertus1p5ForConditionalGeneration"], "model_type": "apertus1p5"}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "text_config": text}))
    tensors = load_file(source / "model.safetensors")
    renamed = {n.replace("model.", "model.language_model.", 1): x for n, x in tensors.items()}
    others = ("model.vision_tokenizer.quant_conv.weight", "model.audio_tokenizer.head.weight")
    renamed |= dict.fromkeys(others, np.zeros(3, np.float32))
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    check_weights(build_program(spec_from_config(checkpoint.config)), checkpoint.weights)
    assert np.array_equal(logits_of(tmp_path)[0], logits_of(source)[0])


def test_the_text_part_of_hunyuan_4_computes_the_logits_of_transformers(tmp_path):
    sizes = {"q_lora_rank": 48, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
    sizes |= {"qk_rope_head_dim": 16, "index_topk": 32, "index_n_heads": 16, "index_head_dim": 64}
    ropes = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
    # So that other norms inside attention would be seen.
    sizes |= {"rope_parameters": ropes, "rms_norm_eps": 1e-2, "hc_mult": 2}
    model = write_picture_model("HYV4VLForConditionalGeneration", "hy_v4_vl_text", tmp_path, sizes)
    with torch.inference_mode():
        want = model(input_ids=torch.tensor([TOKENS])).logits[0].numpy()
    file = tmp_path / "model.safetensors"
    # transformers 5.24 saves the gates of MLPs under the name of those of attention.
    stored = load_file(file)
    gates = {n: n.replace("linear_gate", "gate_proj") for n in stored if ".mlp." in n}
    stored = {gates.get(n, n): x for n, x in stored.items()}
    save_file(stored, file, metadata={"format": "pt"})
    got, bound = logits_of(tmp_path)
    assert abs(got - want).max() <= bound * abs(want).max()


@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj"])
def test_experts_of_published_files_are_stored_by_their_inputs(part, tmp_path):
    write_picture_model("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text", tmp_path)
    want, _ = logits_of(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    stacks = [
        name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]
    assert len(stacks) == 4
    turned = {name: np.ascontiguousarray(tensors[name].transpose(0, 2, 1)) for name in stacks}
    save_file({**tensors, **turned}, file, metadata={"format": "pt"})
    assert np.array_equal(logits_of(tmp_path)[0], want)
    # Only one of two turned is no layout of any file.
    one = {name: turned[name] for name in stacks if name.endswith(part)}
    save_file({**tensors, **one}, file, metadata={"format": "pt"})
    half = open_checkpoint(tmp_path)
    with pytest.raises(ModelError, match="experts"):
        check_weights(build_program(spec_from_config(half.config)), half.weights)


NUMBERS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
    *("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "head_dim"),
)


@pytest.mark.parametrize(
    "kind", sorted(k for k, (_, part) in FAMILIES.text_types.items() if part.defaults)
)
def test_values_that_a_config_leaves_out_are_those_of_transformers(kind):
    usual, defaults = CONFIG_MAPPING[kind](), FAMILIES.text_types[kind][1].defaults
    numbers = {k: v for k, v in defaults.items() if k in NUMBERS}
    assert {k: getattr(usual, k) for k in numbers} == numbers
    theta = defaults.get("rope_theta")
    assert theta is None or usual.rope_parameters["rope_theta"] == theta


@pytest.mark.parametrize(
    "architecture", [name for name, whole in FAMILIES.wholes.items() if whole.tied is not None]
)
def test_a_head_is_tied_as_in_transformers_if_the_config_does_not_say(architecture):
    whole = getattr(transformers, PUBLISHED.get(architecture, architecture)).config_class
    assert whole.tie_word_embeddings == FAMILIES.wholes[architecture].tied


def test_llava_leaves_out_most_sizes():
    """The config of llava-1.5-7b has five values of its text part."""
    part = {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "vocab_size": 32064,
    }
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": part}
    spec = spec_from_config(config)
    assert (spec.width, spec.layers, spec.kv_heads, spec.vocab) == (4096, 32, 32, 32064)
    assert not spec.tied


def test_qwen2_vl_has_the_keys_of_its_parts_in_one_object():
    config = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_hidden_layers": 28,
        "num_key_value_heads": 2,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "vision_config": {"depth": 32},
        "vocab_size": 151936,
    }
    spec = spec_from_config(config)
    assert (spec.width, spec.head_dim, spec.tied, spec.qkv_bias) == (1536, 128, True, True)
    assert spec.rope.inv_freq[1] == pytest.approx(1e6 ** (-2 / 128))


def test_hunyuan_ocr_has_the_keys_of_its_parts_in_one_object():
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "vocab_size": 120818,
    }
    ropes = {"type": "xdrope", "alpha": 1000.0, "factor": 1.0, "xdrope_section": [16] * 4}
    sizes |= {"rope_theta": 10000.0, "rope_scaling": ropes, "attention_head_dim": 128}
    config = {"architectures": ["HunYuanVLForConditionalGeneration"], "vision_config": {}, **sizes}
    spec = spec_from_config(config)
    assert (spec.width, spec.head_dim, spec.tied) == (1024, 128, True)
    text = CONFIG_MAPPING["hunyuan_vl_text"](**{**sizes, "rope_scaling": dict(ropes)})
    theirs = modeling_hunyuan_vl.HunYuanVLRotaryEmbedding(text).inv_freq
    assert spec.rope.inv_freq == pytest.approx(theirs.tolist(), rel=1e-5)
    assert spec.rope.inv_freq[1] != pytest.approx(1e4 ** (-2 / 128), rel=1e-2)


def test_a_null_of_the_text_part_is_a_value():
    part = {"model_type": "mistral", "sliding_window": None, "bos_token_id": None}
    config = {"architectures": ["LlavaForConditionalGeneration"], "bos_token_id": 7}
    found = text_config("LlavaForConditionalGeneration", {**config, "text_config": part})
    assert (found["sliding_window"], found["bos_token_id"]) == (None, 7)
    assert spec_from_config({**config, "text_config": part}).window == 0
    part = {"model_type": "mistral"}
    assert spec_from_config({**config, "text_config": part}).window == 4096


def test_internvl_with_its_own_code_has_another_key_for_the_text_part():
    part = json.loads(CONFIG_MAPPING["qwen2"](hidden_size=128).to_json_string(use_diff=False))
    config = {"architectures": ["InternVLChatModel"], "llm_config": part}
    assert spec_from_config(config).width == 128


def test_a_text_part_that_is_not_known_is_refused():
    part = {"model_type": "fancy"}
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": part}
    with pytest.raises(ModelError, match=r"is of type fancy, but .* with: llama, mistral, qwen2"):
        read_spec(config)
