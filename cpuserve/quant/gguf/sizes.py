"""The bytes that GGUF types take in memory; the front end imports this file without numpy."""

from __future__ import annotations

# Rows of these types cannot be packed as stored, so they are converted when they are read.
BUILT = ("NVFP4", "TQ1_0", "PTQ1_0")
# The types that take more memory than in the file: (bytes of a block in the file, bytes of the same
# block in memory). They take more because 4-bit and 6-bit scales become whole bytes, because every
# four blocks of a row get an fp32 scale (NVFP4), because the values that a code selects from a grid
# are written out (IQ1 to IQ3), or because they are converted.
PACKED_BYTES = {
    "Q3_K": (110, 114),
    "Q4_K": (144, 148),
    "Q5_K": (176, 180),
    "IQ4_XS": (136, 138),
    "NVFP4": (36, 37),
    "TQ1_0": (54, 66),
    "PTQ1_0": (28, 34),
    "IQ3_S": (110, 134),
    "IQ3_XXS": (98, 134),
    "IQ2_S": (82, 106),
    "IQ2_XS": (74, 106),
    "IQ2_XXS": (66, 102),
    "IQ1_M": (56, 106),
    "IQ1_S": (50, 70),
}


def packed_bytes(dtype: str, nbytes: int) -> int:
    """Return the bytes in memory of a tensor of GGUF type `dtype` that has `nbytes` in the file."""
    stored, packed = PACKED_BYTES.get(dtype, (1, 1))
    return nbytes // stored * packed
