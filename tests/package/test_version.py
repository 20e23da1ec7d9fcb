"""The version of a build: with the commit of a checkout, and kept by what is built from it."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("package_version", ROOT / "cmake/package_version.py")
provider = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(provider)
version_of = provider.version_of
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def git(folder, *words):
    names = ("-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "init.defaultBranch=main")
    command = ["git", "-C", str(folder), *names, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    """Return a checkout with one commit."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init")
    (folder / "file").write_text("1")
    (folder / ".gitattributes").write_text("cmake/commit.txt export-subst\n")
    (folder / "cmake").mkdir()
    shutil.copy(ROOT / "cmake/commit.txt", folder / "cmake")
    git(folder, "add", "-A")
    git(folder, "commit", "-m", "one")
    return folder


def test_a_commit_is_a_part_of_the_version_and_a_tag_is_a_release(checkout):
    commit = git(checkout, "rev-parse", "HEAD")
    assert version_of(checkout, "0.1.0") == f"0.1.0+g{commit[:8]}"
    git(checkout, "tag", "v0.1.0")
    assert version_of(checkout, "0.1.0") == "0.1.0"
    assert version_of(checkout, "0.2.0") == f"0.2.0+g{commit[:8]}"
    (checkout / "file").write_text("2")
    assert version_of(checkout, "0.1.0") == f"0.1.0+g{commit[:8]}.dirty"


def test_without_git_and_in_the_folder_of_another_project_the_commit_is_unknown(
    checkout, monkeypatch
):
    inner = checkout / "inner"
    inner.mkdir()
    assert version_of(inner, "0.1.0") == "0.1.0+unknown"
    monkeypatch.setenv("PATH", str(inner))
    assert version_of(checkout, "0.1.0") == "0.1.0+unknown"
    assert version_of(checkout, "0.1.0", COMMIT) == "0.1.0+g01234567"
    with pytest.raises(ValueError, match="is no commit"):
        version_of(checkout, "0.1.0", "main")


def test_an_archive_of_a_commit_knows_it(checkout, tmp_path):
    commit = git(checkout, "rev-parse", "HEAD")
    git(checkout, "archive", "--output", str(tmp_path / "archive.tar"), "HEAD")
    git(checkout, "tag", "v0.1.0")
    git(checkout, "archive", "--output", str(tmp_path / "release.tar"), "HEAD")
    for name, version in (("archive", f"0.1.0+g{commit[:8]}"), ("release", "0.1.0")):
        subprocess.run(["tar", "-xf", f"{name}.tar", "--one-top-level"], cwd=tmp_path, check=True)
        assert version_of(tmp_path / name, "0.1.0") == version


def metadata_of(source, folder, **variables):
    """Return the version in the metadata that a build of `source` makes."""
    folder.mkdir()
    code = (
        "from scikit_build_core.build import prepare_metadata_for_build_wheel as made; made({!r})"
    )
    subprocess.run(
        [sys.executable, "-c", code.format(str(folder))],
        cwd=source,
        check=True,
        capture_output=True,
        env={**os.environ, **variables},
    )
    (made,) = folder.glob("*.dist-info/METADATA")
    return re.search(r"^Version: (.*)$", made.read_text(), re.MULTILINE)[1]


def test_a_source_distribution_and_its_wheel_keep_the_version(tmp_path):
    pytest.importorskip("scikit_build_core", reason="scikit-build-core is not installed")
    variables = {"CPUSERVE_COMMIT": COMMIT}
    code = f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})"
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        check=True,
        capture_output=True,
        env={**os.environ, **variables},
    )
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(
            tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )
    (source,) = tmp_path.glob("cpuserve-*/")
    release = re.search(r'^release = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[
        1
    ]
    assert source.name == f"cpuserve-{release}+g01234567"
    alone = {"CPUSERVE_COMMIT": "", "PATH": ""}
    assert metadata_of(source, tmp_path / "of-sdist", **alone) == f"{release}+g01234567"
