"""The version of the package: the release at its tag, else the release with the commit.

scikit-build-core calls `dynamic_metadata` (pyproject.toml). A wheel and a source distribution keep
the version that they were built with.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A build without a repository, as in an image, takes the commit from this variable.
VARIABLE = "CPUSERVE_COMMIT"
# `git archive` writes the commit and its tags into this file (.gitattributes).
ARCHIVED = "cmake/commit.txt"
UNKNOWN = "unknown"


def dynamic_metadata(field: str, settings: Mapping[str, object]) -> str:
    """Return the version. settings: `release` is the version of the last release, or of the next.

    Raises:
        ValueError: `field` is not the version, or CPUSERVE_COMMIT is no commit.
    """
    if field != "version":
        msg = f"package_version.py knows the version, not {field}"
        raise ValueError(msg)
    return version_of(ROOT, str(settings["release"]), os.environ.get(VARIABLE, ""))


def version_of(root: Path, release: str, commit: str = "") -> str:
    """Return the version of the sources in `root`: 0.1.0 at the tag v0.1.0, else 0.1.0+g1234abcd.

    commit: the hash, if the caller knows it. Changed files of a checkout add ".dirty".
    """
    if commit:
        if not re.fullmatch(r"[0-9a-f]{7,40}", commit):
            msg = f"{VARIABLE}={commit} is no commit: write the hexadecimal hash, such as 8dc369b5"
            raise ValueError(msg)
        return f"{release}+g{commit[:8]}"
    if packed := _of_distribution(root):
        return packed
    hashed, tags = _of_git(root) or _of_archive(root) or (UNKNOWN, ())
    return release if f"v{release}" in tags else f"{release}+{hashed}"


def _of_distribution(root: Path) -> str:
    """Return the version in PKG-INFO, which only a source distribution has; "" without it."""
    try:
        head = (root / "PKG-INFO").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"^Version: (\S+)$", head, re.MULTILINE)
    return found[1] if found else ""


def _of_git(root: Path) -> tuple[str, tuple[str, ...]] | None:
    """Return the commit of a checkout and its tags, none if files are changed; None without git."""
    if not (root / ".git").exists():  # `root` may be in the checkout of another project
        return None
    hashed = _git(root, "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty=.dirty")
    if not hashed:
        return None
    tags = _git(root, "tag", "--points-at", "HEAD").split()
    return f"g{hashed}", () if hashed.endswith(".dirty") else tuple(tags)


def _git(root: Path, *words: str) -> str:
    # The owner of a checkout is often another user than the one who builds, as in containers.
    command = ["git", "-c", "safe.directory=*", "-C", str(root), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):  # git is missing
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _of_archive(root: Path) -> tuple[str, tuple[str, ...]] | None:
    """Return the commit and the tags that `git archive` has written; None in a checkout."""
    try:
        words = (root / ARCHIVED).read_text(encoding="utf-8").replace(",", " ").split()
    except OSError:
        return None
    if not words or not re.fullmatch(r"[0-9a-f]{7,40}", words[0]):
        return None
    return f"g{words[0][:8]}", tuple(words[1:])


if __name__ == "__main__":
    found = re.search(r'^release = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None, "pyproject.toml has no release"
    print(version_of(ROOT, found[1], os.environ.get(VARIABLE, "")))
