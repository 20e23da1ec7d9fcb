"""Loads randomly changed model files until the time is over, in processes that may die.

    python -m tests.fuzz.run gguf safetensors config adapter --seconds 600 [--preload LIBRARIES]

A file must load, or be refused in one line, within a minute (an unknown architecture starts torch).
Anything else, a signal and a sanitizer's report included, is a finding: it is printed with the
edits that lead to it, and the exit code is 1. --keep adds a case for every new kind of outcome to
tests/fuzz/corpus, which test_corpus.py loads again. `.ci/run fuzz` runs it under the sanitizers of
addresses and undefined behaviour.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CASE_SECONDS = 60
CASES_A_PROCESS = 400
REPORT_CHARS = 6000
CORPUS = Path(__file__).parent / "corpus"
ROOT = Path(__file__).parents[2]
_VALUES = re.compile(r"""'[^']*'|"[^"]*"|\[[^]]*\]|-?\d[\d.,_e+-]*|\b[\w-]+(\.[\w-]+)+\b""")


def kind_of(outcome: str) -> str:
    """An outcome without the names and numbers in it."""
    return _VALUES.sub("#", outcome)[:160]


def work(kind: str, directory: Path, first: int, count: int) -> None:
    """Run cases [first, first + count); a line of JSON before and after each."""
    from tests.fuzz.edits import draw
    from tests.fuzz.targets import TARGETS, Bench

    bench = Bench(TARGETS[kind], directory / kind)
    for seed in range(first, first + count):
        edits = draw(random.Random(seed), bench.files)
        print(json.dumps({"seed": seed, "edits": edits}), flush=True)
        faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
        outcome = bench.outcome(edits, directory / f"{kind}-work")
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps({"outcome": outcome}), flush=True)


class Fuzzer:
    """Runs the cases of a target in processes, and collects what comes of them."""

    def __init__(self, kind: str, directory: Path, preload: str) -> None:
        self.kind, self.directory = kind, directory
        self.env = {**os.environ, "CPUSERVE_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "2"}
        if preload:
            self.env |= {
                "LD_PRELOAD": preload,
                "ASAN_OPTIONS": "detect_leaks=0",
                "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
            }
        self.kinds: dict[str, list[object]] = {}
        self.cases = self.loaded = self.findings = 0

    def run(self, seed: int, seconds: float) -> None:
        """Run cases from `seed` on for `seconds`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            seed = self._process(seed, end)

    def _process(self, seed: int, end: float) -> int:
        """Run a process; return the seed after its last case."""
        command = [sys.executable, "-m", "tests.fuzz.run", self.kind, "--work", str(self.directory)]
        command += ["--seed", str(seed)]
        with tempfile.TemporaryFile() as errors:
            worker = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, env=self.env, cwd=ROOT, text=True
            )
            case = None
            for line in worker.stdout:
                found = json.loads(line)
                if "edits" in found:
                    case = found
                    continue
                self._add(found["outcome"], case)
                seed, case = case["seed"] + 1, None
                if time.monotonic() > end:
                    worker.terminate()
                    worker.wait()
                    return seed
            if worker.wait() != 0:
                self.findings += 1
                errors.seek(0)
                report = errors.read().decode(errors="replace")
                if (
                    len(report) > REPORT_CHARS
                ):  # a sanitizer says first, and Python last, what it is
                    report = f"{report[: REPORT_CHARS // 2]}\n...\n{report[-REPORT_CHARS // 2 :]}"
                print(f"{self.kind}: FINDING, exit code {worker.returncode}, {json.dumps(case)}")
                print(report, flush=True)
                seed = case["seed"] + 1 if case else seed + 1
        return seed

    def _add(self, outcome: str, case: dict[str, object]) -> None:
        self.cases += 1
        self.loaded += outcome == "loaded"
        self.kinds.setdefault(kind_of(outcome), case["edits"])

    def keep(self) -> int:
        """Add a case of every new kind of outcome to the corpus; return how many it has."""
        path = CORPUS / f"{self.kind}.json"
        kept = json.loads(path.read_text()) if path.exists() else {}
        kept |= {kind: edits for kind, edits in self.kinds.items() if kind not in kept}
        lines = (f"{json.dumps(k)}: {json.dumps(e)}" for k, e in sorted(kept.items()))
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return len(kept)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="+")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preload", default="", help="libraries for the processes, such as ASan's")
    parser.add_argument(
        "--keep", action="store_true", help="add new kinds of outcome to the corpus"
    )
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.kinds[0], args.work, args.seed, CASES_A_PROCESS)
        return 0
    findings = 0
    with tempfile.TemporaryDirectory(prefix="cpuserve-fuzz-") as directory:
        for kind in args.kinds:
            from tests.fuzz.targets import TARGETS, Bench

            Bench(TARGETS[kind], Path(directory) / kind)  # written once, without sanitizers
            fuzzer = Fuzzer(kind, Path(directory), args.preload)
            fuzzer.run(args.seed, args.seconds)
            findings += fuzzer.findings
            kept = f", {fuzzer.keep()} in the corpus" if args.keep else ""
            print(
                f"{kind}: {fuzzer.cases} cases, {fuzzer.loaded} loaded, {len(fuzzer.kinds)} kinds "
                f"of outcome{kept}, {fuzzer.findings} findings",
                flush=True,
            )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
