"""The lowest versions of the dependencies that pyproject.toml permits, as constraints of pip.

    python tests/minimums.py > constraints.txt

`.ci/run minimums` runs the quick tests with these versions.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
# The extras whose requirements hold at the same time as the dependencies.
EXTRAS = ("torch",)
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(\[[\w,]+\])?\s*(?P<how>>=|==)\s*(?P<version>[\w.]+)")


def requirements() -> list[str]:
    """Return the requirements of the package with EXTRAS."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(each for name in EXTRAS for each in extras[name])]


def constraint(requirement: str) -> str:
    """Return "name==version" with the lowest version that a requirement permits.

    Raises:
        ValueError: the requirement has no lowest version.
    """
    found = _REQUIREMENT.match(requirement)
    if found is None:
        msg = f"{requirement} has no lowest version: write name>=version"
        raise ValueError(msg)
    return f"{found['name']}=={found['version']}"


if __name__ == "__main__":
    sys.stdout.write("".join(f"{constraint(each)}\n" for each in requirements()))
