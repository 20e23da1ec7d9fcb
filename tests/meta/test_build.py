"""The native build's own rules, by configuring it with faked compilers and machines."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
import pytest

from cpuserve import _C
from cpuserve.platforms.isa_level import LEVEL_MEANINGS
from tests.helpers.depth import deep_but

MACHINE = platform.machine()

ROOT = Path(__file__).parents[2]
# The packages that pip installs put their programs beside Python's.
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
PROGRAMS = {name: shutil.which(name, path=PATH) for name in ("cmake", "ninja", "c++", "nm")}
MISSING = [name for name, path in PROGRAMS.items() if path is None]
CMAKE = PROGRAMS["cmake"]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"{', '.join(MISSING)} not installed (pip install '.[test]' has cmake)"
)


# What counts as a number of cores or jobs: nproc counts the threads of OpenMP (tests/conftest.py).
NUMBERS = ("MAX_JOBS", "CMAKE_BUILD_PARALLEL_LEVEL", "OMP_NUM_THREADS")


def run(*command, **environment):
    base = {k: v for k, v in os.environ.items() if k not in NUMBERS}
    return subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, env={**base, **environment}
    )


def configure(build, *options, **environment):
    return run(
        CMAKE, "-S", ROOT, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={PROGRAMS['ninja']}",
        "-DCPUSERVE_EXTENSION=OFF", *options, **environment,
    )  # fmt: skip


@pytest.mark.parametrize("version", deep_but(["9.4"], ["9.4", "11.1.0"]))
def test_an_old_compiler_is_refused_with_what_is_needed(tmp_path, version):
    result = configure(tmp_path, f"-DCPUSERVE_FAKE_COMPILER_VERSION={version}")
    assert result.returncode != 0
    (line,) = [x.strip() for x in result.stderr.splitlines() if "cpuserve needs" in x]
    assert line.startswith("cpuserve needs gcc 11.2, clang 14 or Apple clang 15 (or newer); found")
    assert f" {version} (" in line
    assert "set CXX to it" in line


def test_makefiles_check_the_symbols_of_a_level_before_a_program_is_linked(tmp_path):
    result = run(
        CMAKE, "-S", ROOT, "-B", tmp_path, "-G", "Unix Makefiles", "-DCPUSERVE_EXTENSION=OFF",
        "-DCPUSERVE_LEVELS=scalar",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rules = (tmp_path / "CMakeFiles" / "Makefile2").read_text().splitlines()
    unit, check, core = (
        f"csrc/CMakeFiles/{name}.dir/all"
        for name in ("cpuserve_isa_scalar", "cpuserve_isa_scalar_leaks", "cpuserve_core")
    )
    assert f"{core}: {check}" in rules
    assert f"{check}: {unit}" in rules


def test_a_build_in_another_environment_compiles_nothing_again(tmp_path):
    """pip builds in a new environment each time, and scikit-build-core then deletes CMakeFiles."""
    commands, times, build = [], [], tmp_path / "build"
    for name in ("first", "second"):
        source, target = Path(pybind11.__file__).parent, tmp_path / name / "pybind11"
        installed = shutil.copytree(source, target, copy_function=shutil.copyfile)
        result = configure(
            build, "-DCPUSERVE_EXTENSION=ON", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
            f"-Dpybind11_DIR={installed / 'share' / 'cmake' / 'pybind11'}",
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        commands.append((build / "compile_commands.json").read_text())
        headers = sorted((build / "pybind11").rglob("*.h"))
        times.append([header.stat().st_mtime_ns for header in headers])
        shutil.rmtree(build / "CMakeFiles")
        (build / "CMakeCache.txt").unlink()
    assert commands[0] == commands[1]
    assert times[0]
    assert times[0] == times[1]
    outputs = [entry["output"] for entry in json.loads(commands[0])]
    assert outputs
    assert not [path for path in outputs if path.startswith("CMakeFiles/")]


# -- levels ---------------------------------------------------------------------------------------

ARM = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64")
OURS = [n for n in LEVEL_MEANINGS if n == "scalar" or n.startswith("neon") == (MACHINE != "x86_64")]


def levels_of(build, chosen, *options):
    """Configure with CPUSERVE_LEVELS; return (levels in the list of units, CMake's messages)."""
    result = configure(build, f"-DCPUSERVE_LEVELS={chosen}", *options)
    text = " ".join((result.stdout + result.stderr).split())
    file = build / "generated/kernels/isa_units.inc"
    if result.returncode:
        assert not file.exists()
        return None, text
    return re.findall(r"CPUSERVE_ISA_UNIT\((\w+),", file.read_text()), text


def traced(build):
    """Return the options that write the commands of Levels.cmake to the file `trace`."""
    levels = ROOT / "cmake/Levels.cmake"
    return f"--trace-source={levels}", f"--trace-redirect={build / 'trace'}"


def test_a_native_build_has_the_levels_of_this_cpu_and_scalar_only_if_there_is_no_other(tmp_path):
    able = _C.cpu_isa_levels()
    levels, text = levels_of(tmp_path, "native", *traced(tmp_path))
    assert "try_run(" in (tmp_path / "trace").read_text()
    assert levels == (able if able == ["scalar"] else able[1:])
    assert f"cpuserve: ISA levels {', '.join(levels)};" in text


@pytest.mark.parametrize("chosen", ["all", ""])
def test_a_build_for_any_machine_has_every_level_and_does_not_ask_this_cpu(tmp_path, chosen):
    levels, _ = levels_of(tmp_path, chosen, *traced(tmp_path))
    assert levels == OURS
    assert "try_run(" not in (tmp_path / "trace").read_text()


@pytest.mark.skipif(MACHINE != "x86_64", reason="this machine is not x86-64")
@pytest.mark.parametrize("chosen", ["avx512_vnni,avx2", "avx2;avx512_vnni", "avx2, avx512_vnni"])
def test_a_list_of_levels_is_built(tmp_path, chosen):
    assert levels_of(tmp_path, chosen)[0] == ["avx2", "avx512_vnni"]


GIVE = "give all, native, or levels of this architecture, separated by commas: "


@pytest.mark.parametrize(
    ("chosen", "machine", "message"),
    [
        ("avx2,sse9", (), f"CPUSERVE_LEVELS=avx2,sse9: {GIVE}scalar, avx2, avx_vnni, avx512"),
        ("native,avx2", (), GIVE),
        ("all,avx2", (), GIVE),
        ("avx2", ARM, f"{GIVE}scalar, neon, neon_dotprod, neon_i8mm, neon_bf16."),
        ("avx_vnni", (), "the level avx_vnni has some kernels only and takes the others from a "
                         "lower level: add avx2."),
        ("scalar,amx", (), "takes the others from a lower level: add avx2 or avx512."),
        ("native", ARM, "CPUSERVE_LEVELS=native builds for the CPU of this machine (x86_64), which "
                        "cannot be asked about another machine (aarch64). Set CPUSERVE_LEVELS=all, "
                        "or name the levels of the target."),
    ],
    ids=["unknown", "native and more", "all and more", "arm", "no base", "scalar base", "cross"],
)  # fmt: skip
@pytest.mark.skipif(MACHINE != "x86_64", reason="this machine is not x86-64")
def test_a_choice_of_levels_that_cannot_be_built_says_what_to_give(
    tmp_path, chosen, machine, message
):
    levels, text = levels_of(tmp_path, chosen, *machine)
    assert levels is None
    assert message in text


@pytest.mark.deep
@pytest.mark.skipif(MACHINE != "x86_64", reason="this machine is not x86-64")
def test_a_native_build_asks_the_cpu_and_not_the_compiler(tmp_path):
    qemu = shutil.which("qemu-x86_64-static")
    if qemu is None:
        pytest.skip("qemu-x86_64-static is not installed (Debian: qemu-user-static)")
    program = tmp_path / "levels"
    sources = ROOT / "cmake/native_levels.cpp", ROOT / "csrc/cpu/features.cpp"
    made = run("c++", "-std=c++17", f"-I{ROOT / 'csrc'}", *sources, "-o", program)
    assert made.returncode == 0, made.stderr
    haswell = "Haswell,-pcid,-x2apic,-tsc-deadline,-hle,-rtm,-invpcid"
    assert run(qemu, "-cpu", "Nehalem", program).stdout == "scalar"
    assert run(qemu, "-cpu", haswell, program).stdout == "scalar;avx2"
    assert run(program).stdout.split(";") == _C.cpu_isa_levels()


# -- jobs -----------------------------------------------------------------------------------------

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.mark.parametrize(
    ("environment", "memory_mb", "jobs", "why"),
    [
        ({"MAX_JOBS": "7", "CMAKE_BUILD_PARALLEL_LEVEL": "3"}, 999, 7, "from MAX_JOBS"),
        ({"MAX_JOBS": "many"}, 1535, 1, "1535 MB available / 768 MB a job"),
        *(
            pytest.param(*case, marks=pytest.mark.deep)
            for case in (
                ({"CMAKE_BUILD_PARALLEL_LEVEL": "3"}, 999, 3, "from CMAKE_BUILD_PARALLEL_LEVEL"),
                ({}, 1536, min(2, CORES), "1536 MB available"),
                ({}, 100, 1, "100 MB available"),
                ({}, 10**6, CORES, f"{CORES} cores"),
            )
        ),
    ],
)
def test_compile_jobs_follow_the_environment_then_cores_and_memory(
    tmp_path, environment, memory_mb, jobs, why
):
    memory = f"-DCPUSERVE_AVAILABLE_MEMORY_MB={memory_mb}"
    result = configure(tmp_path, memory, **environment)
    assert result.returncode == 0, result.stderr
    (line,) = [x for x in result.stdout.splitlines() if "compile jobs" in x]
    assert f"cpuserve: {jobs} compile jobs" in line
    assert why in line
    ninja = "\n".join(p.read_text() for p in tmp_path.rglob("*.ninja"))
    assert f"pool cpuserve_compile\n  depth = {jobs}\n" in ninja
    assert "pool = cpuserve_compile" in ninja


@pytest.mark.parametrize(
    ("body", "leak"),
    [
        ('extern "C" int table() { return 1; }', None),
        ('static int f() { return 1; } extern "C" int table() { return f(); }', None),
        ('inline int f() { return 1; } extern "C" int table() { return f(); }', "f()"),
        ('int other = 1; extern "C" int table() { return other; }', "other"),
        ('template <class T> struct S { static int x; }; template <class T> int S<T>::x = 1;'
         'extern "C" int table() { return S<int>::x++; }', "S<int>::x"),
        ("int something() { return 1; }", "does not define table"),
    ],
    ids=["clean", "static", "inline", "global", "template", "missing"],
)  # fmt: skip
def test_a_symbol_that_leaks_out_of_an_isa_unit_fails_the_build(tmp_path, body, leak):
    source, unit = tmp_path / "unit.cpp", tmp_path / "unit.o"
    source.write_text(body + "\n")
    compiled = run("c++", "-std=c++17", "-fno-inline", "-O0", "-c", source, "-o", unit)
    assert compiled.returncode == 0, compiled.stderr
    result = run(
        CMAKE, f"-DNM={PROGRAMS['nm']}", f"-DOBJECTS={unit}", "-DSYMBOL=table",
        f"-DSTAMP={tmp_path / 'stamp'}", "-P", ROOT / "cmake" / "CheckIsaLeaks.cmake",
    )  # fmt: skip
    assert (result.returncode == 0) == (leak is None)
    assert (tmp_path / "stamp").exists() == (leak is None)
    if leak:
        assert leak in " ".join(result.stderr.split())
