"""Tables of constants for the ops: RoPE, waves of places, factors of queries, ALiBi slopes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.program.elementary import cos_sin, logarithm
from cpuserve.program.ops import Rope

if TYPE_CHECKING:  # building a program needs no numpy
    import numpy as np
    import numpy.typing as npt

    Float32 = npt.NDArray[np.float32]


def rope_tables(
    rope: Rope, positions: npt.NDArray[np.int32], *, long: bool
) -> tuple[Float32, Float32]:
    """Return (cos, sin), each [len(positions), rotary / 2], multiplied by the attention factor.

    Angles are fp32 products of position and frequency, as in transformers.

    long: whether a LongRoPE uses its frequencies for long sequences.
    """
    import numpy as np

    freqs = rope.long_freq if long and rope.long_freq else rope.inv_freq
    angles = np.outer(positions.astype(np.float32), np.asarray(freqs, np.float32))
    cosines, sines = cos_sin(angles)
    factor = np.float32(rope.attention_factor)
    return cosines * factor, sines * factor


def query_scales(beta: float, length: int, positions: npt.NDArray[np.int32]) -> Float32:
    """Return the factor of queries at each position: 1 + beta ln(1 + floor(position / length))."""
    import numpy as np

    chunks, places = np.unique(positions // length, return_inverse=True)
    logs = logarithm(1.0 + chunks.astype(np.float32))[places]
    scales: Float32 = np.float32(1.0) + np.float32(beta) * logs
    return scales


def bucketed_places(side: int, table: int, merge: int) -> npt.NDArray[np.int64]:
    """Return for each patch of a square tile its row of a learned table of table x table places.

    The tile has side x side patches. Its patches are in merge order: blocks of merge x merge
    patches row by row, and within a block row by row.

    Source: modeling_idefics3 of transformers; its fractions in fp32 are exact here.
    """
    import numpy as np

    bucket = np.arange(side) * table // side
    grid = bucket[:, None] * table + bucket
    blocks = grid.reshape(side // merge, merge, side // merge, merge)
    return blocks.transpose(0, 2, 1, 3).reshape(-1)


def plane_waves(side: int, width: int) -> Float32:
    """Return the sine and cosine embeddings of the places of a grid: [side * side, width].

    The first half of the columns is of the grid's column, the second half of its row; each has the
    sines of all frequencies, and then the cosines. width: a multiple of 4.

    Source: modeling_granite_docling of transformers.
    """
    import numpy as np

    count = width // 4
    waves = np.outer(np.arange(side), [10000.0 ** -(i / count) for i in range(count)])
    cosines, sines = cos_sin(waves)
    one = np.concatenate([sines, cosines], axis=1)
    rows, columns = np.divmod(np.arange(side * side), side)
    return np.concatenate([one[columns], one[rows]], axis=1)


def line_waves(rows: int, width: int, span: float) -> Float32:
    """Return sines and then cosines of the places of a text, [rows, width].

    The angle of place p in column j of a half is p * 10000^(-j / span), in fp32.

    Source: modeling_xglm and modeling_ctrl of transformers.
    """
    import numpy as np

    rates = np.asarray([10000.0 ** -(i / span) for i in range(width // 2)], np.float32)
    cosines, sines = cos_sin(np.outer(np.arange(rows, dtype=np.float32), rates))
    return np.concatenate([sines, cosines], axis=1)


def alibi_slopes(heads: int) -> Float32:
    """Return the standard ALiBi slopes [heads]: first 2^(-8 i / n) for i = 1 .. n.

    n is the largest power of two <= heads; further heads get every second slope of 2 n heads.

    Source: Press et al., "Train Short, Test Long", 2022.
    """
    import numpy as np

    power = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    rest = [2.0 ** (-8.0 * (2 * i + 1) / (2 * power)) for i in range(heads - power)]
    return np.asarray(first + rest, np.float32)
