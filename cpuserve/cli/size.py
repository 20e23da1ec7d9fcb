"""`cpuserve size MODEL`: the memory that a model needs here, and upper bounds of its speed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.base.errors import ConfigError, ModelError
from cpuserve.cli import flags
from cpuserve.cli.banner import line
from cpuserve.cli.commands import prepared_start
from cpuserve.cli.measuring import roofline_of, work_of
from cpuserve.cli.terminal import say
from cpuserve.config.fields import BY_NAME
from cpuserve.config.nearest import nearest
from cpuserve.config.values import aligned, format_bytes
from cpuserve.platforms.cache_groups import block_bytes
from cpuserve.platforms.memory import BLOCK, kv_layer_bytes
from cpuserve.prepare import kv_cache_bytes, model_name

if TYPE_CHECKING:
    from cpuserve.bench.measure import Work
    from cpuserve.prepare import Prepared
    from cpuserve.program.program import CacheLayer, Program

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Instance:
    """A cloud instance; cores: number of physical cores; memory_bytes: its whole memory."""

    name: str
    processor: str
    cores: int
    memory_bytes: int
    read_bytes_per_s: float
    isa: str


@dataclass(frozen=True, slots=True)
class _Processor:
    """A socket. threads: vCPUs per core. transfers: millions per second on each channel."""

    name: str
    cores: int
    threads: int
    channels: int
    transfers: int
    isa: str

    @property
    def read_bytes_per_s(self) -> float:
        return self.channels * self.transfers * 1e6 * 8


_PROCESSORS = {
    "6i": _Processor("Intel Xeon 8375C (Ice Lake)", 32, 2, 8, 3200, "avx512_vnni"),
    "6a": _Processor("AMD EPYC 7R13 (Milan)", 48, 2, 8, 3200, "avx2"),
    "7i": _Processor("Intel Xeon 8488C (Sapphire Rapids)", 48, 2, 8, 4800, "amx"),
    "7a": _Processor("AMD EPYC 9R14 (Genoa)", 96, 1, 12, 4800, "avx512_bf16"),
    "7g": _Processor("AWS Graviton3", 64, 1, 8, 4800, "neon_bf16"),
    "8g": _Processor("AWS Graviton4", 96, 1, 12, 5600, "neon_bf16"),
}
_GIB_PER_VCPU = {"c": 2, "m": 4, "r": 8}
_SIZES = {"xlarge": 4, "2xlarge": 8, "4xlarge": 16, "8xlarge": 32, "16xlarge": 64}
# The number of vCPUs of the largest instance in the table, by the name of the processor.
_LARGEST = {"6i": 128, "6a": 192, "7i": 192, "7a": 192, "7g": 64, "8g": 192}


def _made(kind: str, generation: str, size: str, vcpus: int) -> Instance:
    socket = _PROCESSORS[generation]
    cores = vcpus // socket.threads
    share = cores / socket.cores
    memory = vcpus * _GIB_PER_VCPU[kind] * _GIB
    bandwidth = socket.read_bytes_per_s * share
    return Instance(f"{kind}{generation}.{size}", socket.name, cores, memory, bandwidth, socket.isa)


def _sizes(generation: str) -> dict[str, int]:
    most = _LARGEST[generation]
    return {**_SIZES, f"{most // 4}xlarge": most}


INSTANCES = {
    made.name: made
    for generation in _PROCESSORS
    for kind in _GIB_PER_VCPU
    for made in (_made(kind, generation, *size) for size in _sizes(generation).items())
}


def instance_of(name: str) -> Instance:
    """Return the instance with this name; ConfigError if the table does not have it."""
    if name in INSTANCES:
        return INSTANCES[name]
    near = nearest(name, INSTANCES) or ":"
    msg = f"flag --instance={name}: not in the table of instances{near} --instances lists them"
    raise ConfigError(msg)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The memory that a model needs, and upper bounds of its token rates for one request.

    decode_tokens_per_s: the measured memory bandwidth,
      divided by the bytes of weights that a token reads.
    prompt_tokens_per_s: the measured rate of dot products, divided by two operations for each
      weight that a prompt token is multiplied with. Attention and other work make real rates lower.
    kv_tokens: the number of tokens that fit into the KV caches of all engines.
    """

    model: str
    weight_bytes: int
    kv_cache_bytes: int
    kv_bytes_per_token: float
    kv_tokens: int
    max_model_len: int
    bytes_per_decoded_token: int
    read_bytes_per_s: float
    dot: str
    dot_ops_per_s: float
    decode_tokens_per_s: float
    prompt_tokens_per_s: float


