"""Machines and installations that cannot run models, or only slowly: one line, never a crash.

Old CPUs are emulated by qemu, in which an instruction that they lack ends the process.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import msgspec
import pytest

import cpuserve
from cpuserve import _C
from cpuserve.cli.doctor import problems
from cpuserve.platforms.cpu import lacking_x86_64_v2, why_not_loaded
from cpuserve.platforms.handicaps import handicaps
from cpuserve.platforms.host import Host
from tests.helpers.children import child_options
from tests.helpers.hosts import host_names, load_host, write_tree
from tests.helpers.tiny import tiny_model

# Runs the command line as an installation without torch does, whatever is installed here.
WITHOUT_TORCH = """
import importlib.util, sys

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "torch" else find_spec(name, *a)
from cpuserve.__main__ import main
sys.exit(main())
"""
scalar_is_built = pytest.mark.skipif(
    "scalar" not in _C.compiled_isa_levels(), reason="this build has no level scalar"
)
HEAD = "cpuserve: error: no executor can run a model here: "
QEMU = "qemu-x86_64-static"
EMULATED = {
    "core2duo": [QEMU, "-cpu", "core2duo"],  # 2006: SSSE3, no SSE4.1
    "Nehalem": [QEMU, "-cpu", "Nehalem"],  # 2008: x86-64-v2
    "Haswell": [QEMU, "-cpu", "Haswell,-pcid,-x2apic,-tsc-deadline,-hle,-rtm,-invpcid"],
}


def run(*argv, cpu=None, torch=False, prefix=(), **environment):
    """Run `cpuserve ARGV`; return (exit code, output, lines on stderr without qemu's own)."""
    if cpu is not None:
        if platform.machine() != "x86_64":
            pytest.skip("this machine is not x86-64")
        if shutil.which(QEMU) is None:
            pytest.skip(f"{QEMU} is not installed (Debian: qemu-user-static)")
        prefix = EMULATED[cpu]
        # The BLAS of numpy takes emulated old CPUs for a Haswell, and runs instructions of AVX2.
        environment = {"OPENBLAS_CORETYPE": "Nehalem", **environment}
    program = ["-m", "cpuserve"] if torch else ["-c", WITHOUT_TORCH]
    done = subprocess.run(
        [*prefix, sys.executable, *program, *argv],
        **child_options(**environment),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [li for li in done.stderr.splitlines() if not li.startswith(f"{QEMU}: warning: ")]
    return done.returncode, done.stdout, lines


@pytest.fixture(scope="module")
def model():
    return str(tiny_model("llama"))


# -- CPUs -----------------------------------------------------------------------------------------


@pytest.mark.deep
def test_a_cpu_that_cannot_run_numpy_is_refused_in_one_line(model):
    code, out, lines = run("serve", model, "--port=0", cpu="core2duo")
    assert (code, out, len(lines)) == (2, "", 1), lines
    assert lines[0].startswith("cpuserve: error: cpuserve cannot run on this machine: this CPU")
    assert "lacks sse4_1, sse4_2, popcnt, which numpy's packages need (x86-64-v2)" in lines[0]


@pytest.mark.deep
def test_doctor_runs_on_a_cpu_that_cannot_run_numpy_and_says_so():
    code, out, lines = run("doctor", "--no-roofline", cpu="core2duo")
    assert (code, lines) == (0, [])
    assert "PROBLEM   cpuserve cannot run on this machine: this CPU lacks" in out
    scalar = "scalar" in _C.compiled_isa_levels()
    what = "this CPU has neither AVX2 nor NEON" if scalar else "this build has no ISA level"
    assert f"PROBLEM   {what}" in out


@pytest.mark.deep
def test_the_version_is_printed_on_any_cpu():
    code, out, lines = run("--version", cpu="core2duo")
    assert (code, lines) == (0, [])
    assert "avx2" in out.splitlines()[1]


SLOW = "cpuserve: this CPU has neither AVX2 nor NEON, so models run without vector instructions; "


@pytest.mark.deep
@scalar_is_built
@pytest.mark.parametrize("torch", [False, True])
def test_a_cpu_without_avx2_is_served_without_vectors_and_the_start_says_so(model, torch):
    code, out, lines = run("config", model, cpu="Nehalem", torch=torch)
    assert code == 0, lines
    assert re.search(r"^executor .* native ", out, re.MULTILINE), out
    assert re.search(r"^isa .* scalar .* the highest level that this CPU runs", out, re.MULTILINE)
    assert sum(line.startswith(SLOW) for line in lines) == 1, lines


@pytest.mark.deep
@scalar_is_built
def test_a_cpu_without_avx2_generates_what_level_scalar_generates_here(model):
    words = ("generate", model, "--prompt", "hello", "--max-tokens", "8")
    code, out, lines = run(*words, cpu="Nehalem")
    assert code == 0, lines
    assert out
    assert run(*words, CPUSERVE_ISA="scalar")[:2] == (0, out)


@pytest.mark.deep
@scalar_is_built
def test_doctor_says_at_which_level_a_cpu_without_avx2_runs():
    code, out, lines = run("doctor", "--no-roofline", cpu="Nehalem")
    assert (code, lines) == (0, [])
    assert re.search(r"^ISA level +scalar: no vector instructions", out, re.MULTILINE), out
    assert f"PROBLEM   {SLOW.removeprefix('cpuserve: ').rstrip('; ')}" in out


@pytest.mark.deep
@pytest.mark.parametrize("level", ["amx", "sse2"])
def test_a_level_that_the_cpu_lacks_is_refused_in_one_line(model, level):
    code, out, lines = run("serve", model, "--port=0", cpu="Haswell", CPUSERVE_ISA=level)
    assert (code, out, len(lines)) == (2, "", 1), lines
    known = "unknown level" if level == "sse2" else "not a level of this CPU"
    built = [name for name in ("scalar", "avx2") if name in _C.compiled_isa_levels()]
    assert lines == [
        f"cpuserve: error: env CPUSERVE_ISA={level}: {known}; levels of this CPU, lowest first: "
        f"{', '.join(built)}"
    ]


def test_what_x86_64_v2_needs_is_asked_of_x86_only():
    cpu = {"arch": "x86_64", "features": ["pni", "ssse3", "sse4_1", "popcnt"]}
    assert lacking_x86_64_v2(cpu) == ["sse4_2"]
    assert lacking_x86_64_v2({**cpu, "features": [*cpu["features"], "sse4_2"]}) == []
    assert lacking_x86_64_v2({"arch": "aarch64", "features": []}) == []


# -- systems --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", host_names())
def test_every_handicap_is_a_problem_of_doctor(name):
    host = load_host(name)
    listed = [(p.what, p.remedy) for p in problems(host, None)]
    found = [tuple(handicap) for handicap in handicaps(host)]
    assert listed[: len(found)] == found
    slow = name in ("old_cpu_with_torch", "build_of_another_cpu", "build_for_avx2", "no_extension")
    assert bool(found) == slow


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"tiles_refused": True}, "the CPU has AMX, but the system does not let this process use"),
        ({"topology_known": False}, "/sys does not list the CPUs, so cores, caches and NUMA nodes"),
        ({"emulated": "here"}, "this process is emulated (here), which makes models many times"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_slows_every_model_is_printed_at_the_start(capsys, monkeypatch, model, change, what):
    from cpuserve.cli import main as cli
    from cpuserve.platforms.cpu import CpuPlatform

    before = CpuPlatform.host
    host = before(CpuPlatform())
    host = msgspec.structs.replace(host, emulated="", built_levels=host.cpu_levels)
    assert list(handicaps(host)) == []
    changed = msgspec.structs.replace(host, **change)
    monkeypatch.setattr(CpuPlatform, "host", lambda self: changed)
    assert cli.main(["config", model]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert sum(line.startswith(f"cpuserve: {what}") for line in lines) == 1, lines


AS_ROOT = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
WITHOUT_SYS = [
    *("unshare", *AS_ROOT, "--mount"),
    *("sh", "-c", 'mount -t tmpfs none /sys && exec "$@"', "sh"),
]


@pytest.mark.deep
def test_without_sys_a_model_runs_as_with_it_and_the_start_says_what_is_unknown(model):
    if subprocess.run([*WITHOUT_SYS, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a mount namespace")
    argv = ("generate", model, "--prompt", "hello", "--max-tokens", "8")
    code, expected, lines = run(*argv)
    assert code == 0, lines
    assert not any("/sys" in line for line in lines)
    code, out, lines = run(*argv, prefix=WITHOUT_SYS)
    assert (code, out) == (0, expected), lines
    assert sum("/sys does not list the CPUs" in line for line in lines) == 1, lines


CPUINFO = {
    "x86": "processor : 0\nvendor_id : GenuineIntel\nmodel name : Xeon\nflags : fpu lm avx2\n",
    "arm": "processor : 0\nFeatures : fp asimd\nCPU implementer : 0x41\nCPU part : 0xd40\n",
    "rosetta": "vendor_id : GenuineIntel\nmodel name : VirtualApple @ 2.50GHz\nflags : fpu\n",
    "tcg": "vendor_id : AuthenticAMD\nmodel name : QEMU TCG CPU version 2.5+\nflags : fpu\n",
}


@pytest.mark.parametrize(
    ("arch", "cpuinfo", "sign"),
    [
        ("x86_64", "x86", ""),
        ("aarch64", "arm", ""),
        ("x86_64", "arm", "built for x86_64, on a machine of aarch64"),
        ("aarch64", "x86", "built for aarch64, on a machine of x86_64"),
        ("x86_64", "rosetta", "the CPU is VirtualApple @ 2.50GHz"),
        ("x86_64", "tcg", "the CPU is QEMU TCG CPU version 2.5+"),
    ],
)
def test_an_image_for_another_architecture_is_noticed(tmp_path, arch, cpuinfo, sign):
    write_tree(tmp_path, {"meminfo": "MemTotal: 8000 kB", "cpuinfo": CPUINFO[cpuinfo]})
    host = Host.read(sysfs_root=tmp_path / "sys", proc_root=tmp_path, affinity=[0], arch=arch)
    assert host.emulated == sign


# -- installations --------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path):
    """Return a copy of the package without its extension, for sys.path."""
    shutil.copytree(
        Path(cpuserve.__file__).parent,
        tmp_path / "cpuserve",
        ignore=shutil.ignore_patterns("_C.*so", "__pycache__"),
    )
    return tmp_path


def config_of(installed, model):
    """Run `cpuserve config` of a copy of the package; return its only line."""
    path = child_options()["env"]["PYTHONPATH"]
    code, out, lines = run("config", model, PYTHONPATH=f"{installed}{os.pathsep}{path}")
    assert (code, out, len(lines)) == (2, "", 1), lines
    return lines[0]


def test_an_installation_without_the_extension_is_refused_in_one_line(installed, model):
    line = config_of(installed, model)
    assert line.startswith(f"{HEAD}there is no native extension in {installed}/cpuserve: ")
    assert "reinstall cpuserve on this machine, or install torch" in line


@pytest.mark.deep
def test_an_extension_for_another_python_is_refused_in_one_line(installed, model):
    # As after copying an environment from Alpine, whose Python uses musl.
    (installed / "cpuserve/_C.cpython-311-x86_64-linux-musl.so").touch()
    ours = EXTENSION_SUFFIXES[0].strip(".").removesuffix(".so")
    assert config_of(installed, model).startswith(
        f"{HEAD}the native extension was built for cpython-311-x86_64-linux-musl, and this Python "
        f"loads {ours}, and torch"
    )


def elf(machine):
    """Return the first bytes of a shared object for e_machine `machine`."""
    magic, shared_object = b"\x7fELF\x02\x01\x01", b"\x03\x00"
    return magic + bytes(9) + shared_object + machine.to_bytes(2, "little") + bytes(44)


@pytest.mark.deep
def test_an_extension_for_another_cpu_is_refused_in_one_line(installed, model):
    here = platform.machine()
    machine, name = (183, "aarch64") if here == "x86_64" else (62, "x86_64")
    (installed / f"cpuserve/_C{EXTENSION_SUFFIXES[0]}").write_bytes(elf(machine))
    assert config_of(installed, model).startswith(
        f"{HEAD}the native extension was built for {name}, and this machine is {here}, and torch"
    )


def test_another_failure_of_the_extension_is_told_in_the_loaders_words(tmp_path):
    (tmp_path / "_C.so").write_bytes(elf(62))  # x86-64
    error = ImportError("libgomp.so.1: cannot open shared object file")
    found = why_not_loaded(error, tmp_path, "x86_64", [".so"])
    assert found == f"the native extension does not load: {error}"
    (tmp_path / "_C.so").write_bytes(b"short")
    assert why_not_loaded(error, tmp_path, "x86_64", [".so"]) == found
