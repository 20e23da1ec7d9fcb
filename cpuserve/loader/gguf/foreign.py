"""Numbers of tensor types that llama.cpp does not read: removed types, and types of its forks.

A file with such a type is not broken, but only the program that wrote it can read it.
The numbers come from ggml.h in llama.cpp and in its fork ik_llama.cpp.
"""

from __future__ import annotations

# Types that llama.cpp has removed. The types from 31 on were Q4_0
# and IQ4_NL with interleaved blocks for some CPUs. bitnet.cpp uses the number 36 for another type.
_REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"}
_REMOVED |= {36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}
# Types of ik_llama.cpp: each text lists types with consecutive numbers,
# from the number of the first type on. Another fork uses the numbers 142 and 143.
_IK = {
    97: "Q8_0_X4 Q8_1_X4 Q8_2_X4",
    133: "Q6_0 IQ1_BN IQ2_BN Q8_K64 IQ2_K IQ3_K IQ4_K IQ5_K IQ6_K",
    144: "IQ4_KS IQ2_KS IQ4_KSS Q8_K16 Q8_K32 Q8_KR8 Q8_K128 Q8_KV IQ5_KS",
    153: "IQ2_KT IQ3_KT IQ4_KT IQ3_KS IQ2_KL IQ1_KT",
}
_IK_NAMES = {
    first + i: name for first, names in _IK.items() for i, name in enumerate(names.split())
}
_FORKS = range(97, 159)
_REPACKED = range(202, 400)


def foreign_type(number: int) -> str:
    """Return a text about the type ("IQ5_K, a type of ik_llama.cpp"); "" if it is unknown."""
    if number in _REMOVED:
        bitnet = " (or I2_S of bitnet.cpp)" if number == 36 else ""
        return f"{_REMOVED[number]}, a type that llama.cpp removed{bitnet}"
    if number in _IK_NAMES:
        return f"{_IK_NAMES[number]}, a type of ik_llama.cpp"
    if number in _FORKS:
        return "a type of ik_llama.cpp or another fork of llama.cpp"
    return "a repacked type of ik_llama.cpp (_R4, _R8 or _R16)" if number in _REPACKED else ""
