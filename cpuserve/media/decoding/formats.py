"""Read the formats of pictures with Pillow, and return them as RGB."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

from cpuserve.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL.Image import Image

# JPEG includes the pictures of cameras that have several in one file; the first one is read.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP")
READABLE = "PNG, JPEG, WebP, GIF, TIFF or BMP"
_WHITE = (255, 255, 255, 255)
_ORIENTATION = 0x0112
_SIDEWAYS = (5, 6, 7, 8)  # the orientations of EXIF that exchange width and height
_MOST_16_BITS, _MOST_8_BITS = 65535, 255


def opened(data: bytes, most_pixels: int) -> tuple[Image, tuple[int, int]]:
    """Return a picture before its pixels are decoded, and its size as it is shown.

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
    if width * height > most_pixels:
        msg = (
            f"has {width} x {height} pixels: at most {most_pixels >> 20} million are accepted. "
            "Scale it down"
        )
        raise InvalidRequest(msg)
    if width < 1 or height < 1:
        raise InvalidRequest("has no pixels")  # noqa: EM101
    try:
        turned = image.getexif().get(_ORIENTATION) in _SIDEWAYS
    except MemoryError:
        raise
    except Exception as error:
        raise _damaged(error) from None
    return image, (height, width) if turned else (width, height)


def rgb(image: Image) -> Image:
    """Return a picture as RGB: turned as its EXIF says, on white, with 8 bits.

    Raises InvalidRequest if its pixels are damaged.
    """
    from PIL import Image, ImageOps

    try:
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


def _with_8_bits(image: Image) -> Image:
    """Return a grey picture of 16 or 32 bits with 8 bits, from black to white."""
    import numpy as np
    from PIL import Image

    values = np.asarray(image).astype(np.int64).clip(0, _MOST_16_BITS)
    if image.mode.startswith("I;16") or values.max() > _MOST_8_BITS:
        values = (values * _MOST_8_BITS + _MOST_16_BITS // 2) // _MOST_16_BITS
    return Image.fromarray(values.astype(np.uint8))


def _unknown(data: bytes) -> str:
    head = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if head.startswith((b"<svg", b"<?xml", b"<!doctype svg")) or b"<svg" in head:
        return f"is an SVG drawing, which has no pixels: send it as {READABLE}"
    return f"is no picture that this server reads: send it as {READABLE}"


def _damaged(error: Exception) -> InvalidRequest:
    said = " ".join(str(error).split())[:200] or type(error).__name__
    return InvalidRequest(f"is damaged and cannot be decoded ({said}): save it again")
