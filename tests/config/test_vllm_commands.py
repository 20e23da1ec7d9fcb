"""Serving commands and environments of vLLM's CPU guides, with only the program's name changed.

On a two-socket Xeon (32 cores and 256 GiB per node; some lines use other hosts) a command starts
with the requested settings, or is refused with one line that names the nearest value. The lines are
from vLLM's CPU installation pages (0.4 to today, x86, Arm, s390x, OpenVINO), its pages on nginx and
Kubernetes, its CPU benchmark and smoke tests, and Intel's guide for Xeon; the last ones test
features that these pages describe. IMAGE stands for a container:
`docker run -e NAME=value IMAGE ARGUMENTS`.
"""

import dataclasses
import re
import shlex

import pytest

from cpuserve.base.errors import ConfigError
from cpuserve.cli import main as cli
from cpuserve.cli.flags import normalize, refuse_unknown
from cpuserve.config.load import load_options
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
LLAMA_8B = dataclasses.replace(
    LLAMA_1B,
    name="meta-llama/Llama-3.1-8B-Instruct",
    kv_layers=(KvLayerFacts(8, 128),) * 32,
    weight_bytes=16_060_000_000,
    matrix_weights=8_000_000_000,
)


def named(facts, *names, **changes):
    return [dataclasses.replace(facts, name=name, **changes) for name in names]


FACTS = {
    f.name: f
    for f in (
        OPT,
        LLAMA_7B,
        LLAMA_1B,
        LLAMA_8B,
        *named(LLAMA_1B, "meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-3B-Instruct"),
        *named(LLAMA_1B, "/Qwen3-4B", "Qwen/Qwen3-4B-Instruct-2507"),
        *named(
            LLAMA_8B,
            "RedHatAI/Qwen3-4B-Instruct-2507-quantized.w8a8",
            "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8",
            quantization="compressed-tensors",
        ),
        *named(LLAMA_8B, "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", quantization="awq"),
    )
}
PARSER = cli.build_parser()
IMAGE = "IMAGE"  # its entry point is `cpuserve serve --host 0.0.0.0`
BOTH = "0-30|32-62"  # automatic: every core but the last of each node, in ranks or engines


def start(line, host="xeon_2s_amx"):
    """(Resolved, notes) of "NAME=value ... serve MODEL --flag ..."."""
    line = line.replace("python3 -m cpuserve.entrypoints.openai.api_server", "serve")
    words = shlex.split(line.replace(IMAGE, "serve --host 0.0.0.0"))
    split = words.index("serve")
    environ = dict(word.split("=", 1) for word in words[:split])
    args, unknown = PARSER.parse_known_args(normalize(words[split:]))
    refuse_unknown(args.parser, unknown)
    asked = load_options(args.given, config_file=args.config, environ=environ, notes=args.notes)
    facts = FACTS[asked.options.model]
    host = load_host(host)
    return CpuPlatform().resolve(asked.options, asked.sources, facts, host), asked.notes


