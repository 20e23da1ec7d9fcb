"""The engine's loop while it is idle."""

from cpuserve.engine.ipc import Shutdown
from cpuserve.engine.loop import run_loop
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
