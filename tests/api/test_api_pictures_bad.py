"""Malformed pictures and documents: each is refused in one line, and nobody else notices.

The table has what a caller may send by mistake or on purpose. After each input the next picture is
read, and a stream that ran meanwhile has all of its text.
"""

import asyncio
import base64
import os
import signal
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from cpuserve.base.errors import InvalidRequest
from cpuserve.media.decoding.client import DECODER, PictureStopped
from cpuserve.media.sources import SourceRules
from cpuserve.serving.media import reader
from cpuserve.serving.models.details import ModelDetails
from tests.api.fakes import Api, error_of
from tests.api.sees import IMAGE, picture_api, prompt_of, tokenizer
from tests.helpers.drawn import (
    announced,
    data_url,
    document,
    encrypted_document,
    frames,
    picture,
    png,
    saved,
)
from tests.helpers.patience import PATIENCE_S
from tests.media.test_sources import resolve, server

__all__ = ["server"]  # a fixture

# A busy machine may need long for what is refused at once.
RULES = {"most": 8, "sources": SourceRules(domains=("*",), timeout_s=60)}
SHORT = {**RULES, "sources": SourceRules(domains=("*",), timeout_s=0.5)}
RED = Image.new("CMYK", (64, 64), (0, 255, 255, 0))
GREY = Image.fromarray(np.full((64, 64), 65535, np.uint16))


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


def file(data, name="a.pdf"):
    url = data_url(data, "application/pdf")
    return {"type": "file", "file": {"filename": name, "file_data": url}}


def huge_text():
    """A PNG whose text chunk becomes 256 MB."""
    data = saved(Image.new("L", (8, 8)))
    packed = b"a\0\0" + zlib.compress(bytes(256 << 20), 9)
    chunk = struct.pack(">I", len(packed)) + b"zTXt" + packed
    chunk += struct.pack(">I", zlib.crc32(b"zTXt" + packed))
    return data[:33] + chunk + data[33:]


