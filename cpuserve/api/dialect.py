"""The interface of a dialect: one of them is a `Dialect` in DIALECTS of app.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuserve.api.errors import error_json

if TYPE_CHECKING:
    from fastapi import APIRouter

    from cpuserve.api.errors import Envelope


@dataclass(frozen=True, slots=True)
class Dialect:
    """The API of one vendor or server: its endpoints, and how it writes errors.

    beginnings: of the paths whose errors `error` writes, also those of routes that do not exist.
    Errors of all other paths have OpenAI's format.
    """

    routers: tuple[APIRouter, ...]
    error: Envelope = error_json
    beginnings: tuple[str, ...] = ()
