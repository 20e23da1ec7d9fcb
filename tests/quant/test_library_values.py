"""Matrices that libraries quantized and dequantized themselves (tests/data/quantized)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from cpuserve.loader.safetensors import SafetensorsFile
from cpuserve.quant import dequantize, open_weights
from cpuserve.quant.stored import StoredTensor

FILES = sorted((Path(__file__).parents[1] / "data" / "quantized").glob("*.safetensors"))
OPENED = {path.stem: SafetensorsFile(path) for path in FILES}
CASES = [
    (library, case)
    for library, file in OPENED.items()
    for case in sorted(file.metadata)
    if case != "library"
]
# Rows of these kernels have scales and minimums in fp16; the libraries have them in fp32 here, or
# compute the minimum.
IN_FP16 = {
    "torchao": ("int8 in groups", "int8 asymmetric"),
    "nvidia-modelopt": ("int4",),
    "hqq": ("4 bits by rows",),
    "autoawq": ("gemm in groups of 128", "gemv in groups of 128"),
    "bitsandbytes": ("nf4 with nested scales", "fp4 with nested scales"),
    "amd-quark": (
        *("uint4 in groups", "uint4 in groups, not reordered", "uint8 in groups", "int8 by row"),
        *("int4 in groups", "int4 in groups, not reordered"),
        *("int4 by row", "int4 by row, not reordered"),
    ),
}


class Recorded:
    """The tensors of one case, which are in a file with the other cases of the library."""

    def __init__(self, file, case, texts):
        self._file, self._texts, self._case = file, texts, case

    def names(self):
        start = f"{self._case}/q."
        return {f"q.{name[len(start) :]}" for name in self._file.tensors if name.startswith(start)}

    def metadata(self):
        return self._texts

    def dtype(self, name):
        return self._file.tensors[f"{self._case}/{name}"].dtype

    def get(self, name):
        tensor = self._file.tensors[f"{self._case}/{name}"]
        data = self._file.file.view(tensor.offset, tensor.size)
        return StoredTensor(name, tensor.shape, tensor.dtype, data)


def last_place(values, dtype):
    """The unit in the last place of the largest value, in `dtype`."""
    return torch.finfo(dtype).eps * torch.exp2(values.abs().amax().log2().floor())


@pytest.mark.parametrize(("library", "case"), CASES)
def test_values_are_those_of_the_library(library, case):
    """Values in bf16 and fp16 are equal; fp32 may differ by the order of two products."""
    file = OPENED[library]
    about = json.loads(file.metadata[case])
    store = Recorded(file, case, about["texts"])
    tensor = open_weights(about["method"], store, about["config"]).get("q.weight")
    with safe_open(file.path, "pt") as stored:
        want = stored.get_tensor(f"{case}/values")
    got = torch.from_numpy(dequantize(tensor)).to(want.dtype)
    assert got.shape == want.shape
    off = (got.float() - want.float()).abs().amax()
    assert want.float().abs().amax() > 0
    if case in IN_FP16.get(library, ()):
        assert 0 < off <= last_place(want.float(), torch.float16)
    elif want.dtype == torch.float32:
        assert off <= last_place(want, torch.float32)
    else:
        assert off == 0