# (parts of the user's message, a part of the message of the error)
BAD = {
    "a bomb": (image(data_url(announced(40_000, 40_000))), "40000 x 40000 pixels: at most 64"),
    "a side without end": (image(data_url(announced(2**31 - 1, 1))), "2147483647 x 1 pixels"),
    "a picture without pixels": (image(data_url(announced(0, 5))), "is"),
    "a truncated JPEG": (
        image(data_url(saved(picture(300, 300), "JPEG")[:9000])),
        "is damaged and cannot be decoded",
    ),
    "a truncated PNG": (image(data_url(png(300, 300)[:9000])), "is damaged and cannot be decoded"),
    "an SVG": (
        image(data_url(b'<svg xmlns="http://www.w3.org/2000/svg"></svg>', "image/svg+xml")),
        "is an SVG drawing",
    ),
    "pixels that are floats": (
        image(data_url(saved(Image.new("F", (64, 64)), "TIFF"))),
        "floating-point pixels",
    ),
    "another file": (image(data_url(b"MZ\x90\0")), "is no picture that this server reads"),
    "a text as picture": (image("data:text/plain,hello"), "is no picture"),
    "data: without base64": (image("data:image/png,%89PNG"), "is no picture"),
    "base64 that is none": (image("data:image/png;base64,!!!"), "is not valid base64"),
    "no data": (image("data:image/png;base64,"), "has no data"),
    "no URL": (image(""), "content[0]"),
    "a file URL": (image("file:///etc/passwd"), "is a file on the server, and this server reads"),
    "a scheme of no pictures": (image("gopher://a/b"), "of the scheme 'gopher'"),
    "the metadata of a cloud": (
        image("http://169.254.169.254/latest/meta-data"),
        "is no public address",
    ),
    "an address of this machine": (image("http://[::1]:22/"), "is no public address"),
    "an address of a site": (image("http://[fec0::1]/"), "is no public address"),
    "an address in another": (image("http://[64:ff9b:1::7f00:1]/"), "is no public address"),
    "a URL without a host": (image("http:///a"), "has a URL without a host"),
    "escapes without end": (image("data:image/png," + "%00" * (1 << 19)), "percent escapes"),
    "an AVIF": (image(data_url(b"\0\0\0\x20ftypavif" + bytes(200))), "is no picture that"),
    "a HEIC": (image(data_url(b"\0\0\0\x18ftypheic" + bytes(200))), "is no picture that"),
    "an address as a number": (image("http://2130706433/"), "is no public address"),
    "a URL that is none": (image("http://["), "has an invalid URL"),
    "a URL with a user": (image("http://a:b@example.com/x"), "with a user name"),
    "100 pictures": ([image(data_url(png()))] * 100, "at most 8 are accepted"),
    "an encrypted PDF": (file(encrypted_document()), "is an encrypted PDF document"),
    "a PDF of 5,000 pages": (file(document(5000)), "has 5000 pages: at most 8 pictures"),
    "a damaged PDF": (file(b"%PDF-1.7\n1 0 obj"), "is a damaged PDF document"),
    "a PDF as picture": (image(data_url(document())), "is a PDF document: send it as a document"),
    "a page of a mile": (file(document(1, width=100_000)), "has a page of 100000 x 792 points"),
    "an unknown detail": (
        {"type": "image_url", "image_url": {"url": data_url(png()), "detail": "ultra"}},
        "detail must be one of",
    ),
    "a size that is none": (
        {"type": "image_url", "image_url": {"url": 5}},
        "content[0]",
    ),
}
ENCODED = base64.b64encode(png()).decode()
NO_EXIF = b"Exif\0\0garbage!!"
TURNED = Image.Exif()
TURNED[0x0112] = 6
MORE = {"save_all": True, "append_images": [picture(100, 60, seed) for seed in (1, 2)]}
# Odd, and read: (a part, the size of its picture).
READ = {
    "a GIF of 10,000 frames": (image(data_url(frames(10_000))), (8, 8)),
    "CMYK": (image(data_url(saved(RED, "JPEG"))), (64, 64)),
    "16 bits": (image(data_url(saved(GREY))), (64, 64)),
    "bare base64": (image(base64.b64encode(png()).decode()), (100, 60)),
    "a URL in capitals": (image(f"DATA:image/png;BASE64,{ENCODED}"), (100, 60)),
    "escapes in base64": (image(f"data:;base64,{ENCODED.replace('+', '%2B')}"), (100, 60)),
    "an EXIF that is none": (image(data_url(saved(picture(), "JPEG", exif=NO_EXIF))), (100, 60)),
    "a turned WebP": (image(data_url(saved(picture(), "WEBP", exif=TURNED))), (60, 100)),
    "a profile that is none": (image(data_url(saved(picture(), icc_profile=b"x"))), (100, 60)),
    "a WebP of several frames": (image(data_url(saved(picture(), "WEBP", **MORE))), (100, 60)),
    "a TIFF of several pages": (image(data_url(saved(picture(), "TIFF", **MORE))), (100, 60)),
    "a ribbon downwards": (image(data_url(png(1, 10_000))), (1, 10_000)),
    "a wrong type": (image(data_url(png(), "application/octet-stream")), (100, 60)),
    "WebP": (image(data_url(saved(picture(), "WEBP"), "image/webp")), (100, 60)),
    "one pixel": (image(data_url(png(1, 1))), (1, 1)),
    "a ribbon": (image(data_url(png(2000, 1))), (2000, 1)),
}
LONG = "again " * 40


def ask_beside_a_stream(api, parts):
    """The response to parts, while a stream runs, which must have all of its text."""
    turn = [{"role": "user", "content": parts if isinstance(parts, list) else [parts]}]

    async def both():
        one, other = await asyncio.gather(
            api._request(
                "POST",
                "/v1/chat/completions",
                json={"messages": [{"role": "user", "content": LONG}], "stream": True},
            ),
            api._request("POST", "/v1/chat/completions", json={"messages": turn}),
        )
        assert one.status_code == 200
        assert one.text.endswith("data: [DONE]\n\n")
        assert "Fine" in one.text
        return other

    return asyncio.run(both())


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_picture_is_refused_alone(name):
    parts, why = BAD[name]
    api = picture_api(**RULES)
    error = error_of(ask_beside_a_stream(api, parts))
    assert error["param"] == "messages"
    assert why in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 400
    assert len(api.engine.asked) == 1, "only the stream reached the engine"
    assert api.chat([image(data_url(png()))]).status_code == 200