def size(args: argparse.Namespace) -> int:
    """Print the memory and the upper bounds of the speed of a model, as lines or as JSON."""
    if args.formats or args.instance or args.instances:
        return compare(args)
    prepared, _ = prepared_start(flags.asked(args))
    probe = roofline_of(prepared)
    if probe is None:
        msg = "`cpuserve size` needs the native executor, which cannot run this model here"
        raise ConfigError(msg)
    work = work_of(prepared)
    found = model_size(prepared, work, probe.bandwidth(), probe.dot(work.dot))
    say(msgspec.json.encode(asdict(found)).decode() if args.json else render(found))
    return 0


def model_size(
    prepared: Prepared, work: Work, read_bytes_per_s: float, dot_ops_per_s: float
) -> ModelSize:
    """Return a model's memory use and its highest speed at the measured rates of the machine.

    read_bytes_per_s: the memory bandwidth, which limits decode.
    dot_ops_per_s: the peak rate of dot products, which limits prompts.
    """
    config = prepared.resolved.config
    layers = kv_layer_bytes(prepared.facts, config.kv_dtype)
    return ModelSize(
        model=config.model,
        weight_bytes=prepared.facts.weight_bytes * len(prepared.resolved.replicas),
        kv_cache_bytes=kv_cache_bytes(prepared),
        kv_bytes_per_token=block_bytes(config.kv_groups, layers) / BLOCK,
        kv_tokens=sum(one.kv_blocks for one in prepared.resolved.replicas) * BLOCK,
        max_model_len=config.max_model_len,
        bytes_per_decoded_token=work.weight_bytes_per_token,
        read_bytes_per_s=read_bytes_per_s,
        dot=work.dot,
        dot_ops_per_s=dot_ops_per_s,
        decode_tokens_per_s=read_bytes_per_s / work.weight_bytes_per_token,
        prompt_tokens_per_s=dot_ops_per_s / (2 * work.linear_weights),
    )


