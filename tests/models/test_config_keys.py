"""Every key of a config.json that transformers reads is read or refused: none is ignored.

One key at a time changes in the tiny config of a family. If cpuserve takes the new value, both
models are computed with the same weights, and their results must be equal again. For most families
this is done for keys that do not change the Program; test_families.py compares many that do.
"""

from __future__ import annotations

import copy

import pytest
import transformers

from cpuserve.base.errors import ModelError
from cpuserve.models import spec_from_config
from tests.helpers.config_keys import GENERAL, WALKED, Walk, needs_of, program_of, text_of
from tests.helpers.depth import deep_but
from tests.helpers.tiny import tiny_config
from tests.models.test_written_configs import config_class

# Keys with another effect here than in transformers, each with the reason.
OTHERWISE = {
    "partial_rotary_factor": "vLLM and GGUF files turn this share in families where transformers "
    "does not read the key",
    "rope_theta": "transformers 5 takes the default of rope_parameters before it, 4 did not",
}
OF_FAMILIES = {
    ("dbrx", "rope_theta"): "published files have it in attn_config, where transformers 5 does "
    "not look",
}
# Families with different layers and keys.
FEW = ("llama", "bert", "modernbert-decoder")


@pytest.mark.parametrize("family", deep_but(FEW, WALKED))
def test_each_changed_key_changes_the_results_as_in_transformers_or_is_refused(family):
    walk, outcomes = Walk(family), {}
    assert walk.base().startswith("no effect")
    for key, value, config in walk.changes():
        outcomes[key, str(value)] = walk.outcome(key, config, ignored=family not in FEW)
    wrong = {
        where: told
        for where, told in outcomes.items()
        if told.startswith("DIFFERENT")
        and (family, where[0]) not in OF_FAMILIES
        and not (where[0].rpartition(".")[2] in OTHERWISE and ", theirs moved 0," in told)
    }
    assert not wrong
    told = [words.partition(":")[0] for words in outcomes.values()]
    assert told.count("alike" if family in FEW else "read") > 5
    assert told.count("refused") > 5


@pytest.mark.parametrize(
    ("family", "change", "key"),
    [
        ("lara-mini", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
        ("llama", {"is_causal": False}, "is_causal"),
        ("qwen3-next", {"is_causal": False}, "is_causal"),
        ("embeddinggemma", {"is_causal": False}, "is_causal"),
        ("llama", {"per_layer_config": {"1": {"num_key_value_heads": 4}}}, "per_layer_config"),
        (
            "llama3",
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0}},
            "rope_scaling",
        ),
        *((f, {"num_attention_heads": 2}, "num_attention_heads") for f in ("gpt2", "mpt", "xglm")),
        ("step3.5", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("longcat", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("gpt-neox", {"head_dim": 8}, "head_dim"),
        ("xglm", {"pad_token_id": 2}, "pad_token_id"),
        ("t5", {"dense_act_fn": "relu"}, "dense_act_fn"),
        ("t5", {"dense_act_fn": "tanh"}, "dense_act_fn"),
    ],
)
def test_a_key_that_would_change_results_without_notice_is_refused(family, change, key):
    with pytest.raises(ModelError, match=f"config.json: {key} is ") as raised:
        spec_from_config(tiny_config(family, **change))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("family", "second", "first"),
    [
        (
            "gpt-neo",
            {"attention_layers": ["local", "local", "global", "global"]},
            {"attention_types": [[["local"], 2], [["global"], 2]]},
        ),
        ("lfm3", {"rms_norm_eps": 0.05}, {"norm_eps": 0.05}),
        ("modernbert", {"sliding_window": 30}, {"local_attention": 60}),
        ("modernbert-decoder", {"sliding_window": 30}, {"local_attention": 60}),
        ("t5", {"dense_act_fn": "silu"}, {"feed_forward_proj": "gated-silu"}),
        (
            "t5",
            {"dense_act_fn": "relu", "is_gated_act": False},
            {"feed_forward_proj": "relu"},
        ),
    ],
)
def test_a_second_key_goes_before_the_first_as_in_transformers(family, second, first):
    config = tiny_config(family)
    other = spec_from_config({**config, **first})
    assert spec_from_config({**config, **second}) == other != spec_from_config(config)


# transformers counts the tokens of a window, or of positions, in another way.
COUNTED = {("embeddinggemma", "sliding_window"), ("jina-v3", "max_position_embeddings")}


def has_config_class(family):
    """Whether transformers has the family; it has no config class of the others to compare with."""
    return tiny_config(family)["architectures"][0] in CLASSES


# To ask for a class would import it; all of them take seconds at each start of pytest.
CLASSES = frozenset(dir(transformers))
KNOWN = [family for family in WALKED if has_config_class(family)]


@pytest.mark.parametrize(
    "family", deep_but([family for family in (*FEW, "deepseek-v3") if family in KNOWN], KNOWN)
)
def test_a_key_that_is_left_out_has_the_default_of_transformers(family):
    config, wrong = tiny_config(family), []
    for key in config.keys() - GENERAL - {"rope_scaling", "rope_parameters"}:
        rest = {name: value for name, value in config.items() if name != key}
        try:
            left = program_of(rest)
            default = getattr(config_class(rest).from_dict(copy.deepcopy(rest)), key)
            filled = program_of({**rest, key: getattr(default, "to_dict", lambda d=default: d)()})
        except Exception:  # one of the two needs the key
            continue
        # Other shapes of tensors stop a start.
        if needs_of(left) == needs_of(filled) and text_of(left) != text_of(filled):
            wrong.append(key)
    assert [key for key in wrong if (family, key) not in COUNTED] == []
