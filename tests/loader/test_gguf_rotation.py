"""Files of Bonsai 2, whose matrices are rotated: their logits, and the rotations refused."""

from __future__ import annotations

import numpy as np
import pytest

from cpuserve.base.errors import ModelError
from cpuserve.loader.gguf.file import GgufFile
from cpuserve.loader.gguf.model import gguf_config
from cpuserve.loader.load import open_checkpoint
from tests.helpers.checkpoint_logits import TOKENS, exact_logits, native_logits
from tests.helpers.depth import deep_but
from tests.helpers.gguf_blocks import write_model
from tests.helpers.levels import LEVELS, each_level

WIDTH, FFN, BLOCK = 1024, 2048, 1024
BITS = [[(row & column).bit_count() % 2 for column in range(BLOCK)] for row in range(BLOCK)]
H = (1 - 2 * np.array(BITS, np.float64)) / 32
SIGNS = {n: 1 - 2 * np.random.default_rng(n).integers(0, 2, n) for n in (WIDTH, FFN)}
PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
NAMES = [f"blk.0.{part}.weight" for part in PARTS]
TABLE = "token_embd.weight"
KEYS = {
    "version": 1,
    "block_size": BLOCK,
    "transform": "normalized-sylvester-walsh-hadamard",
    "axis": "input-last-dimension",
    "sign_mode": "explicit",
    "sign_widths": list(SIGNS),
    "sign_values": np.concatenate([*SIGNS.values()]).tolist(),
    "weight_names": NAMES,
    "inverse_weight_names": [TABLE],
    "gdn_v_grouped": True,
}


def folded(names, signs):
    """Returns the matrices `names` with each row w as H (s * w), by its definition."""

    def fold(name, values):
        if name not in names:
            return values
        s = signs.get(values.shape[1], 1)
        blocks = (values.astype(np.float64) * s).reshape(len(values), -1, BLOCK)
        return (blocks @ H).reshape(values.shape).astype(np.float32)

    return fold