PAGES = [
    # CPU installation, 0.4 to 0.9
    (
        "VLLM_CPU_KVCACHE_SPACE=40 VLLM_CPU_OMP_THREADS_BIND=0-29 serve facebook/opt-125m",
        {"kv_cache_space": "40.00 GiB", "omp_threads_bind": "0-29", "threads": 30},
        ["VLLM_CPU_OMP_THREADS_BIND is read as CPUSERVE_OMP_THREADS_BIND"],
    ),
    (
        "VLLM_CPU_KVCACHE_SPACE=40 VLLM_CPU_OMP_THREADS_BIND='0-31|32-63' serve "
        "meta-llama/Llama-2-7b-chat-hf -tp=2 --distributed-executor-backend mp",
        {"tensor_parallel_size": 2, "omp_threads_bind": "0-31|32-63", "threads": 64},
        ["--distributed-executor-backend is accepted and has no effect"],
    ),
    (
        "VLLM_CPU_KVCACHE_SPACE=40 serve meta-llama/Llama-2-7b-chat-hf -tp=2 "
        "--distributed-executor-backend mp",
        {"tensor_parallel_size": 2, "omp_threads_bind": "0-30|32-62"},
        ["read as CPUSERVE_KVCACHE_SPACE, for all ranks of an engine together"],
    ),
    (
        "VLLM_CPU_KVCACHE_SPACE=40 VLLM_CPU_OMP_THREADS_BIND=0-31 VLLM_CPU_MOE_PREPACK=0 IMAGE "
        "--model=meta-llama/Llama-3.2-1B-Instruct --dtype=bfloat16",
        {"dtype": "bfloat16", "kv_cache_space": "40.00 GiB", "omp_threads_bind": "0-31"},
        ["VLLM_CPU_MOE_PREPACK is accepted and has no effect: kernels are chosen"],
    ),
    (
        "LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4 "
        "python3 -m cpuserve.entrypoints.openai.api_server --model facebook/opt-125m -O3",
        {"omp_threads_bind": BOTH},
        ["-O is accepted"],
    ),
    # CPU installation, 0.10 to today
    (
        "VLLM_CPU_KVCACHE_SPACE=40 VLLM_CPU_OMP_THREADS_BIND=0-30 serve facebook/opt-125m "
        "--dtype=bfloat16",
        {"dtype": "bfloat16", "omp_threads_bind": "0-30", "threads": 31},
        [],
    ),
    (
        "VLLM_CPU_KVCACHE_SPACE=40 VLLM_CPU_NUM_OF_RESERVED_CPU=1 serve facebook/opt-125m "
        "--dtype=bfloat16",
        {"num_reserved_cpu": 1, "omp_threads_bind": "0-31|32-62"},
        ["VLLM_CPU_NUM_OF_RESERVED_CPU is read as CPUSERVE_NUM_OF_RESERVED_CPU, for all ranks"],
    ),
    (
        "VLLM_TARGET_DEVICE=cpu HF_TOKEN=secret VLLM_CPU_KVCACHE_SPACE=20 VLLM_CPU_SGL_KERNEL=1 "
        "IMAGE meta-llama/Llama-3.2-1B-Instruct --dtype=bfloat16",
        {"dtype": "bfloat16", "kv_cache_space": "20.00 GiB"},
        ["VLLM_TARGET_DEVICE is accepted", "VLLM_CPU_SGL_KERNEL is accepted"],
    ),
    (
        "VLLM_ZENTORCH_WEIGHT_PREPACK=0 VLLM_CPU_ATTN_SPLIT_KV=0 VLLM_CPU_INT4_W4A8=0 serve "
        "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4 --quantization awq",
        {"quantization": "awq"},
        ["VLLM_ZENTORCH_WEIGHT_PREPACK is accepted", "VLLM_CPU_INT4_W4A8 is accepted"],
    ),
    # s390x
    (
        "VLLM_CPU_KVCACHE_SPACE=10 VLLM_CPU_OMP_THREADS_BIND=0-7 IMAGE "
        "--model meta-llama/Llama-3.2-1B-Instruct --dtype float",
        {"dtype": "float32", "threads": 8},
        [],
    ),
    # OpenVINO
    (
        "VLLM_OPENVINO_KVCACHE_SPACE=100 VLLM_OPENVINO_CPU_KV_CACHE_PRECISION=u8 "
        "VLLM_OPENVINO_ENABLE_QUANTIZED_WEIGHTS=ON VLLM_OPENVINO_DEVICE=CPU serve "
        "meta-llama/Llama-2-7b-chat-hf --enable-chunked-prefill --max-num-batched-tokens 256",
        {
            "kv_cache_space": "100.00 GiB",
            "kv_cache_dtype": "int8",
            "max_num_batched_tokens": 256,
        },
        [
            "VLLM_OPENVINO_KVCACHE_SPACE is read as CPUSERVE_KVCACHE_SPACE",
            "VLLM_OPENVINO_CPU_KV_CACHE_PRECISION is read as CPUSERVE_KV_CACHE_DTYPE",
            "VLLM_OPENVINO_ENABLE_QUANTIZED_WEIGHTS is accepted and has no effect: "
            "--quantization int8",
            "VLLM_OPENVINO_DEVICE is accepted",
        ],
    ),
    # nginx and Kubernetes
    (
        "VLLM_CPU_KVCACHE_SPACE=40 VLLM_CPU_OMP_THREADS_BIND=32-62 IMAGE "
        "--model meta-llama/Llama-2-7b-chat-hf",
        {"omp_threads_bind": "32-62"},
        [],
    ),
    (
        "HUGGING_FACE_HUB_TOKEN=secret serve meta-llama/Llama-3.2-1B-Instruct",
        {"omp_threads_bind": BOTH},
        [],
    ),
    (
        "serve meta-llama/Llama-3.2-1B-Instruct --trust-remote-code --enable-chunked-prefill "
        "--max_num_batched_tokens 1024",
        {"max_num_batched_tokens": 1024},
        ["--trust-remote-code is accepted", "--enable-chunked-prefill is accepted"],
    ),
    # the CPU benchmark, with one, two and four ranks
    *(
        (
            "VLLM_RPC_TIMEOUT=100000 VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 "
            "VLLM_ENGINE_ITERATION_TIMEOUT_S=120 VLLM_CPU_SGL_KERNEL=1 VLLM_CPU_KVCACHE_SPACE=40 "
            f"serve --model={model} --tensor-parallel-size={ranks} --dtype=bfloat16 "
            "--distributed-executor-backend=mp --block-size=128 --trust-remote-code "
            "--disable-log-stats --enforce-eager --max-num-batched-tokens=2048 "
            "--max-num-seqs=256 --load-format=dummy --enable-chunked-prefill",
            {"tensor_parallel_size": ranks, "max_num_seqs": 256, "kv_cache_space": "40.00 GiB"},
            ["VLLM_RPC_TIMEOUT has no counterpart", "--load-format is accepted"],
        )
        for ranks in (1, 2, 4)
        for model in (
            "meta-llama/Llama-3.1-8B-Instruct",
            "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8",
            "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4",
        )
    ),
    # the smoke tests of servers
    (
        "VLLM_CPU_KVCACHE_SPACE=4 VLLM_CPU_CI_ENV=1 VLLM_CPU_OMP_THREADS_BIND='48-55|56-63' "
        "VLLM_CPU_SGL_KERNEL=1 serve meta-llama/Llama-3.1-8B-Instruct -tp=2 -pp=2",
        ConfigError,
        r"-pp 2 is not supported yet; use 1",
    ),
    (
        "serve meta-llama/Llama-3.2-3B-Instruct -tp=2 -pp=2",
        ConfigError,
        r"-pp 2 is not supported yet; use 1",
    ),
    (
        "serve meta-llama/Llama-3.2-3B-Instruct -tp=2 -dp=2",
        {"tensor_parallel_size": 2, "omp_threads_bind": "0-15|16-30|32-47|48-62"},
        [],
    ),
    # Intel's guide for Xeon
    (
        "HF_TOKEN=secret VLLM_CPU_KVCACHE_SPACE=20 VLLM_CPU_OMP_THREADS_BIND=auto "
        "VLLM_CPU_NUM_OF_RESERVED_CPU=1 IMAGE RedHatAI/Qwen3-4B-Instruct-2507-quantized.w8a8 "
        "--dtype=bfloat16 --max-num-batched-tokens 2048 --max-num-seqs 128",
        {"max_num_seqs": 128, "num_reserved_cpu": 1, "quantization": "compressed-tensors"},
        [],
    ),
]

