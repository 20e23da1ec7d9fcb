"""Rows of converted matrices: any of them, by any number of threads, have the bits of the whole.

The digests are of the rows as they were when each matrix was converted at once.
"""

import contextlib
import hashlib
import importlib.util
import itertools
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from cpuserve.base.errors import ModelError
from cpuserve.program.parts import rows as rows_name
from cpuserve.quant import open_weights
from cpuserve.quant.base import BuiltTensor, QuantTensor, rows_of
from cpuserve.quant.parts import PartWeights

N, K = 1152, 1024  # more rows than are built at a time
DIGESTS = {
    "awq": "9283f5f220d6bb34",
    "awq-g64": "ae33f5ad4d008112",
    "awq-g32": "29f0ba40a67832ce",
    "gptq": "b1ee6f12461a2b50",
    "gptq-2": "be815522dd513dee",
    "gptq-3": "5213524fc9f5d678",
    "gptq-8": "c20c30dd808aba83",
    "gptq-desc-act": "cbf19e110212a806",
    "fp8": "8a9381f0d836d04f",
    "bnb-nf4": "4b1635477cdde37f",
    "bnb-int8": "1cfaa29f2bccdc8b",
    "ct-int4": "29f7aeee8c78f404",
    "ct-int8-g128": "96f3331ff196e95c",
    "ct-int8": "cca56ce811f7c412",
    "ct-nvfp4": "8f04bdbb0334cf29",
    "mxfp4": "1ae8c6e32d4f2a27",
    "TQ1_0": "8c44792b9306d02a",
    "NVFP4": "f9ad793af1b1005b",
    "PTQ1_0": "aa92d6dcb925fe91",
    "gptq-8-zeros-to-256": "ad925917db9419c3",
    "gptq-3-desc-act": "0f8a0763191bd268",
    "gptq-8-desc-act": "3eec3568734eddd5",
    "fp8-one-scale": "edb4c391764aed8f",
    "fp8-scales-of-rows": "f2449fe5db40d364",
    "fp8-narrow-blocks": "6202ea85bc53be1a",
    "bnb-nf4-wide-blocks": "de11c807f99bccdd",
    "bnb-nf4-nested": "0fa92c180396582c",
    "bnb-nf4-narrow-blocks": "0a6240f34d3e3098",
    "nvfp4-uneven": "b1fd60538caa4d42",
}


