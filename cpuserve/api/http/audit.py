"""The audit log (--audit FILE): a line for each request, on disk before the response has ended.

A line has the facts of the access log, the fingerprint of the model and its settings, and the
SHA-256 of the bytes of the request's body and of the response's body. It contains no prompt.
"""

from __future__ import annotations

import hashlib
import json
from functools import partial
from typing import TYPE_CHECKING

from cpuserve.api.errors.http_errors import error_response
from cpuserve.api.errors.record import RECORD
from cpuserve.api.http.access_log import facts_of
from cpuserve.api.http.audit_file import NotAudited
from cpuserve.api.request.headers import CALLER
from cpuserve.api.response.direct_body import DIRECT_BODY
from cpuserve.base.errors import NotServing
from cpuserve.serving.threads import run_sized

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from cpuserve.api.errors.record import RequestRecord
    from cpuserve.api.http.audit_file import AuditFile

# Larger pieces of a body are hashed in a thread.
_LARGE = 1 << 20


class Audit:
    """Writes the lines. refuses: whether requests fail if their lines cannot be written."""

    def __init__(self, file: AuditFile, *, refuses: bool) -> None:
        self._file = file
        self.refuses = refuses

    @property
    def refusal(self) -> NotServing | None:
        """The error of requests that come while lines cannot be written; None = they are served."""
        trouble = self._file.trouble
        return _refusal(trouble) if self.refuses and trouble is not None else None

    @property
    def figures(self) -> tuple[bool, int]:
        """Whether the last write succeeded, and how many have failed."""
        return self._file.trouble is None, self._file.failures

    async def write(self, line: bytes) -> None:
        """Write a line; if requests depend on it, return when it is on disk.

        Raises:
          NotAudited: see AuditFile.write.
        """
        if self.refuses:
            await self._file.write(line)
        else:
            self._file.put(line)

    def put(self, line: bytes) -> None:
        """Write a line soon."""
        self._file.put(line)

    def close(self) -> None:
        """Write the last lines; see AuditFile.close."""
        self._file.close()


def _refusal(why: str) -> NotServing:
    msg = (
        f"The audit file cannot be written ({why}), and this server serves nothing without it: "
        "try again later"
    )
    return NotServing(msg, code="audit_unavailable")


class Audited:
    """Middleware that writes the audit line of each request.

    covers: whether a path has lines.
    shown: returns the path of a request as lines show it, such as /v1/models/{name}.
    """

    def __init__(
        self,
        app: ASGIApp,
        audit: Audit,
        covers: Callable[[str], bool],
        shown: Callable[[Scope], str],
    ) -> None:
        self._app = app
        self._audit = audit
        self._covers = covers
        self._shown = shown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app, and write the line of the request before the response ends."""
        if scope["type"] != "http" or not self._covers(scope["path"]):
            await self._app(scope, receive, send)
            return
        if (refusal := self._audit.refusal) is not None:
            await error_response(refusal, None, scope)(scope, receive, send)
            return
        watched = _Watched(self._audit, scope, partial(self._shown, scope), receive, send)
        await self._app(scope, watched.receive, watched.send)


class _Digest:
    """The SHA-256 of bytes that come in pieces."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, data: bytes) -> None:
        """Add a piece. An event of a token takes 0.15 us."""
        self._hash.update(data)

    async def add_any(self, data: bytes) -> None:
        """Add a piece of any size."""
        if len(data) < _LARGE:
            self.add(data)
            return
        await run_sized(len(data), lambda: self._hash.update(data))

    def text(self) -> str:
        """Return the digest of the pieces so far as hexadecimal digits."""
        return self._hash.hexdigest()


class _Watched:
    """One request: the digests of its bodies, and its line, which is written once."""

    def __init__(
        self, audit: Audit, scope: Scope, shown: Callable[[], str], receive: Receive, send: Send
    ) -> None:
        self._audit = audit
        self._scope = scope
        self._shown = shown
        self._receive = receive
        self._send = send
        self._input, self._output = _Digest(), _Digest()
        self._start: Message | None = None
        self._written = self._failed = False
        self._record: RequestRecord = scope[RECORD]
        self._record.at_end.append(self._end)
        self._record.audited = self._audited
        direct = scope.get(DIRECT_BODY)
        if direct is not None:
            direct.seen = self._output.add

    async def receive(self) -> Message:
        """Receive a message, and add a piece of the request's body to its digest."""
        message = await self._receive()
        if data := message.get("body"):
            await self._input.add_any(data)
        return message

    async def send(self, message: Message) -> None:
        """Send a message; the last one waits until the line is on disk.

        Raises:
          NotServing: the line of a response that has begun cannot be written.
        """
        if message["type"] == "http.response.start":
            # The status waits for the body: a response with one piece may still become a 503.
            self._record.status, self._start = message["status"], message
            return
        if data := message.get("body"):
            await self._output.add_any(data)
        last = not message.get("more_body", False)
        if last and not (self._written or self._failed or self._record.ends_later):
            try:
                await self._write()
            except NotServing as error:
                if self._start is None:
                    raise
                await self._refuse(error)
                return
        if self._start is not None:
            start, self._start = self._start, None
            await self._send(start)
        await self._send(message)

    async def _write(self) -> None:
        """Write the line; if this fails, a line with the failure follows when it can be written.

        Raises:
          NotServing: the line cannot be written, and requests depend on it.
        """
        self._written = True
        try:
            await self._audit.write(self._line())
        except NotAudited as error:
            self._written, self._failed = error.kept, True
            refusal = _refusal(error.why)
            self._record.fail(refusal)
            raise refusal from None

    async def _audited(self, output: bytes) -> None:
        """Write the line of a response that ends after its request; `output`: the whole response.

        Raises:
          NotServing: see _write.
        """
        if not (self._written or self._failed):
            self._output = _Digest()
            await self._output.add_any(output)
            await self._write()

    async def _refuse(self, error: NotServing) -> None:
        """Respond with an error in place of a response that has not begun."""
        self._start, self._output = None, _Digest()
        response = error_response(error, None, self._scope)
        self._record.status = response.status_code
        self._output.add(bytes(response.body))
        await response(self._scope, self._receive, self._send)

    def _end(self) -> None:
        """Write the line of a request that has ended in another way, such as by its client."""
        if not self._written:
            self._written = True
            self._audit.put(self._line())

    def _line(self) -> bytes:
        scope = self._scope
        ended = self._record.ended(scope["method"], self._shown(), scope[CALLER].name)
        facts = facts_of(self._record, ended)
        facts |= {
            "fingerprint": ended.report and ended.report.fingerprint,
            "input_sha256": self._input.text(),
            "output_sha256": self._output.text(),
        }
        return json.dumps(facts).encode() + b"\n"
