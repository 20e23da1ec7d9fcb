"""The errors that cpuserve raises deliberately.

Messages say what happened, why, and what to do. The classes:

* CpuserveError
  * StartupError: one line on stderr, exit code 2
    * ConfigError: an option, flag or environment variable is wrong
      * TooLittleMemory: a model or setting does not fit into the free memory
    * ModelError: a model is missing, broken or unsupported
      * SourceChanged: another file has the name of a file that the model was loaded from
  * RequestError: one request fails, all others continue
    * InvalidRequest (400)
      * PromptTooLong: a prompt does not fit in the context
    * NotFound (404), TooManyRequests (429), ServiceUnavailable (503), DeadlineExceeded (504)
  * EngineDead (503): the engine process has ended
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping

# Control characters, Unicode's line breaks, and characters that change the direction of text.
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str, escaped: re.Pattern[str] = UNPRINTABLE) -> str:
    """Return a text as one line, with these characters as escapes of Python such as \\n."""
    if text.isprintable():  # ASCII, mostly: none of these characters is
        return text
    return escaped.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def brief(value: object, most: int = 80) -> str:
    """Return the beginning of a value for a message, at most `most` characters.

    The text of a list or object may have megabytes, so it is only named.
    """
    if isinstance(value, list | tuple | dict):
        return "an object" if isinstance(value, dict) else "a list"
    return (value if isinstance(value, str) else str(value))[:most]


class CpuserveError(Exception):
    """Base class of the errors that cpuserve raises deliberately."""


class StartupError(CpuserveError):
    """cpuserve cannot start; the command prints the message on one line and exits with code 2."""


# The limits to check if the system refuses processes, threads, files or memory.
LIMITS = "limits: ulimit -u, -n and -v, and the pids and memory of the container"


def without_threads(error: BaseException) -> bool:
    """Return whether `error` says that the system refused to start a thread."""
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


class ConfigError(StartupError):
    """An option, flag or environment variable that cannot be honoured."""


class TooLittleMemory(ConfigError):
    """A model or a setting that does not fit into the memory that is free."""


class ModelError(StartupError):
    """A model that is missing, broken or unsupported."""


class SourceChanged(ModelError):
    """A file of a model that is no longer the file that the model was first loaded from."""


# For each HTTP status of errors: the kind (the type in the API of OpenAI) and the usual code.
KINDS = {
    400: ("BadRequestError", "invalid_value"),
    401: ("AuthenticationError", "invalid_api_key"),
    403: ("PermissionDeniedError", "host_not_allowed"),
    404: ("NotFoundError", "not_found"),
    405: ("MethodNotAllowedError", "method_not_supported"),
    408: ("RequestTimeoutError", "request_timeout"),
    409: ("ConflictError", "conversation_locked"),
    413: ("PayloadTooLargeError", "request_too_large"),
    415: ("UnsupportedMediaTypeError", "unsupported_media_type"),
    429: ("TooManyRequests", "rate_limit_exceeded"),
    431: ("RequestHeaderFieldsTooLargeError", "headers_too_large"),
    500: ("InternalServerError", "server_error"),
    503: ("ServiceUnavailableError", "service_unavailable"),
    504: ("DeadlineExceeded", "timeout"),
    507: ("InsufficientStorageError", "insufficient_storage"),
}


class RequestError(CpuserveError):
    """A request that cannot be served, with the fields of errors in the API of OpenAI.

    Logs and terminals show a message, so it is one line, with quoted texts escaped.

    param: the field of the client's request that is wrong.
    role: the part of a request that is wrong, for code that does not know the dialect
      of the request: a field of GenerateCall, such as "prompt", "max_tokens"
      or "structured_outputs". `use_words` replaces the role by the field of the dialect,
      as `param` and at the start of a message that begins with the role.
    code: the name of the cause, which is a code of the OpenAI API if the API has one,
      because client libraries compare it ("context_length_exceeded").
    """

    status = 500
    kind, code = KINDS[500]

    def __init_subclass__(cls, *, status: int | None = None) -> None:
        """Give a class of errors its HTTP status, and the kind and the code of this status."""
        super().__init_subclass__()
        if status is not None:
            cls.status = status
            cls.kind, cls.code = KINDS[status]

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        role: str | None = None,
        code: str | None = None,
    ) -> None:
        self.message = printable(message)
        super().__init__(self.message)
        self.param = role if param is None else printable(param)
        self.role = role
        if code is not None:
            self.code = code

    def use_words(self, words: Mapping[str, str]) -> None:
        """Replace the role by the field of a dialect, as `param` and at the start of the message.

        words: {role: field}, for each role that has another name in the dialect.
        """
        if self.role is None or self.role not in words:
            return
        self.param = words[self.role]
        begins, rest = self.message[: len(self.role)], self.message[len(self.role) :]
        if begins == self.role and not rest[:1].isidentifier():
            self.message = self.param + rest
        self.role = None  # the replacement is done: a second call does nothing


# Client libraries look for this code, then shorten the conversation and try again.
CONTEXT_LENGTH = "context_length_exceeded"


def status_of(error: BaseException) -> int:
    """Return the HTTP status of the response to an error; 500 if the error has no status."""
    return error.status if isinstance(error, RequestError) else 500


class InvalidRequest(RequestError, status=400):
    """The request itself is wrong (400)."""


# The advice in messages about texts that are too long, if requests may ask for a cut.
CUT_ADVICE = ", or set truncate_prompt_tokens (-1 cuts it to the context)"


class PromptTooLong(InvalidRequest):
    """A prompt, or a text to be embedded, does not fit in the context (400).

    Each API dialect has its own words for this error, which its clients look for.

    num_tokens: the number of tokens of the prompt, an estimate if it was not tokenized.
    most: the largest number of tokens that the prompt may have.
    """

    code = CONTEXT_LENGTH

    def __init__(self, message: str, *, num_tokens: int, most: int) -> None:
        super().__init__(message, role="prompt")
        self.num_tokens = num_tokens
        self.most = most

    def use_words(self, words: Mapping[str, str]) -> None:
        """Put the field of a dialect into the message; words["cut"] replaces CUT_ADVICE."""
        self.message = self.message.replace(CUT_ADVICE, words.get("cut", CUT_ADVICE))
        super().use_words(words)


class NotFound(RequestError, status=404):
    """The model or route does not exist (404)."""


class TooManyRequests(RequestError, status=429):
    """The queue is full (429)."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(RequestError, status=504):
    """The request was aborted because it did not finish within its timeout (504)."""


# The system refuses with these for reasons of its own: the same request may succeed later.
_OF_THE_SYSTEM = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EIO}


def is_of_the_system(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, is a state of this system, such as too many files."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _OF_THE_SYSTEM:
            return True
        error = error.__cause__
    return False


# Retry-After of a 503 in seconds: loading takes seconds, a download takes minutes.
RETRY_AFTER_S = 5


class ServiceUnavailable(RequestError, status=503):
    """The model is loading, the engine is dead or the server is stopping (503 with Retry-After)."""

    retry_after_s: float = RETRY_AFTER_S


class NotServing(ServiceUnavailable):
    """No engine of the model serves now: it loads or restarts, or the server is stopping (503)."""


class EngineDead(RequestError, status=503):
    """The engine process has ended (503); the message says how it ended.

    ran: whether the engine ended while it ran this request, so that the request may be the cause;
      False = no engine has seen the request.
    """

    def __init__(self, message: str, *, ran: bool = False) -> None:
        super().__init__(message)
        self.ran = ran
