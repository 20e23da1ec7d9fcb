"""Routes of paths that the OpenAI API has as well: the header anthropic-version selects them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi.routing import APIRoute
from starlette.routing import Match

from cpuserve.api.anthropic.errors import ANTHROPIC
from cpuserve.api.request.headers import has_header

if TYPE_CHECKING:
    from starlette.types import Scope


class HeaderRoute(APIRoute):
    """A route for requests with the anthropic-version header; OpenAI routes serve all others."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches(scope) if has_header(scope, ANTHROPIC.header) else (Match.NONE, {})
