"""The tests are for the installed package with its compiled extension, as a user has it.

`tests.helpers` must be importable, here and in the processes that tests start, and the checkout
must not: its cpuserve/ would hide the installed package and, unless it was built in place, has
nothing compiled. So a directory with nothing but a package `tests` that stands for this one goes
first.
"""

import atexit
import shutil
import sys
import tempfile
from importlib.machinery import PathFinder
from pathlib import Path

from hypothesis import settings

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def add_tests_alone() -> None:
    """Make `tests` importable without the directory it lies in."""
    alone = Path(tempfile.mkdtemp(prefix="cpuserve-tests-"))
    atexit.register(shutil.rmtree, alone, ignore_errors=True)
    (alone / "tests").mkdir()
    (alone / "tests" / "__init__.py").write_text(f"__path__ = [{str(TESTS)!r}]\n")
    sys.path.insert(0, str(alone))


def without_bare_checkout(path: list[str], root: Path) -> list[str]:
    """`path` without `root` if nothing is compiled there and cpuserve is found elsewhere.

    `python -m pytest` puts the current directory on the path.
    """
    rest = [entry for entry in path if Path(entry or ".").resolve() != root]
    built = any((root / "cpuserve").glob("_C*.so"))
    return path if built or PathFinder.find_spec("cpuserve", rest) is None else rest


# The same examples every time: a failure in CI is one that everybody can repeat. Look for new ones
# with --hypothesis-profile=explore.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore", derandomize=False, print_blob=True)
settings.load_profile("repeatable")

sys.path[:] = without_bare_checkout(sys.path, ROOT)
add_tests_alone()


def pytest_report_header() -> str:
    """Which cpuserve is tested."""
    import cpuserve

    return f"cpuserve: {Path(cpuserve.__file__).parent}"
