"""The init program of the virtual machine that tests/in_vm.py starts."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import itertools
import json
import os
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.in_vm import ANSWER, PASSED

LIBC = ctypes.CDLL(None, use_errno=True)
MOVE_PAGES, MBIND, SET_MEMPOLICY, GET_MEMPOLICY = 279, 237, 238, 239  # x86-64
PAGE, HUGE = 4096, 2 << 20
TINY, WIDE, SMOLLM2 = "/models/tiny", "/models/wide", "/models/smollm2.gguf"
PORT = 8000
READY_S = 900  # on a busy machine an emulated CPU gets a quarter of a core
ROUNDS, TOKENS = 2, 4  # the rounds of a comparison of rates, and the length of a response


def main(arguments: list[str]) -> None:
    """Do one job, print whether it passed, and switch the machine off."""
    try:
        prepare()
        job, ranks = arguments
        JOBS_OF_GUEST[job](ranks)
        print(PASSED, flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.sync()
        LIBC.reboot(0x4321FEDC)  # LINUX_REBOOT_CMD_POWER_OFF


def prepare() -> None:
    """Mount what programs expect, and start the loopback interface."""
    for kind, where in (
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("devtmpfs", "/dev"),
        ("tmpfs", "/tmp"),
        ("tmpfs", "/dev/shm"),
        ("cgroup2", "/sys/fs/cgroup"),
    ):
        Path(where).mkdir(exist_ok=True)
        if not os.path.ismount(where):
            mount(kind, where)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        up = struct.pack("16sH14x", b"lo", 1)  # IFF_UP
        fcntl.ioctl(sock, 0x8914, up)  # SIOCSIFFLAGS
    os.environ.update(HOME="/tmp", PATH="/bin", PYTHONPATH="/src:/site", PYTHONUNBUFFERED="1")
    set_balancing(False)
    uptime = Path("/proc/uptime").read_text().split()[0]
    print(f"up after {uptime} s; nodes: {nodes()}")


def mount(kind: str, where: str) -> None:
    """mount(2); OSError when it fails."""
    if LIBC.mount(kind.encode(), where.encode(), kind.encode(), 0, None) != 0:
        raise OSError(ctypes.get_errno(), f"mount {kind} on {where}")


def set_balancing(on: bool) -> None:
    """Set whether the kernel moves pages between nodes."""
    Path("/proc/sys/kernel/numa_balancing").write_text(str(int(on)))


def nodes() -> dict[int, list[int]]:
    """Node -> its CPUs, as the kernel says."""
    found = {}
    for folder in Path("/sys/devices/system/node").glob("node[0-9]*"):
        found[int(folder.name[4:])] = cpus_of((folder / "cpulist").read_text())
    return dict(sorted(found.items()))


def cpus_of(text: str) -> list[int]:
    """ "0-2,5" -> [0, 1, 2, 5]."""
    spans = [part.split("-") for part in text.strip().split(",") if part]
    return [cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)]


# -- the server -----------------------------------------------------------------------------------


@contextmanager
def serving(
    *options: str,
    model: str = TINY,
    port: int = PORT,
    memory: Sequence[str] = ("--kv-cache-memory", "64MiB"),
    refuse: bool = False,
) -> Iterator[int]:
    """`cpuserve serve` with `options`, ready; gives the pid of its engine."""
    command = [sys.executable, "-m", "cpuserve", "serve", model, "--port", str(port), *options]
    command += memory
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=refuse_placement if refuse else None,
    )
    try:
        wait_ready(process, port)
        print(f"  ready after {time.monotonic() - began:.0f} s", flush=True)
        yield engine_of(process.pid)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=60)[0]
        check(process.returncode == 0, f"ended with {process.returncode}: {output}")
    finally:
        if process.poll() is None:
            process.kill()
            print(process.communicate()[0])


def wait_ready(process: subprocess.Popen[str], port: int) -> None:
    """Return when the server is ready."""
    for _ in range(READY_S * 2):
        check(process.poll() is None, "the server ended early")
        try:
            get("/health", port)
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    check(False, "the server did not get ready")


def engine_of(server: int) -> int:
    """The pid of the engine process of a server."""
    found = children_of(server)
    check(bool(found), "the server has no engine process")
    return found[0]


def children_of(server: int) -> list[int]:
    """The pids of the processes that a server has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if f"\nPPid:\t{server}\n" in (folder / "status").read_text():
                found.append(int(folder.name))
    return sorted(found)


