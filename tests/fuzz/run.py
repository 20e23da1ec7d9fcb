"""Tries random cases of targets until the time is over, in processes that may die.

    python -m tests.fuzz.run gguf safetensors config adapter --seconds 600 [--preload LIBRARIES]
    python -m tests.fuzz.run --inputs --seconds 60

A case is, for example, a changed file of a model, which must load or be refused in one line, or a
changed request, which must get a response that is no fault. It may take a minute, and the memory
and the CPU time that its bench allows. Anything else, a signal and a sanitizer's report included,
is a finding: it is printed with the case, and the exit code is 1. --keep adds a case for new kinds
of outcome to tests/fuzz/corpus, which test_corpus.py tries again. --case FILE tries the case in a
file. `.ci/run fuzz` runs all targets, those of files under the sanitizers of addresses and of
undefined behaviour.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.targets import Bench

CASE_SECONDS = 60
# A process of changed files may load torch for some, which slows it down.
FILES_A_PROCESS, CASES_A_PROCESS = 400, 20_000
REPORT_CHARS = 6000
# How many cases --keep has in the corpus of a target that is no file, and the longest of them.
MOST_KEPT, MOST_KEPT_CHARS = 60, 3000
CORPUS = Path(__file__).parent / "corpus"
ROOT = Path(__file__).parents[2]
_VALUES = re.compile(r"""'[^']*'|"[^"]*"|\[[^]]*\]|-?\d[\d.,_e+-]*|\b[\w-]+(\.[\w-]+)+\b""")


def kind_of(outcome: str) -> str:
    """An outcome without the names and numbers in it."""
    return _VALUES.sub("#", outcome)[:160]


def work(kind: str, directory: Path, first: int, count: int) -> None:
    """Run cases [first, first + count); a line of JSON before and after each."""
    from tests.fuzz.targets import TARGETS

    bench = TARGETS[kind](directory / kind)
    for seed in range(first, first + count):
        case = bench.draw(random.Random(seed))
        print(json.dumps({"seed": seed, "case": case}), flush=True)
        outcome = tried(bench, case)
        print(json.dumps({"outcome": outcome}), flush=True)
    bench.close()


def tried(bench: Bench, case: object) -> str:
    """Return the outcome of a case; AssertionError if this process has taken too much for it."""
    begun = time.process_time()
    faulthandler.dump_traceback_later(CASE_SECONDS, exit=True, file=sys.__stderr__)
    try:
        outcome = bench.outcome(case)
    finally:
        faulthandler.cancel_dump_traceback_later()
    used = time.process_time() - begun
    assert used <= bench.most_cpu_s, f"{used:.1f} s of CPU time"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    assert peak <= bench.most_bytes, f"{peak} bytes of memory"
    return outcome


class Fuzzer:
    """Runs the cases of a target in processes, and collects what comes of them."""

    def __init__(self, kind: str, directory: Path, preload: str, *, all_kept: bool) -> None:
        """all_kept: --keep keeps every kind of outcome."""
        self.kind, self.directory, self.all_kept = kind, directory, all_kept
        self.env = {**os.environ, "CPUSERVE_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "2"}
        if preload:
            self.env |= {
                "LD_PRELOAD": preload,
                "ASAN_OPTIONS": "detect_leaks=0",
                "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
            }
        self.kinds: dict[str, list[object]] = {}
        self.cases = self.findings = 0

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
                if "case" in found:
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
        self.kinds.setdefault(kind_of(outcome), case["case"])

    def keep(self) -> int:
        """Add a case of every new kind of outcome to the corpus; return how many it has."""
        path = CORPUS / f"{self.kind}.json"
        kept = json.loads(path.read_text()) if path.exists() else {}
        for kind, case in self.kinds.items():
            small = len(kept) < MOST_KEPT and len(json.dumps(case)) <= MOST_KEPT_CHARS
            if small or self.all_kept:
                kept.setdefault(kind, case)
        lines = (f"{json.dumps(k)}: {json.dumps(e)}" for k, e in sorted(kept.items()))
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return len(kept)


def _try_one(kind: str, case: object) -> int:
    """Print the outcome of one case."""
    from tests.fuzz.targets import TARGETS

    with tempfile.TemporaryDirectory(prefix="cpuserve-fuzz-") as directory:
        bench = TARGETS[kind](Path(directory) / kind)
        print(tried(bench, case))
        bench.close()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", help="targets, see targets.py")
    parser.add_argument("--inputs", action="store_true", help="all targets that are no files")
    parser.add_argument("--case", type=Path, help="a file with one case (JSON) of the target")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preload", default="", help="libraries for the processes, such as ASan's")
    parser.add_argument(
        "--keep", action="store_true", help="add new kinds of outcome to the corpus"
    )
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    from tests.fuzz.files import FILES

    if args.case:
        return _try_one(args.kinds[0], json.loads(args.case.read_text()))
    if args.work:
        count = FILES_A_PROCESS if args.kinds[0] in FILES else CASES_A_PROCESS
        work(args.kinds[0], args.work, args.seed, count)
        return 0
    from tests.fuzz.targets import TARGETS

    kinds = args.kinds + [kind for kind in TARGETS if args.inputs and kind not in FILES]
    findings = 0
    with tempfile.TemporaryDirectory(prefix="cpuserve-fuzz-") as directory:
        for kind in kinds:
            if kind in FILES:
                TARGETS[kind](Path(directory) / kind)  # written once, without sanitizers
            fuzzer = Fuzzer(kind, Path(directory), args.preload, all_kept=kind in FILES)
            fuzzer.run(args.seed, args.seconds)
            findings += fuzzer.findings
            kept = f", {fuzzer.keep()} in the corpus" if args.keep else ""
            print(
                f"{kind}: {fuzzer.cases} cases, {len(fuzzer.kinds)} kinds of outcome{kept}, "
                f"{fuzzer.findings} findings",
                flush=True,
            )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
