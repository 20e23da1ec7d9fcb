#!/usr/bin/env python3
"""Measures cpuserve and other engines on equal weights, in alternation; prints a table of ratios.

usage: run.py DIR [--gguf FILE.gguf] [--peers vllm llama openvino] [--rounds 5] [--streams 8 32]
              [--own=OPTION ...]

DIR is a Hugging Face directory, which cpuserve and vLLM serve with bfloat16. With --gguf FILE,
cpuserve, llama.cpp and OpenVINO run that file, while vLLM still serves DIR. With --from-dir,
cpuserve serves DIR instead of the file, for example with --own=--quantization=int8.
Servers are started once, because vLLM takes a minute to start. While another engine
is measured, a server is suspended (SIGSTOP), so that it uses no CPU time.
Nothing else may run on the machine:
threads of llama.cpp spin, and its rates collapse if they share CPUs. Run install.sh first.
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
KEY = secrets.token_hex(8)  # API key of the servers; it replaces an API key in the environment


class ServerEngine:
    """An OpenAI-compatible server, which is suspended except while it is measured."""

    def __init__(self, name, command, port, model, env=None):
        self.name, self.model = name, model
        self.url = f"http://127.0.0.1:{port}"
        if self._healthy():
            raise SystemExit(
                f"another server answers at {self.url}; stop it or give another --port"
            )
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
    """An engine that a script measures in its own environment; it loads the model each time."""

    def __init__(self, name, script, arguments):
        self.name = name
        python = str(PEERS / name / "bin/python")
        self.command = [python, str(HERE / script), *map(str, arguments)]

    def measure(self, _args, _scenario=None):
        out = subprocess.run(self.command, capture_output=True, text=True, check=False)
        if out.returncode or not out.stdout.strip():
            last = (out.stderr.strip() or "it printed no error").splitlines()[-1]
            raise SystemExit(f"{self.name} ended with exit code {out.returncode}: {last}")
        return json.loads(out.stdout.splitlines()[-1])

    def close(self):
        pass


async def rates(target, args):
    """Return rates through HTTP in tokens/s: decode and prefill of a request, output of several."""
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
    """Return the tokens per second of all streams during the time when all of them run.

    A chunk of a stream may contain several tokens.
    """
    first, last = max(t.stamps[0] for t in timings), min(t.stamps[-1] for t in timings)
    if last <= first:
        raise SystemExit("the streams never ran all at the same time; use more --output-tokens")
    tokens = 0.0
    for t in timings:
        chunks = sum(first < stamp <= last for stamp in t.stamps)
        tokens += chunks * t.tokens / len(t.stamps)
    return tokens / (last - first)


def engines(args):
    """Start and yield the engines: cpuserve first, then those in --peers."""
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
    """Print the median rates of each engine, and the median ratios of cpuserve to it.

    The last row is the best other engine of each round.
    """
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
    """Print one row: medians of `rounds`, and medians of the ratios own / theirs per round."""
    cells = [name]
    for metric in metrics:
        values = [r[metric] for r in rounds if metric in r]
        pairs = zip(own or (), rounds, strict=False)
        ratios = [a[metric] / b[metric] for a, b in pairs if metric in b]
        cells.append(f"{median(values):.1f}" if values else "")
        cells.append(f"{median(ratios):.2f} x" if ratios else "")
    print("| " + " | ".join(cells) + " |", flush=True)


def read_rate():
    """Return the current memory read bandwidth of this machine in bytes per second."""
    out = subprocess.check_output(
        [sys.executable, "-m", "cpuserve", "bench", "roofline", "--json"], stderr=subprocess.DEVNULL
    )
    records = map(json.loads, out.splitlines())
    return 1e9 * next(r["median"] for r in records if r["metric"] == "read_bandwidth")


def shares(args, samples, probes):
    """Print the rate at which decoding reads the weights, as a share of the read bandwidth, which
    is probed in the same round.
    """
    size = sum(f.stat().st_size for f in Path(args.dir).glob("*.safetensors"))
    low, high = (bound(probes) / 1e9 for bound in (min, max))
    print(f"\nRead bandwidth: {low:.0f}-{high:.0f} GB/s. Share of it that decode uses:", end="")
    for name, rounds in samples.items():
        of_dir = not args.gguf or name == "vllm" or (args.from_dir and name == "cpuserve")
        read = size if of_dir else Path(args.gguf).stat().st_size
        share = median(r["decode"] * read / p for r, p in zip(rounds, probes, strict=True))
        print(f" {name} {100 * share:.0f} %", end="")
    print("." if not args.own else f". ({' '.join(args.own)} may read less.)", flush=True)


def alternated(engines, rounds, measure, begin=lambda: None):
    """Return what `measure` returns for each engine in each round, by the names of the engines.

    engines: started one after the other, and closed in the end. begin: called before each round.
    """
    samples, running = {}, []
    try:
        for engine in engines:
            running.append(engine)
            samples[engine.name] = []
        for _ in range(rounds):
            begin()
            for engine in running:
                found = measure(engine)
                samples[engine.name].append(found)
                print(json.dumps({"engine": engine.name, **found}), file=sys.stderr, flush=True)
    finally:
        for engine in running:
            engine.close()
    return samples


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
    parser.add_argument(
        "--port", type=int, default=8101, help="port of cpuserve; vLLM gets the next one"
    )
    args = parser.parse_args(argv)
    probes = []
    samples = alternated(
        engines(args),
        args.rounds,
        lambda engine: engine.measure(args),
        begin=lambda: probes.append(read_rate()),
    )
    table(samples)
    shares(args, samples, probes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