def get(path: str, port: int = PORT) -> str:
    """The body of GET `path`."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=300) as response:
        return response.read().decode()


def post(path: str, port: int = PORT, **body: object) -> Any:
    """The JSON answer to `body`."""
    data, url = json.dumps(body).encode(), f"http://127.0.0.1:{port}{path}"
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)


def check(holds: bool, otherwise: str) -> None:
    """Raise SystemExit with the text `otherwise` unless `holds`."""
    if not holds:
        raise SystemExit(f"FAILED: {otherwise}")


def refuse_placement() -> None:
    """Make system calls that place memory fail with EPERM, in a child before it runs its program.

    The default filter of container engines does this to programs without CAP_SYS_NICE.
    """
    calls = (MBIND, SET_MEMPOLICY, GET_MEMPOLICY, MOVE_PAGES)
    load, equal, give = 0x20, 0x15, 0x06
    code = [(load, 0, 0, 0)]
    for left, number in zip(range(len(calls), 0, -1), calls, strict=True):
        code.append((equal, left, 0, number))
    code += [(give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x00050000 | 1)]  # allow; errno EPERM
    program = b"".join(struct.pack("HBBI", *line) for line in code)
    buffer = ctypes.create_string_buffer(program)
    head = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
    LIBC.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    if LIBC.prctl(22, 2, ctypes.create_string_buffer(head), 0, 0) != 0:  # PR_SET_SECCOMP, filter
        os._exit(99)


# -- where memory and threads are -----------------------------------------------------------------


def arenas(pid: int) -> list[Counter[int]]:
    """Bytes by node of each block of memory the engine owns, as move_pages(2) tells them.

    Such a block is a mapping of whole huge pages between two that nobody may touch.
    """
    maps = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    found = []
    for before, (span, rights, *rest) in itertools.pairwise(maps):
        low, high = (int(end, 16) for end in span.split("-"))
        whole = low % HUGE == 0 and high % HUGE == 0 and high > low
        if whole and rights == "rw-p" and rest[2] == "0" and before[1] == "---p":
            found.append(pages_on(pid, low, high))
    return found


def pages_on(pid: int, low: int, high: int) -> Counter[int]:
    """Bytes of [low, high) by the node they are on; pages that do not exist are not counted."""
    addresses = range(low, high, PAGE)
    count = len(addresses)
    pages = (ctypes.c_void_p * count)(*addresses)
    status = (ctypes.c_int * count)()
    if LIBC.syscall(MOVE_PAGES, pid, ctypes.c_ulong(count), pages, None, status, 0) != 0:
        raise OSError(ctypes.get_errno(), "move_pages")
    on = Counter(status)
    return Counter({node: pages * PAGE for node, pages in on.items() if node >= 0})


def check_threads(pid: int, bind: str) -> list[int]:
    """Check that a thread runs on each CPU of `bind`; return each rank's node, -1 = several."""
    pinned = Counter()
    for task in Path(f"/proc/{pid}/task").glob("*"):
        allowed = re.search(r"Cpus_allowed_list:\t(\S+)", (task / "status").read_text())
        on = int((task / "stat").read_text().rsplit(")", 1)[1].split()[36])
        assert allowed is not None
        if allowed[1].isdigit():
            check(int(allowed[1]) == on, f"thread {task.name} of CPU {allowed[1]} is on CPU {on}")
            pinned[on] += 1
    ranks = [cpus_of(part) for part in bind.split("|")]
    for cpu in (cpu for rank in ranks for cpu in rank):
        check(pinned[cpu] == 1, f"{pinned[cpu]} threads are bound to CPU {cpu}")
    node_of = {cpu: node for node, cpus in nodes().items() for cpu in cpus}
    on_nodes = [{node_of[cpu] for cpu in rank} for rank in ranks]
    return [rank.pop() if len(rank) == 1 else -1 for rank in on_nodes]


def check_memory(pid: int, live: dict[str, Any], ranks: list[int]) -> None:
    """Check the reported memory of the ranks against the kernel's, and that nodes match."""
    seen = arenas(pid)
    for rank, node in zip(live["ranks"], ranks, strict=True):
        for what in ("weights", "kv"):
            told = Counter({int(n): size for n, size in rank[what].items()})
            check(bool(told), f"no {what} of a rank on node {node}")
            check(told in seen, f"{what} {dict(told)} is no block of memory: {seen}")
            seen.remove(told)
            if len(live["ranks"]) > 1:
                check(set(told) == {node}, f"{what} of a rank on node {node}: {dict(told)}")
        print(f"  rank on node {node}: weights {rank['weights']}, KV {rank['kv']} bytes by node")


# -- jobs -----------------------------------------------------------------------------------------


