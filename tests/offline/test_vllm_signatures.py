"""The offline API is vLLM's: each public name, argument and default of vLLM is here, or on a list.

tests/golden/vllm_offline.json has the names and defaults of vLLM, as its sources have them.
The lists below say what cpuserve refuses, and why.
"""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path

import pytest

import cpuserve
from cpuserve.base.errors import InvalidRequest
from cpuserve.config.fields import argument_name, keywords, no_op_flags
from cpuserve.config.load import from_arguments
from cpuserve.config.missing import why_missing
from cpuserve.llm import LLM
from cpuserve.offline.arguments import METHODS, engine_options
from cpuserve.outputs import CompletionOutput
from cpuserve.sampling import fields as sampling_fields
from cpuserve.sampling import pooling
from cpuserve.sampling_params import BeamSearchParams, RepetitionDetectionParams

RECORDED = json.loads(
    (Path(__file__).parents[1] / "golden" / "vllm_offline.json").read_text(encoding="utf-8")
)
CLASSES = RECORDED["classes"]
REQUIRED = object()

NO_ENGINE = "programs use LLM, or the server: the engine has another interface"
PACKAGE = {
    "AsyncEngineArgs": NO_ENGINE,
    "AsyncLLMEngine": NO_ENGINE,
    "LLMEngine": NO_ENGINE,
    "ModelRegistry": "model families are entry points (docs/design/programs.md)",
    "initialize_ray_cluster": "one engine runs on one machine",
}
ENGINES = "vLLM's engine calls it"
MAKES = "vLLM's engine makes the output with it"
ONE_WAY = "pictures are read in one way only"
DIGESTS = "a picture is known by the digest of its bytes"
# (class, name): why there is no such method, property, field or argument.
REFUSED = {
    ("SamplingParams", "all_stop_token_ids"): ENGINES,
    ("SamplingParams", "bad_words_token_ids"): ENGINES,
    ("SamplingParams", "eos_token_id"): ENGINES,
    ("SamplingParams", "for_sampler_warmup"): ENGINES,
    ("SamplingParams", "update_from_generation_config"): ENGINES,
    ("SamplingParams", "update_from_tokenizer"): ENGINES,
    ("SamplingParams", "verify"): ENGINES,
    ("StructuredOutputsParams", "all_constraints_none"): ENGINES,
    ("StructuredOutputsParams", "all_non_structural_tag_constraints_none"): ENGINES,
    ("PoolingParams", "all_parameters"): ENGINES,
    ("PoolingParams", "valid_parameters"): ENGINES,
    ("PoolingParams", "verify"): ENGINES,
    ("RequestOutput", "add"): "LLM returns whole outputs, which need no joining",
    ("EmbeddingOutput", "from_base"): MAKES,
    ("EmbeddingRequestOutput", "from_base"): MAKES,
    ("ClassificationOutput", "from_base"): MAKES,
    ("ClassificationRequestOutput", "from_base"): MAKES,
    ("ScoringOutput", "from_base"): MAKES,
    ("ScoringRequestOutput", "from_base"): MAKES,
    ("TextPrompt", "media_io_kwargs"): ONE_WAY,
    ("TextPrompt", "multi_modal_uuids"): DIGESTS,
    ("TokensPrompt", "media_io_kwargs"): ONE_WAY,
    ("TokensPrompt", "multi_modal_uuids"): DIGESTS,
    ("TokensPrompt", "token_type_ids"): "the tokenizer finds the types of the tokens of pairs",
    ("TokensPrompt", "prompt_token_offsets"): "no result has offsets",
}
# (class or method, name): why the default is another one.
OTHER_DEFAULTS = {
    ("SamplingParams", "stop"): "an empty list, which vLLM makes of None",
    ("SamplingParams", "stop_token_ids"): "an empty list, which vLLM makes of None",
    ("SamplingParams", "bad_words"): "an empty list, which means the same",
    ("StructuredOutputsParams", "disable_additional_properties"): (
        "True: an object with properties has no further members, unless the schema permits them"
    ),
    ("LLM.chat", "add_generation_prompt"): "None: True unless continue_final_message is set",
    ("LLM.enqueue_chat", "add_generation_prompt"): "None: as in chat",
    ("RequestOutput", "num_cached_tokens"): "0, and never None",
    ("LLM.__init__", "dtype"): "None: the type of the checkpoint, which is auto",
    ("LLM.__init__", "tensor_parallel_size"): "None: auto, one rank for each NUMA node",
    ("LLM.__init__", "seed"): "None: the same as 0",
}


def class_of(name):
    if name in ("BeamSearchParams", "RepetitionDetectionParams"):
        return {"BeamSearchParams": BeamSearchParams}.get(name, RepetitionDetectionParams)
    return getattr(cpuserve, name)


def parameters(function):
    """Return {name: (position or None, default)} of a class or a method, without self."""
    found, place = {}, 0
    for name, each in inspect.signature(function).parameters.items():
        if name == "self" or each.kind is each.VAR_KEYWORD:
            continue
        keyword = each.kind is each.KEYWORD_ONLY
        default = REQUIRED if each.default is each.empty else each.default
        found[name] = (None if keyword else place, default)
        place += not keyword
    return found


