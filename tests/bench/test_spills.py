"""benchmarks/spills.py counts the vectors that loops of kernels spill."""

import pytest

from benchmarks.spills import entry, spills

TILE = "void cpuserve::isa_avx2::(anonymous namespace)::Grouped<W8Group>::tile<4, 1, true, 1>(T&)"
KEY = ("avx2", "Grouped<W8Group>", "4x1")
PRODUCT = "vpmaddubsw %ymm1,%ymm2,%ymm3"
# A store and five reloads: more than what is not recorded.
SPILLS = ["vmovdqa %ymm3,0x2e8(%rsp)"] + ["vpaddd 0x20(%rsp),%ymm1,%ymm2"] * 5


def function(name, *code):
    """Lines of a disassembly, as objdump writes them. "loop:" begins a loop that "again" ends."""
    yield f"0000000000001000 <{name}>:"
    begin = 0
    for at, text in enumerate(code, 0x1000):
        if text == "loop:":
            begin, text = at, "nop"
        what, _, operands = text.replace("again", f"jne {begin:x} <f+0x10>").partition(" ")
        yield f"    {at:x}:\t{what:6} {operands}"


def counts(*code, name=TILE):
    return spills(function(name, *code), "avx2")


def test_stores_and_reloads_in_a_loop_of_products_count():
    assert counts("loop:", PRODUCT, *SPILLS, "again", "ret") == {KEY: (1, 5)}


def test_what_is_before_and_after_the_loop_does_not_count():
    assert counts(*SPILLS, "loop:", PRODUCT, "again", *SPILLS, "ret") == {}


def test_a_block_behind_the_end_that_jumps_back_is_in_the_loop_only_if_the_loop_reaches_it():
    away = f"je {0x1000 + 4:x} <f+0x4>"  # to the block behind `ret`
    back = "jmp 1000 <f+0x0>"
    assert counts("nop", away, PRODUCT, "ret", *SPILLS, PRODUCT, back) == {KEY: (1, 5)}
    assert counts("nop", PRODUCT, "ret", *SPILLS, "loop:", PRODUCT, "again") == {}


def test_a_function_without_products_in_a_loop_is_no_kernel():
    assert counts("loop:", *SPILLS, "again", PRODUCT, "ret") == {}
    assert counts("loop:", *SPILLS, "again", "ret") == {}


@pytest.mark.parametrize(
    "other",
    [
        "vmovaps %ymm1,0x20(%rsi)",  # not the stack
        "vpaddd 0x20(%rsp,%rax,4),%ymm1,%ymm2",  # an array
        "vpbroadcastd 0x20(%rsp),%ymm1",
        "vmovss 0x20(%rsp),%xmm1",
        "vfmadd231ss 0x20(%rsp),%xmm1,%xmm2",
        "vaddps 0x20(%rsp){1to16},%zmm1,%zmm2",
        "vmovd %xmm1,0x20(%rsp)",
        "mov %rax,0x20(%rsp)",
        "vpaddd 0x20(%rbp),%ymm1,%ymm2",  # a pointer, unless the function makes it its frame
    ],
)
def test_other_accesses_do_not_count(other):
    assert counts("loop:", PRODUCT, *[other] * 9, "again", "ret") == {}


def test_a_frame_pointer_is_the_stack():
    code = ["loop:", PRODUCT, *["vpaddd -0x20(%rbp),%ymm1,%ymm2"] * 9, "again", "ret"]
    assert counts("mov %rsp,%rbp", *code) == {KEY: (0, 9)}


def test_arm_has_pairs():
    code = ["str q1, [sp, #16]", "ldp q1, q2, [sp, #-0x40]", "ldr q3, [x29, #32]", "ldr q4, [x0]"]
    loop = ["loop:", "sdot v0.4s, v1.16b, v2.16b", *code * 2, "again", "ret"]
    assert spills(function(TILE, *loop), "neon") == {("neon", *KEY[1:]): (2, 4)}
    framed = spills(function(TILE, "mov x29, sp", *loop), "neon")
    assert framed == {("neon", *KEY[1:]): (2, 6)}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (TILE, ("Grouped<W8Group>", "4x1")),
        (
            "void cpuserve::isa_neon::(anonymous namespace)::PlaneGroups<cpuserve::isa_neon::"
            "(anonymous namespace)::Planes<cpuserve::isa_neon::(anonymous namespace)::ZeroBits<2, "
            "32> > >::tile<6, 2, false, 1>(cpuserve::isa_neon::(anonymous namespace)::T const&)",
            ("PlaneGroups<Planes<ZeroBits<2,32>>>", "6x2"),
        ),
        (
            "void cpuserve::isa_avx2::value_strip<cpuserve::isa_avx2::KvBf16, 6, 2, (cpuserve::"
            "isa_avx2::(anonymous namespace)::Ahead)0>(Unit&, long) [clone .constprop.0]",
            ("value_strip<KvBf16>", "6x2"),
        ),
        (
            "void cpuserve::isa_avx2::(anonymous namespace)::Channel<32l>::tile<1, 4, true, 4>(T)",
            ("Channel<32>", "1x4"),
        ),
        ("cpuserve::isa_avx2::sample(cpuserve::Draw const&)", ("sample", "all")),
        (
            "void cpuserve::isa_avx2::solve_tile<true, 3, 2, false>(cpuserve::Recurrence const&)",
            ("solve_tile", "3x2"),
        ),
    ],
)
def test_names_of_entries(function, expected):
    assert entry(function) == expected


def test_functions_that_differ_in_flags_share_an_entry_with_the_larger_count():
    far = TILE.replace("true", "false")
    few, more = [SPILLS[0], *SPILLS], [SPILLS[0]] * 9
    lines = [
        *function(TILE, "loop:", PRODUCT, *few, "again", "ret"),
        *function(far, "loop:", PRODUCT, *more, "again", "ret"),
    ]
    assert spills(lines, "avx2") == {KEY: (9, 0)}
