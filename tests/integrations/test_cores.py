"""Cores claimed through file locks: no two engines get the same core."""

import subprocess
import sys

import pytest

from cpuserve.base.errors import ConfigError
from cpuserve.integrations.cores import claim_cores
from tests.helpers.children import child_options
from tests.helpers.hosts import load_host

CHILD = """
import sys
from pathlib import Path
from cpuserve.integrations.cores import claim_cores
from tests.helpers.hosts import load_host
claim = claim_cores(4, load_host("desktop_8core_smt"), Path(sys.argv[1]))
print(*claim.cpus, flush=True)
sys.stdin.read()
"""


def claims(host, sizes, directory):
    host = load_host(host)
    return [claim_cores(n, host, directory, wait_s=0) for n in sizes]


def test_claims_are_whole_cores_that_nobody_shares(tmp_path):
    one, two = claims("desktop_8core_smt", [3, 8], tmp_path)
    assert one.cpus == (0, 1, 8, 9)
    assert two.cpus == (2, 3, 4, 5, 10, 11, 12, 13)


def test_too_few_left_is_an_error_with_their_number_until_some_are_given_back(tmp_path):
    one, two = claims("desktop_8core_smt", [10, 2], tmp_path)
    with pytest.raises(ConfigError, match="num_cpus=5: 4 of the 16 CPUs"):
        claims("desktop_8core_smt", [5], tmp_path)
    assert claims("desktop_8core_smt", [4], tmp_path)[0].cpus == (6, 7, 14, 15)
    one.release()
    assert claims("desktop_8core_smt", [10], tmp_path)[0].cpus == one.cpus
    two.release()


def test_an_engine_gets_one_node_where_it_fits_and_the_fullest_first(tmp_path):
    host = load_host("epyc_nps4")
    node = {cpu.id: cpu.node for cpu in host.cpus}
    per_node = len(host.cpus) // len(set(node.values()))
    made = claims("epyc_nps4", [per_node // 2, per_node, per_node // 2, per_node], tmp_path)
    nodes = [{node[cpu] for cpu in claim.cpus} for claim in made]
    assert [len(n) for n in nodes] == [1] * 4
    assert nodes[0] == nodes[2]
    assert len(set().union(*nodes)) == 3
    assert len({node[cpu] for cpu in claims("epyc_nps4", [per_node], tmp_path)[0].cpus}) == 1


def test_the_end_of_a_process_gives_its_cores_back(tmp_path):
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **child_options(), **pipes) as child:
        assert child.stdout.readline().split() == ["0", "1", "8", "9"]
        with pytest.raises(ConfigError, match="12 of the 16"):
            claims("desktop_8core_smt", [16], tmp_path)
        child.kill()
    host = load_host("desktop_8core_smt")
    assert len(claim_cores(16, host, tmp_path, wait_s=5).cpus) == 16
