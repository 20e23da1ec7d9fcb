"""A whole server of a small SmolVLM answers about a PNG as transformers does, from the bytes on."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from tests.api.sees import TEMPLATE, folder, write_seeing_model
from tests.helpers.drawn import data_url, picture, saved
from tests.helpers.pictures import DEVIATION, MEAN
from tests.helpers.served import running_server

# Tiles of 64 x 64 pixels in patches of 8 x 8, of which 16 become a row.
SIDE, MERGE, ROWS = 8, 4, 4
TOKENS = 12
BLOCK = 32
pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("sees")
    theirs = write_seeing_model(path, side=SIDE, merge=MERGE)
    settings = path / "preprocessor_config.json"
    found = json.loads(settings.read_text())
    settings.write_text(json.dumps({**found, "size": {"longest_edge": 256}, "resample": 1}))
    return path, theirs


def answer_of_transformers(theirs, image, question):
    """(tokens of the prompt, text of the greedy response)."""
    text = PreTrainedTokenizerFast(tokenizer_file=str(folder() / "tokenizer.json"))
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil(
            size={"longest_edge": 256},
            max_image_size={"longest_edge": SIDE * 8},
            resample=1,
            image_mean=MEAN,
            image_std=DEVIATION,
        ),
        text,
        image_seq_len=ROWS,
        chat_template=TEMPLATE,
    )
    parts = [{"type": "image"}, {"type": "text", "text": question}]
    rendered = processor.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
    )
    given = processor(text=rendered, images=[image], add_special_tokens=False, return_tensors="pt")
    ids = given.pop("input_ids")
    given.pop("attention_mask")
    count = ids.shape[1]
    with torch.inference_mode():
        for _ in range(TOKENS):
            last = theirs(input_ids=ids, **given).logits[0, -1]
            ids = torch.cat([ids, last.argmax().reshape(1, 1)], dim=1)
    return count, ids[0, count:].tolist()


def asked(client, image, question):
    url = {"type": "image_url", "image_url": {"url": data_url(saved(image))}}
    parts = [url, {"type": "text", "text": question}]
    return client.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": parts}],
        max_tokens=TOKENS,
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
    )


def test_answers_are_those_of_transformers_and_a_picture_is_seen_once(model):
    path, theirs = model
    question = "what is this, and why is it here? " * 3
    images = [picture(200, 120, seed=1), picture(200, 120, seed=2)]
    wanted = [answer_of_transformers(theirs, image, question) for image in images]
    assert wanted[0][1] != wanted[1][1], "the case itself"
    with running_server(path, "--dtype", "float32", "--max-model-len", "512") as client:

        def counted():
            names = "mm_cache_queries_total", "prefix_cache_hits_total"
            return np.array([client.metric(name) for name in names])

        for image, (count, ids) in zip(images, wanted, strict=True):
            found = asked(client, image, question)
            assert found["usage"]["prompt_tokens"] == count
            assert found["choices"][0]["token_ids"] == ids
        before = counted()
        assert before[0] == 2
        for image, (_, ids) in zip(images, wanted, strict=True):
            assert asked(client, image, question)["choices"][0]["token_ids"] == ids
        encoded, cached = counted() - before
        assert encoded == 0
        assert cached == sum((count - 1) // BLOCK * BLOCK for count, _ in wanted)
