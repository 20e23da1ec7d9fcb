"""Names of parts of stored tensors, and the rows that they stand for."""

import numpy as np
import pytest
import torch

from cpuserve.base.errors import ModelError
from cpuserve.program.interpret import Interpreter
from cpuserve.program.parts import TensorPart, parse, rows, stored_needs
from cpuserve.program.program import Program, WeightNeed
from cpuserve.quant import dequantize
from cpuserve.quant.base import QuantTensor
from cpuserve.quant.parts import PartWeights, transposed

NAMES = {
    "a.b[0:160].weight": TensorPart("a.b.weight", 0, 160),
    "a.b[3][160:320].weight": TensorPart("a.b.weight", 160, 320, 1, 3),
    "a.b[1:64:2].bias": TensorPart("a.b.bias", 1, 64, 2),
    "a.b[2:5]": TensorPart("a.b", 2, 5),
    "a.b[:,64:128].weight": TensorPart("a.b.weight", 64, 128, columns=True),
}


@pytest.mark.parametrize(("name", "part"), NAMES.items())
def test_a_name_is_read(name, part):
    assert parse(name) == part


@pytest.mark.parametrize("name", ["a.b.weight", "a.b[3].weight", "a.b[x:2].weight", "[0:2]"])
def test_other_names_are_those_of_whole_tensors(name):
    assert parse(name) is None


def test_rows_name_what_parse_reads():
    assert rows("a", 3, 4) == "a[3:7]"
    assert rows("a", 3, 4, index=2) == "a[2][3:7]"
    assert rows("a", 1, 3, step=2) == "a[1:6:2]"
    assert list(range(10))[parse("a[1:6:2]").of((10,))] == [1, 3, 5]


def test_stored_tensors_end_with_the_last_rows_that_are_needed():
    needs = [
        WeightNeed("a[4:6].weight", (2, 8), "matrix"),
        WeightNeed("b.weight", (3,), "vector"),
        WeightNeed("a[0:4].weight", (4, 8), "matrix"),
        WeightNeed("c[1][0:2].weight", (2, 8), "matrix"),
        WeightNeed("c[0][2:5].weight", (3, 8), "matrix"),
        WeightNeed("d[0:4:2].bias", (2,), "vector"),
        WeightNeed("d[1:4:2].bias", (2,), "vector"),
        WeightNeed("e[:,4:6].weight", (2, 8), "matrix"),
        WeightNeed("e[:,0:4].weight", (4, 8), "matrix"),
        WeightNeed("e[:,4:6].bias", (2,), "vector"),
    ]
    assert stored_needs(needs) == (
        WeightNeed("a.weight", (6, 8), "matrix"),
        WeightNeed("b.weight", (3,), "vector"),
        WeightNeed("c.weight", (2, 5, 8), "matrix"),
        WeightNeed("d.bias", (4,), "vector"),
        WeightNeed("e.weight", (8, 6), "matrix"),
        WeightNeed("e.bias", (6,), "vector"),
    )


class Whole:
    """Weights of three tensors in a given source type; matrix "q" has its rows permuted."""

    def __init__(self, source="f32"):
        element = {"f32": np.float32, "f16": np.float16}[source]
        values = {
            "m.weight": np.arange(48).reshape(6, 8),
            "s.weight": np.arange(48).reshape(2, 3, 8),
            "v.bias": np.arange(6),
            "q.weight": np.arange(48).reshape(6, 8),
        }
        self.values = {name: some.astype(element) for name, some in values.items()}
        self.order = np.array([4, 0, 5, 1, 3, 2], np.int32)
        self.source = source

    def names(self):
        return set(self.values)

    def get(self, name):
        value = self.values[name]
        count = value.shape[0] if value.ndim > 1 else 1
        order = self.order if name == "q.weight" else None
        data = np.ascontiguousarray(value).reshape(count, -1).view(np.uint8)
        return QuantTensor(name, value.shape, self.source, data, order)

    def kind(self, name, dtype):
        return f"{name} {dtype}"


@pytest.mark.parametrize("source", ["f32", "f16"])
@pytest.mark.parametrize(
    ("name", "cut"),
    {
        "m[2:5].weight": lambda w: w.values["m.weight"][2:5],
        "m[1:6:2].weight": lambda w: w.values["m.weight"][1:6:2],
        "s[1][0:2].weight": lambda w: w.values["s.weight"][1, :2],
        "v[1:4].bias": lambda w: w.values["v.bias"][1:4],
        "v[0:6:3].bias": lambda w: w.values["v.bias"][::3],
        "q[1:4].weight": lambda w: w.values["q.weight"][w.order][1:4],
        "m[:,3:8].weight": lambda w: w.values["m.weight"].T[3:8],
        "v[:,1:4].bias": lambda w: w.values["v.bias"][1:4],
    }.items(),
)
def test_parts_are_rows_of_the_tensor(source, name, cut):
    whole = Whole(source)
    weights, want = PartWeights(whole), cut(whole)
    got = weights.get(name)
    assert got.shape == want.shape
    assert dequantize(got).tolist() == want.tolist()
    assert got.nbytes == want.nbytes
    assert weights.kind(name, "x") == f"{parse(name).tensor} x"
    assert weights.names() == whole.names()
    assert weights.get("m.weight").data.tobytes() == whole.values["m.weight"].tobytes()


