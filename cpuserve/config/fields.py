"""The list of all options, each with its help text, flag, environment variable, aliases and check.

The command line, the environment reader,
config files, `LLM(...)`, `--help` and the reference table in docs/options.md use this list.
A new option is an attribute in `config/options.py`, or for the server in `config/server.py`.
"""

from __future__ import annotations

from cpuserve.config import options, server
from cpuserve.config.field import (
    GROUPS,
    Field,
)
from cpuserve.config.no_op import NoOp
from cpuserve.config.vllm_no_ops import VLLM_NO_OPS

NO_OPS: tuple[NoOp, ...] = (
    NoOp("--device VLLM_TARGET_DEVICE VLLM_OPENVINO_DEVICE", "cpuserve always runs on the CPU"),
    NoOp("VLLM_OPENVINO_ENABLE_QUANTIZED_WEIGHTS", "--quantization int8 stores weights in 8 bits"),
    NoOp("--gpu-memory-utilization", "use --kv-cache-memory to size the KV cache"),
    NoOp("--distributed-executor-backend", "ranks are threads of one process here"),
    NoOp(
        "--compilation-config -O -cc --optimization-level --max-seq-len-to-capture "
        "--max-cudagraph-capture-size",
        "kernels are compiled ahead of time",
    ),
    NoOp(
        "--cuda-graph-sizes --cudagraph-capture-sizes", "kernels are compiled ahead of time", "many"
    ),
    NoOp("--cpu-offload-gb", "weights are in CPU memory, or on disk with --weights-on-disk"),
    NoOp("--load-format", "the format is detected from the files"),
    NoOp("--tokenizer-mode", "the fast tokenizer is always used"),
    NoOp("--trust-remote-code", "cpuserve never runs code from a model", "none"),
    NoOp(
        "--enable-chunked-prefill --no-enable-chunked-prefill", "prompts are always chunked", "none"
    ),
    NoOp(
        "--disable-log-requests --no-enable-log-requests",
        "--access-log says which requests are logged (by default those that fail)",
        "none",
    ),
    NoOp("--disable-frontend-multiprocessing", "the front end always has its own process", "none"),
    NoOp(
        "--enable-ssl-refresh",
        "the files of the certificate are always read again when they change",
        "none",
    ),
    NoOp("--disable-custom-all-reduce", "there is no all-reduce", "none"),
    NoOp("--async-scheduling --no-async-scheduling", "scheduling takes only microseconds", "none"),
    NoOp("--pipeline-parallel-size -pp", "there is only one pipeline stage", only=("1",)),
    NoOp(
        "--task --runner",
        "the checkpoint says if it makes text, embeddings or scores; --pooling overrides it",
        only=("generate", "auto", "embed", "embedding", "pooling", "score"),
    ),
    NoOp(
        "--convert",
        "the checkpoint says if it makes text, embeddings or scores; --pooling overrides it",
        only=("none", "auto", "embed", "classify"),
    ),
    NoOp("--enable-lora", "--lora-modules alone serves adapters", "none"),
    NoOp("--max-cpu-loras", "all adapters are in memory: --max-loras says how many can be"),
    NoOp(
        "--embedding --embeddings",
        "embedding models produce embeddings without it; --pooling makes one of any decoder",
        "none",
    ),
    NoOp(
        "--rerank --reranking",
        "rerankers produce scores without it; --pooling rank makes one of Qwen3-Reranker",
        "none",
    ),
    NoOp("--disable-fastapi-docs", "there are no documentation pages", "none"),
    NoOp("--max-log-len", "no text of requests is logged"),
    NoOp("--enable-request-id-headers", "every response has an X-Request-Id", "none"),
    NoOp("--enable-prompt-tokens-details", "usage always contains them", "none"),
    NoOp("--enable-auto-tool-choice", "requests with tools need no flag", "none"),
    NoOp("--exclude-tools-when-tool-choice-none", "the prompt leaves out such tools", "none"),
    NoOp("--chat-template-content-format", "templates get texts or parts, as they take them"),
    NoOp("--prefix-caching-hash-algo", "prefixes are hashed with SHA-256"),
    NoOp("--disable-cascade-attn", "there is no cascade attention", "none"),
    NoOp("--max-parallel-loading-workers", "weights are loaded by the compute threads"),
    NoOp("--api-server-count", "there is one front-end process"),
    NoOp(
        "--attention-backend --linear-backend --moe-backend VLLM_ATTENTION_BACKEND "
        "VLLM_CPU_SGL_KERNEL VLLM_CPU_MOE_PREPACK VLLM_CPU_ATTN_SPLIT_KV "
        "VLLM_CPU_INT4_W4A8 VLLM_ZENTORCH_WEIGHT_PREPACK",
        "kernels are chosen for the CPU automatically",
    ),
    NoOp("TORCHINDUCTOR_COMPILE_THREADS", "kernels are compiled ahead of time"),
    NoOp("VLLM_CPU_CI_ENV VLLM_CPU_SIM_MULTI_NUMA", "it is internal to vLLM"),
    NoOp("--jinja", "chat templates are always rendered with Jinja", "none"),
    NoOp("LLAMA_ARG_JINJA", "chat templates are always rendered with Jinja"),
    NoOp("--metrics", "/metrics is always served", "none"),
    NoOp("LLAMA_ARG_ENDPOINT_METRICS", "/metrics is always served"),
    NoOp("--slots", "/slots is always served", "none"),
    NoOp("--cont-batching -cb", "a request joins the batch at the next step", "none"),
    NoOp("LLAMA_ARG_CONT_BATCHING", "a request joins the batch at the next step"),
    NoOp("--kv-unified -kvu", "all requests share one KV cache", "none"),
    NoOp("--no-context-shift", "no token ever leaves a context", "none"),
    NoOp("--cache-prompt", "prefixes are cached unless --no-enable-prefix-caching", "none"),
    NoOp("--mmap --no-mmap", "--weights-on-disk decides if weights are mapped from a file", "none"),
    NoOp("LLAMA_ARG_MMAP", "--weights-on-disk decides if weights are mapped from a file"),
    NoOp("--cpu-moe -cmoe", "experts are always in CPU memory, or on disk", "none"),
    NoOp("--n-cpu-moe -ncmoe", "experts are always in CPU memory, or on disk"),
    NoOp("--no-kv-offload -nkvo", "the KV cache is always in CPU memory", "none"),
    NoOp("--no-op-offload", "operations always run on the CPU", "none"),
    NoOp("--perf --no-perf", "/metrics always has the timings", "none"),
    NoOp("--warmup --no-warmup", "the start needs no empty request", "none"),
    NoOp("--fit -fit", "settings that are not set always fit in memory"),
    *VLLM_NO_OPS,
)

# Sorted as in --help and docs/options.md.
FIELDS = tuple(
    sorted((*server.FIELDS, *options.FIELDS), key=lambda field: GROUPS.index(field.group))
)
BY_NAME: dict[str, Field] = {f.name: f for f in FIELDS}


def argument_name(flag: str) -> str:
    """Return the name of a flag in `LLM(...)` and config files, such as "max_num_seqs"."""
    return flag.lstrip("-").replace("-", "_")


def no_op_flags() -> dict[str, NoOp]:
    """Return the flags that are accepted without effect, by name."""
    return {name: n for n in NO_OPS for name in n.names if name.startswith("-")}


def no_op_variables() -> dict[str, NoOp]:
    """Return the environment variables that are accepted without effect, by name."""
    return {name: n for n in NO_OPS for name in n.names if not name.startswith("-")}


def keywords() -> dict[str, tuple[Field, str]]:
    """Return the option and the main flag for each keyword of `LLM(...)` and of config files."""
    found: dict[str, tuple[Field, str]] = {f.name: (f, f.flag) for f in FIELDS}
    for f in FIELDS:
        for flag in f.all_flags:
            if flag.startswith("--"):
                found.setdefault(argument_name(flag), (f, flag))
    return found
