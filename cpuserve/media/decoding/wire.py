"""Messages between a decoder and its processes (limited/wire.py).

A new fork sends READY. The decoder sends a DecodeJob, then the bytes of the file. Before it decodes
pixels, the fork sends how many there are (OPENED, then the number as text). The reply is one byte
for its kind and USED_BYTES for the microseconds of CPU that the job took, then a text, or the
DecodedFile and a descriptor of a file with the patches. A job without a family gets the text of its
document as UTF-8.
"""

from __future__ import annotations

from importlib import import_module

import msgspec

from cpuserve.media.pictures.families.base import Family
from cpuserve.media.pictures.layout import PictureLayout, ShownPicture

USED_BYTES = 8
READY, OPENED, DECODED, REFUSED, STOPPED = b"r", b"o", b"+", b"-", b"!"


class PackedFamily(msgspec.Struct, frozen=True, array_like=True):
    """A family of any class, of cpuserve or of a plug-in.

    module, name: where its class is. numbers: its values.
    """

    module: str
    name: str
    numbers: msgspec.Raw

    @staticmethod
    def of(family: Family) -> PackedFamily:
        """Return a family as a part of a message."""
        numbers = msgspec.Raw(msgspec.msgpack.encode(family))
        return PackedFamily(type(family).__module__, type(family).__qualname__, numbers)

    def family(self) -> Family:
        """Return the family."""
        family: Family = msgspec.msgpack.decode(
            self.numbers, type=getattr(import_module(self.module), self.name)
        )
        return family


class DecodeJob(msgspec.Struct, frozen=True, array_like=True):
    """Decode one file.

    family: how the model sees pictures; None = return the text of a document instead.
    measures: only find the layouts, without patches.
    document: whether the file may be a document; its pages become pictures.
    page: the only page of a document that is drawn; -1 = all.
    most_pages, most_pixels: the limits of a document and of a picture.
    left: how many more pixels the request may have (MOST_PIXELS).
    cpu_s, wall_s, memory_bytes: the limits of the job.
    """

    family: PackedFamily | None
    measures: bool
    document: bool
    page: int
    most_pages: int
    most_pixels: int
    left: int
    cpu_s: float
    wall_s: float
    memory_bytes: int


class Decoded(msgspec.Struct, frozen=True, array_like=True):
    """A decoded picture: its size in pixels as it is shown, and its layout (ItemLayout)."""

    width: int
    height: int
    layout: PictureLayout

    @property
    def text(self) -> str:
        """The text in place of the marker."""
        return self.layout.text

    @property
    def work(self) -> int:
        """How many patches the picture has."""
        return self.layout.num_patches

    @property
    def parts(self) -> int:
        """How many tiles the picture has."""
        return len(self.layout.tiles)

    @property
    def form(self) -> bytes:
        """The form of the patches, for the tower."""
        return self.layout.form.packed()

    def seen(self, tokens: int) -> ShownPicture:
        """Return the sizes of the picture and its number of tokens, for the client."""
        layout = self.layout
        return ShownPicture(self.width, self.height, layout.width, layout.height, tokens)


class DecodedFile(msgspec.Struct, frozen=True, array_like=True):
    """The pictures of a file in order: one, or one for each page of a document."""

    pictures: list[Decoded]
