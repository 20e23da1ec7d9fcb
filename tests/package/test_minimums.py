"""Every runtime dependency has a lowest version, which `.ci/run minimums` installs."""

import pytest

from tests.minimums import constraint, requirements


def test_every_dependency_has_a_lowest_version():
    found = [constraint(each) for each in requirements()]
    assert "msgspec==0.21" in found
    assert "transformers==4.57.1" in found
    assert "uvicorn==0.32" in found
    assert len(found) == len(requirements()) > 15


@pytest.mark.parametrize("requirement", ["numpy", "numpy<2", "numpy!=1.5"])
def test_a_dependency_without_a_lowest_version_is_refused(requirement):
    with pytest.raises(ValueError, match="write name>=version"):
        constraint(requirement)


def test_extras_and_upper_bounds_do_not_matter():
    assert constraint("ray[serve]>=2.40") == "ray==2.40"
    assert constraint("uvicorn>=0.32,<0.55") == "uvicorn==0.32"
