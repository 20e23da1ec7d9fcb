"""The hashes of n-grams of token ids, which select rows of an embedding (Qwen4-Exp)."""

from __future__ import annotations

from itertools import count, islice
from math import isqrt

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio, the increment of SplitMix64
_LAYER_STEP = 10007  # the difference between the seeds of successive tables


def hash_multipliers(vocab: int, longest: int, table: int, seed: int) -> tuple[int, ...]:
    """Return an odd multiplier for each token of an n-gram of at most `longest` tokens.

    The product of a multiplier and a token id is below 2^63.

    table: the number of the table, which is part of the seed.
    """
    bound = max(1, ((1 << 63) - 1) // max(vocab, 1) // 2)
    start = seed + _LAYER_STEP * table
    return tuple(2 * (_mix(start + _GOLDEN * (i + 1)) % bound) + 1 for i in range(longest))


def _mix(value: int) -> int:
    """Return the output of SplitMix64 (Steele et al. 2014) for the state `value`."""
    z = (value + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def prime_sizes(least: int, heads: int, table: int) -> tuple[int, ...]:
    """Return the number of rows of each head of a table: primes that are at least `least`.

    Each table uses `heads` primes; they follow the primes of the table before it.
    """
    primes = (n for n in count(least) if _is_prime(n))
    return tuple(islice(primes, table * heads, (table + 1) * heads))


def _is_prime(n: int) -> bool:
    return n == 2 or (n > 2 and n % 2 == 1 and all(n % d for d in range(3, isqrt(n) + 1, 2)))


def part_rows(rows: int, unit: int, parts: int) -> tuple[int, ...]:
    """Return the rows of each stored part of a table; the sum is a multiple of `unit`.

    There are at most `parts` parts. All except the last one have the same number of rows.
    """
    total = -(-rows // unit) * unit
    each = -(-total // parts)
    return tuple(min(each, total - first) for first in range(0, total, each))
