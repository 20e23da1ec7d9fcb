"""A test that did not run turns CI red, unless tests/helpers/skips.py lists the reason."""

import re
from pathlib import Path

import pytest

from tests.helpers.depth import deep_but
from tests.helpers.skips import ALLOWED
from tests.helpers.small_suite import run_suite

TESTS = Path(__file__).parents[1]
SKIPS = {
    "in a test": "def test(): pytest.skip('{}')",
    "by a mark": "@pytest.mark.skipif(True, reason='{}')\ndef test(): pass",
    "in a fixture": "@pytest.fixture\ndef f(): pytest.skip('{}')\ndef test(f): pass",
    "as a module": "pytest.skip('{}', allow_module_level=True)",
}
LISTED = "this CPU cannot run level avx1024"


def run(folder, source, *options, ci="1"):
    """The exit code and output of pytest on a test file with this suite's conftest."""
    (folder / "test_it.py").write_text(f"import pytest\n{source}\n")
    (folder / "test_other.py").write_text("def test_that_runs(): pass\n")
    return run_suite(folder, *options, CI_HAS_EVERYTHING=ci)


@pytest.mark.parametrize("how", deep_but(["in a fixture"], SKIPS))
def test_in_ci_a_skip_that_is_not_listed_fails_and_says_why(tmp_path, how):
    code, output = run(tmp_path, SKIPS[how].format("no such program"))
    assert code != 0
    assert "this test was skipped: no such program" in output
    assert "tests/helpers/skips.py does not list this reason" in output


@pytest.mark.deep  # 9 s
@pytest.mark.parametrize("how", SKIPS)
def test_a_listed_reason_may_skip_in_ci_and_any_reason_elsewhere(tmp_path, how):
    code, output = run(tmp_path, SKIPS[how].format(LISTED))
    assert (code, "1 skipped" in output) == (0, True), output
    code, output = run(tmp_path, SKIPS[how].format("no such program"), ci="")
    assert (code, "1 skipped" in output) == (0, True), output


@pytest.mark.deep
def test_a_test_that_is_expected_to_fail_is_no_skip(tmp_path):
    source = "@pytest.mark.xfail(reason='known')\ndef test(): raise ValueError\n"
    code, output = run(tmp_path, source)
    assert (code, "1 xfailed" in output) == (0, True), output


def test_without_the_extension_nothing_runs(tmp_path, monkeypatch):
    (tmp_path / "no_extension.py").write_text("import sys\nsys.modules['cpuserve._C'] = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, output = run(tmp_path, "", "-p", "no_extension", ci="")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "the compiled extension of" in output
    assert "passed" not in output


def test_every_reason_on_the_list_is_given_by_some_test():
    """What no test says any more has to leave the list: it could hide another test's skip."""
    others = {Path(__file__).name, "skips.py"}
    sources = [p.read_text() for p in TESTS.rglob("*.py") if p.name not in others]
    for pattern in ALLOWED:
        plain = re.sub(r"\\w\+$", "", pattern).replace("\\", "")
        assert any(plain in source for source in sources), pattern
