"""The problems and the text that doctor reports, for machines that are described as data."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import jsonschema
import msgspec
import pytest

from cpuserve.cli import doctor
from cpuserve.cli import main as cli
from cpuserve.cli.doctor import BusyProcess, allocator, busiest, problems, schema
from cpuserve.config.decisions import Ledger
from cpuserve.config.options import EngineOptions
from cpuserve.config.values import parse_cpu_list
from cpuserve.platforms.cgroup import Cgroup
from cpuserve.platforms.host import HugePages
from cpuserve.platforms.placement import place
from cpuserve.platforms.report import (
    CacheReport,
    GeometryReport,
    WorkReport,
    describe_placement,
    draw,
    render_work,
)
from tests.helpers.depth import deep_but
from tests.helpers.hosts import host_names, load_host


def found(host):
    placement = place(EngineOptions(), Ledger(EngineOptions(), {}), host)
    return [p.what for p in problems(host, placement)]


def test_a_healthy_machine_has_no_problems():
    assert found(load_host("vm_2core_zen5")) == []


@pytest.mark.parametrize(
    ("name", "needle"),
    [
        ("no_extension", "does not load"),
        ("old_cpu_with_torch", "neither AVX2 nor NEON"),
        ("build_of_another_cpu", "no ISA level that this CPU runs (it has: avx512, avx512_vnni)"),
        ("build_for_avx2", "could run the ISA level avx512_bf16, but this build has: avx2"),
        ("container_1_5_cpu_1gib", "the CPU quota is 1.5 of 64 cores: cpuserve will use 1"),
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
    assert any("huge pages are disabled" in what for what in whats)
    assert any("7 times" in what for what in whats)


def drawn(name, **options):
    host = load_host(name)
    asked = EngineOptions(**options)
    return list(draw(host, place(asked, Ledger(asked, {}), host)))


def test_the_drawing_marks_threads_and_the_front_end():
    assert drawn("desktop_8core_smt") == [
        "node 0: *0+8 *1+9 *2+10 *3+11 *4+12 *5+13 *6+14 f7+15",
    ]
    assert drawn("desktop_8core_smt", omp_threads_bind="1,9") == [
        "node 0: .0+8 *1+9 .2+10 .3+11 .4+12 .5+13 .6+14 .7+15",
    ]


def test_the_drawing_marks_where_threads_may_run_that_have_no_cpu_of_their_own():
    host = load_host("laptop_6p_8e")
    group = msgspec.structs.replace(host.cgroup, cpu_quota=4.0)
    placement = place(
        EngineOptions(),
        Ledger(EngineOptions(), {}),
        msgspec.structs.replace(host, cgroup=group),
    )
    assert list(draw(host, placement)) == [
        "node 0: ~0+1 ~2+3 ~4+5 ~6+7 ~8+9 ~10+11 .12e .13e .14e .15e .16e .17e .18e .19e"
    ]
    report = describe_placement(host, placement)
    assert (report.threads, report.bind, report.within) == (4, "nobind", "0-11")
    assert drawn("vm_2core_zen5", omp_threads_bind="nobind") == ["node 0: ~0 ~1"]


def test_the_drawing_joins_the_cores_of_large_machines_and_tells_l3_groups_and_slow_cores():
    assert drawn("xeon_2s_amx") == [
        "node 0: *0-30+64-94 f31+95",
        "node 1: *32-62+96-126 f63+127",
    ]
    assert drawn("epyc_nps4")[:2] == [
        "node 0 L3 of CPU 0: *0 *1 *2 *3 *4 *5 *6 *7",
        "node 0 L3 of CPU 8: *8 *9 *10 *11 *12 *13 *14 f15",
    ]
    assert drawn("laptop_6p_8e")[0].endswith("*10+11 *12e *13e *14e *15e *16e *17e *18e f19e")


@pytest.mark.parametrize("name", host_names())
def test_every_usable_cpu_is_drawn_once(name):
    cells = [cell for line in drawn(name) for cell in line.split(": ", 1)[1].split()]
    cpus = [c for cell in cells for p in cell.strip("*~f.e").split("+") for c in parse_cpu_list(p)]
    assert sorted(cpus) == [c.id for c in load_host(name).usable_cpus]


SCHEMA = Path(__file__).parents[2] / "docs" / "doctor.schema.json"


def test_the_published_schema_is_the_codes():
    assert SCHEMA.read_bytes() == schema(), (
        "run: python -m cpuserve.cli.doctor > docs/doctor.schema.json"
    )


@pytest.mark.parametrize("roofline", deep_but([False], [True, False]))
def test_doctor_on_this_machine_is_a_page_and_json_of_the_published_schema(capsys, roofline):
    flags = [] if roofline else ["--no-roofline"]
    assert cli.main(["doctor", *flags]) == 0
    page = capsys.readouterr().out
    subjects = ("CPU ", "ISA level ", "memory ", "cgroup ", "threads ", "roofline ", "libraries ")
    for subject in subjects:
        assert f"\n{subject}" in page
    assert len(page.splitlines()) < 60
    assert cli.main(["doctor", "--json", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    jsonschema.validate(report, json.loads(SCHEMA.read_bytes()))
    assert report["placement"]["threads"] >= 1
    assert (report["roofline"] is not None) is roofline
    if roofline:
        limits = report["roofline"]["limits"]
        assert set(limits) == {"f32", "bf16", "int8", "int4"}
        assert [limit["requests"] for limit in limits["int8"]] == [1, 4, 8, 32]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**report, "machine": {}}, json.loads(SCHEMA.read_bytes()))


@pytest.mark.parametrize("name", deep_but(host_names()[::4], host_names()))
def test_doctor_on_any_machine_is_a_page_and_json_of_the_published_schema(monkeypatch, name):
    monkeypatch.setattr(doctor.CpuPlatform, "host", lambda self: load_host(name))
    report = doctor.examine(measure=False)
    jsonschema.validate(json.loads(msgspec.json.encode(report)), json.loads(SCHEMA.read_bytes()))
    page = doctor.render(report)
    assert report.machine.cpu in page
    assert all(problem.what in page and problem.remedy in page for problem in report.problems)
    assert all(line in page for line in report.placement.drawing)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("CPUSERVE_OMP_THREADS_BIND", "9999", "CPU 9999 is not among"),
        ("CPUSERVE_DATA_PARALLEL_SIZE", "999", "999 ranks need a core each"),
        ("CPUSERVE_TENSOR_PARALLEL_SIZE", "998", "998 ranks need a core each"),
    ],
)
def test_doctor_reports_a_variable_that_would_stop_a_server(
    capsys, monkeypatch, name, value, problem
):
    from cpuserve.config import env

    monkeypatch.setattr(env, "environment", lambda: {name: value})
    assert cli.main(["doctor", "--no-roofline"]) == 0
    page = capsys.readouterr().out
    assert "a server would not start" in page
    assert f"env {name}={value}: {problem}" in page


def test_doctor_draws_the_engines_that_the_environment_asks_for(monkeypatch):
    from cpuserve.config import env

    monkeypatch.setattr(env, "environment", lambda: {"CPUSERVE_DATA_PARALLEL_SIZE": "4"})
    monkeypatch.setattr(doctor.CpuPlatform, "host", lambda self: load_host("epyc_nps4"))
    placement = doctor.examine(measure=False).placement
    assert placement.bind == "0-14|16-30|32-46|48-62"
    assert placement.frontend == "15,31,47,63"


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        ({"offline": (5,)}, "CPU 5 is offline"),
        ({"governor": "powersave (acpi-cpufreq)"}, "keeps the clock low"),
        ({"load": 40.0}, "waited for 40.0 CPUs"),
        ({"numa_balancing": True}, "moves pages"),
        ({"memory_nodes": (0,)}, "CPUs but no memory of node 1"),
        ({"address_space_limit": 1 << 30}, "ulimit -v allows 1.00 GiB"),
        ({"data_limit": 1 << 30}, "ulimit -d allows 1.00 GiB"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_change_of_a_healthy_machine_costs_is_found(change, needle):
    host = load_host("xeon_2s_amx")
    assert found(host) == []
    assert any(needle in what for what in found(msgspec.structs.replace(host, **change)))


def test_programs_that_take_the_cpus_are_named():
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        try:
            found = {program.pid: program for program in busiest()}
        finally:
            child.kill()
    if child.pid in found or len(found) < 3:  # else three others of this machine are busier
        assert found[child.pid].cpus > 0.1
        assert found[child.pid].name.startswith("python")


def test_a_busy_machine_is_a_problem_that_says_who():
    host = msgspec.structs.replace(load_host("xeon_2s_amx"), load=40.0)
    made = list(problems(host, None, busy=[BusyProcess(7, "a (b", 3.14)]))
    assert [p.what for p in made] == [
        "other programs used or waited for 40.0 CPUs in the last minute; now: a (b (process 7, 3.1)"
    ]


def test_the_allocator_is_the_preloaded_library_or_that_of_the_c_library():
    maps = "7f00-7f10 r-xp 00000000 08:01 1 /usr/lib/x86_64-linux-gnu/{}\n"
    plain = maps.format("libc.so.6")
    assert allocator(plain) == allocator("") == " ".join(platform.libc_ver())
    for name in ("libtcmalloc_minimal.so.4.5.9", "libjemalloc.so.2", "libmimalloc.so.2.0"):
        assert allocator(plain + maps.format(name)) == name


def test_what_is_usual_is_no_problem():
    change = {"governor": "powersave (amd-pstate-epp)", "load": 1.0}
    assert found(msgspec.structs.replace(load_host("xeon_2s_amx"), **change)) == []


def test_a_thread_limit_of_openmp_below_the_plan_is_found():
    host = load_host("xeon_2s_amx")
    placement = place(EngineOptions(), Ledger(EngineOptions(), {}), host)
    limited = [p.what for p in problems(host, placement, {"OMP_THREAD_LIMIT": "8"})]
    assert limited == ["OMP_THREAD_LIMIT=8 is below the 62 planned threads"]
    assert not list(problems(host, placement, {"OMP_THREAD_LIMIT": "64"}))


@pytest.mark.parametrize(
    ("far", "near", "said"),
    [
        (3, 1, "3 rows, to L1 for more; K blocks of few rows stay in L1; keys are fetched to L1"),
        (16, 0, "16 rows, to L1 for more; K blocks of few rows stay in L2; keys are fetched to L2"),
    ],
)
def test_work_says_where_weights_are_fetched_to(far, near, said):
    sizes = {"strip_bytes": 1 << 18, "ahead_bytes": 1 << 13, "rows": 512}
    of = GeometryReport(tile_rows=6, tile_columns=64, pass_rows=12, block_k=384)
    work = WorkReport(
        isa_level="avx512_bf16",
        caches=CacheReport(l1d=32 << 10, l2=1 << 20),
        sizes={**sizes, "far_pass_rows": far, "near_blocks": near, "near_keys": near},
        source="caches",
        linear=dict.fromkeys(("dense_bf16", "w8_channel", "w4m_g128"), of),
    )
    line = list(render_work(work))[-1][1]
    assert f"up to {said}" in line
    assert line.startswith("rows in one pass: bf16 12, int8 12, 4 bits 12; ")
