"""A model of images and text in an engine process: pictures asked for, encoded once, equal bits."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cpuserve import LLM
from cpuserve.config.load import Given, load_options
from cpuserve.engine.ipc import AddRequest
from cpuserve.engine.replicas import ReplicaClient
from cpuserve.prepare import prepare
from cpuserve.sampling.params import SamplingParams
from cpuserve.serving.calls.call import Prompt
from cpuserve.serving.generation.batch import BatchItem, run_batch
from cpuserve.serving.generation.fan_out import sequences_of
from tests.helpers.depth import deep_but
from tests.helpers.dots_ocr import DOTS_OCR
from tests.helpers.media_items import picture_item
from tests.helpers.patience import PATIENCE_S
from tests.helpers.pictures import (
    AYA,
    BORDERED,
    CANVAS_MODELS,
    GEMMA3,
    GEMMA4,
    GRANITE_FINE,
    GRID_MODELS,
    IMAGE_ID,
    KIMI,
    LLAVA_NEXT,
    ONEVISION,
    PIXTRAL_12B,
    QIANFAN,
    UNIFIED,
    UNMERGED,
    canvas_family,
    canvas_inputs,
    grid_inputs,
    name_of,
    patches_of,
    pixels_of,
    random_grid,
    random_tiles,
    write_grid_model,
    write_pixtral_12b,
    write_tower_model,
)
from tests.helpers.tiny import tiny_model

SIDE, MERGE = 8, 2
ROWS = (SIDE // MERGE) ** 2
BLOCK = 32
TOKENS = 8


NEXT_SIDE, NEXT_SIZE = 3, (47, 40)  # patches of a tile of CANVAS_MODELS, and a picture of 5 tiles
NAMES = ("SmolVLM", "Qwen2_5_VL", "Qwen3VL", "GlmOcr", "Gemma3", "GraniteDocling", "InternVL")
MODELS = [
    *(f"{name}ForConditionalGeneration" for name in NAMES),
    *(
        GEMMA4,
        GRANITE_FINE,
        QIANFAN,
        AYA,
        LLAVA_NEXT,
        ONEVISION,
        *BORDERED,
        DOTS_OCR,
        KIMI,
        *UNMERGED,
    ),
]
# One of each kind: tiles, pictures of any size, a mask within pictures, a canvas.
FEW = (MODELS[0], MODELS[2], GEMMA4, ONEVISION)


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    path, name = tmp_path_factory.mktemp("vision"), request.param
    if name == PIXTRAL_12B:
        theirs = write_pixtral_12b(path)
    elif name in GRID_MODELS:
        theirs = write_grid_model(f"{GEMMA4} whole" if name == GEMMA4 else name, path)
    else:
        side, merge = (NEXT_SIDE, 1) if name in CANVAS_MODELS else (SIDE, MERGE)
        side, merge = (SIDE // MERGE, 1) if name in BORDERED else (side, merge)
        theirs = write_tower_model(name, path, side=side, merge=merge)
    for file in tiny_model("llama").glob("tokenizer*"):
        shutil.copy(file, path)
    return path, theirs


class Question:
    """A prompt: text, a picture of `count` tiles in two runs of placeholders, and text again.

    For a model that reads pictures of any size, the picture is one tile in one run; for
    CANVAS_MODELS it is the whole picture and the tiles of its canvas, in one run.
    """

    def __init__(self, theirs, seed, count=4):
        self.architecture = name_of(theirs)
        self.whole = self.architecture in (*GRID_MODELS, PIXTRAL_12B)
        before = np.random.default_rng(1).integers(10, 380, 40).tolist()
        self.asked, lines, self.merge = [], (), MERGE
        if self.architecture in CANVAS_MODELS:
            layout = canvas_family(theirs).layout(*NEXT_SIZE)
            self.tiles, self.merge = random_tiles(len(layout.tiles), NEXT_SIDE, seed=seed), 1
            runs, tiles, lines = [layout.rows], layout.tiles, layout.lines
        elif self.whole:
            # A model that merges no patches has as many rows here.
            self.merge = 1 if self.architecture in UNMERGED else MERGE
            side = SIDE // MERGE * self.merge
            self.tiles = random_grid(side, count * side, seed=seed)
            runs, tiles = [ROWS * count], [(side, count * side)]
        else:
            self.merge = 1 if self.architecture in BORDERED else MERGE
            side = SIDE // MERGE * self.merge
            self.tiles = random_tiles(count, side, seed=seed)
            runs, tiles = [ROWS, ROWS * (count - 1)], [(side, side)] * count
        self.ids, spans = before, []
        for number, rows in enumerate(runs):
            self.ids += [77] * (number > 0)
            spans.append((len(self.ids), rows))
            self.ids += [IMAGE_ID] * rows
        self.ids += range(100, 140)  # so few that layers with a window of 24 see the picture
        self.data = patches_of(self.tiles, self.merge).tobytes()
        digest = hashlib.sha256(self.data).digest()
        self.pictures = [picture_item(digest, spans, list(tiles), lines=list(lines))]

    def inputs(self, ids):
        """The arguments of transformers' model for these tokens."""
        tokens = torch.tensor([ids])
        kinds, given = (tokens == IMAGE_ID).int(), {"input_ids": tokens}
        if self.architecture in CANVAS_MODELS:
            return {**given, **canvas_inputs([self.tiles], [NEXT_SIZE])}
        if self.whole:
            more = {"use_cache": False, **grid_inputs([self.tiles], self.architecture)}
            if self.architecture != PIXTRAL_12B:
                more["mm_token_type_ids"] = kinds
            return {**given, **more}
        more = {"token_type_ids": kinds} if self.architecture == GEMMA3 else {}
        return {**given, **pixels_of(self.tiles, self.architecture), **more}

    async def payload_of(self, index):
        self.asked.append(index)
        return self.data

    @property
    def request(self):
        params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=2, ignore_eos=True)
        return AddRequest.of(self.ids, params, media=self.pictures)

    async def answered_in(self, client):
        return await answer(client, self.request, self.payload_of)


