"""Performance tiers: what a level of the CPU has, what it lacks, and roughly what that costs."""

from __future__ import annotations

from cpuserve.platforms.host import Host

# Against the next level that matters, in words for a person. Factors follow from the dot products
# a cycle: VNNI does in one instruction what takes three without, BF16 two products where fp32 does
# one, AMX eight times as many as AVX-512.
TIERS = {
    "scalar": "no vector kernels: for tests only",
    "avx2": "AVX2, no AVX-512: prompts run at about half the rate or less",
    "avx512": "AVX-512 without VNNI: 8- and 4-bit weights multiply in several steps, prompts of "
    "quantized models run at about half the rate",
    "avx512_vnni": "AVX-512 with VNNI, without BF16: bfloat16 prompts run at half the rate",
    "avx512_bf16": "AVX-512 with VNNI and BF16: complete but for AMX, which multiplies prompts up "
    "to eight times as fast",
    "amx": "AMX: complete",
    "neon": "NEON without dot products: 8- and 4-bit weights multiply in several steps",
    "neon_dotprod": "NEON with dot products, without BF16 and I8MM: prompts run at about half the "
    "rate",
    "neon_i8mm_bf16": "NEON with BF16 and I8MM: complete",
}
NO_TIER = "no kernel level runs here: torch, the slow floor, serves if it is installed"


def tier_of(host: Host) -> tuple[str, str]:
    """(the highest kernel level of this host or "none", what that means)."""
    fast = [level for level in host.isa_levels if level != "scalar"]
    tier = fast[-1] if fast else "none"
    return tier, TIERS.get(tier, NO_TIER)
