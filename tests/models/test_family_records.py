"""A plug-in declares its families as cpuserve does: all their names and parts are known."""

import copy
import dataclasses
import json
from importlib import import_module
from types import SimpleNamespace

import gguf
import msgspec
import pytest

from cpuserve import models
from cpuserve.base import plugins
from cpuserve.base.errors import ModelError
from cpuserve.config.fields import FIELDS
from cpuserve.config.speculation import MTP, read_speculation
from cpuserve.loader.gguf.archs import table as archs
from cpuserve.loader.gguf.archs.record import GgufArch
from cpuserve.loader.gguf.mmproj import find_projector
from cpuserve.loader.gguf.projectors.record import Projector
from cpuserve.loader.load import with_built
from cpuserve.loader.names import is_ignored
from cpuserve.loader.speculation import assistants
from cpuserve.loader.speculation.guess_heads import guesses_of
from cpuserve.media.decoding.wire import PackedFamily
from cpuserve.media.pictures.families.base import Family
from cpuserve.media.pictures.families.checkpoint import family_of
from cpuserve.models.base import MODELS
from cpuserve.models.decoders import Llama
from cpuserve.models.families import FAMILIES, declared
from cpuserve.models.family import (
    NEXTN,
    Guesses,
    ModelFamily,
    TextType,
    TokenizerTables,
    ToolTables,
    Whole,
)
from cpuserve.models.stored_names import BuiltTensors
from cpuserve.models.text_parts import text_config
from cpuserve.models.towers import TOWERS
from cpuserve.quant.first_rows import FirstRows
from cpuserve.serving.tools import families as formats
from cpuserve.serving.tools import thoughts
from cpuserve.serving.tools.layout import CallLayout, LayoutFormat
from cpuserve.serving.tools.object_calls import NAMED_JSON
from cpuserve.tokenizer.from_gguf import GgufTokenizer
from cpuserve.tokenizer.greedy import longest_match
from cpuserve.tokenizer.splits import PreTokenizer, pre_tokenizer
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.helpers.tiny import tiny_config


class Sample:
    """A Llama with two rows in each bias, of which its Program reads the first."""

    spec = staticmethod(Llama.spec)
    build = staticmethod(Llama.build)

    @staticmethod
    def built(_config):
        return BuiltTensors("cpuserve.quant.first_rows:FirstRows", (".bias",))

    @staticmethod
    def fitted(config, names):
        return {**config, "biased": "lm_head.bias" in names}


class SamplePictures(Family, frozen=True, kw_only=True):
    """Pictures of one row."""

    document_page_side = 64


def read_pictures(files):
    return SamplePictures(patch=files.processor["patch_size"], marker="<picture>")


class SampleAssistant:
    """An assistant that fits no model."""

    @staticmethod
    def build(_config, target, refuse):
        refuse(f"{target.architecture} has no layers for it")


def read_sample(path, settings):
    assert settings == {}
    words = path.read_text().split()
    tokens = [*(word.encode() for word in words), *(bytes([byte]) for byte in range(256))]
    return longest_match({token: i for i, token in enumerate(tokens)}, {})


SPLITS = PreTokenizer((r"\p{N}",))


def build_sample(_file, vocab, pre):
    assert pre is SPLITS
    return longest_match({token.encode("latin-1"): i for i, token in enumerate(vocab.tokens)}, {})


IN_GGUF = GgufTokenizer("byte_level", build_sample, pre="sample")
CALLS = LayoutFormat("sample", CallLayout("", "<|sample|>", " ", "<|end|>"), NAMED_JSON)
GGUF = GgufArch("SampleForCausalLM", "sample")
PROJECTOR = Projector({"SampleForCausalLM": "SampleForConditionalGeneration"}, dict, {}, "", {})
SAMPLE = ModelFamily(
    ("SampleForCausalLM", "OldSampleForCausalLM"),
    f"{__name__}:Sample",
    text_types={"sample_text": TextType({"hidden_size": 64})},
    wholes=(
        Whole(
            ("SampleForConditionalGeneration",),
            "sample_text",
            tied=True,
            tower="cpuserve.models.llava:LlavaTower",
            media={"sample": f"{__name__}:read_pictures"},
            unread=(r"sample_sound\..*",),
            projectors={"samplev": f"{__name__}:PROJECTOR"},
            mmproj={"SampleForCausalLM": "mlp"},
        ),
    ),
    rerankers=("SampleForSequenceClassification",),
    gguf={"sample": f"{__name__}:GGUF"},
    guesses=Guesses(NEXTN),
    assistants={"SampleAssistantForCausalLM": f"{__name__}:SampleAssistant"},
    mtp_methods=("sample_mtp",),
    tokenizer=TokenizerTables(
        files={"sample*.words": f"{__name__}:read_sample"},
        gguf={"sample": f"{__name__}:IN_GGUF"},
        splits={"sample": f"{__name__}:SPLITS"},
    ),
    tools=ToolTables(
        calls={"sample": f"{__name__}:CALLS"},
        hints={"sample": ("<|sample|>",)},
        thoughts={"sample": ("<muse>", "</muse>")},
    ),
)
NAMES = sorted({*SAMPLE.architectures, *SAMPLE.rerankers, *SAMPLE.wholes[0].architectures})


