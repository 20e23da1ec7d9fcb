"""A file with a secret of this server, which servers and restarts with the same directory share."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

from cpuserve.base.fault_points import fault
from cpuserve.base.log import get_logger
from cpuserve.core.regular_file import read_regular

log = get_logger("serve")


def read_secret(path: Path, size: int, lost: str, new: bytes = b"") -> bytes:
    """Return the secret of `size` bytes in the file `path`, which is written if it is missing.

    lost: the loss that the log states if the file is damaged and its secret is replaced.
    new: the secret of a new file; b"" = random bytes.

    Raises:
      OSError: the file can be neither read nor written.
    """
    exists = True
    try:
        fault("secret.read")
        known = read_regular(path, size, links=True)
    except FileNotFoundError:
        known, exists = None, False
    if known is not None and len(known) == size:
        return known
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}.tmp")
    fault("secret.write")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(new or secrets.token_bytes(size))
    try:
        if exists:
            log.warning("%s is torn (incomplete) and is replaced, so %s", path, lost)
            temporary.replace(path)
        else:
            os.link(temporary, path)  # this fails if another process has just created `path`
    except FileExistsError:
        log.debug("another process has just created %s", path)
    except OSError:  # FAT and some network file systems have no hard links
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    known = read_regular(path, size, links=True)
    if known is None or len(known) != size:
        raise OSError(errno.EINVAL, f"this file does not have {size} bytes", str(path))
    return known
