"""Loading reads every tensor once, packs it, and frees it before it reads the next one."""

import ctypes
import mmap
import os
import threading
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest

from cpuserve import _C
from cpuserve.program.loads import MatrixLoad
from cpuserve.quant.base import WEIGHTS_AT_ONCE, BuiltTensor, QuantTensor
from cpuserve.runtime.native import BATCH_BYTES, BATCHES_AHEAD, fill_vectors, pack_matrices
from tests.helpers.levels import LEVELS
from tests.helpers.patience import PATIENCE_S, wait_until


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

    def load_matrices(self, matrices, _):
        self.events += [("load", number, len(sources)) for number, sources in matrices]

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
        ("load", 1, 1),
        ("release", "q"),
        ("release", "k"),
        ("release", "o"),
        ("release", "norm"),
        ("vector", 2, [1.0] * 4),
    ]
    assert told == [("load", 48, 48)]


class Files:
    """Fake weights of tensors that fill a batch each, but for `small` ones; a fake executor."""

    def __init__(self, small):
        self.tensors, self.batches, self.held = {}, [], set()
        self.asked = []  # names of tensors that are read ahead, at every batch
        for i in range(20):
            size = BATCH_BYTES // 10 if i in small else BATCH_BYTES
            data = np.broadcast_to(np.uint8(i), (1, size))
            self.tensors[f"{i}"] = QuantTensor(
                f"{i}", (1, size), "f32", data, None, lambda i=i: self.held.discard(i)
            )

    def get(self, name):
        return self.tensors[name]

    def load_matrices(self, matrices, ahead):
        self.batches.append([number for number, _ in matrices])
        self.asked.append([int(data[0, 0]) for data in ahead])
        self.held |= {number for number, _ in matrices}
        assert len(self.held) == len(matrices)  # those of the batch before are released


def test_small_matrices_are_packed_together_while_the_next_ones_are_read():
    it = Files(small=range(3, 12))
    lowered = SimpleNamespace(matrices=[MatrixLoad(i, (f"{i}",)) for i in range(20)])
    pack_matrices(it, lowered, it, None)
    assert it.batches == [[0], [1], [2], [*range(3, 13)], *([i] for i in range(13, 20))]
    assert [*chain(*it.asked)] == [*range(20)]  # each once, in order
    assert it.asked[0] == [*chain(*it.batches[: 1 + BATCHES_AHEAD])]
    assert it.asked[1] == it.batches[1 + BATCHES_AHEAD]
    assert not it.held


def test_rows_that_are_built_are_not_read_ahead():
    built = BuiltTensor("b", (2, 8), "f32", 64, lambda _: np.zeros((2, 32), np.uint8), None)
    plain = QuantTensor("p", (2, 8), "f32", np.zeros((2, 32), np.uint8))
    lowered = SimpleNamespace(matrices=[MatrixLoad(0, ("b",)), MatrixLoad(1, ("p",))])
    asked = []
    fake = SimpleNamespace(
        get={"b": built, "p": plain}.__getitem__,
        load_matrices=lambda _, ahead: asked.extend(id(data) for data in ahead),
    )
    pack_matrices(fake, lowered, fake, None)
    assert asked == [id(plain.data)]


@pytest.mark.parametrize("ranks", [(), (1, 2), (1, 1, 1)], ids=["one", "uneven", "three"])
def test_matrices_that_are_packed_together_have_the_bytes_of_each_alone(ranks):
    rng = np.random.default_rng(0)
    team = _C.Team(3, [], ranks=list(ranks))
    program = _C.Program(LEVELS[0], 4, 1)
    shapes = [(64, 32), (16, 96), (200, 64), (8, 32)]
    ids = [program.matrix(f"{n}", "dense_f32", n, k, [n], False) for n, k in shapes]
    gated = program.matrix("gated", "dense_f32", 96, 32, [48, 48], True)
    rows = [rng.standard_normal(shape, np.float32).view(np.uint8) for shape in shapes]
    both = [rng.standard_normal((48, 32), np.float32).view(np.uint8) for _ in range(2)]
    order = rng.permutation(48).astype(np.int32)
    sources = [(i, [(data, "f32", None)]) for i, data in zip(ids, rows, strict=True)]
    sources.append((gated, [(both[0], "f32", order), (both[1], "f32", None)]))
    found = []

    def main():
        for together in (True, False):
            executor = _C.Executor(team, program, 1, "f32", 1)
            if together:
                executor.load_matrices(sources, rows)
            else:
                for matrix, parts in sources:
                    executor.load_matrix(matrix, parts)
            arenas = b"".join(arena.tobytes() for arena in executor.packed_arenas)
            found.append((executor.packed_digest, arenas))

    team.run(main)
    assert found[0] == found[1]
    assert found[0][0] != 0


