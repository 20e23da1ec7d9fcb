"""Errors of the system as errors of a request: its disk (507), or its other limits (503)."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from cpuserve.base.errors import LIMITS, RequestError, ServiceUnavailable

_REASONS = {
    errno.ENOSPC: "its disk is full",
    errno.EDQUOT: "its disk quota is used up",
    errno.EFBIG: "a file there would be larger than the system allows",
    errno.EROFS: "its disk is read-only",
    errno.EIO: "its disk has an error",
    errno.EMLINK: "a file there has as many links as its file system allows",
}
_REPAIRS = {
    errno.EROFS: "make it writable",
    errno.EIO: "replace it",
    errno.EMLINK: "delete models with this file",
    errno.EFBIG: "raise the limit (ulimit -f)",
}


# The system has too few of these now; requests that end free some of them.
_LIMITED = {
    errno.EMFILE: "it has too many open files",
    errno.ENFILE: "the system has too many open files",
    errno.ENOMEM: "the system has too little memory",
    errno.EAGAIN: "the system starts no more processes",
}


class DiskError(RequestError, status=507):
    """The server cannot write to a disk, or read it (507); nothing of the request was stored."""


def disk_error(error: BaseException, place: str = "a directory of the server") -> DiskError | None:
    """Return the DiskError for an error of the system, or one that it caused; None for others.

    place: the option that names the directory, for the message.
    """
    number = _cause(error, _REASONS)
    if number is None:
        return None
    repair = _REPAIRS.get(number, "free space on it")
    can = "used" if number == errno.EIO else "written"  # the others are errors of writes only
    return DiskError(
        f"{place} cannot be {can}, because {_REASONS[number]}: {repair}, and try again"
    )


def limit_error(error: BaseException) -> ServiceUnavailable | None:
    """Return a 503 if the system refused files, memory or processes; None for other errors."""
    number = _cause(error, _LIMITED)
    if number is None:
        return None
    return ServiceUnavailable(
        f"The server cannot do this now, because {_LIMITED[number]}: try again ({LIMITS})"
    )


def _cause(error: BaseException | None, among: Mapping[int, str]) -> int | None:
    """Return the errno of an error of the system, or of one that it caused, if `among` has it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in among:
            return error.errno
        error = error.__cause__
    return None


@contextmanager
def writing(place: str) -> Iterator[None]:
    """Raise DiskError in place of the error of a full or read-only disk; see `disk_error`."""
    try:
        yield
    except OSError as error:
        if (shown := disk_error(error, place)) is None:
            raise
        raise shown from error
