"""Every option once: its name, text, flag, environment variable, aliases and check.

The command line, the environment reader, config files, `LLM(...)`, `--help` and the reference table
in README.md all read this list. A new option is one `Field` here and one attribute in
`config/engine.py`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cpuserve.config.generation import check_settings
from cpuserve.config.values import parse_bind, parse_count, parse_nodes, parse_space

Kind = Literal["text", "count", "flag", "list", "object"]
TRUE = {"1": True, "true": True, "yes": True, "on": True}
FALSE = {"0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Alias:
    """Another server's name for a field; `convert` turns its text into ours.

    differs: what its value means here, where that is not what it means there.
    """

    name: str
    convert: Callable[[str], str] | None = None
    differs: str = ""


@dataclass(frozen=True, slots=True)
class Field:
    """One option.

    default: how the value is found when nobody asks, in words. synonyms: other spellings of a
    choice. words: what else may stand there. check(value) raises ValueError with what is wanted.
    secret: errors do not repeat it. server: belongs to ServerOptions.
    """

    name: str
    help: str
    default: str
    group: str
    kind: Kind = "text"
    flags: tuple[str, ...] = ()
    env: str | None = None
    aliases: tuple[Alias, ...] = ()
    choices: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    secret: bool = False
    check: Callable[[Any], object] | None = None
    metavar: str | None = None
    server: bool = False

    @property
    def flag(self) -> str:
        """The proper name on the command line (the first of `flags`), or ""."""
        return self.flags[0] if self.flags else ""

    @property
    def all_flags(self) -> tuple[str, ...]:
        """Flags and the aliases that are flags."""
        return self.flags + tuple(a.name for a in self.aliases if a.name.startswith("-"))

    @property
    def env_aliases(self) -> tuple[Alias, ...]:
        """Aliases that are environment variables."""
        return tuple(a for a in self.aliases if not a.name.startswith("-"))

    def convert(self, name: str, text: str) -> str:
        """`text` given under alias `name`, as the proper name would take it.

        ValueError says what is wanted, without naming the alias.
        """
        for alias in self.aliases:
            if alias.name == name and alias.convert is not None:
                return alias.convert(text)
        return text

    def parse(self, value: object) -> Any:
        """A text (flag, environment) or a plain value (file, `LLM(...)`) as this field's type.

        ValueError says what is wanted, without naming the field.
        """
        if self.words and str(value).strip().lower() in self.words:
            return str(value).strip().lower()
        parsed = self._typed(value)
        if self.choices and parsed not in self.choices:
            msg = f"choose one of {', '.join(self.choices)}"
            raise ValueError(msg)
        if self.check is not None:
            self.check(parsed)
        return parsed

    def _typed(self, value: object) -> Any:
        if self.kind == "flag":
            return _boolean(value)
        if self.kind == "count":
            return _count(value)
        if self.kind == "list":
            items = value if isinstance(value, list | tuple) else str(value).split(",")
            return [str(item).strip() for item in items]
        if self.kind == "object":
            return _object(value)
        if isinstance(value, bool | list | tuple | dict) or value is None:
            msg = "must be a text"
            raise ValueError(msg)
        text = str(value).strip()
        lowered = text.lower()
        if self.choices or self.synonyms:
            return self.synonyms.get(lowered, lowered if self.choices else text)
        return text


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in TRUE or word in FALSE:
        return word in TRUE
    msg = "must be 1 or 0 (true or false)"
    raise ValueError(msg)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        msg = "must be a whole number"
        raise ValueError(msg)
    return value if isinstance(value, int) else parse_count(value)


def _object(value: object) -> dict[str, Any]:
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, Mapping):
        msg = """must be a JSON object, such as '{"temperature": 0.7}'"""
        raise ValueError(msg)
    return {str(key): item for key, item in value.items()}


def at_least(least: int, most: int = 2**31 - 1) -> Callable[[int], None]:
    """A check that a number is between `least` and `most`."""

    def check(value: int) -> None:
        if not least <= value <= most:
            top = f" and at most {most}" if most < 2**31 - 1 else ""
            msg = f"must be at least {least}{top}"
            raise ValueError(msg)

    return check


def _length(value: int) -> None:
    if value != -1:
        at_least(1)(value)


def not_empty(value: str) -> None:
    """A check that a text has something in it."""
    if not value:
        msg = "must not be empty"
        raise ValueError(msg)


def _keys(value: list[str]) -> None:
    if not all(key.strip() and key.isascii() for key in value):
        msg = "keys must be ASCII texts and not empty"
        raise ValueError(msg)


def _amount(text: str) -> None:
    if parse_space(text).percent is not None or text.strip().lower() == "auto":
        msg = "give GiB (4 or 0.5) or a unit (512MiB)"
        raise ValueError(msg)


def _bytes_as_space(text: str) -> str:
    """Bytes ("1073741824", "4G" and "4g" as vLLM reads them) or a unit ("4GiB") as GiB."""
    text = text.strip()
    size: int | None = None
    with contextlib.suppress(ValueError):
        size = parse_count(text)
    if size is None and text[-1:].lower() == "b":
        with contextlib.suppress(ValueError):
            size = parse_space(text).bytes or 0
    if size is None or size < 0:
        msg = "give bytes (4294967296 or 4G) or a unit (4GiB, 512MiB)"
        raise ValueError(msg)
    return f"{size / (1 << 30):.9f}"


def _openvino_type(text: str) -> str:
    return "int8" if text.strip().lower() in ("u8", "i8") else text


DTYPES = {
    "auto": "auto",
    "bf16": "bfloat16",
    "half": "float16",
    "fp16": "float16",
    "f16": "float16",
    "float": "float32",
    "fp32": "float32",
    "f32": "float32",
}

MODEL, SERVER, MEMORY, CPU = "Model", "Server", "Memory and batching", "CPU and threads"
GROUPS = (MODEL, SERVER, MEMORY, CPU)

FIELDS: tuple[Field, ...] = (
    # -- model -------------------------------------------------------------------------------
    Field(
        "model",
        "Directory, GGUF file, Hugging Face id or built-in name (see `cpuserve models`).",
        "the built-in model",
        MODEL,
        flags=("--model",),
        env="CPUSERVE_MODEL",
        aliases=(Alias("--model-path"),),
        check=not_empty,
        metavar="MODEL",
    ),
    Field(
        "served_model_name",
        "Names the API answers to; the first one is reported.",
        "the model as given",
        MODEL,
        kind="list",
        flags=("--served-model-name",),
        env="CPUSERVE_SERVED_MODEL_NAME",
        metavar="NAME",
    ),
    Field(
        "revision",
        "Branch, tag or commit of a Hugging Face model.",
        "main",
        MODEL,
        flags=("--revision",),
        env="CPUSERVE_REVISION",
        check=not_empty,
        metavar="REV",
    ),
    Field(
        "tokenizer",
        "Directory or GGUF file to take the tokenizer from.",
        "the model's own",
        MODEL,
        flags=("--tokenizer",),
        env="CPUSERVE_TOKENIZER",
        check=not_empty,
        metavar="PATH",
    ),
    Field(
        "dtype",
        "Type of weights and activations that are not quantized: auto, bfloat16, float16, float32.",
        "auto: the checkpoint's",
        MODEL,
        flags=("--dtype",),
        env="CPUSERVE_DTYPE",
        choices=("auto", "bfloat16", "float16", "float32"),
        synonyms=DTYPES,
        metavar="DTYPE",
    ),
    Field(
        "activation_bits",
        "Bits of activations that meet quantized weights: auto, 8 (int8), 16 (two int8 terms).",
        "auto: 16 below 300 million weights, else 8",
        MODEL,
        flags=("--activation-bits",),
        env="CPUSERVE_ACTIVATION_BITS",
        choices=("auto", "8", "16"),
        metavar="BITS",
    ),
    Field(
        "quantization",
        "Weight format: int8, w8a8 or int4 is made while loading; another checks the checkpoint's.",
        "the checkpoint's",
        MODEL,
        flags=("--quantization", "-q"),
        env="CPUSERVE_QUANTIZATION",
        check=not_empty,
        metavar="FORMAT",
    ),
    Field(
        "model_impl",
        "Who runs the model: auto, cpuserve (own kernels), transformers (any architecture, slow).",
        "auto: cpuserve where it knows the architecture",
        MODEL,
        flags=("--model-impl",),
        env="CPUSERVE_MODEL_IMPL",
        choices=("auto", "cpuserve", "transformers"),
        synonyms={"vllm": "auto"},
        metavar="IMPL",
    ),
    Field(
        "chat_template",
        "Jinja file, or the template itself, used instead of the model's.",
        "the model's own",
        MODEL,
        flags=("--chat-template",),
        env="CPUSERVE_CHAT_TEMPLATE",
        check=not_empty,
        metavar="FILE",
    ),
    Field(
        "max_model_len",
        "Longest prompt plus answer of one request (8k = 8000, 8K = 8192).",
        "the model's, or less where the KV cache holds less",
        MODEL,
        kind="count",
        flags=("--max-model-len",),
        env="CPUSERVE_MAX_MODEL_LEN",
        aliases=(Alias("--ctx-size"), Alias("-c")),
        check=_length,
        metavar="TOKENS",
    ),
    Field(
        "allow_long_model_len",
        "Let max-model-len exceed what the model was trained for.",
        "off",
        MODEL,
        kind="flag",
        flags=("--allow-long-max-model-len",),
        env="CPUSERVE_ALLOW_LONG_MAX_MODEL_LEN",
        aliases=(Alias("VLLM_ALLOW_LONG_MAX_MODEL_LEN"),),
    ),
    Field(
        "disable_sliding_window",
        "Serve only as many tokens as a sliding window of the model covers, so that none slides.",
        "off",
        MODEL,
        kind="flag",
        flags=("--disable-sliding-window",),
        env="CPUSERVE_DISABLE_SLIDING_WINDOW",
    ),
    Field(
        "seed",
        "Seed of sampling for requests that bring none.",
        "0",
        MODEL,
        kind="count",
        flags=("--seed",),
        env="CPUSERVE_SEED",
        check=at_least(0),
        metavar="N",
    ),
    Field(
        "generation_config",
        "Where default sampling comes from: auto, cpuserve (OpenAI's defaults), or a directory.",
        "auto: the model's generation_config.json; built-in models have their own",
        MODEL,
        flags=("--generation-config",),
        env="CPUSERVE_GENERATION_CONFIG",
        synonyms={"auto": "auto", "cpuserve": "cpuserve", "vllm": "cpuserve"},
        check=not_empty,
        metavar="PATH",
    ),
    Field(
        "override_generation_config",
        "Default sampling as JSON, over the model's; null takes a setting away.",
        "none",
        MODEL,
        kind="object",
        flags=("--override-generation-config",),
        env="CPUSERVE_OVERRIDE_GENERATION_CONFIG",
        check=check_settings,
        metavar="JSON",
    ),
    # -- server ------------------------------------------------------------------------------
    Field(
        "host",
        "Address to listen on; 0.0.0.0 listens on all.",
        "127.0.0.1",
        SERVER,
        flags=("--host",),
        env="CPUSERVE_HTTP_HOST",
        check=not_empty,
        metavar="ADDRESS",
        server=True,
    ),
    Field(
        "port",
        "Port to listen on; 0 takes a free one.",
        "8000",
        SERVER,
        kind="count",
        flags=("--port",),
        env="CPUSERVE_HTTP_PORT",
        check=at_least(0, 65535),
        metavar="PORT",
        server=True,
    ),
    Field(
        "uds",
        "Unix socket to listen on instead of host and port; none: not that of a file or variable.",
        "none",
        SERVER,
        flags=("--uds",),
        env="CPUSERVE_UDS",
        words=("none",),
        check=not_empty,
        metavar="PATH",
        server=True,
    ),
    Field(
        "api_key",
        "Key clients must send; the variable takes several, separated by commas, and is safer.",
        "none: everyone who reaches the address may ask",
        SERVER,
        kind="list",
        flags=("--api-key",),
        env="CPUSERVE_API_KEY",
        aliases=(Alias("VLLM_API_KEY"),),
        secret=True,
        check=_keys,
        metavar="KEY",
        server=True,
    ),
    Field(
        "log_level",
        "How much is logged: debug, info, warning, error.",
        "info",
        SERVER,
        flags=("--log-level",),
        env="CPUSERVE_LOG_LEVEL",
        aliases=(Alias("--uvicorn-log-level"), Alias("VLLM_LOGGING_LEVEL")),
        choices=("debug", "info", "warning", "error"),
        synonyms={"warn": "warning", "critical": "error", "trace": "debug"},
        metavar="LEVEL",
        server=True,
    ),
    Field(
        "max_num_queued_reqs",
        "Once so many requests wait for their first token, more get 429 and a time to come back.",
        "1024",
        SERVER,
        kind="count",
        flags=("--max-num-queued-reqs",),
        env="CPUSERVE_MAX_NUM_QUEUED_REQS",
        check=at_least(1, 65536),
        metavar="N",
        server=True,
    ),
    Field(
        "max_num_queued_tokens",
        "Once so many prompt tokens wait for a first token, more get 429 and a time to come back.",
        "1048576",
        SERVER,
        kind="count",
        flags=("--max-num-queued-tokens",),
        env="CPUSERVE_MAX_NUM_QUEUED_TOKENS",
        check=at_least(1),
        metavar="TOKENS",
        server=True,
    ),
    Field(
        "sse_ping_interval",
        "Seconds of silence after which a stream sends a comment, so that no proxy cuts it.",
        "15",
        SERVER,
        kind="count",
        flags=("--sse-ping-interval",),
        env="CPUSERVE_SSE_PING_INTERVAL",
        check=at_least(1, 3600),
        metavar="SECONDS",
        server=True,
    ),
    Field(
        "request_timeout",
        "Seconds a request may take, with waiting; its own `timeout` may be less. 0 = no bound.",
        "0",
        SERVER,
        kind="count",
        flags=("--request-timeout",),
        env="CPUSERVE_REQUEST_TIMEOUT",
        check=at_least(0, 1_000_000),
        metavar="SECONDS",
        server=True,
    ),
    Field(
        "disable_log_stats",
        "Accepted for compatibility: rates are on /metrics, not in the log.",
        "no effect",
        SERVER,
        kind="flag",
        flags=("--disable-log-stats",),
        env="CPUSERVE_DISABLE_LOG_STATS",
    ),
    # -- memory and batching -----------------------------------------------------------------
    Field(
        "kv_cache_space",
        "Memory of the KV cache: GiB (4, 0.5), 512MiB, a share of memory (30%), 0 = automatic.",
        "the least of 4 GiB, a quarter of free memory, what max-num-seqs full requests can use",
        MEMORY,
        flags=("--kv-cache-memory", "--kv-cache-space"),
        env="CPUSERVE_KVCACHE_SPACE",
        aliases=(
            Alias("--kv-cache-memory-bytes", _bytes_as_space),
            Alias("VLLM_CPU_KVCACHE_SPACE", differs="of all ranks of an engine together"),
            Alias("VLLM_OPENVINO_KVCACHE_SPACE"),
        ),
        check=parse_space,
        metavar="SIZE",
    ),
    Field(
        "kv_cache_dtype",
        "Type of the KV cache: auto, bfloat16, float16, float32, int8, fp8_e4m3 (fp8), fp8_e5m2.",
        "auto: the dtype",
        MEMORY,
        flags=("--kv-cache-dtype",),
        env="CPUSERVE_KV_CACHE_DTYPE",
        aliases=(Alias("VLLM_OPENVINO_CPU_KV_CACHE_PRECISION", _openvino_type),),
        choices=("auto", "bfloat16", "float16", "float32", "int8", "fp8_e4m3", "fp8_e5m2"),
        synonyms={**DTYPES, "fp8": "fp8_e4m3"},
        metavar="DTYPE",
    ),
    Field(
        "block_size",
        "Tokens of one KV block; the kernels use 32, another size is noted and not used.",
        "32",
        MEMORY,
        kind="count",
        flags=("--block-size",),
        env="CPUSERVE_BLOCK_SIZE",
        check=at_least(1),
        metavar="TOKENS",
    ),
    Field(
        "max_num_seqs",
        "Requests that run at the same time; more wait in the queue.",
        "64",
        MEMORY,
        kind="count",
        flags=("--max-num-seqs",),
        env="CPUSERVE_MAX_NUM_SEQS",
        aliases=(Alias("--parallel"), Alias("-np")),
        check=at_least(1, 4096),
        metavar="N",
    ),
    Field(
        "max_num_batched_tokens",
        "Tokens of one step, decode rows and prompt chunks; activation memory grows with it.",
        "2048",
        MEMORY,
        kind="count",
        flags=("--max-num-batched-tokens",),
        env="CPUSERVE_MAX_NUM_BATCHED_TOKENS",
        check=at_least(1, 1 << 20),
        metavar="TOKENS",
    ),
    Field(
        "itl_target_ms",
        "Time between tokens of running streams that prompt chunks are sized for, within 1.67 "
        "and 2.5 times what it is without a prompt; 0 = no target.",
        "50 (0 in LLM, where nobody waits for single tokens)",
        MEMORY,
        kind="count",
        flags=("--itl-target-ms",),
        env="CPUSERVE_ITL_TARGET_MS",
        check=at_least(0, 60_000),
        metavar="MS",
    ),
    Field(
        "long_prefill_token_threshold",
        "Most tokens of one prompt in a step, so that short prompts pass long ones; 0 = no bound.",
        "0",
        MEMORY,
        kind="count",
        flags=("--long-prefill-token-threshold",),
        env="CPUSERVE_LONG_PREFILL_TOKEN_THRESHOLD",
        check=at_least(0, 1 << 20),
        metavar="TOKENS",
    ),
    Field(
        "scheduling_policy",
        "Who goes first: fcfs (as they come), priority (the lower `priority` of the request).",
        "fcfs",
        MEMORY,
        flags=("--scheduling-policy",),
        env="CPUSERVE_SCHEDULING_POLICY",
        choices=("fcfs", "priority"),
        metavar="POLICY",
    ),
    Field(
        "enable_prefix_caching",
        "Compute equal beginnings of requests once and keep them; `no` before the name: do not.",
        "on",
        MEMORY,
        kind="flag",
        flags=("--enable-prefix-caching",),
        env="CPUSERVE_ENABLE_PREFIX_CACHING",
    ),
    Field(
        "prefix_cache_dir",
        "Directory where computed beginnings of requests are kept over restarts.",
        "none",
        MEMORY,
        flags=("--prefix-cache-dir",),
        env="CPUSERVE_PREFIX_CACHE_DIR",
        check=not_empty,
        metavar="DIR",
    ),
    Field(
        "prefix_cache_size",
        "Most that prefix-cache-dir may hold: GiB (4, 0.5) or 512MiB; the longest unused goes.",
        "4",
        MEMORY,
        flags=("--prefix-cache-size",),
        env="CPUSERVE_PREFIX_CACHE_SIZE",
        check=_amount,
        metavar="SIZE",
    ),
    Field(
        "swap_space",
        "Memory beside the KV cache for blocks that had to leave it: GiB (4, 0.5) or 512MiB.",
        "0",
        MEMORY,
        flags=("--swap-space",),
        env="CPUSERVE_SWAP_SPACE",
        check=_amount,
        metavar="SIZE",
    ),
    # -- CPU ---------------------------------------------------------------------------------
    Field(
        "isa",
        "Instruction-set level of the kernels; may only lower what this CPU offers (see doctor).",
        "the highest this CPU runs",
        CPU,
        flags=("--isa",),
        env="CPUSERVE_ISA",
        synonyms={"native": "auto"},
        check=not_empty,
        metavar="LEVEL",
    ),
    Field(
        "omp_threads_bind",
        "CPUs of the compute threads: auto, nobind, or a list such as 0-31, 0,2 or 0-62:2; "
        "`|` separates the lists of ranks.",
        "auto: one thread per physical core, within affinity and CPU quota",
        CPU,
        flags=("--omp-threads-bind", "--cpu-omp-threads-bind"),
        env="CPUSERVE_OMP_THREADS_BIND",
        aliases=(Alias("VLLM_CPU_OMP_THREADS_BIND"),),
        check=parse_bind,
        metavar="CPUS",
    ),
    Field(
        "num_reserved_cpu",
        "Cores that auto binding leaves to the front end, all together, from each node's tail.",
        "0 up to 4 allowed cores, else one per NUMA node in use",
        CPU,
        kind="count",
        flags=("--num-reserved-cpu", "--num-of-reserved-cpu"),
        env="CPUSERVE_NUM_OF_RESERVED_CPU",
        aliases=(Alias("VLLM_CPU_NUM_OF_RESERVED_CPU", differs="of all ranks together"),),
        check=at_least(0),
        metavar="N",
    ),
    Field(
        "visible_memory_nodes",
        "NUMA nodes automatic binding may use, such as 0 or 1,0; their order is the ranks' order.",
        "all nodes with allowed CPUs",
        CPU,
        flags=("--visible-memory-nodes",),
        env="CPUSERVE_VISIBLE_MEMORY_NODES",
        aliases=(Alias("CPU_VISIBLE_MEMORY_NODES"),),
        check=parse_nodes,
        metavar="NODES",
    ),
    Field(
        "omp_num_threads",
        "Threads under nobind; otherwise the CPU list decides.",
        "one per physical core, within affinity and CPU quota",
        CPU,
        kind="count",
        env="OMP_NUM_THREADS",
        check=at_least(1, 4096),
    ),
    Field(
        "tensor_parallel_size",
        "Groups of threads, a NUMA node each, that the model is split over: any number, or auto.",
        "1",
        CPU,
        kind="count",
        words=("auto",),
        flags=("--tensor-parallel-size", "-tp"),
        env="CPUSERVE_TENSOR_PARALLEL_SIZE",
        check=at_least(1, 1024),
        metavar="N",
    ),
    Field(
        "data_parallel_size",
        "Engines behind one endpoint, each on its own cores, with its own model and KV cache.",
        "1",
        CPU,
        kind="count",
        flags=("--data-parallel-size", "-dp"),
        env="CPUSERVE_DATA_PARALLEL_SIZE",
        check=at_least(1, 1024),
        metavar="N",
    ),
    Field(
        "numa",
        "Use of several NUMA nodes: auto, tp (ranks), replicas (engines), interleave (pages), off.",
        "off: one group of threads over all nodes",
        CPU,
        flags=("--numa",),
        env="CPUSERVE_NUMA",
        choices=("auto", "tp", "replicas", "interleave", "off"),
        metavar="MODE",
    ),
    Field(
        "executor",
        "What runs a step: auto, native (C++ kernels), torch (the slow floor).",
        "auto: native, or torch where the extension cannot run",
        CPU,
        flags=("--executor",),
        env="CPUSERVE_EXECUTOR",
        choices=("auto", "native", "torch"),
        metavar="KIND",
    ),
    Field(
        "platform",
        "Platform to use, by name; plug-ins register under the entry point cpuserve.platforms.",
        "cpu, unless a plug-in offers better",
        CPU,
        flags=("--platform",),
        env="CPUSERVE_PLATFORM",
        check=not_empty,
        metavar="NAME",
    ),
    Field(
        "enforce_eager",
        "Accepted for compatibility: there is nothing to compile, so nothing to turn off.",
        "no effect",
        CPU,
        kind="flag",
        flags=("--enforce-eager",),
        env="CPUSERVE_ENFORCE_EAGER",
    ),
)


@dataclass(frozen=True, slots=True)
class NoOp:
    """A flag, variable or argument of another server that is accepted and has no effect.

    takes: how many values the flag swallows. why: one clause for the note.
    only: the one value that means no effect; another is refused.
    """

    names: tuple[str, ...]
    why: str
    takes: Literal["none", "one", "many"] = "one"
    only: str | None = None


NO_OPS: tuple[NoOp, ...] = (
    NoOp(
        ("--device", "VLLM_TARGET_DEVICE", "VLLM_OPENVINO_DEVICE"),
        "cpuserve always runs on the CPU",
    ),
    NoOp(
        ("VLLM_OPENVINO_ENABLE_QUANTIZED_WEIGHTS",),
        "--quantization int8 stores weights in 8 bits",
    ),
    NoOp(("--gpu-memory-utilization",), "use --kv-cache-memory to size the KV cache"),
    NoOp(("--distributed-executor-backend",), "ranks are threads of one process here"),
    NoOp(
        (
            "--compilation-config",
            "-O",
            "-cc",
            "--optimization-level",
            "--max-seq-len-to-capture",
            "--max-cudagraph-capture-size",
        ),
        "kernels are compiled ahead of time",
    ),
    NoOp(
        ("--cuda-graph-sizes", "--cudagraph-capture-sizes"),
        "kernels are compiled ahead of time",
        "many",
    ),
    NoOp(("--cpu-offload-gb",), "all memory is the CPU's"),
    NoOp(("--load-format",), "the format is read from the files"),
    NoOp(("--tokenizer-mode",), "there is one tokenizer, the fast one"),
    NoOp(("--trust-remote-code",), "cpuserve never runs code from a model", "none"),
    NoOp(
        ("--enable-chunked-prefill", "--no-enable-chunked-prefill"), "prompts are chunked", "none"
    ),
    NoOp(("--disable-log-requests", "--no-enable-log-requests"), "requests are not logged", "none"),
    NoOp(("--disable-frontend-multiprocessing",), "the front end has its own process", "none"),
    NoOp(("--disable-custom-all-reduce",), "there is no all-reduce", "none"),
    NoOp(("--async-scheduling", "--no-async-scheduling"), "scheduling costs microseconds", "none"),
    NoOp(("--pipeline-parallel-size", "-pp"), "there is one stage", only="1"),
    NoOp(("--api-server-count",), "one front-end process serves"),
    NoOp(
        (
            "--attention-backend",
            "--linear-backend",
            "--moe-backend",
            "VLLM_ATTENTION_BACKEND",
            "VLLM_CPU_SGL_KERNEL",
            "VLLM_CPU_MOE_PREPACK",
            "VLLM_CPU_ATTN_SPLIT_KV",
            "VLLM_CPU_INT4_W4A8",
            "VLLM_ZENTORCH_WEIGHT_PREPACK",
        ),
        "kernels are chosen for the CPU by themselves",
    ),
    NoOp(("TORCHINDUCTOR_COMPILE_THREADS",), "kernels are compiled ahead of time"),
    NoOp(("VLLM_CPU_CI_ENV", "VLLM_CPU_SIM_MULTI_NUMA"), "it is internal to vLLM"),
)

BY_NAME: dict[str, Field] = {f.name: f for f in FIELDS}


def argument_name(flag: str) -> str:
    """--max-num-seqs -> max_num_seqs: the keyword of a flag in `LLM(...)` and config files."""
    return flag.lstrip("-").replace("-", "_")


def no_op_flags() -> dict[str, NoOp]:
    """Flag -> what to say about it."""
    return {name: n for n in NO_OPS for name in n.names if name.startswith("-")}


def no_op_variables() -> dict[str, NoOp]:
    """Environment variable -> what to say about it."""
    return {name: n for n in NO_OPS for name in n.names if not name.startswith("-")}


def keywords() -> dict[str, tuple[Field, str]]:
    """Every keyword of `LLM(...)` and config files -> its field and the flag it stands for."""
    found: dict[str, tuple[Field, str]] = {f.name: (f, f.flag) for f in FIELDS}
    for f in FIELDS:
        for flag in f.all_flags:
            if flag.startswith("--"):
                found.setdefault(argument_name(flag), (f, flag))
    return found
