"""Serving commands and environments of vLLM's CPU guides, with only the program's name changed.

Each starts on a two-socket Xeon (32 cores and 256 GiB a node), with what it asked for, or is
refused with one line that names the nearest value.
"""

import dataclasses
import re
import shlex

import pytest

from cpuserve.config.load import load_options
from cpuserve.entrypoints import cli
from cpuserve.entrypoints.flags import normalize, refuse_unknown
from cpuserve.errors import ConfigError
from cpuserve.platforms.base import KvLayerFacts
from cpuserve.platforms.cpu import CpuPlatform
from tests.helpers.hosts import LLAMA_1B, got, load_host

OPT = dataclasses.replace(
    LLAMA_1B,
    name="facebook/opt-125m",
    architecture="OPTForCausalLM",
    dtype="float16",
    max_position=2048,
    kv_layers=(KvLayerFacts(12, 64),) * 12,
    weight_bytes=250_000_000,
    matrix_weights=125_000_000,
)
LLAMA_7B = dataclasses.replace(
    LLAMA_1B,
    name="meta-llama/Llama-2-7b-chat-hf",
    max_position=4096,
    kv_layers=(KvLayerFacts(32, 128),) * 32,
    weight_bytes=13_500_000_000,
    matrix_weights=6_700_000_000,
)
FACTS = {f.name: f for f in (OPT, LLAMA_7B, LLAMA_1B)}
BOTH = "0-30,32-62"  # automatic: every core but the last of each node


def start(line, host="xeon_2s_amx"):
    """(Resolved, notes) of "NAME=value ... serve MODEL --flag ..."."""
    words = shlex.split(line)
    split = words.index("serve")
    environ = dict(word.split("=", 1) for word in words[:split])
    args, unknown = cli.build_parser().parse_known_args(normalize(words[split:]))
    refuse_unknown(args.parser, unknown)
    asked = load_options(args.given, environ=environ, notes=args.notes)
    facts = FACTS[asked.options.model]
    host = load_host(host)
    return CpuPlatform().resolve(asked.options, asked.sources, facts, host), asked.notes


