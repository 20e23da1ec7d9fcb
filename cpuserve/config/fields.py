"""The list of all options, with help text, flag, environment variable, aliases and check of each.

The command line, the environment reader, config files, `LLM(...)`, `--help` and the reference table
in docs/options.md all use this list. A new option needs one `Field` here and one attribute in
`config/engine.py`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cpuserve.config.adapters import read_modules
from cpuserve.config.generation import check_settings
from cpuserve.config.speculation import read_speculation
from cpuserve.config.values import parse_bind, parse_count, parse_nodes, parse_space

# A "list" flag takes several values. A "names" flag takes one value: names separated by commas, or
# a JSON list.
Kind = Literal["text", "count", "flag", "list", "names", "object"]
TRUE = {"1": True, "true": True, "yes": True, "on": True}
FALSE = {"0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Alias:
    """Another server's name for a field; `convert` translates a text given under that name.

    differs: how the value's meaning here differs from its meaning in the other server, if it does.
    """

    name: str
    convert: Callable[[str], str] | None = None
    differs: str = ""


@dataclass(frozen=True, slots=True)
class Field:
    """One option.

    default: a description of the value that applies if the option is not set. synonyms: other
    spellings of a choice. words: texts that are accepted in place of a value of `kind`.
    read(value): converts a value in place of `kind`, and raises a ValueError as `parse` does.
    check(value): raises a ValueError that says what is expected. secret: error messages do not
    show the value. server: the option belongs to ServerOptions.
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
    read: Callable[[object], Any] | None = None
    check: Callable[[Any], object] | None = None
    metavar: str | None = None
    server: bool = False

    @property
    def flag(self) -> str:
        """The main name on the command line (the first of `flags`), or ""."""
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
        """Translate `text`, given under alias `name`, to the text that the main name accepts.

        Raises a ValueError that says what is expected, without naming the alias.
        """
        for alias in self.aliases:
            if alias.name == name and alias.convert is not None:
                return alias.convert(text)
        return text

    def parse(self, value: object) -> Any:
        """Convert a text (flag, environment) or a plain value (file, `LLM(...)`) to this type.

        Raises a ValueError that says what is expected, without naming the field.
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
        if self.read is not None:
            return self.read(value)
        if self.kind == "flag":
            return _boolean(value)
        if self.kind == "count":
            return _count(value)
        if self.kind == "list":
            items = value if isinstance(value, list | tuple) else str(value).split(",")
            return [str(item).strip() for item in items]
        if self.kind == "names":
            return _names(value)
        if self.kind == "object":
            return _object(value)
        if isinstance(value, bool | list | tuple | dict) or value is None:
            msg = "must be text"
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


def _names(value: object) -> list[str]:
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    items = value if isinstance(value, list | tuple) else str(value).split(",")
    if not items or not all(isinstance(item, str) and item.strip() for item in items):
        msg = """must be names separated by commas, or a JSON list such as '["a", "b"]'"""
        raise ValueError(msg)
    return [item.strip() for item in items]


def _object(value: object) -> dict[str, Any]:
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, Mapping):
        msg = """must be a JSON object, such as '{"name": 0.7}'"""
        raise ValueError(msg)
    return {str(key): item for key, item in value.items()}


def at_least(least: int, most: int = 2**31 - 1) -> Callable[[int], None]:
    """Return a check that a number is between `least` and `most`."""

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
    """Raise a ValueError for an empty text."""
    if not value:
        msg = "must not be empty"
        raise ValueError(msg)


def _model_names(value: list[str]) -> None:
    if not all(value) or len({*value}) < len(value):
        msg = "must be names that are not empty, each once"
        raise ValueError(msg)


def _named(value: list[str], what: str) -> None:
    names = [name for name, _, named in (item.partition("=") for item in value) if named]
    if len(names) < len(value) or not all(names) or len({*names}) < len(names):
        msg = f"must be pairs NAME={what}, each with a name of its own"
        raise ValueError(msg)


def _named_models(value: list[str]) -> None:
    _named(value, "MODEL")


def _named_paths(value: list[str]) -> None:
    _named(value, "PATH")


def _named_places(value: list[str]) -> None:
    _named(value, "PLACE")


def _hosts(value: list[str]) -> None:
    if not all(re.fullmatch(r"\*|(\*\.)?[A-Za-z0-9._-]+", name) for name in value):
        msg = "must be host names without a port: api.example.com, *.example.com, or * for any"
        raise ValueError(msg)


def _origins(value: list[str]) -> None:
    if not all(re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s*]+", origin) for origin in value):
        msg = "must be origins without a path, such as https://chat.example.com, or * for any"
        raise ValueError(msg)


def _tokens(value: list[str]) -> None:
    if not all(re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", token) for token in value):
        msg = "must be names of HTTP methods or headers, or * for any"
        raise ValueError(msg)


def _keys(value: list[str]) -> None:
    if not all(key.strip() and key.isascii() for key in value):
        msg = "keys must be ASCII text and not empty"
        raise ValueError(msg)


def _amount(text: str) -> None:
    if parse_space(text).percent is not None or text.strip().lower() == "auto":
        msg = "give GiB (4 or 0.5) or a unit (512MiB)"
        raise ValueError(msg)


def _bytes_as_space(text: str) -> str:
    """Convert bytes ("1073741824", "4G" and "4g" as in vLLM) or a unit ("4GiB") to GiB."""
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
        "Model: a directory, GGUF file, Hugging Face id (of GGUF files: OWNER/MODEL:Q4_K_M) or "
        "built-in name (see `cpuserve models`).",
        "the built-in model",
        MODEL,
        flags=("--model",),
        env="CPUSERVE_MODEL",
        aliases=(Alias("--model-path"), Alias("-m"), Alias("--hf-repo"), Alias("-hf")),
        check=not_empty,
        metavar="MODEL",
    ),
    Field(
        "served_model_name",
        "Model names that the API accepts; responses contain the first one.",
        "the model as given",
        MODEL,
        kind="list",
        flags=("--served-model-name",),
        env="CPUSERVE_SERVED_MODEL_NAME",
        check=_model_names,
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
        "Directory or GGUF file that contains the tokenizer.",
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
        "auto: the checkpoint's; bfloat16 for an encoder in float32 where the CPU multiplies it",
        MODEL,
        flags=("--dtype",),
        env="CPUSERVE_DTYPE",
        choices=("auto", "bfloat16", "float16", "float32"),
        synonyms=DTYPES,
        metavar="DTYPE",
    ),
    Field(
        "activation_bits",
        "Bits of activations that are multiplied by quantized weights: auto, 8 (int8), 16 (two "
        "int8 terms).",
        "auto: 16 below 300 million weights, otherwise 8",
        MODEL,
        flags=("--activation-bits",),
        env="CPUSERVE_ACTIVATION_BITS",
        choices=("auto", "8", "16"),
        metavar="BITS",
    ),
    Field(
        "quantization",
        "Quantize weights while loading: int8, w8a8, int4, or int4_mixed (int4, but value and down "
        "projections int8; models below 300 million weights keep more in int8). With another "
        "name, the start fails unless the checkpoint has that format.",
        "the checkpoint's",
        MODEL,
        flags=("--quantization", "-q"),
        env="CPUSERVE_QUANTIZATION",
        check=not_empty,
        metavar="FORMAT",
    ),
    Field(
        "weight_cache_size",
        "Maximum size of the files of quantized or mapped weights in the cache directory: GiB (4, "
        "0.5) or 512MiB; 0: none. A start that finds one reads it instead of quantizing.",
        "32",
        MODEL,
        flags=("--weight-cache-size",),
        env="CPUSERVE_WEIGHT_CACHE_SIZE",
        check=_amount,
        metavar="SIZE",
    ),
    Field(
        "weights_on_disk",
        "Map the weights from a file, of which memory holds what it has room for: auto, always, "
        "never.",
        "auto: a mixture of experts that does not fit in memory",
        MEMORY,
        flags=("--weights-on-disk",),
        env="CPUSERVE_WEIGHTS_ON_DISK",
        choices=("auto", "always", "never"),
        metavar="WHEN",
    ),
    Field(
        "model_impl",
        "Model implementation: auto, cpuserve (own kernels), transformers (any architecture, "
        "slow).",
        "auto: cpuserve for supported architectures, otherwise transformers",
        MODEL,
        flags=("--model-impl",),
        env="CPUSERVE_MODEL_IMPL",
        choices=("auto", "cpuserve", "transformers"),
        synonyms={"vllm": "auto"},
        metavar="IMPL",
    ),
    Field(
        "pooling",
        "Serve embeddings instead of text: the vector of the last or the first token (cls), or the "
        "mean of all; rank: scores of a reranker; none: generate text.",
        "auto: as a checkpoint of embeddings or a reranker says, otherwise none",
        MODEL,
        flags=("--pooling",),
        env="CPUSERVE_POOLING",
        choices=("auto", "none", "last", "mean", "first", "rank"),
        synonyms={"cls": "first"},
        metavar="KIND",
    ),
    Field(
        "lora_modules",
        "LoRA adapters as NAME=PATH, or as vLLM's JSON objects, of a directory of PEFT or a GGUF "
        "file; a request uses one by naming it as its model.",
        "none",
        MODEL,
        kind="list",
        flags=("--lora-modules",),
        env="CPUSERVE_LORA_MODULES",
        read=read_modules,
        check=_named_paths,
        metavar="NAME=PATH",
    ),
    Field(
        "allow_runtime_lora_updating",
        "Let clients load adapters from this machine's disk, and unload them, while the server "
        "runs: POST /v1/load_lora_adapter and /v1/unload_lora_adapter.",
        "off",
        MODEL,
        kind="flag",
        flags=("--allow-runtime-lora-updating",),
        env="CPUSERVE_ALLOW_RUNTIME_LORA_UPDATING",
        aliases=(Alias("VLLM_ALLOW_RUNTIME_LORA_UPDATING"),),
    ),
    Field(
        "max_loras",
        "How many adapters can be loaded at a time, with --allow-runtime-lora-updating; there is "
        "memory for one more, which replaces another.",
        "4 more than --lora-modules names",
        MODEL,
        kind="count",
        flags=("--max-loras",),
        env="CPUSERVE_MAX_LORAS",
        check=at_least(1, 1024),
        metavar="COUNT",
    ),
    Field(
        "max_lora_rank",
        "The largest rank of adapters, with --allow-runtime-lora-updating.",
        "16, or the largest of --lora-modules",
        MODEL,
        kind="count",
        flags=("--max-lora-rank",),
        env="CPUSERVE_MAX_LORA_RANK",
        check=at_least(1, 512),
        metavar="RANK",
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
        "Maximum tokens of one request, prompt and answer together (8k = 8000, 8K = 8192).",
        "the model's maximum (with LongRoPE, its original context), or what the KV cache holds",
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
        "Allow --max-model-len to exceed the length that the model was trained for.",
        "off",
        MODEL,
        kind="flag",
        flags=("--allow-long-max-model-len",),
        env="CPUSERVE_ALLOW_LONG_MAX_MODEL_LEN",
        aliases=(Alias("VLLM_ALLOW_LONG_MAX_MODEL_LEN"),),
    ),
    Field(
        "disable_sliding_window",
        "Limit the context length to the model's sliding window, so that the window never slides.",
        "off",
        MODEL,
        kind="flag",
        flags=("--disable-sliding-window",),
        env="CPUSERVE_DISABLE_SLIDING_WINDOW",
    ),
    Field(
        "seed",
        "Sampling seed of requests that do not set one.",
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
        "Source of the default sampling parameters: auto, cpuserve (OpenAI's defaults), or a "
        "directory.",
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
        "Default sampling parameters as a JSON object; they override the model's, and null removes "
        "one.",
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
        "Address to listen on; 0.0.0.0 listens on all IPv4 addresses.",
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
        "Port to listen on; 0 selects a free one.",
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
        "Unix socket to listen on instead of host and port; `none` cancels the socket that a "
        "variable or a config file sets.",
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
        "API keys; clients must send one of them. Separate several by commas in the variable, "
        "which is safer, because other users of the machine can read flags.",
        "none: everyone who can connect may use the server",
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
        "public_metrics",
        "Serve /metrics and /version without an API key, as /health, /ping and /live always are.",
        "off: they need a key if one is set",
        SERVER,
        kind="flag",
        flags=("--public-metrics",),
        env="CPUSERVE_PUBLIC_METRICS",
        server=True,
    ),
    Field(
        "also_serve",
        "Further models as NAME=MODEL. Each is loaded when a request names it, and unloaded when "
        "another one needs its memory. Options that do not describe one model apply to all.",
        "none",
        SERVER,
        kind="names",
        flags=("--also-serve",),
        env="CPUSERVE_ALSO_SERVE",
        check=_named_models,
        metavar="NAME=MODEL",
        server=True,
    ),
    Field(
        "allowed_hosts",
        "Host names that requests may be addressed to, besides localhost and IP addresses: "
        "a.example.com,*.b.example, or * for any. Requests for other names get 403.",
        "any; only local names if --host is a loopback address and no API key is set",
        SERVER,
        kind="names",
        flags=("--allowed-hosts",),
        env="CPUSERVE_ALLOWED_HOSTS",
        check=_hosts,
        metavar="NAMES",
        server=True,
    ),
    Field(
        "allowed_origins",
        "Origins whose web pages may use the API from a browser (CORS), or * for any.",
        "none",
        SERVER,
        kind="names",
        flags=("--allowed-origins",),
        env="CPUSERVE_ALLOWED_ORIGINS",
        check=_origins,
        metavar="ORIGINS",
        server=True,
    ),
    Field(
        "allowed_methods",
        "HTTP methods that pages of --allowed-origins may use.",
        "*",
        SERVER,
        kind="names",
        flags=("--allowed-methods",),
        env="CPUSERVE_ALLOWED_METHODS",
        check=_tokens,
        metavar="METHODS",
        server=True,
    ),
    Field(
        "allowed_headers",
        "Request headers that pages of --allowed-origins may send.",
        "*",
        SERVER,
        kind="names",
        flags=("--allowed-headers",),
        env="CPUSERVE_ALLOWED_HEADERS",
        check=_tokens,
        metavar="HEADERS",
        server=True,
    ),
    Field(
        "allow_credentials",
        "Allow browsers to send cookies with requests from pages of --allowed-origins.",
        "off",
        SERVER,
        kind="flag",
        flags=("--allow-credentials",),
        env="CPUSERVE_ALLOW_CREDENTIALS",
        server=True,
    ),
    Field(
        "log_level",
        "Lowest level of the messages that are logged: debug, info, warning, error.",
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
        "Maximum requests that wait for their first token; further ones get 429 with Retry-After.",
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
        "Maximum prompt tokens that wait for a first token; further requests get 429 with "
        "Retry-After.",
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
        "max_body_size",
        "Maximum size of a request body in bytes (4M is 4 MiB); larger ones get 413.",
        "64 bytes per token of the model's context, and at least 4 MiB",
        SERVER,
        kind="count",
        flags=("--max-body-size",),
        env="CPUSERVE_MAX_BODY_SIZE",
        check=at_least(1024, 2**40),
        metavar="BYTES",
        server=True,
    ),
    Field(
        "sse_ping_interval",
        "Seconds without an event after which a stream sends a comment, so that proxies keep it "
        "open.",
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
        "Maximum seconds of a request, time in the queue included; a request's own `timeout` may "
        "be shorter. 0 = no limit.",
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
        "drain_timeout",
        "Seconds that running requests get to finish when a signal stops the server; requests that "
        "still run then end with an error.",
        "30",
        SERVER,
        kind="count",
        flags=("--drain-timeout",),
        env="CPUSERVE_DRAIN_TIMEOUT",
        aliases=(Alias("--shutdown-timeout"), Alias("--timeout-graceful-shutdown")),
        check=at_least(0, 86_400),
        metavar="SECONDS",
        server=True,
    ),
    Field(
        "drain_delay",
        "Seconds for which the server still accepts requests after that signal, while /health "
        "returns 503. Set it above the interval at which a load balancer checks /health.",
        "0",
        SERVER,
        kind="count",
        flags=("--drain-delay",),
        env="CPUSERVE_DRAIN_DELAY",
        check=at_least(0, 3600),
        metavar="SECONDS",
        server=True,
    ),
    Field(
        "engine_restart",
        "Restart an engine process that dies; with --no-engine-restart the server exits with code "
        "1.",
        "on",
        SERVER,
        kind="flag",
        flags=("--engine-restart",),
        env="CPUSERVE_ENGINE_RESTART",
        server=True,
    ),
    Field(
        "disable_log_stats",
        "Accepted for compatibility: throughput is on /metrics, not in the log.",
        "no effect",
        SERVER,
        kind="flag",
        flags=("--disable-log-stats",),
        env="CPUSERVE_DISABLE_LOG_STATS",
    ),
    # -- memory and batching -----------------------------------------------------------------
    Field(
        "kv_cache_space",
        "Size of the KV cache: GiB (4, 0.5), 512MiB, a share of memory (30%), or 0 = automatic.",
        "a quarter of free memory, or the size that max-num-seqs requests of full length can use "
        "if that is less",
        MEMORY,
        flags=("--kv-cache-memory", "--kv-cache-space"),
        env="CPUSERVE_KVCACHE_SPACE",
        aliases=(
            Alias("--kv-cache-memory-bytes", _bytes_as_space),
            Alias("VLLM_CPU_KVCACHE_SPACE", differs="for all ranks of an engine together"),
            Alias("VLLM_OPENVINO_KVCACHE_SPACE"),
        ),
        check=parse_space,
        metavar="SIZE",
    ),
    Field(
        "kv_cache_dtype",
        "Type of the KV cache: auto, bfloat16, float16, float32, int8, fp8_e4m3 (fp8), fp8_e5m2.",
        "auto: the same as --dtype",
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
        "Tokens per KV block; the kernels always use 32, another size is reported and ignored.",
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
        "Maximum requests that run at the same time; further ones wait in the queue.",
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
        "Maximum tokens per step, decode rows and prompt chunks together; activation memory grows "
        "with it.",
        "2048",
        MEMORY,
        kind="count",
        flags=("--max-num-batched-tokens",),
        env="CPUSERVE_MAX_NUM_BATCHED_TOKENS",
        aliases=(Alias("-b"),),
        check=at_least(1, 1 << 20),
        metavar="TOKENS",
    ),
    Field(
        "itl_target_ms",
        "Target time between two tokens of a running stream; prompt chunks are sized to meet it. A "
        "step may always take 1.67 times, and never more than 2.5 times, a step without prompts. 0 "
        "= no target.",
        "50 (0 in `LLM`, which does not stream)",
        MEMORY,
        kind="count",
        flags=("--itl-target-ms",),
        env="CPUSERVE_ITL_TARGET_MS",
        check=at_least(0, 60_000),
        metavar="MS",
    ),
    Field(
        "long_prefill_token_threshold",
        "Maximum tokens of one prompt per step; 0 = no limit. Short prompts overtake long ones "
        "even without a limit.",
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
        "Order of requests: fcfs (first come, first served) or priority (lower `priority` first).",
        "fcfs",
        MEMORY,
        flags=("--scheduling-policy",),
        env="CPUSERVE_SCHEDULING_POLICY",
        choices=("fcfs", "priority"),
        metavar="POLICY",
    ),
    Field(
        "speculative_config",
        "Guess tokens and verify them in one step, as a JSON object with method (ngram: what "
        "followed the last tokens when they stood in the request before), num_speculative_tokens "
        "(5), prompt_lookup_max (4) and prompt_lookup_min (2). It changes no token.",
        "off",
        MEMORY,
        kind="object",
        flags=("--speculative-config",),
        env="CPUSERVE_SPECULATIVE_CONFIG",
        check=read_speculation,
        metavar="JSON",
    ),
    Field(
        "enable_prefix_caching",
        "Reuse the KV cache of equal prompt prefixes; disable with --no-enable-prefix-caching.",
        "on",
        MEMORY,
        kind="flag",
        flags=("--enable-prefix-caching",),
        env="CPUSERVE_ENABLE_PREFIX_CACHING",
    ),
    Field(
        "prefix_cache_dir",
        "Keep cached prefixes on disk across restarts, in DIR/cpuserve-prefix-cache.",
        "none",
        MEMORY,
        flags=("--prefix-cache-dir",),
        env="CPUSERVE_PREFIX_CACHE_DIR",
        check=not_empty,
        metavar="DIR",
    ),
    Field(
        "prefix_cache_size",
        "Maximum size of the files in --prefix-cache-dir: GiB (4, 0.5) or 512MiB; the least "
        "recently used blocks are deleted first.",
        "4",
        MEMORY,
        flags=("--prefix-cache-size",),
        env="CPUSERVE_PREFIX_CACHE_SIZE",
        check=_amount,
        metavar="SIZE",
    ),
    Field(
        "swap_space",
        "Additional memory for blocks that are evicted from the KV cache: GiB (4, 0.5) or 512MiB.",
        "0",
        MEMORY,
        flags=("--swap-space",),
        env="CPUSERVE_SWAP_SPACE",
        check=_amount,
        metavar="SIZE",
    ),
    Field(
        "kv_tiers",
        "Further places that keep blocks of the KV cache, as NAME=PLACE (docs/serving.md).",
        "none",
        MEMORY,
        kind="list",
        flags=("--kv-tiers",),
        env="CPUSERVE_KV_TIERS",
        check=_named_places,
        metavar="NAME=PLACE",
    ),
    # -- CPU ---------------------------------------------------------------------------------
    Field(
        "isa",
        "Instruction-set level of the kernels, one that this CPU supports (see `cpuserve doctor`).",
        "the highest that this CPU supports",
        CPU,
        flags=("--isa",),
        env="CPUSERVE_ISA",
        synonyms={"native": "auto"},
        check=not_empty,
        metavar="LEVEL",
    ),
    Field(
        "omp_threads_bind",
        "CPUs of the compute threads: auto, nobind, or a list such as 0-31, 0,2 or 0-62:2; `|` "
        "separates the lists of ranks.",
        "auto: one thread per physical core, within affinity; under a CPU quota below the CPUs, as "
        "many threads as it pays for, on no fixed CPUs",
        CPU,
        flags=("--omp-threads-bind", "--cpu-omp-threads-bind"),
        env="CPUSERVE_OMP_THREADS_BIND",
        aliases=(Alias("VLLM_CPU_OMP_THREADS_BIND"),),
        check=parse_bind,
        metavar="CPUS",
    ),
    Field(
        "num_reserved_cpu",
        "Total number of cores that automatic binding leaves to the front end: the last of each "
        "node.",
        "0 with up to 4 allowed cores or a CPU quota below the CPUs, otherwise one per NUMA node "
        "in use",
        CPU,
        kind="count",
        flags=("--num-reserved-cpu", "--num-of-reserved-cpu"),
        env="CPUSERVE_NUM_OF_RESERVED_CPU",
        aliases=(Alias("VLLM_CPU_NUM_OF_RESERVED_CPU", differs="for all ranks together"),),
        check=at_least(0),
        metavar="N",
    ),
    Field(
        "visible_memory_nodes",
        "NUMA nodes that automatic binding may use, such as 0 or 1,0, in the order of the ranks.",
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
        "Number of threads with nobind; otherwise the list of CPUs determines it.",
        "one per physical core, within affinity and CPU quota",
        CPU,
        kind="count",
        env="OMP_NUM_THREADS",
        check=at_least(1, 4096),
    ),
    Field(
        "tensor_parallel_size",
        "Number of ranks that the model is split over, or auto. A rank is a group of threads, "
        "usually those of one NUMA node.",
        "1, or on several sockets as --numa chooses",
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
        "Number of engine processes behind one endpoint, each with its own cores, weights and KV "
        "cache.",
        "1, or on several sockets as --numa chooses",
        CPU,
        kind="count",
        flags=("--data-parallel-size", "-dp"),
        env="CPUSERVE_DATA_PARALLEL_SIZE",
        check=at_least(1, 1024),
        metavar="N",
    ),
    Field(
        "numa",
        "How to use several NUMA nodes: auto (ranks or engines on sockets), tp (a rank on each), "
        "replicas (an engine on each), interleave (pages), off (one group of threads).",
        "auto; off under a CPU quota below the CPUs, and with --omp-threads-bind",
        CPU,
        flags=("--numa",),
        env="CPUSERVE_NUMA",
        choices=("auto", "tp", "replicas", "interleave", "off"),
        metavar="MODE",
    ),
    Field(
        "executor",
        "Executor of the steps: auto, native (C++ kernels), torch (slow).",
        "auto: native, or torch if the C++ extension cannot run here",
        CPU,
        flags=("--executor",),
        env="CPUSERVE_EXECUTOR",
        choices=("auto", "native", "torch"),
        metavar="KIND",
    ),
    Field(
        "platform",
        "Name of the platform; plug-ins register platforms under the entry point "
        "cpuserve.platforms.",
        "cpu, unless a plug-in provides a platform that can run here",
        CPU,
        flags=("--platform",),
        env="CPUSERVE_PLATFORM",
        check=not_empty,
        metavar="NAME",
    ),
    Field(
        "enforce_eager",
        "Accepted for compatibility: cpuserve compiles no graphs.",
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

    takes: how many values the flag has. why: the reason, as one clause for the note.
    only: the values that have no effect; other values are refused.
    """

    names: tuple[str, ...]
    why: str
    takes: Literal["none", "one", "many"] = "one"
    only: tuple[str, ...] = ()


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
    NoOp(("--cpu-offload-gb",), "weights are in CPU memory, or on disk with --weights-on-disk"),
    NoOp(("--load-format",), "the format is detected from the files"),
    NoOp(("--tokenizer-mode",), "the fast tokenizer is always used"),
    NoOp(("--trust-remote-code",), "cpuserve never runs code from a model", "none"),
    NoOp(
        ("--enable-chunked-prefill", "--no-enable-chunked-prefill"),
        "prompts are always chunked",
        "none",
    ),
    NoOp(
        ("--disable-log-requests", "--no-enable-log-requests"),
        "only failed requests are logged",
        "none",
    ),
    NoOp(
        ("--disable-frontend-multiprocessing",), "the front end always has its own process", "none"
    ),
    NoOp(("--disable-custom-all-reduce",), "there is no all-reduce", "none"),
    NoOp(
        ("--async-scheduling", "--no-async-scheduling"),
        "scheduling takes only microseconds",
        "none",
    ),
    NoOp(("--pipeline-parallel-size", "-pp"), "there is only one pipeline stage", only=("1",)),
    NoOp(
        ("--task", "--runner"),
        "the checkpoint says whether it gives text, embeddings or scores; --pooling overrides it",
        only=("generate", "auto", "embed", "embedding", "pooling", "score"),
    ),
    NoOp(
        ("--convert",),
        "the checkpoint says whether it gives text, embeddings or scores; --pooling overrides it",
        only=("none", "auto", "embed", "classify"),
    ),
    NoOp(("--enable-lora",), "--lora-modules alone serves adapters", "none"),
    NoOp(("--max-cpu-loras",), "all adapters are in memory: --max-loras says how many can be"),
    NoOp(
        ("--embedding", "--embeddings"),
        "embedding models give embeddings without it; --pooling makes one of any decoder",
        "none",
    ),
    NoOp(
        ("--rerank", "--reranking"),
        "rerankers give scores without it; --pooling rank makes one of Qwen3-Reranker",
        "none",
    ),
    NoOp(("--disable-fastapi-docs",), "there are no documentation pages", "none"),
    NoOp(
        ("--disable-uvicorn-access-log", "--disable-access-log"),
        "only failed requests are logged",
        "none",
    ),
    NoOp(("--max-log-len",), "no text of requests is logged"),
    NoOp(("--enable-request-id-headers",), "every answer has an X-Request-Id", "none"),
    NoOp(("--enable-prompt-tokens-details",), "usage always contains them", "none"),
    NoOp(("--enable-auto-tool-choice",), "requests with tools need no flag", "none"),
    NoOp(
        ("--tool-call-parser",),
        "the format of tool calls is found from the chat template",
        only=("hermes",),
    ),
    NoOp(("--exclude-tools-when-tool-choice-none",), "the prompt leaves out such tools", "none"),
    NoOp(("--chat-template-content-format",), "templates get texts or parts, as they take them"),
    NoOp(("--prefix-caching-hash-algo",), "prefixes are hashed with SHA-256"),
    NoOp(("--disable-cascade-attn",), "there is no cascade attention", "none"),
    NoOp(("--max-parallel-loading-workers",), "weights are loaded by the compute threads"),
    NoOp(("--api-server-count",), "there is one front-end process"),
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
        "kernels are chosen for the CPU automatically",
    ),
    NoOp(("TORCHINDUCTOR_COMPILE_THREADS",), "kernels are compiled ahead of time"),
    NoOp(("VLLM_CPU_CI_ENV", "VLLM_CPU_SIM_MULTI_NUMA"), "it is internal to vLLM"),
)

BY_NAME: dict[str, Field] = {f.name: f for f in FIELDS}


def argument_name(flag: str) -> str:
    """Return the keyword of a flag in `LLM(...)` and config files: "max_num_seqs"."""
    return flag.lstrip("-").replace("-", "_")


def no_op_flags() -> dict[str, NoOp]:
    """Return the flags that are accepted without effect, by name."""
    return {name: n for n in NO_OPS for name in n.names if name.startswith("-")}


def no_op_variables() -> dict[str, NoOp]:
    """Return the environment variables that are accepted without effect, by name."""
    return {name: n for n in NO_OPS for name in n.names if not name.startswith("-")}


def keywords() -> dict[str, tuple[Field, str]]:
    """Return, for each keyword of `LLM(...)` and config files, its field and the flag it means."""
    found: dict[str, tuple[Field, str]] = {f.name: (f, f.flag) for f in FIELDS}
    for f in FIELDS:
        for flag in f.all_flags:
            if flag.startswith("--"):
                found.setdefault(argument_name(flag), (f, flag))
    return found
