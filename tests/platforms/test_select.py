"""Platform selection: the built-in platform, plug-ins, and reasons for not using one."""

import pytest

from cpuserve.base.errors import ConfigError
from cpuserve.platforms import select
from cpuserve.platforms.cpu import CpuPlatform
from tests.helpers.hosts import load_host


class Plugin(CpuPlatform):
    name = "fast"
    runs = True

    def probe(self):
        return self.runs, "the fast chip is there" if self.runs else "no fast chip"


class Entry:
    value = "somewhere:Thing"
    dist = None

    def __init__(self, name, load):
        self.name = name
        self._load = load

    def load(self):
        return self._load()


def broken():
    msg = "libfast.so is missing"
    raise ImportError(msg)


def test_the_floor_is_chosen_without_plugins():
    platform, notes = select(None, [])
    assert (platform.name, notes) == ("cpu", [])


def test_a_plugin_that_can_run_replaces_the_floor_and_says_so():
    platform, notes = select(None, [Entry("fast", lambda: Plugin)])
    assert isinstance(platform, Plugin)
    assert notes == ["platform fast REPLACES cpu: the fast chip is there"]
    assert select("cpu", [Entry("fast", lambda: Plugin)])[0].name == "cpu"


def test_a_plugin_that_cannot_run_leaves_the_floor(monkeypatch):
    monkeypatch.setattr(Plugin, "runs", False)
    assert select(None, [Entry("fast", lambda: Plugin)])[0].name == "cpu"
    with pytest.raises(ConfigError, match=r"fast.*\(no fast chip\).*cpu, fast"):
        select("fast", [Entry("fast", lambda: Plugin)])


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (Entry("fast", broken), "does not load: ImportError: libfast.so is missing"),
        (Entry("fast", lambda: object), "lacks name, device_type, probe, host"),
        (
            Entry("cpu", lambda: Plugin),
            "an unknown package (somewhere:Thing) has the name of a bui",
        ),
    ],
)
def test_a_broken_plugin_is_a_reason_and_not_a_crash(entry, reason):
    platform, notes = select(None, [entry])
    assert type(platform) is CpuPlatform
    assert len(notes) == 1
    assert reason in notes[0]


def test_an_unknown_platform_lists_what_exists():
    with pytest.raises(ConfigError, match=r"'tpu' cannot be used; set --platform to one of: cpu"):
        select("tpu", [])


def test_of_two_that_can_run_the_first_is_taken_and_the_other_named():
    entries = [Entry("quick", lambda: Plugin), Entry("fast", lambda: Plugin())]
    _, notes = select(None, entries)
    assert notes == [
        "platform fast REPLACES cpu: the fast chip is there (quick could run, too: "
        "choose with --platform)"
    ]


def test_capabilities_name_formats_that_exist():
    from cpuserve.quant.registry import BUILTIN

    capabilities = CpuPlatform().capabilities(load_host("vm_2core_zen5"))
    assert set(BUILTIN) - {"dense"} <= set(capabilities.quantizations)
    assert capabilities.isa_level == "avx512_bf16"
    assert "complete" in capabilities.isa_level_means
    assert CpuPlatform().capabilities(load_host("no_extension")).isa_level == "none"
