"""Errors of a disk that is full or cannot be written, as errors of the request (507)."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from cpuserve.errors import RequestError

_REASONS = {
    errno.ENOSPC: "its disk is full",
    errno.EDQUOT: "its disk quota is used up",
    errno.EFBIG: "a file there would be larger than the system allows",
    errno.EROFS: "its disk is read-only",
    errno.EIO: "its disk has an error",
}
_REPAIRS = {
    errno.EROFS: "make it writable",
    errno.EIO: "replace it",
    errno.EFBIG: "raise the limit (ulimit -f)",
}


class DiskError(RequestError, status=507):
    """The server cannot write to a disk now (507); nothing of the request was stored."""


def disk_error(error: BaseException, place: str = "a directory of the server") -> DiskError | None:
    """Return the DiskError for an error of the system, or one that it caused; None for others.

    place: the option that names the directory, for the message.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _REASONS:
            repair = _REPAIRS.get(cause.errno, "free space on it")
            why = _REASONS[cause.errno]
            return DiskError(f"{place} cannot be written, because {why}: {repair}, and try again")
        cause = cause.__cause__
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
