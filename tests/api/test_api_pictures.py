"""Pictures in each dialect: the prompt of transformers, sources, limits, and bad input."""

import asyncio
import base64
import threading

import numpy as np
import pytest
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from cpuserve.base.errors import ConfigError
from cpuserve.media.decoding.client import DECODER
from cpuserve.media.kinds import KindRules
from cpuserve.media.sources import SourceRules
from tests.api.fakes import Api, error_of, events_of
from tests.api.sees import IMAGE, TEMPLATE, folder, picture_api, prompt_of, tokenizer
from tests.helpers.drawn import (
    SMALL,
    announced,
    data_url,
    document,
    encrypted_document,
    frames,
    picture,
    png,
    saved,
)


def image(data=None, **more):
    return {"type": "image_url", "image_url": {"url": data_url(data or png()), **more}}


def text(words):
    return {"type": "text", "text": words}


def spans_of(api, which=-1):
    return [each.spans for each in api.engine.media[which]]


def check_places(api, sizes, which=-1):
    """Each picture has its layout, and its spans are the runs of its placeholders."""
    ids, _ = api.engine.asked[which]
    pictures = api.engine.media[which]
    marker = tokenizer().token_id(IMAGE)
    assert [each.parts * 4 for each in pictures] == [SMALL.layout(*s).rows for s in sizes]
    places = [at for each in pictures for begin, n in each.spans for at in range(begin, begin + n)]
    assert places == [at for at, token in enumerate(ids) if token == marker]


def test_the_prompt_and_the_patches_are_those_of_transformers():
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil(
            size={"longest_edge": 256}, max_image_size={"longest_edge": 64}, resample=1
        ),
        PreTrainedTokenizerFast(tokenizer_file=str(folder() / "tokenizer.json")),
        image_seq_len=4,
        chat_template=TEMPLATE,
    )
    for sizes in ([(100, 60)], [(100, 60), (30, 300), (64, 64)]):
        images = [picture(*size, seed=n) for n, size in enumerate(sizes)]
        for last in (False, True):
            parts = [image(saved(each)) for each in images]
            said = [text("what is\nthis?"), *parts] if last else [*parts, text(" and this <b>?")]
            api = picture_api()
            assert api.chat(said).status_code == 200
            shown = [{"type": "image"} if each["type"] == "image_url" else each for each in said]
            wanted = processor.apply_chat_template(
                [{"role": "user", "content": shown}], add_generation_prompt=True, tokenize=False
            )
            found = processor(text=wanted, images=images, add_special_tokens=False)
            assert api.engine.asked[-1][0] == found["input_ids"][0]
            check_places(api, sizes)
            patches = [api.engine.encoded[each.digest] for each in api.engine.media[-1]]
            assert patches == [SMALL.patches(each).tobytes() for each in images]


DIALECTS = {
    "chat": ("/v1/chat/completions", "messages", lambda data: [
        {"role": "user", "content": [text("look"), image(data)]}]),
    "responses": ("/v1/responses", "input", lambda data: [
        {"role": "user", "content": [
            {"type": "input_text", "text": "look"},
            {"type": "input_image", "image_url": data_url(data), "detail": "auto"}]}]),
    "messages": ("/v1/messages", "messages", lambda data: [
        {"role": "user", "content": [
            text("look"),
            {"type": "image", "source": {
                "type": "base64", "media_type": "image/png",
                "data": base64.b64encode(data).decode()}}]}]),
    "ollama": ("/api/chat", "messages", lambda data: [
        {"role": "user", "content": "look", "images": [base64.b64encode(data).decode()]}]),
    "generate": ("/api/generate", "images", lambda data: [base64.b64encode(data).decode()]),
}  # fmt: skip
MORE = {
    "messages": {"max_tokens": 20},
    "ollama": {"stream": False},
    "generate": {"stream": False, "prompt": "look"},
}


