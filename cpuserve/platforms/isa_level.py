"""The features that each ISA level of the kernels has and lacks, and how much a lack costs."""

from __future__ import annotations

from collections.abc import Sequence

from cpuserve.platforms.host import Host

# Every ISA level, sorted within an architecture, lowest first. Each text says what the level
# lacks compared with the next level that is clearly faster. Its factors, such as half the rate,
# are ratios of products per cycle: one VNNI instruction does the work of three older ones,
# BF16 multiplies twice as many values as fp32, and AMX eight times as many as AVX-512.
LEVEL_MEANINGS = {
    # On a Zen 5, SmolLM2-135M decodes a token in 0.27 s of CPU time, and in 0.0085 s at avx2.
    "scalar": "no vector instructions: 30 times slower than AVX2, prompts 100 times",
    "avx2": "AVX2, no AVX-512: prompts run at about half the rate or less",
    "avx_vnni": "AVX2 with VNNI, no AVX-512: prompts run at about half the rate, of quantized "
    "models too",
    "avx512": "AVX-512 without VNNI: 8- and 4-bit weights multiply in several steps, prompts of "
    "quantized models run at about half the rate",
    "avx512_vnni": "AVX-512 with VNNI, without BF16: bfloat16 prompts run at half the rate",
    "avx512_bf16": "AVX-512 with VNNI and BF16: complete except for AMX, which multiplies prompts "
    "up to eight times as fast",
    "amx": "AMX: complete",
    "neon": "NEON without dot products: 8- and 4-bit weights multiply in several steps",
    "neon_dotprod": "NEON with dot products, without the matrix products of I8MM and BF16: prompts "
    "run at half the rate or less",
    "neon_i8mm": "NEON with I8MM, without BF16: bfloat16 prompts run at a quarter of the rate",
    "neon_bf16": "NEON with the matrix products of I8MM and BF16: complete",
}
# The ISA levels with instructions for dot products of bf16.
BF16_DOT = {"avx512_bf16", "amx", "neon_bf16"}
NO_LEVEL = (
    "no ISA level of this build runs here: the slow torch executor runs models if torch is "
    "installed"
)
SLOW_BF16 = (
    "AVX-512 with VNNI: Intel's cores multiply bf16 in AVX-512 (level avx512_bf16) more slowly "
    "than fp32; AMX multiplies prompts up to eight times as fast"
)


def default_level(host: Host) -> str | None:
    """Return the ISA level that runs models fastest on `host`; None if it runs no level."""
    return _fastest(host.isa_levels, host.cpu_vendor)


def missing_level(host: Host) -> str | None:
    """Return the ISA level that would run models faster on `host`, but that this build lacks."""
    best = _fastest(host.cpu_levels, host.cpu_vendor)
    return None if best is None or best in host.built_levels else best


def _fastest(levels: Sequence[str], vendor: str) -> str | None:
    # A core of Granite Rapids starts one VDPBF16PS (64 operations) in about two cycles,
    # and two fp32 products (32 operations each) in every cycle: 106 and 190 GFLOPS.
    # AMD cores start as many VDPBF16PS as fp32 products, so bf16 is twice as fast on them.
    if levels[-1:] == ("avx512_bf16",) and vendor == "GenuineIntel" and "avx512_vnni" in levels:
        return "avx512_vnni"
    return levels[-1] if levels else None


def isa_level_of(host: Host) -> tuple[str, str]:
    """Return (the ISA level that models run at on `host`, or "none"; a sentence about it)."""
    level = default_level(host) or "none"
    if level == "avx512_vnni" and "avx512_bf16" in host.isa_levels:
        return level, SLOW_BF16
    return level, LEVEL_MEANINGS.get(level, NO_LEVEL)
