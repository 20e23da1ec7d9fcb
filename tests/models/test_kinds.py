"""Models of other kinds are refused by their kind, before a port opens."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cpuserve.base.errors import ModelError
from cpuserve.models import FAMILIES, MODELS, architecture_of, find_model
from cpuserve.models.generic import (
    USUAL,
    _decoders,
    other_kind,
    parts_beside_text,
    read_spec,
    runs_through_transformers,
    transformers_knows,
)
from tests.api.server_process import free_port
from tests.helpers.children import child_options
from tests.helpers.patience import PATIENCE_S
from tests.helpers.tiny import tiny_model

# model_type: (an architecture of it in transformers, a part of the message)
OTHERS = {
    "whisper": ("WhisperForConditionalGeneration", "a model of speech or sound"),
    "wav2vec2": ("Wav2Vec2ForCTC", "a model of speech or sound"),
    "t5": ("T5ForConditionalGeneration", "an encoder-decoder"),
    "bart": ("BartForConditionalGeneration", "an encoder-decoder"),
    "m2m_100": ("M2M100ForConditionalGeneration", "an encoder-decoder"),
    "vit": ("ViTForImageClassification", "a model of images"),
    "clip": ("CLIPModel", "a model of images"),
    "dinov2": ("Dinov2Model", "a model of images"),
    "paligemma": (
        "PaliGemmaForConditionalGeneration",
        "a model that reads its prompt in both directions",
    ),
}


def config_of(kind):
    """config.json of a model of this type, with the defaults of transformers."""
    return {**transformers.AutoConfig.for_model(kind).to_dict(), "architectures": [OTHERS[kind][0]]}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_model_of_another_kind_says_what_it_is(kind):
    with pytest.raises(ModelError) as raised:
        read_spec(config_of(kind))
    architecture, what = OTHERS[kind]
    assert str(raised.value).startswith(f"{architecture} is {what}")


@pytest.mark.parametrize(
    ("architecture", "what"),
    [
        ("NewForCTC", "speech"),
        ("NewForObjectDetection", "images"),
    ],
)
def test_types_that_no_list_has_are_told_by_their_architecture(architecture, what):
    assert what in other_kind({"model_type": "new"}, architecture)


@pytest.mark.parametrize(
    ("name", "what", "method"),
    [
        ("LlamaForCausalLMEagle3", "an EAGLE-3 head", "eagle3"),
        ("Eagle3Speculator", "an EAGLE-3 head", "eagle3"),
        ("Gemma4AssistantForCausalLM", "an assistant", "mtp"),
    ],
)
def test_a_head_names_the_option_that_it_is_for(name, what, method):
    option = f"""--speculative-config '{{"method": "{method}", "model": """
    with pytest.raises(
        ModelError, match=f"^{name} is {what}, which .* give that model, and {option}"
    ):
        read_spec({"architectures": [name], "model_type": "llama"})


def test_an_encoder_decoder_of_an_unknown_type_is_told_by_its_config():
    config = {"model_type": "new", "is_encoder_decoder": True}
    assert "encoder-decoder" in other_kind(config, "NewForConditionalGeneration")


def test_no_model_that_runs_is_of_another_kind():
    for kind in ("llama", "qwen3", "bert", "gemma3", "gpt-oss", "modernbert"):
        config = json.loads((tiny_model(kind) / "config.json").read_text())
        assert other_kind(config, config["architectures"][0]) is None
        read_spec(config)


def test_only_decoders_of_transformers_run_through_it():
    assert transformers_knows({"model_type": "mpt"})
    assert not transformers_knows({"model_type": "vit"})
    file = Path(transformers.__path__[0]) / "models" / "auto" / "modeling_auto.py"
    assert _decoders(file) == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert _decoders(Path("/nowhere")) == {}


# transformers has a causal language model of each type, to which it would give a random head.
@pytest.mark.parametrize(
    ("kind", "architecture", "instead"),
    [
        ("electra", "ElectraForMaskedLM", "XLMRobertaForMaskedLM"),
        ("rembert", "RemBertForSequenceClassification", "BertForSequenceClassification"),
        ("xlnet", "XLNetModel", "a GGUF file"),
        ("mllama", "MllamaForConditionalGeneration", "LlavaForConditionalGeneration"),
    ],
)
def test_no_other_model_of_the_type_of_a_decoder_runs_through_transformers(
    kind, architecture, instead
):
    config = transformers.AutoConfig.for_model(kind).to_dict() | {"architectures": [architecture]}
    assert transformers_knows({"model_type": kind})
    with pytest.raises(ModelError, match="is not implemented in cpuserve") as raised:
        read_spec(config)
    assert instead in str(raised.value)


