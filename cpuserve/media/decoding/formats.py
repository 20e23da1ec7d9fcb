"""Read the formats of pictures with Pillow and the pages of PDF documents with pdfium, as RGB."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from io import BytesIO
from typing import TYPE_CHECKING, Any

from cpuserve.base.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL.Image import Image

# JPEG includes the pictures of cameras that have several in one file; the first one is read.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP")
READABLE = "PNG, JPEG, WebP, GIF, TIFF or BMP"
# The most pixels of all pictures of a request: 64 pictures of 3840 x 2160, about 16 s of a CPU.
MOST_PIXELS = 1 << 29
_WHITE = (255, 255, 255, 255)
_ORIENTATION = 0x0112
# A PNG without any of these has no EXIF; Pillow would decode its pixels to find that out.
_PNG_EXIF = (b"eXIf", b"Raw profile type exif", b"adobe.xmp")
_SIDEWAYS = (5, 6, 7, 8)  # the orientations of EXIF that exchange width and height
_MOST_16_BITS, _MOST_8_BITS = 65535, 255


def check_left(pixels: int, left: int) -> None:
    """Raise InvalidRequest if a picture has more pixels than a request may still have.

    left: MOST_PIXELS, less the pixels of the pictures before it.
    """
    if pixels > left:
        msg = (
            f"makes more than {MOST_PIXELS >> 20} million pixels with the pictures before it, "
            "which are accepted in a request. Send fewer pictures, or scale them down"
        )
        raise InvalidRequest(msg)


def opened(data: bytes, most_pixels: int, left: int) -> Image:
    """Return a picture before its pixels are decoded.

    left: see check_left.

    Raises InvalidRequest if the bytes are no picture, or one with too many pixels.
    """
    from PIL import Image, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # the size is checked below, and with a clearer message
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise InvalidRequest(_unknown(data)) from None
    except MemoryError:
        raise
    except Exception as error:  # Pillow lets many types of errors of damaged headers pass
        raise _damaged(error) from None
    width, height = image.size
    is_webp = image.format == "WEBP"
    limit = most_pixels * 5 // 8 if is_webp else most_pixels  # its decoder has further copies
    if width * height > limit:
        kind = " in a WebP" if is_webp else ""
        msg = (
            f"has {width} x {height} pixels: at most {limit >> 20} million are accepted{kind}. "
            "Scale it down"
        )
        raise InvalidRequest(msg)
    check_left(width * height, left)
    if width < 1 or height < 1:
        raise InvalidRequest("has no pixels")  # noqa: EM101
    return image


def may_have_exif(image: Image, data: bytes) -> bool:
    """Return whether an opened picture may have EXIF, which may be after the pixels in a PNG."""
    return image.format != "PNG" or any(name in data for name in _PNG_EXIF)


def shown_size(image: Image, data: bytes) -> tuple[int, int]:
    """Return the size of an opened picture as it is shown.

    Raises InvalidRequest if its EXIF is damaged, or the pixels of a PNG before its EXIF.
    """
    width, height = image.size
    try:
        is_turned = may_have_exif(image, data) and image.getexif().get(_ORIENTATION) in _SIDEWAYS
    except MemoryError:
        raise
    except Exception as error:
        raise _damaged(error) from None
    return (height, width) if is_turned else (width, height)


def rgb(image: Image) -> Image:
    """Return a picture as RGB: turned as its EXIF says, on white, with 8 bits.

    Raises InvalidRequest if its pixels are damaged.
    """
    from PIL import Image, ImageOps

    try:
        _shorten_key(image)
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode == "F":
            msg = "has floating-point pixels: save it with 8 or 16 bits for each channel"
            raise InvalidRequest(msg)
        if image.mode.startswith("I"):
            image = _with_8_bits(image)
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, _WHITE)
            image = Image.alpha_composite(white, image)
        return image.convert("RGB")
    except (InvalidRequest, MemoryError):
        raise
    except Exception as error:
        raise _damaged(error) from None


def _shorten_key(image: Image) -> None:
    """Reduce the colour that is transparent to 8 bits, as Pillow does with 16-bit pixels of a PNG.

    Colours that differ only in their lower 8 bits are transparent as well.
    """
    key, deep = image.info.get("transparency"), any("16" in str(tile[3]) for tile in image.tile)
    if deep and isinstance(key, tuple):
        image.info["transparency"] = tuple(value >> 8 for value in key)


def _with_8_bits(image: Image) -> Image:
    """Return a grey picture of 16 or 32 bits with 8 bits, from black to white.

    A picture with a transparent grey has an alpha channel.
    """
    import numpy as np
    from PIL import Image

    key = image.info.get("transparency")
    alpha = None if key is None else np.where(np.asarray(image) == key, 0, 255).astype(np.uint8)
    values = np.asarray(image).astype(np.int64).clip(0, _MOST_16_BITS)
    if image.mode.startswith("I;16") or values.max() > _MOST_8_BITS:
        values = (values * _MOST_8_BITS + _MOST_16_BITS // 2) // _MOST_16_BITS
    grey = values.astype(np.uint8)
    return Image.fromarray(grey if alpha is None else np.dstack([grey, alpha]))


def _unknown(data: bytes) -> str:
    head = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if head.startswith((b"<svg", b"<?xml", b"<!doctype svg")) or b"<svg" in head:
        return f"is an SVG drawing, which has no pixels: send it as {READABLE}"
    return f"is no picture that this server reads: send it as {READABLE}"


def _damaged(error: Exception) -> InvalidRequest:
    said = " ".join(str(error).split())[:200] or type(error).__name__
    return InvalidRequest(f"is damaged and cannot be decoded ({said}): save it again")


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

    def __len__(self) -> int:
        """Return the number of pages."""
        return len(self._document)

    def sizes(self, index: int = -1) -> Iterator[tuple[int, int]]:
        """Yield the size of each page in pixels, or only of the page with this index."""
        for number in range(len(self._document)) if index < 0 else [index]:
            try:
                points = self._document.get_page_size(number)
            except self._error as error:
                raise self._damaged(error) from None
            yield self._pixels(*points)

    def pages(self, index: int = -1) -> Iterator[Image]:
        """Yield each page as an RGB picture, or only the page with this index."""
        for number in range(len(self._document)) if index < 0 else [index]:
            try:
                with closing(self._document[number]) as page:
                    width, height = self._pixels(*page.get_size())
                    scale = self._side / max(page.get_size())
                    bitmap = page.render(scale=scale, rev_byteorder=True)
                    image: Image = bitmap.to_pil().convert("RGB")
            except self._error as error:
                raise self._damaged(error) from None
            yield image if image.size == (width, height) else image.resize((width, height))

    def texts(self) -> Iterator[str]:
        """Yield the text of each page."""
        for number in range(len(self._document)):
            try:
                with closing(self._document[number]) as page, closing(page.get_textpage()) as text:
                    yield text.get_text_bounded().replace("\r\n", "\n")
            except self._error as error:
                raise self._damaged(error) from None

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
