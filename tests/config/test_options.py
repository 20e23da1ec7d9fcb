"""Flags override the environment, the environment the file; every option refuses bad values."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import pytest

import cpuserve
from cpuserve.base.errors import ConfigError
from cpuserve.cli import flags
from cpuserve.config import env
from cpuserve.config.env import read_env
from cpuserve.config.field import GROUPS, Alias, fields_of, option
from cpuserve.config.fields import BY_NAME, FIELDS, NO_OPS, keywords
from cpuserve.config.load import Given, flag_given, from_arguments, load_options, read_file
from cpuserve.config.options import EngineOptions
from cpuserve.config.server import ServerOptions

# What is no path: of a user that does not exist, and a text that no file system takes.
NO_PATHS = ["", "~has-no-home/x", "a\0b"]
BAD = {
    "limit_mm_per_prompt": ["8", '{"image": -1}', '{"image": 1.5}', '{"smell": 1}'],
    "mm_processor_kwargs": ["x", "[1]"],
    "image_max_tokens": ["-1", "many"],
    "mm_encoder_quantization": ["", "int4", "bf16"],
    "image_min_tokens": ["-1", "many"],
    "allowed_media_domains": ["https://a.example/x", ""],
    "allowed_local_media_path": NO_PATHS,
    "image_fetch_timeout": ["0", "soon"],
    "model": [""],
    "revision": [""],
    "tokenizer": [""],
    "mmproj": NO_PATHS,
    "dtype": ["float8", "int8", ""],
    "activation_bits": ["", "4", "eight"],
    "quantization": [""],
    "model_impl": ["torch"],
    "pooling": ["max", ""],
    "lora_modules": [
        "",
        "name=~has-no-home/x",
        "name",
        "=dir",
        "a=",
        "a=x,a=y",
        "{",
        "[" * 100_000,
        "[1]",
        '{"name": "a"}',
        '{"name": "a", "path": 1}',
        '{"name": "a", "path": ""}',
        '{"name": "a=b", "path": "x"}',
        '{"name": "a", "path": "x", "rank": 8}',
        '[{"name": "a", "path": "x"}, "a=y"]',
    ],
    "allow_runtime_lora_updating": ["maybe"],
    "max_loras": ["0", "-1", "x", "1025"],
    "max_lora_rank": ["0", "513", "x"],
    "chat_template": [""],
    "tool_call_parser": ["", "unknown"],
    "reasoning_parser": ["", "unknown"],
    "max_model_len": ["0", "-2", "abc", "1.5", "4096.0"],
    "generation_config": [""],
    "override_generation_config": [
        "",
        "{",
        "[]",
        "3",
        '{"temprature": 1}',
        '{"top_k": 1.5}',
        '{"temperature": "hot"}',
        '{"temperature": true}',
        '{"max_new_tokens": 0}',
        "[" * 100_000,
    ],
    "seed": ["-1", "x"],
    "host": [""],
    "port": ["-1", "65536", "http", "80.5"],
    "uds": NO_PATHS,
    "api_key": ["", "a,,b", "schlüssel"],
    "api_key_file": NO_PATHS,
    "ssl_certfile": NO_PATHS,
    "ssl_keyfile": NO_PATHS,
    "ssl_keyfile_password": ["a" * 1024, "\N{GREEK SMALL LETTER ALPHA}" * 512],
    "ssl_cert_reqs": ["3", "maybe", ""],
    "ssl_ca_certs": NO_PATHS,
    "access_log": ["some", "1"],
    "access_log_format": ["xml"],
    "audit": NO_PATHS,
    "otlp_traces_endpoint": ["", "http://[", "c:4317", "http://c:x", "http://c:70000", "http://"],
    "audit_bytes": ["1", "x"],
    "audit_on_failure": ["ignore", "1"],
    "log_level": ["loud"],
    "disable_log_stats": ["maybe"],
    "kv_cache_space": ["abc", "-1", "101%", "4TB", ""],
    "kv_cache_dtype": ["fp4", "int4", "int8_v3", "int8_v4 ,"],
    "block_size": ["0", "x"],
    "max_num_seqs": ["0", "-5", "5000", "many"],
    "max_num_batched_tokens": ["0", "-1", "x", "99999999"],
    "itl_target_ms": ["-1", "60001", "x", "1.5"],
    "long_prefill_token_threshold": ["-1", "x"],
    "scheduling_policy": ["lifo", ""],
    "speculate": ["on", ""],
    "prefill_next_turn": ["maybe"],
    "model_draft": [""],
    "draft_max": ["0", "65", "x"],
    "speculative_config": [
        "",
        "{",
        "[]",
        "ngram",
        "{}",
        '{"method": "eagle"}',
        '{"method": "ngram", "model": "x"}',
        '{"method": "draft_model"}',
        '{"model": 7}',
        '{"method": "ngram", "num_speculative_tokens": 0}',
        '{"method": "ngram", "num_speculative_tokens": 65}',
        '{"method": "ngram", "num_speculative_tokens": 1.5}',
        '{"method": "ngram", "num_speculative_tokens": true}',
        '{"method": "ngram", "prompt_lookup_max": "4"}',
        '{"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}',
    ],
    "kv_events_config": [
        "",
        "zmq",
        '{"enable_kv_cache_events": 1}',
        '{"publisher": "kafka"}',
        '{"endpoint": "tcp://*"}',
        '{"endpoint": "tcp://*:70000"}',
        '{"endpoint": "inproc://x"}',
        '{"replay_endpoint": 5558}',
        '{"buffer_steps": 0}',
        '{"hwm": true}',
        '{"topic": 1}',
        '{"rank": 1}',
    ],
    "enable_prefix_caching": ["perhaps"],
    "prefix_cache_dir": NO_PATHS,
    "prefix_cache_size": ["30%", "auto", "x", ""],
    "weight_cache_size": ["30%", "auto", "x", ""],
    "weights_on_disk": ["yes", ""],
    "swap_space": ["30%", "auto", "-1", ""],
    "shared_prefix_space": ["30%", "auto", "-1", ""],
    "kv_tiers": ["", "name", "=dir", "a=", "a=x,a=y", "shared=~has-no-home/x"],
    "allow_long_model_len": ["perhaps"],
    "disable_sliding_window": ["perhaps"],
    "language_model_only": ["perhaps"],
    "control_tokens_in_messages": ["perhaps"],
    "max_num_queued_reqs": ["0", "-1", "x", "70000"],
    "max_num_queued_tokens": ["0", "-1", "x"],
    "admin_routes": ["perhaps"],
    "webui": ["perhaps"],
    "public_metrics": ["perhaps"],
    "also_serve": ["", "model", "=model", "a=", "a=x,a=y"],
    "models": [""],
    "keep_alive": ["", "x", "5 m", "1d", "m", "--5"],
    "sleep_idle": ["", "x", "5 m", "1d", "true"],
    "allowed_hosts": ["", "a,", "a.example:8000", "http://a.example", "a*b", "[1]", '["a"'],
    "forwarded_allow_ips": ["", "a.example", "10.0.0.1/8", "10.0.0.1:80", "10.0.0.1,"],
    "allowed_origins": ["", "example.com", "https://a.example/", "https://*.example", "a,,b"],
    "allowed_methods": ["", "GET POST", "GET,"],
    "allowed_headers": ["", "a b", "x:y"],
    "allow_credentials": ["perhaps"],
    "max_body_size": ["0", "-1", "x", "1000"],
    "files_dir": NO_PATHS,
    "files_bytes": ["0", "-1", "x", "1000"],
    "files_count": ["0", "-1", "x"],
    "models_dir": NO_PATHS,
    "models_bytes": ["0", "-1", "x", "1000"],
    "models_count": ["0", "-1", "x"],
    "stored_responses": ["-1", "x", "1.5"],
    "stored_bytes": ["0", "-1", "x", "1000"],
    "stored_age": ["0", "-1", "x", "1e99"],
    "sse_ping_interval": ["0", "-1", "x", "3601"],
    "request_timeout": ["-1", "x", "0.5"],
    "reasoning_budget": ["-2", "x", "0.5"],
    "reasoning_budget_message": [],
    "drain_timeout": ["-1", "x", "0.5", "86401"],
    "engine_restart": ["perhaps"],
    "drain_delay": ["-1", "x", "0.5", "3601"],
    "isa": [""],
    "omp_threads_bind": ["", "all", "3-1", "0,0", "0-3;5", "-1"],
    "num_reserved_cpu": ["-1", "x"],
    "visible_memory_nodes": ["", "all", "0,0", "1-0"],
    "omp_num_threads": ["0", "4,2"],
    "tensor_parallel_size": ["0", "-1", "two"],
    "data_parallel_size": ["0", "-1", "two", "auto"],
    "numa": ["", "all"],
    "executor": ["cuda"],
    "platform": [""],
    "enforce_eager": ["perhaps"],
    "served_model_name": ["", "a,", "a,a"],
}
GOOD = {
    "dtype": [("half", "float16"), ("BFLOAT16", "bfloat16"), ("float", "float32")],
    "activation_bits": [("AUTO", "auto"), ("16", "16")],
    "tensor_parallel_size": [(" Auto", "auto"), ("6", 6)],
    "numa": [("TP", "tp"), ("auto", "auto")],
    "max_model_len": [("8K", 8192), ("-1", -1), ("77", 77)],
    "served_model_name": [("a", ["a"]), ("a, b", ["a", "b"]), ("a,*", ["a", "*"])],
    "api_key": [("k1,k2", ["k1", "k2"])],
    "generation_config": [
        ("vllm", "cpuserve"),
        ("CPUSERVE", "cpuserve"),
        ("Auto", "auto"),
        ("./Dir", "./Dir"),
    ],
    "override_generation_config": [
        ('{"temperature": 0.5, "top_k": null}', {"temperature": 0.5, "top_k": None}),
        ("{}", {}),
    ],
    "log_level": [("WARN", "warning")],
    "uds": [("None", "none"), ("/a/None", "/a/None")],
    "kv_cache_space": [("0.25", "0.25"), ("30%", "30%")],
    "enforce_eager": [("1", True), ("off", False)],
    "port": [("0", 0)],
    "itl_target_ms": [("0", 0), ("50", 50)],
    "scheduling_policy": [("Priority", "priority")],
    "speculate": [("OFF", "off")],
    "speculative_config": [('{"method": "ngram"}', {"method": "ngram"})],
    "kv_events_config": [
        (
            '{"enable_kv_cache_events": true, "endpoint": "tcp://[::1]:5557"}',
            {"enable_kv_cache_events": True, "endpoint": "tcp://[::1]:5557"},
        ),
        ('{"publisher": "null", "topic": null}', {"publisher": "null", "topic": None}),
    ],
    "enable_prefix_caching": [("0", False), ("on", True)],
    "max_num_queued_tokens": [("8K", 8192)],
    "max_body_size": [("16M", 16 << 20)],
    "allowed_hosts": [
        ("a.example, *.b.example", ["a.example", "*.b.example"]),
        ('["a.example", "b"]', ["a.example", "b"]),
    ],
    "forwarded_allow_ips": [
        ("*", ["*"]),
        ("10.0.0.1, 10.1.0.0/16,2001:db8::/32", ["10.0.0.1", "10.1.0.0/16", "2001:db8::/32"]),
    ],
    "allowed_origins": [
        ("*", ["*"]),
        ('["*"]', ["*"]),
        ("https://a.example:8080,null", ["https://a.example:8080", "null"]),
    ],
    "model_impl": [("vllm", "auto")],
    "pooling": [("CLS", "first")],
}


def flag(name, value):
    return {name: Given(BY_NAME[name].flag, "flag", value)}


def test_every_field_is_an_attribute_of_its_options():
    engine = set(EngineOptions.__struct_fields__)
    server = set(ServerOptions.__struct_fields__)
    assert {f.name for f in FIELDS if not f.server} == engine
    assert {f.name for f in FIELDS if f.server} == server
    assert {f.group for f in FIELDS} == set(GROUPS)


def test_the_package_reads_every_option():
    """An option that nothing reads is parsed and checked, and changes nothing."""
    package = Path(cpuserve.__file__).parent
    texts = [path.read_text() for path in package.rglob("*.py")]
    read = set(re.findall(r"\.(\w+)\b", "\n".join(texts)))
    assert {f.name for f in FIELDS if f.default != "no effect"} <= read


def test_no_flag_or_variable_means_two_things():
    every_flag = [flag for f in FIELDS for flag in f.all_flags]
    variables = [f.env for f in FIELDS if f.env] + [a.name for f in FIELDS for a in f.env_aliases]
    taken = [n for no_op in NO_OPS for n in no_op.names]
    names = every_flag + variables + taken
    assert len(names) == len(set(names))


def test_flag_variable_and_kind_of_an_option_follow_from_its_attribute():
    class Options(msgspec.Struct):
        few_words: Annotated[int | None, option(GROUPS[0], "Text.", "none", aliases="-f W")] = None
        shares: Annotated[float, option(GROUPS[0], "Text.", flags=("--of",))] = 0.5
        on: Annotated[bool, option(GROUPS[0], "Text.", env="ON")] = True
        all: Annotated[list[str] | None, option(GROUPS[0], "Text.", "none", kind="names")] = None

    found = [(f.name, f.flags, f.env, f.kind, f.default) for f in fields_of(Options)]
    assert found == [
        ("few_words", ("--few-words",), "CPUSERVE_FEW_WORDS", "count", "none"),
        ("shares", ("--of",), "CPUSERVE_OF", "count", "0.5"),
        ("on", ("--on",), "ON", "flag", "on"),
        ("all", ("--all",), "CPUSERVE_ALL", "names", "none"),
    ]
    assert fields_of(Options)[0].aliases == (Alias("-f"), Alias("W"))


def test_every_field_has_a_bad_value_table():
    assert set(BAD) == set(BY_NAME)


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in BAD.items() for v in vs])
def test_a_bad_value_is_refused_by_flag_variable_and_argument(name, value):
    field = BY_NAME[name]
    with pytest.raises(ConfigError) as error:
        load_options(flag(name, value), environ={})
    assert f"flag {field.flag}".strip() in str(error.value)
    if value and field.env and field.env.startswith("CPUSERVE_"):
        with pytest.raises(ConfigError, match=f"env {field.env}="):
            load_options({}, environ={field.env: value})
    with pytest.raises(ConfigError):
        from_arguments({name: value}, environ={})


@pytest.mark.parametrize(
    ("name", "text", "value"), [(n, t, v) for n, p in GOOD.items() for t, v in p]
)
def test_a_good_value_means_the_same_everywhere(name, text, value):
    field = BY_NAME[name]

    def seen(asked):
        return getattr(asked.server if field.server else asked.options, name)

    assert seen(load_options(flag(name, text), environ={})) == value
    assert seen(load_options({}, environ={field.env: text})) == value
    assert seen(from_arguments({name: text}, environ={})) == value


def test_a_secret_is_not_repeated_in_an_error():
    with pytest.raises(ConfigError) as error:
        load_options({}, environ={"CPUSERVE_API_KEY": "geheim-ü"})
    assert "geheim" not in str(error.value)


def test_flags_win_over_environment_over_file_over_nothing(tmp_path):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"dtype": "float32", "max-num-seqs": 3, "seed": 1}))
    asked = load_options(
        flag("dtype", "bfloat16"),
        config_file=str(file),
        environ={"CPUSERVE_DTYPE": "float16", "CPUSERVE_MAX_NUM_SEQS": "4"},
    )
    assert (asked.options.dtype, asked.options.max_num_seqs, asked.options.seed) == (
        "bfloat16",
        4,
        1,
    )
    assert asked.options.max_model_len is None
    assert asked.sources == {
        "dtype": "flag --dtype",
        "max_num_seqs": "env CPUSERVE_MAX_NUM_SEQS",
        "seed": f"file {file} seed",
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.json", '{"kv_cache_space": 0.5, "host": "::1"}'),
        ("c.yaml", "kv-cache-space: 0.5\nhost: '::1'\n"),
        ("c.yml", "kv_cache_memory: 0.5\nhost: '::1'\n"),
        ("c.toml", 'kv_cache_space = 0.5\nhost = "::1"\n'),
    ],
)
def test_a_config_file_in_each_format(tmp_path, name, text):
    if name.endswith("toml") and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no tomllib")
    (tmp_path / name).write_text(text)
    asked = load_options({}, environ={"CPUSERVE_CONFIG": str(tmp_path / name)})
    assert (asked.options.kv_cache_space, asked.server.host) == ("0.5", "::1")


@pytest.mark.parametrize(
    ("name", "text", "needle"),
    [
        ("c.json", "{", "config file"),
        ("c.json", "[1]", "mapping"),
        ("c.json", '{"dtipe": "auto"}', "did you mean dtype"),
        ("c.json", '{"lora-dtype": "bf16"}', "'lora-dtype' is not supported: LoRA"),
        ("c.json", '{"speculative_config": {"method": "medusa"}}', 'method must be "ngram"'),
        ("c.json", '{"num_lookahead_slots": 3}', "--draft-max limits the tokens"),
        ("c.json", '{"frobnicate": 1}', "unknown option 'frobnicate'$"),
        ("c.json", '{"port": true}', "whole number"),
        ("c.json", '{"isa": ["avx2"]}', "must be text"),
        ("c.yaml", "a: [", "config file"),
        ("c.yaml", "model: !!python/object/apply:os.system ['true']", "config file"),
        ("c.ini", "[a]", r"must end in one of \.json"),
    ],
)
def test_a_broken_config_file_is_one_line(tmp_path, name, text, needle):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=needle) as error:
        load_options({}, config_file=str(tmp_path / name), environ={})
    assert "\n" not in str(error.value)


def test_a_missing_config_file_is_named():
    with pytest.raises(ConfigError, match=r"/no/where\.json: cannot be read: No such file"):
        read_file("/no/where.json")


def test_an_unknown_variable_warns_with_the_nearest_name():
    notes = read_env({"CPUSERVE_KVCACHE_SPASE": "4", "CPUSERVE_ZZZ": "1"}).notes
    assert "did you mean CPUSERVE_KVCACHE_SPACE?" in notes[0]
    assert notes[1] == "env CPUSERVE_ZZZ is unknown and is ignored"


def test_kubernetes_service_variables_are_no_options():
    env = {
        "CPUSERVE_PORT": "tcp://10.0.0.1:8000",
        "CPUSERVE_SERVICE_HOST": "10.0.0.1",
        "CPUSERVE_SERVICE_PORT_HTTP": "8000",
        "CPUSERVE_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert read_env(env) == read_env({})


def test_vllm_variables_are_aliases_and_say_so():
    asked = load_options({}, environ={"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_SGL_KERNEL": "1"})
    assert asked.options.kv_cache_space == "2"
    assert asked.sources["kv_cache_space"] == "env VLLM_CPU_KVCACHE_SPACE"
    assert (
        "env VLLM_CPU_KVCACHE_SPACE is read as CPUSERVE_KVCACHE_SPACE, for all ranks of an engine "
        "together" in asked.notes
    )
    assert any("VLLM_CPU_SGL_KERNEL is accepted and has no effect" in n for n in asked.notes)


def test_our_variable_wins_over_its_alias():
    env = {"VLLM_CPU_KVCACHE_SPACE": "2", "CPUSERVE_KVCACHE_SPACE": "3"}
    assert load_options({}, environ=env).options.kv_cache_space == "3"


def test_an_empty_variable_is_not_set():
    assert load_options({}, environ={"CPUSERVE_DTYPE": " "}).options.dtype is None


def test_an_odd_omp_num_threads_of_the_system_is_noted_and_not_fatal():
    asked = load_options({}, environ={"OMP_NUM_THREADS": "4,2"})
    assert asked.options.omp_num_threads is None
    assert "OMP_NUM_THREADS='4,2' is ignored" in asked.notes[0]


def test_arguments_of_vllms_llm_are_known():
    asked = from_arguments(
        {
            "model": "m",
            "max_model_len": 1024,
            "dtype": "bfloat16",
            "gpu_memory_utilization": 0.9,
            "trust_remote_code": True,
            "kv_cache_memory_bytes": 1 << 30,
            "enforce_eager": True,
            "seed": None,
        },
        environ={},
    )
    assert (asked.options.model, asked.options.max_model_len) == ("m", 1024)
    assert float(asked.options.kv_cache_space) == 1.0
    assert len(asked.notes) == 2
    assert asked.options.seed is None


KV_BYTES = BY_NAME["kv_cache_space"]


def kv_bytes(value, where, tmp_path):
    """Return the options in which `where` sets the bytes of the KV cache to `value`."""
    flag = "--kv-cache-memory-bytes"
    if where == "flag":
        return load_options({"kv_cache_space": flag_given(KV_BYTES, flag, value)}, environ={})
    if where == "argument":
        return from_arguments({"kv_cache_memory_bytes": value}, environ={})
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"kv-cache-memory-bytes": value}))
    return load_options({}, config_file=str(file), environ={})


@pytest.mark.parametrize("where", ["flag", "argument", "file"])
@pytest.mark.parametrize("text", ["4294967296", "4G", "4GiB", "4gib", "4096MiB", "4096M"])
def test_bytes_of_kv_cache_may_have_a_unit(where, text, tmp_path):
    assert float(kv_bytes(text, where, tmp_path).options.kv_cache_space) == 4.0


@pytest.mark.parametrize("where", ["flag", "argument", "file"])
@pytest.mark.parametrize("text", ["1e9", "4 apples", "", "-1", "30%", "4TiB", "b", "1.5"])
def test_bytes_of_kv_cache_that_are_none_are_refused_by_name(where, text, tmp_path):
    with pytest.raises(ConfigError, match="give bytes") as error:
        kv_bytes(text, where, tmp_path)
    name = {
        "flag": "flag --kv-cache-memory-bytes=",
        "argument": "argument kv_cache_memory_bytes=",
        "file": f"file {tmp_path / 'c.json'} kv-cache-memory-bytes=",
    }[where]
    assert str(error.value).startswith(f"{name}{text}: ")


def test_a_variable_that_cannot_be_converted_is_refused_by_name(monkeypatch):
    def refuse(_):
        msg = "give another"
        raise ValueError(msg)

    name = "VLLM_OPENVINO_CPU_KV_CACHE_PRECISION"
    field = replace(BY_NAME["kv_cache_dtype"], aliases=(Alias(name, refuse),))
    monkeypatch.setitem(BY_NAME, "kv_cache_dtype", field)
    with pytest.raises(ConfigError, match=f"env {name}=u8: give another"):
        load_options({}, environ={name: "u8"})


def test_an_unknown_argument_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean max_model_len"):
        from_arguments({"max_model_length": 3}, environ={})


def test_an_option_that_must_be_one_is_refused_otherwise():
    assert from_arguments({"pipeline_parallel_size": 1}, environ={}).notes
    with pytest.raises(ConfigError, match="use 1"):
        from_arguments({"pipeline_parallel_size": 2}, environ={})


def test_keywords_cover_every_field_and_flag():
    assert set(BY_NAME) <= set(keywords())
    assert "kv_cache_memory" in keywords()


ADAPTER = {"name": "x", "path": "y,z", "base_model_name": "b"}


@pytest.mark.parametrize(
    "value",
    [
        ["a=b", json.dumps(ADAPTER)],
        ["a=b", ADAPTER],
        json.dumps(["a=b", ADAPTER]),
        json.dumps([{"name": "a", "path": "b"}, ADAPTER]),
    ],
    ids=str,
)
def test_adapters_may_be_given_as_in_vllm(value):
    found = from_arguments({"lora_modules": value}, environ={})
    assert found.options.lora_modules == ["a=b", "x=y,z"]


def test_one_adapter_may_be_an_object():
    for value in (ADAPTER, json.dumps(ADAPTER), [ADAPTER]):
        assert from_arguments({"lora_modules": value}, environ={}).options.lora_modules == ["x=y,z"]


@pytest.mark.parametrize("flag", ["--disable-uvicorn-access-log", "--disable-access-log"])
def test_flags_of_vllm_switch_the_access_log_off(flag):
    parser = flags.Parser(prog="cpuserve serve")
    flags.add_options(parser, server=True)
    found = flags.asked(parser.parse_args(["smollm2:135m", flag, "--port", "1"]))
    assert (found.server.access_log, found.server.port) == ("off", 1)
    found = flags.asked(parser.parse_args([flag, "--access-log", "all", "smollm2:135m"]))
    assert (found.server.access_log, found.options.model) == ("all", "smollm2:135m")


@pytest.mark.parametrize("flag", ["--no-mmproj", "--no-mmproj-auto", "--language-model-only"])
def test_flags_of_llamacpp_leave_the_tower_out(flag):
    parser = flags.Parser(prog="cpuserve serve")
    flags.add_options(parser, server=True)
    found = flags.asked(parser.parse_args(["smollm2:135m", flag, "--port", "1"]))
    assert (found.options.language_model_only, found.server.port) == (True, 1)
    assert found.options.wanted_mmproj == "none"
    assert load_options({}, environ={"LLAMA_ARG_NO_MMPROJ": "1"}).options.language_model_only


@pytest.mark.parametrize(("value", "expected"), [("true", "off"), ("false", "errors")])
def test_a_config_file_of_vllm_switches_the_access_log_off(tmp_path, value, expected):
    file = tmp_path / "c.yaml"
    file.write_text(f"disable-uvicorn-access-log: {value}\n")
    assert load_options({}, config_file=str(file), environ={}).server.access_log == expected


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, "/.cache/cpuserve"),
        ({"CPUSERVE_CACHE": "~/c"}, "env CPUSERVE_CACHE=~/c: this system knows no such home"),
        ({"XDG_CACHE_HOME": "~/c"}, "env XDG_CACHE_HOME=~/c: this system knows no such home"),
        ({"CPUSERVE_CACHE": "/c", "XDG_CACHE_HOME": "~/c"}, "/c"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/cpuserve"),
    ],
)
def test_a_user_without_a_home_directory_has_a_cache(variables, wanted, monkeypatch):
    def homeless(path):
        if path.parts[0].startswith("~"):
            raise RuntimeError
        return path

    monkeypatch.setattr(env, "environment", lambda: variables)
    monkeypatch.setattr(Path, "expanduser", homeless)
    if wanted.startswith("/"):
        assert env.cache_dir() == Path(wanted)
    else:
        with pytest.raises(ConfigError, match=wanted):
            env.cache_dir()
