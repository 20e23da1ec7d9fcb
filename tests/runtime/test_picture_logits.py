"""Texts with pictures are as transformers' whole model computes them: logits and greedy tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cpuserve import _C
from cpuserve.core.media import Placeholders
from cpuserve.loader.gguf.parts import find_mmproj
from cpuserve.loader.load import open_checkpoint
from cpuserve.models import build_program, build_tower, spec_from_config
from cpuserve.program.pictures import KIND, PictureForm
from cpuserve.runtime.native import NativeExecutor
from cpuserve.runtime.torch_executor import TorchExecutor
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.slot import SlotRequest
from tests.helpers.depth import deep_but
from tests.helpers.fake_executor import fake_config
from tests.helpers.media_items import picture_item
from tests.helpers.mmproj import GGUF_TEXTS, GGUF_TOWERS, TEXTS, write_ggufs
from tests.helpers.pictures import (
    AYA,
    BORDERED,
    CANVAS_MODELS,
    GEMMA3,
    GRANITE,
    GRANITE_FINE,
    GRID_MODELS,
    IMAGE_ID,
    INTERNVL,
    INTERNVL_CHAT,
    LLAVA,
    LLAVA_NEXT,
    LLAVAS,
    ONEVISION,
    PATCH,
    PIXTRAL_12B,
    PIXTRALS,
    QIANFAN,
    UNMERGED,
    canvas_family,
    canvas_inputs,
    grid_inputs,
    name_of,
    patches_of,
    pixels_of,
    placed_rows,
    random_grid,
    random_tiles,
    write_grid_model,
    write_pixtral_12b,
    write_tower_model,
)
from tests.helpers.rounding import program_bound
from tests.helpers.steps import Sequence, step

SIDE, MERGE, ROWS = 6, 2, 9
# Side and merge of other models. Those that merge nothing have as many rows; Granite-Docling's fine
# route has more.
SIZES = dict.fromkeys((*LLAVAS, *BORDERED), (3, 1)) | {GRANITE_FINE: (8, 2)}
# For CANVAS_MODELS: the tiles of a picture that stands for n tiles, and a size with so many tiles.
CANVASES = {1: 3, 2: 4, 3: 5, 4: 5}
NEXT_SIZES = {3: (20, 40), 4: (30, 70), 5: (47, 40)}
MEDIA = 128  # the rows of the buffer of encoded pictures
TOKENS = 32
# Each prompt as pieces: a number of tiles of one picture, or of tokens of text.
PROMPTS = {
    "one": [("text", 7), ("tiles", 1), ("text", 5)],
    "three": [("tiles", 2), ("text", 3), ("tiles", 1), ("text", 11), ("tiles", 4), ("text", 2)],
    "last": [("text", 20), ("tiles", 3)],
    "none": [("text", 40)],
}


TILES = [
    *("SmolVLMForConditionalGeneration", GEMMA3, GRANITE, GRANITE_FINE),
    *(INTERNVL, INTERNVL_CHAT, LLAVA, LLAVA_NEXT, ONEVISION, *BORDERED, AYA, QIANFAN),
]
ANY_SIZE = [*GRID_MODELS, PIXTRAL_12B]  # with pictures of any size
MODELS = [*TILES, *ANY_SIZE]


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures")
    return path, write_model(request.param, path)


@pytest.fixture(scope="module", params=TEXTS)
def gguf_model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures")
    theirs = write_model(
        request.param, path, GGUF_TEXTS.get(request.param), GGUF_TOWERS.get(request.param)
    )
    return write_ggufs(path, tmp_path_factory.mktemp("gguf"))[0], theirs


def write_model(architecture, path, text=None, tower=None):
    if architecture == PIXTRAL_12B:
        return write_pixtral_12b(path, text)
    if architecture in GRID_MODELS:
        return write_grid_model(architecture, path, text=text, tower=tower)
    side, merge = SIZES.get(architecture, (SIDE, MERGE))
    return write_tower_model(architecture, path, side=side, merge=merge, text=text)


def tile_of(theirs):
    """(patches of a side, rows) of a tile of a model."""
    side = np.max(theirs.config.vision_config.image_size) // PATCH
    return side, side**2 // SIZES.get(name_of(theirs), (SIDE, MERGE))[1] ** 2


def prompt_of(name, theirs):
    """The ids of a prompt, its pictures, and their bytes: tiles, or one tile of any size.

    theirs: the model; if it reads pictures of any size, a picture is one tile with the rows of n.
    """
    architecture = name_of(theirs)
    stream, ids, pictures, pixels = np.random.default_rng(3), [], [], []
    for kind, n in PROMPTS[name]:
        if kind == "text":
            ids += stream.integers(10, 380, n).tolist()
            continue
        if architecture in ANY_SIZE:
            side = SIDE // MERGE if architecture in UNMERGED else SIDE
            size = (side, side * n) if n != 2 else (side * n, side)
            pixels.append(random_grid(*size, seed=n))
            rows = ROWS
        else:
            side, rows = tile_of(theirs)
            if architecture in CANVAS_MODELS:
                layout = canvas_family(theirs).layout(*NEXT_SIZES[CANVASES[n]])
                pixels.append(random_tiles(len(layout.tiles), side, seed=n))
                spans = [(len(ids), layout.rows)]
                pictures.append(
                    picture_item(bytes(32), spans, layout.tiles, lines=list(layout.lines))
                )
                ids += [IMAGE_ID] * layout.rows
                continue
            pixels.append(random_tiles(n, side, seed=n))
        tiles = [(each.shape[0] // PATCH, each.shape[1] // PATCH) for each in pixels[-1]]
        pictures.append(picture_item(bytes(32), [(len(ids), rows * n)], tiles))
        ids += [IMAGE_ID] * (rows * n)
    return ids, pictures, pixels


def theirs_of(model, ids, pixels):
    """Logits of all tokens of a prompt with pictures and its response, from one pass."""
    architecture = name_of(model)
    whole = architecture in ANY_SIZE
    inputs = {}
    if pixels:
        if architecture in CANVAS_MODELS:
            inputs = canvas_inputs(pixels, [NEXT_SIZES[len(tiles)] for tiles in pixels])
        elif whole:
            inputs = grid_inputs(pixels, architecture)
        else:
            inputs = pixels_of(np.concatenate(pixels), architecture)
    kinds = torch.tensor([[int(token == IMAGE_ID) for token in ids]])
    more = {"mm_token_type_ids": kinds} if whole and architecture not in PIXTRALS else {}
    if architecture == GEMMA3:
        more = {"token_type_ids": kinds}
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([ids]), use_cache=False, **inputs, **more)
    return out.logits[0].numpy()


def uncut(ids, start, end):
    """The end of a chunk that has whole pictures: before the picture at `end`, or after it."""
    runs = [place for place in range(start, len(ids)) if ids[place] == IMAGE_ID]
    if end - 1 not in runs or end not in runs:
        return end
    begin = end
    while begin - 1 in runs:
        begin -= 1
    while end in runs:
        end += 1
    return begin if begin > start else end


class Ours:
    """An executor and its tower."""

    def __init__(self, path, kind, threads=1, team=None):
        found = find_mmproj(path) if path.is_file() else None
        checkpoint = open_checkpoint(path, found and str(found))
        self.spec = spec = spec_from_config(checkpoint.config)
        self.whole = bool(spec.tower.spans)  # whether a picture must be in one chunk
        self.program, self.tower_program = build_program(spec), build_tower(spec.tower)
        config = fake_config(
            max_num_batched_tokens=64,
            max_model_len=256,
            kv_blocks=16,
            state_slots=12 if self.program.states else 0,
            block_size=32,
            isa=_C.isa_levels()[-1],
            media_rows=MEDIA,
            threads=threads,
        )
        made = TorchExecutor if kind == "torch" else NativeExecutor
        arguments = (config, self.program, checkpoint.weights)
        more = {} if kind == "torch" else {"team": team}
        self.executor = made(*arguments, **more, tower=spec.tower)

    def run(self, prompt, pictures, pixels, chunk):
        """The greedy tokens after the prompt, which is computed in chunks, and their logprobs."""
        tiles = [tile for picture in pictures for tile in PictureForm.of(picture.form).tiles]
        placed, pictured = Placeholders(pictures), self.executor.towers[KIND]
        greedy = SamplingParams(temperature=0, max_tokens=None)
        self.executor.admit(0, SlotRequest(greedy, 0, prompt, [], []))
        if tiles:
            patches = np.concatenate([patches_of(each, self.spec.tower.merge) for each in pixels])
            encoded = self.executor.tower.encode(patches, tiles)
            encoded = placed_rows(encoded, pictures, self.executor.tower)
            self.executor.write_media(MEDIA - len(encoded), encoded)
        count, media = sum(picture.num_rows for picture in pictures), []
        for token in prompt:
            media.append(MEDIA - count if token == IMAGE_ID else -1)
            count -= token == IMAGE_ID
        states = 16 if self.program.states else 0
        sequence, logprobs = Sequence(0, list(prompt), list(range(12)), states), []
        while len(sequence.tokens) < len(prompt) + TOKENS:
            left = len(sequence.tokens) - sequence.done
            end = sequence.done + min(left, chunk)
            end = uncut(prompt, sequence.done, end) if self.whole else end
            part = sequence.chunk(end - sequence.done)
            part.angles = placed.angles(part.start, end, pictured.grid) if pictured.turns else None
            if part.start < len(prompt) and tiles:
                part.media = media[part.start : part.start + len(part.token_ids)]
            part.rows[0].num_top = 0
            if sequence.done < len(sequence.tokens):
                part.rows = []
            out = self.executor.step(step(part))
            if part.rows:
                sequence.tokens.append(int(out.tokens[0]))
                logprobs.append(float(out.logprobs[0]))
        self.executor.release(0)
        return sequence.tokens, logprobs


def native(path, prompt, chunk, threads=1, ranks=()):
    team, found = _C.Team(threads, None, False, list(ranks)), []
    team.run(lambda: found.append(Ours(path, "native", threads, team).run(*prompt, chunk)))
    return found[0]


@pytest.mark.parametrize("name", deep_but(["three", "last"], PROMPTS))
def test_logprobs_and_greedy_tokens_are_those_of_transformers(model, name):
    compare(*model, name)


@pytest.mark.parametrize("name", deep_but(["three"], ["three", "none"]))
def test_gguf_files_have_the_logprobs_and_tokens_of_transformers(gguf_model, name):
    compare(*gguf_model, name)


def compare(path, whole, name):
    """Each token of our response is the best one after the tokens before it, so all are greedy."""
    prompt, pictures, pixels = prompt_of(name, whole)
    ours = Ours(path, "torch")
    tokens, logprobs = ours.run(prompt, pictures, pixels, 64)
    logits = theirs_of(whole, tokens, pixels)
    before = logits[len(prompt) - 1 : -1]
    assert before.argmax(axis=1).tolist() == tokens[len(prompt) :]
    scores = torch.log_softmax(torch.from_numpy(before), dim=1).numpy()
    want = scores[np.arange(TOKENS), tokens[len(prompt) :]]
    relative = program_bound(ours.program, len(tokens)) + program_bound(ours.tower_program, 36)
    bound = relative * np.abs(logits).max()
    best = np.sort(before, axis=1)[:, -2:]
    assert (best[:, 1] - best[:, 0]).min() > 2 * bound  # so that rounding cannot change a token
    assert np.abs(np.asarray(logprobs) - want).max() < bound
    again, logprobs = native(path, (prompt, pictures, pixels), 64)
    assert again == tokens
    assert np.abs(np.asarray(logprobs) - want).max() < bound


def test_another_picture_gives_other_logits(model):
    path, whole = model
    prompt, pictures, pixels = prompt_of("one", whole)
    executor = Ours(path, "torch")
    _, scores = executor.run(prompt, pictures, pixels, 64)
    _, others = executor.run(prompt, pictures, [255 - pixels[0]], 64)
    assert abs(scores[0] - others[0]) > 1e-2


@pytest.mark.parametrize("name", deep_but(["three"], ["three", "last"]))
def test_texts_have_the_same_bits_however_they_are_computed(model, name):
    path, whole = model
    prompt = prompt_of(name, whole)
    want = native(path, prompt, 64)
    for chunk, threads, ranks in ((1, 1, ()), (7, 2, ()), (33, 3, (2, 1))):
        assert native(path, prompt, chunk, threads, ranks) == want