@pytest.mark.parametrize(
    "kind",
    [
        *("recurrent_gemma", "xlstm"),
        *("dots3_note", "inkling_text"),
    ],
)
def test_a_model_with_other_states_is_refused_by_its_config(kind):
    config = transformers.AutoConfig.for_model(kind).to_dict()
    config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    with pytest.raises(ModelError, match="cannot run through transformers either") as raised:
        read_spec(config)
    assert "Falcon-H1" in str(raised.value)


WAYS_OUT = (
    *("the nearest are", "Of such models", "give that model, and --speculative-config"),
    *("serve a decoder", "use a server for speech", "transformers, or a server such as"),
    *("install cpuserve[torch]", "a GGUF file", "models with its head run"),
)


@pytest.mark.parametrize("kind", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_every_causal_model_of_transformers_runs_or_says_what_to_do(kind):
    """By its config alone: a family, the fallback, or a line with the nearest thing to do."""
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    slowly, line = how_it_runs({"model_type": kind, "architectures": [architecture]})
    family = find_model(text_part_of(architecture))
    assert len(line) < 900
    if line:
        assert any(way in line for way in WAYS_OUT), line
        assert family is None
    else:
        assert slowly == (family is None)


def text_part_of(architecture):
    """The architecture whose family runs it, for models of images and text."""
    return architecture_of({"architectures": [architecture]})


def how_it_runs(config):
    """(whether it runs through transformers, the line of the refusal)."""
    try:
        return runs_through_transformers(config), ""
    except ModelError as error:
        return False, str(error)


def test_an_unknown_architecture_says_the_ways_out(monkeypatch):
    config = {"architectures": ["NewForCausalLM"], "model_type": "new_model"}
    with pytest.raises(ModelError) as raised:
        read_spec(config)
    message = str(raised.value)
    assert f"`cpuserve models` lists the {len(MODELS.names())} that are" in message
    assert "a newer transformers may run it, slowly" in message.lower()
    assert "a GGUF file of the same model" in message
    monkeypatch.setattr("cpuserve.models.generic.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"[Ii]nstall cpuserve\[torch\].*a GGUF file of the same"):
        read_spec(config)


def test_a_model_of_images_and_text_has_the_nearest_text_parts_that_run():
    config = {"architectures": ["Qwen3VLNextForConditionalGeneration"], "model_type": "new_vl"}
    config |= {"vision_config": {"a": 1}, "text_config": {"model_type": "new"}}
    with pytest.raises(ModelError, match="a part for vision") as raised:
        read_spec(config)
    nearest = str(raised.value).partition("the nearest are ")[2]
    assert nearest.startswith("Qwen3VLForConditionalGeneration")
    assert f"`cpuserve models --supported` lists the {len(FAMILIES.wholes)} that are" in nearest
    assert len(str(raised.value)) < 900
    assert all(name.strip() in FAMILIES.wholes for name in USUAL.split(","))


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (
            {"thinker_config": {"vision_config": {"a": 1}, "audio_config": {"a": 1}}},
            "vision and audio",
        ),
        ({"vision_config": {"a": 1}, "sound_config": {"a": 1}}, "vision and sound"),
        ({"text_config": {"a": 1}}, None),
    ],
)
def test_the_start_names_the_parts_that_are_not_read(config, parts):
    assert parts_beside_text(config) == parts


@pytest.mark.parametrize("kind", ["whisper", "t5", "vit"])
def test_serve_ends_before_a_port_opens(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of(kind), default=str))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with socket.create_server(("127.0.0.1", 0)) as taken:  # opening it would fail
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "cpuserve", "serve", str(tmp_path), "--port", str(port)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            **child_options(),
        )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert OTHERS[kind][1] in line


def test_a_further_model_is_checked_before_a_port_opens(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of("whisper"), default=str))
    (tmp_path / "model.safetensors").write_bytes(b"")
    words = [str(tiny_model("llama")), "--also-serve", f"w={tmp_path}", "--port", str(free_port())]
    done = subprocess.run(
        [sys.executable, "-m", "cpuserve", "serve", *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        **child_options(),
    )
    assert done.returncode == 2
    assert "a model of speech or sound" in done.stderr


def test_a_pipeline_of_diffusers_is_told_by_its_index(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-m", "cpuserve", "config", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        **child_options(),
    )
    assert done.returncode == 2
    assert "a pipeline of diffusers" in done.stderr
