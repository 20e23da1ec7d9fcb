"""LLM with pictures: images of Pillow, bytes, paths and URLs, as in the API and as transformers."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import InvalidRequest
from cpuserve.media.decoding.formats import rgb
from cpuserve.offline.arguments import picture_part
from tests.api.sees import write_served_model
from tests.helpers.drawn import data_url, document, picture, saved
from tests.helpers.mmproj import write_ggufs
from tests.helpers.tiny import tiny_model

TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
QUESTION = "what is this?"
pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_served_model(tmp_path_factory.mktemp("sees"))


@pytest.fixture(scope="module")
def llm(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("allowed")
    options = {"limit_mm_per_prompt": {"image": 4}, "allowed_local_media_path": str(path)}
    with LLM(str(model.path), dtype="float32", max_model_len=512, **options) as made:
        made.allowed_here = path
        yield made


def turn(*parts):
    return [{"role": "user", "content": list(parts)}]


def text(words):
    return {"type": "text", "text": words}


def ids_of(outputs):
    return [(each.prompt_token_ids, list(each.outputs[0].token_ids)) for each in outputs]


def test_chats_have_pictures_in_each_form(llm, model, tmp_path):
    image = picture(100, 60)
    file = tmp_path / "a.png"
    image.save(file)
    allowed = llm.allowed_here / "b.png"
    image.save(allowed)
    forms = [
        {"type": "image_pil", "image_pil": image},
        {"type": "image", "image": image},
        {"type": "image", "image": file},
        {"type": "image", "path": str(file)},
        {"type": "image", "image": saved(image)},
        {"type": "image_url", "image_url": {"url": data_url(saved(image)), "detail": "high"}},
        {"type": "image_url", "image_url": f"file://{allowed}"},
        {"type": "input_image", "image_url": data_url(saved(image))},
    ]
    wanted = model.answer([image, QUESTION], TOKENS)
    found = llm.chat([turn(form, text(QUESTION)) for form in forms], GREEDY, use_tqdm=False)
    assert ids_of(found) == [wanted] * len(forms)
    (again,) = llm.chat(turn(forms[0], text(QUESTION)), GREEDY)
    assert ids_of([again]) == [wanted]
    assert again.num_cached_tokens > 0
    several = [picture(30, 70, seed=1), picture(20, 20, seed=3)]
    parts = [text(QUESTION), *({"type": "image", "image": each} for each in several)]
    assert ids_of(llm.chat(turn(*parts), GREEDY)) == [model.answer([QUESTION, *several], TOKENS)]
    low = llm.chat(turn({"type": "image", "image": image, "detail": "low"}), GREEDY)
    assert len(low[0].prompt_token_ids) < len(wanted[0])
    pages = {"type": "file", "file": {"file_data": data_url(document(2), "application/pdf")}}
    assert len(llm.chat(turn(pages), GREEDY)[0].outputs[0].token_ids) == TOKENS


def test_chats_with_a_gguf_file_have_the_pictures_of_its_mmproj_file(model, tmp_path):
    file, _ = write_ggufs(model.path, tmp_path)
    image = picture(100, 60)
    options = {"tokenizer": str(model.path), "dtype": "float32", "max_model_len": 512}
    with LLM(str(file), **options) as made:
        asked = turn({"type": "image", "image": image}, text(QUESTION))
        found = made.chat(asked, GREEDY, use_tqdm=False)
    assert ids_of(found) == [model.answer([image, QUESTION], TOKENS)]


def test_prompts_have_pictures_in_place_of_markers(llm, model):
    image, other = picture(100, 60), picture(30, 70, seed=1)
    prompt, tokens = model.answer([image, QUESTION], TOKENS)
    written = f"<|im_start|>User:<image>{QUESTION}<|im_end|>\nAssistant:"
    given = {"prompt": written, "multi_modal_data": {"image": image}}
    plain = llm.get_tokenizer().encode(written, add_special_tokens=False)
    as_ids = {"prompt_token_ids": plain, "multi_modal_data": {"image": [image]}}
    found = llm.generate([as_ids, "just text"], GREEDY, use_tqdm=False)
    assert ids_of(found)[0] == (prompt, tokens)
    # A text has the special tokens of the tokenizer as well.
    before = llm.get_tokenizer().encode("")
    (one,) = llm.generate(given, GREEDY)
    assert one.prompt == written
    assert one.prompt_token_ids == [*before, *prompt]
    llm.enqueue([{**as_ids, "multi_modal_data": {"image": other}}, as_ids], GREEDY)
    waited = llm.wait_for_completion()
    assert ids_of(waited) == [model.answer([other, QUESTION], TOKENS), (prompt, tokens)]
    small = {"size": {"longest_edge": 64}}
    for kwargs, own in ((small, {}), (None, {"mm_processor_kwargs": small})):
        (less,) = llm.generate({**as_ids, **own}, GREEDY, mm_processor_kwargs=kwargs)
        assert len(less.prompt_token_ids) < len(prompt)


def test_the_most_tokens_of_a_picture_are_an_argument(model):
    image = {"type": "image", "image": picture(200, 120)}
    options = {"dtype": "float32", "max_model_len": 512, "image_max_tokens": 4}
    with LLM(str(model.path), **options) as llm:
        more = [None, {"max_tokens": 1000}, {"size": {"longest_edge": 256}}]
        found = [
            llm.chat(turn(image), GREEDY, use_tqdm=False, mm_processor_kwargs=each)[0]
            for each in more
        ]
    sign = model.theirs.config.image_token_id
    assert [each.prompt_token_ids.count(sign) for each in found] == [4] * len(more)


def test_pictures_that_cannot_be_read_are_refused(llm, tmp_path):
    image = {"type": "image", "image": picture()}
    for parts, why in (
        ([{"type": "image", "image": b"hello"}], "is no picture that this server reads"),
        ([{"type": "image", "image": tmp_path / "none.png"}], r"none.png\) is no file"),
        ([{"type": "image", "image": 5}], r"content\[0\] is int: a picture must be"),
        ([{"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}], "nothing from"),
        ([{"type": "image_url", "image_url": f"file://{tmp_path}/a.png"}], "is not below the fol"),
        ([image] * 5, "at most 4 are accepted"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            llm.chat(turn(*parts), GREEDY)
    for more, why in (
        ({"multi_modal_data": {"audio": 1}}, "multi_modal_data must be"),
        ({"multi_modal_data": {"image": picture()}}, "a prompt has 0 markers for 1 pictures"),
        ({"multi_modal_uuids": {"image": "a"}}, "multi_modal_uuids"),
        (
            {"multi_modal_data": {"image": None}, "multi_modal_uuids": {"image": "a"}},
            "no picture is kept by a uuid",
        ),
    ):
        with pytest.raises(InvalidRequest, match=why):
            llm.generate({"prompt": "look", **more}, GREEDY)
    shown = {"prompt": "<image>", "multi_modal_data": {"image": picture()}}
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens is not possible"):
        llm.generate(shown, SamplingParams(truncate_prompt_tokens=5))
    with pytest.raises(InvalidRequest, match="max_pixels is no setting"):
        llm.generate(shown, GREEDY, mm_processor_kwargs={"max_pixels": 5})


def test_a_model_of_text_refuses_pictures():
    with LLM(str(tiny_model("llama")), max_model_len=256) as llm:
        with pytest.raises(InvalidRequest, match="this model reads text only"):
            llm.chat(turn({"type": "image", "image": picture()}), GREEDY)
        with pytest.raises(InvalidRequest, match="this model reads text only"):
            llm.generate({"prompt": "x", "multi_modal_data": {"image": picture()}}, GREEDY)


def test_prompts_have_arrays_and_ids_of_pictures(llm, model):
    import numpy as np

    image = picture(100, 60)
    array = np.asarray(image)
    wanted, _ = model.answer([image], TOKENS)
    written = llm.get_tokenizer().decode(wanted, skip_special_tokens=False)
    before = {"prompt": "<image>", "multi_modal_data": {"image": image}}
    forms = [
        {**before, "multi_modal_uuids": {"image": ["a"]}},
        {**before, "multi_modal_data": {"image": array}},
        {
            **before,
            "multi_modal_data": {"image": [array.transpose(2, 0, 1)], "video": [], "audio": None},
        },
    ]
    assert written
    (first,) = llm.generate(before, GREEDY, use_tqdm=False)
    for given in forms:
        (found,) = llm.generate(given, GREEDY, use_tqdm=False)
        assert ids_of([found]) == ids_of([first])


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((3,), "uint8"), ((9, 9, 5), "uint8"), ((9, 9, 3), "float32"), ((0, 9), "uint8")],
)
def test_an_array_that_is_no_picture_is_refused(llm, shape, kind):
    import numpy as np

    given = {"prompt": "<image>", "multi_modal_data": {"image": np.zeros(shape, kind)}}
    with pytest.raises(InvalidRequest, match="uint8"):
        llm.generate(given, GREEDY)


def test_a_beam_search_says_that_it_reads_no_pictures(llm):
    from cpuserve import BeamSearchParams

    given = {"prompt": "<image>", "multi_modal_data": {"image": picture()}}
    with pytest.raises(InvalidRequest, match="beam search"):
        llm.beam_search([given], BeamSearchParams(beam_width=2, max_tokens=4))
    with pytest.raises(InvalidRequest, match="multi_modal_uuids"):
        llm.generate({"prompt": "<image>", "multi_modal_uuids": {"image": ["a"]}}, GREEDY)


def pixels_of(given):
    """Return the pixels that the model reads of a picture of a program."""
    data = picture_part(given, "prompts[0]").read(1 << 20).data
    return np.asarray(rgb(Image.open(BytesIO(data))))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("mode", "kind"), [("RGB", "JPEG"), ("CMYK", "JPEG"), ("RGBA", "PNG"), ("RGB", "TIFF")]
)
def test_an_image_of_pillow_is_turned_as_its_file_is(mode, kind, orientation):
    """vllm-project/vllm#47566: its pixels went to the model as the camera had stored them."""
    pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), np.uint8)
    image = Image.fromarray(pixels).convert(mode)
    exif = image.getexif()
    exif[0x0112] = orientation
    file = BytesIO()
    image.save(file, kind, exif=exif)
    np.testing.assert_array_equal(pixels_of(Image.open(file)), pixels_of(file.getvalue()))


@pytest.mark.parametrize(("mode", "like"), [("La", "LA"), ("RGBa", "RGBA"), ("HSV", "RGB")])
def test_an_image_of_pillow_may_have_a_mode_that_no_file_has(mode, like):
    image = Image.new(like, (4, 4), 128 if like == "LA" else "red").convert(mode)
    np.testing.assert_array_equal(pixels_of(image), pixels_of(image.convert(like)))


def test_an_image_of_pillow_whose_file_is_cut_is_refused():
    file = BytesIO()
    Image.effect_noise((64, 64), 90).save(file, "PNG")
    with pytest.raises(InvalidRequest, match=r"prompts\[0\] cannot be read by Pillow"):
        picture_part(Image.open(BytesIO(file.getvalue()[:500])), "prompts[0]")