@pytest.fixture
def plugged(monkeypatch):
    """Return a function that installs an object under names; all tables are put back after it."""
    tables = {
        field.name: copy.copy(getattr(FAMILIES, field.name))
        for field in dataclasses.fields(FAMILIES)
    }
    lazy = [
        (registry, dict(registry._lazy), dict(registry._values)) for registry in (MODELS, TOWERS)
    ]

    def install(record, names=NAMES):
        points = tuple(
            SimpleNamespace(name=name, value="sample:FAMILY", dist=None, load=lambda: record)
            for name in names
        )
        monkeypatch.setattr(plugins, "installed", lambda _group: points)
        models.add_plugins.cache_clear()

    yield install
    models.add_plugins.cache_clear()
    for name, table in tables.items():
        setattr(FAMILIES, name, table)
    for registry, places, values in lazy:
        registry._lazy, registry._values = places, values


@pytest.mark.parametrize("name", NAMES)
def test_a_plug_in_is_known_by_each_of_its_names(plugged, name):
    plugged(SAMPLE)
    assert models.architecture_of({"architectures": [name]}) in SAMPLE.architectures
    assert models.find_model("OldSampleForCausalLM") is Sample
    assert FAMILIES.shown("OldSampleForCausalLM") == "SampleForCausalLM"
    assert FAMILIES.rerankers["SampleForSequenceClassification"] == "SampleForCausalLM"
    assert guesses_of("SampleForCausalLM") is SAMPLE.guesses
    assert "SampleForConditionalGeneration" in TOWERS
    config = text_config("SampleForConditionalGeneration", {"text_config": {"vocab_size": 10}})
    assert (config["hidden_size"], config["vocab_size"]) == (64, 10)
    assert config["tie_word_embeddings"]


def test_a_plug_in_with_the_name_of_a_built_in_family_is_refused(plugged):
    plugged(dataclasses.replace(SAMPLE, rerankers=("BertForSequenceClassification",)))
    with pytest.raises(ModelError, match="has names of built-in families: BertForSequence"):
        models.find_model("SampleForCausalLM")
    assert FAMILIES.rerankers["BertForSequenceClassification"] == "BertModel"


def test_a_plug_in_reads_gguf_files_of_its_architecture(plugged, monkeypatch):
    monkeypatch.setattr(archs, "ARCHS", dict(archs.ARCHS))
    assert archs.find("sample") is None
    plugged(SAMPLE, ["sample"])
    assert archs.find("sample") is GGUF
    assert models.find_model(GGUF.family) is Sample


def test_a_plug_in_reads_pictures_with_a_class_of_its_own(plugged, tmp_path):
    plugged(SAMPLE)
    config = {"architectures": ["SampleForConditionalGeneration"], "model_type": "sample"}
    for name, content in (("config", config), ("preprocessor_config", {"patch_size": 14})):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    family = family_of(tmp_path)
    assert family == SamplePictures(patch=14, marker="<picture>")
    sent = msgspec.msgpack.encode(PackedFamily.of(family))
    assert msgspec.msgpack.decode(sent, type=PackedFamily).family() == family


def test_a_plug_in_says_which_tensors_are_left(plugged):
    plugged(SAMPLE)
    names = models.stored_names({"architectures": ["SampleForConditionalGeneration"]})
    assert is_ignored("sample_sound.0.weight", names=names)
    assert not is_ignored("sample_sound.0.weight")


def test_a_plug_in_reads_mmproj_files_of_its_kind_and_of_known_kinds(plugged):
    assert find_projector("samplev") is None
    plugged(SAMPLE, ["samplev"])
    assert find_projector("samplev") is PROJECTOR
    wholes = find_projector("mlp").wholes
    assert wholes["SampleForCausalLM"] == "SampleForConditionalGeneration"
    assert wholes["LlamaForCausalLM"] == "LlavaForConditionalGeneration"


def test_a_plug_in_has_a_method_of_speculation(plugged):
    plugged(SAMPLE)
    assert read_speculation({"method": "sample_mtp"}).method == MTP
    with pytest.raises(ValueError, match="method must be"):
        read_speculation({"method": "other_mtp"})


def test_a_plug_in_has_assistants_of_its_own(plugged, monkeypatch, tmp_path):
    plugged(SAMPLE)
    model = {**tiny_config("llama"), "architectures": ["SampleForCausalLM"]}
    models.find_model("SampleForCausalLM")
    config = {"architectures": ["SampleAssistantForCausalLM"]}
    monkeypatch.setattr(assistants, "read_config", lambda _path: model)
    monkeypatch.setattr(assistants, "open_checkpoint", lambda _: SimpleNamespace(config=config))
    with pytest.raises(ModelError, match="SampleForCausalLM has no layers for it"):
        assistants.open_assistant(tmp_path, tmp_path)
    monkeypatch.setitem(model, "architectures", ["LlamaForCausalLM"])
    with pytest.raises(ModelError, match="is LlamaForCausalLM, not a model"):
        assistants.open_assistant(tmp_path, tmp_path)


