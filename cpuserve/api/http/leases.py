"""Middleware that releases the models of a request after the last byte of its response."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.api.request.context import LEASES

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from cpuserve.serving.models.registry import Lease


class ModelLeases:
    """Releases the leases of a request when its response is complete or its client has gone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app, and release the leases of the request when the app returns."""
        held: list[Lease] = []
        scope[LEASES] = held
        try:
            await self._app(scope, receive, send)
        finally:
            for lease in held:
                lease.release()
