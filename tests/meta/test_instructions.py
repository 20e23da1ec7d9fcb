"""tests/instructions.py finds what an ISA level must not contain, and what it lacks."""

import re
from pathlib import Path

import pytest

from tests.instructions import COMMON, LEVELS, faults_of

X86 = {
    "sse": ("f3 0f 58 c1", "addss  %xmm1,%xmm0"),
    "sse4": ("66 41 0f 38 40 c1", "pmulld %xmm9,%xmm0"),
    "popcnt": ("f3 0f b8 c1", "popcnt %ecx,%eax"),
    "avx": ("c5 f4 58 c2", "vaddps %ymm2,%ymm1,%ymm0"),
    "evex": ("62 f1 74 48 58 c2", "vaddps %zmm2,%zmm1,%zmm0"),
    "evex, narrow": ("62 a1 74 00 58 c2", "vaddps %xmm18,%xmm17,%xmm16"),
    "evex, gs": ("65 62 f1 7c 48 10 00", "vmovups %gs:(%rax),%zmm0"),
    "mask": ("c5 f8 92 c8", "kmovw  %eax,%k1"),
    "tiles": ("c4 e2 72 5c d8", "tdpbf16ps %tmm1,%tmm0,%tmm3"),
    "tile int8": ("c4 e2 73 5e d8", "tdpbssd %tmm1,%tmm0,%tmm3"),
    "tile end": ("c4 e2 78 49 c0", "tilerelease"),
    "vex vnni": ("c4 e2 75 50 c2", "{vex} vpdpbusd %ymm2,%ymm1,%ymm0"),
    "evex vnni": ("62 f2 75 48 50 c2", "vpdpbusd %zmm2,%zmm1,%zmm0"),
    "fma": ("c4 e2 75 b8 c2", "vfmadd231ps %ymm2,%ymm1,%ymm0"),
    "maddubs": ("c4 e2 75 04 c2", "vpmaddubsw %ymm2,%ymm1,%ymm0"),
}
ARM = {
    "add": ("4e22d420", "fadd\tv0.4s, v1.4s, v2.4s"),
    "fma": ("4e22cc20", "fmla\tv0.4s, v1.4s, v2.4s"),
    "dot": ("4e829420", "sdot\tv0.4s, v1.16b, v2.16b"),
    "bfdot": ("6e42fc20", "bfdot\tv0.4s, v1.8h, v2.8h"),
    "bfmmla": ("6e42ec20", "bfmmla\tv0.4s, v1.8h, v2.8h"),
    "smmla": ("4e82a420", "smmla\tv0.4s, v1.16b, v2.16b"),
    "sve": ("04a20020", "add\tz0.s, z1.s, z2.s"),
}


def function(name, *instructions, of=X86):
    """Lines of a disassembly, as objdump writes them."""
    yield f"0000000000001000 <{name}>:"
    for at, instruction in enumerate(instructions):
        encoding, text = of[instruction]
        yield f"    10{at:02x}:\t{encoding} \t{text}"


def unit(level):
    return f"void cpuserve::isa_{level}::(anonymous namespace)::tile<6, 4>(cpuserve::Rows const&)"


def faults(*functions, levels=(), machine="elf64-x86-64"):
    lines = [f"prog:     file format {machine}", *function("main", "sse")]
    if machine != "elf64-x86-64":
        lines = [f"prog:     file format {machine}", *function("main", "add", of=ARM)]
    return faults_of([*lines, *(line for f in functions for line in f)], levels)


@pytest.mark.parametrize("what", ["sse4", "popcnt", "avx", "evex", "mask", "tiles", "vex vnni"])
def test_common_code_has_the_baseline_only(what):
    (fault,) = faults(function("cpuserve::Executor::step()", "sse", what))
    assert fault.startswith(f"{COMMON} must not have ")
    assert X86[what][1] in fault


def test_the_encoding_counts_not_the_width():
    for what in ("evex, narrow", "evex, gs"):
        found = faults(function(unit("avx2"), "fma", "maddubs", what))
        assert [f.partition(":")[0] for f in found] == ["avx2 must not have avx512"]


@pytest.mark.parametrize(
    ("level", "wrong", "feature"),
    [
        ("avx2", "vex vnni", "avx_vnni"),
        ("avx2", "evex vnni", "avx512"),
        ("avx_vnni", "evex vnni", "avx512"),
        ("avx512_vnni", "vex vnni", "avx_vnni"),
        ("avx512_bf16", "tiles", "amx"),
        ("scalar", "avx", "avx"),
        ("scalar", "sse4", "sse4"),
    ],
)
def test_a_level_has_no_instruction_above_it(level, wrong, feature):
    found = faults(function(unit(level), wrong))
    assert f"{level} must not have {feature}" in "\n".join(found)


@pytest.mark.parametrize("missing", ["tiles", "tile int8", "tile end", None])
def test_the_amx_unit_multiplies_bf16_and_int8_tiles(missing):
    have = [what for what in ("tiles", "tile int8", "tile end") if what != missing]
    found = faults(function(unit("amx"), *have), levels=["amx"])
    assert len(found) == (missing is not None)
    assert not missing or found[0].startswith("amx has no instruction t")


def test_avx_vnni_has_the_vex_form():
    assert not faults(function(unit("avx_vnni"), "vex vnni"))
    assert faults(function(unit("avx_vnni"), "fma")) == [
        r"avx_vnni has no instruction \{vex\} vpdpbusd .*%ymm"
    ]


def test_a_function_without_the_namespace_is_of_its_object():
    """In an archive the object tells; outside of one such a function counts as common code."""
    lines = ["avx2.cpp.o:     file format elf64-x86-64", *function("helper", "fma", "maddubs")]
    assert not faults(lines)
    assert faults(function("helper", "fma")) != []


def test_the_exported_table_is_of_its_unit():
    assert not faults(function("cpuserve_isa_avx2", "fma", "maddubs"))


def test_a_level_of_the_build_without_code_is_a_fault():
    assert faults(levels=["avx2"]) == ["there is no code of avx2"]
    assert faults_of(function(unit("scalar"), "sse"), []) == [f"there is no code of {COMMON}"]


@pytest.mark.parametrize(
    ("level", "have", "count"),
    [
        ("neon", ["fma"], 0),
        ("neon", ["fma", "dot"], 1),
        ("neon_dotprod", ["dot"], 0),
        ("neon_dotprod", ["dot", "bfdot"], 1),
        ("neon_bf16", ["bfdot", "bfmmla"], 0),
        ("neon_bf16", ["dot", "bfdot"], 1),
        ("neon_bf16", ["bfdot", "bfmmla", "smmla"], 1),
        ("neon_i8mm", ["smmla"], 0),
        ("neon_i8mm", ["dot"], 1),
        ("neon_i8mm", ["smmla", "bfmmla"], 1),
        ("neon", ["fma", "sve"], 1),
    ],
)
def test_levels_of_arm(level, have, count):
    code = function(unit(level), *have, of=ARM)
    assert len(faults(code, machine="elf64-littleaarch64")) == count


def test_every_level_of_the_build_is_in_the_table():
    cmake = (Path(__file__).parents[2] / "csrc" / "CMakeLists.txt").read_text()
    levels = set(re.findall(r"cpuserve_add_isa\((\w+)", cmake))
    assert {"scalar", "avx2", "amx", "neon"} <= levels <= set(LEVELS)
