"""MLX directories of models with latent attention, whose keys and values mlx-lm stores apart."""

import json
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from cpuserve.loader.load import check_weights, open_checkpoint
from cpuserve.models import build_program, spec_from_config
from tests.helpers.checkpoint_logits import TOKENS, native_logits
from tests.helpers.levels import LEVELS
from tests.helpers.quantized import mlx
from tests.helpers.tiny import tiny_model

BOTH, GROUP = "kv_b_proj.weight", 32


def stored(rows, bits):
    """Return the tensors of a matrix, and the values that they stand for."""
    if bits is None:
        return {"weight": rows}, rows
    parts = mlx(rows, bits, GROUP)
    words = parts["weight"].numpy().view(np.uint32)
    codes = (words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & ((1 << bits) - 1)
    codes = rows.new_tensor(codes.reshape(len(rows), -1, GROUP).astype(np.float32))
    scale, bias = (parts[name].float()[..., None] for name in ("scales", "biases"))
    return parts, (codes * scale + bias).reshape(rows.shape)


def write(source, folder, bits):
    """Write a model as mlx-lm does, and the same model with the values in one matrix (plain)."""
    split, plain = folder / "split", folder / "plain"
    for path in (split, plain):
        shutil.copytree(source, path)
    config = json.loads((split / "config.json").read_text())
    tensors, joined = (load_file(source / "model.safetensors") for _ in range(2))
    heads, keys = config["num_attention_heads"], config["qk_nope_head_dim"]
    for name in [name for name in tensors if name.endswith(BOTH)]:
        both = tensors.pop(name).reshape(heads, keys + config["v_head_dim"], -1)
        at, values = name.removesuffix(BOTH), []
        for own, part in (("embed_q", both[:, :keys].mT), ("unembed_out", both[:, keys:])):
            parts, value = stored(part.reshape(heads * part.shape[1], -1), bits)
            for suffix, tensor in parts.items():
                stack = tensor.reshape(heads, part.shape[1], -1).contiguous()
                tensors[f"{at}{own}.{suffix}"] = stack
            values.append(value.reshape(part.shape))
        rows = np.concatenate([values[0].mT, values[1]], axis=1)
        joined[name] = both.new_tensor(rows).reshape(-1, both.shape[-1])
    save_file(tensors, split / "model.safetensors", metadata={"format": "mlx"})
    save_file(joined, plain / "model.safetensors", metadata={"format": "pt"})
    config["quantization"] = {"bits": bits or 4, "group_size": GROUP}
    (split / "config.json").write_text(json.dumps(config))
    return split, plain


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_keys_and_values_may_be_stacks_of_a_matrix_for_each_head(tmp_path, bits):
    """ml-explore/mlx-lm#1451 is about them: they took the settings of others."""
    paths = write(tiny_model("deepseek-v2"), tmp_path, bits)
    split, plain = map(open_checkpoint, paths)
    check_weights(build_program(spec_from_config(split.config)), split.weights)
    got, want = (native_logits(one, LEVELS[-1], [len(TOKENS)])[0] for one in (split, plain))
    off = np.abs(got - want) / np.ptp(want)
    # Rounding of activations, and of 8 bits to int8, changes the choice of experts for some tokens.
    assert off.max() < 1e-4 if bits is None else off.mean() < 5e-3
