"""Decoding in processes with limits: formats, damaged files, bombs, documents and kills."""

import contextlib
import io
import os
import signal
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from cpuserve.base.errors import InvalidRequest, ServiceUnavailable
from cpuserve.base.fault_points import POINTS
from cpuserve.media.decoding.client import Decoder, PictureStopped
from cpuserve.media.decoding.wire import DecodeJob
from tests.helpers.children import child_options
from tests.helpers.drawn import (
    SMALL,
    announced,
    document,
    encrypted_document,
    frames,
    picture,
    png,
    saved,
)

FAULTY = str(Path(__file__).parents[1] / "helpers" / "faulty")
TILE = SMALL.changed({"do_image_splitting": False})  # one tile of 64 x 64 pixels


@pytest.fixture
def decoder():
    made = Decoder()
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared():
    made = Decoder()
    yield made
    made.close()


def decoded(decoder, data, family=SMALL, *, pages=0, measures=False):
    return decoder.decode(
        data, family, document=pages > 0, most_pages=max(pages, 1), measures=measures
    )


def pixel(found):
    """The first pixel of the first patch."""
    return tuple(found.patches[:3])


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP"])
def test_formats_without_loss_have_the_pixels_of_the_picture(kind, shared):
    image = picture(100, 60)
    options = {"lossless": True} if kind == "WEBP" else {}
    found = decoded(shared, saved(image, kind, **options))
    assert found.patches == SMALL.patches(image).tobytes()
    (one,) = found.file.pictures
    assert (one.width, one.height, one.layout) == (100, 60, SMALL.layout(100, 60))
    assert decoded(shared, saved(image, kind, **options), measures=True).file == found.file


@pytest.mark.parametrize("kind", ["JPEG", "GIF"])
def test_formats_with_loss_have_the_pixels_that_pillow_decodes(kind, shared):
    data = saved(picture(100, 60), kind)
    wanted = SMALL.patches(Image.open(io.BytesIO(data)).convert("RGB")).tobytes()
    assert decoded(shared, data).patches == wanted


def test_a_picture_is_turned_as_its_exif_says(shared):
    image = picture(100, 60)
    exif = Image.Exif()
    exif[0x0112] = 6
    found = decoded(shared, saved(image, exif=exif))
    (one,) = found.file.pictures
    assert (one.width, one.height) == (60, 100)
    turned = image.transpose(Image.Transpose.ROTATE_270)
    assert found.patches == SMALL.patches(turned).tobytes()
    assert decoded(shared, saved(image, exif=exif), measures=True).file == found.file


def test_transparent_pixels_are_white(shared):
    clear = Image.new("RGBA", (64, 64), (200, 0, 0, 0))
    half = Image.new("LA", (64, 64), (0, 128))
    indexed = Image.new("P", (64, 64), 3)
    indexed.putpalette([200] * 768)
    assert pixel(decoded(shared, saved(clear), TILE)) == (255, 255, 255)
    assert pixel(decoded(shared, saved(half), TILE)) == (127, 127, 127)
    assert pixel(decoded(shared, saved(indexed, transparency=3), TILE)) == (255, 255, 255)


@pytest.mark.parametrize(("value", "wanted"), [(0, 0), (257, 1), (32896, 128), (65535, 255)])
def test_16_bits_become_8(value, wanted, shared):
    grey = Image.fromarray(np.full((64, 64), value, np.uint16))
    assert pixel(decoded(shared, saved(grey), TILE)) == (wanted,) * 3
    assert pixel(decoded(shared, saved(grey, "TIFF"), TILE)) == (wanted,) * 3