def ask(api, dialect, data):
    path, field, made = DIALECTS[dialect]
    return api.post(path, **{"model": "tiny", field: made(data), **MORE.get(dialect, {})})


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_picture_reaches_the_engine_in_each_dialect(dialect):
    api = picture_api()
    response = ask(api, dialect, png())
    assert response.status_code == 200, response.text
    check_places(api, [(100, 60)])
    shown = SMALL.layout(100, 60).text
    # Ollama's images come before the text.
    turn = f":{shown}look" if dialect in ("ollama", "generate") else f": look{shown}"
    assert prompt_of(api) == f"<|im_start|>User{turn}<|im_end|>\nAssistant:"


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("look", "{0}{1}look"),
        ("look [img] here", "{1}look {0} here"),
        ("[img] and [img]!", "{0} and {1}!"),
        ("[img][img][img]", "{0}{1}[img]"),
    ],
)
@pytest.mark.parametrize("path", ["chat", "generate"])
def test_images_of_ollama_go_to_their_places_in_the_text(written, wanted, path):
    images = [base64.b64encode(png(*size)).decode() for size in ((100, 60), (30, 70))]
    shown = wanted.format(*(SMALL.layout(*size).text for size in ((100, 60), (30, 70))))
    fields = {"prompt": written, "images": images}
    if path == "chat":
        fields = {"messages": [{"role": "user", "content": written, "images": images}]}
    api = picture_api()
    response = api.post(f"/api/{path}", model="tiny", stream=False, **fields)
    assert response.status_code == 200, response.text
    said = prompt_of(api).replace("User: ", "User:")
    assert said == f"<|im_start|>User:{shown}<|im_end|>\nAssistant:"


def check_shape(dialect, response, status=400):
    """Return the message of an error in the format of its dialect."""
    body = response.json()
    assert response.status_code == status, body
    if dialect in ("ollama", "generate"):
        assert isinstance(body["error"], str)
        return body["error"]
    if dialect == "messages":
        assert body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"
        return body["error"]["message"]
    error = error_of(response)
    assert error["param"] == DIALECTS[dialect][1]
    return error["message"]


