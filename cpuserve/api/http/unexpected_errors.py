"""Middleware that responds with 500 to exceptions that no handler expected.

Errors of a full or read-only disk get 507.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.api.errors.http_errors import error_response, settle_failure
from cpuserve.api.errors.record import RECORD
from cpuserve.api.request.body import ClientGone
from cpuserve.api.stored.disk import disk_error
from cpuserve.serving.cancellation import CANCELLATIONS

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class UnexpectedErrors:
    """Logs unexpected exceptions and responds to them with 500, without the exception's text."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app; log an exception that it raises, and respond with 500."""
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientGone:
            if RECORD in scope:
                scope[RECORD].gone = True
        except CANCELLATIONS:
            raise
        except BaseException as error:
            shown = disk_error(error) or error
            settle_failure(shown, scope)
            if started:
                raise  # the response has started, so uvicorn can only close the connection
            await error_response(shown, None, scope)(scope, receive, send)
