"""Loading reads every tensor once, packs it, and frees it before it reads the next one."""

import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from cpuserve.program.lower import MatrixLoad
from cpuserve.quant.base import WEIGHTS_AT_ONCE, BuiltTensor, QuantTensor
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


class Converted:
    """Fake weights of one matrix with rows that are built, and a fake executor that keeps them."""

    def __init__(self, threads):
        self.shape = (32 * threads, WEIGHTS_AT_ONCE // 32)  # 32 rows are built at a time
        self.all_at_work = threading.Barrier(threads)
        self.affinities, self.rows = [], None

    def get(self, name):
        n, k = self.shape

        def build(rows):
            # All threads have to be here before one may go on.
            self.all_at_work.wait(timeout=60)
            if hasattr(os, "sched_getaffinity"):
                self.affinities.append(os.sched_getaffinity(0))
            return np.repeat(np.arange(n, dtype=np.uint8)[rows, None], k, axis=1)

        return BuiltTensor(name, (n, k), "gguf_q8_0", n * k, build, None)

    def load_matrix(self, _, sources):
        ((self.rows, _, _),) = sources


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_rows_are_built_by_all_threads_at_once(threads):
    it = Converted(threads)
    lowered = SimpleNamespace(matrices=[MatrixLoad(0, ("m",))])
    pack_matrices(it, lowered, it, None, threads=threads)
    assert np.array_equal(it.rows[:, 0], np.arange(32 * threads))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no threads")
def test_threads_that_convert_are_not_pinned_as_their_creator_is():
    cpus = sorted(os.sched_getaffinity(0))
    it = Converted(2)
    lowered = SimpleNamespace(matrices=[MatrixLoad(0, ("m",))])

    def pinned():
        os.sched_setaffinity(0, cpus[:1])
        pack_matrices(it, lowered, it, None, threads=2, cpus=cpus)

    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join()
    assert it.affinities == [set(cpus)] * 2