def deep_png(colour_type, pixels, key):
    """A PNG of 64 x 64 pixels with 16 bits, equal rows of 64 pixels and a transparent colour."""
    row = b"\0" + np.array(pixels, ">u2").tobytes() * (64 // len(pixels))
    header = struct.pack(">IIBBBBB", 64, 64, 16, colour_type, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"tRNS", np.array(key, ">u2").tobytes())]
    chunks += [(b"IDAT", zlib.compress(row * 64)), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


GREY, COLOUR = 0, 2
NEARLY = [0x1235]  # differs from 0x1234 in its lower 8 bits only


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (deep_png(GREY, [0x1234], [0x1234]), (255,) * 3),
        (deep_png(GREY, NEARLY, [0x1234]), (0x12,) * 3),
        (deep_png(COLOUR, [[0x1234, 0x5678, 0x9ABC]], [0x1234, 0x5678, 0x9ABC]), (255,) * 3),
        (deep_png(COLOUR, [[0x1234, 0x5678, 0x9ABC]], [0x1234, 0x5678, 0]), (0x12, 0x56, 0x9A)),
    ],
)
def test_a_transparent_colour_of_16_bits_becomes_white(data, wanted, shared):
    assert pixel(decoded(shared, data, TILE)) == wanted


def test_cmyk_becomes_rgb(shared):
    red = Image.new("CMYK", (64, 64), (0, 255, 255, 0))
    assert pixel(decoded(shared, saved(red, "TIFF"), TILE)) == (255, 0, 0)
    r, g, b = pixel(decoded(shared, saved(red, "JPEG", quality=100), TILE))
    assert r > 250
    assert max(g, b) < 5


def test_only_the_first_frame_of_an_animation_is_decoded(shared):
    found = decoded(shared, frames(10_000), TILE)
    assert pixel(found) == (255, 0, 0)
    assert len(found.file.pictures) == 1


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (announced(40_000, 40_000), "40000 x 40000 pixels: at most 64 million are accepted"),
        (saved(picture(300, 300), "JPEG")[:9000], "damaged and cannot be decoded"),
        (png(300, 300)[:9000], "damaged and cannot be decoded"),
        (announced(500, 500), "damaged and cannot be decoded"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"></svg>', "is an SVG drawing"),
        (b'<?xml version="1.0"?><svg></svg>', "is an SVG drawing"),
        (b"\x89PNG picture", "is no picture that this server reads: send it as PNG, JPEG"),
        (b"x", "is no picture"),
        (saved(Image.new("F", (64, 64), 0.5), "TIFF"), "floating-point pixels"),
        (document(), "is a PDF document: send it as a document"),
    ],
)
@pytest.mark.parametrize("measures", [False, True])
def test_what_cannot_be_decoded_is_refused(data, why, measures, shared):
    if measures and ("damaged" in why or "floating" in why):
        return  # the header is fine, and the pixels are not read
    with pytest.raises(InvalidRequest, match=why):
        decoded(shared, data, measures=measures)


@pytest.mark.parametrize(
    ("data", "pages", "page", "told"),
    [
        (png(100, 60), 0, -1, [6000]),
        (announced(500, 500), 0, -1, [250_000]),
        (png(300, 300)[:9000], 0, -1, [90_000]),
        (document(3), 3, -1, [3 * 198 * 256]),
        (document(3), 3, 1, [198 * 256]),
        (announced(40_000, 40_000), 0, -1, []),
    ],
)
def test_pixels_are_told_before_they_are_decoded(data, pages, page, told, shared):
    heard = []
    given = {"document": pages > 0, "most_pages": max(pages, 1), "opened": heard.append}
    with contextlib.suppress(InvalidRequest):
        shared.decode(data, SMALL, page=page, measures=False, **given)
    assert heard == told
    with contextlib.suppress(InvalidRequest):
        shared.decode(data, SMALL, page=page, measures=True, **given)
    assert heard == told, "a header costs nothing"