BAD = {
    "bomb": (announced(40_000, 40_000), "40000 x 40000 pixels"),
    "truncated": (saved(picture(300, 300), "JPEG")[:9000], "is damaged"),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg"></svg>', "SVG drawing"),
    "no picture": (b"hello", "is no picture"),
    "floats": (saved(Image.new("F", (64, 64), 0.5), "TIFF"), "floating-point"),
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("bad", BAD)
def test_bad_pictures_are_refused_in_the_format_of_the_dialect(bad, dialect):
    data, why = BAD[bad]
    api = picture_api()
    message = check_shape(dialect, ask(api, dialect, data))
    assert why in message
    assert message.startswith(DIALECTS[dialect][1])
    assert api.engine.asked == []
    assert ask(api, dialect, png()).status_code == 200


def test_odd_pictures_are_read():
    red = Image.new("CMYK", (64, 64), (0, 255, 255, 0))
    grey = Image.fromarray(np.full((64, 64), 65535, np.uint16))
    for data in (frames(10_000), saved(red, "JPEG"), saved(grey)):
        api = picture_api()
        assert api.chat([image(data)]).status_code == 200
        check_places(api, [(64, 64)])


def test_a_picture_is_decoded_and_encoded_once(monkeypatch):
    api = picture_api()
    jobs = []
    decode = DECODER.decode

    def counted(*given, **more):
        jobs.append(more)
        return decode(*given, **more)

    monkeypatch.setattr(DECODER, "decode", counted)
    turn = {"role": "user", "content": [image(), text("what?")]}
    assert api.chat(messages=[turn]).status_code == 200
    more = [{"role": "assistant", "content": "Fine."}, {"role": "user", "content": "and?"}]
    assert api.chat(messages=[turn, *more]).status_code == 200
    assert len(jobs) == len(api.engine.encoded) == 1
    first, second = (ids for ids, _ in api.engine.asked)
    end = sum(spans_of(api)[-1][-1])
    assert second[:end] == first[:end]
    assert spans_of(api, 0) == spans_of(api, 1)


def test_two_pictures_with_one_text_are_two_pictures():
    api = picture_api()
    for seed in (1, 2, 1):
        assert api.chat([image(png(seed=seed)), text("what?")]).status_code == 200
    digests = [each[0].digest for each in api.engine.media]
    assert digests[0] == digests[2] != digests[1]
    assert len(api.engine.encoded) == 2
    more = [{"role": "assistant", "content": "Fine."}, {"role": "user", "content": "and?"}]
    for seed in (2, 1):
        turn = {"role": "user", "content": [image(png(seed=seed)), text("what?")]}
        assert api.chat(messages=[turn, *more]).status_code == 200
    assert [each[0].digest for each in api.engine.media[3:]] == [digests[1], digests[0]]


def test_patches_that_were_dropped_are_decoded_again_when_the_engine_asks(monkeypatch):
    monkeypatch.setattr("cpuserve.serving.media.cache.MEDIA_PAYLOAD_BYTES", 1)
    api = picture_api()
    said = [image(png(seed=1)), image(png(seed=2)), text("what?")]
    assert api.chat(said).status_code == 200
    wanted = [SMALL.patches(picture(seed=n)).tobytes() for n in (1, 2)]
    found = [api.engine.encoded[each.digest] for each in api.engine.media[-1]]
    assert found == wanted


def test_markers_that_a_user_writes_are_plain_text():
    api = picture_api()
    said = f"{IMAGE} is written <fake_token_around_image><global-img> here"
    assert api.chat([text(said)]).status_code == 200
    assert tokenizer().token_id(IMAGE) not in api.engine.asked[-1][0]
    assert prompt_of(api) == f"<|im_start|>User: {said}<|im_end|>\nAssistant:"
    assert api.chat([text(said), image(), text(IMAGE)]).status_code == 200
    check_places(api, [(100, 60)])


def test_a_template_of_texts_gets_each_marker_on_a_line_of_its_own():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    )
    api = picture_api(template=template)
    said = [text(f"a {IMAGE} {IMAGE}"), image(), text("b")]  # more than the turn has pictures
    assert api.chat(said).status_code == 200
    check_places(api, [(100, 60)])
    ids, _ = api.engine.asked[-1]
    layout = tokenizer().encode(SMALL.layout(100, 60).text, add_special_tokens=False)
    (pictures,) = api.engine.media[-1:]
    begin = ids.index(layout[0])
    assert len(pictures) == 1
    assert ids[begin : begin + len(layout)] == layout
    assert tokenizer().decode(ids[:begin]) == f"user: a {IMAGE} {IMAGE}\n"
    assert tokenizer().decode(ids[begin + len(layout) :]) == "\nb"


def test_a_template_with_another_number_of_markers_is_an_error():
    api = picture_api(template=TEMPLATE.replace("'<image>'", "'<image><image>'"))
    error = error_of(api.chat([image()]))
    why = "messages have 1 pictures, but the chat template writes another number of markers"
    assert why in error["message"]
    assert api.chat("hi").status_code == 200


def test_too_many_pictures_are_refused():
    api = picture_api(most=8)
    error = error_of(api.chat([image()] * 100))
    assert "messages have 100 pictures or more: at most 8 are accepted" in error["message"]
    assert api.chat([image()] * 8).status_code == 200
    error = error_of(api.chat([pdf(document(5))] * 2))
    assert "messages have 10 pictures or more" in error["message"]


def pdf(data):
    return {
        "type": "file",
        "file": {"filename": "a.pdf", "file_data": data_url(data, "application/pdf")},
    }


PDFS = {
    "chat": pdf,
    "responses": lambda data: {"type": "input_file", **pdf(data)["file"]},
    "messages": lambda data: {"type": "document", "source": {
        "type": "base64", "media_type": "application/pdf",
        "data": base64.b64encode(data).decode()}},
}  # fmt: skip


def ask_about(api, dialect, data):
    path, field, _ = DIALECTS[dialect]
    turn = [{"role": "user", "content": [PDFS[dialect](data)]}]
    return api.post(path, **{"model": "tiny", field: turn, **MORE.get(dialect, {})})


