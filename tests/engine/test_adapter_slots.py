"""Changes of adapters in an engine: portions, slots that requests still use, and errors."""

import errno
import itertools
import os

import pytest

from cpuserve.base.errors import ModelError
from cpuserve.engine.ipc import Ask
from cpuserve.engine.lora import AdapterSlots

FOREVER_S = 3600.0


class Adapter:
    def __init__(self, name):
        self.name = name

    def fingerprint(self):
        return f"print of {self.name}"


class Slots(AdapterSlots):
    """Three slots, of which two may have names; each adapter is loaded in four turns."""

    def __init__(self, faults=()):
        self.written = []  # (slot, adapter)
        self.used = set()  # by requests
        self.numbers = itertools.count()
        self.faults = dict(faults)
        super().__init__(3, self._write, self)
        self.in_use = lambda: self.used

    def _write(self, slot, adapter):
        for _ in range(3):
            yield
        if "write" in self.faults:
            raise self.faults["write"]
        self.written.append((slot, adapter.name))

    def copy(self, name, path):
        yield
        if "read" in self.faults:
            raise self.faults["read"]
        return Adapter(path.name)

    def begin(self, what, name, **details):
        number = next(self.numbers)
        self.ask(Ask(number, what, {"name": name, **details}))
        return number

    def change(self, what, name, **details):
        number = self.begin(what, name, **details)
        self.advance(FOREVER_S)
        assert not self.changing
        (reply,) = self.replies()
        assert reply.id == number
        return reply.value

    def stage(self, name, path=None, in_place=False):
        return self.change("stage_adapter", name, path=f"/disk/{path or name}", in_place=in_place)

    def load(self, name, path=None, in_place=False):
        reply = self.stage(name, path, in_place)
        assert reply == {"fingerprint": f"print of {path or name}"}
        assert self.change("use_adapter", name) == {}
        return self.find(name).slot


def test_an_adapter_has_its_name_only_when_it_is_used():
    slots = Slots()
    slots.stage("a")
    assert slots.find("a") is None
    assert slots.change("use_adapter", "a") == {}
    assert slots.find("a").fingerprint == "print of a"
    assert slots.fingerprints() == {"a": "print of a"}


def test_a_change_goes_on_in_portions():
    slots = Slots()
    slots.begin("stage_adapter", "a", path="/disk/a", in_place=False)
    turns = 0
    while slots.changing:
        assert not slots.replies()
        slots.advance(0.0)
        turns += 1
    assert turns == 5  # one pause while it is read, three while it is written, and the end
    assert [reply.value for reply in slots.replies()] == [{"fingerprint": "print of a"}]


def test_no_work_is_left_without_changes():
    slots = AdapterSlots()
    slots.advance(FOREVER_S)
    assert not slots.changing
    assert slots.replies() == []


def test_a_dropped_adapter_leaves_its_slot():
    slots = Slots()
    slots.stage("a")
    assert slots.change("drop_adapter", "a") == {}
    assert "nothing to use_adapter" in slots.change("use_adapter", "a")["error"]
    assert slots.load("b") == 0


def test_a_replaced_adapter_keeps_its_slot_until_its_requests_have_ended():
    slots = Slots()
    first = slots.load("a")
    slots.used = {first}
    second = slots.load("a", "a2", in_place=True)
    assert second != first
    slots.used = {first, second}
    third = slots.load("a", "a3", in_place=True)
    assert len({first, second, third}) == 3
    slots.used = {first, second, third}
    reply = slots.stage("a", "a4", in_place=True)
    assert "no slot is free yet" in reply["error"]
    assert reply["fault"]
    assert slots.find("a").fingerprint == "print of a3"
    slots.used = {second, third}
    assert slots.load("a", "a4", in_place=True) == first


def test_an_unloaded_adapter_keeps_its_slot_until_its_requests_have_ended():
    slots = Slots()
    first, _ = slots.load("a"), slots.load("b")
    slots.used = {first}
    assert slots.change("unload_adapter", "a") == {}
    assert slots.find("a") is None
    third = slots.load("c")
    assert third != first
    slots.used = set()
    slots.change("unload_adapter", "c")
    assert slots.load("d") == first


def test_there_is_room_for_one_adapter_less_than_slots():
    slots = Slots()
    slots.load("a")
    slots.load("b")
    reply = slots.stage("c")
    assert "there is room for 2 adapters, and a, b are loaded" in reply["error"]
    assert slots.load("a", "a2", in_place=True) == 2


def of_the_system(number):
    error = ModelError("adapter a: cannot be read")
    error.__cause__ = OSError(number, os.strerror(number))
    return error


@pytest.mark.parametrize("where", ["read", "write"])
@pytest.mark.parametrize(
    ("fault", "wanted"),
    [
        (ModelError("adapter a: is broken"), {"error": "adapter a: is broken", "fault": True}),
        (
            of_the_system(errno.EMFILE),
            {"error": "adapter a: cannot be read", "fault": False, "again": True},
        ),
        (
            of_the_system(errno.EISDIR),
            {"error": "adapter a: cannot be read", "fault": True},
        ),
        (MemoryError("none"), {"error": "stage_adapter failed: none", "fault": False}),
    ],
    ids=["broken", "too many files", "a directory", "no memory"],
)
def test_a_failed_change_changes_nothing(where, fault, wanted, caplog):
    slots = Slots()
    slots.load("a")
    slots.faults = {where: fault}
    with caplog.at_level("CRITICAL", "cpuserve"):
        assert slots.stage("a", "a2", in_place=True) == wanted
    slots.faults = {}
    assert "error" in slots.change("use_adapter", "a")
    assert slots.find("a").slot == 0
    assert slots.load("b") == 1


def test_without_room_nothing_can_be_loaded():
    slots = AdapterSlots()
    slots.ask(Ask(1, "stage_adapter", {"name": "a", "path": "/disk/a", "in_place": False}))
    slots.advance(FOREVER_S)
    (reply,) = slots.replies()
    assert "--allow-runtime-lora-updating" in reply.value["error"]