def test_the_pixels_of_a_png_are_decoded_only_to_find_exif_after_them(shared):
    image = picture(100, 60)
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(image, exif=exif)
    begin, pixels, end = (data.index(name) - 4 for name in (b"eXIf", b"IDAT", b"IEND"))
    assert begin < pixels
    late = data[:begin] + data[pixels:end] + data[begin:pixels] + data[end:]
    heard = []
    for each, size in ((late, (60, 100)), (saved(image), (100, 60))):
        found = shared.decode(
            each, SMALL, document=False, most_pages=1, measures=True, opened=heard.append
        )
        (one,) = found.file.pictures
        assert (one.width, one.height) == size
        assert decoded(shared, each).file == found.file
    assert heard == [6000]
    found = shared.decode(
        announced(70, 70), SMALL, document=False, most_pages=1, measures=True, opened=heard.append
    )
    assert (found.file.pictures[0].width, heard) == (70, [6000]), "a damaged one can be measured"


def test_pages_of_a_document_become_pictures(shared):
    found = decoded(shared, document(3), pages=3)
    measured = decoded(shared, document(3), pages=3, measures=True)
    assert measured.file == found.file
    assert [(each.width, each.height) for each in found.file.pictures] == [(198, 256)] * 3
    layout = SMALL.layout(198, 256)
    assert len(found.patches) == 3 * layout.num_patches * SMALL.patch_bytes
    assert set(found.patches) == {255}
    assert found.of(1, SMALL.patch_bytes) == found.patches[: len(found.patches) // 3]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (encrypted_document(), "is an encrypted PDF document"),
        (document(5000), "has 5000 pages: at most 8 pictures"),
        (document(9), "has 9 pages: at most 8 pictures"),
        (b"%PDF-1.7", "is a damaged PDF document"),
        (document(1, width=100_000), "has a page of 100000 x 792 points"),
    ],
)
def test_documents_that_are_not_read_are_refused(data, why, shared):
    with pytest.raises(InvalidRequest, match=why):
        decoded(shared, data, pages=8)


@pytest.mark.deep
def test_the_largest_webp_fits_into_the_memory_of_its_process(decoder):
    decoder.cpu_s, decoder.wall_s = 60, 200  # a busy machine may need long
    most = 6476
    for more in ({"lossless": True, "method": 0}, {"method": 0}):
        image = Image.new("RGBA", (most, most), (255, 0, 0, 255))
        assert decoded(decoder, saved(image, "WEBP", **more), TILE).patches
    large = saved(Image.new("L", (most, most + 8)), "WEBP", method=0)
    with pytest.raises(InvalidRequest, match="at most 40 million are accepted in a WebP"):
        decoded(decoder, large)


def test_a_picture_that_is_sent_as_a_file_has_the_limits_of_a_picture(decoder, monkeypatch):
    jobs = []
    encode = msgspec.msgpack.encode

    def noted(job):
        if isinstance(job, DecodeJob):  # the family in it is encoded as well
            jobs.append(job)
        return encode(job)

    monkeypatch.setattr("cpuserve.media.decoding.client.msgspec.msgpack.encode", noted)
    decoded(decoder, png(), pages=64)
    decoded(decoder, document(2), pages=64, measures=True)
    decoded(decoder, document(2), pages=2)
    assert [(job.cpu_s, job.wall_s) for job in jobs] == [(5.0, 20.0), (5.0, 20.0), (7.0, 28.0)]


def test_a_file_that_takes_too_much_time_or_memory_is_stopped(decoder):
    image = saved(Image.new("L", (6000, 6000)))
    decoder.cpu_s = 0.02
    with pytest.raises(PictureStopped, match=r"takes more than 0.02 s"):
        decoded(decoder, image)
    decoder.cpu_s, decoder.memory_bytes = 5.0, 32 << 20
    with pytest.raises(PictureStopped, match="more than 32 MB of memory"):
        decoded(decoder, image)
    assert decoded(decoder, png()).patches


def test_a_file_that_gets_too_little_cpu_time_is_no_error_of_the_client(decoder):
    decoder.cpu_s, decoder.wall_s = 60.0, 0.02
    with pytest.raises(ServiceUnavailable, match="too busy: try again"):
        decoded(decoder, saved(Image.new("L", (6000, 6000))))


