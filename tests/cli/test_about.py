"""`cpuserve --version`: the version, the ISA levels and facts about the build."""

import platform

from cpuserve.base.version import version
from cpuserve.cli import main as cli
from cpuserve.cli.main import version_text
from cpuserve.platforms.cpu import CpuPlatform


def test_it_names_every_level_of_the_build(capsys):
    assert cli.main(["--version"]) == 0
    first, levels, built, baseline = capsys.readouterr().out.splitlines()
    assert first == f"cpuserve {version()}"
    names, facts, _ = CpuPlatform().build()
    assert levels == f"  levels    {', '.join(names)} (CPUSERVE_LEVELS={facts['levels']})"
    major, minor, _ = platform.python_version_tuple()
    assert f"for {platform.machine()} and Python {major}.{minor}." in built
    assert "(Release)" in built
    assert "-march=" in baseline


def test_the_levels_of_this_cpu_are_levels_of_the_build():
    levels, facts, error = CpuPlatform().build()
    assert error == ""
    assert set(CpuPlatform().host().isa_levels) <= set(levels)
    assert facts["arch"] == platform.machine()


def test_an_installation_without_kernels_says_why():
    assert version_text("1.2", (), {}, "no file") == "cpuserve 1.2\n  kernels   none: no file"
