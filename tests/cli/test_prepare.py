"""Facts about a model that are known before a tensor is read, and the banner that shows them."""

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path

import msgspec
import pytest

from cpuserve.api.lifecycle.model_details import details_of
from cpuserve.base.errors import ConfigError, ModelError, StartupError, TooLittleMemory
from cpuserve.cli import banner
from cpuserve.cli import main as cli
from cpuserve.cli.session import sampling_fields
from cpuserve.config.fields import FIELDS
from cpuserve.config.load import from_arguments
from cpuserve.config.options import EngineOptions
from cpuserve.config.several import for_another
from cpuserve.core.admission import Limits
from cpuserve.loader.safetensors import SafetensorsFile, SafetensorsStore
from cpuserve.platforms.cpu import CpuPlatform
from cpuserve.prepare import Prepared, kv_cache_bytes, model_facts, prepare
from cpuserve.serving.calls.call import GenerateCall
from cpuserve.serving.calls.params import sampling_params
from tests.helpers.adapter import adapter_of
from tests.helpers.depth import deep_but
from tests.helpers.hosts import LLAMA_1B, SMOLLM2, load_host, resolve
from tests.helpers.tiny import ENCODERS, FAMILIES, SAMPLE, tiny_model

KV_DTYPES = next(f.choices for f in FIELDS if f.name == "kv_cache_dtype")[1:]  # without "auto"


@pytest.mark.parametrize("family", deep_but(SAMPLE, [*FAMILIES, *ENCODERS]))
def test_the_weights_of_matrices_are_counted_as_the_checkpoint_has_them(family):
    path = tiny_model(family)
    _, facts = model_facts(EngineOptions(), path)
    store = SafetensorsStore(path)
    # These stay fp32, as vectors do.
    others = ("embed_positions.weight", "wpe.weight", "position_embeddings.weight")
    others += ("positions_embed.weight",)
    others += ("token_type_embeddings.weight", "_coefs.weight")
    others += ("relative_attention_bias.weight", "rel_embeddings.weight")
    others += ("moe_statics.e_score_correction_bias", "index_kpool_compress_ape", ".A_log")
    others += (".attn.r_k", ".attn.x_x", ".attn.bonus", ".x_proj.2.bias")
    others += (".compressor.ape", ".gate.tid2eid")
    others += (".mamba.D", ".dt_proj.bias")  # Zamba has a row for each head
    shapes = [store.get(n).shape for n in store.names() if not n.endswith(others)]
    # A stack of matrices has three dimensions, and so has a convolution, of one column.
    matrices = [s for s in shapes if len(s) == 2 or (len(s) == 3 and s[1] > 1)]
    assert facts.matrix_weights == sum(map(math.prod, matrices))


def details(model, **options):
    asked = from_arguments({"model": str(model), "enable_prefix_caching": False, **options})
    return details_of(prepare(asked))


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"vision_config": {"depth": 1}}, "vision"),
        ({"vision_config": {"depth": 1}, "audio_config": {"depth": 1}}, "vision and audio"),
        ({}, None),
    ],
)
def test_the_start_says_that_pictures_are_not_read(tmp_path, parts, named):
    shutil.copytree(tiny_model("gemma3"), tmp_path, dirs_exist_ok=True)
    text = json.loads((tmp_path / "config.json").read_text())
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, **parts}
    (tmp_path / "config.json").write_text(json.dumps(config))
    prepared = prepare(from_arguments({"model": str(tmp_path)}))
    found = [note for note in prepared.notes if "is served as a text model" in note]
    assert len(found) == (named is not None)
    assert all(f"its part for {named} is not read" in note for note in found)


def test_the_start_says_that_a_model_reads_pictures_but_no_sound(tmp_path):
    from tests.helpers.pictures import OMNI, write_grid_model

    write_grid_model(OMNI, tmp_path)
    for file in tiny_model("llama").glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    prepared = prepare(from_arguments({"model": str(tmp_path), "max_model_len": 128}))
    (found,) = [note for note in prepared.notes if "is not read" in note]
    assert "reads texts and pictures: its part for audio is not read" in found
    assert "requests with sound are refused" in found


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "bert"])
def test_the_details_of_a_model_are_those_of_its_files(family):
    path = tiny_model(family)
    config = json.loads((path / "config.json").read_text())
    store = SafetensorsStore(path)
    found = details(path)
    assert found.parameters == sum(math.prod(store.get(n).shape) for n in store.names())
    assert found.size_bytes >= 4 * found.parameters
    assert (found.source, found.family, found.format) == (
        path.name, config["model_type"], "safetensors",
    )  # fmt: skip
    assert (found.vocab, found.width, found.layers, found.trained_len) == tuple(
        config[name]
        for name in (
            *("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"),
        )
    )
    assert found.quantization == "F32"
    # Only `path` has the folders, and no response has `path`.
    assert str(path.parent) not in str(dataclasses.replace(found, path=""))


