"""Write iq_grids.h, the grids of GGUF's IQ types, from the gguf package: python iq_grids.py.

The tables are those of ggml (ggml-common.h, MIT licence), which the gguf package has in Python.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

# The name of each grid in C++, the type of the package that has it, and the bits of a value.
GRIDS = {
    "kIq3SGrid": ("IQ3_S", 4),
    "kIq3XxsGrid": ("IQ3_XXS", 4),
    "kIq2SGrid": ("IQ2_S", 2),
    "kIq2XsGrid": ("IQ2_XS", 2),
    "kIq2XxsGrid": ("IQ2_XXS", 2),
    "kIq1Grid": ("IQ1_S", 2),
}
HEADER = """\
// The grids of GGUF's IQ types. iq_grids.py writes this file: do not edit it.
// Copied from ggml (ggml-common.h), MIT licence, Copyright (c) 2023-2024 The ggml authors.
//
// An entry has 4 or 8 values of its type: the number of the value in ascending order,
// in 4 bits (IQ3) or 2 bits (the others), the first one in the lowest bits.
#pragma once
#include <stdint.h>

namespace cpuserve {
// clang-format off
"""


def entries(dtype: str, bits: int) -> npt.NDArray[np.uint64]:
    """Return the entries [n] of the grid of `dtype`; a value takes `bits` bits."""
    kind = getattr(gguf.quants, dtype)
    kind.init_grid()
    grid = np.asarray(kind.grid).reshape(-1, 16 // bits)
    numbers = np.searchsorted(np.unique(grid), grid).astype(np.uint64)
    shifts = np.arange(0, 16, bits, dtype=np.uint64)
    return np.bitwise_or.reduce(numbers << shifts, axis=1)


def main() -> None:
    """Write iq_grids.h beside this file."""
    text = HEADER
    for name, (dtype, bits) in GRIDS.items():
        table = entries(dtype, bits)
        text += f"constexpr uint16_t {name}[{len(table)}] = {{\n"
        for first in range(0, len(table), 12):
            text += "  " + " ".join(f"0x{x:04x}," for x in table[first : first + 12]) + "\n"
        text += "};\n"
    text += "// clang-format on\n}  // namespace cpuserve\n"
    Path(__file__).with_name("iq_grids.h").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
