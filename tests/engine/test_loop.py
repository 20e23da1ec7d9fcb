"""The engine's loop while it is idle."""

import subprocess
import sys

from cpuserve.engine.ipc import Shutdown
from cpuserve.engine.loop import run_loop
from tests.helpers.children import child_options
from tests.helpers.fake_executor import fake_config, fake_core


class Silence:
    """A channel without messages; waiting on it ends the loop."""

    def __init__(self):
        self.received = []

    def watch(self, interrupt):
        del interrupt

    def receive(self, *, block):
        self.received.append(block)
        return [Shutdown()] if block else []

    def send(self, message):
        raise AssertionError(message)

    def wake(self):
        raise AssertionError


def test_an_idle_loop_prepares_in_small_pieces_and_looks_for_messages_between():
    core = fake_core(fake_config())
    left = iter((True, True, False, False))
    core.executor.prepare = lambda: next(left)
    channel = Silence()
    run_loop(core, channel)
    assert channel.received == [False, False, True]


def test_an_executor_with_nothing_to_prepare_waits_at_once():
    channel = Silence()
    run_loop(fake_core(fake_config()), channel)
    assert channel.received == [True]


def test_an_idle_loop_rests_each_time_before_it_waits():
    core = fake_core(fake_config())
    left = iter((True, False))
    core.executor.prepare = lambda: next(left)
    channel, rests = Silence(), []
    run_loop(core, channel, lambda: rests.append(len(channel.received)))
    assert rests == [1]


COUNTS = """
import gc
from cpuserve.engine.child import collect_at_rest

class Node:
    pass

full = []
gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
rest = collect_at_rest()
del full[:]
kept = []
for _ in range(400_000):  # the collector would visit all of them several times
    kept.append([Node()])
busy = len(full)
rest()
after = len(full) // 2
frozen = gc.get_freeze_count()
rest()
print(busy, after, frozen > 400_000, len(full) // 2)
"""


def test_all_objects_are_collected_at_rest_and_not_between_steps():
    command = [sys.executable, "-c", COUNTS]
    out = subprocess.run(command, **child_options(), capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["0", "1", "True", "1"]
