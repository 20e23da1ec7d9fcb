"""The faults of tests/put_faults.py can still be put in."""

from pathlib import Path

import pytest

from tests.put_faults import FAULTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "fault", FAULTS, ids=lambda fault: f"{fault.file}:{fault.old.strip()[:40]}"
)
def test_the_text_of_a_fault_is_in_its_file_once(fault):
    assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.old) == 1
