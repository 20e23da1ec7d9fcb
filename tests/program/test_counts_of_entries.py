"""The memory that a thread needs to read entries of pools is counted."""

from cpuserve.models import build_program, spec_from_config
from cpuserve.program.counts import selected_floats
from tests.helpers.tiny import tiny_config


def floats(positions, **changes):
    """The floats that a token of DeepSeek V4 reads."""
    spec = spec_from_config(tiny_config("deepseek-v4", **changes))
    return selected_floats(build_program(spec), positions)


def test_a_token_reads_its_window_and_the_entries_of_older_pools():
    # The window has 24 tokens, heads have 64 dims, and pools have 4 (8 are chosen) or 32 tokens.
    assert floats(128) == (24 + 9) * 64
    assert floats(512) == (24 + 512 // 32) * 64
    assert floats(4096) == (24 + 4096 // 32) * 64
    assert floats(128, sliding_window=100) == (100 + 9) * 64
    assert floats(64, sliding_window=100) == (64 + 9) * 64