def render(found: ModelSize) -> str:
    """Return a ModelSize as lines of text."""
    contexts = max(1, found.kv_tokens // found.max_model_len)
    seen = {
        "model": found.model,
        "weights": f"{format_bytes(found.weight_bytes)} of memory",
        "KV cache": f"up to {format_bytes(found.kv_cache_bytes)} for {found.kv_tokens} tokens: "
        f"{contexts} full contexts of {found.max_model_len} tokens, "
        f"{format_bytes(found.kv_bytes_per_token)} a token",
        "decode": f"at most {found.decode_tokens_per_s:.0f} tokens/s a request: a token reads "
        f"{format_bytes(found.bytes_per_decoded_token)}, and the memory delivers "
        f"{found.read_bytes_per_s / 1e9:.1f} GB/s",
        "prompt": f"at most {found.prompt_tokens_per_s:.0f} tokens/s, at "
        f"{found.dot_ops_per_s / 1e9:.0f} GOP/s of {found.dot} dot products",
    }
    return "\n".join(line(name, text) for name, text in seen.items())


# Bits per weight, including scales. Files mix formats, so their sizes differ a little.
FORMATS = {
    "bf16": 16.0,
    "int8/q8_0": 8.5,
    "q6_k": 6.5625,
    "q5_k": 5.5,
    "int4/q4_k": 4.5,
    "q3_k": 3.4375,
    "q2_k": 2.625,
}
_SHOWN = ("bf16", "int8/q8_0", "int4/q4_k")  # the formats that --instances shows
# The share of memory for weights and KV cache.
# The system, the front end and activations need the other 10 %.
_USABLE = 0.9
_KV_BYTES = 2  # the bytes of a number in the KV cache, which is bf16 by default
_KEPT = "int4/q4_k"  # with fewer bits, texts get visibly worse, above all from small models
_ALLOWED = {"model", "revision"}


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The number of weights and the KV cache size of a model, from its configuration.

    matrices: the number of weights in matrices, which the chosen format stores.
    read: the number of these weights that are read to decode a token.
    others: the number of weights that stay fp32.
    kv_bytes: bytes of a token in those layers of the KV cache that keep all tokens.
    window_bytes: bytes of a sequence in all other layers of the KV cache.
    """

    name: str
    matrices: int
    read: int
    others: int
    kv_bytes: int
    window_bytes: int
    max_position: int


@dataclass(frozen=True, slots=True)
class FormatSize:
    """A format on a machine. context: the longest possible context in tokens; 0 = none fits."""

    format: str
    weight_bytes: int
    context: int
    decode_tokens_per_s: float


def compare(args: argparse.Namespace) -> int:
    """Print the formats for this machine or an instance, or all instances, as lines or JSON."""
    refuse_options(args, _ALLOWED, "--formats, --instance and --instances")
    chosen = instance_of(args.instance) if args.instance else None
    weights = weights_of(args)
    if args.instances:
        say(_as_json(_all_instances(weights)) if args.json else render_instances(weights))
        return 0
    machine = chosen or this_machine()
    found = sizes_on(machine, weights)
    if args.json:
        say(_as_json({"machine": asdict(machine), "formats": [asdict(each) for each in found]}))
    else:
        say(render_formats(machine, weights, found))
    return 0


def refuse_options(args: argparse.Namespace, allowed: set[str], what: str) -> None:
    """Raise ConfigError if an option was given that has no effect on `what`."""
    for name in sorted(set(args.given) - allowed):
        msg = f"flag {BY_NAME[name].flag} has no effect on {what}: remove it"
        raise ConfigError(msg)


def weights_of(args: argparse.Namespace) -> ModelWeights:
    """Count the weights of MODEL; ModelError if its architecture has no Program."""
    from cpuserve.loader.hub import resolve_config
    from cpuserve.loader.load import read_config
    from cpuserve.models import build_program
    from cpuserve.models.generic import read_spec

    options = flags.asked(args).options
    name = model_name(options)
    spec, has_program = read_spec(read_config(resolve_config(name, options.revision)))
    if not has_program:
        msg = f"{name}: the weights of a {spec.architecture} cannot be counted from config.json"
        raise ModelError(msg)
    return count_weights(name, build_program(spec), spec.max_position)


def count_weights(name: str, program: Program, max_position: int) -> ModelWeights:
    """Count the weights and the KV cache bytes of a Program."""
    from cpuserve.program.counts import expert_weights_of
    from cpuserve.program.operations.dense import Embed, Logits

    sizes = {need.name: math.prod(need.shape) for need in program.weights}
    packed = sum(sizes[need.name] for need in program.weights if need.role == "matrix")
    heads = {op.weight for op in program.ops if isinstance(op, Logits)}
    looked_up = {op.weight for op in program.ops if isinstance(op, Embed)} - heads
    every, chosen, _ = expert_weights_of(program)
    rows = [(each.window, _kv_bytes(each)) for each in program.cache]
    return ModelWeights(
        name=name,
        matrices=packed,
        read=packed - sum(sizes[each] for each in looked_up) - every + chosen,
        others=sum(sizes.values()) - packed,
        kv_bytes=sum(size for window, size in rows if not window),
        window_bytes=sum(window * size for window, size in rows)
        + sum(layer.bytes for layer in program.states),
        max_position=max_position,
    )


def _kv_bytes(layer: CacheLayer) -> int:
    """Return the bytes of the keys and values of one token in a layer of the KV cache."""
    width = layer.key_width + (0 if layer.latent else layer.value_width)
    return _KV_BYTES * layer.heads * width


def sizes_on(machine: Instance, weights: ModelWeights) -> list[FormatSize]:
    """Return the memory and the upper bound of the decode rate for each format on a machine."""
    found = []
    for name, bits in FORMATS.items():
        size = math.ceil(weights.matrices * bits / 8) + 4 * weights.others
        free = machine.memory_bytes * _USABLE - size - weights.window_bytes
        tokens = weights.max_position if not weights.kv_bytes else int(free // weights.kv_bytes)
        context = max(0, min(tokens, weights.max_position)) if free > 0 else 0
        rate = machine.read_bytes_per_s / (weights.read * bits / 8)
        found.append(FormatSize(name, size, context, rate))
    return found


def this_machine() -> Instance:
    """Return this machine with its free memory and its measured bandwidth.

    Raises:
        ConfigError: no kernels run on this CPU.
    """
    from cpuserve.platforms.cpu import CpuPlatform
    from cpuserve.platforms.isa_level import default_level
    from cpuserve.platforms.placement import measured_cpus

    platform = CpuPlatform()
    host = platform.host()
    isa, (threads, cpus) = default_level(host), measured_cpus(host)
    if isa is None:
        msg = "no kernels run on this CPU, so its bandwidth cannot be measured: use --instance"
        raise ConfigError(msg)
    bandwidth = platform.roofline(isa, threads, cpus).bandwidth()
    return Instance("this machine", host.cpu_model, threads, host.memory_free, bandwidth, isa)


def render_formats(machine: Instance, weights: ModelWeights, found: Sequence[FormatSize]) -> str:
    """Return a table of the formats, with advice on the format to choose."""
    peak = "" if machine.name == "this machine" else " at the peak of its memory channels"
    seen = {
        "model": f"{weights.name}: {weights.matrices / 1e9:.2f} billion weights, of which a "
        f"token reads {weights.read / 1e9:.2f} billion",
        "machine": f"{machine.name}: {machine.processor}, {machine.cores} cores, "
        f"{format_bytes(machine.memory_bytes)} of memory, "
        f"{machine.read_bytes_per_s / 1e9:.0f} GB/s{peak}, {machine.isa}",
    }
    heads = ("FORMAT", "BITS", "WEIGHTS", "CONTEXT", "DECODE")
    rows = [
        (
            each.format,
            f"{FORMATS[each.format]:g}",
            format_bytes(each.weight_bytes),
            str(each.context) if each.context else "does not fit",
            f"{each.decode_tokens_per_s:.1f} tokens/s" if each.context else "",
        )
        for each in found
    ]
    said = line("advice", advice(found))
    return "\n".join(
        [*(line(*pair) for pair in seen.items()), "", *aligned([heads, *rows]), "", said]
    )


def advice(found: Sequence[FormatSize]) -> str:
    """Return advice on the format to choose: the most precise that fits, or a faster one."""
    fitting = [each for each in found if each.context]
    if not fitting:
        return "no format fits: choose a smaller model or more memory"
    first = fitting[0]
    kept = next((each for each in fitting if each.format == _KEPT), None)
    text = f"{first.format} is the most precise format that fits"
    if kept is not None and kept is not first:
        faster = kept.decode_tokens_per_s / first.decode_tokens_per_s
        return f"{text}; {kept.format} decodes up to {faster:.1f} times as fast"
    if FORMATS[first.format] < FORMATS[_KEPT]:
        return f"{text}, and it loses quality: prefer a smaller model with more bits"
    return text


def render_instances(weights: ModelWeights) -> str:
    """Return a table of all cloud instances with upper bounds of decode rates in tokens/s."""
    heads = ("INSTANCE", "CORES", "MEMORY", "GB/s", "ISA LEVEL", *_SHOWN)
    rows = []
    for machine in INSTANCES.values():
        rates = {each.format: each for each in sizes_on(machine, weights)}
        shown = [
            f"{rates[name].decode_tokens_per_s:.1f}" if rates[name].context else "-"
            for name in _SHOWN
        ]
        memory, bandwidth = machine.memory_bytes >> 30, machine.read_bytes_per_s / 1e9
        known = (machine.name, str(machine.cores), f"{memory} GiB", f"{bandwidth:.0f}")
        rows.append((*known, machine.isa, *shown))
    title = f"decode tokens/s of {weights.name} for one request, at most; -: does not fit"
    return "\n".join([title, "", *aligned([heads, *rows])])


def _all_instances(weights: ModelWeights) -> list[dict[str, Any]]:
    return [
        {"machine": asdict(each), "formats": [asdict(size) for size in sizes_on(each, weights)]}
        for each in INSTANCES.values()
    ]


def _as_json(value: object) -> str:
    return msgspec.json.encode(value).decode()
