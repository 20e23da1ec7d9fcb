"""Models of images and text serve text, from checkpoints as they are published."""

import itertools
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cpuserve import LLM, SamplingParams
from cpuserve.models import FAMILIES
from tests.helpers.answers import exact_answers
from tests.helpers.depth import deep_but
from tests.helpers.tiny import tiny_model

PROMPTS = [[(7 * i + 31 * n) % 300 + 5 for i in range(20 + 37 * n)] for n in range(3)]
PARAMS = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=1)


def answers(path):
    with LLM(str(path), max_model_len=160, dtype="float32") as llm:
        return exact_answers(llm, PROMPTS, PARAMS)


def published(
    family, architecture, outer, to, *, prefix, stacked=False, key="text_config", head="", kind=""
):
    """Write the checkpoint of a text model into `to` as a model of images and text stores it.

    outer: keys that the outer config has instead of that of the text. prefix: of the tensors of
    the text. stacked: experts are stored as one tensor. key: of the config of the text, after a
    dot if it is in another object. head: the beginning of the name of the output head. kind: the
    model_type of the text.
    """
    path = tiny_model(family)
    for file in path.iterdir():
        if file.suffix == ".json":
            (to / file.name).write_bytes(file.read_bytes())
    text = json.loads((path / "config.json").read_text())
    if kind:
        text = {"rope_theta": 10000.0, **text, "model_type": kind}
    whole, _, key = key.rpartition(".")
    config = {"vision_config": {"hidden_size": 48}, **{name: text.pop(name) for name in outer}}
    config[key] = text
    config = {"architectures": [architecture], **({whole: config} if whole else config)}
    (to / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    if stacked:
        experts, layers = range(text["num_experts"]), range(text["num_hidden_layers"])
        for at in (f"model.layers.{layer}.mlp.experts" for layer in layers):
            parts = {
                part: np.stack([tensors.pop(f"{at}.{e}.{part}_proj.weight") for e in experts])
                for part in ("gate", "up", "down")
            }
            tensors[f"{at}.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
            tensors[f"{at}.down_proj"] = parts["down"]
    stored = {
        (prefix + name.removeprefix("model.") if name.startswith("model.") else head + name): value
        for name, value in tensors.items()
    }
    stored["model.visual.blocks.0.weight"] = np.ones((3, 3), np.float32)
    stored["multi_modal_projector.linear.weight"] = np.ones((3, 3), np.float32)
    stored["vision_tower.patches.bias"] = np.ones(3, np.float32)
    stored["model.audio_tower.layers.0.norm.weight"] = np.ones(3, np.float32)
    stored["model.embed_vision.embedding_projection.weight"] = np.ones((3, 3), np.float32)
    save_file(stored, to / "model.safetensors")
    return to


@pytest.mark.parametrize("stacked", deep_but([True], [False, True]))
def test_qwen35_with_experts(tmp_path, stacked):
    made = published(
        "qwen3.5-moe",
        "Qwen3_5MoeForConditionalGeneration",
        ["eos_token_id", "torch_dtype"],
        tmp_path,
        prefix="model.language_model.",
        stacked=stacked,
    )
    assert answers(made) == answers(tiny_model("qwen3.5-moe"))


def test_qwen4_exp_with_experts_in_one_tensor_and_the_constants_of_its_hashes(tmp_path):
    made = published(
        "qwen4-exp",
        "Qwen4ExpForConditionalGeneration",
        ["torch_dtype"],
        tmp_path,
        prefix="model.language_model.",
        stacked=True,
    )
    tensors = load_file(made / "model.safetensors")
    for layer in (0, 2):
        at = f"model.language_model.layers.{layer}.ple.ple_embedding"
        for name in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"):
            tensors[f"{at}.{name}"] = np.arange(6, dtype=np.int64) << 40
    save_file(tensors, made / "model.safetensors")
    assert answers(made) == answers(tiny_model("qwen4-exp"))


@pytest.mark.parametrize(
    ("family", "architecture", "prefix"),
    [
        ("qwen3.5", "Qwen3_5ForConditionalGeneration", "model.language_model."),
        pytest.param(
            "gemma3",
            "Gemma3ForConditionalGeneration",
            "language_model.model.",
            marks=pytest.mark.deep,
        ),
        pytest.param(
            "gemma3n",
            "Gemma3nForConditionalGeneration",
            "model.language_model.",
            marks=pytest.mark.deep,
        ),
        pytest.param(
            "gemma4-moe",
            "Gemma4ForConditionalGeneration",
            "model.language_model.",
            marks=pytest.mark.deep,
        ),
        pytest.param(
            "gemma4-unified",
            "Gemma4UnifiedForConditionalGeneration",
            "model.language_model.",
            marks=pytest.mark.deep,
        ),
        pytest.param(
            "mistral",
            "Mistral3ForConditionalGeneration",
            "language_model.model.",
            marks=pytest.mark.deep,
        ),
        ("ministral3", "Mistral3ForConditionalGeneration", "model.language_model."),
        pytest.param(
            "glm5-next",
            "Glm5NextForConditionalGeneration",
            "model.language_model.",
            marks=pytest.mark.deep,
        ),
        *(
            pytest.param(
                "deepseek-v3",
                f"{name}ForConditionalGeneration",
                "language_model.model.",
                marks=pytest.mark.deep,
            )
            for name in ("Kimi_K25", "KimiK25", "KimiVL")
        ),
    ],
)
def test_other_models(tmp_path, family, architecture, prefix):
    made = published(family, architecture, [], tmp_path, prefix=prefix)
    assert answers(made) == answers(tiny_model(family))


# (family, architecture, key of its config, beginnings of its tensors and of its head)
OWN_CODE = [
    ("qwen2", "Qwen2_5OmniModel", "thinker_config.text_config", "thinker.model.", "thinker."),
    ("nemotron-h", "NemotronH_Nano_VL_V2", "llm_config", "language_model.backbone.", ""),
    *(
        pytest.param(*model, marks=pytest.mark.deep)
        for model in (
            *(
                ("qwen2", f"{name}ForConditionalGeneration", "text_config", "model.", "")
                for name in ("Qwen2_5OmniThinker", "FastVlm", "VideoLlama3")
            ),
            (
                *("qwen2", "Qwen2_5OmniForConditionalGeneration"),
                *("thinker_config.text_config", "thinker.model.", "thinker."),
            ),
            (
                *("qwen3-moe", "Qwen3OmniMoeForConditionalGeneration"),
                *("thinker_config.text_config", "thinker.model.", "thinker."),
            ),
            *(
                (
                    "nemotron-h-moe",
                    name,
                    "llm_config",
                    "language_model.backbone.",
                    "language_model.",
                )
                for name in (
                    "NemotronH_Nano_Omni_Reasoning_V3",
                    "NemotronH_Super_Omni_Reasoning_V3",
                )
            ),
            (
                *("hyperclovax", "HCXVisionV2ForCausalLM", "text_config"),
                *("model.language_model.model.", "model.language_model."),
            ),
            *(
                ("llama", f"{name}ForConditionalGeneration", "text_config", "model.", "")
                for name in ("PerceptionLM", "DeepseekVLHybrid")
            ),
        )
    ),
]


@pytest.mark.parametrize(("family", "architecture", "key", "prefix", "head"), OWN_CODE)
def test_files_with_the_names_of_their_own_code(family, architecture, key, prefix, head, tmp_path):
    kind = FAMILIES.wholes[architecture].text
    made = published(
        family, architecture, [], tmp_path, prefix=prefix, key=key, head=head, kind=kind
    )
    others = (
        *("talker.model.norm.weight", "token2wav.dit.weight", "code2wav.norm.weight"),
        *("sound_encoder.layers.0.weight", "sound_projection.norm.weight", "mlp1.0.weight"),
        *("thinker.visual.merger.norm.weight", "thinker.audio_tower.ln_post.bias"),
        *("model.vision_projector.proj.weight", "vision_model.radio_model.norm.weight"),
    )
    tensors = load_file(made / "model.safetensors")
    more = dict.fromkeys(others, np.ones(3, np.float32))
    save_file({**tensors, **more}, made / "model.safetensors")
    assert answers(made) == answers(tiny_model(family))


def test_ling_3_vl_without_its_projector(tmp_path):
    name = "BailingMoeV3VLForConditionalGeneration"
    made = published("bailing-hybrid", name, ["torch_dtype"], tmp_path, prefix="model.")
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "mrope_section": [2, 3, 3]}))
    tensors = load_file(made / "model.safetensors")
    ends = ("0.weight", "0.bias", "2.weight", "2.bias")
    more = dict.fromkeys((f"linear_proj.{end}" for end in ends), np.ones(3, np.float32))
    save_file({**tensors, **more}, made / "model.safetensors")
    assert answers(made) == answers(tiny_model("bailing-hybrid"))


