"""Loading reads every tensor once, packs it, and frees it before it reads the next one."""

from types import SimpleNamespace

import numpy as np

from cpuserve.program.lower import MatrixLoad
from cpuserve.quant.base import QuantTensor
from cpuserve.runtime.native import fill_vectors, pack_matrices


class Recorder:
    """Fake weights and native executor that record their calls."""

    def __init__(self):
        self.events = []

    def get(self, name):
        self.events.append(("get", name))
        data = np.zeros((2, 8), np.uint8)

        def release():
            self.events.append(("release", name))

        return QuantTensor(name, (2, 2), "f32", data, None, release)

    def load_matrix(self, number, sources):
        self.events.append(("load", number, len(sources)))

    def load_vector(self, number, data):
        self.events.append(("vector", number, data.tolist()))


def test_a_tensor_is_asked_for_once_and_released_when_it_is_packed():
    it, told = Recorder(), []
    matrices = [MatrixLoad(0, ("q", "k")), MatrixLoad(1, ("o",))]
    vectors = [SimpleNamespace(id=2, make=lambda read: read("norm") + np.float32(1))]
    lowered = SimpleNamespace(matrices=matrices, vectors=vectors)
    pack_matrices(it, lowered, it, lambda *report: told.append(report))
    fill_vectors(it, lowered, it)
    assert [e for e in it.events if e[0] == "get"] == [("get", n) for n in ("q", "k", "o", "norm")]
    assert [e for e in it.events if e[0] != "get"] == [
        ("load", 0, 2),
        ("release", "q"),
        ("release", "k"),
        ("load", 1, 1),
        ("release", "o"),
        ("release", "norm"),
        ("vector", 2, [1.0] * 4),
    ]
    assert told == [("load", 32, 48), ("load", 48, 48)]