def bench():
    path = Path(__file__).parents[2] / "benchmarks" / "bench_convert.py"
    spec = importlib.util.spec_from_file_location("bench_convert", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BENCH = bench()


def fp8(scale, shape, **settings):
    def form(n, k):
        return "fp8", settings, {"m.weight": ("F8_E4M3", (n, k)), f"m.{scale}": ("F32", shape)}, {}

    return form


def bnb4(blocksize, *, nested=False):
    def form(n, k):
        method, more, parts, given = BENCH.bnb4(n, k)
        name = next(name for name in parts if "quant_state" in name)
        blocks = -(-n * k // blocksize)
        text = f'{{"shape": [{n}, {k}], "blocksize": {blocksize}, "nested_blocksize": 100}}'
        parts |= {"m.weight.absmax": ("U8" if nested else "F32", (blocks,))}
        parts |= {name: ("U8", (len(text),))}
        if nested:
            parts |= {"m.weight.nested_absmax": ("F32", (-(-blocks // 100),))}
            parts |= {"m.weight.nested_quant_map": ("F32", (256,))}
        return method, more, parts, {**given, name: np.frombuffer(text.encode(), np.uint8)}

    return form


def gptq_zeros_to_256(n, k):
    method, more, parts, _ = BENCH.gptq(n, k, 8)
    return method, more, parts, {}


def nvfp4_of(k):
    return lambda n, _: BENCH.nvfp4(n, k)


# What has no kernels, or scales in another shape.
OTHERS = {
    "gptq-8-zeros-to-256": gptq_zeros_to_256,
    "gptq-3-desc-act": lambda n, k: BENCH.gptq(n, k, 3, ordered=True),
    "gptq-8-desc-act": lambda n, k: BENCH.gptq(n, k, 8, ordered=True),
    "fp8-one-scale": fp8("weight_scale", (1,)),
    "fp8-scales-of-rows": fp8("weight_scale", (N, 1)),
    "fp8-narrow-blocks": fp8("weight_scale_inv", (12, 11), weight_block_size=[100, 96]),
    "bnb-nf4-wide-blocks": bnb4(2048),
    "bnb-nf4-nested": bnb4(64, nested=True),
    "bnb-nf4-narrow-blocks": bnb4(48),
    "nvfp4-uneven": nvfp4_of(K + 16),
}


def opened(name):
    BENCH.RANDOM = np.random.default_rng(1)
    if name not in OTHERS:
        return BENCH.opened(name, N, K)
    method, settings, parts, given = OTHERS[name](N, K)
    store = BENCH.Store(parts, given)
    return open_weights(method, store, {"quantization_config": settings})


ALL = [*BENCH.FORMATS, *BENCH.GGUF, *OTHERS]
SLICES = (
    slice(None),
    slice(5, 6),
    slice(31, 97),
    slice(0, N, 2),
    slice(129, 1151, 2),
    slice(1000, N),
)


@pytest.mark.parametrize("name", ALL)
def test_rows_have_the_bits_of_a_matrix_that_is_converted_at_once(name):
    rows = opened(name).get("m.weight").data
    assert hashlib.sha256(np.ascontiguousarray(rows)).hexdigest()[:16] == DIGESTS[name]


@pytest.mark.parametrize("name", ALL)
def test_any_rows_by_any_number_of_threads_are_those_of_the_whole(name):
    tensor = opened(name).get("m.weight")
    whole, row_bytes = tensor.data, tensor.nbytes // N
    assert isinstance(tensor, BuiltTensor)
    assert whole.shape == (N, row_bytes)
    for rows in SLICES:
        assert np.array_equal(tensor.cut(rows, row_bytes), whole[rows])
    with ThreadPoolExecutor(3) as pool:
        assert np.array_equal(rows_of(tensor, pool.map), whole)
    parts = PartWeights(opened(name))
    for first, step in ((0, 2), (1, 2), (64, 1)):
        part = parts.get(rows_name("m.weight", first, 500, step=step))
        want = whole[first::step][:500]
        assert np.array_equal(part.data, want)
        assert np.array_equal(part.cut(slice(3, 400, 3), row_bytes), want[3:400:3])


def broken(name):
    """(a stored tensor, its shape) for each one of a format that is made longer or shorter."""
    _, _, parts, _ = BENCH.FORMATS[name](N, K)
    for part, (_, shape) in parts.items():
        for axis, size in enumerate(shape):
            for other in {1, size // 2, size - 1, 2 * size} - {0, size}:
                yield part, (*shape[:axis], other, *shape[axis + 1 :])


def read_broken(name, part, shape):
    method, settings, parts, given = BENCH.FORMATS[name](N, K)
    parts[part] = (parts[part][0], shape)
    given.pop(part, None)
    store = BENCH.Store(parts, given)
    tensor = open_weights(method, store, {"quantization_config": settings}).get("m.weight")
    return tensor, tensor.data


@pytest.mark.parametrize("name", BENCH.FORMATS)
def test_tensors_that_do_not_fit_together_are_refused_or_whole(name):
    for part, shape in broken(name):
        with contextlib.suppress(ModelError):  # users see a traceback of any other error
            tensor, data = read_broken(name, part, shape)
            assert data.nbytes == tensor.nbytes, (part, shape)


@pytest.mark.parametrize("name", [n for n in BENCH.FORMATS if n.startswith(("awq", "gptq"))])
def test_scales_and_zero_points_of_other_outputs_are_refused(name):
    for part, shape in broken(name):
        if part in ("m.scales", "m.qzeros"):
            with pytest.raises(ModelError, match=r"m\.scales and m\.qzeros are"):
                read_broken(name, part, shape)


def peak(read):
    """(bytes that were allocated at most meanwhile, the result)."""
    tracemalloc.start()
    try:
        found = read()
        return tracemalloc.get_traced_memory()[1], found
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ALL)
def test_a_part_converts_no_more_rows_than_it_needs(name):
    """64 rows of every second one take the memory of 128 rows, a ninth of all."""
    weights = PartWeights(opened(name))
    weights.get("m.weight")  # zero points are read once, to choose a type
    part = weights.get(rows_name("m.weight", 129, 64, step=2))
    some, rows = peak(lambda: part.data)
    every, _ = peak(lambda: weights.get("m.weight").cut(slice(0, N), 0))
    assert len(rows) == 64
    assert some < 0.3 * every


def test_rows_are_built_on_all_threads():
    tensor = opened("awq").get("m.weight")
    starts = []

    def each(function, slices):
        for rows in slices:
            starts.append((rows.start, rows.stop))
            yield function(rows)

    rows_of(tensor, each)
    assert starts[0][0] == 0
    assert starts[-1][1] == N
    assert all(a[1] == b[0] for a, b in itertools.pairwise(starts))
    assert len(starts) > 2


class Stack:
    """Fake weights of one stack of matrices in a file."""

    def __init__(self, row_order=None):
        self.data = np.arange(4 * 6 * 64, dtype=np.uint32).view(np.uint8).reshape(4, -1)
        self.tensor = QuantTensor("m.experts.up_proj", (4, 6, 64), "f32", self.data, row_order)

    def names(self):
        return {self.tensor.name}

    def get(self, _):
        return self.tensor

    def kind(self, *_):
        return "dense_f32"


def test_an_experts_matrix_is_a_view_of_the_file():
    stored = Stack()
    weights = PartWeights(stored)
    for e in range(4):
        found = weights.get(f"m.experts.{e}.up_proj.weight")
        assert np.shares_memory(found.data, stored.data)
        assert found.shape == (6, 64)
        assert np.array_equal(found.data, stored.data.reshape(24, 256)[6 * e : 6 * e + 6])
    rows = weights.get(rows_name("m.experts.up_proj", 1, 4, index=2))
    assert np.array_equal(rows.data, stored.data.reshape(24, 256)[13:17])
    assert np.shares_memory(rows.data, stored.data)


def test_rows_that_do_not_lie_together_are_cut_out():
    stored = Stack()
    every_second = PartWeights(stored).get(rows_name("m.experts.up_proj", 1, 3, step=2, index=1))
    assert np.array_equal(every_second.data, stored.data.reshape(24, 256)[[7, 9, 11]])
    order = np.arange(24, dtype=np.int32)[::-1].copy()
    turned = PartWeights(Stack(order)).get("m.experts.3.up_proj.weight")
    assert np.array_equal(turned.data, stored.data.reshape(24, 256)[5::-1])
