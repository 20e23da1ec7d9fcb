"""A tower whose features are known, from the bytes of a JPEG to the token that names its colour.

Features 0, 1 and 2 of a patch are its mean red, green and blue, and everything else in the tower
adds nothing. The first layer of the text part adds the mean of these features over all tokens to
each token, and three rows of the head read them. So the next token says which colour has most of
the picture, however it was decoded, cut, scaled, merged and placed.
"""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from cpuserve import LLM, SamplingParams
from tests.api.sees import write_served_model

COLOURS = {"red": 11, "green": 12, "blue": 13}  # the token of each colour
ADDS = ("out_proj", "fc2", "o_proj", "down_proj")  # the last matrices of attention and MLPs


def with_known_features(path):
    """Change the weights of a random SmolVLM in the file `path`."""
    tensors = load_file(path)
    for name, tensor in tensors.items():
        zero = any(f".{part}." in name for part in ADDS) or name.startswith("lm_head")
        zero |= any(part in name for part in ("patch_embedding", "position_embedding", "proj.bias"))
        if zero or "modality_projection" in name or "v_proj" in name or "q_proj" in name:
            tensor.zero_()
        elif name.endswith(("norm.weight", "norm1.weight", "norm2.weight")):
            tensor.fill_(1.0)
    vision, text = "model.vision_model.", "model.text_model.layers.0.self_attn."
    tensors["model.text_model.embed_tokens.weight"][:, :3] = 0.0
    merged = tensors["model.connector.modality_projection.proj.weight"]
    width = tensors[f"{vision}post_layernorm.weight"].numel()
    for i, token in enumerate(COLOURS.values()):
        kernel = tensors[f"{vision}embeddings.patch_embedding.weight"][i, i]
        kernel.fill_(1.0 / kernel.numel())
        merged[i, i::width] = 1.0
        tensors[f"{text}v_proj.weight"][i, i] = 1.0  # all queries are 0: the mean over all keys
        tensors[f"{text}o_proj.weight"][i, i] = 100.0
        tensors["lm_head.weight"][token, i] = 1.0
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def jpeg(size, parts, seed=0):
    """The bytes of a picture with stripes of these shares, under noise."""
    width, height = size
    pixels = np.full((height, width, 3), 60.0)
    begin = 0.0
    for colour, share in parts.items():
        rows = slice(round(height * begin), round(height * (begin + share)))
        pixels[rows, :, [*COLOURS].index(colour)] = 200.0
        begin += share
    pixels += np.random.default_rng(seed).normal(0, 20, pixels.shape)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=80)
    return file.getvalue()


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = write_served_model(tmp_path_factory.mktemp("known")).path
    with torch.inference_mode():
        with_known_features(path / "model.safetensors")
    with LLM(str(path), dtype="float32", max_model_len=512) as made:
        yield made


@pytest.mark.parametrize(
    ("size", "parts"),
    [
        ((90, 64), {"red": 1.0}),
        ((64, 200), {"green": 1.0}),
        ((333, 217), {"blue": 1.0}),
        ((120, 120), {"red": 0.6, "blue": 0.4}),
        ((120, 120), {"red": 0.4, "blue": 0.6}),
        ((250, 100), {"blue": 0.2, "green": 0.55, "red": 0.25}),
    ],
)
def test_a_jpeg_ends_in_the_token_of_its_colour(llm, size, parts):
    content = [{"type": "image", "image": jpeg(size, parts)}, {"type": "text", "text": "colour?"}]
    chat = [{"role": "user", "content": content}]
    (found,) = llm.chat(chat, SamplingParams(temperature=0, max_tokens=1))
    assert list(found.outputs[0].token_ids) == [COLOURS[max(parts, key=parts.get)]]


def test_of_two_pictures_the_larger_part_decides(llm):
    pictures = [jpeg((100, 100), {"red": 1.0}), jpeg((100, 100), {"green": 0.9, "red": 0.1}, 1)]
    content = [{"type": "image", "image": each} for each in pictures]
    chat = [{"role": "user", "content": [*content, {"type": "text", "text": "colour?"}]}]
    (found,) = llm.chat(chat, SamplingParams(temperature=0, max_tokens=1))
    assert list(found.outputs[0].token_ids) == [COLOURS["red"]]
