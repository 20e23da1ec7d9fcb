"""Parsing of sizes, counts and CPU lists."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuserve.config.fields import FIELDS
from cpuserve.config.values import (
    Space,
    format_bytes,
    format_cpus,
    format_gib,
    format_gib_up,
    parse_bind,
    parse_count,
    parse_cpu_list,
    parse_size,
    parse_space,
)

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("text", "space"),
    [
        ("4", Space(bytes=4 * GIB)),
        ("0.25", Space(bytes=GIB // 4)),
        (".5", Space(bytes=GIB // 2)),
        ("1.5 GiB", Space(bytes=GIB * 3 // 2)),
        ("512MiB", Space(bytes=GIB // 2)),
        ("30%", Space(percent=30.0)),
        ("0", Space()),
        ("0%", Space()),
        ("auto", Space()),
    ],
)
def test_space_takes_gib_fractions_units_and_percent(text, space):
    assert parse_space(text) == space


@pytest.mark.parametrize(
    "text", ["abc", "-1", "", "4 apples", "1e3", "nan", "30%%", "0x10", "1" * 400]
)
def test_space_refuses_with_examples(text):
    with pytest.raises(ValueError, match=r"0\.5"):
        parse_space(text)


def test_space_above_100_percent_is_refused():
    with pytest.raises(ValueError, match="at most 100%"):
        parse_space("101%")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8192", 8192),
        ("8k", 8000),
        ("8K", 8192),
        ("1.5k", 1500),
        ("-1", -1),
        ("2g", 2 * 10**9),
        ("2G", 2 * GIB),
    ],
)
def test_count_takes_the_short_forms(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "8.5", "eight", "8 k", "1e3", "0x8"])
def test_count_refuses_what_is_not_whole(text):
    with pytest.raises(ValueError, match="whole number"):
        parse_count(text)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", [0]), ("0-3", [0, 1, 2, 3]), ("0-6:2,1", [0, 2, 4, 6, 1]), (" 3 , 1 ", [3, 1])],
)
def test_cpu_list_keeps_order_and_strides(text, cpus):
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("", "not a CPU"),
        ("a", "not a CPU"),
        ("3-1", "range"),
        ("0-4:0", "range"),
        ("0,0-3", "listed twice"),
        ("-1", "not a CPU"),
        ("0-9999999", "range"),
        ("1,,2", "not a CPU"),
    ],
)
def test_cpu_list_refuses_with_examples(text, needle):
    with pytest.raises(ValueError, match=needle):
        parse_cpu_list(text)


@given(st.lists(st.integers(0, 300), unique=True, min_size=1))
def test_a_formatted_cpu_list_reads_back_the_same(cpus):
    assert parse_cpu_list(format_cpus(cpus)) == cpus


def test_bind_words_and_ranks():
    assert parse_bind("AUTO") == "auto"
    assert parse_bind("nobind") == "nobind"
    assert parse_bind("0-1|2-3") == [[0, 1], [2, 3]]


@given(st.integers(1 << 24, 1 << 44))
def test_a_formatted_gib_is_rounded_to_the_side_asked(size):
    assert parse_space(format_gib_up(size)).bytes >= size
    down = parse_space(format_gib(size))
    assert down.automatic or size - GIB // 100 - 1 <= down.bytes <= size


def test_bytes_are_shown_with_their_unit():
    assert [format_bytes(b) for b in (5, 2048, 3 << 20, GIB * 3 // 2)] == [
        "5 B",
        "2.00 KiB",
        "3.00 MiB",
        "1.50 GiB",
    ]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", MIB),
        ("1MiB", MIB),
        ("1mb", MIB),
        ("1M", MIB),
        ("1 m", MIB),
        ("1024k", MIB),
        ("0.5GiB", 512 * MIB),
        (".5g", 512 * MIB),
        ("7b", 7),
    ],
)
def test_every_size_option_takes_units(text, size):
    """Options that are sizes, found by their metavar, agree about every unit."""
    sizes = [field for field in FIELDS if field.metavar == "SIZE"]
    assert {"files_bytes", "models_bytes", "stored_bytes", "max_body_size"} < {
        field.name for field in sizes
    }
    assert parse_size(text) == size
    for field in sizes:
        unit = field.kind == "size"
        if not unit and text.isdecimal():
            continue  # a number without a unit is GiB there
        read = replace(field, check=None).parse(text)
        assert (read if unit else parse_space(read).bytes) == size, field.name


@pytest.mark.parametrize("text", ["", "1.5", "eight", "-1", "1e3", "2TiB", "0x8", "30%", "9" * 400])
def test_a_size_in_bytes_refuses_with_examples(text):
    with pytest.raises(ValueError, match="4MiB"):
        parse_size(text)


def test_all_options_with_bytes_in_their_name_are_sizes():
    named = [f for f in FIELDS if f.name.endswith(("_bytes", "_size")) and f.kind != "text"]
    counts = {"block_size", "tensor_parallel_size", "data_parallel_size"}
    assert {field.name for field in named if field.kind != "size"} <= counts
