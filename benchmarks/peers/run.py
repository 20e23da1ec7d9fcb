#!/usr/bin/env python3
"""cpuserve and its peers on the same weights, in alternation, and one table of ratios.

usage: run.py DIR [--gguf FILE.gguf] [--peers vllm llama openvino] [--rounds 5] [--streams 8 32]
              [--own=OPTION ...]

DIR is a Hugging Face directory: cpuserve and vLLM serve it, both with bfloat16. With --gguf FILE
cpuserve, llama.cpp and OpenVINO run that (vLLM keeps DIR); --from-dir lets cpuserve keep DIR too,
as for --own=--quantization=int8. Servers are started once and stopped (SIGSTOP) while another
engine is measured: an idle one must not take part, and vLLM takes a minute to start. Nothing else
may run on the machine: llama.cpp's spinning threads collapse otherwise. install.sh comes first.
"""

import argparse
import asyncio
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

from cpuserve.bench.driver import LoadError, Target, complete, fetch, run_closed
from cpuserve.bench.server import private_flags, serve_command
from cpuserve.bench.workload import plain_ids
from cpuserve.config.env import environment

PEERS = Path(environment().get("PEERS", "~/.cache/cpuserve-peers")).expanduser()
HERE = Path(__file__).parent
READY_TIMEOUT_S = 600
KEY = secrets.token_hex(8)  # of the servers; else one in the environment would be theirs