def ranks_job(counts: str, refuse: bool) -> None:
    """Serve with each number of ranks, and check that memory is on their nodes.

    The program that started this machine compares the responses.
    """
    for count in map(int, counts.split(",")):
        print(f"tensor-parallel-size {count}", flush=True)
        mode = "none" if count == 1 else "first_touch" if refuse else "bind"
        with serving("--tensor-parallel-size", str(count), refuse=refuse) as engine:
            show(question())
            report = json.loads(get("/v1/cpu"))
            ranks = check_threads(engine, report["placement"]["bind"])
            check(len(ranks) == count, f"{ranks} are not {count} ranks")
            check(count == 1 or set(ranks) == set(nodes()), f"ranks are on nodes {ranks}")
            check_memory(engine, report["live"], ranks)
            check(report["live"]["numa_binding"] == mode, f"{report['live']} is not {mode}")
            series = re.search(r"cpuserve:numa_binding{.*} 1\.0", get("/metrics"))
            check(series is not None and f'mode="{mode}"' in series[0], f"metric: {series}")


def interleave() -> None:
    """The pages of one rank alternate between the nodes."""
    with serving("--numa", "interleave") as engine:
        show(question())
        live = json.loads(get("/v1/cpu"))["live"]
        check(live["numa_binding"] == "interleave", f"{live}")
        check_memory(engine, live, [-1])
        sizes = [live["ranks"][0]["weights"].get(str(node), 0) for node in nodes()]
        check(max(sizes) - min(sizes) <= HUGE, f"{sizes} are not half each")


def question(model: str = TINY, port: int = PORT, length: int = 150) -> Any:
    """Return a greedy response with its logprobs."""
    prompt = [(i * 37 + i * i * 5) % 380 + 3 for i in range(length)]
    body = {"prompt": prompt, "max_tokens": 12, "logprobs": 5, "temperature": 0, "echo": True}
    return post("/v1/completions", port, model=model, **body)["choices"][0]


def show(answer: Any) -> None:
    """Print a line that differs if any bit of a response differs."""
    count = len(answer["logprobs"]["tokens"])
    last = answer["logprobs"]["token_logprobs"][-1]
    print(f"{ANSWER}{digest(answer)} ({count} tokens, last {last})")


def digest(answer: Any) -> str:
    """Return a hash of all bits of a response; JSON has every digit of its floats."""
    return hashlib.sha256(json.dumps(answer, sort_keys=True).encode()).hexdigest()


def numa() -> None:
    """Check that all layouts give the same bits; print their bytes by node and their rates.

    By default the small model gets an engine on each node, and the wide model a rank. Each of the
    two emulated CPUs has a core of the real machine, but all memory is equally near. So the rates
    show only the costs of layouts, not their gains. The job also checks that `auto` has the layout
    of the mode that is best for the model: the same engines on the same CPUs and nodes.
    """
    for model, expected in ((TINY, "replicas"), (WIDE, "tp")):
        with ExitStack() as stack:
            modes = "off", "tp", "replicas", "auto"
            ports = {mode: PORT + i for i, mode in enumerate(modes)}
            engines = serve_all(stack, model, ports)
            answers = {mode: question(model, port, 40) for mode, port in ports.items()}
            bits = {mode: digest(answer) for mode, answer in answers.items()}
            print(f"  {model}: bits {bits}", flush=True)
            check(len(set(bits.values())) == 1, f"{model}: {bits}")
            layouts = {mode: layout_of(port) for mode, port in ports.items()}
            placed = {mode: placed_bytes(parent_of(pid)) for mode, pid in engines.items()}
            for mode, (count, bind) in layouts.items():
                print(f"  {mode}: {count} engines, CPUs {bind}, bytes by node {placed[mode]}")
            check(len(set(layouts.values())) == 3, f"{model}: {layouts}")
            check(layouts["auto"] == layouts[expected], f"{model}: auto is not {expected}")
            nodes_of = {mode: [[*engine] for engine in found] for mode, found in placed.items()}
            check(nodes_of["auto"] == nodes_of[expected], f"{model}: {nodes_of}")
            for streams in (1, 8):
                compare(model, ports, streams)


def serve_all(stack: ExitStack, model: str, ports: dict[str, int]) -> dict[str, int]:
    """Start a server of each mode of --numa, all at the same time; mode -> pid of its engine."""

    def start(mode: str) -> int:
        options = () if mode == "auto" else ("--numa", mode)
        # Memory for keys and values is not requested: that would be for one engine.
        few = "--max-num-seqs", "8"
        made = serving(*options, model=model, port=ports[mode], memory=few)
        return stack.enter_context(made)

    with ThreadPoolExecutor(len(ports)) as pool:
        return dict(zip(ports, pool.map(start, ports), strict=True))


