"""Which tests may be skipped in CI.

A skipped test is easily overlooked: a machine that lost a program, the network or the extension
would pass with whole modules unrun. So under `.ci/run`, which sets CI_HAS_EVERYTHING because it
installs whatever a test needs, a skip fails unless its reason is listed here.
"""

import os
import re

# A regular expression for the whole reason of a skip, and why nothing remains untested then.
ALLOWED = {
    r"ray is not installed: run \.ci/run ray": (
        "Ray is large and pins versions of its own, so the step `ray` installs it after the other "
        "tests have run, makes sure that it can be imported, and runs these tests."
    ),
    r"helm is not installed: run \.ci/run deploy": (
        "Helm, Compose and the schemas of Kubernetes are large, so the step `deploy` installs "
        "them after the other tests, makes sure that they can be imported, and runs these tests."
    ),
    r"agents are not installed: see tests/clients/test_agents\.py": (
        "The agents take 2.4 GB and change every week. The requests that they send are cases of "
        "tests/api/test_api_agents.py, and the SDKs that they use have tests of their own."
    ),
    r"this CPU cannot run level \w+": (
        "The level's instructions do not exist on this CPU. The levels that it can run are tested "
        "completely, and tests/platforms/test_host.py compares them with the flags of the CPU."
    ),
    r"this test needs two CPUs": (
        "The test is about work on two CPUs, and the tests are allowed to use one only."
    ),
    r"this kernel reports no NUMA nodes": (
        "The kernel was built without NUMA, so there is no node whose pages could be counted."
    ),
    r"this user may not make a PID namespace": (
        "A container's sandbox may forbid it, and nothing can be installed against that. What is "
        "tested there is a few lines that do not depend on anything else."
    ),
    r"this user may not make a mount namespace": (
        "As for PID namespaces. Which facts come from /sys is tested with trees of files, too."
    ),
    r"this machine is not x86-64": (
        "Old x86 CPUs are emulated; on another machine nothing could run on them anyway."
    ),
    r"Python 3\.10 has no tomllib": (
        "The program refuses TOML files there, and says so; newer versions of Python run this test."
    ),
}


def in_ci() -> bool:
    """Whether the tests run in `.ci/run`, where all programs and packages are installed."""
    return bool(os.environ.get("CI_HAS_EVERYTHING"))


def is_allowed(reason: str) -> bool:
    """Whether a test may be skipped for `reason` in CI."""
    return any(re.fullmatch(pattern, reason) for pattern in ALLOWED)


def forbid(report) -> None:
    """Turn the pytest report of a skip that is not allowed in CI into a failure."""
    if not in_ci() or not report.skipped or hasattr(report, "wasxfail"):
        return
    where, line, text = report.longrepr
    reason = text.removeprefix("Skipped: ")
    if not is_allowed(reason):
        report.outcome = "failed"
        report.longrepr = (
            f"{where}:{line}: this test was skipped: {reason}\n"
            "CI_HAS_EVERYTHING is set, and tests/helpers/skips.py does not list this reason. "
            "Install what is missing, or list the reason there if nothing is lost by it."
        )
