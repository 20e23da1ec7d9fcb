"""Pictures through templates in the ways of Gemma 3 and of Qwen3-VL, in chat completions.

The templates are short forms of the published ones: equal texts for turns, pictures and tools.
"""

import base64
import functools
import json

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Core

from cpuserve.media.pictures.families.checkpoint import family_of
from cpuserve.serving.generation.batch import media_prompt
from cpuserve.serving.models.details import ModelDetails
from cpuserve.tokenizer.chat import ChatTemplate
from cpuserve.tokenizer.conversation import MediaPart
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.api.fakes import Api, error_of
from tests.api.tools import says
from tests.helpers.drawn import data_url, png
from tests.helpers.tiny import copy_of, tiny_model

GEMMA = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content %}"
    "{% if first is not string %}{% set first = first[0].text %}{% endif %}"
    "{% set rest = messages[1:] %}{% else %}"
    "{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if loop.first and first %}{{ first + '\n\n' }}{% endif %}"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% elif part.type == 'text' %}"
    "{{ part.text | trim }}{% endif %}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
QWEN = (
    "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% for part in content %}{% if part.type == 'image' or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ show(m.content) }}\n</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
    "{{ show(m.content or '') }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MEAN = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
VISION = {"image_size": 32, "patch_size": 8}
KINDS = {
    "gemma3": (
        GEMMA,
        [
            *("<start_of_turn>", "<end_of_turn>"),
            *("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        ],
        {"mm_tokens_per_image": 4, "vision_config": VISION},
        {**MEAN, "size": {"height": 32, "width": 32}},
    ),
    "qwen3_vl": (
        QWEN,
        ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"],
        {"vision_config": {"patch_size": 8}},
        {**MEAN, "patch_size": 8, "merge_size": 2}
        | {"size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}},
    ),
    # Its templates write a text that is no token.
    "aya_vision": (
        QWEN.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>"),
        ["<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>"],
        {"downsample_factor": 2, "vision_config": VISION},
        {**MEAN, "size": {"height": 32, "width": 32}},
    ),
}
WHOLE = {"aya_vision": {"img_size": 32, "patch_size": 16}}
# What is in a prompt for a picture of 32 x 32 pixels, and how a turn of the user is written.
SHOWN = {
    "gemma3": "\n\n<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>\n\n",
    "qwen3_vl": "<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>",
    "aya_vision": "<|START_OF_IMG|>TILE_GLOBAL" + "<|IMG_PATCH|>" * 4 + "<|END_OF_IMG|>",
}
TURN = {
    "gemma3": "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",
    **dict.fromkeys(
        ("qwen3_vl", "aya_vision"), "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    ),
}


@functools.cache
def folder(kind):
    """A tiny checkpoint with the tokens and the files of a kind of model."""
    template, names, config, processor = KINDS[kind]
    path = copy_of(tiny_model("llama"), kind)
    core = Core.from_file(str(path / "tokenizer.json"))
    core.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    core.save(str(path / "tokenizer.json"))
    found = json.loads((path / "tokenizer_config.json").read_text())
    found.pop("added_tokens_decoder", None)
    (path / "tokenizer_config.json").write_text(json.dumps({**found, "chat_template": template}))
    (path / "chat_template.jinja").unlink(missing_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": kind, **config}))
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    (path / "processor_config.json").write_text(json.dumps(WHOLE.get(kind, {})))
    return path


@functools.cache
def tokenizer(kind):
    return Tokenizer.load(folder(kind))


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def api(kind):
    made = Api(says("Fine."))
    made.engine.info.update(kv_tokens=2048, max_model_len=2048, media_rows={"image": 256})
    made.context.max_model_len = 2048
    made.context.details = ModelDetails(path=str(folder(kind)))
    made.context.set_ready(tokenizer(kind), ChatTemplate(KINDS[kind][0], tokenizer(kind)))
    assert made.context.media is not None
    return made


def image(data=None):
    return {"type": "image_url", "image_url": {"url": data_url(data or png(32, 32))}}


# How users of a family write a picture in a prompt without a template.
RAW = {
    "gemma3": "<start_of_image>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "aya_vision": "<image>",
}


def test_a_prompt_without_a_template_is_that_of_the_processor(api, kind):
    reader, encode = api.context.media, tokenizer(kind).encode
    part = MediaPart(
        kind="image", type="image", noun="a picture", where="prompts[0]", content=png(32, 32)
    )
    ids = encode(reader.processed(f"hello{RAW[kind]}world", [part]), add_special_tokens=False)
    prompt = media_prompt(api.context, ids, [part], {}, None)
    shown = tokenizer(kind).decode(prompt.ids, skip_special_tokens=False)
    assert shown == f"hello{SHOWN[kind]}world"
    if kind != "aya_vision":  # its <image> is no token
        plain = encode(f"hello{RAW[kind]}world", add_special_tokens=False)
        prompt = media_prompt(api.context, reader.processed_ids(plain), [part], {}, None)
        assert tokenizer(kind).decode(prompt.ids, skip_special_tokens=False) == shown


def text(words):
    return {"type": "text", "text": words}


def prompt_of(api, kind):
    return tokenizer(kind).decode(api.engine.asked[-1][0], skip_special_tokens=False)


def check(api, kind, count):
    """The spans of the pictures are all placeholders of the prompt."""
    ids, pictures = api.engine.asked[-1][0], api.engine.media[-1]
    assert len(pictures) == count
    placed = [at for each in pictures for begin, n in each.spans for at in range(begin, begin + n)]
    placeholder = tokenizer(kind).token_id(family_of(folder(kind)).placeholder)
    assert placed == [at for at, token in enumerate(ids) if token == placeholder]
    assert all(each.num_rows == 4 for each in pictures)


@pytest.mark.parametrize("place", ["first", "last", "between", "alone", "two"])
def test_the_prompt_is_that_of_the_template(api, kind, place):
    parts = {
        "first": [image(), text("look")],
        "last": [text("look"), image()],
        "between": [text("look"), image(), text("here")],
        "alone": [image()],
        "two": [image(), image(png(32, 32, seed=1)), text("look")],
    }[place]
    assert api.chat(parts).status_code == 200
    shown = "".join(SHOWN[kind] if each["type"] == "image_url" else each["text"] for each in parts)
    assert prompt_of(api, kind) == TURN[kind].format(shown)
    check(api, kind, sum(each["type"] == "image_url" for each in parts))


def test_a_picture_of_the_turn_before_stays_in_the_prompt(api, kind):
    turns = [
        {"role": "user", "content": [image(), text("look")]},
        {"role": "assistant", "content": "I see"},
        {"role": "user", "content": [text("and this?"), image(png(32, 32, seed=2))]},
    ]
    assert api.chat(messages=turns).status_code == 200
    check(api, kind, 2)
    assert prompt_of(api, kind).count(SHOWN[kind]) == 2


def test_markers_that_a_user_types_are_plain_text(api, kind):
    said = " ".join(["a", *KINDS[kind][1], "b"])
    assert api.chat([text(said)]).status_code == 200
    assert prompt_of(api, kind) == TURN[kind].format(said)
    ids = set(map(tokenizer(kind).token_id, KINDS[kind][1][-3:]))
    assert not ids & set(api.engine.asked[-1][0])
    assert api.chat([text(said), image(), text(said)]).status_code == 200
    check(api, kind, 1)
    assert prompt_of(api, kind) == TURN[kind].format(f"{said}{SHOWN[kind]}{said}")


def test_a_picture_in_the_result_of_a_tool(api, kind):
    call = {"id": "c1", "type": "function", "function": {"name": "see", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [text("done"), image()]},
    ]
    response = api.chat(messages=turns)
    if kind == "gemma3":  # its template has no results of tools, with pictures or without
        assert "must alternate user/assistant" in error_of(response)["message"]
        return
    assert response.status_code == 200, response.text
    check(api, kind, 1)
    assert f"<tool_response>\ndone{SHOWN[kind]}\n</tool_response>" in prompt_of(api, kind)


def test_a_plain_prompt_of_llamacpp_has_the_texts_around_a_picture(api, kind):
    prompt = {
        "prompt_string": TURN[kind].format("look <__media__>"),
        "multimodal_data": [base64.b64encode(png(32, 32)).decode()],
    }
    assert api.post("/completion", prompt=prompt, n_predict=2).status_code == 200
    check(api, kind, 1)
    assert prompt_of(api, kind).endswith(TURN[kind].format(f"look {SHOWN[kind]}"))


@pytest.mark.parametrize("kind", ["aya_vision"])
def test_what_a_template_writes_is_no_picture_if_a_user_types_it_twice(api, kind):
    assert api.chat([text("an <image> or <image> here "), image()]).status_code == 200
    check(api, kind, 1)
    said = f"an <image> or <image> here \n{SHOWN[kind]}"
    assert prompt_of(api, kind) == TURN[kind].format(said), "the picture has a line of its own"


# The ways in which users of a family write the place of a picture in the text of a turn.
PLACES = [
    *((kind, written) for kind, written in RAW.items()),
    ("qwen3_vl", "<|image_pad|>"),
    ("aya_vision", "<|IMG_PATCH|>"),
]


@pytest.mark.parametrize(("kind", "written"), PLACES)
def test_a_picture_goes_where_the_user_has_written_its_marker(api, kind, written):
    assert api.chat([image(), text(f"look{written}here")]).status_code == 200
    check(api, kind, 1)
    assert prompt_of(api, kind) == TURN[kind].format(f"look{SHOWN[kind]}here")
    second = image(png(32, 32, seed=1))
    parts = [image(), text(f"{written}one"), second, text(f"two{written}")]
    assert api.chat(parts).status_code == 200
    check(api, kind, 2)
    shown = SHOWN[kind]
    assert prompt_of(api, kind).replace("\ntwo", "two") == TURN[kind].format(
        f"{shown}onetwo{shown}"
    )
    digests = [each.digest for each in api.engine.media[-1]]
    assert api.chat([image(), second]).status_code == 200
    assert [each.digest for each in api.engine.media[-1]] == digests, "in the order of the parts"


@pytest.mark.parametrize(("kind", "written"), PLACES)
def test_more_markers_than_pictures_are_text(api, kind, written):
    said = f"look{written}here{written}"
    assert api.chat([image(), text(said)]).status_code == 200
    check(api, kind, 1)
    joined = prompt_of(api, kind).replace(f"{SHOWN[kind]}\n", SHOWN[kind])
    assert joined == TURN[kind].format(f"{SHOWN[kind]}{said}")


@pytest.mark.parametrize("kind", ["qwen3_vl"])
def test_a_template_of_texts_gives_no_line_about_a_picture_that_the_user_placed(api, kind):
    texts = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    api.context.set_ready(
        tokenizer(kind), ChatTemplate(texts, tokenizer(kind), parses_messages=True)
    )
    assert api.chat([image(), text("<|image_pad|>\nlook")]).status_code == 200
    check(api, kind, 1)
    assert "left out" not in prompt_of(api, kind)
