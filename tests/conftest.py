"""The tests are for the installed package with its compiled extension, as a user has it.

`tests.helpers` must be importable, here and in the processes that tests start, and the checkout
must not: its cpuserve/ would hide the installed package and, unless it was built in place, has
nothing compiled. So a directory goes first that has nothing but a package `tests`, which stands for
this one, and packages for the scripts of the checkout that have tests.
"""

import atexit
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from contextlib import ExitStack, suppress
from functools import cache, lru_cache
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def add_tests_alone() -> None:
    """Make `tests`, `benchmarks` and `docs` importable, but not the directory that has them."""
    alone = Path(tempfile.mkdtemp(prefix="cpuserve-tests-"))
    atexit.register(shutil.rmtree, alone, ignore_errors=True)
    for name in ("tests", "benchmarks", "docs"):
        (alone / name).mkdir()
        (alone / name / "__init__.py").write_text(f"__path__ = [{str(ROOT / name)!r}]\n")
    sys.path.insert(0, str(alone))


def without_bare_checkout(path: list[str], root: Path) -> list[str]:
    """`path` without `root` if nothing is compiled there and cpuserve is found elsewhere.

    `python -m pytest` puts the current directory on the path.
    """
    rest = [entry for entry in path if Path(entry or ".").resolve() != root]
    built = any((root / "cpuserve").glob("_C*.so"))
    return path if built or PathFinder.find_spec("cpuserve", rest) is None else rest


def without_test_folders(path: list[str]) -> list[str]:
    """`path` without the folders that pytest added to import the test modules in them."""
    return [entry for entry in path if not Path(entry).is_relative_to(TESTS)]


# The same examples every time: a failure in CI is one that everybody can repeat. Look for new ones
# with --hypothesis-profile=explore. Neither fails because a busy machine takes long for an example.
AT_ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", AT_ANY_SPEED, derandomize=True)
settings.register_profile("explore", AT_ANY_SPEED, derandomize=False, print_blob=True)
settings.load_profile("repeatable")


def without_constants_of_sources() -> None:
    """Let no example of hypothesis depend on which modules have been imported.

    Hypothesis takes some values from the sources of imported modules outside of site-packages. So
    the examples of a test would differ between an installed package and a checkout, and between
    workers that have run other tests before it.
    """
    with suppress(ImportError, AttributeError):  # old versions take no such values
        providers = import_module("hypothesis.internal.conjecture.providers")
        none_yet = providers._local_constants
        providers._get_local_constants = lambda: none_yet


without_constants_of_sources()

# A shell ignores these signals in what it starts in the background, as nohup does, and so would the
# servers that tests start. A signal with a handler, even this one, is reset in a new program.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

# Torch's threads sleep at its barriers. Else they spin there, on CPUs that other tests need. OpenMP
# reads this when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# An engine computes in one thread, which may run on any CPU. Threads that are pinned to CPUs which
# other tests use wait for their turn there at each of the hundreds of barriers of a step. Tests of
# threads, ranks and places say how many they want, and where.
os.environ.setdefault("CPUSERVE_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How many drafts pay follows from measured times, so with drafts the number of steps and events of
# a response would differ from run to run, but none of its tokens (tests/llm/test_speculation.py).
os.environ.setdefault("CPUSERVE_SPECULATE", "off")

sys.path[:] = without_bare_checkout(sys.path, ROOT)
add_tests_alone()

from tests.helpers import depth  # noqa: E402 (it can be imported from here on)
from tests.helpers.skips import forbid  # noqa: E402

pytest_plugins = ("tests.helpers.grammars",)


def pytest_runtest_setup() -> None:
    """Let torch compute in one thread, whatever an executor of an earlier test has set.

    Tiny products gain nothing from threads, and torch's barriers spin: with two threads, a
    comparison with transformers takes four times the CPU time.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport():
    """In CI, fail a test that was skipped for a reason that is not listed."""
    report = yield
    forbid(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report():
    """The same for a module that was skipped as a whole."""
    report = yield
    forbid(report)
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Return what `-n auto` means."""
    return depth.workers(config)


def pytest_ignore_collect(collection_path, config):
    """Leave out whole folders that have nothing of what is asked for: reading all takes 20 s."""
    return depth.is_not_read(collection_path, config) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items) -> None:
    """Leave out what is deep, unless it is asked for (tests/helpers/depth.py)."""
    depth.mark_matrices(items)
    depth.mark_quick(items)
    depth.leave_out_deep(config, items)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep modules and tests out of later garbage collections, each of which would take 0.3 s.

    Nor does a later import look in all folders of tests first; the processes that tests start get
    this path, too, and would take 0.07 s of CPU time more for each server.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        sys.path[:] = without_test_folders(sys.path)


