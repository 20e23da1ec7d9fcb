"""Numbers of models that have no family file, against the configurations of transformers."""

import pytest
import transformers

from cpuserve.base.errors import ModelError
from cpuserve.models import MODELS
from cpuserve.models.generic import generic_spec, read_spec, transformers_knows

# Families of transformers that call their sizes by other names, with those names.
CONFIGS = {
    "gpt2": {"n_embd": 96, "n_layer": 3, "n_head": 4, "n_positions": 128},
    "gptj": {"n_embd": 96, "n_layer": 3, "n_head": 4, "n_positions": 128, "rotary_dim": 8},
    "mpt": {"d_model": 96, "n_layers": 3, "n_heads": 4, "max_seq_len": 128},
    "gpt_neox": {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4},
    "falcon": {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4},
}


def config_of(kind, **more):
    """(config.json, the object it stands for) of a small model without a family file."""
    theirs = transformers.AutoConfig.for_model(kind, vocab_size=500, **CONFIGS[kind], **more)
    return {**theirs.to_dict(), "architectures": ["SomeForCausalLM"]}, theirs


@pytest.mark.parametrize("kind", CONFIGS)
def test_sizes_are_those_transformers_reads(kind):
    config, theirs = config_of(kind)
    spec = generic_spec(config)
    assert (spec.vocab, spec.width) == (theirs.vocab_size, theirs.hidden_size)
    assert spec.layers == theirs.num_hidden_layers
    assert spec.q_heads == theirs.num_attention_heads
    assert spec.head_dim == theirs.hidden_size // theirs.num_attention_heads


@pytest.mark.parametrize("kind", ["gpt2", "gptj", "mpt"])
def test_the_context_is_known_by_its_older_names(kind):
    assert generic_spec(config_of(kind)[0]).max_position == 128


def test_numbers_of_the_text_model_count_where_a_config_has_several():
    text, _ = config_of("gpt_neox")
    config = {"architectures": ["SomeForConditionalGeneration"], "text_config": text}
    spec = generic_spec({**config, "hidden_size": 7, "torch_dtype": "float16"})
    assert (spec.width, spec.layers, spec.dtype) == (96, 3, "float16")
    assert spec.architecture == "SomeForConditionalGeneration"


def test_fewer_kv_heads_and_ends_are_read():
    config, _ = config_of("falcon")
    config |= {"num_kv_heads": 2, "eos_token_id": [3, 4], "bos_token_id": 1}
    spec = generic_spec(config)
    assert (spec.kv_heads, spec.eos_ids, spec.bos_ids) == (2, (3, 4), (1,))


@pytest.mark.parametrize("key", ["n_embd", "n_layer", "n_head", "vocab_size"])
def test_a_number_that_is_missing_is_named(key):
    config, _ = config_of("gpt2")
    del config[key]
    wanted = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers"}
    wanted |= {"n_head": "num_attention_heads", "vocab_size": "vocab_size"}
    with pytest.raises(ModelError, match=wanted[key]):
        generic_spec(config)


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        ("gpt2", True),
        ("gpt-neox", True),  # model types are written with either sign
        ("no_such_model", False),
        ("../gpt2", False),
        ("", False),
        (None, False),
    ],
)
def test_what_transformers_knows_is_told_without_importing_it(kind, known):
    assert transformers_knows({"model_type": kind}) is known


def test_without_transformers_nothing_is_known(monkeypatch):
    monkeypatch.setattr("cpuserve.models.generic.find_spec", lambda name: None)
    assert not transformers_knows({"model_type": "gpt2"})


def test_a_family_file_comes_before_transformers_and_both_before_a_refusal():
    llama = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_hidden_layers=2
    )
    spec, has_program = read_spec({**llama.to_dict(), "architectures": ["LlamaForCausalLM"]})
    assert (spec.layers, has_program) == (2, True)
    spec, has_program = read_spec(config_of("gpt2")[0])
    assert (spec.layers, has_program) == (3, False)
    config = {**config_of("gpt2")[0], "model_type": "no_such_model"}
    with pytest.raises(ModelError, match="SomeForCausalLM") as refusal:
        read_spec(config)
    assert f"`cpuserve models` lists the {len(MODELS.names())} that are" in str(refusal.value)