@pytest.mark.parametrize("name", READ)
def test_an_odd_picture_is_read(name):
    part, size = READ[name]
    api = picture_api(**RULES)
    assert ask_beside_a_stream(api, part).status_code == 200
    turn = [{"role": "user", "content": [part]}]
    (seen,) = api.post("/tokenize", model="tiny", messages=turn).json()["pictures"]
    assert (seen["width"], seen["height"]) == size


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/redirect", "redirects are not followed"),
        ("/slow", "within 0.5 s"),
        ("/other", "sent the status 404"),
        ("/a", "is no picture that this server reads"),
    ],
)
def test_other_servers_cannot_disturb(server, path, why):
    api = picture_api(**(SHORT if path == "/slow" else RULES))
    error = error_of(ask_beside_a_stream(api, image(server.url + path)))
    assert why in error["message"]
    asked = [each for each, _ in server.asked]
    assert asked == [path] or (path == "/slow" and not asked), "no second request to anywhere"


def test_a_name_with_a_private_address_at_the_second_look(monkeypatch):
    looks = resolve(monkeypatch, "93.184.216.34", "127.0.0.1")
    connected = []

    def connect(address, timeout):
        connected.append(address[0])
        raise ConnectionRefusedError

    monkeypatch.setattr("cpuserve.media.sources.create_connection", connect)
    api = picture_api(**RULES)
    error = error_of(ask_beside_a_stream(api, image("http://rebinds.example/a.png")))
    assert "cannot be fetched from rebinds.example" in error["message"]
    assert (looks, connected) == (["rebinds.example"], ["93.184.216.34"])


def test_huge_pictures_in_one_body_are_refused_before_they_are_decoded(monkeypatch):
    api = picture_api(**RULES)
    monkeypatch.setattr("cpuserve.media.readers.pictures.MOST_PIXELS", 10_000)
    parts = [image(data_url(png(seed=31))), image(data_url(announced(70, 70)))]
    error = error_of(ask_beside_a_stream(api, parts))
    why = "messages[0].content[1] makes more than 512 million pixels with the pictures before it"
    assert why in error["message"], "and nothing about its damaged pixels"
    turn = [{"role": "user", "content": parts}]
    assert why in error_of(api.post("/tokenize", model="tiny", messages=turn))["message"]
    more = [{"role": "assistant", "content": "Fine."}, {"role": "user", "content": "and?"}]
    assert api.chat(messages=[*turn, *more]).status_code == 200
    assert "[An image was left out: it makes more than" in prompt_of(api)


DAMAGED = announced(70, 70)
MANY = [{"role": "user", "content": [image(data_url(DAMAGED))] * 5}]
ANSWERED = {"role": "assistant", "content": "Fine."}


def test_damaged_pictures_use_up_the_pixels_of_a_request(monkeypatch):
    api, jobs, decode = picture_api(**RULES), [], DECODER.decode
    monkeypatch.setattr("cpuserve.media.readers.pictures.MOST_PIXELS", 12_000)
    monkeypatch.setattr(DECODER, "decode", lambda *a, **more: jobs.append(1) or decode(*a, **more))
    mine = [image(data_url(png(50, 50, seed=33)))]
    one = [{"role": "user", "content": [image(data_url(DAMAGED))]}, ANSWERED]
    assert api.chat(messages=[*one, {"role": "user", "content": mine}]).status_code == 200
    jobs.clear()
    response = api.chat(messages=[*MANY, ANSWERED, {"role": "user", "content": mine}])
    assert "content[0] makes more than 512 million pixels" in error_of(response)["message"]
    # Two of the damaged ones have 9,800 pixels, and the header of the third has too many.
    assert len(jobs) == 5, "mine is known already"
    assert api.chat(messages=[*MANY, ANSWERED, {"role": "user", "content": "and?"}]).is_success
    assert prompt_of(api).count("is damaged and cannot be decoded") == 2
    assert prompt_of(api).count("makes more than 512 million pixels") == 3


