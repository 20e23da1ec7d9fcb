"""Pictures and documents for tests, and the files of tiny checkpoints that read them."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from cpuserve.media.pictures.families.idefics3 import Idefics3

# A family of small tiles: 64 x 64 pixels are 64 patches, which become 4 rows.
SMALL = Idefics3(tile=64, patch=8, merge=4, longest=256)


def picture(width=100, height=60, seed=0):
    """A picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def check_most_tokens(family, most, sizes):
    """Check that pictures of these sizes need at most `most` tokens once a family is told."""
    changed = family.changed({"max_tokens": most})
    for width, height in sizes:
        layout = changed.layout(width, height)
        assert layout.rows <= most
        assert len(changed.patches(picture(width, height))) == layout.num_patches


def invoice(lines=(("Sand, 2 t", "96.00"), ("Gravel, 4 t", "164.50"), ("Total", "310.50 EUR"))):
    """A page of 150 dpi with a title and lines of a table."""
    page = Image.new("L", (1275, 1650), 255)
    draw = ImageDraw.Draw(page)
    draw.text((120, 120), "INVOICE 2214", fill=0, font=ImageFont.load_default(80))
    for number, texts in enumerate(lines):
        y = 400 + 90 * number
        draw.line((120, y, 1150, y), fill=128, width=3)
        for x, text in zip((120, 900), texts, strict=True):
            draw.text((x, y + 20), text, fill=0, font=ImageFont.load_default(40))
    return page


def saved(image, kind="PNG", **options):
    """The bytes of a picture in a format."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(width=100, height=60, seed=0):
    """The bytes of a picture of random pixels."""
    return saved(picture(width, height, seed))


def data_url(data, media="image/png"):
    """A data: URL with these bytes."""
    return f"data:{media};base64,{base64.b64encode(data).decode()}"


def _chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def announced(width, height):
    """A PNG whose header announces this size, with hardly any pixels."""
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
            _chunk(b"IDAT", zlib.compress(bytes(10_000))),
            _chunk(b"IEND", b""),
        )
    )


def frames(number):
    """A GIF with this number of frames, of one pixel each after the first."""
    first = Image.new("P", (8, 8), 1)
    first.putpalette([0, 0, 0, 255, 0, 0] + [0] * 762)
    data = saved(first, "GIF")
    at = data.index(b"\x2c")  # the image descriptor of the first frame
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    return data[:at] + data[at:-1] + frame * (number - 1) + b"\x3b"


def document(pages=1, *, width=612, height=792):
    """A PDF document with empty pages."""
    import pypdfium2

    made = pypdfium2.PdfDocument.new()
    for _ in range(pages):
        made.new_page(width, height)
    file = io.BytesIO()
    made.save(file)
    return file.getvalue()


def encrypted_document():
    """A PDF document that needs a password, which nobody knows."""
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] >>",
        b"<< /Filter /Standard /V 1 /R 2 /Length 40 /P -4 /O <" + b"41" * 32 + b"> /U <"
        + b"42" * 32 + b"> >>",
    ]  # fmt: skip
    body, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size, start = len(objects) + 1, len(body)
    body += b"xref\n0 %d\n0000000000 65535 f \n%s" % (size, table)
    identity = b"/ID [<00112233445566778899aabbccddeeff> <00112233445566778899aabbccddeeff>]"
    return (
        body
        + b"trailer\n<< /Size %d /Root 1 0 R /Encrypt 4 0 R %s >>\nstartxref\n%d\n%%%%EOF"
        % (*(size, identity, start),)
    )


def write_processor(folder, *, tile=64, longest=256, rows=4, patch=8, merge=4, kind="smolvlm"):
    """Write the files of a checkpoint that say how its model reads pictures."""
    config = {
        "model_type": kind,
        "scale_factor": merge,
        "vision_config": {"patch_size": patch, "image_size": tile},
    }
    processor = {
        "do_image_splitting": True,
        "do_resize": True,
        "max_image_size": {"longest_edge": tile},
        "size": {"longest_edge": longest},
        "resample": 1,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    whole = {"image_seq_len": rows, "processor_class": "SmolVLMProcessor"}
    for name, found in (
        ("config.json", config),
        ("preprocessor_config.json", processor),
        ("processor_config.json", whole),
    ):
        (folder / name).write_text(json.dumps(found))
