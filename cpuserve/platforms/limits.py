"""Upper bounds of token rates: few rows wait for memory, and many rows for arithmetic.

A step reads its weights once, and multiplies each weight by one row of activations for each token
(by two rows, if activations have two int8 terms). So it takes at least as long as reading takes,
and at least as long as multiplying takes. At AVX2, arithmetic is the limit from about 4 rows on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

REQUESTS = (1, 4, 8, 32)  # the numbers of requests that reports state limits for
# The bytes of a weight in each type of dot products: in fp32, bf16, Q8_0 and Q4_0 of GGUF.
BYTES_OF_WEIGHT = {"f32": 4.0, "bf16": 2.0, "int8": 34 / 32, "int4": 18 / 32}


class RateLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The most tokens per second that all of `requests` requests can decode together.

    by: what limits the rate: reading weights ("memory") or multiplying them ("arithmetic").
    """

    requests: int
    tokens_per_s: float
    by: Literal["memory", "arithmetic"]


class Part(NamedTuple):
    """The weights of a step that are multiplied with one type of dot products.

    dot: the type, by its name in the probes.
    num_bytes: the bytes of these weights that the step reads.
    products: the products of a token with these weights.
    """

    dot: str
    num_bytes: float
    products: float


def rate_limit(
    requests: int,
    parts: Sequence[Part],
    read_bytes_per_s: float,
    dot_ops_per_s: Mapping[str, float],
) -> RateLimit:
    """Return the limit for `requests` requests; a step reads and multiplies `parts`.

    read_bytes_per_s, dot_ops_per_s: the measured rates of all threads; a product is two operations.
    """
    reading = [part.num_bytes / read_bytes_per_s for part in parts]
    multiplying = [2 * requests * part.products / dot_ops_per_s[part.dot] for part in parts]
    seconds = sum(map(max, reading, multiplying))
    return RateLimit(
        requests=requests,
        tokens_per_s=requests / seconds if seconds else 0.0,
        by="memory" if sum(reading) >= sum(multiplying) else "arithmetic",
    )


def limits_by_type(
    read_bytes_per_s: float, dot_ops_per_s: Mapping[str, float]
) -> dict[str, tuple[RateLimit, ...]]:
    """Return the limits of a model with a billion weights, for each type of dot products."""
    parts = {dot: Part(dot, 1e9 * size, 1e9) for dot, size in BYTES_OF_WEIGHT.items()}
    return {
        dot: tuple(rate_limit(n, [part], read_bytes_per_s, dot_ops_per_s) for n in REQUESTS)
        for dot, part in parts.items()
    }


def told_limits(limits: Sequence[RateLimit]) -> str:
    """Return the limits as text, with a mark where arithmetic becomes the limit.

    An example: "40 tokens/s for one request, 160 for 4, 200 for 8 (by arithmetic), 200 for 32".
    """
    first = next((limit for limit in limits if limit.by == "arithmetic"), None)
    texts: list[str] = []
    for limit in limits:
        number = "one request" if limit.requests == 1 else str(limit.requests)
        unit = "" if texts else " tokens/s"
        mark = " (by arithmetic from here on)" if limit is first else ""
        texts.append(f"{limit.tokens_per_s:.0f}{unit} for {number}{mark}")
    return ", ".join(texts)