def write(path, types=None, *, plain=False, **changes):
    """A model whose matrices are rotated as KEYS with `changes` says; None removes a key."""
    keys = {key: value for key, value in {**KEYS, **changes}.items() if value is not None}
    names = {*NAMES, TABLE, *keys.get("weight_names", ())}
    write_model(
        path,
        types or {"": "F32", "output.weight": "F32"},
        width=WIDTH,
        ffn=FFN,
        layers=1,
        fold=folded((), {}) if plain else folded(names, SIGNS if "sign_values" in keys else {}),
        metadata=None if plain else {f"prism.hadamard.{key}": v for key, v in keys.items()},
    )
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The logits of the same matrices, not rotated."""
    path = write(tmp_path_factory.mktemp("plain") / "m.gguf", plain=True)
    return exact_logits(open_checkpoint(path))


SIGNED = {
    "signs": {},
    "no signs": {"sign_mode": "identity", "sign_widths": None, "sign_values": None},
    "a rotated head": {"weight_names": [*NAMES, "output.weight"]},
}


@pytest.mark.parametrize("name", deep_but(["a rotated head"], SIGNED))
def test_a_rotated_model_has_the_logits_of_the_model(tmp_path, plain, name):
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", **SIGNED[name]))
    spread = np.ptp(plain)
    assert np.abs(exact_logits(checkpoint) - plain).max() < 1e-5 * spread
    native, _ = native_logits(checkpoint, LEVELS[-1], [len(TOKENS)])
    assert np.abs(native - plain).max() < 1e-4 * spread


@each_level
def test_rows_are_rotated_alike_in_every_division_of_a_prompt(tmp_path, isa):
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", {"": "Q8_0", "norm.weight": "F32"}))
    want, _ = native_logits(checkpoint, isa, [len(TOKENS)], bits=8)
    got, _ = native_logits(checkpoint, isa, [1, 40, 3, 26], bits=8, ranks=[1, 1])
    assert np.array_equal(got, want)


WRONG = {
    "another version": ({"version": 2}, "version is 2; it must be 1"),
    "another block": ({"block_size": 512}, "block_size is 512; it must be 1024"),
    "another transform": ({"transform": "dct"}, "transform is 'dct'; it must be 'normalized-syl"),
    "another axis": ({"axis": "output"}, "axis is 'output'; it must be 'input-last-dimension'"),
    "no axis": ({"axis": None}, "axis is missing; it must be 'input-last-dimension'"),
    "a text as version": ({"version": "1"}, "version is '1'; it must be 1"),
    "a flag as version": ({"version": True}, "version is True; it must be 1"),
    "versions": ({"version": [1, 1]}, "version has 2 values; it must be 1"),
    "another sign mode": ({"sign_mode": "random"}, "sign_mode is 'random'; it must be 'explicit'"),
    "a number as mode": ({"sign_mode": 1}, "sign_mode is 1; it must be 'explicit' or 'identity'"),
    "an unknown key": ({"scale": 2.0}, r"scale is 2\.0; it must be absent; known: version, block"),
    "signs without a mode": (
        {"sign_mode": "identity"},
        "sign_widths has 2 values; it must be abse",
    ),
    "no signs": (
        {"sign_values": None},
        "sign_values is missing; it must be a list of 1 to 4194304",
    ),
    "a sign too few": (
        {"sign_values": [1] * 3071},
        "has 3071 values; it must be 3072 numbers 1 an",
    ),
    "a sign of 0": (
        {"sign_values": [1] * 3071 + [0]},
        "has 3072 values; it must be 3072 numbers 1",
    ),
    "no list": ({"sign_widths": 1024}, "sign_widths is 1024; it must be a list of integers"),
    "names as widths": ({"sign_widths": ["a", "b"]}, "sign_widths has 2 values; it must be a list"),
    "an odd width": (
        {"sign_widths": [1000]},
        r"sign_widths is \[1000\]; it must be different mult",
    ),
    "a width twice": (
        {"sign_widths": [1024, 1024]},
        "has 2 values; it must be different multiples",
    ),
    "no width of ffn": (
        {"sign_widths": [1024], "sign_values": [1] * 1024},
        "it must be a list with 2048, the columns of blk.0.ffn_down.weight",
    ),
    "no names": ({"weight_names": None}, "weight_names is missing; it must be a list of 1 to 11"),
    "a number as name": (
        {"weight_names": [5]},
        r"weight_names is \[5\]; it must be a list of names",
    ),
    "a missing tensor": (
        {"weight_names": ["blk.9.ffn_up.weight"]},
        "file, which has no blk.9.ffn_up",
    ),
    "a norm": (
        {"weight_names": ["blk.0.attn_norm.weight"]},
        "and dense MLPs, not 'blk.0.attn_norm",
    ),
    "a name twice": ({"weight_names": NAMES[:1] * 2}, "has 2 values; it must be names that differ"),
    "names of a million": (
        {"weight_names": ["x"] * 1_000_000},
        "it must be a list of 1 to 11 values",
    ),
    "another table": (
        {"inverse_weight_names": NAMES[:1]},
        "names of token_embd.weight, not 'blk.0",
    ),
    "a flag that is none": ({"gdn_v_grouped": 1}, "gdn_v_grouped is 1; it must be true or false"),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_rotation_is_refused_by_its_key(tmp_path, monkeypatch, name):
    changes, message = WRONG[name]
    monkeypatch.setattr("tests.loader.test_gguf_rotation.H", np.eye(BLOCK))
    path = write(tmp_path / "m.gguf", {"": "Q8_0", "norm.weight": "F32"}, **changes)
    with pytest.raises(
        ModelError, match=rf"^GGUF .*m\.gguf: prism\.hadamard\..*{message}"
    ) as raised:
        gguf_config(GgufFile(path))
    assert "\n" not in str(raised.value)


@pytest.mark.deep
def test_the_most_signs_that_a_file_may_have_are_read(tmp_path):
    widths = [WIDTH, FFN, (1 << 22) - WIDTH - FFN]
    path = tmp_path / "m.gguf"
    write(
        path, {"": "Q8_0", "norm.weight": "F32"}, sign_widths=widths, sign_values=[-1] * (1 << 22)
    )
    signs = gguf_config(GgufFile(path))["gguf_rotation"]["signs"]
    assert signs[str(widths[2])] == "ff" * (widths[2] // 8)


def test_matrices_of_one_linear_are_all_rotated_or_none(tmp_path):
    names = [name for name in NAMES if name != "blk.0.attn_k.weight"]
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", weight_names=names))
    with pytest.raises(
        ModelError, match=r"has model\.layers\.0\.self_attn\.q_proj\.weight rotated"
    ):
        exact_logits(checkpoint)
