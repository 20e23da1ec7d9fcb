"""Pictures and pages of documents as a kind of media (media/kinds.py)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.base.log import get_logger
from cpuserve.config.server import most_pictures
from cpuserve.media.decoding.client import (
    DECODER,
    MAX_CPU_S,
    MAX_PIXELS,
    Pictures,
    PictureStopped,
    is_installed,
)
from cpuserve.media.decoding.formats import MOST_PIXELS, check_left
from cpuserve.media.decoding.wire import Decoded
from cpuserve.media.kinds import Charge, KindRules, MarkerTexts, PartOfMessage
from cpuserve.media.pictures.families.base import Family
from cpuserve.media.pictures.families.settings import (
    changed,
    configured,
    family_at,
    server_settings,
)

if TYPE_CHECKING:
    from cpuserve.config.server import ServerOptions

# A second of CPU costs so many pixels, whatever the header of a file says: a picture that reaches
# its limit costs as much as the largest one. Real pictures take half of that or less, besides the
# time of a small one.
_PIXELS_A_SECOND = MAX_PIXELS / MAX_CPU_S
_SMALL_S = 0.05
log = get_logger("pictures")


def rules(options: ServerOptions, most_tokens: int) -> KindRules:
    """Return the rules for pictures, pages of documents included, that options set."""
    max_pictures = most_pictures(options.limit_mm_per_prompt, KindRules().most)
    return KindRules(max_pictures, server_settings(options, most_tokens))


def open_reader(path: str, mmproj: str | None, rules: KindRules) -> PictureReader | None:
    """Return the reader of pictures for a model; see MediaKind.open_reader."""
    family = family_at(Path(path), mmproj)
    if family is None:
        return None
    if not is_installed():
        log.warning("pictures are refused: pip install 'cpuserve[images]' to read them")
        return None
    return PictureReader(configured(family, rules.settings), rules.most)


@dataclass(slots=True)
class PixelBudget:
    """How many pixels the pictures of a request may still have.

    A picture takes its pixels from the budget before they are decoded, so a damaged one does too.
    A picture that is decoded slowly takes more pixels afterwards (_PIXELS_A_SECOND).
    """

    left: int

    def spend(self, pixels: int) -> None:
        """Take pixels from the budget, which never falls below 0."""
        self.keep(self.left - pixels)

    def keep(self, pixels: int) -> None:
        """Leave at most this number of pixels in the budget."""
        self.left = max(0, min(self.left, pixels))


@dataclass(frozen=True, slots=True)
class PictureReader:
    """Reads the pictures of one model (KindReader). most: the most pages of a document."""

    family: Family
    most: int

    @property
    def texts(self) -> MarkerTexts:
        """The texts of a picture in prompts."""
        family = self.family
        marker, gap = family.marker, family.gap
        return MarkerTexts(marker, family.placeholder, gap, *family.frame, family.written)

    def of_request(self, settings: Mapping[str, Any], count: int) -> PicturesOfRequest:
        """Return the reader of a request's pictures; InvalidRequest: a setting is impossible."""
        family = changed(self.family, settings) if settings else self.family
        return PicturesOfRequest(family.for_pictures(count), self.most, PixelBudget(MOST_PIXELS))


@dataclass(frozen=True, slots=True)
class PicturesOfRequest:
    """Reads the pictures of one request, which share a budget (ItemsOfRequest)."""

    family: Family
    most: int
    budget: PixelBudget

    def of_part(self, part: PartOfMessage) -> PicturesOfPart:
        """Return the reader of a part; InvalidRequest: the family has no such detail."""
        family = self.family
        if part.detail and part.detail != "auto":
            family = family.changed({"detail": part.detail})
        return PicturesOfPart(family, part.kind == "file", self.most, self.budget)


@dataclass(frozen=True, slots=True)
class PicturesOfPart:
    """Reads the picture of a part, or the pages of a document (PartReader)."""

    family: Family
    document: bool
    most: int
    budget: PixelBudget

    def key(self, data: bytes) -> bytes:
        """Return a digest of the bytes, and the family with its numbers."""
        return hashlib.sha256(data).digest() + msgspec.msgpack.encode((self.family, self.document))

    def read(
        self, data: bytes, layouts: Sequence[Decoded] | None, *, measures: bool, charge: Charge
    ) -> tuple[Sequence[Decoded], bytes | None]:
        """Decode a file, unless its layouts are known; see PartReader.read."""
        budget, bytes_left = self.budget, self.budget.left
        check_left(1, bytes_left)
        payload = None
        if layouts is None:
            # The pages of a document are drawn when the engine asks for them.
            defers = measures or self._is_document(data)
            try:
                decoded = self._decode(data, charge, measures=defers, left=bytes_left, spent=budget)
            except PictureStopped:  # it took more time or memory than a large picture
                budget.keep(bytes_left - MAX_PIXELS)
                raise
            layouts, payload = decoded.file.pictures, None if defers else decoded.patches
        pixels = sum(picture.width * picture.height for picture in layouts)
        check_left(pixels, bytes_left)
        budget.keep(bytes_left - pixels)
        return layouts, payload

    def payload(self, data: bytes, index: int, charge: Charge) -> bytes:
        """Return the patches of a picture or a page."""
        page = index if self._is_document(data) else -1
        return self._decode(data, charge, measures=False, page=page).patches

    def _is_document(self, data: bytes) -> bool:
        return self.document and b"%PDF-" in data[:1024]

    def _decode(
        self,
        data: bytes,
        charge: Charge,
        *,
        measures: bool,
        left: int = MOST_PIXELS,
        page: int = -1,
        spent: PixelBudget | None = None,
    ) -> Pictures:
        """Decode a file; its pixels and time are work of the caller."""
        opened, used = _charges(len(data), charge, spent)
        return DECODER.decode(
            data,
            self.family,
            document=self.document,
            most_pages=self.most,
            measures=measures,
            left=left,
            page=page,
            opened=opened,
            charge_seconds=used,
        )


def _charges(
    num_bytes: int, charge: Charge, spent: PixelBudget | None
) -> tuple[Callable[[int], None], Callable[[float], None]]:
    """Return the functions `opened` and `used` of Decoder.decode.

    num_bytes: the bytes of the file, which are work of the caller already.
    """
    charged = 0

    def opened(pixels: int) -> None:
        nonlocal charged
        charged = pixels
        charge(max(0, pixels - num_bytes))
        if spent is not None:
            spent.spend(pixels)

    def used(seconds: float) -> None:
        nonlocal charged
        pixels = round(max(0.0, seconds - _SMALL_S) * _PIXELS_A_SECOND)
        charge(max(0, pixels - max(charged, num_bytes)))
        if spent is not None:
            spent.spend(max(0, pixels - charged))
        charged = 0  # another attempt counts its pixels again

    return opened, used
