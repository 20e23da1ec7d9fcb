"""The flags of `cpuserve bench`: vLLM's names where it has the same benchmark."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from cpuserve.entrypoints.flags import Parser, add_options

KINDS = {
    "serve": "Load a running OpenAI-compatible server; latencies, rates, goodput.",
    "throughput": "Decode and prefill rates through HTTP, as fractions of the roofline.",
    "latency": "Time to first token, between tokens and in all, of one batch at a time.",
    "load": "Time until the server is ready, and the memory of all its processes.",
    "step": "Steps of the engine without HTTP: rates and overheads.",
    "kernels": "Every matrix and operation of a model in such steps, against its roof.",
    "roofline": "Memory bandwidth and dot-product peaks of this machine.",
}
DATASETS = ("random", "sharegpt", "prefix_repetition", "multi-turn")


def add_bench(parser: Parser) -> None:
    """The kinds and their flags."""
    kinds = parser.add_subparsers(metavar="KIND", dest="kind", required=True, parser_class=Parser)
    for kind, text in KINDS.items():
        sub: Parser = kinds.add_parser(kind, help=text, description=text)
        sub.set_defaults(parser=sub, run=f"cpuserve.entrypoints.bench:{kind}")
        _FLAGS[kind](sub)
        sub.add_argument("--json", action="store_true", help="one JSON record per line only")


def number(
    kind: type[int] | type[float], least: float = 0, most: float = math.inf
) -> Callable[[str], int | float]:
    """An argparse type: a number of at least `least` and at most `most`."""

    def read(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            msg = f"{text!r} is not a number"
            raise argparse.ArgumentTypeError(msg) from None
        if not value >= least:
            msg = f"{text} is less than {least:g}"
            raise argparse.ArgumentTypeError(msg)
        if not value <= most:
            msg = f"{text} is more than {most:g}"
            raise argparse.ArgumentTypeError(msg)
        return value

    return read


def _percentiles(text: str) -> list[float]:
    read = number(float, most=100)
    return [read(part) for part in text.split(",")]


def _add(
    parser: argparse._ActionsContainer, *flags: str, least: float = 1, **kwargs: object
) -> None:
    """A flag with a number, whose default is in its help."""
    default = kwargs.get("default")
    kind = float if isinstance(default, float) else int
    text = str(kwargs.pop("help", ""))
    if default is not None:
        text = f"{text} [default: {default:g}]".strip()
    parser.add_argument(*flags, type=number(kind, least), metavar="N", help=text, **kwargs)  # type: ignore[arg-type]


def _rounds(parser: Parser) -> None:
    _add(parser, "--rounds", "--num-iters", default=5, help="rounds; the median counts")


def _roofline(parser: Parser) -> None:
    parser.add_argument("--isa", metavar="LEVEL", help="level of the probes")
    _rounds(parser)


def _load(parser: Parser) -> None:
    add_options(parser, server=False)
    _rounds(parser)


def _latency(parser: Parser) -> None:
    add_options(parser, server=False)
    group = parser.add_argument_group("Workload")
    _lengths(group)
    _add(group, "--batch-size", default=1, help="requests at the same time")
    _add(group, "--num-iters-warmup", default=2, least=0, help="rounds that do not count")
    _running(group)
    _rounds(parser)


def _throughput(parser: Parser) -> None:
    add_options(parser, server=False)
    group = parser.add_argument_group("Workload")
    _lengths(group)
    _add(group, "--max-concurrency", default=8, help="requests that decode together")
    _add(
        group,
        "--num-prompts",
        help="instead: send so many prompts at once, as `vllm bench throughput` does",
    )
    _dataset(group)
    _running(group)
    _rounds(parser)


def _running(group: argparse._ActionsContainer) -> None:
    group.add_argument("--url", metavar="URL", help="a running server instead of starting one")


def _lengths(group: argparse._ActionsContainer) -> None:
    _add(group, "--input-len", "--random-input-len", default=1024, help="prompt tokens")
    _add(group, "--output-len", "--random-output-len", default=128, help="output tokens")


def _dataset(group: argparse._ActionsContainer) -> None:
    """What all loads share."""
    group.add_argument("--dataset-name", choices=DATASETS, default="random")
    group.add_argument("--dataset-path", metavar="FILE", help="ShareGPT's JSON; else its lengths")
    _add(group, "--random-range-ratio", default=0.0, least=0, help="lengths vary by this part")
    _add(group, "--random-prefix-len", default=0, least=0, help="common beginning, tokens")
    _add(group, "--prefix-repetition-prefix-len", default=256, help="common beginning, tokens")
    _add(group, "--prefix-repetition-suffix-len", default=256, help="own part, tokens")
    _add(group, "--prefix-repetition-num-prefixes", default=10, help="beginnings")
    _add(group, "--prefix-repetition-output-len", default=128, help="output tokens")
    _add(group, "--sharegpt-output-len", help="instead of the dataset's")
    _add(group, "--num-turns", default=4, help="of a multi-turn conversation")
    _add(group, "--vocab-size", default=32000, help="random ids are below it")


def _serve(parser: Parser) -> None:
    server = parser.add_argument_group("Server")
    server.add_argument("--base-url", metavar="URL", help="instead of host and port")
    server.add_argument("--host", default="127.0.0.1", metavar="NAME")
    _add(server, "--port", default=8000, help="of the server")
    server.add_argument("--endpoint", metavar="PATH", help="[default: that of the backend]")
    server.add_argument("--backend", choices=("openai", "vllm", "openai-chat"), default="openai")
    server.add_argument("--model", metavar="NAME", help="[default: the server's first]")
    server.add_argument("--served-model-name", metavar="NAME", help="its name in requests")
    server.add_argument("--api-key", metavar="KEY", help="sent as Bearer token")
    # As vLLM takes them: random prompts are ids, and texts are counted by the server itself.
    server.add_argument("--tokenizer", help=argparse.SUPPRESS)
    server.add_argument("--trust-remote-code", action="store_true", help=argparse.SUPPRESS)
    load = parser.add_argument_group("Load")
    _add(load, "--num-prompts", default=1000, help="requests, or conversations")
    load.add_argument(
        "--request-rate", type=number(float), default=float("inf"), metavar="R",
        help="requests a second, at random times [default: inf = all at once]",
    )  # fmt: skip
    _add(load, "--burstiness", default=1.0, least=0.001, help="1 = Poisson, less is burstier")
    _add(load, "--max-concurrency", help="requests at the same time")
    _add(load, "--num-warmups", default=1, least=0, help="requests before")
    _lengths(load)
    _dataset(load)
    _add(load, "--seed", default=0, least=0, help="of prompts, lengths and arrivals")
    load.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True)
    load.add_argument("--temperature", type=number(float), default=0.0, metavar="T")
    load.add_argument("--top-p", type=number(float), metavar="P")
    load.add_argument("--top-k", type=number(int), metavar="K")
    _output(parser.add_argument_group("Output"))


def _output(group: argparse._ActionsContainer) -> None:
    group.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="ttft:500 ...")
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el", metavar="NAMES")
    group.add_argument(
        "--metric-percentiles", type=_percentiles, default=[50.0, 95.0, 99.0], metavar="P,P",
        help="[default: 50,95,99]",
    )  # fmt: skip
    group.add_argument("--save-result", action="store_true", help="write vLLM's result file")
    group.add_argument("--save-detailed", action="store_true", help="with a value a request")
    group.add_argument("--result-dir", metavar="DIR")
    group.add_argument("--result-filename", metavar="FILE")
    group.add_argument("--label", metavar="TEXT", help="begins the file's name")
    group.add_argument("--metadata", nargs="+", default=[], metavar="KEY=VALUE", help="kept in it")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress on stderr")


def _step(parser: Parser) -> None:
    group = _steps(parser, contexts=[128, 1024], prompts=[512, 1024])
    _sizes(group, "--leave", [], "tokens of a prompt that is aborted")
    group.add_argument("--overheads", action="store_true", help="only what is no linear, attention")
    _add(group, "--rounds", "--num-iters", default=30, help="steps; the median counts")


def _kernels(parser: Parser) -> None:
    group = _steps(parser, contexts=[128], prompts=[512])
    _add(group, "--rounds", "--num-iters", default=5, help="rounds; the median counts")


def _steps(parser: Parser, contexts: list[int], prompts: list[int]) -> argparse._ArgumentGroup:
    """What is computed in this process."""
    add_options(parser, server=False)
    group = parser.add_argument_group("Workload")
    _sizes(group, "--batch", [1, 8, 32], "sequences that decode together")
    _sizes(group, "--context", contexts, "keys each of them has")
    _sizes(group, "--prefill", prompts, "tokens of one prompt")
    group.add_argument(
        "--dot", choices=("f32", "bf16", "int8"), help="the peak that prompts are held against"
    )
    return group


def _sizes(group: argparse._ActionsContainer, flag: str, default: list[int], text: str) -> None:
    group.add_argument(
        flag, type=number(int, 1), nargs="*", default=default, metavar="N",
        help=f"{text} [default: {' '.join(map(str, default)) or 'none'}]",
    )  # fmt: skip


_FLAGS = {
    "serve": _serve,
    "throughput": _throughput,
    "latency": _latency,
    "load": _load,
    "step": _step,
    "kernels": _kernels,
    "roofline": _roofline,
}
