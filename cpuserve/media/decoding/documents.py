"""Draw the pages of PDF documents with pdfium."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from cpuserve.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL.Image import Image

_HEAD = b"%PDF-"
_HEAD_BYTES = 1024  # readers look for the head in this many bytes
# The longest side of a page in points, as PDF defines it (200 inches).
_MOST_POINTS = 14400


def is_document(data: bytes) -> bool:
    """Return whether these bytes are a PDF document."""
    return _HEAD in data[:_HEAD_BYTES]


class PdfDocument:
    """An open PDF document.

    side: the length in pixels of the longer side of each page.
    """

    def __init__(self, data: bytes, most_pages: int, side: int) -> None:
        """Raises InvalidRequest if it cannot be read, or has too many pages."""
        try:
            import pypdfium2
        except ImportError:
            msg = "is a PDF document, which needs pypdfium2: pip install 'cpuserve[images]'"
            raise InvalidRequest(msg) from None
        self._error = pypdfium2.PdfiumError
        try:
            self._document: Any = pypdfium2.PdfDocument(data)
        except pypdfium2.PdfiumError as error:
            if "password" in str(error).lower() or "security" in str(error).lower():
                msg = "is an encrypted PDF document: send it without a password"
                raise InvalidRequest(msg) from None
            raise self._damaged(error) from None
        count = len(self._document)
        if count > most_pages:
            msg = (
                f"has {count} pages: at most {most_pages} pictures are accepted. Send fewer pages, "
                "or start the server with a larger --limit-mm-per-prompt"
            )
            raise InvalidRequest(msg)
        if not count:
            raise InvalidRequest("has no pages")  # noqa: EM101
        self._side = side

    def sizes(self) -> Iterator[tuple[int, int]]:
        """Yield the size of each page in pixels."""
        for number in range(len(self._document)):
            try:
                points = self._document.get_page_size(number)
            except self._error as error:
                raise self._damaged(error) from None
            yield self._pixels(*points)

    def pages(self, only: int = -1) -> Iterator[Image]:
        """Yield each page as an RGB picture, or only the page with this index."""
        for number in range(len(self._document)) if only < 0 else [only]:
            try:
                with closing(self._document[number]) as page:
                    width, height = self._pixels(*page.get_size())
                    scale = self._side / max(page.get_size())
                    bitmap = page.render(scale=scale, rev_byteorder=True)
                    image: Image = bitmap.to_pil().convert("RGB")
            except self._error as error:
                raise self._damaged(error) from None
            yield image if image.size == (width, height) else image.resize((width, height))

    def _pixels(self, width: float, height: float) -> tuple[int, int]:
        longest = max(width, height)
        if not 0 < longest <= _MOST_POINTS:
            msg = f"has a page of {width:g} x {height:g} points: at most {_MOST_POINTS} are allowed"
            raise InvalidRequest(msg)
        scale = self._side / longest
        return max(1, round(width * scale)), max(1, round(height * scale))

    def _damaged(self, error: Exception) -> InvalidRequest:
        said = " ".join(str(error).split())[:200]
        return InvalidRequest(f"is a damaged PDF document ({said}): save it again")
