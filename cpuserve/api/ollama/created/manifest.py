"""Manifest: the description of a model that a client created or pulled."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import msgspec

from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.models.registry import DEFAULT_TAG

# A model name may have an owner, as on the Hugging Face hub, and a tag.
_NAME = re.compile(r"(?=.{1,200}$)\w[\w.-]*(/\w[\w.-]*)*(:[\w.-]+)?")
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")


class Manifest(msgspec.Struct, kw_only=True):
    """A model that a client created or pulled.

    base: the served model that shares its engine; "" = this model has its own engine.
    model: its weights, as a value of --model; "" = the weights are in `files`.
    files, adapters: the SHA-256 of each file in hexadecimal, by file name.
    quantization: a format, as in --quantization.
    parent: the model that the field `from` or the instruction FROM selected.
    size: the number of bytes that a pull downloaded.
    owner: who may replace and delete it (Caller.owner); "" = everyone, as in earlier versions.
    """

    name: str
    owner: str = ""
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
        """The SHA-256 of each file of the model."""
        return {*self.files.values(), *self.adapters.values()}

    @property
    def engine(self) -> str:
        """The key of the model's engine: equal for models with equal weights and adapters."""
        return key_of([self.model, self.files, self.adapters, self.quantization])


def key_of(value: Any) -> str:
    """Return a hash of JSON values, which is used as a key and as a file name."""
    encoded = msgspec.json.encode(value, order="deterministic")
    return hashlib.sha256(encoded).hexdigest()[:32]


def checked_name(name: str | None, param: str = "model") -> str:
    """Return the model name without the tag ":latest"; InvalidRequest if it is not a valid name."""
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
    """Return the hexadecimal part of a digest `sha256:...`; InvalidRequest if it is not valid."""
    found = _DIGEST.fullmatch(digest)
    if found is None:
        msg = f"{param} {digest[:80]!r} is no digest: send sha256: and 64 hexadecimal digits"
        raise InvalidRequest(msg, param=param)
    return found[1]