def value_of(text):
    """The value of a default: a literal, or the name of an enum's member."""
    try:
        return ast.literal_eval(text)
    except ValueError:
        return {
            "RequestOutputKind.CUMULATIVE": sampling_fields.RequestOutputKind.CUMULATIVE,
            "RequestOutputKind.FINAL_ONLY": sampling_fields.RequestOutputKind.FINAL_ONLY,
            "msgspec.field(default=None)": None,
        }[text]


def check_default(where, name, recorded, own):
    if recorded is None:
        return
    same = own is not REQUIRED and own == value_of(recorded)
    assert same != ((where, name) in OTHER_DEFAULTS), f"{where}: default of {name}"


def methods():
    for name, recorded in CLASSES.items():
        for method in recorded["methods"]:
            if (name, method) not in REFUSED and not (name == "LLM" and method in METHODS):
                yield name, method


@pytest.mark.parametrize(("name", "method"), list(methods()))
def test_a_method_takes_the_arguments_of_vllm(name, method):
    own = class_of(name)
    function = own if method == "__init__" else getattr(own, method)
    takes_any = any(
        each.kind is each.VAR_KEYWORD for each in inspect.signature(function).parameters.values()
    )
    found = parameters(function)
    order = list(found)
    where = name if method == "__init__" and name != "LLM" else f"{name}.{method}"
    for place, recorded in enumerate(CLASSES[name]["methods"][method]):
        argument, default = recorded["name"], recorded.get("default")
        if recorded["kind"] == "positional":  # its name does not matter
            assert found[order[place]][0] == place
            continue
        if argument not in found and takes_any:
            continue  # the tests of options and of from_optional look at these
        assert argument in found, f"{where} has no argument {argument}"
        if recorded["kind"] == "any" and not inspect.isclass(function):
            assert found[argument][0] == place, f"{where}: the place of {argument}"
        check_default(where, argument, default, found[argument][1])


@pytest.mark.parametrize("name", [n for n, found in CLASSES.items() if found["fields"]])
def test_a_class_has_the_fields_of_vllm(name):
    own = class_of(name)
    prompt = name.endswith("Prompt")
    found = dict.fromkeys(own.__annotations__) if prompt else parameters(own)
    for field, default in CLASSES[name]["fields"].items():
        if (name, field) in REFUSED:
            assert field not in found
            continue
        assert field in found or (name, field) == ("TokensPrompt", "prompt"), f"{name}.{field}"
        if not prompt:
            check_default(name, field, default, found[field][1])


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_the_properties_of_vllm(name):
    own = class_of(name)
    for each in CLASSES[name]["properties"]:
        assert hasattr(own, each) != ((name, each) in REFUSED), f"{name}.{each}"


def test_the_package_has_the_names_of_vllm():
    for name in RECORDED["package"]:
        assert (name in cpuserve.__all__) != (name in PACKAGE), name


def test_a_method_that_llm_does_not_have_says_why():
    llm = LLM.__new__(LLM)
    recorded = set(CLASSES["LLM"]["methods"])
    assert recorded & METHODS.keys() == {name for name in recorded if not hasattr(LLM, name)}
    for name, why in METHODS.items():
        with pytest.raises(AttributeError, match="has no attribute") as raised:
            getattr(llm, name)
        assert why in str(raised.value)


@pytest.mark.parametrize("option", [each["name"] for each in CLASSES["LLM"]["methods"]["__init__"]])
def test_an_option_of_llm_has_an_effect_or_a_reason(option):
    harmless = {argument_name(flag) for flag in no_op_flags()}
    assert option in keywords() or option in harmless or why_missing(option), option


def test_the_defaults_of_vllms_options_are_accepted():
    defaults = {
        each["name"]: value_of(each["default"])
        for each in CLASSES["LLM"]["methods"]["__init__"]
        if "default" in each
    }
    assert from_arguments(engine_options(defaults)).options.dtype == "auto"


def test_the_lists_name_only_what_vllm_has():
    known = {
        (name, each)
        for name, recorded in CLASSES.items()
        for each in [*recorded["methods"], *recorded["fields"], *recorded["properties"]]
    }
    assert set(REFUSED) <= known
    assert set(PACKAGE) <= set(RECORDED["package"])


@pytest.mark.parametrize("name", sampling_fields.REFUSED)
def test_a_sampling_field_that_is_refused_is_named(name):
    wrong = {"flat_logprobs": True, "watermarking": True}.get(name, 5)
    with pytest.raises(InvalidRequest, match=f"{name} is not supported, because"):
        cpuserve.SamplingParams(**{name: wrong})


@pytest.mark.parametrize("name", pooling.REFUSED)
def test_a_pooling_field_that_is_refused_is_named(name):
    with pytest.raises(InvalidRequest, match=f"{name} is not supported, because"):
        cpuserve.PoolingParams(**{name: {"a": 1}})


def test_from_optional_takes_the_defaults_of_vllm():
    recorded = CLASSES["SamplingParams"]["methods"]["from_optional"]
    fields = {each["name"]: value_of(each["default"]) for each in recorded}
    assert cpuserve.SamplingParams.from_optional(**fields) == cpuserve.SamplingParams()
    nothing = dict.fromkeys(fields) | {"max_tokens": 3}
    assert cpuserve.SamplingParams.from_optional(**nothing) == cpuserve.SamplingParams(max_tokens=3)


def test_completions_are_made_with_the_names_of_vllm():
    done = CompletionOutput(
        index=0, text="a", token_ids=[1], cumulative_logprob=None, logprobs=None
    )
    assert done.lora_request is done.routed_experts is None