def parent_of(pid: int) -> int:
    """The process that started `pid`."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"\nPPid:\t(\d+)\n", status)
    assert found is not None
    return int(found[1])


def placed_bytes(server: int) -> list[dict[int, int]]:
    """For each engine of a server its weights and KV cache: node -> bytes, in ascending order.

    Blocks below a quarter of the largest one are left out: the C library has blocks of a few MB for
    threads that are not pinned, and they look like the engine's own.
    """
    engines = []
    for pid in children_of(server):
        blocks = arenas(pid)
        least = max((block.total() for block in blocks), default=0) / 4
        found = sum((block for block in blocks if block.total() >= least), Counter[int]())
        engines.append(dict(sorted(found.items())))
    return sorted((e for e in engines if e), key=lambda engine: [*engine.items()])


def layout_of(port: int) -> tuple[int, str]:
    """The number of engines of a server, and the CPUs of all their ranks."""
    engines = re.findall(r"^cpuserve:replica_up\{", get("/metrics", port), re.MULTILINE)
    return len(engines), json.loads(get("/v1/cpu", port))["placement"]["bind"]


def compare(model: str, ports: dict[str, int], streams: int) -> None:
    """Print the rates of all servers, each measured in turn, ROUNDS times."""
    found: dict[str, list[float]] = {mode: [] for mode in ports}
    for turn in range(ROUNDS + 1):
        order = [*ports.items()]
        for mode, port in order[turn % 4 :] + order[: turn % 4]:
            found[mode].append(rate(model, port, streams))
    medians = {mode: statistics.median(rates[1:]) for mode, rates in found.items()}
    best = max(rate for mode, rate in medians.items() if mode != "auto")
    shown = ", ".join(f"{mode} {rate:.2f}" for mode, rate in medians.items())
    share = medians["auto"] / best
    print(f"  {model}, {streams} streams: {shown} tokens/s; auto / best {share:.3f}", flush=True)


def rate(model: str, port: int, streams: int) -> float:
    """Tokens per second of `streams` requests at a time."""
    body = {"model": model, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}

    def ask(i: int) -> int:
        prompt = [i + 10, 20, 30, 40]
        answer = post("/v1/completions", port, prompt=prompt, **body)
        return int(answer["usage"]["completion_tokens"])

    began = time.monotonic()
    with ThreadPoolExecutor(streams) as pool:
        tokens = sum(pool.map(ask, range(streams)))
    return tokens / (time.monotonic() - began)


def quota() -> None:
    """Check that servers with equal quotas that add up to all CPUs compute equally many prompts."""
    sizes = ["--rounds", "2", "--seconds", "30", "--prompt-tokens", "32", "--vocab-size", "380"]
    for count in (2, 4, 8):
        command = [sys.executable, "-m", "benchmarks.bench_quota", TINY, "--max-num-seqs=8"]
        command += ["--servers", str(count), *sizes]
        found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        parts = [json.loads(line)["median"] for line in found.splitlines()]
        print(f"  {count} servers: {parts} of their shares", flush=True)
        check(len(parts) == count, found)
        check(all(0.9 <= part <= 1.1 for part in parts), f"{count} servers: {parts}")


def doctor() -> None:
    """Check that doctor reports a problem and its remedy only if the kernel moves pages."""
    for on in (True, False):
        set_balancing(on)
        command = [sys.executable, "-m", "cpuserve", "doctor", "--json", "--no-roofline"]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        problems = [p for p in json.loads(found)["problems"] if "numa_balancing" in p["what"]]
        check(len(problems) == on, f"numa_balancing {on}: {problems}")
        check(all("sysctl" in p["remedy"] for p in problems), f"no remedy in {problems}")
        print(f"numa_balancing {int(on)}: {problems}")


def memory() -> None:
    """tests/in_cgroups.py under cgroup v2, with few tokens."""
    command = [sys.executable, "-m", "tests.in_cgroups", "--requests", "2", SMOLLM2]
    subprocess.run(command, check=True)


JOBS_OF_GUEST = {
    "bind": lambda ranks: ranks_job(ranks, refuse=False),
    "refused": lambda ranks: ranks_job(ranks, refuse=True),
    "interleave": lambda _: interleave(),
    "numa": lambda _: numa(),
    "quota": lambda _: quota(),
    "doctor": lambda _: doctor(),
    "memory": lambda _: memory(),
}