@pytest.mark.parametrize("dialect", PDFS)
def test_pages_of_a_document_are_pictures_in_each_dialect(dialect):
    api = picture_api()
    assert ask_about(api, dialect, document(3)).status_code == 200
    check_places(api, [(198, 256)] * 3)
    assert len(api.engine.encoded) == 3
    for data, why in (
        (encrypted_document(), "is an encrypted PDF document"),
        (document(5000), "has 5000 pages: at most 64 pictures are accepted"),
        (b"%PDF-1.7", "is a damaged PDF document"),
    ):
        assert why in check_shape(dialect, ask_about(api, dialect, data))


def tool_turns(part):
    call = {"id": "c1", "type": "function", "function": {"name": "see", "arguments": "{}"}}
    return [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [part]},
    ]


def test_a_picture_in_a_tools_result_is_read():
    api = picture_api()
    assert api.chat(messages=tool_turns(image())).status_code == 200
    check_places(api, [(100, 60)])
    only_texts = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'user' and "
        "m.content is not string %}{% for p in m.content %}{{ p.text if p.type == 'text' else "
        "'<image>' }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
        "<|im_end|>\n{% endfor %}"
    )
    api = picture_api(template=only_texts)
    assert api.chat(messages=tool_turns(image())).status_code == 200
    check_places(api, [(100, 60)])
    shown = prompt_of(api)
    follows = f"<|im_start|>user\n{SMALL.layout(100, 60).text}<|im_end|>\n"
    assert f"<|im_start|>tool\n[The picture follows.]<|im_end|>\n{follows}" in shown


def test_a_bad_picture_in_a_tools_result_is_a_line_of_text():
    api = picture_api()
    assert api.chat(messages=tool_turns(image(b"hello"))).status_code == 200
    assert "[An image was left out: it is no picture that this server reads" in prompt_of(api)
    assert api.engine.media[-1] == []


def test_tokens_are_counted_without_decoding(monkeypatch):
    api = picture_api()
    asked = []
    decode = DECODER.decode

    def noted(*given, **more):
        asked.append(more["measures"])
        return decode(*given, **more)

    monkeypatch.setattr(DECODER, "decode", noted)
    turn = [{"role": "user", "content": [text("look"), image()]}]
    rows = SMALL.layout(100, 60).rows
    found = api.post("/tokenize", model="tiny", messages=turn).json()
    assert found["tokens"].count(tokenizer().token_id(IMAGE)) == rows
    count = api.post(
        "/v1/messages/count_tokens", model="tiny", messages=DIALECTS["messages"][2](png())
    ).json()
    assert count["input_tokens"] == found["count"]
    assert set(asked) == {True}


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["pictures", "pages"])
def test_the_largest_number_of_pictures_is_counted_as_it_is_read(kind):
    drawn = [png(60 + n, 90, seed=n) for n in range(KindRules().most + 1)]

    def said(count):
        if kind == "pages":
            return [text("all of"), pdf(document(count))]
        return [*map(image, drawn[:count]), text("compare them")]

    def block(data):
        encoded = base64.b64encode(data).decode()
        source = {"type": "base64", "media_type": "image/png", "data": encoded}
        return {"type": "image", "source": source}

    def in_blocks(count):
        if kind == "pages":
            return [text("all of"), PDFS["messages"](document(count))]
        return [*map(block, drawn[:count]), text("compare them")]

    api = picture_api()
    turn = [{"role": "user", "content": said(KindRules().most)}]
    found = api.post("/tokenize", model="tiny", messages=turn).json()
    assert len(found["pictures"]) == KindRules().most
    assert api.chat(messages=turn).status_code == 200
    assert api.engine.asked[-1][0] == found["tokens"]
    assert len(api.engine.media[-1]) == KindRules().most
    blocks = [{"role": "user", "content": in_blocks(KindRules().most)}]
    count = api.post("/v1/messages/count_tokens", model="tiny", messages=blocks).json()
    assert count["input_tokens"] == found["count"]
    more = [{"role": "user", "content": said(KindRules().most + 1)}]
    for path in ("/tokenize", "/v1/chat/completions"):
        refused = api.post(path, model="tiny", messages=more)
        assert refused.status_code == 400
        assert f"at most {KindRules().most}" in error_of(refused)["message"]


