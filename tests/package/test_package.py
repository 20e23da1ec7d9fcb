"""What a wheel and the source distribution contain, and the workflow that releases them."""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
import zlib
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from cpuserve import _C
from tests.check_wheel import MOST_BYTES, faults_installed, faults_of
from tests.helpers.skips import in_ci
from tests.in_wheel import OFFLINE, check_sdist
from tests.meta.test_build import CMAKE, PROGRAMS
from tests.sbom import TEMPLATE, bill, text

ROOT = Path(__file__).parents[2]
NAME = "cpuserve-0.1.0-cp311-cp311-manylinux_2_28_x86_64.whl"
EXTENSION = "cpuserve/_C.cpython-311-x86_64-linux-gnu.so"
BILL = "cpuserve-0.1.0.dist-info/sboms/cpuserve.cdx.json"
ELF = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00\x3e\x00"  # for x86-64
FILES = {
    EXTENSION: ELF,
    "cpuserve/py.typed": b"",
    "cpuserve/_C.pyi": b"",
    "cpuserve/__main__.py": b"",
    "cpuserve.libs/libgomp-0123.so.1": b"",
    "cpuserve-0.1.0.dist-info/RECORD": b"",
    BILL: b'{"components": [{"name": "pybind11", "version": "3.0"}]}',
    "cpuserve-0.1.0.dist-info/sboms/auditwheel.cdx.json": b"",
}


def wheel(folder, name=NAME, **changed):
    """Write a wheel with FILES, of which `changed` replaces or (None) removes some."""
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in {**FILES, **changed}.items():
            if data is not None:
                archive.writestr(file, data)
    return path


def test_a_wheel_as_it_should_be_has_no_fault(tmp_path):
    assert faults_of(wheel(tmp_path)) == []
    both = "cpuserve-0.1.0-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl"
    assert faults_of(wheel(tmp_path, both)) == []
    mac = "cpuserve-0.1.0-cp311-cp311-macosx_14_0_arm64.whl"
    library = {EXTENSION: None, "cpuserve/_C.cpython-311-darwin.so": b"\xcf\xfa\xed\xfe"}
    assert faults_of(wheel(tmp_path, mac, **library)) == []


@pytest.mark.parametrize(
    ("name", "changed", "fault"),
    [
        ("other-0.1.0-cp311-cp311-any.whl", {}, "not that of a cpuserve wheel"),
        (NAME.replace("manylinux_2_28", "linux"), {}, "for one machine only"),
        (NAME.replace("x86_64", "riscv64"), {}, "unknown platforms"),
        (
            NAME.replace("x86_64", "aarch64"),
            {EXTENSION: None, EXTENSION.replace("x86_64", "aarch64"): ELF},
            "the extension is not for aarch64",
        ),
        (NAME.replace("x86_64", "aarch64"), {}, "not one extension for Python 311 and aarch64"),
        (NAME.replace("311", "312"), {}, "not one extension for Python 312"),
        (NAME, {EXTENSION: None}, "not one extension"),
        (NAME, {"cpuserve/_C.cpython-311-other.so": ELF}, "not one extension"),
        (NAME, {"cpuserve/py.typed": None}, "cpuserve/py.typed is missing"),
        (NAME, {"tests/x.py": b""}, "unexpected file tests/x.py"),
        (NAME, {"cpuserve/large": bytes(MOST_BYTES)}, "more than"),
        (NAME, {BILL: None}, "the bill of materials is missing"),
        (NAME, {BILL: b"[]"}, "no CycloneDX JSON"),
        (NAME, {BILL: TEMPLATE.read_bytes()}, "lacks versions of the build"),
    ],
    ids=[
        "name",
        "local",
        "arch",
        "elf",
        "suffix",
        "python",
        "none",
        "two",
        "missing",
        "more",
        "large",
        "no_bill",
        "odd_bill",
        "template",
    ],
)
def test_a_fault_of_a_wheel_is_found(tmp_path, name, changed, fault):
    assert any(fault in found for found in faults_of(wheel(tmp_path, name, **changed)))


def test_the_package_here_has_the_levels_that_its_build_was_asked_for():
    asked, built = _C.build_facts()["levels"], _C.compiled_isa_levels()
    assert asked == "all" or not in_ci()  # .ci/run tests every level that its CPU runs
    if asked == "all":
        assert faults_installed() == []
    elif asked == "native":
        able = _C.cpu_isa_levels()
        assert built == (able if able == ["scalar"] else able[1:])
    else:
        assert set(built) == set(asked.split(","))


