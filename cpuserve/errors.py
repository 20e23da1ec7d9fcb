"""Every error cpuserve raises on purpose.

Messages say what happened, why, and what to do. The tree:

* CpuserveError
  * StartupError: one line on stderr, exit code 2
    * ConfigError: an option, flag or environment variable
    * ModelError: a model that is missing, broken or unsupported
  * RequestError: answered to one client, everyone else goes on
    * InvalidRequest (400), NotFound (404), TooManyRequests (429), DeadlineExceeded (504)
  * EngineDead: the engine process is gone; health turns 503
"""

from __future__ import annotations


class CpuserveError(Exception):
    """Base of all errors raised on purpose."""


class StartupError(CpuserveError):
    """cpuserve cannot start as asked; the CLI prints the message on one line and exits 2."""


# What to look at when the system grants no more processes, threads, files or memory.
LIMITS = "limits: ulimit -u, -n and -v, and the pids and memory of the container"


def without_threads(error: BaseException) -> bool:
    """`error` is Python's for a thread that the system did not grant."""
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


class ConfigError(StartupError):
    """An option, flag or environment variable that cannot be honoured."""


class ModelError(StartupError):
    """A model that is missing, broken or unsupported."""


class RequestError(CpuserveError):
    """A request that cannot be served, in OpenAI's error shape."""

    status = 500
    kind = "InternalServerError"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(RequestError):
    """The request itself is wrong (400)."""

    status = 400
    kind = "BadRequestError"


class NotFound(RequestError):
    """The model or route does not exist (404)."""

    status = 404
    kind = "NotFoundError"


class TooManyRequests(RequestError):
    """The queue is full (429)."""

    status = 429
    kind = "TooManyRequests"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(RequestError):
    """The request was not finished within its timeout (504); it has been dropped."""

    status = 504
    kind = "DeadlineExceeded"


class EngineDead(RequestError):
    """The engine process has ended; the message says how."""

    status = 503
    kind = "ServiceUnavailable"
