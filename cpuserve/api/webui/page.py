"""The files of the chat page, read into memory once, with their response headers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from cpuserve.api.request.headers import READS, header
from cpuserve.fault_points import fault

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


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the chat page with its response headers."""

    body: bytes
    headers: Mapping[str, str]

    @property
    def etag(self) -> str:
        """The ETag, which browsers send to ask whether the file has changed."""
        return self.headers["etag"]


@cache
def page_files() -> Mapping[str, PageFile]:
    """Return the files of the chat page by path; the path of the HTML page is "/"."""
    files = {}
    for path in sorted(_FOLDER.iterdir()):
        if (kind := _TYPES.get(path.suffix)) is None:
            continue
        fault("page.read")
        body = path.read_bytes()
        headers = {
            "content-type": kind,
            "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
            # Browsers revalidate each file, so a page never mixes files of two versions.
            "cache-control": "no-cache",
            "content-security-policy": _POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }
        if path.name == _INDEX:
            files["/"] = PageFile(body, {**headers, "vary": "accept"})
        else:
            files[_PLACE + path.name] = PageFile(body, headers)
    return files


def asks_for_page(scope: Scope) -> bool:
    """Whether a request reads a file of the chat page; only browsers accept HTML explicitly.

    "/" is also the path of other answers: of the description of the server, and of embeddings.
    """
    path: str = scope["path"]
    if scope["method"] not in READS or path not in page_files():
        return False
    return path != "/" or b"text/html" in bytes(header(scope, b"accept")).lower()