@pytest.mark.deep
def test_ernie_4_5_vl_with_the_experts_of_pictures(tmp_path):
    name, family = "Ernie4_5_VLMoeForConditionalGeneration", "ernie4.5-moe"
    made = published(family, name, [], tmp_path, prefix="model.", kind="ernie4_5_vl_moe_text")
    config = json.loads((made / "config.json").read_text())
    text = config.pop("text_config")
    experts, width = (text[key] for key in ("moe_num_experts", "moe_intermediate_size"))
    lists = {"moe_num_experts": [experts] * 2, "moe_intermediate_size": [width, 16]}
    lists["rope_theta"] = 500000.0
    # Published configs have the keys of all parts in one object.
    (made / "config.json").write_text(json.dumps({**text, **config, **lists}))
    tensors = load_file(made / "model.safetensors")
    for router in [n for n in tensors if n.endswith(".mlp.gate.weight")]:
        at = router.removesuffix(".gate.weight")
        tensors[router] = np.ascontiguousarray(tensors[router].T)
        tensors[f"{router}_1"] = np.ones_like(tensors[router])
        bias = f"{at}.moe_statics.e_score_correction_bias"
        tensors[bias] = np.concatenate([tensors[bias], np.ones_like(tensors[bias])])
        for expert, part in itertools.product(range(experts), ("gate", "up", "down")):
            other = f"{at}.experts.{experts + expert}.{part}_proj.weight"
            tensors[other] = np.ones((16, 16), np.float32)
    tensors["model.resampler_model.mlp.weight"] = np.ones((3, 3), np.float32)
    save_file(tensors, made / "model.safetensors")
    assert answers(made) == answers(tiny_model(family))


def test_internvl_with_its_own_code(tmp_path):
    made = published(
        "qwen2", "InternVLChatModel", [], tmp_path, prefix="language_model.model.", key="llm_config"
    )
    assert answers(made) == answers(tiny_model("qwen2"))