ELSEWHERE = [
    (
        "graviton4_96",
        "VLLM_CPU_KVCACHE_SPACE=16 VLLM_CPU_CI_ENV=1 VLLM_CPU_OMP_THREADS_BIND=0-31 serve "
        "meta-llama/Llama-3.2-1B --max-model-len 2048",
        {"threads": 32, "max_model_len": 2048, "kv_cache_space": "16.00 GiB"},
    ),
    (
        "graviton3_64",
        "VLLM_CPU_KVCACHE_SPACE=8 VLLM_CPU_OMP_THREADS_BIND=0-62 IMAGE "
        "meta-llama/Llama-3.2-1B-Instruct --dtype=bfloat16",
        {"threads": 63, "isa": "neon_bf16"},
    ),
    (
        "epyc_nps4",
        "VLLM_TARGET_DEVICE=cpu VLLM_CPU_OMP_THREADS_BIND=auto VLLM_CPU_NUM_OF_RESERVED_CPU=1 "
        "CPU_VISIBLE_MEMORY_NODES=0,1,2,3 VLLM_CPU_KVCACHE_SPACE=16 IMAGE --model /Qwen3-4B "
        "--dtype bfloat16 --tensor-parallel-size 4 --max-model-len 8192 --block-size 128 "
        "--async-scheduling --port 8001",
        {"omp_threads_bind": "0-15|16-31|32-47|48-62", "tensor_parallel_size": 4},
    ),
    (
        "desktop_8core_smt",
        "VLLM_CPU_OMP_THREADS_BIND=0-7 serve meta-llama/Llama-3.2-1B-Instruct",
        {"threads": 8, "omp_threads_bind": "0-7"},
    ),
    (
        "xeon_snc3",
        "VLLM_CPU_KVCACHE_SPACE=40 serve meta-llama/Llama-3.1-8B-Instruct -tp 3",
        {"omp_threads_bind": "0-38|40-78|80-118"},
    ),
]

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
        {"num_reserved_cpu": 4, "omp_threads_bind": "0-29|32-61"},
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
        {"omp_threads_bind": "32-62|0-30"},
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
        "VLLM_ATTENTION_BACKEND=TORCH_SDPA serve facebook/opt-125m --attention-backend=CPU_ATTN "
        "--max-seq-len-to-capture 8192 --cudagraph-capture-sizes 1 2 4 -tp=2",
        {"tensor_parallel_size": 2},
        [
            "VLLM_ATTENTION_BACKEND is accepted and has no effect: kernels are chosen for the CPU",
            "--attention-backend is accepted",
            "--max-seq-len-to-capture is accepted and has no effect: kernels are compiled ahead",
        ],
    ),
    (
        "CPUSERVE_OMP_THREADS_BIND=0-7 CPUSERVE_NUM_OF_RESERVED_CPU=1 "
        "CPUSERVE_VISIBLE_MEMORY_NODES=0 serve facebook/opt-125m --omp-threads-bind auto "
        "--num-of-reserved-cpu 2 --visible-memory-nodes 1",
        {"omp_threads_bind": "32-61", "num_reserved_cpu": 2},
        [],
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
        r"2 list.* 1 rank.*; give one list, such as 0-63",
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
    ("serve facebook/opt-125m -pp=2", ConfigError, r"-pp 2 .*use 1"),
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
        r"env CPU_VISIBLE_MEMORY_NODES=0,2: node 2 .*choose from 0-1",
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
    (
        "serve facebook/opt-125m --device-ids 0",
        ConfigError,
        r"--device-ids is not supported: use --omp-threads-bind",
    ),
]