@pytest.mark.parametrize(
    "name",
    [
        "m[2:7].weight",
        "m[3:3].weight",
        "m[:,3:9].weight",
        "s[2][0:1].weight",
        "s[0][0:4].weight",
        "v[9:12].bias",
    ],
)
def test_rows_that_a_tensor_does_not_have_are_refused(name):
    with pytest.raises(ModelError, match="does not fit its config"):
        PartWeights(Whole()).get(name)


def test_the_interpreter_takes_parts_of_whole_tensors():
    whole = {
        "m.weight": torch.arange(12.0).reshape(6, 2),
        "s.w": torch.arange(12.0).reshape(2, 3, 2),
    }
    needs = (
        WeightNeed("m[1:4:2].weight", (2, 2), "matrix"),
        WeightNeed("s[1][1:3].w", (2, 2), "matrix"),
        WeightNeed("m[:,1:2].weight", (1, 6), "matrix"),
    )
    program = Program((), (), needs, (), vocab=2, width=2)
    tensors = Interpreter(program, whole)._tensors
    assert tensors["m[1:4:2].weight"].tolist() == [[2, 3], [6, 7]]
    assert tensors["s[1][1:3].w"].tolist() == [[8, 9], [10, 11]]
    assert tensors["m[:,1:2].weight"].tolist() == [[1, 3, 5, 7, 9, 11]]


@pytest.mark.parametrize("source", ["f32", "f16"])
def test_stacks_of_gpt_oss_are_transposed_and_gate_and_up_alternate(source):
    whole = Whole(source)
    both, down = np.arange(96.0).reshape(2, 8, 6), np.arange(48.0).reshape(2, 3, 8)
    biases = np.arange(12.0).reshape(2, 6), np.arange(16.0).reshape(2, 8)
    whole.values = {
        "mlp.experts.gate_up_proj": both.astype(np.float32),
        "mlp.experts.down_proj": down.astype(np.float32),
        "mlp.experts.gate_up_proj_bias": biases[0].astype(np.float32),
        "mlp.experts.down_proj_bias": biases[1].astype(np.float32),
    }
    if source == "f16":
        whole.values = {n: v.astype(np.float16) for n, v in whole.values.items()}
    weights = PartWeights(whole)
    for e in range(2):
        wanted = {
            "gate_proj.weight": both[e, :, ::2].T,
            "up_proj.weight": both[e, :, 1::2].T,
            "down_proj.weight": down[e].T,
            "gate_proj.bias": biases[0][e, ::2],
            "up_proj.bias": biases[0][e, 1::2],
            "down_proj.bias": biases[1][e],
        }
        for name, want in wanted.items():
            got = weights.get(f"mlp.experts.{e}.{name}")
            assert got.shape == want.shape
            assert dequantize(got).tolist() == want.tolist()
            assert got.nbytes == got.data.nbytes == want.size * (4 if source == "f32" else 2)
    assert len(weights.names()) == 12
    stack = transposed(whole.get("mlp.experts.down_proj"))
    assert stack.shape == (2, 8, 3)
    assert (
        stack.data.tobytes()
        == np.ascontiguousarray(whole.values["mlp.experts.down_proj"].swapaxes(1, 2)).tobytes()
    )


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_stacks_of_experts_are_found_under_the_names_of_their_matrices(suffix):
    whole = Whole()
    both, down = np.arange(96.0).reshape(2, 6, 8), np.arange(48.0).reshape(2, 8, 3)
    whole.values = {
        f"mlp.experts.gate_up_proj{suffix}": both.astype(np.float32),
        f"mlp.experts.down_proj{suffix}": down.astype(np.float32),
        "mlp.experts.bias.up_proj.weight": np.ones((2, 2), np.float32),
    }
    weights = PartWeights(whole)
    own = {
        f"mlp.experts.{e}.{part}_proj.weight" for e in range(2) for part in ("gate", "up", "down")
    }
    assert weights.names() == own | {"mlp.experts.bias.up_proj.weight"}

    def values(name):
        return dequantize(weights.get(f"mlp.experts.{name}_proj.weight")).tolist()

    assert values("1.gate") == both[1, :3].tolist()
    assert values("0.up") == both[0, 3:].tolist()
    assert values("1.down") == down[1].tolist()
    assert (
        weights.kind("mlp.experts.1.up_proj.weight", "x") == f"mlp.experts.gate_up_proj{suffix} x"
    )