def test_the_details_of_a_model_leave_adapters_out_and_say_how_it_was_quantized():
    path = tiny_model("llama")
    adapters = [f"polite={adapter_of(path)}"]
    assert details(path, lora_modules=adapters).parameters == details(path).parameters
    assert details(path, quantization="int8").quantization.startswith("int8")
    assert details(tiny_model("llama", dtype="bfloat16")).quantization == "BF16"


@pytest.mark.parametrize("family", ["qwen2", "bert", "gemma3n"])
def test_each_file_with_tensors_is_opened_once(family, monkeypatch):
    """Of gemma3n the search for an untied head and the sizes of its tables read them."""
    path, opened = tiny_model(family), []
    real = SafetensorsFile.__init__
    monkeypatch.setattr(
        SafetensorsFile, "__init__", lambda self, file: (opened.append(file), real(self, file))[1]
    )
    model_facts(EngineOptions(), path)
    assert sorted(opened) == sorted(path.glob("*.safetensors"))


def test_a_model_without_attention_has_blocks_of_names_alone():
    path = tiny_model("mamba2")
    prepared = prepare(from_arguments({"model": str(path), "max_num_seqs": 2, "max_model_len": 96}))
    config = prepared.resolved.replicas[0]
    assert (config.kv_blocks, config.state_slots) == (8, 12)  # three blocks of each, and spare ones
    states = config.state_slots * prepared.facts.state_bytes
    assert kv_cache_bytes(prepared) == 8 * 512 + states


@pytest.mark.parametrize(
    "named", [None, 0, 1e9, True, "BertForSequenceClassification", {}, [], [7]]
)
def test_architectures_that_are_no_list_of_names_are_refused(named, tmp_path):
    path = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": named}))
    with pytest.raises(ModelError, match="names no architecture"):
        model_facts(EngineOptions(), path)


def banner_of(facts=SMOLLM2, host="vm_2core_zen5", **options):
    """Return the banner, in one line, for a machine that is described as data."""
    host = load_host(host) if isinstance(host, str) else host
    resolved = resolve(host, facts, **options)
    text = banner.render(Prepared(resolved, None, facts, host, CpuPlatform(), ()))
    return " ".join(text.split())


def test_the_banner_says_how_precise_activations_are_where_weights_are_quantized():
    assert "activations 16 bits (two int8 terms" in banner_of()
    assert "activations 8 bits (as requested" in banner_of(activation_bits="8")
    assert "activations" not in banner_of(LLAMA_1B)
    assert "activations" not in banner_of(LLAMA_1B, activation_bits="16")


def test_the_banner_says_that_int8_is_instead_of_the_requested_type_of_keys_and_values():
    assert "KV cache int8 (instead of fp8_e5m2: " in banner_of(kv_cache_dtype="fp8_e5m2")
    torch = {"host": "old_cpu_with_torch", "executor": "torch"}
    assert "KV cache int8 (instead of int8_v4: " in banner_of(kv_cache_dtype="int8_v4", **torch)
    assert "KV cache int8_v4 " in banner_of(kv_cache_dtype="int8_v4")
    assert "KV cache int8 " in banner_of(kv_cache_dtype="int8")
    assert "instead" not in banner_of(kv_cache_dtype="int8")


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_banner_names_the_attention_kernel_of_the_type_of_the_cache(kv_dtype, monkeypatch):
    names = CpuPlatform().kernels(CpuPlatform().host().isa_levels[-1])
    short = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "fp8_e5m2": "int8"}.get(
        kv_dtype, kv_dtype
    )
    name = f"attention.{short.removeprefix('fp8_')}"
    assert name in names
    monkeypatch.setattr(CpuPlatform, "kernels", lambda *_: {name: "the level of it"})
    assert "attention the level of it" in banner_of(kv_cache_dtype=kv_dtype)


def test_the_banner_says_what_requests_are_sampled_with():
    facts = dataclasses.replace(SMOLLM2, generation={"temperature": 0.0}, generation_why="why so")
    assert "temperature 0 unless a request sets other values (why so)" in banner_of(facts)
    text = banner_of(facts, override_generation_config={"temperature": 0.5, "top_k": 9})
    assert "temperature 0.5, top_k 9 unless a request sets other values (as requested" in text
    assert "sampling" not in banner_of()


