"""Decodes pictures in processes with limits: one forks, and each fork decodes one file.

A picture comes from a client, and its decoder is written in C. It can use all memory, compute for
minutes or overwrite memory. So a fork that has seen a file ends, and the kernel ends it earlier
if it reaches a limit. The first process has loaded Pillow and reads no files.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module

import msgspec

from cpuserve.base.errors import InvalidRequest
from cpuserve.base.fault_points import fault
from cpuserve.limited.child import address_space, limit_memory, limit_time, serve_forks
from cpuserve.limited.wire import receive, send
from cpuserve.media.decoding.formats import (
    PdfDocument,
    is_document,
    may_have_exif,
    opened,
    rgb,
    shown_size,
)
from cpuserve.media.decoding.texts import text_of_document
from cpuserve.media.decoding.wire import (
    DECODED,
    OPENED,
    READY,
    REFUSED,
    STOPPED,
    USED_BYTES,
    Decoded,
    DecodedFile,
    DecodeJob,
)
from cpuserve.media.pictures.families.base import Family
from cpuserve.models.families import FAMILIES

NO_FILE = -1  # in place of a descriptor


def main() -> int:
    """Fork a process for each connection that arrives, until the server has ended."""
    return serve_forks(
        "cpuserve-pictures",
        _serve,
        _import,
        lambda: fault("picture_process.accept", 1),
        lambda: fault("picture_process.fork"),
    )


def _import() -> None:
    """Import the libraries before any file is read, so that forks need not."""
    for module in {place.partition(":")[0] for place in FAMILIES.media.values()}:
        import_module(module)
    with suppress(ImportError):
        import pypdfium2  # noqa: F401
    try:
        import numpy as np
        from PIL import Image
    except ImportError:  # the texts of Word documents need none of them
        return
    for name in ("Bmp", "Gif", "Jpeg", "Mpo", "Png", "Tiff", "WebP"):
        with suppress(ImportError):  # this build of Pillow has no such format
            import_module(f"PIL.{name}ImagePlugin")
    np.asarray(Image.new("RGB", (1, 1)))


def _serve(sock: socket.socket) -> None:
    """Decode the file of one connection in this fork."""
    send(sock, READY)
    fault("picture_fork.receive")
    body, data = receive(sock), receive(sock)
    if body is None or data is None:
        return
    job = msgspec.msgpack.decode(body, type=DecodeJob)
    space = address_space()
    if space:
        limit_memory(space + job.memory_bytes)
    limit_time(job.cpu_s, job.wall_s)
    kind, text = STOPPED, b"it needs more than %d MB of memory" % (job.memory_bytes >> 20)
    descriptor = NO_FILE

    def tell(pixels: int) -> None:
        fault("picture_fork.send")
        send(sock, OPENED, b"%d" % pixels)

    try:
        if job.family is None:
            found = text_of_document(data).encode("utf-8", "replace")
        else:
            file, descriptor = _decoded(job, job.family.family(), data, tell)
            found = msgspec.msgpack.encode(file)
        kind, text = DECODED, found
    except InvalidRequest as error:
        kind, text = REFUSED, error.message.encode("utf-8", "replace")
    except MemoryError:
        pass
    limit_time(0, 0)
    used_us = int(time.process_time() * 1e6).to_bytes(USED_BYTES, "little")
    fault("picture_fork.send")
    send(sock, kind, used_us, text)
    if descriptor != NO_FILE:
        socket.send_fds(sock, [b"f"], [descriptor])


def _decoded(
    job: DecodeJob, family: Family, data: bytes, tell: Callable[[int], None]
) -> tuple[DecodedFile, int]:
    """Return the pictures of a file, and the descriptor of a file with their patches or NO_FILE.

    tell: sends the number of the pixels that will be decoded or drawn. To know the size of a PNG
      with EXIF, its pixels may be decoded.
    """
    if is_document(data):
        if not job.document:
            msg = "is a PDF document: send it as a document or a file"
            raise InvalidRequest(msg)
        document = PdfDocument(data, job.most_pages, family.document_page_side)
        family = family.for_pictures(len(document))
        if job.measures:
            return DecodedFile([_measured(family, size) for size in document.sizes()]), NO_FILE
        tell(sum(width * height for width, height in document.sizes(job.page)))
        return _written(family, document.pages(job.page))
    image = opened(data, job.most_pixels, job.left)
    if not job.measures or (image.format == "PNG" and may_have_exif(image, data)):
        tell(image.width * image.height)
    if job.measures:
        return DecodedFile([_measured(family, shown_size(image, data))]), NO_FILE
    return _written(family, map(partial(rgb), [image]))


def _measured(family: Family, size: tuple[int, int]) -> Decoded:
    return Decoded(*size, family.layout(*size))


def _written(family: Family, images: Iterator[object]) -> tuple[DecodedFile, int]:
    """Write the patches of each picture, one after another."""
    descriptor = _anonymous_file()
    pictures = []
    for image in images:
        pictures.append(_measured(family, image.size))  # type: ignore[attr-defined]
        remaining = memoryview(family.patches(image)).cast("B")  # type: ignore[arg-type]
        while remaining:
            part = remaining[: fault("picture_fork.write", len(remaining))]
            remaining = remaining[os.write(descriptor, part) :]
    return DecodedFile(pictures), descriptor


def _anonymous_file() -> int:
    """Return the descriptor of a new file in memory, or without a name where there is none."""
    fault("picture_fork.map")
    make = getattr(os, "memfd_create", None)
    if make is not None:
        return int(make("pictures"))
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


if __name__ == "__main__":
    sys.exit(main())
