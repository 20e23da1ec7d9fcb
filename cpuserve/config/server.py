"""The options of the server: a record with the type, default, texts and flags of each option.

The evaluation of annotations is not postponed in this module; options.py has the reason.
"""

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from ipaddress import ip_network
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from cpuserve.config.field import (
    SERVER,
    Alias,
    a_path,
    at_least,
    fields_of,
    named,
    not_empty,
    option,
    parse_flag,
)
from cpuserve.config.values import parse_duration

_option = partial(option, SERVER, server=True)
MOST_PICTURES = 1000  # of a request
MOST_PASSWORD = 1023  # the most bytes of the password of a key that Python passes to OpenSSL


def _named_models(value: list[str]) -> None:
    named(value, "MODEL")


def _hosts(value: list[str]) -> None:
    if not all(re.fullmatch(r"\*|(\*\.)?[A-Za-z0-9._-]+", name) for name in value):
        msg = "must be host names without a port: api.example.com, *.example.com, or * for any"
        raise ValueError(msg)


def _proxies(value: list[str]) -> None:
    try:
        for each in value:
            if each != "*":
                ip_network(each)
    except ValueError:
        msg = f"{each!r} is no IP address, network such as 10.0.0.0/8, or * for any peer"
        raise ValueError(msg) from None


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


def _url(value: str) -> None:
    try:
        found = urlsplit(value)
        is_url = bool(found.scheme and found.hostname) and found.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        msg = "must be a URL, such as http://localhost:4318/v1/traces"
        raise ValueError(msg)


# The kinds of vLLM. This server reads pictures only, whatever the limits of the others are.
_LIMITED_KINDS = ("image", "video", "audio", "vision_chunk")


def _picture_limit(value: dict[str, Any]) -> None:
    msg = f'must be {{"image": N}} with N from 0 to {MOST_PICTURES}'
    for kind, limit in value.items():
        count = limit.get("count", 0) if isinstance(limit, dict) else limit
        if kind not in _LIMITED_KINDS:
            known = ", ".join(_LIMITED_KINDS)
            msg = f"{msg}; it has {kind[:40]!r}, which is none of {known}"
            raise ValueError(msg)
        if type(count) is not int or count < 0 or (kind == "image" and count > MOST_PICTURES):
            raise ValueError(msg)


def most_pictures(limits: Mapping[str, Any] | None, default: int) -> int:
    """Return the most pictures of a request that --limit-mm-per-prompt allows, or the default.

    A limit is a number, or as in vLLM an object with `count`, whose other members describe inputs
    that vLLM measures memory with.
    """
    limit = (limits or {}).get("image", default)
    found = limit.get("count", default) if isinstance(limit, dict) else limit
    return int(found)


def _off(text: str) -> str:
    """Return the value of --access-log for a flag of vLLM that switches its log off."""
    return "off" if parse_flag(text) else "errors"


_KEY_FILE_DIFFERS = "with a name before each key"


def _password(value: str) -> None:
    if len(value.encode()) > MOST_PASSWORD:
        msg = f"must have at most {MOST_PASSWORD} bytes"
        raise ValueError(msg)