def pytest_configure() -> None:
    """Run no test without the compiled extension.

    Without it the program falls back to torch, and most tests would pass without a kernel.
    """
    import cpuserve

    try:
        import_module("cpuserve._C")
    except ImportError as error:
        msg = (
            f"the compiled extension of {Path(cpuserve.__file__).parent} cannot be imported: "
            f"{error}. Install the package (pip install '.[test]') or build it in place "
            "(CONTRIBUTING.md)."
        )
        raise pytest.UsageError(msg) from None


@pytest.fixture(autouse=True)
def loggers_as_they_were():
    """Undo what a command in this process does to the loggers: its streams end with the test."""
    root, ours = logging.getLogger(), logging.getLogger("cpuserve")
    handlers, propagate, levels = ours.handlers[:], ours.propagate, _levels()
    yield
    for handler in ours.handlers:
        if handler not in handlers:
            root.removeHandler(handler)
    ours.handlers, ours.propagate = handlers, propagate
    for name in _levels().keys() | levels.keys():
        logging.getLogger(name).setLevel(levels.get(name, logging.NOTSET))


def _levels():
    """Return the level of each logger of ours that has one, such as the access log's."""
    loggers = logging.root.manager.loggerDict
    return {
        name: level
        for name in _names_of_ours(len(loggers))
        if (level := getattr(loggers.get(name), "level", logging.NOTSET))
    }


@lru_cache(maxsize=1)
def _names_of_ours(count):
    """Return the names of our loggers. count: of all names, which grows with each new one.

    Libraries have hundreds of names, and each test would look through them three times.
    """
    names = logging.root.manager.loggerDict
    return [name for name in names if name == "cpuserve" or name.startswith("cpuserve.")]


@pytest.fixture(scope="session")
def shared_server():
    """Return a function of a model and options: a server that all tests of this process share.

    It is for tests that leave the server as it was: each start takes two seconds of CPU time.
    """
    from tests.helpers.served import running_server

    with ExitStack() as stack:
        yield cache(lambda *command: stack.enter_context(running_server(*command)))


@pytest.fixture
def eager(monkeypatch):
    """Verify every guess of a draft for which the step has tokens, whatever time it costs.

    What drafts are worth follows from measured times, so without this their number would differ
    from machine to machine.
    """
    from cpuserve.core.cost import CostModel
    from cpuserve.core.speculation import ngram_drafts
    from cpuserve.core.speculation.budget import DraftBudget

    def count(budget, chances):
        return min(len(chances), max(budget.tokens, 0))

    monkeypatch.setattr(DraftBudget, "count", count)
    monkeypatch.setattr(DraftBudget, "is_worth", True)
    monkeypatch.setattr(CostModel, "lacks_plain_steps", False)
    monkeypatch.setattr(ngram_drafts, "FEW_MISSES", 1 << 40)  # look for guesses in each step


@pytest.fixture
def hasty(eager, monkeypatch):
    """Let a draft model guess the tokens of every text, whatever time it takes."""
    from cpuserve.engine.speculation.draft_model import DraftModel
    from cpuserve.engine.speculation.prices import GuessPrices

    monkeypatch.setattr(GuessPrices, "paying", lambda _self, turns, _budget: turns)
    monkeypatch.setattr(DraftModel, "is_worth", lambda *_: True)


@pytest.fixture
def patient_closes(monkeypatch):
    """Write all blocks at the end of an engine or a tier, however long this machine takes.

    Servers end after a few seconds, and lose the rest.
    """
    from cpuserve.core.kv.disk import DiskCache
    from cpuserve.core.kv.offload import Offload
    from cpuserve.engine.speculation.model_proposer import ModelProposer
    from tests.helpers.patience import PATIENCE_S

    for store in (DiskCache, Offload, ModelProposer):
        monkeypatch.setattr(store.close, "__defaults__", (PATIENCE_S,))


@pytest.fixture
def patient_offload(patient_closes, monkeypatch):
    """Save every evicted block and restore every saved one, however long this machine takes.

    Both are left out when they take longer than a step may wait, or than computing the tokens.
    """
    from cpuserve.core.kv.offload import Offload

    monkeypatch.setattr("cpuserve.core.cost.CostModel.restores", lambda *_: True)
    monkeypatch.setattr(Offload, "has_time", True)


def pytest_report_header() -> str:
    """Which cpuserve is tested, and at which of its levels."""
    import cpuserve
    from cpuserve import _C

    levels = ", ".join(_C.isa_levels())
    return f"cpuserve: {Path(cpuserve.__file__).parent}, levels {levels}"