def test_the_banner_says_how_several_sockets_are_used():
    text = banner_of(host="xeon_2s_amx")
    assert "NUMA replicas (2 sockets would read " in text
    assert "threads 31 on CPU 0-30; 31 on CPU 32-62: 2 engines, " in text
    assert "NUMA off (the 4 NUMA nodes are parts of one socket)" in banner_of(host="epyc_nps4")
    assert "NUMA" not in banner_of()


def test_the_banner_says_why_a_quota_binds_no_thread():
    text = banner_of(host="pod_quota_6_5_of_64")
    assert "threads 6 not pinned (the CPU quota of 6.5 lets 6 run without a stop; " in text
    assert "the kernel places threads, since the CPU quota of 6.5 is below the 64 CPUs" in text
    assert "kernel places" not in banner_of()
    host = load_host("xeon_2s_amx")
    group = msgspec.structs.replace(host.cgroup, cpu_quota=8.0)
    host = msgspec.structs.replace(host, cgroup=group)
    assert "threads 8 within CPU 0-31,64-95 (" in banner_of(host=host, numa="auto")


def test_the_banner_says_where_each_of_several_engines_runs():
    text = banner_of(data_parallel_size=2)
    assert "1 on CPU 0; 1 on CPU 1: 2 engines, each with a KV cache as below" in text


@pytest.fixture
def model():
    """A tiny model with a generation_config.json, which is removed afterwards."""
    path = tiny_model("llama", seed=7)
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "top_k": 5}))
    yield path
    (path / "generation_config.json").unlink()


def prepared(model, **arguments):
    return prepare(from_arguments({"model": str(model), **arguments}, environ={}))


def test_the_models_settings_reach_the_engine_config(model):
    resolved = prepared(model).resolved
    assert resolved.config.default_sampling == {"temperature": 0.3, "top_k": 5}
    assert prepared(model, generation_config="vllm").resolved.config.default_sampling == {}
    over = prepared(model, override_generation_config={"temperature": 0, "top_k": None})
    assert over.resolved.config.default_sampling == {"temperature": 0}


def test_an_override_out_of_range_is_refused_by_name(model):
    with pytest.raises(ConfigError, match="override_generation_config: top_p must be in"):
        prepared(model, override_generation_config={"top_p": 2})


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (None, "not found"),
        (
            {"vocab.json": "{}"},
            r"holds no tokenizer.json, no vocab.json with merges.txt, no tiktoken.model, no "
            r"rwkv_vocab\*.txt and no tokenizer.model",
        ),
    ],
    ids=["missing", "half"],
)
def test_a_missing_tokenizer_is_told_before_the_model_is_looked_for(tmp_path, files, why):
    path = tmp_path / "tokenizer"
    if files:
        path.mkdir()
        for name, text in files.items():
            (path / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"tokenizer: .*{why}; give a directory"):
        prepared("/nonexistent/model", tokenizer=str(path))


def test_a_link_to_missing_weights_is_named_before_they_are_counted(tmp_path):
    path = shutil.copytree(tiny_model("llama"), tmp_path / "m")
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to("../blobs/none")
    with pytest.raises(ModelError, match=r"model\.safetensors is a link to a file that does not"):
        prepared(str(path))


CLOSED = (
    rf"cannot be read: Permission denied; let user {os.geteuid()}, who runs cpuserve, read it and "
    "enter the directories above it"
)


@pytest.mark.parametrize("tokenizer", [False, True])
def test_a_directory_of_another_user_is_told_with_what_to_do(tmp_path, monkeypatch, tokenizer):
    path = shutil.copytree(tiny_model("llama"), tmp_path / "m")
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda at, mode: at != path and allowed(at, mode))
    options = {"tokenizer": str(path)} if tokenizer else {}
    with pytest.raises(StartupError, match=rf"m {CLOSED}"):
        prepared(str(tiny_model("llama") if tokenizer else path), **options)


def test_a_model_behind_a_closed_directory_is_not_called_missing(monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "lstat", refuse)
    with pytest.raises(ModelError, match=rf"/closed/m {CLOSED}"):
        prepared("/closed/m")
    with pytest.raises(ModelError, match="is not a model: give a Hugging Face id"):
        prepared("m")  # of a name that is no path, the current directory says nothing


def test_a_missing_chat_template_is_told_before_the_model_is_looked_for():
    with pytest.raises(ConfigError, match=r"chat_template: cannot read the chat template /nope"):
        prepared("/nonexistent/model", chat_template="/nope")


