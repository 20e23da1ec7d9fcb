#!/usr/bin/env python3
"""Write the software bill of materials of the wheel: CycloneDX JSON, from pyproject.toml.

    python tests/sbom.py > cmake/sbom.cdx.json.in

A build puts it into `cpuserve-*.dist-info/sboms/` (PEP 770), and fills in the versions of what it
compiles into the extension. It has no time and no random number, so equal builds have equal files.
auditwheel writes a second file there for the libraries that it copies into the wheel.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "cmake/sbom.cdx.json.in"
_NAME = re.compile(r"[\w.-]+")


def bill() -> dict[str, Any]:
    """Return the bill; values with @ are CMake variables of the build."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = project["name"]
    needed = [_dependency(each) for each in project["dependencies"]]
    compiled = {
        "type": "library",
        "bom-ref": "pybind11",
        "name": "pybind11",
        "version": "@pybind11_VERSION@",
        "purl": "pkg:pypi/pybind11@@pybind11_VERSION@",
        "licenses": [{"license": {"id": "BSD-3-Clause"}}],
        "properties": [{"name": "cpuserve:use", "value": "compiled into cpuserve/_C"}],
    }
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": own,
                "version": "@SKBUILD_PROJECT_VERSION_FULL@",
                "purl": f"pkg:pypi/{own}@@cpuserve_version_in_url@",
                "licenses": [{"license": {"id": project["license"]["text"]}}],
                "properties": [
                    {
                        "name": "cpuserve:compiler",
                        "value": "@CMAKE_CXX_COMPILER_ID@ @CMAKE_CXX_COMPILER_VERSION@",
                    }
                ],
            }
        },
        "components": [compiled, *needed],
        "dependencies": [
            {"ref": own, "dependsOn": [each["bom-ref"] for each in (compiled, *needed)]}
        ],
    }


def _dependency(requirement: str) -> dict[str, Any]:
    """Return the component of a dependency, whose version pip chooses at the installation."""
    name = _NAME.match(requirement)
    assert name is not None, requirement
    normal = re.sub(r"[-_.]+", "-", name[0]).lower()
    return {
        "type": "library",
        "bom-ref": normal,
        "name": normal,
        "scope": "required",
        "purl": f"pkg:pypi/{normal}",
        "properties": [
            {"name": "cpuserve:use", "value": "installed by pip"},
            {"name": "cpuserve:requires", "value": requirement[name.end() :]},
        ],
    }


def text() -> str:
    """Return the template of the bill."""
    return json.dumps(bill(), indent=1) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
