"""A model of pictures and text behind a whole server: the tokens of transformers."""

import json
import urllib.error

import numpy as np
import pytest
import torch

from cpuserve.media.families.table import family_of
from tests.api.sees import IMAGE, tokenizer, write_seeing_model
from tests.helpers.drawn import data_url, document, picture, png, saved
from tests.helpers.pictures import DEVIATION, MEAN, PATCH, SCALE
from tests.helpers.served import running_server

SIDE, MERGE, TOKENS = 4, 2, 8
pytestmark = pytest.mark.deep
OPTIONS = ("--served-model-name", "m", "--dtype", "float32", "--max-model-len", "512")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(the folder of a tiny SmolVLM, the model of transformers)."""
    path = tmp_path_factory.mktemp("sees")
    return path, write_seeing_model(path, side=SIDE, merge=MERGE)


@pytest.fixture(scope="module")
def server(model):
    with running_server(model[0], *OPTIONS) as made:
        yield made


def ask(server, parts, **more):
    turn = [{"role": "user", "content": parts}]
    body = {"messages": turn, "max_tokens": TOKENS, "return_token_ids": True, **more}
    return server.post("/v1/chat/completions", model="m", temperature=0, **body)


def image(data):
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def pixels(family, images):
    """The pixels of all tiles as the tower of transformers gets them: [1, tiles, 3, side, side]."""
    patches = np.concatenate([family.patches(each) for each in images])
    blocks = SIDE // MERGE
    tiles = patches.reshape(-1, blocks, blocks, MERGE, MERGE, PATCH, PATCH, 3)
    side = SIDE * PATCH
    tiles = tiles.transpose(0, 1, 3, 5, 2, 4, 6, 7).reshape(-1, side, side, 3)
    numbers = torch.from_numpy(tiles).float() * SCALE
    return ((numbers - torch.tensor(MEAN)) / torch.tensor(DEVIATION)).permute(0, 3, 1, 2)[None]


def wanted(model, ids, images):
    """The tokens that transformers chooses after this prompt."""
    path, theirs = model
    made = {}
    if images:
        made["pixel_values"] = pixels(family_of(path), images)
    found = theirs.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=TOKENS,
        do_sample=False,
        **made,
    )
    return found[0, len(ids) :].tolist()


def check(server, model, parts, images):
    reply = ask(server, parts, ignore_eos=True)
    ids, tokens = reply["prompt_token_ids"], reply["choices"][0]["token_ids"]
    marker = tokenizer().token_id(IMAGE)
    rows = sum(family_of(model[0]).layout(*each.size).rows for each in images)
    assert ids.count(marker) == rows
    theirs = wanted(model, ids, images)
    assert tokens[: len(theirs)] == theirs
    return tokens


def test_pictures_are_read_as_by_transformers(server, model):
    text = {"type": "text", "text": "what is this?"}
    one = picture(100, 60)
    several = [picture(30, 70, seed=1), picture(128, 128, seed=2), picture(20, 20, seed=3)]
    tokens = [
        check(server, model, [image(saved(one)), text], [one]),
        check(server, model, [text, *(image(saved(each)) for each in several)], several),
        check(server, model, [text], []),
        check(server, model, [image(saved(several[0])), text], [several[0]]),
    ]
    assert len({tuple(each) for each in tokens}) > 1


def test_a_served_model_says_that_it_reads_pictures_and_refuses_bad_ones(server, model):
    assert json.loads(server.get("/props"))["modalities"]["vision"] is True
    for data, why in ((b"hello", "is no picture"), (png(300, 300)[:9000], "is damaged")):
        with pytest.raises(urllib.error.HTTPError) as caught:
            ask(server, [image(data)])
        assert caught.value.code == 400
        assert why in json.loads(caught.value.read())["error"]["message"]
    file = {"filename": "a.pdf", "file_data": data_url(document(2), "application/pdf")}
    reply = ask(server, [{"type": "file", "file": file}])
    rows = 2 * family_of(model[0]).layout(99, 128).rows
    assert reply["prompt_token_ids"].count(tokenizer().token_id(IMAGE)) == rows