@pytest.mark.parametrize("kind", ["a FIFO", "a device", "too large", "no text", "no home"])
def test_a_chat_template_that_is_no_text_file_is_refused_at_once(kind, tmp_path):
    path, told = tmp_path / "t", "is a FIFO, not a regular file"
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a device":
        path, told = Path("/dev/zero"), "not a regular file"
    elif kind == "no home":
        path, told = Path("~has-no-home/t"), "cannot read the chat template ~has-no-home/t"
    else:
        path.write_bytes(b" " * 1_000_001 if kind == "too large" else b"\xff")
        told = "at most 1000000 are accepted" if kind == "too large" else "'utf-8' codec"
    with pytest.raises(ConfigError, match=rf"chat_template: .*{told}"):
        prepared("/nonexistent/model", chat_template=str(path))


def test_a_broken_chat_template_is_told_at_the_start_not_to_each_client(tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}")
    for given in (str(tmp_path / "t.jinja"), "{% for %}"):
        with pytest.raises(ConfigError, match=r"chat_template: the chat template is broken: "):
            prepared("/nonexistent/model", chat_template=given)


def test_cpuserve_config_shows_the_default_sampling(model, capsys):
    argv = ["config", str(model), "--override-generation-config", '{"top_k": 6}', "--json"]
    assert cli.main(argv) == 0
    rows = {row["field"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["generation_config"]["got"] == {"temperature": 0.3, "top_k": 5}
    assert rows["override_generation_config"]["got"] == {"temperature": 0.3, "top_k": 6}
    assert rows["override_generation_config"]["source"] == "flag --override-generation-config"


def params_of(found, own, *arguments):
    """How `generate` samples with these flags; own: the length of its answers."""
    fields = sampling_fields(cli.build_parser().parse_args(arguments))
    call = GenerateCall(prompt="a", default_max_tokens=own, **fields)
    limits = Limits(max_model_len=8192, kv_tokens=8192, vocab=256)
    (params,) = sampling_params(call, [[1]], limits, found.resolved.config.default_sampling)
    return params


@pytest.mark.parametrize(
    ("flags", "temperature", "top_k", "max_tokens"),
    [
        ([], 0.3, 5, 256),
        (["--temperature=1", "--top-k=0", "--max-tokens=4"], 1.0, 0, 4),
        (["--temperature=0"], 0.0, 5, 256),
    ],
)
def test_the_terminal_takes_the_defaults_under_its_flags(
    model, flags, temperature, top_k, max_tokens
):
    params = params_of(prepared(model), 256, "generate", str(model), *flags)
    wanted = (temperature, top_k, max_tokens)
    assert (params.temperature, params.top_k, params.max_tokens) == wanted


@pytest.mark.parametrize(("own", "length"), [(None, 1024), (256, 256), (4096, 1024)])
def test_on_the_terminal_the_shorter_of_two_default_lengths_counts(model, own, length):
    lengths = {"override_generation_config": {"max_new_tokens": 1024}}
    found = prepared(model, **lengths)
    assert params_of(found, own, "generate", str(model)).max_tokens == length
    asked = params_of(found, own, "generate", str(model), "--max-tokens=2000")
    assert asked.max_tokens == 2000


def test_memory_that_is_promised_to_other_models_is_not_free(monkeypatch):
    host = load_host("vm_2core_zen5")
    monkeypatch.setattr(CpuPlatform, "host", lambda self: host)
    asked = from_arguments({"model": str(tiny_model("llama")), "kv_cache_space": "1"})
    alone = prepare(asked)
    assert 0.9 * 2**30 < kv_cache_bytes(alone) <= 2**30
    free = host.memory_free
    assert prepare(asked, promised_bytes=free // 4).resolved.config == alone.resolved.config
    with pytest.raises(TooLittleMemory, match=r"1\.00 GiB does not fit"):
        prepare(asked, promised_bytes=free - 2**30)
    with pytest.raises(TooLittleMemory, match="not enough memory"):
        prepare(asked, promised_bytes=free)


def test_another_model_keeps_the_options_that_do_not_describe_one(tmp_path):
    template = tmp_path / "template"
    template.write_text("{{ messages }}")
    given = {"model": "one", "served_model_name": ["x"], "chat_template": str(template),
             "revision": "main", "max_num_seqs": 3}  # fmt: skip
    options = for_another(from_arguments(given), "two", "/models/two").options
    assert (options.model, options.served_model_name) == ("/models/two", ["two"])
    assert (options.chat_template, options.revision, options.max_num_seqs) == (None, None, 3)
