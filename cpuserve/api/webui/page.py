"""The files of the chat page, read and compressed into memory once, with their response headers.

The page loads them from a folder with the digest of all files as its name. So a browser keeps them
without asking again, and never mixes the files of two versions.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from cpuserve.api.request.headers import READS, header
from cpuserve.base.fault_points import fault

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Scope

_FOLDER = Path(__file__).parents[2] / "webui"
_PLACE = "/webui/"
_INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page may load only its own files and talk only to this server. So the text of a model
# cannot make the browser send data elsewhere. No other page may embed it in a frame.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


# Browsers ask whether these have changed; the files below the digest never change.
_ASK, _NEVER = "no-cache", "public, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the chat page with its response headers, as it is and compressed with gzip."""

    body: bytes
    headers: Mapping[str, str]
    packed: bytes = field(init=False)
    packed_headers: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        """Compress the file; the time 0 keeps its bytes equal in all processes."""
        packed = gzip.compress(self.body, mtime=0)
        etag = f'"{_digest(packed)}"'
        headers = {**self.headers, "etag": etag, "content-encoding": "gzip"}
        object.__setattr__(self, "packed", packed)
        object.__setattr__(self, "packed_headers", headers)

    def sent(self, accepted: str) -> tuple[bytes, Mapping[str, str]]:
        """Return the body and the headers for a client.

        accepted: the Accept-Encoding header of the request.
        """
        if _takes_gzip(accepted):
            return self.packed, self.packed_headers
        return self.body, self.headers


@cache
def page_files() -> Mapping[str, PageFile]:
    """Return the files of the chat page by path; the path of the HTML page is "/"."""
    texts: dict[str, bytes] = {}
    for path in sorted(_FOLDER.iterdir()):
        if path.suffix in _TYPES:
            fault("page.read")
            texts[path.name] = path.read_bytes()
    whole = hashlib.sha256()
    for name, body in texts.items():
        whole.update(b"%s %d\n" % (name.encode(), len(body)) + body)
    folder = f"{_PLACE}{whole.hexdigest()[:16]}/"
    page = texts.pop(_INDEX).replace(f'"{_PLACE[1:]}'.encode(), f'"{folder[1:]}'.encode())
    files = {"/": PageFile(page, _headers(_INDEX, page, _ASK, "accept, accept-encoding"))}
    for name, body in texts.items():
        for place, kept in ((_PLACE, _ASK), (folder, _NEVER)):
            files[place + name] = PageFile(body, _headers(name, body, kept, "accept-encoding"))
    return files


def _headers(name: str, body: bytes, kept: str, vary: str) -> dict[str, str]:
    return {
        "content-type": _TYPES[Path(name).suffix],
        "etag": f'"{_digest(body)}"',
        "cache-control": kept,
        "vary": vary,
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _takes_gzip(accepted: str) -> bool:
    """Return whether an Accept-Encoding header allows gzip, by its name or by "*"."""
    shares = {}
    for each in accepted.lower().split(","):
        name, _, rest = each.partition(";")
        shares[name.strip()] = rest.replace(" ", "") not in _REFUSED
    return shares.get("gzip", shares.get("*", False))


_REFUSED = ("q=0", "q=0.", "q=0.0", "q=0.00", "q=0.000")


def asks_for_page(scope: Scope) -> bool:
    """Whether a request reads a file of the chat page; only browsers accept HTML explicitly.

    "/" is also the path of other answers: of the description of the server, and of embeddings.
    """
    path: str = scope["path"]
    if scope["method"] not in READS or path not in page_files():
        return False
    return path != "/" or b"text/html" in bytes(header(scope, b"accept")).lower()