def test_a_plug_in_builds_tensors_and_keys_from_those_of_its_files(plugged):
    plugged(SAMPLE)
    config = {"architectures": ["SampleForCausalLM"]}
    weights = SimpleNamespace(names=set)
    assert isinstance(with_built(weights, config), FirstRows)
    assert with_built(weights, config, gguf=True) is weights
    assert models.fitted(config, {"lm_head.bias"})["biased"]
    assert not models.fitted(config, set())["biased"]


def test_a_decoder_that_differs_in_configuration_is_its_record(plugged):
    differs = {"positions": 100, "bias": ("with_biases", True), "defaults": {"rms_norm_eps": 1e-3}}
    record = ModelFamily(("SampleForCausalLM",), "cpuserve.models.decoders:Llama", differs=differs)
    plugged(record, ["SampleForCausalLM"])
    sizes = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 64}
    config = {**sizes, "num_hidden_layers": 1, "num_attention_heads": 2}
    spec = models.spec_from_config({"architectures": ["SampleForCausalLM"], **config})
    assert (spec.max_position, spec.qkv_bias, spec.norm_eps) == (100, True, 1e-3)
    assert {need.name for need in models.build_program(spec).weights if "bias" in need.name}
    with_keys = {"max_position_embeddings": 200, "with_biases": False, "rms_norm_eps": 1e-4}
    spec = models.spec_from_config({"architectures": ["SampleForCausalLM"], **config, **with_keys})
    assert (spec.max_position, spec.qkv_bias, spec.norm_eps) == (200, False, 1e-4)


def test_a_plug_in_brings_a_tool_format_and_the_tags_of_its_thoughts(plugged):
    options = {field.name: field for field in FIELDS}
    with pytest.raises(ValueError, match="choose one of auto, none"):
        options["tool_call_parser"].parse("sample")
    plugged(SAMPLE)
    assert options["tool_call_parser"].parse("sample") == "sample"
    assert options["reasoning_parser"].parse("sample") == "sample"
    assert formats.family("sample") is CALLS
    assert formats.hinted("{{ '<|sample|>' }}", lambda _: False) == "sample"
    assert thoughts.tags_of("sample") == thoughts.ThinkTags("<muse>", "</muse>")
    assert thoughts.tags_in("... <muse>") == thoughts.tags_of("sample")


def test_a_plug_in_reads_tokenizers_that_only_its_family_has(plugged, tmp_path):
    (tmp_path / "sample-1.words").write_text("hello world")
    with pytest.raises(ModelError):
        Tokenizer.load(tmp_path)
    assert pre_tokenizer("sample") is None
    plugged(SAMPLE)
    assert pre_tokenizer("sample") is SPLITS
    assert Tokenizer.load(tmp_path).encode("helloworld!") == [0, 1, 2 + ord("!")]


def test_a_plug_in_builds_the_tokenizers_of_its_gguf_files(plugged, tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "sample")
    writer.add_tokenizer_model("sample")
    writer.add_token_list([*map(chr, range(256)), "hello"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="tokenizer model 'sample' is not supported"):
        Tokenizer.load(path)
    plugged(SAMPLE)
    assert Tokenizer.load(path).encode("hello!") == [256, ord("!")]


def test_a_plug_in_does_not_replace_a_tool_format(plugged):
    kimi = formats.family("kimi_k2")
    own = ToolTables(calls={"kimi_k2": f"{__name__}:CALLS", "hermes": f"{__name__}:CALLS"})
    plugged(dataclasses.replace(SAMPLE, tools=own))
    assert "hermes" in formats.names()
    assert formats.family("kimi_k2") is kimi is not CALLS
    assert formats.family("hermes") is formats.HERMES


def test_no_name_is_declared_twice():
    names = [
        name
        for record in declared()
        for whole in ((record,) if isinstance(record, Whole) else (record, *record.wholes))
        for name in whole.architectures
    ]
    assert len(names) == len(set(names))


def test_the_code_that_records_name_exists():
    places = {whole.tower for whole in FAMILIES.wholes.values() if whole.tower}
    places |= {family.text for family in FAMILIES.texts.values()} | {*FAMILIES.media.values()}
    places |= {place for family in FAMILIES.texts.values() for place in family.assistants.values()}
    places |= {*FAMILIES.gguf.values(), *FAMILIES.projectors.values()}
    own = FAMILIES.tokenizer
    for table in (own.files, own.gguf, own.splits, FAMILIES.tools.calls):
        places |= {*table.values()}
    for place in sorted(places):
        module, _, name = place.partition(":")
        assert hasattr(import_module(module), name), place
