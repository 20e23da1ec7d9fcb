"""Rows of the media buffer replace embeddings: in packed steps, and in both executors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from cpuserve.core.step import SeqChunk, StepBatch
from cpuserve.loader.load import open_checkpoint
from cpuserve.models import build_program, spec_from_config
from cpuserve.program.view import check_step, view
from cpuserve.quant import dequantize
from cpuserve.runtime.pack import pack
from cpuserve.runtime.torch_executor import TorchExecutor
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.slot import SlotRequest
from tests.helpers.fake_executor import fake_config
from tests.helpers.steps import Sequence, all_rows, step
from tests.helpers.tiny import tiny_model

_C = pytest.importorskip("cpuserve._C")

PLACEHOLDER = 3
IDS = [(i * 37 + i * i * 5) % 509 for i in range(70)]
PICTURE = range(20, 52)  # the places of the tokens whose ids are placeholders in a step with media


def executor_of(kind, family="llama", media_rows=36, axes=None):
    config = fake_config(
        max_num_batched_tokens=96,
        block_size=32,
        kv_blocks=16,
        max_model_len=128,
        kv_dtype="f32",
        isa=_C.isa_levels()[-1],
        executor=kind,
        media_rows=media_rows,
    )
    checkpoint = open_checkpoint(tiny_model(family))
    spec = spec_from_config(checkpoint.config)
    if axes is not None:
        count = len(spec.rope.inv_freq)
        spec = replace(spec, rope=structs.replace(spec.rope, axes=axes(count)))
    program = build_program(spec)
    if kind == "torch":
        executor = TorchExecutor(config, program, checkpoint.weights)
    else:
        from cpuserve.runtime.native import NativeExecutor

        executor = NativeExecutor(config, program, checkpoint.weights, _C.Team(1, None))
    executor.admit(0, SlotRequest(SamplingParams(temperature=0, max_tokens=None), 0, [], [], []))
    return executor, checkpoint.weights


def embeddings(weights, ids):
    return dequantize(weights.get("model.embed_tokens.weight"))[ids]


def tokens(executor, ids, media=None, chunk=70, angles=None):
    """The tokens and logprobs of every row of `ids`, computed in chunks."""
    found = []
    sequence = Sequence(0, ids, [4, 7, 2])
    while sequence.done < len(ids):
        at = sequence.done
        part = sequence.chunk(min(chunk, len(ids) - at))
        part.rows = all_rows(len(part.token_ids))
        for row in part.rows:
            row.num_top = 2
        part.media = None if media is None else media[at : at + len(part.token_ids)]
        if angles is not None:
            part.angles = [axis[at : at + len(part.token_ids)] for axis in angles]
        out = executor.step(step(part))
        n = len(part.rows)
        found.append(np.concatenate([out.logprobs[:n], out.top_logprobs[:n, :2].reshape(-1)]))
        found.append(out.tokens[:n].astype(np.float32))
    executor.release(0)
    executor.admit(0, SlotRequest(SamplingParams(temperature=0, max_tokens=None), 0, [], [], []))
    return np.concatenate(found)


def with_placeholders():
    ids = [PLACEHOLDER if i in PICTURE else token for i, token in enumerate(IDS)]
    # The buffer has the rows in another order, from row 2 on.
    media = [2 + (i - PICTURE.start) * 5 % 32 if i in PICTURE else -1 for i in range(len(IDS))]
    return ids, media


@pytest.mark.parametrize("kind", ["torch", "native"])
@pytest.mark.parametrize("chunk", [70, 13])
def test_a_row_equal_to_an_embedding_gives_the_bits_of_its_token(kind, chunk):
    executor, weights = executor_of(kind)
    ids, media = with_placeholders()
    rows = np.zeros((36, embeddings(weights, [0]).shape[1]), np.float32)
    for place in PICTURE:
        rows[media[place]] = embeddings(weights, [IDS[place]])[0]
    expected = tokens(executor, IDS, chunk=chunk)
    executor.write_media(0, rows[:20])
    executor.write_media(20, rows[20:])
    assert np.array_equal(tokens(executor, ids, media, chunk), expected)
    rows[media[40]] += 0.5  # one other row is another picture
    executor.write_media(0, rows)
    changed = tokens(executor, ids, media, chunk)
    assert not np.array_equal(changed, expected)
    # Without media the placeholders are tokens, and the buffer changes no bit of a text.
    assert np.array_equal(tokens(executor, IDS, chunk=chunk), expected)
    assert np.array_equal(tokens(executor, IDS, [-1] * len(IDS), chunk), expected)


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_the_rows_of_a_model_with_scaled_embeddings_are_not_scaled(kind):
    executor, weights = executor_of(kind, "gemma")
    ids, media = with_placeholders()
    scale = np.float32(spec_from_config(open_checkpoint(tiny_model("gemma")).config).embed_scale)
    assert scale != 1
    rows = np.zeros((36, embeddings(weights, [0]).shape[1]), np.float32)
    for place in PICTURE:
        rows[media[place]] = embeddings(weights, [IDS[place]])[0] * scale
    executor.write_media(0, rows)
    assert np.array_equal(tokens(executor, ids, media), tokens(executor, IDS))


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_rows_outside_of_the_buffer_are_refused(kind):
    executor, weights = executor_of(kind, media_rows=4)
    width = embeddings(weights, [0]).shape[1]
    for first, shape in ((2, (3, width)), (-1, (1, width)), (0, (2, width - 1))):
        with pytest.raises(ValueError, match="media"):
            executor.write_media(first, np.zeros(shape, np.float32))
    for row in (4, -2):
        with pytest.raises(ValueError, match="media"):
            tokens(executor, IDS[:3], [0, row, -1])


def test_a_step_has_the_section_if_a_sequence_has_media():
    chunks = [
        SeqChunk(0, [5], 40, [[1, 2]]),
        SeqChunk(1, [6, 7, 8], 0, [[3]], media=[-1, 9, 4]),
    ]
    for chunk in chunks:
        chunk.tables = Sequence(0, [], []).chunk(0, []).tables
    found = view(pack(StepBatch(chunks)))
    assert found.media_rows.tolist() == [-1, -1, 9, 4]
    chunks[1].media = None
    assert len(view(pack(StepBatch(chunks))).media_rows) == 0


def test_media_rows_outside_of_a_small_buffer_are_named():
    found = Sequence(0, [1, 2], [0]).chunk()
    found.media = [-1, 3]
    check_step(view(step(found)), vocab=9, num_blocks=1, block=32, num_media=4)
    again = Sequence(0, [1, 2], [0]).chunk()
    again.media = [-1, 3]
    with pytest.raises(ValueError, match="media row"):
        check_step(view(step(again)), vocab=9, num_blocks=1, block=32, num_media=3)


AXES = {
    "sections": lambda count: (0,) * (count - 4) + (1, 1, 2, 2),
    "interleaved": lambda count: tuple(i % 3 for i in range(count)),
}


@pytest.mark.parametrize("axes", AXES)
def test_angles_turn_keys_by_their_places(axes):
    """Equal places on all axes are a text; places on several axes are those of the reference."""
    text = [list(range(len(IDS)))] * 3
    stream = np.random.default_rng(1)
    places = [sorted(stream.integers(0, 60, len(IDS)).tolist()) for _ in range(3)]
    found = {}
    for kind in ("torch", "native"):
        executor, _ = executor_of(kind, axes=AXES[axes])
        plain = tokens(executor, IDS)
        assert np.array_equal(tokens(executor, IDS, angles=text), plain)
        found[kind] = tokens(executor, IDS, angles=places)
        assert np.abs(found[kind] - plain).max() > 0.01
        # An equal turn of all keys and queries changes nothing but the rounding.
        later = [[place + 5 for place in axis] for axis in text]
        assert np.allclose(tokens(executor, IDS, angles=later)[:70], plain[:70], atol=1e-4)
    assert np.allclose(found["native"], found["torch"], atol=1e-4)


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_angles_that_the_model_does_not_have_are_refused(kind):
    executor, _ = executor_of(kind)
    with pytest.raises(ValueError, match="angles of"):
        tokens(executor, IDS, angles=[list(range(len(IDS)))] * 3)
    executor, _ = executor_of(kind, axes=AXES["sections"])
    for bad in (-1, 128) if kind == "native" else (-1,):
        with pytest.raises(ValueError, match="angle"):
            tokens(executor, IDS, angles=[[bad] * len(IDS)] * 3)
