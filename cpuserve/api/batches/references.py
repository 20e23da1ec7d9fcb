"""Put the contents of stored files into the messages that refer to them."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from cpuserve.api.batches.directory import FileDirectory, StoredFile
from cpuserve.api.request.content_parts import with_content
from cpuserve.api.stored.owned_folder import open_plain
from cpuserve.base.errors import NotFound
from cpuserve.base.fault_points import fault
from cpuserve.media.kinds import part_kinds
from cpuserve.serving.threads import run_on_disk, run_sized
from cpuserve.tokenizer.conversation import ConversationMessage, MediaPart, join_texts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cpuserve.api.request.context import RequestContext
    from cpuserve.serving.calls.call import GenerateCall
    from cpuserve.tokenizer.conversation import ContentPart

# How many bytes are checked for UTF-8 and copied in a microsecond, at least.
_BYTES_PER_US = 100


def names_files(call: GenerateCall) -> bool:
    """Return whether a message of a call refers to a stored file."""
    return next(_parts(call), None) is not None


def _parts(call: GenerateCall) -> Iterator[tuple[ConversationMessage, int, MediaPart]]:
    """Yield each part that refers to a stored file, with its message and its index there."""
    kinds = part_kinds()
    for messages in call.conversations or (call.messages or (),):
        for message in messages:
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, list):
                for index, part in enumerate(content):
                    if isinstance(part, MediaPart) and part.file_id and part.kind in kinds:
                        yield message, index, part


async def read_files(request: RequestContext, call: GenerateCall) -> None:
    """Put the contents of files into the parts that refer to them; their bytes count as the body's.

    The part of a file that the caller does not have, or that is too large, gets a reason why it
    cannot be read: it is refused in the user's own turn, and left out in earlier turns.

    Raises:
      ServerBusy: other requests use the memory; see BodyBudget.take.
    """
    batches, changed = request.state.batches, list[ConversationMessage]()
    for message, index, part in list(_parts(call)):
        reader = request.context.media
        if part.kind != "file" and (reader is None or part.kind not in reader.part_kinds):
            continue  # the model reads none
        if batches is None:
            reason = "refers to a file, and this server keeps none: start it with --files-dir DIR"
            message["content"][index] = replace(part, file_id="", why=reason)
        else:
            message["content"][index] = await _read(request, batches.directory, part)
            changed.append(message)
    if call.joins_texts:
        for message in changed:
            message["content"] = join_texts(message["content"])


async def _read(request: RequestContext, directory: FileDirectory, part: MediaPart) -> ContentPart:
    try:
        file = directory.find(request.owner, part.file_id)
    except NotFound:
        return replace(part, file_id="", why=_missing(part))
    size, max_bytes = file.file.bytes, request.models.most_body_bytes
    if request.body_bytes + size > max_bytes:
        reason = (
            f"refers to a file of {size} bytes: a body and its files may have {max_bytes} bytes. "
            "Send a smaller file, or start the server with a larger --max-body-size"
        )
        return replace(part, file_id="", why=reason)
    await request.hold(size)
    try:
        data = await run_on_disk(partial(_content, directory, file))
    except FileNotFoundError:  # it was deleted meanwhile
        return replace(part, file_id="", why=_missing(part))
    name = file.file.filename
    return await run_sized(
        size // _BYTES_PER_US, lambda: with_content(part, data, file.media_type, name)
    )


def _content(directory: FileDirectory, file: StoredFile) -> bytes:
    fault("content.read")
    with os.fdopen(open_plain(directory.path_of(file.file.id)), "rb") as source:
        return source.read(file.file.bytes)


def _missing(part: MediaPart) -> str:
    return f"refers to the file {part.file_id[:80]!r}, which was not found: upload it to /v1/files"
