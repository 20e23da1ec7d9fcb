"""What doctor finds, on machines described as data."""

import json

import msgspec
import pytest

from cpuserve.config.decisions import Ledger
from cpuserve.config.engine import EngineOptions
from cpuserve.entrypoints import cli
from cpuserve.entrypoints.doctor import draw, problems
from cpuserve.platforms.cgroup import Cgroup
from cpuserve.platforms.cpu import ISA_LEVELS
from cpuserve.platforms.host import HugePages
from cpuserve.platforms.placement import place
from cpuserve.platforms.tiers import TIERS
from tests.helpers.hosts import load_host


def found(host):
    placement = place(EngineOptions(), Ledger(EngineOptions(), {}), host)
    return [p.what for p in problems(host, placement)]


def test_a_healthy_machine_has_no_problems():
    assert found(load_host("vm_2core_zen5")) == []


@pytest.mark.parametrize(
    ("name", "needle"),
    [
        ("no_extension", "does not load"),
        ("old_cpu_with_torch", "at no level of this CPU"),
        ("container_1_5_cpu_1gib", "a CPU quota of 1.5 on 64 cores: 1 threads"),
        ("container_1_5_cpu_1gib", "the container has 1.00 GiB"),
        ("cpuset_4_11_of_16", "may use 8 of 16 CPUs"),
    ],
)
def test_a_problem_is_found(name, needle):
    assert any(needle in what for what in found(load_host(name)))


def test_huge_pages_and_throttling_are_found():
    host = msgspec.structs.replace(
        load_host("vm_2core_zen5"), huge_pages=HugePages(), cgroup=Cgroup(throttled_periods=7)
    )
    whats = found(host)
    assert any("huge pages are off" in what for what in whats)
    assert any("7 times" in what for what in whats)


def test_the_drawing_marks_threads_and_the_front_end():
    host = load_host("desktop_8core_smt")
    placement = place(EngineOptions(), Ledger(EngineOptions(), {}), host)
    assert list(draw(host, placement)) == ["node 0: *0+8 *1+9 *2+10 *3+11 *4+12 *5+13 *6+14 f7+15"]


def test_every_level_has_a_tier():
    assert set(TIERS) == set(ISA_LEVELS)


def test_doctor_on_this_machine_prints_a_page_and_json(capsys):
    assert cli.main(["doctor"]) == 0
    assert "memory" in capsys.readouterr().out
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["threads"] >= 1
    assert all(set(p) == {"what", "remedy"} for p in report["problems"])