LINES = [*PAGES, *STARTS]


@pytest.mark.parametrize(
    ("line", "want", "says"), LINES, ids=[f"{i}-{row[0][:60]}" for i, row in enumerate(LINES)]
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


@pytest.mark.parametrize(("host", "line", "want"), ELSEWHERE, ids=[row[0] for row in ELSEWHERE])
def test_a_command_of_the_guides_starts_on_other_hosts(host, line, want):
    resolved, _ = start(line, host)
    assert {name: got(resolved, name) for name in want} == want


def test_a_file_of_the_recipes_is_read(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: meta-llama/Llama-3.1-8B-Instruct\ntensor-parallel-size: 2\ndtype: bfloat16\n"
        "max-num-batched-tokens: 2048\ndistributed-executor-backend: mp\n"
    )
    resolved, notes = start(f"VLLM_CPU_KVCACHE_SPACE=40 serve --config {file}")
    assert got(resolved, "omp_threads_bind") == "0-30|32-62"
    assert any("distributed-executor-backend is accepted" in note for note in notes)


def test_the_automatic_choice_is_the_same_without_any_of_it():
    resolved, notes = start("serve facebook/opt-125m")
    assert (got(resolved, "omp_threads_bind"), notes) == (BOTH, ())


def test_every_name_of_the_issue_is_in_the_table():
    lines = " ".join(row[0] for row in LINES)
    for name in (
        "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU",
        "CPU_VISIBLE_MEMORY_NODES", "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
        "TORCHINDUCTOR_COMPILE_THREADS", "--gpu-memory-utilization", "--device cpu", "-tp=2",
        "--model=", "--distributed-executor-backend mp", "-O3", "--enforce-eager",
    ):  # fmt: skip
        assert name in lines
