"""`cpuserve size --formats` and `--instances`: which format and machine are right for a model.

Only the model's configuration is read, so a model on the hub is not downloaded.
The rates are upper bounds for decoding: memory bandwidth / bytes of the weights that a token reads.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.cli import flags
from cpuserve.cli.banner import line
from cpuserve.cli.terminal import say
from cpuserve.config.fields import BY_NAME
from cpuserve.config.values import aligned, format_bytes
from cpuserve.errors import ConfigError, ModelError
from cpuserve.platforms.instances import INSTANCES, Instance, instance_of
from cpuserve.prepare import expert_weights_of, model_name

if TYPE_CHECKING:
    from cpuserve.program.program import CacheLayer, Program

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
    unused = sorted(set(args.given) - _ALLOWED)
    if unused:
        flag = BY_NAME[unused[0]].flag
        msg = f"flag {flag} has no effect on --formats, --instance and --instances: remove it"
        raise ConfigError(msg)
    chosen = instance_of(args.instance) if args.instance else None
    weights = weights_of(args)
    if args.instances:
        say(_as_json(_all_instances(weights)) if args.json else render_instances(weights))
        return 0
    machine = chosen or _this_machine()
    found = sizes_on(machine, weights)
    if args.json:
        say(_as_json({"machine": asdict(machine), "formats": [asdict(each) for each in found]}))
    else:
        say(render_formats(machine, weights, found))
    return 0


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
    from cpuserve.program.operations.dense import Embed, Logits

    sizes = {need.name: math.prod(need.shape) for need in program.weights}
    packed = sum(sizes[need.name] for need in program.weights if need.role == "matrix")
    heads = {op.weight for op in program.ops if isinstance(op, Logits)}
    looked_up = {op.weight for op in program.ops if isinstance(op, Embed)} - heads
    every, chosen = expert_weights_of(program)
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


def _this_machine() -> Instance:
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