STARTS = [
    (
        "VLLM_CPU_KVCACHE_SPACE=40 VLLM_CPU_OMP_THREADS_BIND=0-31 serve facebook/opt-125m",
        {"kv_cache_space": "40.00 GiB", "omp_threads_bind": "0-31", "threads": 32},
        ["VLLM_CPU_KVCACHE_SPACE is read as CPUSERVE_KVCACHE_SPACE", "CPUSERVE_OMP_THREADS_BIND"],
    ),
    (
        "VLLM_CPU_KVCACHE_SPACE=40 VLLM_CPU_OMP_THREADS_BIND=0-29 serve facebook/opt-125m "
        "--dtype=bfloat16",
        {"dtype": "bfloat16", "omp_threads_bind": "0-29"},
        [],
    ),
    (
        "VLLM_CPU_OMP_THREADS_BIND=0-62:2 serve facebook/opt-125m --dtype=half",
        {"threads": 32, "dtype": "float16"},
        [],
    ),
    (
        "VLLM_CPU_OMP_THREADS_BIND=auto VLLM_CPU_NUM_OF_RESERVED_CPU=4 serve facebook/opt-125m",
        {"num_reserved_cpu": 4, "omp_threads_bind": "0-29,32-61"},
        ["VLLM_CPU_NUM_OF_RESERVED_CPU is read as CPUSERVE_NUM_OF_RESERVED_CPU"],
    ),
    (
        "VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=16 serve facebook/opt-125m",
        {"threads": 16, "omp_threads_bind": "not pinned"},
        [],
    ),
    (
        "CPU_VISIBLE_MEMORY_NODES=0 serve facebook/opt-125m",
        {"omp_threads_bind": "0-30", "visible_memory_nodes": "0"},
        ["CPU_VISIBLE_MEMORY_NODES is read as CPUSERVE_VISIBLE_MEMORY_NODES"],
    ),
    (
        "CPU_VISIBLE_MEMORY_NODES=1,0 serve facebook/opt-125m",
        {"omp_threads_bind": "32-62,0-30"},
        [],
    ),
    (
        "VLLM_CPU_SGL_KERNEL=1 VLLM_CPU_MOE_PREPACK=0 serve "
        "--model=meta-llama/Llama-3.2-1B --dtype=bfloat16",
        {"omp_threads_bind": BOTH},
        ["VLLM_CPU_SGL_KERNEL is accepted", "VLLM_CPU_MOE_PREPACK is accepted"],
    ),
    (
        "serve meta-llama/Llama-2-7b-chat-hf -tp=1 --distributed-executor-backend=mp",
        {"tensor_parallel_size": 1},
        ["--distributed-executor-backend is accepted and has no effect"],
    ),
    (
        "serve meta-llama/Llama-2-7b-chat-hf -tp 1 -pp 1 --distributed-executor-backend mp",
        {"tensor_parallel_size": 1},
        ["-pp is accepted"],
    ),
    (
        "TORCHINDUCTOR_COMPILE_THREADS=1 VLLM_CPU_CI_ENV=1 serve facebook/opt-125m -O3 "
        "--enforce-eager --device cpu --gpu-memory-utilization 0.9",
        {"enforce_eager": "no effect"},
        [
            "TORCHINDUCTOR_COMPILE_THREADS is accepted",
            "VLLM_CPU_CI_ENV is accepted",
            "-O is accepted and has no effect: kernels are compiled ahead of time",
            "--device is accepted",
            "use --kv-cache-memory to size",
        ],
    ),
    (
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 serve meta-llama/Llama-2-7b-chat-hf --max-model-len 8192",
        {"max_model_len": 8192},
        ["VLLM_ALLOW_LONG_MAX_MODEL_LEN is read as CPUSERVE_ALLOW_LONG_MAX_MODEL_LEN"],
    ),
    (
        "serve meta-llama/Llama-3.2-1B --max-num-batched-tokens=4096 --max-num-seqs=128 "
        "--block-size 128 --async-scheduling --trust-remote-code --enable-chunked-prefill",
        {"max_num_batched_tokens": 4096, "max_num_seqs": 128, "block_size": 32},
        ["--async-scheduling is accepted", "--trust-remote-code is accepted"],
    ),
    (
        "VLLM_USE_V1=1 VLLM_WORKER_MULTIPROC_METHOD=spawn serve facebook/opt-125m "
        "--no-enable-prefix-caching --disable-log-requests --compilation-config '{\"level\": 3}'",
        {"enable_prefix_caching": False},
        ["VLLM_USE_V1 has no counterpart", "VLLM_WORKER_MULTIPROC_METHOD has no counterpart"],
    ),
    (
        "VLLM_CPU_KVCACHE_SPACE=0 VLLM_CPU_OMP_THREADS_BIND=all serve facebook/opt-125m",
        ConfigError,
        r"env VLLM_CPU_OMP_THREADS_BIND=all: .*give auto, nobind, or CPUs",
    ),
    (
        "VLLM_CPU_KVCACHE_SPACE=40 VLLM_CPU_OMP_THREADS_BIND='0-31|32-63' serve "
        "meta-llama/Llama-2-7b-chat-hf -tp=2 --distributed-executor-backend mp",
        {"tensor_parallel_size": 2, "omp_threads_bind": "0-31|32-63", "threads": 64},
        ["--distributed-executor-backend is accepted and has no effect"],
    ),
    (
        "VLLM_CPU_OMP_THREADS_BIND='0-31|32-63' serve meta-llama/Llama-2-7b-chat-hf",
        ConfigError,
        r"2 ranks and there is 1; give one list, such as 0-63",
    ),
    (
        "serve meta-llama/Llama-2-7b-chat-hf --tensor-parallel-size=2",
        {"tensor_parallel_size": 2, "omp_threads_bind": "0-30|32-62"},
        [],
    ),
    (
        "serve meta-llama/Llama-2-7b-chat-hf -tp 6",
        {"tensor_parallel_size": 6, "omp_threads_bind": "0-10|11-20|21-30|32-42|43-52|53-62"},
        [],
    ),
    (
        "serve meta-llama/Llama-2-7b-chat-hf -tp=65",
        ConfigError,
        r"flag -tp=65: .*use at most 64",
    ),
    (
        "serve facebook/opt-125m -dp 200",
        ConfigError,
        r"flag -dp=200: each engine needs a core .*use at most \d+",
    ),
    ("serve facebook/opt-125m -pp=2", ConfigError, r"-pp 2: .*use 1"),
    (
        "VLLM_CPU_KVCACHE_SPACE=600 serve facebook/opt-125m",
        ConfigError,
        r"env VLLM_CPU_KVCACHE_SPACE=600: .*give at most \d+",
    ),
    (
        "VLLM_CPU_OMP_THREADS_BIND=0-199 serve facebook/opt-125m",
        ConfigError,
        r"CPU 128-199 is not among .*\(0-127\)",
    ),
    (
        "CPU_VISIBLE_MEMORY_NODES=0,2 serve facebook/opt-125m",
        ConfigError,
        r"env CPU_VISIBLE_MEMORY_NODES=0,2: node 2 .*some of 0-1",
    ),
    (
        "serve facebook/opt-125m --max-model-len 4096",
        ConfigError,
        r"--max-model-len=4096: .*2048",
    ),
    (
        "serve facebook/opt-125m --kv-cache-dtype=fp8_inc",
        ConfigError,
        r"choose one of auto, bfloat16",
    ),
    ("serve facebook/opt-125m --device-ids 0", ConfigError, r"unknown flag --device-ids"),
]


@pytest.mark.parametrize(
    ("line", "want", "says"), STARTS, ids=[f"{i}-{row[0][:60]}" for i, row in enumerate(STARTS)]
)
def test_a_command_of_the_guides_starts_or_names_the_nearest_value(line, want, says):
    if want is ConfigError:
        with pytest.raises(ConfigError) as error:
            start(line)
        text = str(error.value)
        assert re.search(says, text), text
        assert "\n" not in text
        return
    resolved, notes = start(line)
    assert {name: got(resolved, name) for name in want} == want
    for needle in says:
        assert any(needle in note for note in notes), (needle, notes)


def test_the_automatic_choice_is_the_same_without_any_of_it():
    resolved, notes = start("serve facebook/opt-125m")
    assert (got(resolved, "omp_threads_bind"), notes) == (BOTH, ())


def test_every_name_of_the_issue_is_in_the_table():
    lines = " ".join(row[0] for row in STARTS)
    for name in (
        "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU",
        "CPU_VISIBLE_MEMORY_NODES", "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
        "TORCHINDUCTOR_COMPILE_THREADS", "--gpu-memory-utilization", "--device cpu", "-tp=2",
        "--model=", "--distributed-executor-backend mp", "-O3", "--enforce-eager",
    ):  # fmt: skip
        assert name in lines
