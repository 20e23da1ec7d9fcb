"""The table of clients: it has every file of flows, and the default suite runs what it can."""

import re
from pathlib import Path

from tests.clients.sdk.environments import ENVIRONMENTS
from tests.clients.sdk.server import Server, as_variable, given

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def test_every_file_of_flows_has_an_environment():
    files = {path.stem.removeprefix("test_sdk_") for path in HERE.glob("test_sdk_*.py")}
    assert files == {*ENVIRONMENTS, "environments"}


def test_every_package_is_pinned():
    packages = [p for environment in ENVIRONMENTS.values() for p in environment.packages]
    assert [p for p in packages if not re.fullmatch(r"[a-z0-9-]+(\[[a-z,-]+\])?==[0-9.]+", p)] == []


def test_the_default_suite_has_the_clients_of_the_extra():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extra = project.partition("test = [")[2].partition("]\n")[0]
    named = set(re.findall(r'"([a-z-]+)>=', extra))
    for name, environment in ENVIRONMENTS.items():
        assert environment.in_extra == (environment.client in named), name


def test_servers_are_passed_on(monkeypatch):
    servers = {"scripted": Server("http://127.0.0.1:1", "scripted", folder="f")}
    monkeypatch.setenv("CPUSERVE_SDK_SERVERS", as_variable(servers))
    assert given() == servers