def test_the_sizes_and_tokens_of_pictures_are_told():
    said = [image(), image(png(1000, 700)), pdf(document()), text("look")]
    sizes = [(100, 60), (1000, 700), (198, 256)]
    tokens = [len(tokenizer().encode(SMALL.layout(*s).text, False, unlocked=True)) for s in sizes]
    told = [
        {
            "width": width,
            "height": height,
            "used_width": SMALL.layout(width, height).width,
            "used_height": SMALL.layout(width, height).height,
            "tokens": count,
        }
        for (width, height), count in zip(sizes, tokens, strict=True)
    ]
    api = picture_api()
    turn = [{"role": "user", "content": said}]
    assert api.post("/tokenize", model="tiny", messages=turn).json()["pictures"] == told
    scaled = {"index": 1, **{k: v for k, v in told[1].items() if k != "tokens"}}
    wanted = {"multimodal_tokens": {"image": sum(tokens)}, "scaled_images": [scaled]}
    details = api.chat(said).json()["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 0, **wanted}
    streamed = api.chat(said, stream=True, stream_options={"include_usage": True})
    assert events_of(streamed)[-1]["usage"]["prompt_tokens_details"] == details
    parts = [
        {"type": "input_image", "image_url": data_url(png())},
        {"type": "input_image", "image_url": data_url(png(1000, 700))},
        {"type": "input_file", **pdf(document())["file"]},
    ]
    found = api.post("/v1/responses", model="tiny", input=[{"role": "user", "content": parts}])
    assert wanted.items() <= found.json()["usage"]["input_tokens_details"].items()
    # A prompt without pictures has the members of before.
    assert "pictures" not in api.post("/tokenize", model="tiny", prompt="hi").json()
    assert api.chat("hi").json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_pictures_of_a_plain_prompt_of_ollama():
    api = picture_api()
    picture_, body = base64.b64encode(png()).decode(), {"model": "tiny", "stream": False}
    alone = api.post("/api/generate", **body, images=[picture_])
    assert alone.status_code == 200
    assert "context" not in alone.json(), "token ids have no pictures"
    check_places(api, [(100, 60)])
    both = api.post("/api/generate", **body, prompt="look", system="Be brief.", images=[picture_])
    assert both.status_code == 200
    assert prompt_of(api).startswith("<|im_start|>System: Be brief.<|im_end|>\n<|im_start|>User:")
    assert prompt_of(api).endswith("look<|im_end|>\nAssistant:")
    # Some clients send a whole data: URL here, or WebP.
    for odd in (data_url(png()), base64.b64encode(saved(picture(), "WEBP")).decode()):
        for path, given in (
            ("/api/generate", {"prompt": "look", "images": [odd]}),
            ("/api/chat", {"messages": [{"role": "user", "content": "look", "images": [odd]}]}),
        ):
            assert api.post(path, **body, **given).status_code == 200
            check_places(api, [(100, 60)])
    for more, why in (
        ({"raw": True}, "images is not possible with raw"),
        ({"suffix": "x"}, "images is not possible with suffix"),
        ({"context": [1]}, "context is not possible with images"),
        ({"images": "x"}, "images"),
    ):
        given = {"prompt": "look", "images": [picture_], **body, **more}
        assert why in check_shape("generate", api.post("/api/generate", **given))
    assert "context" in api.post("/api/generate", **body, prompt="look").json()


MEDIA = "<__media__>"


def complete(api, prompt):
    return api.post("/completion", prompt=prompt, n_predict=4)


def in_base64(*sizes):
    return [base64.b64encode(png(*size)).decode() for size in sizes]


def test_multimodal_data_of_a_plain_prompt_of_llamacpp():
    api = picture_api()
    assert api.get("/props").json()["media_marker"] == MEDIA
    text = f"<|im_start|>User: look{MEDIA} and {MEDIA}<|im_end|>\nAssistant:"
    whole = {"prompt_string": text, "multimodal_data": in_base64((100, 60), (60, 100))}
    assert complete(api, whole).status_code == 200
    check_places(api, [(100, 60), (60, 100)])
    first, between, last = text.split(MEDIA)
    layouts = SMALL.layout(100, 60).text, SMALL.layout(60, 100).text
    assert prompt_of(api) == f"{first}{layouts[0]}{between}{layouts[1]}{last}"
    listed = complete(api, ["no picture", whole, {"prompt_string": "none either"}])
    assert [each["index"] for each in listed.json()] == [0, 1, 2]
    assert [len(each) for each in api.engine.media[-3:]] == [0, 2, 0]
    streamed = api.post("/completion", prompt=whole, n_predict=4, stream=True)
    assert streamed.status_code == 200
    check_places(api, [(100, 60), (60, 100)])


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ({"prompt_string": "none"}, "1 pictures for 0 markers in prompt_string: write <__media__>"),
        ({"prompt_string": f"{MEDIA} {MEDIA}"}, "1 pictures for 2 markers"),
        ({"prompt_string": f"{MEDIA} {IMAGE}"}, "a prompt has 2 markers for 1 pictures"),
        ({"prompt_string": MEDIA, "multimodal_data": ["aGVsbG8="]}, "multimodal_data[0] is no pic"),
        ({"prompt_string": MEDIA, "multimodal_data": ["%"]}, "multimodal_data[0]"),
        ({"prompt_string": MEDIA * 9, "multimodal_data": in_base64((9, 9)) * 9}, "at most 8 are"),
        ({"prompt_string": MEDIA, "multimodal_data": [7]}, "must be a string, got an integer"),
    ],
)
def test_multimodal_data_that_cannot_be_read_is_refused(prompt, why):
    response = complete(picture_api(most=8), {"multimodal_data": in_base64((9, 9)), **prompt})
    assert response.status_code == 400, response.text
    assert why in response.json()["error"]["message"]


