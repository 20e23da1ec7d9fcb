"""HQQ's codes, by their definition, and refusals."""

import numpy as np
import pytest
import torch

from cpuserve.base.errors import ModelError
from tests.helpers.quantized import hqq
from tests.quant.checkpoints import NORM, STREAM, Store, check, opened

N, K = 40, 256


def random_weight():
    return torch.from_numpy(STREAM.normal(0, 0.02, (N, K)).astype(np.float32))


def plain(parts):
    """The values by the definition: one code after the other."""
    stored, axis = parts["W_q"].to(torch.int64), int(parts["axis"])
    bits = int(parts["nbits"])
    each = 10 if bits == 3 else 8 // bits
    codes = [stored >> bits * (each - 1 - i) & ((1 << bits) - 1) for i in range(each)]
    pieces = parts["scale"].numel()
    count = pieces if axis == 1 else int(parts["group_size"])
    codes = torch.cat(codes)[:count].float()
    return ((codes - parts["zero"].float()) * parts["scale"].float()).reshape(N, K).numpy()


def store_of(parts, **more):
    found = {f"q__{name}": part.numpy() for name, part in {**parts, **more}.items()}
    return Store(norm__weight=NORM, **found)


@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize(
    ("group", "kind"), [(32, "w4m_g32"), (64, "w4m_g32"), (128, "w4m_g128"), (K, "w4m_g128")]
)
def test_four_bits_keep_their_codes(group, kind, floats):
    parts = hqq(random_weight(), 4, group)
    values = plain(parts)
    if floats:  # view_as_float
        parts["W_q"] = parts["W_q"].view(torch.float16)
    check(opened("hqq", store_of(parts)), values, kind, 1e-4)


@pytest.mark.parametrize(("bits", "kind"), [(2, "w2z_g64"), (3, "w3z_g64"), (4, "w4z_g64")])
def test_few_bits_with_whole_zero_points_keep_their_codes(bits, kind):
    parts = hqq(random_weight(), bits)
    parts["zero"] = parts["zero"].round()
    check(opened("hqq", store_of(parts)), plain(parts), kind, 1e-6)


@pytest.mark.parametrize(
    ("bits", "group", "axis"),
    [
        (1, 64, 1),
        (2, 64, 1),
        (3, 64, 1),
        (8, 64, 1),
        (4, 16, 1),
        (4, 64, 0),
        (3, 64, 0),
        (4, 80, 1),
    ],
)
def test_codes_that_no_kernel_reads_are_converted(bits, group, axis):
    parts = hqq(random_weight(), bits, group, axis)
    check(opened("hqq", store_of(parts)), plain(parts), "w8_g32", 1e-6, packed=1)


PARTS = hqq(random_weight())


def text(of):
    return torch.tensor(list(of.encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"packing": text("6bit_u8")}, "packing '6bit_u8'"),
        ({"axis": torch.tensor(2)}, "axis 2"),
        ({"shape": torch.tensor([N, K, 1])}, "is not supported"),
        ({"shape": torch.tensor([2 * N, K])}, "its settings need"),
        ({"group_size": torch.tensor(0)}, "group_size 0 is not supported"),
        ({"group_size": torch.tensor(128)}, "its settings need"),
        ({"group_size": torch.tensor([64, 64])}, "group_size -1 is not supported"),
        ({"group_size": torch.ones(())}, "must be integers"),
        ({"shape": torch.zeros(99, dtype=torch.int64)}, "must be integers"),
        ({"quant_scale": torch.tensor(1, dtype=torch.uint8)}, "quantized scales or zero points"),
        ({"scale": PARTS["scale"][1:]}, "scales and zero points, but its settings need"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(more, message):
    with pytest.raises(ModelError, match=message):
        opened("hqq", store_of(PARTS, **more)).get("q.weight")


def test_codes_without_settings_are_refused():
    parts = {name: PARTS[name] for name in ("W_q", "scale", "zero")}
    with pytest.raises(ModelError, match="has no tensor q"):
        opened("hqq", store_of(parts)).get("q.weight")
