"""The dialects of this server, and the dialect of a request.

This module imports no web framework, because the startup server uses it while a model
is downloaded, before FastAPI is imported.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import unquote

from cpuserve.api.anthropic.errors import ANTHROPIC
from cpuserve.api.errors.dialect import OPENAI, Dialect
from cpuserve.api.llamacpp.errors import LLAMACPP
from cpuserve.api.ollama.errors import OLLAMA
from cpuserve.api.tgi.errors import TGI
from cpuserve.api.vectors.cohere.errors import COHERE
from cpuserve.api.vectors.tei.errors import TEI

DIALECTS = (ANTHROPIC, OLLAMA, LLAMACPP, TEI, TGI, COHERE)


def dialect_of(path: str, header_names: Collection[bytes]) -> Dialect:
    """Return the dialect of `path` in a request with these headers (lower case).

    path: a path, or a full URL as clients of a proxy send it.
    """
    if not path.startswith("/") and "://" in path:
        path = "/" + path.partition("://")[2].partition("/")[2]
    return next((each for each in DIALECTS if each.owns(path, header_names)), OPENAI)


def dialect_of_head(head: bytes) -> Dialect:
    """Return the dialect of a request with these header bytes, which may be incomplete."""
    line, *fields = head.splitlines() or [b""]
    target = line.decode("latin-1").split(" ")[1:2]
    path = unquote("".join(target).partition("?")[0])
    return dialect_of(path, {field.partition(b":")[0].strip().lower() for field in fields})
