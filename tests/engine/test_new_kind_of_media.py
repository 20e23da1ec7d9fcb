"""A second kind of media needs a reader, a tower and a row of KINDS, and no line elsewhere.

The kind is the toy of tests/helpers/tones.py. Its items go from a content part of a request to the
rows that the model sees.
"""

import base64
from array import array

import pytest

from cpuserve.engine.ipc import AddRequest, MediaPayload
from cpuserve.media.kinds import KINDS
from cpuserve.sampling.params import SamplingParams
from tests.api.sees import picture_api
from tests.helpers import tones
from tests.helpers.drawn import png
from tests.helpers.fake_executor import PICTURED, fake_config, fake_core, reference

PLACEHOLDER = 9


@pytest.fixture
def api(monkeypatch):
    monkeypatch.setitem(KINDS, tones.KIND, tones.ROW)
    api = picture_api(others={tones.KIND: tones.ROW.rules(None, 0)})
    api.engine.info["media_rows"]["tone"] = 16
    return api


def sound(data):
    encoded = base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}}


def image():
    url = "data:image/png;base64," + base64.b64encode(png(60, 60)).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def said(api, *content):
    return api.chat(messages=[{"role": "user", "content": list(content)}])


def test_an_item_goes_from_a_content_part_to_the_rows_that_the_model_sees(api):
    numbers = [PICTURED + n for n in (440, 880, 220)]
    data = ",".join(map(str, numbers)).encode()
    response = said(api, {"type": "text", "text": "What is it?"}, sound(data))
    assert response.status_code == 200, response.text
    details = response.json()["usage"]["prompt_tokens_details"]
    assert details["multimodal_tokens"] == {"tone": 3}
    (item,) = api.engine.media[-1]
    assert (item.kind, item.num_rows, item.work, item.form) == ("tone", 3, 3, b"in Hz")

    tower = tones.ToneTower()
    core = fake_core(fake_config(media_rows=8), towers={tones.KIND: tower})
    begin = item.spans[0][0]
    ids = [*range(begin), *[PLACEHOLDER] * 3, 4, 5]
    params = SamplingParams(seed=1, max_tokens=6)
    core.handle(AddRequest(0, array("i", ids).tobytes(), params, 0.0, media=[item]))
    tokens = []
    while core.has_work:
        outputs = core.step().outputs
        for output in outputs:
            tokens += output.tokens
            for index in output.wants:
                core.handle(MediaPayload(0, index, api.engine.encoded[item.digest]))
        core.after_sending()
        core.scheduler.check_invariants()
    ids[begin : begin + 3] = numbers
    assert tokens == reference(ids, params, 1, 6)
    assert tower.encoded == [data]


def test_items_of_two_kinds_are_in_one_prompt_in_their_order(api):
    assert said(api, sound(b"1,2"), image(), sound(b"3")).status_code == 200
    assert [item.kind for item in api.engine.media[-1]] == ["tone", "image", "tone"]
    ends = [begin + count for item in api.engine.media[-1] for begin, count in item.spans]
    assert ends == sorted(ends)


def test_limits_and_refusals_have_the_words_of_the_kind(api):
    response = said(api, sound(b"1"), sound(b"2"), sound(b"3"))
    assert response.status_code == 400
    assert "3 tones or more: at most 2 are accepted" in response.json()["error"]["message"]
    response = said(api, sound(b"loud"))
    assert response.status_code == 400
    assert "is no tone" in response.json()["error"]["message"]
