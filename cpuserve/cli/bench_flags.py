"""The flags of `cpuserve bench`; benchmarks that vLLM has as well have the flags of vLLM."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from cpuserve.cli.examples import epilog
from cpuserve.cli.flags import Parser, add_options
from cpuserve.platforms.probe import DOT_KINDS

KINDS = {
    "serve": "Measure latency, throughput and goodput of a running OpenAI-compatible server.",
    "throughput": "Measure decode and prefill rates through HTTP, as fractions of the roofline.",
    "latency": "Measure time to first token, between tokens and in total, one batch at a time.",
    "load": "Measure the time until the server is ready, and the memory of all its processes.",
    "step": "Measure steps of the engine without HTTP: rates and overheads.",
    "kernels": "Measure each matrix and operation of engine steps, as fractions of the roofline.",
    "roofline": "Measure the memory bandwidth and dot-product rates of this machine.",
}
DATASETS = ("random", "random-mm", "sharegpt", "prefix_repetition", "multi-turn")


def add_bench(parser: Parser) -> None:
    """Add a subcommand with its flags for each kind of benchmark."""
    kinds = parser.add_subparsers(metavar="KIND", dest="kind", required=True, parser_class=Parser)
    for kind, text in KINDS.items():
        sub: Parser = kinds.add_parser(
            kind, help=text, description=text, epilog=epilog(f"bench {kind}")
        )
        module = "bench_serve" if kind == "serve" else "bench"
        sub.set_defaults(parser=sub, run=f"cpuserve.cli.{module}:{kind}")
        _FLAGS[kind](sub)
        sub.add_argument(
            "--json", action="store_true", help="print only JSON records, one per line"
        )


def number(
    kind: type[int] | type[float], least: float = 0, most: float = math.inf
) -> Callable[[str], int | float]:
    """Return an argparse type for numbers from `least` to `most`."""

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
    """Add a flag for a number, and append the default value to its help text."""
    default = kwargs.get("default")
    kind = float if isinstance(default, float) else int
    text = str(kwargs.pop("help", ""))
    if default is not None:
        text = f"{text} [default: {default:g}]".strip()
    parser.add_argument(*flags, type=number(kind, least), metavar="N", help=text, **kwargs)  # type: ignore[arg-type]


def _rounds(parser: Parser) -> None:
    _add(
        parser, "--rounds", "--num-iters", default=5, help="number of rounds; medians are reported"
    )


def _roofline(parser: Parser) -> None:
    parser.add_argument(
        "--isa",
        metavar="LEVEL",
        help="ISA level of the probes [default: the highest this CPU supports]",
    )
    _rounds(parser)


def _load(parser: Parser) -> None:
    add_options(parser, server=False)
    text = "measure starts with an empty page cache as well (needs root)"
    parser.add_argument("--cold", action="store_true", help=text)
    _rounds(parser)


def _latency(parser: Parser) -> None:
    add_options(parser, server=False)
    group = parser.add_argument_group("Workload")
    _lengths(group)
    _add(group, "--batch-size", default=1, help="concurrent requests")
    _add(group, "--num-iters-warmup", default=2, least=0, help="warm-up rounds, not measured")
    _running(group)
    _rounds(parser)


def _throughput(parser: Parser) -> None:
    add_options(parser, server=False)
    group = parser.add_argument_group("Workload")
    _lengths(group)
    _add(group, "--max-concurrency", default=8, help="concurrent requests")
    _add(
        group,
        "--num-prompts",
        help="send this number of prompts at once instead, as `vllm bench throughput` does",
    )
    _dataset(group)
    _running(group)
    _rounds(parser)


def _running(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--url", metavar="URL", help="measure this running server instead of starting one"
    )


def _lengths(group: argparse._ActionsContainer) -> None:
    _add(group, "--input-len", "--random-input-len", default=1024, help="prompt tokens")
    _add(group, "--output-len", "--random-output-len", default=128, help="output tokens")


def _dataset(group: argparse._ActionsContainer) -> None:
    """Add the flags that select a dataset and the lengths of its prompts and responses."""
    text = "kind of prompts [default: random]"
    group.add_argument("--dataset-name", choices=DATASETS, default="random", help=text)
    group.add_argument(
        "--dataset-path",
        metavar="FILE",
        help="JSON file in ShareGPT format; without it, random prompts with similar lengths",
    )
    _add(
        group,
        "--random-range-ratio",
        default=0.0,
        least=0,
        help="vary lengths by up to this fraction",
    )
    _add(
        group,
        "--random-prefix-len",
        default=0,
        least=0,
        help="tokens of a common prefix of all prompts",
    )
    _add(
        group,
        "--random-mm-base-items-per-request",
        default=1,
        least=0,
        help="pictures of a prompt of random-mm, which needs --backend openai-chat",
    )
    _add(
        group,
        "--random-mm-num-mm-items-range-ratio",
        default=0.0,
        least=0,
        help="vary the number of pictures by up to this fraction",
    )
    group.add_argument(
        "--random-mm-bucket-config",
        metavar="DICT",
        help="probabilities of (height, width, 1) of pictures, as in vLLM",
    )
    # The number of pictures is below these limits of vLLM in any case.
    group.add_argument("--random-mm-limit-mm-per-prompt", help=argparse.SUPPRESS)
    _add(group, "--prefix-repetition-prefix-len", default=256, help="tokens of a shared prefix")
    _add(group, "--prefix-repetition-suffix-len", default=256, help="tokens after the prefix")
    _add(group, "--prefix-repetition-num-prefixes", default=10, help="number of prefixes")
    _add(group, "--prefix-repetition-output-len", default=128, help="output tokens")
    _add(group, "--sharegpt-output-len", help="output tokens, instead of the dataset's lengths")
    _add(group, "--num-turns", default=4, help="turns of a multi-turn conversation")
    _add(group, "--vocab-size", default=32000, help="upper bound of random token ids")


def _serve(parser: Parser) -> None:
    server = parser.add_argument_group("Server")
    server.add_argument(
        "--url",
        "--base-url",  # the vLLM name of this flag
        metavar="URL",
        help="URL of the server, instead of --host and --port",
    )
    text = "host name or address of the server [default: 127.0.0.1]"
    server.add_argument("--host", default="127.0.0.1", metavar="NAME", help=text)
    _add(server, "--port", default=8000, help="port of the server")
    server.add_argument(
        "--endpoint",
        metavar="PATH",
        help="path of the endpoint [default: the usual path of the backend]",
    )
    text = "API to measure: completions, or chat completions with openai-chat [default: openai]"
    backends = ("openai", "vllm", "openai-chat")
    server.add_argument("--backend", choices=backends, default=backends[0], help=text)
    server.add_argument(
        "--model",
        metavar="NAME",
        help="name of the model [default: the first that the server lists]",
    )
    server.add_argument(
        "--served-model-name", metavar="NAME", help="name of the model in requests, if it differs"
    )
    server.add_argument("--api-key", metavar="KEY", help="API key, sent as Bearer token")
    # Flags of vLLM that have no effect here:
    # random prompts are token ids, and the server itself counts the tokens of texts.
    server.add_argument("--tokenizer", help=argparse.SUPPRESS)
    server.add_argument("--trust-remote-code", action="store_true", help=argparse.SUPPRESS)
    load = parser.add_argument_group("Load")
    _add(load, "--num-prompts", default=1000, help="number of requests or conversations")
    load.add_argument(
        "--request-rate", type=number(float), default=float("inf"), metavar="R",
        help="requests per second, at random times [default: inf = all at once]",
    )  # fmt: skip
    _add(
        load, "--burstiness", default=1.0, least=0.001, help="1 = Poisson arrivals, less = burstier"
    )
    _add(load, "--max-concurrency", help="maximum concurrent requests")
    _add(load, "--num-warmups", default=1, least=0, help="warm-up requests, not measured")
    _lengths(load)
    _dataset(load)
    _add(load, "--seed", default=0, least=0, help="seed of prompts, lengths and arrivals")
    _sampling(load)
    _output(parser.add_argument_group("Output"))


def _sampling(group: argparse._ActionsContainer) -> None:
    text = "generate the full output length, even after an end token [default: yes]"
    group.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help=text
    )
    text = "sampling temperature; 0 = greedy [default: 0]"
    group.add_argument("--temperature", type=number(float), default=0.0, metavar="T", help=text)
    text = "sample from the most likely tokens with this total probability"
    group.add_argument("--top-p", type=number(float), metavar="P", help=text)
    text = "sample from this number of most likely tokens"
    group.add_argument("--top-k", type=number(int), metavar="K", help=text)


def _output(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="latency limits in milliseconds, such as ttft:500",
    )
    text = "latencies in the report [default: ttft,tpot,itl,e2el]"
    group.add_argument(
        "--percentile-metrics", default="ttft,tpot,itl,e2el", metavar="NAMES", help=text
    )
    group.add_argument(
        "--metric-percentiles", type=_percentiles, default=[50.0, 95.0, 99.0], metavar="P,P",
        help="percentiles of each latency [default: 50,95,99]",
    )  # fmt: skip
    group.add_argument(
        "--save-result", action="store_true", help="write a result file in vLLM's format"
    )
    group.add_argument(
        "--save-detailed",
        action="store_true",
        help="add the values of each request to the result file",
    )
    text = "directory of the result file [default: the working directory]"
    group.add_argument("--result-dir", metavar="DIR", help=text)
    text = "name of the result file [default: label, rate, model and time]"
    group.add_argument("--result-filename", metavar="FILE", help=text)
    group.add_argument("--label", metavar="TEXT", help="prefix of the result file's name")
    group.add_argument(
        "--metadata",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="add these to the result file",
    )
    group.add_argument("--disable-tqdm", action="store_true", help="print no progress on stderr")


def _step(parser: Parser) -> None:
    group = _steps(parser, contexts=[128, 1024], prompts=[512, 1024])
    _sizes(
        group,
        "--leave",
        [],
        "prompt tokens; measure how long a step runs on after its request is aborted",
    )
    group.add_argument(
        "--overheads", action="store_true", help="measure everything except matrices and attention"
    )
    _add(group, "--rounds", "--num-iters", default=30, help="number of steps; medians are reported")


def _kernels(parser: Parser) -> None:
    group = _steps(parser, contexts=[128], prompts=[512])
    group.add_argument(
        "--tune",
        action="store_true",
        help="instead, find the kernels' work sizes that are fastest for this model on this "
        "machine, in a few seconds, and keep them for later starts; responses do not change",
    )
    _add(group, "--rounds", "--num-iters", default=5, help="number of rounds; medians are reported")


def _steps(parser: Parser, contexts: list[int], prompts: list[int]) -> argparse._ArgumentGroup:
    """Add the flags that define the batch, context and prompt sizes of the measured steps."""
    add_options(parser, server=False)
    group = parser.add_argument_group("Workload")
    _sizes(group, "--batch", [1, 8, 32], "sequences per decode step")
    _sizes(group, "--context", contexts, "tokens in the KV cache of each sequence")
    _sizes(group, "--prefill", prompts, "tokens of one prompt")
    group.add_argument(
        "--dot",
        choices=DOT_KINDS,
        help="type of the dot-product peak that prompts are compared with",
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
