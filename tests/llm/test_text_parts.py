"""Models of images and text serve text, from checkpoints as they are published."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cpuserve import LLM, SamplingParams
from tests.helpers.answers import exact_answers
from tests.helpers.depth import deep_but
from tests.helpers.tiny import tiny_model

PROMPTS = [[(7 * i + 31 * n) % 300 + 5 for i in range(20 + 37 * n)] for n in range(3)]
PARAMS = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=1)


def answers(path):
    with LLM(str(path), max_model_len=160, dtype="float32") as llm:
        return exact_answers(llm, PROMPTS, PARAMS)


def published(family, architecture, outer, to, *, prefix, stacked=False, key="text_config"):
    """Write the checkpoint of a text model into `to` as a model of images and text stores it.

    outer: keys that the outer config has instead of that of the text. prefix: of the tensors of
    the text. stacked: experts are stored as one tensor. key: of the config of the text.
    """
    path = tiny_model(family)
    for file in path.iterdir():
        if file.suffix == ".json":
            (to / file.name).write_bytes(file.read_bytes())
    text = json.loads((path / "config.json").read_text())
    config = {"architectures": [architecture], "vision_config": {"hidden_size": 48}}
    config |= {key: text.pop(key) for key in outer}
    (to / "config.json").write_text(json.dumps({**config, key: text}))
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
        (prefix + name.removeprefix("model.") if name.startswith("model.") else name): value
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
            for name in ("Kimi_K25", "KimiVL")
        ),
    ],
)
def test_other_models(tmp_path, family, architecture, prefix):
    made = published(family, architecture, [], tmp_path, prefix=prefix)
    assert answers(made) == answers(tiny_model(family))


def test_internvl_with_its_own_code(tmp_path):
    made = published(
        "qwen2", "InternVLChatModel", [], tmp_path, prefix="language_model.model.", key="llm_config"
    )
    assert answers(made) == answers(tiny_model("qwen2"))