def answered_by_transformers(theirs, question):
    ids = list(question.ids)
    with torch.inference_mode():
        for _ in range(TOKENS):
            logits = theirs(**question.inputs(ids)).logits[0, -1]
            ids.append(int(logits.argmax()))
    return ids[len(question.ids) :]


def with_engine(path, body, **given):
    """Run `body(client)` with a process that runs the model."""
    given = {"model": str(path), "max_model_len": "512", "dtype": "float32", **given}
    flags = {name: Given(f"--{name}", "flag", value) for name, value in given.items()}
    config = prepare(load_options(flags, environ={})).resolved.config

    async def main():
        client = ReplicaClient.spawn([config])
        try:
            await client.wait_ready()
            # A body has up to a dozen responses; one limit for all of them is a limit of speed.
            return await asyncio.wait_for(body(client), 4 * PATIENCE_S)
        finally:
            await client.close()

    return asyncio.run(main())


async def answer(client, request, payload_of=None):
    """(tokens, logprobs, cached tokens) of a response."""
    tokens, scores, cached = [], [], 0
    async for output in client.generate(request, payload_of=payload_of):
        assert not output.error, output.error
        tokens += output.tokens
        scores += [(row.logprob, row.top) for row in output.logprobs or ()]
        cached = cached or output.cached_tokens
    return tokens, scores, cached


@pytest.fixture(scope="module")
def alone(model):
    """What one process answers, one question after the other, and what it counts meanwhile."""
    _, theirs = model
    facts = SimpleNamespace(one=Question(theirs, 1), other=Question(theirs, 2))

    async def body(client):
        facts.first = await facts.one.answered_in(client)
        assert facts.one.asked == [0]
        facts.again = await facts.one.answered_in(client)
        facts.encoded = client.stats.media_queries
        facts.second = await facts.other.answered_in(client)
        assert await client.ask("check") == {"ok": True}
        facts.zeroth = await Question(theirs, 0).answered_in(client)

    with_engine(model[0], body, max_num_batched_tokens="512")
    return facts


def test_a_picture_is_seen_once_and_never_taken_for_another(model, alone):
    _, theirs = model
    one, other = alone.one, alone.other
    first, again, second = alone.first, alone.again, alone.second
    assert (first[0], first[2]) == (answered_by_transformers(theirs, one), 0)
    assert again[:2] == first[:2]
    assert again[2] == (len(one.ids) - 1) // BLOCK * BLOCK, "0 tokens are recomputed"
    assert one.asked == [0], "0 pictures are decoded"
    assert alone.encoded == 1, "0 pictures are encoded"
    wanted = answered_by_transformers(theirs, other)
    assert (second[0], second[2]) == (wanted, BLOCK), "only the text is shared"
    assert second[1] != first[1], "the likelihoods are those of the other picture"


def answers_among_others(model, **given):
    """The tokens and logprobs of three questions that share short steps with prompts of text."""
    path, theirs = model
    texts = [list(range(20 + n, 120 + n)) for n in range(4)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    async def among_others(client):
        others = [asyncio.create_task(answer(client, AddRequest.of(ids, params))) for ids in texts]
        asked = [Question(theirs, n) for n in range(3)]
        answers = await asyncio.gather(*(question.answered_in(client) for question in asked))
        await asyncio.gather(*others)
        return answers

    # A step of Gemma 4 must have room for the 70 tokens of a picture.
    tokens = "128" if name_of(theirs) in (GEMMA4, UNIFIED) else "64"
    answers = with_engine(path, among_others, max_num_batched_tokens=tokens, **given)
    return [tokens_and_logprobs for *tokens_and_logprobs, _ in answers]


def test_bits_do_not_depend_on_the_batch(model, alone):
    wanted = [list(one[:2]) for one in (alone.zeroth, alone.first, alone.second)]
    assert answers_among_others(model) == wanted


@pytest.mark.parametrize("model", deep_but(FEW, MODELS), indirect=True)
def test_bits_do_not_depend_on_the_ranks(model, alone):
    wanted = [list(one[:2]) for one in (alone.zeroth, alone.first, alone.second)]
    assert answers_among_others(model, tensor_parallel_size="2") == wanted


@pytest.mark.parametrize("model", deep_but(FEW, MODELS), indirect=True)
def test_an_engine_on_a_thread_of_this_process_gets_the_patches_that_it_asks_for(model):
    path, theirs = model
    questions = [Question(theirs, n) for n in (1, 2, 1)]
    llm = LLM(str(path), dtype="float32", max_model_len=512, max_num_batched_tokens=128)
    items = []
    for question in questions:
        prompt = Prompt(question.ids, media=question.pictures, payload_of=question.payload_of)
        items.append(BatchItem(sequences_of(prompt, question.request.params)))
    run_batch(llm._client, llm._context, items, lambda *_: None)
    for question, item in zip(questions, items, strict=True):
        assert item.choices[0].token_ids == answered_by_transformers(theirs, question)
    assert sum(len(question.asked) for question in questions) == 2, "one is there twice"
