"""Prompts, and runs of the native executor on them."""

from __future__ import annotations

import numpy as np
import pytest
from native_model import Chunk, Model, Shape, all_rows, blocks_for, words

THREADS = [1, 2, 3, 5]
PROMPT = np.random.default_rng(7).integers(0, Shape().vocab, 700).tolist()


@pytest.fixture(scope="module")
def model():
    return Model.random()


def prompt_logits(native, ids, sizes=None, blocks=None):
    """Return the logits of every position; the prompt runs in chunks of `sizes`."""
    blocks = blocks_for(len(ids)) if blocks is None else blocks
    out, start = [], 0
    for size in sizes or [len(ids)]:
        part = ids[start : start + size]
        chunk = Chunk(part, start, blocks, all_rows(len(part)))
        out.append(native.executor.step_logits(words(chunk)))
        start += size
    assert start == len(ids)
    return np.concatenate(out)


def mask_of(*allowed):
    """The masks that allow these lists of ids."""
    masks = np.zeros((len(allowed), -(-Shape().vocab // 32)), np.uint32)
    for mask, ids in zip(masks, allowed, strict=True):
        for i in ids:
            mask[i // 32] |= np.uint32(1 << i % 32)
    return masks.view(np.int32)


def good_words():
    return words(Chunk([1, 2, 3], 0, blocks_for(3), [(2, -1, 2)]))
