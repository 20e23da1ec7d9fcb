"""A small random decoder as a `_C.Program`, and the same model in numpy (float64)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cpuserve import _C
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.slot import SlotRequest

NONE = -1


def greedy(*, seed=0, prompt=(), output=(), stop_ids=(), **params):
    """A request that samples greedily, unless `params` differ."""
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": None, **params})
    return SlotRequest(sampling, seed, list(prompt), list(output), list(stop_ids))


@dataclass(frozen=True)
class Shape:
    """Unusual sizes: no width is a multiple of a strip; head_dim and vocabulary are padded."""

    vocab: int = 101
    width: int = 72
    layers: int = 2
    q_heads: int = 6
    kv_heads: int = 2
    head_dim: int = 20
    hidden: int = 40
    positions: int = 1200
    eps: float = 1e-5

    @property
    def q_width(self) -> int:
        return self.q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass
class Model:
    """Return the weights by name, in fp32."""

    shape: Shape
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def random(cls, shape: Shape | None = None, seed: int = 0) -> Model:
        s = shape or Shape()
        rng = np.random.default_rng(seed)

        def matrix(n, k):
            return (rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32)

        def vector(n, around=0.0):
            return (around + 0.1 * rng.standard_normal(n)).astype(np.float32)

        t = {"embed": matrix(s.vocab, s.width) * 4, "norm": vector(s.width, 1)}
        for i in range(s.layers):
            t[f"{i}.norm1"], t[f"{i}.norm2"] = vector(s.width, 1), vector(s.width, 1)
            t[f"{i}.q"] = matrix(s.q_width, s.width)
            t[f"{i}.k"] = matrix(s.kv_width, s.width)
            t[f"{i}.v"] = matrix(s.kv_width, s.width)
            t[f"{i}.qkv_bias"] = vector(s.q_width + 2 * s.kv_width)
            t[f"{i}.o"] = matrix(s.width, s.q_width)
            t[f"{i}.gate"] = matrix(s.hidden, s.width)
            t[f"{i}.up"] = matrix(s.hidden, s.width)
            t[f"{i}.gate_up_bias"] = vector(2 * s.hidden)
            t[f"{i}.down"] = matrix(s.width, s.hidden)
        angle = np.outer(np.arange(s.positions), 100.0 ** -(np.arange(s.head_dim // 2) / 10))
        t["cos"], t["sin"] = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        return cls(s, t)

    def logits(self, ids: list[int]) -> np.ndarray:
        """Return the logits [T, vocab] of every position, in float64."""
        s, t = self.shape, {k: v.astype(np.float64) for k, v in self.tensors.items()}
        n = len(ids)
        x = t["embed"][ids]
        visible = np.tril(np.ones((n, n), bool))
        for i in range(s.layers):
            h = rms_norm(x, t[f"{i}.norm1"], s.eps)
            w = np.concatenate([t[f"{i}.{p}"] for p in "qkv"])
            qkv = (h @ w.T + t[f"{i}.qkv_bias"]).reshape(n, -1, s.head_dim)
            q, k, v = np.split(qkv, [s.q_heads, s.q_heads + s.kv_heads], axis=1)
            q, k = rotate(q, t["cos"][:n], t["sin"][:n]), rotate(k, t["cos"][:n], t["sin"][:n])
            k, v = (np.repeat(a, s.q_heads // s.kv_heads, axis=1) for a in (k, v))
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(s.head_dim)
            p = softmax(np.where(visible, scores, -np.inf))
            x = x + np.einsum("hqk,khd->qhd", p, v).reshape(n, -1) @ t[f"{i}.o"].T
            h = rms_norm(x, t[f"{i}.norm2"], s.eps)
            bias = t[f"{i}.gate_up_bias"]
            gate = h @ t[f"{i}.gate"].T + bias[: s.hidden]
            up = h @ t[f"{i}.up"].T + bias[s.hidden :]
            x = x + (gate / (1 + np.exp(-gate)) * up) @ t[f"{i}.down"].T
        return rms_norm(x, t["norm"], s.eps) @ t["embed"].T


def rms_norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rotate(x, cos, sin):
    a, b = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Native:
    """The model on `_C.Executor`. `separate`: q, k and v are three matrices writing one value."""

    def __init__(
        self, model, *, isa=None, threads=1, kind="dense_f32", kv="f32", separate=False,
        max_tokens=1200, max_seqs=8, num_blocks=64, num_slots=8, ranks=(), cpus=None,
        speeds=(),
    ):  # fmt: skip
        self.model, self.kind, self.kv, self.separate = model, kind, kv, separate
        self.isa = isa or _C.isa_levels()[-1]
        self.team = _C.Team(sum(ranks) or threads, cpus, ranks=ranks, speeds=speeds)
        self.program = _C.Program(self.isa, max_tokens, max_seqs)
        self.matrices: dict[int, list[str]] = {}
        self.vectors: dict[int, np.ndarray] = {}
        self._build()
        self._sizes = (num_blocks, kv, num_slots, 5)
        self.executor = None

    def run(self, use):
        """`use(self)` with a loaded executor, on the team's thread 0; returns its result."""
        result = []

        def main():
            self.load()
            result.append(use(self))

        self.team.run(main)
        return result[0]

    def load(self):
        self.executor = _C.Executor(self.team, self.program, *self._sizes)
        for matrix, names in self.matrices.items():
            tensors = [self.model.tensors[n] for n in names]
            self.executor.load_matrix(matrix, [source(t, "f32") for t in tensors])
        for vector, data in self.vectors.items():
            self.executor.load_vector(vector, np.ascontiguousarray(data.reshape(-1)))

    def _matrix(self, *names, glu=False):
        tensors = [self.model.tensors[n] for n in names]
        rows = [len(t) for t in tensors]
        m = self.program.matrix(
            "+".join(names), self.kind, sum(rows), tensors[0].shape[1], rows, glu
        )
        self.matrices[m] = list(names)
        return m

    def _vector(self, name, data=None):
        data = self.model.tensors[name] if data is None else data
        v = self.program.vector(name, data.size)
        self.vectors[v] = data
        return v

    def _build(self):
        s, p = self.model.shape, self.program
        act = {"dense_bf16": "bf16", "dense_f16": "f32", "dense_f32": "f32"}.get(self.kind, "q8g32")
        pad = -(-s.head_dim // 16) * 16
        x = p.value("x", s.width, "f32")
        h = p.value("h", s.width, act)
        qkv = p.value("qkv", s.q_width + 2 * s.kv_width, "f32")
        q = p.value("q", s.q_heads * pad, "bf16" if self.kv == "bf16" else "f32")
        a32 = p.value("a32", s.q_width, "f32")
        a = p.value("a", s.q_width, act)
        g = p.value("g", s.hidden, act)
        embed, cos, sin = self._matrix("embed"), self._vector("cos"), self._vector("sin")
        p.embed(x, embed, 1.0)
        for i in range(s.layers):
            layer = p.kv_layer(s.kv_heads, s.head_dim)
            p.rms_norm(x, h, self._vector(f"{i}.norm1"), s.eps)
            self._qkv(i, h, qkv)
            p.rope_store_kv(qkv, q, layer, s.q_heads, s.head_dim, cos, sin, NONE, NONE, s.eps)
            scale = s.head_dim**-0.5
            p.attention(q, a32, layer, s.q_heads, scale, 0, 0.0, NONE, NONE)
            p.convert(a32, a)
            p.linear(a, x, self._matrix(f"{i}.o"), NONE, "none", False, True, 0)
            p.rms_norm(x, h, self._vector(f"{i}.norm2"), s.eps)
            gate_up = self._matrix(f"{i}.gate", f"{i}.up", glu=True)
            p.linear(h, g, gate_up, self._vector(f"{i}.gate_up_bias"), "silu", True, False, 0)
            p.linear(g, x, self._matrix(f"{i}.down"), NONE, "none", False, True, 0)
        p.rms_norm(x, h, self._vector("norm"), s.eps)
        p.logits(h, embed, NONE, 1.0, 0.0)

    def _qkv(self, i, h, qkv):
        bias = self.model.tensors[f"{i}.qkv_bias"]
        if not self.separate:
            m = self._matrix(f"{i}.q", f"{i}.k", f"{i}.v")
            v = self._vector(f"{i}.qkv_bias")
            self.program.linear(h, qkv, m, v, "none", False, False, 0)
            return
        column = 0
        for part in "qkv":
            m, rows = self._matrix(f"{i}.{part}"), len(self.model.tensors[f"{i}.{part}"])
            v = self._vector(f"{i}.{part}_bias", bias[column : column + rows])
            self.program.linear(h, qkv, m, v, "none", False, False, column)
            column += rows


def source(tensor, kind):
    """Return an fp32 tensor as arguments of load_matrix."""
    return np.ascontiguousarray(tensor).view(np.uint8).reshape(len(tensor), -1), kind, None


@dataclass
class Chunk:
    """Tokens `start .. start + len(ids)` of a sequence; rows are (index, target, num_top)."""

    ids: list[int]
    start: int
    blocks: list[int]
    rows: list[tuple[int, int, int]] = field(default_factory=list)
    slot: int = 0


def words(*chunks, row_masks=(), num_masks=0):
    """One step's int32 block (cpuserve/runtime/executor.py: StepArrays)."""
    lengths = [len(c.ids) for c in chunks]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tables = np.concatenate([[0], np.cumsum([len(c.blocks) for c in chunks])])
    slots = range(len(chunks))  # which keep the tables; each step sends them whole
    rows = [(starts[i] + r[0], c.slot, r[1], r[2]) for i, c in enumerate(chunks) for r in c.rows]
    parts = [
        [starts[-1], len(chunks), len(rows), tables[-1], num_masks, *[0] * 7],
        *[c.ids for c in chunks],
        *[range(c.start, c.start + n) for c, n in zip(chunks, lengths, strict=True)],
        starts,
        [c.start + n for c, n in zip(chunks, lengths, strict=True)],
        slots,
        [0] * len(chunks),
        tables,
        *[c.blocks for c in chunks],
        *[[r[column] for r in rows] for column in range(4)],
        row_masks,
    ]
    return np.concatenate([np.asarray(list(p), np.int32) for p in parts]).astype(np.int32)


def all_rows(n):
    """Score rows for every token of a chunk of n (target 0: nothing is sampled)."""
    return [(i, 0, -1) for i in range(n)]


def blocks_for(n, first=0):
    """Return enough blocks for n tokens, in a scattered order."""
    return [first + b for b in range(-(-n // 32))][::-1]
