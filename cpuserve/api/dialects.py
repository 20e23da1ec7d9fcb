"""The format of error responses, which depends on the dialect of the request path.

This module imports no web framework, because the startup server uses it while a model
is downloaded, before FastAPI is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from urllib.parse import unquote

from cpuserve.api.anthropic.errors import anthropic_error
from cpuserve.api.errors.error_json import Envelope, error_json
from cpuserve.api.llamacpp.errors import llama_error
from cpuserve.api.ollama.errors import ollama_error
from cpuserve.api.tgi.errors import tgi_error, tgi_status
from cpuserve.api.vectors.cohere.errors import cohere_error
from cpuserve.api.vectors.tei.errors import tei_error, tei_status
from cpuserve.errors import status_of


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """How a dialect writes errors, and the paths that it writes them for.

    error: encodes an exception as the body of a response.
    status: returns the HTTP status of an exception.
    beginnings: path prefixes of the dialect, even of paths without a route;
      all other paths use the OpenAI format.
    id_headers: response headers with the request id, besides x-request-id.
    shared: prefixes of OpenAI paths that belong to this dialect if the request has `header`.
    """

    error: Envelope = error_json
    status: Callable[[BaseException], int] = status_of
    beginnings: tuple[str, ...] = ()
    id_headers: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    header: bytes = b""


OPENAI = ErrorFormat()
# All Anthropic clients send the header anthropic-version, and no OpenAI client sends it.
ANTHROPIC = ErrorFormat(
    anthropic_error,
    beginnings=("/v1/messages",),
    id_headers=("request-id",),
    shared=("/v1/models",),
    header=b"anthropic-version",
)
OLLAMA = ErrorFormat(ollama_error, beginnings=("/api",))
LLAMACPP = ErrorFormat(
    llama_error,
    beginnings=(
        "/completion",
        "/completions",
        "/infill",
        "/apply-template",
        "/embedding",
        "/embeddings",
        "/lora-adapters",
        "/props",
        "/slots",
    ),
)
TEI = ErrorFormat(
    tei_error,
    tei_status,
    (
        "/embed",
        "/embed_all",
        "/embed_sparse",
        "/predict",
        "/similarity",
        "/decode",
        "/info",
    ),
)
TGI = ErrorFormat(tgi_error, tgi_status, ("/generate", "/generate_stream"))
COHERE = ErrorFormat(cohere_error, beginnings=("/v1/embed", "/v2/embed", "/v2/rerank"))
_FORMATS = (ANTHROPIC, OLLAMA, LLAMACPP, TEI, TGI, COHERE)


def error_format_of(path: str, header_names: Collection[bytes]) -> ErrorFormat:
    """Return the error format for `path` in a request with these headers (lower case).

    path: a path, or a full URL as clients of a proxy send it.
    """
    if not path.startswith("/") and "://" in path:
        path = "/" + path.partition("://")[2].partition("/")[2]
    for known in _FORMATS:
        if _begins(path, known.beginnings):
            return known
        if _begins(path, known.shared) and known.header in header_names:
            return known
    return OPENAI


def error_format_of_head(head: bytes) -> ErrorFormat:
    """Return the error format for a request with these header bytes, which may be incomplete."""
    line, *fields = head.splitlines() or [b""]
    target = line.decode("latin-1").split(" ")[1:2]
    path = unquote("".join(target).partition("?")[0])
    return error_format_of(path, {field.partition(b":")[0].strip().lower() for field in fields})


def _begins(path: str, beginnings: Collection[str]) -> bool:
    return any(f"{path}/".startswith(f"{beginning}/") for beginning in beginnings)
