"""`python -m tests.clients.sdk NAME... --venv DIR`: the flows of clients, each in its environment.

NAME is a client of environments.py, or `all`. DIR keeps the environments for the next run; they are
made with pip, which needs a package index. The flows then run offline against servers that this
process starts.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.clients.sdk.environments import ENVIRONMENTS, PYTEST, Environment
from tests.clients.sdk.server import VARIABLE, Server, as_variable

HERE = Path(__file__).parent
LIMIT_S = 1200  # for the installation, and for the flows, of one client
# Clients must not look for prices, tokenizers or newer versions, and report nothing.
QUIET = {
    "ANONYMIZED_TELEMETRY": "False",
    "DO_NOT_TRACK": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_HUB_OFFLINE": "1",
    "MEM0_TELEMETRY": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OPENAI_API_KEY": "none",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the flows of a client did. version: of the client. summary: the last line of pytest."""

    name: str
    version: str
    summary: str
    passed: bool


def alone() -> Path:
    """Make `tests` importable without the directory it lies in; return the folder with it.

    tests/conftest.py does this when it is imported. `tests` itself has been imported before that,
    from the current directory.
    """
    importlib.import_module("tests.conftest")
    del sys.modules["tests"]
    return Path(str(importlib.import_module("tests").__file__)).parents[1]


def python_of(folder: Path, environment: Environment) -> Path:
    """Return the Python of an environment, which is made or completed if need be."""
    python, stamp = folder / "bin" / "python", folder / "packages.txt"
    wanted = "\n".join((*environment.packages, PYTEST))
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, *wanted.split("\n")], check=True, timeout=LIMIT_S)
    stamp.write_text(wanted)
    return python


def version_of(python: Path, environment: Environment) -> str:
    """Return the version of the client; AssertionError if torch came with it, which is large."""
    program = (
        "import sys, importlib.metadata as m, importlib.util as u; "
        "assert u.find_spec('torch') is None, 'torch'; print(m.version(sys.argv[1]))"
    )
    command = [str(python), "-c", program, environment.client]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def run_flows(python: Path, name: str, servers: dict[str, Server], tests: Path) -> Outcome:
    """Run the flows of a client; tests: the folder that `tests` is imported from."""
    command = [str(python), "-m", "pytest", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "--rootdir", str(HERE), "--confcutdir", str(HERE)]
    command += ["--import-mode=importlib", str(HERE / f"test_sdk_{name}.py")]
    paths = {"PYTHONPATH": str(tests), VARIABLE: as_variable(servers)}
    with tempfile.TemporaryDirectory() as folder:
        homes = {"HOME": folder, "DSPY_CACHEDIR": folder, "HF_HOME": folder}
        env = {**os.environ, **QUIET, **paths, **homes}
        if ENVIRONMENTS[name].hub:
            del env["HF_HUB_OFFLINE"]
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S
        )
    if done.returncode != 0:
        print(done.stdout, done.stderr, sep="\n")
    summary = (done.stdout.strip().splitlines() or [done.stderr.strip()])[-1]
    version = version_of(python, ENVIRONMENTS[name])
    return Outcome(name, version, summary, done.returncode == 0)


@contextmanager
def started(names: Sequence[str]) -> Iterator[dict[str, Server]]:
    """Start the servers that these clients need."""
    from tests.clients.sdk.servers import SERVERS

    wanted = dict.fromkeys(server for name in names for server in ENVIRONMENTS[name].servers)
    with ExitStack() as stack:
        yield {server: stack.enter_context(SERVERS[server]()) for server in wanted}


def main() -> int:
    """Run the flows that the command line asks for; return 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.sdk")
    parser.add_argument("names", nargs="+", choices=[*ENVIRONMENTS, "all"], metavar="NAME")
    parser.add_argument("--venv", type=Path, required=True, metavar="DIR")
    asked = parser.parse_args()
    names = list(ENVIRONMENTS) if "all" in asked.names else asked.names
    tests, outcomes = alone(), []
    pythons = {
        name: python_of((asked.venv / name).absolute(), ENVIRONMENTS[name]) for name in names
    }
    with started(names) as servers:
        for name, python in pythons.items():
            outcome = run_flows(python, name, servers, tests)
            outcomes.append(outcome)
            print(f"{outcome.name} {outcome.version}: {outcome.summary}", flush=True)
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
