"""Manifest: the description of a model that a client created or pulled."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import msgspec

from cpuserve.errors import InvalidRequest
from cpuserve.serving.registry import DEFAULT_TAG

# A name may have an owner, as on the Hugging Face hub, and a tag.
_NAME = re.compile(r"(?=.{1,200}$)\w[\w.-]*(/\w[\w.-]*)*(:[\w.-]+)?")
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")


class Manifest(msgspec.Struct, kw_only=True):
    """A model that was created or pulled.

    base: the served model that shares its engine; "" = it has an engine of its own.
    model: its weights as --model takes them; "" = they are `files`.
    files, adapters: the SHA-256 of each file in hexadecimal, by name.
    quantization: as --quantization.
    parent: the model in FROM.
    size: the bytes that a pull downloaded.
    """

    name: str
    base: str = ""
    model: str = ""
    files: dict[str, str] = {}
    adapters: dict[str, str] = {}
    quantization: str | None = None
    parent: str = ""
    system: str = ""
    template: str | None = None
    parameters: dict[str, Any] = {}
    messages: list[dict[str, Any]] = []
    license: list[str] = []
    created: int = 0
    size: int = 0

    @property
    def digests(self) -> set[str]:
        """The SHA-256 of each of its files."""
        return {*self.files.values(), *self.adapters.values()}

    @property
    def engine(self) -> str:
        """The key of its engine: equal for models with equal weights and adapters."""
        return key_of([self.model, self.files, self.adapters, self.quantization])


def key_of(value: Any) -> str:
    """Return a key of JSON values, which is a valid file name."""
    encoded = msgspec.json.encode(value, order="deterministic")
    return hashlib.sha256(encoded).hexdigest()[:32]


def checked_name(name: str | None, param: str = "model") -> str:
    """Return the name of a model without the default tag; InvalidRequest if it is no name."""
    if not name:
        msg = f"{param} is missing: send the name of the model"
        raise InvalidRequest(msg, param=param)
    if _NAME.fullmatch(name) is None or ".." in name:
        msg = (
            f"{param} {name[:80]!r} is no name of a model: send letters, digits, '.', '-' and '_', "
            "with a tag after a colon if you like"
        )
        raise InvalidRequest(msg, param=param)
    return name.removesuffix(DEFAULT_TAG)


def checked_digest(digest: str, param: str = "digest") -> str:
    """Return the hexadecimal digits of a digest `sha256:...`; InvalidRequest if it is none."""
    found = _DIGEST.fullmatch(digest)
    if found is None:
        msg = f"{param} {digest[:80]!r} is no digest: send sha256: and 64 hexadecimal digits"
        raise InvalidRequest(msg, param=param)
    return found[1]