def test_embeddings_of_pictures_are_refused():
    given = {"prompt_string": MEDIA, "multimodal_data": in_base64((9, 9))}
    response = picture_api().post("/embedding", content=given)
    assert response.status_code in (400, 501)
    assert "multimodal_data is not supported" in response.json()["error"]["message"]


def test_detail_and_settings_change_the_layout():
    api = picture_api()
    assert api.chat([image(detail="low")]).status_code == 200
    assert api.engine.media[-1][0].parts == 1
    settings = {"size": {"longest_edge": 128}}
    assert api.chat([image()], mm_processor_kwargs=settings).status_code == 200
    assert api.engine.media[-1][0].parts == 5
    for given, why in (({"max_pixels": 5}, "max_pixels is no setting"), ({"size": 5}, "size must")):
        error = error_of(api.chat([image()], mm_processor_kwargs=given))
        assert why in error["message"]
        assert error["param"] == "mm_processor_kwargs"
    error = error_of(api.chat([image(detail="ultra")]))
    assert "detail must be one of auto, low, high, original" in error["message"]


@pytest.mark.parametrize("number", [1 << 63, 10**400, -(10**400)])
def test_a_number_that_processes_cannot_send_each_other_is_refused(number):
    for given in ({"max_tokens": number}, {"size": {"longest_edge": number}}):
        error = error_of(picture_api().chat([image()], mm_processor_kwargs=given))
        assert "has a number of more than 9223372036854775807" in error["message"]
    message = r"--image-max-tokens -?\d+: max_tokens has a number of more"
    with pytest.raises(ConfigError, match=message):
        picture_api(settings={"max_tokens": number})


def test_settings_of_the_server_hold_for_all_pictures():
    api = picture_api(settings={"max_tokens": 4})
    assert api.chat([image()]).status_code == 200
    assert api.engine.media[-1][0].parts == 1


def test_truncation_never_goes_through_a_picture():
    error = error_of(picture_api().chat([image()], truncate_prompt_tokens=5))
    assert error["param"] == "truncate_prompt_tokens"