class ServerOptions(msgspec.Struct, kw_only=True, frozen=True):
    """Settings of the front end, each with the help text of its flag.

    uds: the path of a Unix socket to listen on; "none" = no Unix socket.
    request_timeout: seconds, 0 = no limit.
    """

    host: Annotated[
        str,
        _option(
            "Address to listen on; 0.0.0.0 listens on all IPv4 addresses.",
            env="CPUSERVE_HTTP_HOST",
            aliases="LLAMA_ARG_HOST",
            check=not_empty,
            metavar="ADDRESS",
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        _option(
            "Port to listen on; 0 selects a free one.",
            env="CPUSERVE_HTTP_PORT",
            aliases="LLAMA_ARG_PORT",
            check=at_least(0, 65535),
            metavar="PORT",
        ),
    ] = 8000
    uds: Annotated[
        str | None,
        _option(
            "Unix socket to listen on instead of host and port; `none` cancels the socket that a "
            "variable or a config file sets.",
            default="none",
            words=("none",),
            check=a_path,
            metavar="PATH",
        ),
    ] = None
    api_key: Annotated[
        Sequence[str],
        _option(
            "API keys; clients must send one of them. Separate several by commas in the variable,"
            " which is safer, because other users of the machine can read flags.",
            default="none: everyone who can connect may use the server",
            kind="list",
            aliases="VLLM_API_KEY LLAMA_API_KEY",
            secret=True,
            check=_keys,
            metavar="KEY",
        ),
    ] = ()
    api_key_file: Annotated[
        str | None,
        _option(
            "File of callers, a line NAME KEY for each, with limits such as rpm=60 tpm=100k "
            "parallel=4 priority=10 cache=private (docs/serving.md, Callers). It is read again "
            "when it changes.",
            default="none",
            aliases=(Alias("LLAMA_ARG_API_KEY_FILE", differs=_KEY_FILE_DIFFERS),),
            check=a_path,
            metavar="FILE",
        ),
    ] = None
    ssl_certfile: Annotated[
        str | None,
        _option(
            "PEM file with the certificate of the server and its authorities: the server then "
            "speaks HTTPS only. It reads the file again when it changes.",
            default="none: plain HTTP",
            aliases="--ssl-cert-file LLAMA_ARG_SSL_CERT_FILE",
            check=a_path,
            metavar="FILE",
        ),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        _option(
            "PEM file with the key of the certificate.",
            default="the key is in --ssl-certfile",
            aliases="--ssl-key-file LLAMA_ARG_SSL_KEY_FILE",
            check=a_path,
            metavar="FILE",
        ),
    ] = None
    ssl_keyfile_password: Annotated[
        str,
        _option(
            "Password of the key; the variable is safer, because other users of the machine can "
            "read flags.",
            default="none",
            secret=True,
            check=_password,
            metavar="PASSWORD",
        ),
    ] = ""
    ssl_cert_reqs: Annotated[
        str,
        _option(
            "Whether clients need a certificate of an authority in --ssl-ca-certs: none, optional, "
            "required (in vLLM 0, 1, 2).",
            choices=("none", "optional", "required"),
            synonyms={"0": "none", "1": "optional", "2": "required"},
            metavar="WHICH",
        ),
    ] = "none"
    ssl_ca_certs: Annotated[
        str | None,
        _option(
            "PEM file of the authorities that sign the certificates of clients.",
            default="none",
            check=a_path,
            metavar="FILE",
        ),
    ] = None
    public_metrics: Annotated[
        bool,
        _option(
            "Serve /metrics and /version without an API key, as /health, /ping and /live always "
            "are.",
            default="off: they need a key if one is set",
        ),
    ] = False
    prefill_next_turn: Annotated[
        bool,
        _option(
            "While no request runs, compute the beginning of each conversation's next prompt, "
            "which differs from the last one where the chat template drops thoughts or rewrites "
            "calls; --no-prefill-next-turn leaves it to the request.",
        ),
    ] = True
    webui: Annotated[
        bool,
        _option(
            "Serve a chat page at / to browsers; --no-webui serves the API only. The page loads "
            "without an API key, asks for it, and loads nothing from other servers.",
        ),
    ] = True
    admin_routes: Annotated[
        bool,
        _option(
            "Serve the routes that show the settings of the server or change its state: "
            "/server_info, /reset_prefix_cache, /sleep and /wake_up of vLLM. Every client with a "
            "key can use them.",
            aliases="VLLM_SERVER_DEV_MODE",
        ),
    ] = False
    also_serve: Annotated[
        Sequence[str],
        _option(
            "More models as NAME=MODEL. Each is loaded for a request, and unloaded "
            "when another model needs its memory. Options that do not describe one model apply to "
            "all.",
            kind="names",
            check=_named_models,
            metavar="NAME=MODEL",
        ),
    ] = ()
    models: Annotated[
        str | None,
        _option(
            "YAML, JSON or TOML file of models: NAME: MODEL, or a mapping with `model`, `aliases`, "
            "`adapters` and options. Its first model is MODEL if none is given.",
            default="none",
            check=not_empty,
            metavar="FILE",
        ),
    ] = None
    keep_alive: Annotated[
        float,
        _option(
            "Time without a request after which a model is unloaded, as in `keep_alive` of Ollama: "
            "5m, 1h30m, or seconds. 0 = after each request; -1 = only if memory is short.",
            default="-1",
            read=parse_duration,
            aliases="OLLAMA_KEEP_ALIVE",
            metavar="DURATION",
        ),
    ] = math.inf
    sleep_idle: Annotated[
        float,
        _option(
            "Seconds without a request for any model after which all engines end. The next request "
            "starts them again. -1 = never.",
            default="-1",
            read=parse_duration,
            aliases="--sleep-idle-seconds LLAMA_ARG_SLEEP_IDLE_SECONDS",
            metavar="SECONDS",
        ),
    ] = math.inf
    allowed_hosts: Annotated[
        Sequence[str],
        _option(
            "Host names that requests may be addressed to, besides localhost and IP addresses: "
            "a.example.com,*.b.example, or * for any. Requests for other names get 403.",
            default="any; only local names if --host is a loopback address and no API key is set",
            kind="names",
            check=_hosts,
            metavar="NAMES",
        ),
    ] = ()
    forwarded_allow_ips: Annotated[
        Sequence[str],
        _option(
            "Addresses or networks of proxies, as 10.0.0.5,10.1.0.0/16. Their X-Forwarded-For and "
            "X-Forwarded-Proto are believed, so limits, logs and metrics have the address of the "
            "client. * believes every peer, as a proxy at --uds needs.",
            kind="names",
            aliases="FORWARDED_ALLOW_IPS",
            check=_proxies,
            metavar="ADDRESSES",
        ),
    ] = ("127.0.0.1", "::1")
    allowed_origins: Annotated[
        Sequence[str],
        _option(
            "Origins of web pages that may use the API from a browser (CORS), or * for any.",
            kind="names",
            check=_origins,
            metavar="ORIGINS",
        ),
    ] = ()
    allowed_methods: Annotated[
        Sequence[str],
        _option(
            "HTTP methods that pages of --allowed-origins may use.",
            kind="names",
            check=_tokens,
            metavar="METHODS",
        ),
    ] = ("*",)
    allowed_headers: Annotated[
        Sequence[str],
        _option(
            "Request headers that pages of --allowed-origins may send.",
            kind="names",
            check=_tokens,
            metavar="HEADERS",
        ),
    ] = ("*",)
    allow_credentials: Annotated[
        bool,
        _option(
            "Allow browsers to send cookies with requests from pages of --allowed-origins.",
        ),
    ] = False
    log_level: Annotated[
        str,
        _option(
            "Lowest level of the messages that are logged: debug, info, warning, error.",
            aliases="--uvicorn-log-level VLLM_LOGGING_LEVEL",
            choices=("debug", "info", "warning", "error"),
            synonyms={"warn": "warning", "critical": "error", "trace": "debug"},
            metavar="LEVEL",
        ),
    ] = "info"
    access_log: Annotated[
        str,
        _option(
            "Which requests get a line in the log: errors (requests that fail or lose their "
            "client), all (with /health and /metrics; no line is left out), off.",
            aliases=(
                Alias("--disable-uvicorn-access-log", _off, "off", bare=True),
                Alias("--disable-access-log", _off, "off", bare=True),
            ),
            choices=("errors", "all", "off"),
            metavar="WHICH",
        ),
    ] = "errors"
    access_log_format: Annotated[
        str,
        _option(
            "Format of the log: text, or json, in which every line of the server is a JSON object, "
            "also those of its start and of its processes.",
            choices=("text", "json"),
            metavar="FORMAT",
        ),
    ] = "text"
    audit: Annotated[
        str | None,
        _option(
            "File that gets a line about each request before its response ends: the "
            "line of the access log as JSON, with a fingerprint of the model and its settings, and "
            "SHA-256 digests of the bodies of request and response. It has no text of prompts.",
            default="none",
            check=a_path,
            metavar="FILE",
        ),
    ] = None
    audit_bytes: Annotated[
        int,
        _option(
            "Size at which the audit file is renamed after the time, and a new one begins: bytes "
            "or a unit (256MiB). No file is ever deleted.",
            kind="size",
            check=at_least(1 << 16, 2**50),
            metavar="SIZE",
        ),
    ] = 256 << 20
    audit_on_failure: Annotated[
        str,
        _option(
            "While the audit file cannot be written: refuse (requests get 503), or log (requests "
            "are served, and their lines are in the log, as unaudited).",
            choices=("refuse", "log"),
            metavar="WHAT",
        ),
    ] = "refuse"
    otlp_traces_endpoint: Annotated[
        str | None,
        _option(
            "URL of an OpenTelemetry collector that gets a trace of each request (OTLP over HTTP), "
            "such as http://localhost:4318/v1/traces. It needs `pip install '.[traces]'`. "
            "The standard variables of OpenTelemetry (OTEL_...) are read as well.",
            default="none, or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            check=_url,
            metavar="URL",
        ),
    ] = None
    max_num_queued_reqs: Annotated[
        int,
        _option(
            "Maximum requests that wait for their first token; further ones get 429 with "
            "Retry-After.",
            check=at_least(1, 65536),
            metavar="N",
        ),
    ] = 1024
    max_num_queued_tokens: Annotated[
        int,
        _option(
            "Maximum prompt tokens that wait for a first token; further requests get 429 with "
            "Retry-After.",
            check=at_least(1),
            metavar="TOKENS",
        ),
    ] = 1 << 20
    max_body_size: Annotated[
        int | None,
        _option(
            "Maximum size of a request body: bytes or a unit (4MiB); larger ones get 413.",
            default="64 bytes per token of the model's context, and at least 4 MiB",
            kind="size",
            check=at_least(1024, 2**40),
            metavar="SIZE",
        ),
    ] = None
    stored_responses: Annotated[
        int,
        _option(
            "Most responses and conversations that clients may store in memory (`store`); 0 stores "
            "none. The oldest finished one makes room for a new one.",
            check=at_least(0, 2**31),
            metavar="COUNT",
        ),
    ] = 1000
    stored_bytes: Annotated[
        int,
        _option(
            "Most memory that stored responses and conversations may take together: bytes or a "
            "unit (32MiB).",
            kind="size",
            check=at_least(1 << 16, 2**40),
            metavar="SIZE",
        ),
    ] = 32 << 20
    stored_age: Annotated[
        float,
        _option(
            "Seconds after which a stored response, or a conversation that nobody uses, is "
            "dropped.",
            check=at_least(1, 31_536_000),
            metavar="SECONDS",
        ),
    ] = 86_400
    files_dir: Annotated[
        str | None,
        _option(
            "Directory for the files and batches of clients (/v1/files, /v1/uploads, /v1/batches), "
            "which go on after a restart; each server needs its own.",
            default="none: there are no files and no batches",
            check=a_path,
            metavar="DIR",
        ),
    ] = None
    files_bytes: Annotated[
        int,
        _option(
            "Most bytes that the files in --files-dir may have together, with the results of "
            "batches: a number or a unit (1GiB).",
            kind="size",
            check=at_least(1024, 2**50),
            metavar="SIZE",
        ),
    ] = 1 << 30
    files_count: Annotated[
        int,
        _option(
            "Most files that clients may store, and most batches that the server remembers.",
            check=at_least(1, 100_000),
            metavar="COUNT",
        ),
    ] = 1000
    models_dir: Annotated[
        str | None,
        _option(
            "Directory for the models that clients create, pull and copy with the API of Ollama; "
            "each server needs its own. Without it, these routes refuse.",
            default="none: the server serves the models of its start",
            check=a_path,
            metavar="DIR",
        ),
    ] = None
    models_bytes: Annotated[
        int,
        _option(
            "Most bytes of the files in --models-dir and of the models that clients pull: a "
            "number or a unit (32GiB).",
            kind="size",
            check=at_least(1024, 2**50),
            metavar="SIZE",
        ),
    ] = 32 << 30
    models_count: Annotated[
        int,
        _option(
            "Most models that clients may create, pull and copy.",
            check=at_least(1, 10_000),
            metavar="COUNT",
        ),
    ] = 100
    sse_ping_interval: Annotated[
        float,
        _option(
            "Seconds without an event after which a stream sends a comment, so that proxies keep "
            "it open.",
            check=at_least(1, 3600),
            metavar="SECONDS",
        ),
    ] = 15
    request_timeout: Annotated[
        float,
        _option(
            "Maximum seconds of a request, time in the queue included; a request's own `timeout` "
            "may be shorter. 0 = no limit.",
            check=at_least(0, 1_000_000),
            metavar="SECONDS",
        ),
    ] = 0
    reasoning_budget: Annotated[
        int,
        _option(
            "Maximum tokens of a thought, after which the response begins; a request's own budget "
            "takes precedence. -1 = any number.",
            check=at_least(-1),
            metavar="TOKENS",
        ),
    ] = -1
    reasoning_budget_message: Annotated[
        str,
        _option(
            "Text that the server writes at the end of a thought with as many tokens as it may "
            "have.",
            metavar="TEXT",
        ),
    ] = ""
    limit_mm_per_prompt: Annotated[
        dict[str, Any] | None,
        _option(
            'Most pictures in a request, pages of documents included, as JSON: {"image": 8}.',
            default='{"image": 64}',
            check=_picture_limit,
            metavar="JSON",
        ),
    ] = None
    mm_processor_kwargs: Annotated[
        dict[str, Any] | None,
        _option(
            "Settings of the preprocessing of pictures as a JSON object, such as "
            '{"size": {"longest_edge": 1024}}; a request may have its own.',
            default="the model's",
            metavar="JSON",
        ),
    ] = None
    image_min_tokens: Annotated[
        int,
        _option(
            "Least tokens of a picture of a model that reads pictures of any size: a smaller "
            "picture is enlarged; 0 = as the model says.",
            aliases="LLAMA_ARG_IMAGE_MIN_TOKENS",
            check=at_least(0, 1 << 20),
            metavar="TOKENS",
        ),
    ] = 0
    allowed_media_domains: Annotated[
        list[str],
        _option(
            "Hosts from which the server fetches pictures at URLs in requests, separated by "
            "commas: names, *.example.com, or * for any. Private addresses are always refused.",
            default="none",
            check=_hosts,
            metavar="HOSTS",
        ),
    ] = []
    allowed_local_media_path: Annotated[
        str | None,
        _option(
            "Folder with pictures that requests may read with file: URLs.",
            default="none",
            check=a_path,
            metavar="FOLDER",
        ),
    ] = None
    image_fetch_timeout: Annotated[
        float,
        _option(
            "Seconds that fetching a picture may take.",
            check=at_least(0.1, 600),
            metavar="SECONDS",
        ),
    ] = 1.5
    drain_timeout: Annotated[
        float,
        _option(
            "Seconds that running requests get to finish when a signal stops the server; requests"
            " that still run then end with an error.",
            aliases="--shutdown-timeout --timeout-graceful-shutdown",
            check=at_least(0, 86_400),
            metavar="SECONDS",
        ),
    ] = 30
    drain_delay: Annotated[
        float,
        _option(
            "Seconds that the server still accepts requests after that signal, while /health"
            " returns 503. Set it above the interval at which a load balancer checks /health.",
            check=at_least(0, 3600),
            metavar="SECONDS",
        ),
    ] = 0
    engine_restart: Annotated[
        bool,
        _option(
            "Restart an engine process that dies; with --no-engine-restart the server exits with "
            "code 1.",
        ),
    ] = True

    @property
    def asks_for_keys(self) -> bool:
        """Whether requests need an API key."""
        return bool(self.api_key) or self.api_key_file is not None

    @property
    def socket(self) -> str | None:
        """The path of the Unix socket to listen on instead of host and port; None = no socket."""
        return None if self.uds == "none" else self.uds


FIELDS = fields_of(ServerOptions)
