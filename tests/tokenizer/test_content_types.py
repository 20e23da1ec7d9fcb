"""The parts of a message: when their bytes are decoded, and what a template gets of them."""

import base64
import hashlib
import random

import pytest

from cpuserve.base.errors import InvalidRequest
from cpuserve.tokenizer.chat import arranged
from cpuserve.tokenizer.conversation import MediaPart, join_texts, text_of
from cpuserve.tokenizer.traits import Traits

DATA = bytes(range(48))
BASE64 = base64.b64encode(DATA).decode()


def image(**given):
    return MediaPart(
        **{"kind": "image", "type": "image", "noun": "an image", "where": "messages[0]", **given}
    )


@pytest.mark.parametrize(
    "given",
    [
        {"data": BASE64},
        {"data": "\n".join(BASE64[i : i + 20] for i in range(0, len(BASE64), 20))},
        {"url": f"data:image/png;base64,{BASE64}"},
        {"url": "data:image/png," + "".join(f"%{byte:02X}" for byte in DATA)},
        {"url": f"DATA:image/png;charset=x;BASE64,{BASE64}"},
        {"url": f"data:image/png;base64,{BASE64.replace('+', '%2B').replace('/', '%2f')}"},
    ],
    ids=["base64", "lines", "data URL", "percent", "capitals", "percent in base64"],
)
def test_bytes_are_decoded_and_have_their_digest(given):
    read = image(**given).read(len(DATA))
    assert read.data == DATA
    assert read.digest == hashlib.sha256(DATA).digest()


@pytest.mark.parametrize(
    ("given", "most", "why"),
    [
        ({}, 99, "messages[0] has no data"),
        ({"url": "https://example.com/a.png"}, 99, "messages[0] has no data"),
        ({"url": "data:image/png;base64,"}, 99, "messages[0] has no data"),
        ({"url": "data:"}, 99, "messages[0] has no data"),
        ({"data": "AAA"}, 99, "messages[0] is not valid base64"),
        ({"data": "A-_A"}, 99, "messages[0] is not valid base64"),
        ({"data": "grün"}, 99, "messages[0] is not valid base64"),
        ({"data": BASE64}, len(DATA) - 1, "messages[0] has 48 bytes: at most 47"),
        ({"url": "data:," + "a" * 10}, 9, "messages[0] has 10 bytes: at most 9"),
        ({"data": "A" * 4000}, 99, "messages[0] has more than 99 bytes"),
        ({"data": "AA==" + BASE64}, 99, "messages[0] is not valid base64"),
        ({"data": "AA==" * (1 << 20)}, 1 << 24, "messages[0] is not valid base64"),
        ({"url": "data:," + "%41" * (1 << 19)}, 1 << 24, "messages[0] has 524288 percent escapes"),
        ({"url": "data:;base64," + "%41" * (1 << 19)}, 1 << 24, "messages[0] has 524288 percent"),
    ],
)
def test_invalid_bytes_are_the_clients_error(given, most, why):
    with pytest.raises(InvalidRequest, match=r"^messages\[0\] ") as caught:
        image(**given).read(most)
    assert caught.value.message.startswith(why)


@pytest.mark.parametrize("size", [(1 << 20) * 3 // 4, (1 << 20) * 3 // 4 + 1, 3_000_001])
def test_a_long_text_is_decoded_in_parts(size, monkeypatch):
    data = random.Random(size).randbytes(size)
    longest = []

    def decode(text, **more):
        longest.append(len(text))
        return b64decode(text, **more)

    b64decode = base64.b64decode
    monkeypatch.setattr("cpuserve.tokenizer.conversation.base64.b64decode", decode)
    assert image(data=base64.b64encode(data).decode()).read(size).data == data
    assert max(longest) <= 1 << 20, "one call would keep all threads waiting"


def test_a_text_that_is_too_long_is_not_decoded(monkeypatch):
    def fail(*args, **more):
        raise AssertionError

    monkeypatch.setattr(base64, "b64decode", fail)
    with pytest.raises(InvalidRequest, match="more than 99 bytes"):
        image(data="A" * 4000).read(99)


def test_neighbouring_texts_are_joined():
    part = image()
    assert join_texts([]) == ""
    assert join_texts(["a"]) == "a"
    assert join_texts(["a", "", "b"]) == "a\n\nb"
    assert join_texts(["a", "b", part, "c", part, part]) == ["a\nb", part, "c", part, part]
    assert text_of(["a", part]) == "a\n[An image was left out: you can read text only.]"
    assert text_of([image(kind="video", noun="a video")], {"image", "file"}) == (
        "[A video was left out: you can read text, images and files only.]"
    )


ROLES = ("system", "user", "assistant", "tool")


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_template_gets_parts_or_text_as_it_takes_them(role):
    message = {"role": role, "content": ["look:", image()]}
    parts = Traits(texts=frozenset(), parts=frozenset(ROLES))
    assert arranged([message], parts)[0]["content"] == [
        {"type": "text", "text": "look:"},
        {"type": "image"},
    ]
    line = "[An image was left out: you can read text only.]"
    assert arranged([message], Traits())[0]["content"] == f"look:\n{line}"