def test_a_text_model_refuses_pictures_as_before():
    for dialect in DIALECTS:
        message = check_shape(dialect, ask(Api(), dialect, png()))
        assert "this model reads text only" in message


def test_the_server_says_that_pictures_are_read():
    for api, reads in ((picture_api(), True), (Api(), False)):
        assert api.get("/props").json()["modalities"]["vision"] is reads
        card = api.get("/v1/models").json()["data"][0]
        assert ("image" in card["architecture"]["input_modalities"]) is reads
        assert ("vision" in api.post("/api/show", model="tiny").json()["capabilities"]) is reads
        headers = {"anthropic-version": "2023-06-01"}
        found = api.request("GET", "/v1/models/tiny", headers=headers).json()["capabilities"]
        assert found["image_input"] == found["pdf_input"] == {"supported": reads}


# --- sources --------------------------------------------------------------------------------------


def url(address, kind="image_url"):
    return [{"type": kind, kind: {"url": address}}]


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("file:///etc/passwd", "is a file on the server, and this server reads none"),
        ("http://example.com/a.png", "fetches nothing from there"),
        ("http://169.254.169.254/latest", "fetches nothing from there"),
        ("ftp://example.com/a.png", "of the scheme 'ftp', which is never fetched"),
        ("data:image/png,hello", "is no picture"),
        ("data:image/png;base64,!!!", "is not valid base64"),
        ("data:image/png;base64,", "has no data"),
        ("http://[", "has an invalid URL"),
        ("http://a:b@example.com/" + "a" * 9000, "characters: at most 8192"),
    ],
)
def test_sources_that_are_not_allowed_are_refused(address, why):
    message = error_of(picture_api().chat(url(address)))["message"]
    assert message.startswith("messages[0].content[0] ")
    assert why in message


def test_files_below_the_folder_are_read_and_no_others(tmp_path):
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "a b.png").write_bytes(png())
    (tmp_path / "secret.png").write_bytes(png())
    (allowed / "link.png").symlink_to(tmp_path / "secret.png")
    api = picture_api(sources=SourceRules(folder=str(allowed)))
    assert api.chat(url(f"file://{allowed}/a%20b.png")).status_code == 200
    for name in ("../secret.png", "link.png", "missing.png", "", "%00"):
        message = error_of(api.chat(url(f"file://{allowed}/{name}")))["message"]
        assert "is not below the folder of --allowed-local-media-path" in message
    error = error_of(api.chat(url(f"file://elsewhere{allowed}/a%20b.png")))
    assert "is not below the folder" in error["message"]


def test_other_streams_go_on_while_a_picture_is_fetched(monkeypatch):
    fetching, done = threading.Event(), threading.Event()

    def slow(_url, _rules):
        fetching.set()
        assert done.wait(60)
        return png()

    monkeypatch.setattr("cpuserve.serving.media.reader.read_source", slow)
    api = picture_api(sources=SourceRules(domains=("*",), timeout_s=60))

    async def both():
        waiting = asyncio.create_task(
            api._request("POST", "/v1/chat/completions", json={
                "messages": [{"role": "user", "content": url("http://slow.example/a.png")}]})
        )  # fmt: skip
        await asyncio.to_thread(fetching.wait, 60)
        other = await api._request(
            "POST", "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "hi"}]},
        )  # fmt: skip
        assert other.status_code == 200
        assert not waiting.done()
        done.set()
        return await waiting

    assert asyncio.run(both()).status_code == 200


def test_a_picture_that_is_only_a_uuid_says_that_its_data_is_missing():
    """vLLM keeps the data of an earlier request under the uuid of a part."""
    api = picture_api()
    part = {"type": "image_url", "image_url": None, "uuid": "a"}
    response = api.chat([text("look"), part])
    assert response.status_code == 400
    assert "has a uuid and no data" in error_of(response)["message"]
    again = [
        {"role": "user", "content": [text("look"), part]},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": "and?"},
    ]
    assert api.chat(messages=again).status_code == 200
    assert "was left out" in prompt_of(api)
    assert api.chat([text("look"), {**image(), "uuid": "a"}]).status_code == 200