@pytest.mark.parametrize("gated", [False, True])
def test_a_matrix_of_many_blocks_has_the_bytes_of_its_panels(gated):
    rng = np.random.default_rng(0)
    n, k = 66 * 16, 1024  # a block of 1 MB has 16 panels of 64 KB
    rows = rng.integers(0, 256, (n, 4 * k), np.uint8)
    order = rng.permutation(n // 2).astype(np.int32)
    first, second = rows[: n // 2], rows[n // 2 :]
    panels = np.concatenate([first[order], second]).reshape(66, 16, 4 * k)
    if gated:  # a panel of the gate, then one of the input that it gates
        panels = panels.reshape(2, 33, 16, 4 * k).swapaxes(0, 1).reshape(panels.shape)

    def arena(team, sources):
        program = _C.Program(LEVELS[0], 4, 1)
        ids = [
            program.matrix(f"{i}", "dense_f32", sum(map(len, parts)), k, [*map(len, parts)], glu)
            for i, (parts, _, glu) in enumerate(sources)
        ]
        found = []

        def main():
            executor = _C.Executor(team, program, 1, "f32", 1)
            for matrix, (parts, first_order, _) in zip(ids, sources, strict=True):
                orders = [first_order, *[None] * (len(parts) - 1)]
                tensors = [(p, "f32", o) for p, o in zip(parts, orders, strict=True)]
                executor.load_matrix(matrix, tensors)
            found.append(executor.packed_arenas[0].tobytes())

        team.run(main)
        return found[0][: rows.nbytes]

    expected = arena(_C.Team(1, []), [([panel], None, False) for panel in panels])
    assert len(expected) == rows.nbytes
    for threads in (1, 2):
        assert arena(_C.Team(threads, []), [([first, second], order, gated)]) == expected


def test_without_a_packed_file_no_digest_is_computed():
    team = _C.Team(1, [])
    program = _C.Program(LEVELS[0], 4, 1)
    number = program.matrix("m", "dense_f32", 16, 32, [16], False)
    executor = _C.Executor(team, program, 1, "f32", 1)
    rows = np.ones((16, 128), np.uint8)
    executor.load_matrix(number, [(rows, "f32", None)])
    digest = executor.packed_digest
    assert digest != 0
    executor.skip_digest()
    executor.load_matrix(number, [(rows, "f32", None)])
    assert executor.packed_digest == digest


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system has no posix_fadvise")
def test_all_that_comes_next_is_read_whatever_the_read_ahead_of_the_disk(tmp_path):
    size = 40 << 20  # more than any disk reads for one request
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.write(os.urandom(size))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    program = _C.Program(LEVELS[0], 4, 1)
    number = program.matrix("m", "dense_f32", 16, 32, [16], False)
    executor = _C.Executor(_C.Team(1, []), program, 1, "f32", 1)
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    later = np.frombuffer(content, np.uint8)
    rows = np.ones((16, 128), np.uint8)

    def all_is_read():
        # The system may ignore a request while it has little free memory. Requests of one length
        # from the beginning on would never reach the end, however often they come.
        executor.load_matrices([(number, [(rows, "f32", None)])], [later])
        return cached_bytes(later) == size

    wait_until(all_is_read, lambda: f"{cached_bytes(later) >> 20} MB of {size >> 20} were read")


def cached_bytes(mapped):
    """Bytes of a mapping from its first page on that are in the page cache."""
    pages = np.zeros(-(-mapped.nbytes // mmap.PAGESIZE), np.uint8)
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    address, size = ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(mapped.nbytes)
    assert mincore(address, size, ctypes.c_void_p(pages.ctypes.data)) == 0
    return int((pages & 1).sum()) * mmap.PAGESIZE


def test_one_wrong_matrix_of_many_is_named_before_any_is_packed():
    team = _C.Team(1, [])
    program = _C.Program(LEVELS[0], 4, 1)
    ids = [program.matrix(name, "dense_f32", 16, 32, [16], False) for name in ("good", "bad")]
    executor = _C.Executor(team, program, 1, "f32", 1)
    rows = np.ones((16, 128), np.uint8)
    with pytest.raises(ValueError, match="matrix bad: tensor 0 has 8 rows, not 16"):
        executor.load_matrices(
            [(ids[0], [(rows, "f32", None)]), (ids[1], [(rows[:8], "f32", None)])]
        )
    assert executor.packed_digest == 0


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
            self.all_at_work.wait(timeout=PATIENCE_S)
            if hasattr(os, "sched_getaffinity"):
                self.affinities.append(os.sched_getaffinity(0))
            return np.repeat(np.arange(n, dtype=np.uint8)[rows, None], k, axis=1)

        return BuiltTensor(name, (n, k), "gguf_q8_0", n * k, build, None)

    def load_matrices(self, matrices, _):
        (((_, ((self.rows, _, _),)),)) = matrices


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