def test_the_time_of_each_attempt_is_told(decoder, monkeypatch):
    image, told = saved(Image.new("L", (6000, 6000))), []
    asked = {"document": False, "most_pages": 1, "measures": False, "charge_seconds": told.append}
    decoder.decode(image, SMALL, **asked)
    with pytest.raises(InvalidRequest, match="is damaged"):
        decoder.decode(image[:-5000], SMALL, **asked)
    assert len(told) == 2
    assert all(0.005 < each < 5 for each in told)
    decoder.cpu_s = 0.02
    with pytest.raises(PictureStopped):
        decoder.decode(image, SMALL, **asked)
    assert told[2] == 0.02


def test_if_the_process_is_killed_its_requests_use_a_new_one(decoder):
    decoded(decoder, png())
    first = decoder.pid
    os.kill(first, signal.SIGSTOP)  # so that the next request waits for it
    found = []
    asking = threading.Thread(target=lambda: found.append(decoded(decoder, png())))
    asking.start()
    os.kill(first, signal.SIGKILL)
    asking.join()
    assert found[0].patches
    assert decoder.pid != first


def test_a_killed_process_is_started_again(decoder):
    decoded(decoder, png())
    first = decoder._server._process
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert decoded(decoder, png()).patches
    assert decoder.pid != first.pid


def test_a_process_that_cannot_be_started_is_503_with_the_reason(decoder, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ServiceUnavailable, match=r"cannot be started: .*ulimit"):
        decoded(decoder, png())


POINTS_HERE = [
    *("pictures.start", "pictures.connect", "pictures.send", "pictures.receive", "pictures.read"),
    *("picture_process.accept", "picture_process.fork"),
    *("picture_fork.receive", "picture_fork.map", "picture_fork.write", "picture_fork.send"),
]
ASK = """
import psutil
from cpuserve.base.errors import RequestError
from cpuserve.media.decoding.client import Decoder
from tests.helpers.drawn import SMALL, png

decoder, found, zombies = Decoder(), [], []
for _ in range(2):
    try:
        decoder.decode(png(), SMALL, document=False, most_pages=1, measures=False)
        found.append("fine")
    except RequestError as error:
        found.append(f"{error.status} {error.message}")
    states = [each.status() for each in psutil.Process().children()]
    zombies += [each for each in states if each == psutil.STATUS_ZOMBIE]
print(*found, *zombies, sep="|")
"""
RUNS = [(point, action) for point in POINTS_HERE for action in POINTS[point].actions]


def asked_with(plan):
    """What two requests get in a process in which a call of the system fails."""
    options = child_options(CPUSERVE_FAULT=str(plan))
    options["env"]["PYTHONPATH"] = os.pathsep.join([FAULTY, options["env"]["PYTHONPATH"]])
    ran = subprocess.run(
        [sys.executable, "-c", ASK], **options, capture_output=True, text=True, check=True
    )
    return ran.stdout.strip().split("|")


@pytest.mark.deep
@pytest.mark.parametrize(("point", "action"), RUNS)
def test_a_call_that_fails_once_fails_no_request(point, action, tmp_path):
    (tmp_path / point).write_text(f"1:{action}", encoding="ascii")
    assert asked_with(tmp_path)[:2] == ["fine", "fine"]
    assert [path.name for path in tmp_path.iterdir()] == [f"{point}.fired"]


def test_a_file_that_ends_its_process_each_time_fails_only_its_request(tmp_path):
    for reply in asked_with("picture_fork.receive:1:kill")[:2]:
        assert reply.startswith("400 was not decoded: the process that read it has ended twice")


def test_a_process_that_ends_at_each_fork_is_503_and_leaves_no_zombie():
    first, second, *zombies = asked_with("picture_process.fork:1:kill")
    assert first.startswith("503 the process for pictures cannot be started")
    assert second.startswith("503 the process for pictures cannot be started")
    assert zombies == []