class ServerEngine:
    """An OpenAI-compatible server, frozen except while it is measured."""

    def __init__(self, name, command, port, model, env=None):
        self.name, self.model = name, model
        self.url = f"http://127.0.0.1:{port}"
        if self._healthy():
            raise SystemExit(f"{self.url}: another server is there, and it would be measured")
        with Path(f"{name}.log").open("w") as log:
            self.process = subprocess.Popen(
                command,
                env={**environment(), **(env or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise
        self._freeze(True)

    def measure(self, args, scenario=None):
        self._freeze(False)
        try:
            return asyncio.run((scenario or rates)(Target(self.url, self.model, KEY), args))
        finally:
            self._freeze(True)

    def close(self):
        self._freeze(False)
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _freeze(self, on):
        os.killpg(self.process.pid, signal.SIGSTOP if on else signal.SIGCONT)

    def _wait_ready(self):
        until = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < until and self.process.poll() is None:
            if self._healthy():
                return
            time.sleep(0.5)
        raise SystemExit(f"{self.name} did not start; see {self.name}.log")

    def _healthy(self):
        try:
            return asyncio.run(fetch(Target(self.url, "", KEY), "/health"))[0] == 200
        except LoadError:
            return False


class ScriptEngine:
    """A peer that is measured by a script in its own environment, loading the model each time."""

    def __init__(self, name, script, arguments):
        self.name = name
        python = str(PEERS / name / "bin/python")
        self.command = [python, str(HERE / script), *map(str, arguments)]

    def measure(self, _args):
        out = subprocess.run(self.command, capture_output=True, text=True, check=False)
        if out.returncode or not out.stdout.strip():
            last = (out.stderr.strip() or "it said nothing").splitlines()[-1]
            raise SystemExit(f"{self.name} ended with exit code {out.returncode}: {last}")
        return json.loads(out.stdout.splitlines()[-1])

    def close(self):
        pass


async def rates(target, args):
    """Decode and prefill of one request and output of several, tokens a second, through HTTP."""
    rng = random.Random()

    def prompt(tokens):
        return plain_ids(rng, tokens, args.vocab)

    await complete(target, prompt(64), 8)
    decode = await complete(target, prompt(32), args.output_tokens)
    prefill = await complete(target, prompt(args.prompt_tokens), 1)
    found = {"decode": decode.decode_rate, "prefill": args.prompt_tokens / prefill.ttft}
    for streams in args.streams:
        jobs = [partial(complete, target, prompt(32), args.output_tokens) for _ in range(streams)]
        timings, _ = await run_closed(jobs, streams)
        found[f"{streams} streams"] = together(timings)
    return found


def together(timings):
    """Tokens a second of all streams while every one of them runs; a chunk may hold several."""
    first, last = max(t.stamps[0] for t in timings), min(t.stamps[-1] for t in timings)
    if last <= first:
        raise SystemExit("the streams were never all running: use more --output-tokens")
    tokens = 0.0
    for t in timings:
        chunks = sum(first < stamp <= last for stamp in t.stamps)
        tokens += chunks * t.tokens / len(t.stamps)
    return tokens / (last - first)


def engines(args):
    """cpuserve first, then the peers asked for."""
    model = args.dir if args.from_dir else args.gguf or args.dir
    context = ["--max-model-len", str(args.context), "--served-model-name", "m"]
    own = [model, *private_flags(args.port, KEY), *context, *args.own]
    yield ServerEngine("cpuserve", serve_command(own), args.port, "m")
    if "vllm" in args.peers:
        command = [str(PEERS / "vllm/bin/vllm"), "serve", args.dir, "--host", "127.0.0.1"]
        command += ["--port", str(args.port + 1), "--api-key", KEY, *context]
        env = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}",
        }
        yield ServerEngine("vllm", command, args.port + 1, "m", env)
    if "llama" in args.peers and args.gguf:
        sizes = (args.threads, args.prompt_tokens, args.output_tokens, *args.streams)
        yield ScriptEngine("llama", "llama_bench.py", (args.gguf, *sizes))
    if "openvino" in args.peers and args.gguf:
        sizes = (args.prompt_tokens, args.output_tokens)
        yield ScriptEngine("openvino", "openvino_bench.py", (args.gguf, *sizes))


def table(samples):
    """Medians of each engine, and of the rounds' ratios of cpuserve to it and to the best."""
    metrics = list(samples["cpuserve"][0])
    print("| engine | " + " | ".join(f"{m}, tokens/s | cpuserve is" for m in metrics) + " |")
    print("|---" * (1 + 2 * len(metrics)) + "|")
    peers = {name: rounds for name, rounds in samples.items() if name != "cpuserve"}
    for name, rounds in samples.items():
        row(name, rounds, samples["cpuserve"] if name in peers else None, metrics)
    if len(peers) > 1:
        best = [
            {m: max(r[m] for r in round_ if m in r) for m in metrics if any(m in r for r in round_)}
            for round_ in zip(*peers.values(), strict=False)
        ]
        row("the best of them", best, samples["cpuserve"], metrics)


def row(name, rounds, own, metrics):
    """One row: medians of `rounds`, and of own / theirs, round by round."""
    cells = [name]
    for metric in metrics:
        values = [r[metric] for r in rounds if metric in r]
        pairs = zip(own or (), rounds, strict=False)
        ratios = [a[metric] / b[metric] for a, b in pairs if metric in b]
        cells.append(f"{median(values):.1f}" if values else "")
        cells.append(f"{median(ratios):.2f} x" if ratios else "")
    print("| " + " | ".join(cells) + " |", flush=True)


def read_rate():
    """Bytes a second that this machine reads from memory just now."""
    out = subprocess.check_output(
        [sys.executable, "-m", "cpuserve", "bench", "roofline", "--json"], stderr=subprocess.DEVNULL
    )
    records = map(json.loads, out.splitlines())
    return 1e9 * next(r["median"] for r in records if r["metric"] == "read_bandwidth")


def shares(args, samples, probes):
    """What decoding reads of the weights' file, as a share of a bare read in the same round."""
    size = sum(f.stat().st_size for f in Path(args.dir).glob("*.safetensors"))
    low, high = (bound(probes) / 1e9 for bound in (min, max))
    print(f"\nA bare read: {low:.0f}-{high:.0f} GB/s. Of it, decode reads:", end="")
    for name, rounds in samples.items():
        of_dir = not args.gguf or name == "vllm" or (args.from_dir and name == "cpuserve")
        read = size if of_dir else Path(args.gguf).stat().st_size
        share = median(r["decode"] * read / p for r, p in zip(rounds, probes, strict=True))
        print(f" {name} {100 * share:.0f} %", end="")
    print("." if not args.own else f". ({' '.join(args.own)} may read less.)", flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir")
    parser.add_argument("--gguf")
    parser.add_argument("--peers", nargs="+", default=["vllm", "llama", "openvino"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--streams", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--own", action="append", default=[], help="an option for cpuserve serve")
    parser.add_argument("--from-dir", action="store_true")
    parser.add_argument("--vocab", type=int, default=40000)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--port", type=int, default=8101, help="of cpuserve; vLLM has the next")
    args = parser.parse_args(argv)
    samples, running, probes = {}, [], []
    try:
        for engine in engines(args):
            running.append(engine)
            samples[engine.name] = []
        for _ in range(args.rounds):
            probes.append(read_rate())
            for engine in running:
                found = engine.measure(args)
                samples[engine.name].append(found)
                print(json.dumps({"engine": engine.name, **found}), file=sys.stderr, flush=True)
    finally:
        for engine in running:
            engine.close()
    table(samples)
    shares(args, samples, probes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
