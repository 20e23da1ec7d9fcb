"""Texts with pictures are as transformers' whole model computes them: logits and greedy tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cpuserve import _C
from cpuserve.loader.load import open_checkpoint
from cpuserve.models import build_program, build_tower, spec_from_config
from cpuserve.runtime.native import NativeExecutor
from cpuserve.runtime.torch_executor import TorchExecutor
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.slot import SlotRequest
from tests.helpers.fake_executor import fake_config
from tests.helpers.pictures import (
    IMAGE_ID,
    patches_of,
    pixels_of,
    random_tiles,
    write_tower_model,
)
from tests.helpers.rounding import program_bound
from tests.helpers.steps import Sequence, step

SIDE, MERGE, ROWS = 6, 2, 9
TOKENS = 32
# Each prompt as pieces: a number of tiles of one picture, or of tokens of text.
PROMPTS = {
    "one": [("text", 7), ("tiles", 1), ("text", 5)],
    "three": [("tiles", 2), ("text", 3), ("tiles", 1), ("text", 11), ("tiles", 4), ("text", 2)],
    "last": [("text", 20), ("tiles", 3)],
    "none": [("text", 40)],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures")
    name = "SmolVLMForConditionalGeneration"
    return path, write_tower_model(name, path, side=SIDE, merge=MERGE)


def prompt_of(name):
    """The ids of a prompt, and its tiles."""
    stream, ids, count = np.random.default_rng(3), [], 0
    for kind, n in PROMPTS[name]:
        if kind == "text":
            ids += stream.integers(10, 380, n).tolist()
        else:
            ids += [IMAGE_ID] * (ROWS * n)
            count += n
    return ids, random_tiles(count, SIDE, seed=len(name))


def theirs_of(model, ids, tiles):
    """(logits of every token of the prompt and of TOKENS greedy ones, these tokens)."""
    pictures = {"pixel_values": pixels_of(tiles)} if len(tiles) else {}
    ids = list(ids)
    with torch.inference_mode():
        for _ in range(TOKENS):
            logits = model(input_ids=torch.tensor([ids]), **pictures).logits[0]
            ids.append(int(logits[-1].argmax()))
        logits = model(input_ids=torch.tensor([ids]), **pictures).logits[0]
    return logits.numpy(), ids


class Ours:
    """An executor and its tower."""

    def __init__(self, path, kind, threads=1, team=None):
        checkpoint = open_checkpoint(Path(path))
        spec = spec_from_config(checkpoint.config)
        self.program, self.tower_program = build_program(spec), build_tower(spec.tower)
        config = fake_config(
            max_num_batched_tokens=64,
            max_model_len=256,
            kv_blocks=16,
            block_size=32,
            isa=_C.isa_levels()[-1],
            media_rows=80,
            threads=threads,
        )
        made = TorchExecutor if kind == "torch" else NativeExecutor
        arguments = (config, self.program, checkpoint.weights)
        more = {} if kind == "torch" else {"team": team}
        self.executor = made(*arguments, **more, tower=spec.tower)

    def run(self, prompt, tiles, chunk):
        """The greedy tokens after the prompt, which is computed in chunks, and their logprobs."""
        greedy = SamplingParams(temperature=0, max_tokens=None)
        self.executor.admit(0, SlotRequest(greedy, 0, prompt, [], []))
        if len(tiles):
            encoded = self.executor.tower.encode(
                patches_of(tiles, MERGE), [(SIDE, SIDE)] * len(tiles)
            )
            self.executor.write_media(80 - len(encoded), encoded)
        count, media = ROWS * len(tiles), []
        for token in prompt:
            media.append(80 - count if token == IMAGE_ID else -1)
            count -= token == IMAGE_ID
        sequence, logprobs = Sequence(0, list(prompt), list(range(12))), []
        while len(sequence.tokens) < len(prompt) + TOKENS:
            left = len(sequence.tokens) - sequence.done
            part = sequence.chunk(min(left, chunk))
            if part.start < len(prompt) and len(tiles):
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


def native(path, name, chunk, threads=1, ranks=()):
    team, found = _C.Team(threads, None, False, list(ranks)), []
    team.run(lambda: found.append(Ours(path, "native", threads, team).run(*prompt_of(name), chunk)))
    return found[0]


@pytest.mark.parametrize("name", PROMPTS)
def test_logprobs_and_greedy_tokens_are_those_of_transformers(model, name):
    path, whole = model
    prompt, tiles = prompt_of(name)
    logits, tokens = theirs_of(whole, prompt, tiles)
    scores = torch.log_softmax(torch.from_numpy(logits), dim=1).numpy()
    places = np.arange(len(prompt), len(tokens))
    want = scores[places - 1, np.asarray(tokens)[places]]
    ours = Ours(path, "torch")
    relative = program_bound(ours.program, len(tokens)) + program_bound(ours.tower_program, 36)
    bound = relative * np.abs(logits).max()
    best = np.sort(logits[len(prompt) - 1 : -1], axis=1)[:, -2:]
    assert (best[:, 1] - best[:, 0]).min() > 2 * bound  # so that rounding cannot change a token
    for got, logprobs in (ours.run(prompt, tiles, 64), native(path, name, 64)):
        assert got == tokens
        assert np.abs(np.asarray(logprobs) - want).max() < bound


def test_another_picture_gives_another_text(model):
    path, whole = model
    prompt, tiles = prompt_of("one")
    _, tokens = theirs_of(whole, prompt, tiles)
    other, _ = Ours(path, "torch").run(prompt, 255 - tiles, 64)
    assert other[: len(prompt)] == tokens[: len(prompt)]
    assert other != tokens


@pytest.mark.parametrize("name", ["three", "last"])
def test_texts_have_the_same_bits_however_they_are_computed(model, name):
    path, _ = model
    want = native(path, name, 64)
    for chunk, threads, ranks in ((1, 1, ()), (7, 2, ()), (33, 3, (2, 1))):
        assert native(path, name, chunk, threads, ranks) == want
