"""How far two correct computations may be apart, on any CPU.

Libraries add the terms of a sum in an order that depends on the CPU and on the number of rows. Each
addition errs by up to u of its partial sum. Partial sums of i terms of random signs are about
sqrt(i) terms large, so the errors of K additions add up (independent, and even within +-u) to

    sqrt(sum of i u^2 / 3, i = 1 .. K) = 0.41 K u terms = 0.41 sqrt(K) u of the result's size.

Two computations differ by 0.58 sqrt(K) u (one standard deviation). A model is a chain of sums. Each
sum passes on the error of its inputs and adds an independent error of its own, so the whole chain
errs like one sum of all K terms. The bound for a model is 6 sqrt(K) u, ten standard deviations,
because a test looks at the worst of thousands of values, and because a chain may amplify errors (at
most about twice in the models here, measured against fp64). Bounds are relative to the largest
magnitude of a result. They say nothing about discrete choices: if the logits of two tokens are
closer than the bound, either token is right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

from cpuserve.models import build_program, spec_from_config
from cpuserve.program.operations.attention import Attention
from cpuserve.program.operations.dense import Linear, Logits
from cpuserve.program.operations.experts import ExpertLinear
from cpuserve.program.operations.latent import HeadLinear
from cpuserve.program.operations.recurrent import GatedDelta, Mamba2, SelectiveScan
from cpuserve.program.ops import Op
from cpuserve.program.program import Program

UNIT32, UNIT64 = 2.0**-24, 2.0**-53  # u, the largest relative error of one rounding
DEVIATIONS = 6.0  # in units of sqrt(K) u; one standard deviation is 0.58


def sum_bound(terms: int, unit: float = UNIT32) -> float:
    """Return how far two sums of `terms` products may be apart, relative to their size."""
    return DEVIATIONS * math.sqrt(terms) * unit


def program_bound(program: Program, keys: int, unit: float = UNIT32) -> float:
    """The same for the logits of a program, relative to the largest; keys: tokens of a sequence."""
    widths = {need.name: need.shape[-1] for need in program.weights if need.shape}
    return sum_bound(sum(k for op in program.ops for k in _sums(op, keys, widths)), unit)


def model_bound(path: Path, keys: int, unit: float = UNIT32) -> float:
    """The same for the model in a checkpoint directory."""
    config = json.loads((path / "config.json").read_text())
    return program_bound(build_program(spec_from_config(config)), keys, unit)


def _sums(op: Op, keys: int, widths: dict[str, int]) -> Iterator[int]:
    """Yield the lengths of the sums through which a value passes in `op`, one after another."""
    if isinstance(op, Linear | ExpertLinear | HeadLinear):
        yield op.in_features
    elif isinstance(op, Logits):
        yield widths[op.weight]
    elif isinstance(op, Attention):
        yield from (op.head_dim, keys, keys)  # scores, the sum of the softmax, values
    elif isinstance(op, GatedDelta | Mamba2):
        yield from (op.key_width, keys)  # reading the state, and the tokens that are added to it
    elif isinstance(op, SelectiveScan):
        yield from (op.width, keys)
    else:
        yield getattr(op, "width", 1)  # norms; a few operations on each element count as one


def largest(values: torch.Tensor) -> float:
    """The largest magnitude."""
    return float(values.abs().max())


@contextmanager
def doubles() -> Iterator[None]:
    """Let torch compute in fp64 what it is asked to compute in fp32, on this thread.

    Orders of summation then differ by 1e-15, so a comparison can be a million times as strict.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Doubles():
            yield
    finally:
        torch.set_default_dtype(before)


class _Doubles(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        # Torch calls this for every function and attribute: a million times in a few tests.
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        for arg in args:
            if arg is torch.float32:
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
                break
        if not kwargs:
            return func(*args)
        kwargs = {
            name: torch.float64 if value is torch.float32 else value
            for name, value in kwargs.items()
        }
        return func(*args, **kwargs)


def assert_likeliest(tokens: Sequence[int], logits: torch.Tensor, bound: float) -> None:
    """Check that each of `tokens` has the largest of its `logits` [tokens, vocab], within `bound`.

    bound: of the logits, relative to the largest.
    """
    best = logits.max(dim=1).values
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    room = 2 * bound * largest(logits)  # both may err
    assert bool((best - chosen <= room).all()), (best - chosen, room)


def assert_same_choices(got, want, bound: float) -> None:
    """Compare completions of `tests.helpers.answers.exact` with greedy decoding.

    Tokens and logprobs are equal within `bound` of the largest logprob, up to a place where the two
    likeliest tokens are so close that either is right: from there on the texts may differ.
    """
    assert len(got) == len(want)
    for (tokens, rows), (wanted, expected) in zip(got, want, strict=True):
        assert len(tokens) == len(wanted) == len(rows) == len(expected)
        for token, other, row, known in zip(tokens, wanted, rows, expected, strict=True):
            # The logprob of a token is its logit minus that of all, and both may err.
            room = 2 * bound * max(abs(value) for value in known.values())
            best = sorted(known.values(), reverse=True)
            if token != other:
                assert best[0] - best[1] <= 2 * room, (token, other, row, known)
                break
            assert abs(row[token] - known[other]) <= room, (row, known, room)
            both = row.keys() & known.keys()
            assert max(abs(row[t] - known[t]) for t in both) <= room, (row, known, room)
