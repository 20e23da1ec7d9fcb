"""LLaVA-NeXT in an engine process: the rows of a picture are lines, with a row for each end."""

from __future__ import annotations

import hashlib
import shutil

import pytest
import torch

from cpuserve.engine.ipc import AddRequest
from cpuserve.media.pictures.families.checkpoint import family_of
from cpuserve.sampling.params import SamplingParams
from tests.engine.test_pictures_end_to_end import answer, with_engine
from tests.helpers.drawn import picture
from tests.helpers.media_items import picture_item
from tests.helpers.pictures import IMAGE_ID, LLAVA_NEXT, canvas_inputs, write_tower_model
from tests.helpers.tiny import tiny_model

TOKENS, SIDE = 8, 3
SIZES = [(100, 37), (30, 70), (47, 40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("next")
    theirs = write_tower_model(LLAVA_NEXT, path, side=SIDE, merge=1)
    for file in tiny_model("llama").glob("tokenizer*"):
        shutil.copy(file, path)
    return path, theirs


class Question:
    """A prompt with a picture of this size, which the family of the checkpoint prepares."""

    def __init__(self, path, size):
        family, self.size, self.asked = family_of(path), size, 0
        layout, image = family.layout(*size), picture(*size, seed=size[0])
        patches = family.patches(image)
        side = SIDE * family.patch
        cut = patches.reshape(-1, SIDE, SIDE, family.patch, family.patch, 3).swapaxes(2, 3)
        self.tiles, self.data = cut.reshape(-1, side, side, 3), patches.tobytes()
        self.ids = [*range(20, 60), *[IMAGE_ID] * layout.rows, *range(100, 130)]
        lines, digest = list(layout.lines), hashlib.sha256(self.data).digest()
        self.pictures = [picture_item(digest, [(40, layout.rows)], list(layout.tiles), lines=lines)]

    async def payload_of(self, _index):
        self.asked += 1
        return self.data

    @property
    def request(self):
        params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=2, ignore_eos=True)
        return AddRequest.of(self.ids, params, media=self.pictures)

    async def answered_in(self, client):
        return await answer(client, self.request, self.payload_of)

    def answered_by(self, theirs):
        ids, given = list(self.ids), canvas_inputs([self.tiles], [self.size])
        with torch.inference_mode():
            for _ in range(TOKENS):
                logits = theirs(input_ids=torch.tensor([ids]), use_cache=False, **given).logits
                ids.append(int(logits[0, -1].argmax()))
        return ids[len(self.ids) :]


@pytest.mark.parametrize(
    "given", [{}, {"tensor_parallel_size": "2", "max_num_batched_tokens": "64"}]
)
def test_answers_are_those_of_transformers_and_pictures_are_encoded_once(model, given, tmp_path):
    path, theirs = model
    questions = [Question(path, size) for size in SIZES]

    async def body(client):
        found = [await each.answered_in(client) for each in questions]
        for question, (tokens, scores, _) in zip(questions, found, strict=True):
            assert tokens == question.answered_by(theirs), question.size
            again = await question.answered_in(client)
            assert again[:2] == (tokens, scores)
            assert again[2] > 0
            assert question.asked == 1
        return [each[:2] for each in found]

    # The second time, the rows come from the disk.
    folder = {"prefix_cache_dir": str(tmp_path / "kv"), **given}
    found = with_engine(path, body, **folder)

    async def once_more(client):
        others = [Question(path, size) for size in SIZES]
        answers = [await each.answered_in(client) for each in others]
        return [each[:2] for each in answers], sum(each.asked for each in others)

    again, asked = with_engine(path, once_more, **folder)
    assert again == found
    assert asked == 0