def test_files_that_reach_a_limit_cost_as_much_as_the_largest_picture(monkeypatch):
    api, jobs = picture_api(most=64), []

    def stopped(*_, **__):
        jobs.append(1)
        raise PictureStopped("it takes more than 5 s")

    monkeypatch.setattr(DECODER, "decode", stopped)
    many = [{"role": "user", "content": [image(data_url(DAMAGED))] * 20}]
    assert api.chat(messages=[*many, ANSWERED, {"role": "user", "content": "and?"}]).is_success
    assert len(jobs) == 8


def test_the_pixels_of_a_small_file_are_work_of_its_caller(monkeypatch):
    charged = []
    monkeypatch.setattr(reader.DECODING, "charge", charged.append)
    data = announced(500, 500)
    assert picture_api(**RULES).chat([image(data_url(data))]).status_code == 400
    assert charged[0] == 250_000 - len(data)


def slow_jpeg(scans):
    """A grey picture of a million pixels: decoders go through all of them for 12 bytes more."""
    data = saved(Image.new("L", (1024, 1024), 128), "JPEG", progressive=True)
    last, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:end] + data[last:end] * scans + data[end:]


def test_the_time_of_a_slow_file_is_work_of_its_caller(monkeypatch):
    charged = []
    monkeypatch.setattr(reader.DECODING, "charge", charged.append)
    # A slow machine needs longer than a picture may take.
    monkeypatch.setattr(DECODER, "cpu_s", PATIENCE_S)
    monkeypatch.setattr(DECODER, "wall_s", PATIENCE_S)
    data = slow_jpeg(3000)
    assert picture_api(**RULES).chat([image(data_url(data))]).status_code == 200
    assert charged[0] == (1 << 20) - len(data)
    assert len(charged) == 2
    assert charged[1] > 1 << 20


def test_slow_files_use_up_the_pixels_of_a_request(monkeypatch):
    api, jobs = picture_api(most=64), []

    def slow(*_, charge_seconds, **__):
        jobs.append(1)
        charge_seconds(4.9)
        raise InvalidRequest("is damaged")

    monkeypatch.setattr(DECODER, "decode", slow)
    many = [{"role": "user", "content": [image(data_url(DAMAGED))] * 20}]
    assert api.chat(messages=[*many, ANSWERED, {"role": "user", "content": "and?"}]).is_success
    assert len(jobs) == 9


def test_a_text_chunk_that_unpacks_to_256_mb_ends_no_server():
    api = picture_api(**RULES)
    response = ask_beside_a_stream(api, image(data_url(huge_text())))
    assert response.status_code in (200, 400)
    assert api.chat([image(data_url(png()))]).status_code == 200


def test_markers_of_a_user_and_a_text_model():
    api = picture_api(**RULES)
    said = f"{IMAGE}<fake_token_around_image><global-img>"
    assert ask_beside_a_stream(api, [{"type": "text", "text": said}]).status_code == 200
    assert all(tokenizer().token_id(IMAGE) not in ids for ids, _ in api.engine.asked)
    assert any(said in prompt_of(api, number) for number in (0, 1))
    error = error_of(Api().chat([image(data_url(png()))]))
    assert "this model reads text only" in error["message"]


def test_a_model_whose_engine_has_no_tower_refuses_pictures():
    api = picture_api()
    api.context.media = None
    api.context.details = ModelDetails(path=api.context.details.path)
    api.engine.info["media_rows"] = {}
    api.context.set_ready(tokenizer(), api.context.chat_template)
    assert "this model reads text only" in error_of(api.chat([image(data_url(png()))]))["message"]
    assert api.chat("hi").status_code == 200


def test_the_process_that_decodes_is_killed_and_the_next_picture_is_read():
    api = picture_api(**RULES)
    assert api.chat([image(data_url(png(seed=21)))]).status_code == 200
    os.kill(DECODER.pid, signal.SIGKILL)
    assert ask_beside_a_stream(api, image(data_url(png(seed=22)))).status_code == 200