def test_the_package_here_fits_into_a_wheel():
    folder = Path(_C.__file__).parent
    files = [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    size = sum(len(zlib.compress(path.read_bytes())) for path in files)
    # The repaired wheel has a copy of libgomp, too: 0.1 MB.
    assert size < MOST_BYTES - 500_000


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Build the source distribution of the checkout."""
    pytest.importorskip("scikit_build_core", reason="scikit-build-core is not installed")
    folder = tmp_path_factory.mktemp("sdist")
    code = f"from scikit_build_core.build import build_sdist; build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    (made,) = folder.glob("cpuserve-*.tar.gz")
    return made


@pytest.mark.deep
def test_the_source_distribution_has_the_files_of_a_build_and_no_others(sdist):
    check_sdist(sdist)


@pytest.mark.deep
def test_the_source_distribution_configures_without_a_network(sdist, tmp_path):
    if subprocess.run([*OFFLINE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a network namespace")
    with tarfile.open(sdist) as archive:
        # Python 3.11.0 to 3.11.3 have no filters; what this test has packed needs none.
        archive.extractall(
            tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )
    (source,) = tmp_path.glob("cpuserve-*")
    pybind11 = subprocess.run(
        [sys.executable, "-m", "pybind11", "--cmakedir"], capture_output=True, text=True, check=True
    ).stdout.strip()
    done = subprocess.run(
        [
            *(*OFFLINE, CMAKE, "-S", source, "-B", tmp_path / "build", "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={PROGRAMS['ninja']}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11}",
            f"-DSKBUILD_METADATA_DIR={tmp_path / 'metadata'}",
            "-DSKBUILD_PROJECT_VERSION_FULL=0.1.0+g01234567",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ninja = (tmp_path / "build/build.ninja").read_text()
    assert all(f"/isa/{level}.cpp" in ninja for level in _C.compiled_isa_levels())
    only = ("--component", "sbom")
    subprocess.run([CMAKE, "--install", tmp_path / "build", *only], check=True, capture_output=True)
    made = (tmp_path / "metadata/sboms/cpuserve.cdx.json").read_bytes()
    assert faults_of(wheel(tmp_path, **{BILL: made})) == []
    assert json.loads(made)["components"][0]["version"] == metadata.version("pybind11")
    own = json.loads(made)["metadata"]["component"]
    assert own["version"] == "0.1.0+g01234567"
    assert own["purl"] == "pkg:pypi/cpuserve@0.1.0%2Bg01234567"


def test_the_bill_of_materials_has_every_dependency():
    assert TEMPLATE.read_text() == text(), "python tests/sbom.py > cmake/sbom.cdx.json.in"
    named = {each["name"] for each in bill()["components"]}
    needed = [line for line in metadata.requires("cpuserve") if "extra ==" not in line]
    assert {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in needed} <= named
    assert len(bill()["dependencies"][0]["dependsOn"]) == len(named) > 10


# -- the release ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def release():
    """Return the release workflow."""
    return yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())


def test_a_release_has_wheels_for_both_linux_architectures_and_macos(release):
    built = {entry["arch"] for entry in release["jobs"]["wheels"]["strategy"]["matrix"]["include"]}
    assert built == {"x86_64", "aarch64", "arm64"}
    steps = [step.get("run", "") for step in release["jobs"]["wheels"]["steps"]]
    assert ".ci/release check wheelhouse/*.whl" in steps


def test_the_steps_of_a_release_are_those_of_a_script_that_runs_anywhere(release):
    script = (ROOT / ".ci/release").read_text()
    run = [s["run"] for job in release["jobs"].values() for s in job["steps"] if "run" in s]
    named = {re.match(r"\.ci/release (\w+)", command)[1] for command in run}
    assert named == {"version", "check", "sdist", "audit", "names"}
    assert all(f"\nstep_{name}() {{" in script for name in named)
    tried = re.findall(r"^  \.ci/release (\w+)", script, re.MULTILINE)
    assert set(tried) == named - {"names"} | {"wheel"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["version", "v9.9.9"], "the tag is v9.9.9, and pyproject.toml has the release"),
        (["version"], "the tag is , and pyproject.toml"),
        (["publish"], "there is no step publish"),
        ([], "usage: .ci/release"),
    ],
)
def test_a_release_with_another_tag_or_step_is_refused(words, said):
    alone = {"PATH": os.environ["PATH"]}
    command = [ROOT / ".ci/release", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=alone)
    assert done.returncode == 1
    assert f"release: {said}" in done.stderr


@pytest.mark.parametrize("name", ["publish", "image"])
def test_what_is_published_gets_a_signed_record_of_its_origin(release, name):
    job = release["jobs"][name]
    assert job["permissions"]["id-token"] == job["permissions"]["attestations"] == "write"
    assert any("attest-build-provenance" in step.get("uses", "") for step in job["steps"])
    assert "wheels" in job["needs"]


@pytest.mark.parametrize("name", ["publish", "image"])
def test_nothing_is_published_with_a_known_vulnerability_of_a_dependency(release, name):
    assert "audit" in release["jobs"][name]["needs"]
    checks = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text())
    for jobs in (release["jobs"], checks["jobs"]):
        assert jobs["audit"]["steps"][-1]["run"] == ".ci/release audit"
    assert "'pip-audit==2.*' --strict ." in (ROOT / ".ci/release").read_text()


def test_only_the_jobs_that_publish_may_write(release):
    assert release["permissions"] == {"contents": "read"}
    writers = {name for name, job in release["jobs"].items() if "permissions" in job}
    assert writers == {"publish", "image"}


def test_the_image_is_made_for_both_architectures_from_the_wheels(release):
    (push,) = [s for s in release["jobs"]["image"]["steps"] if "build-push" in s.get("uses", "")]
    assert push["with"]["platforms"] == "linux/amd64,linux/arm64"
    assert push["with"]["build-args"].startswith("CPUSERVE=cpuserve==")
    text = (ROOT / "Dockerfile.cpu").read_text()
    targets = release["jobs"]["image"]["strategy"]["matrix"]["include"]
    assert all(f" AS {entry['target']}\n" in text for entry in targets)


def test_what_is_built_for_other_machines_has_every_level(release):
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    chosen = tool["scikit-build"]["cmake"]["define"]["CPUSERVE_LEVELS"]
    assert chosen == {"env": "CPUSERVE_LEVELS", "default": "native"}
    wheels = tool["cibuildwheel"]
    # The variables of a system replace those of all systems.
    systems = [wheels[name] for name in ("linux", "macos") if "environment" in wheels.get(name, {})]
    assert systems
    for settings in (wheels, *systems):
        assert settings["environment"]["CPUSERVE_LEVELS"] == "all"
    assert "check_wheel.py --installed" in wheels["test-command"][0]
    assert "\nARG CPUSERVE_LEVELS=all\nRUN" in (ROOT / "Dockerfile.cpu").read_text()
    assert "\nexport CPUSERVE_LEVELS=all" in (ROOT / ".ci/run").read_text()
    checks = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text())
    for job in checks["jobs"].values():
        if any("pip install" in step.get("run", "") for step in job["steps"]):
            assert job["env"]["CPUSERVE_LEVELS"] == "all"


def test_wheels_are_built_for_every_python_that_the_package_accepts(release):
    text = (ROOT / "pyproject.toml").read_text()
    (build,) = re.findall(r'^build = "(.*)"$', text, re.MULTILINE)
    oldest = re.search(r'requires-python = ">=3\.(\d+)"', text)[1]
    assert build.split()[0] == f"cp3{oldest}-*"
    assert f"cp3{sys.version_info.minor}-*" in build.split()


def test_no_page_lets_pip_look_for_a_name_that_the_index_does_not_have():
    """Until the first release, pip finds cpuserve in a checkout or among wheels only."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    pages += [p for top in ("docs", "deploy", "examples") for p in (ROOT / top).rglob("*.*")]
    texts = {p: p.read_text() for p in pages if p.suffix in {".md", ".yaml", ".service", ".yml"}}
    wanted = re.compile(r"pip install [^\n`#&]*?(?<![\w./-])cpuserve\b[^\n`]*")
    found = [line for text in texts.values() for line in wanted.findall(text)]
    assert [line for line in found if "--find-links" not in line] == []
    assert wanted.search("pip install 'cpuserve[images]'")
    assert len(found) >= 2


def test_pip_adds_an_extra_to_the_installed_package_without_looking_for_the_package():
    """As error messages say: pip install 'cpuserve[images]'."""
    words = ("install", "--dry-run", "--no-index", "cpuserve[images]")
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
