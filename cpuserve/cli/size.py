"""`cpuserve size MODEL`: the memory that a model needs here, and upper bounds of its speed."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import msgspec

from cpuserve.cli import flags
from cpuserve.cli.banner import line
from cpuserve.cli.bench import roofline_of, work_of
from cpuserve.cli.commands import prepared_start
from cpuserve.cli.terminal import say
from cpuserve.config.values import format_bytes
from cpuserve.errors import ConfigError
from cpuserve.platforms.cache_groups import block_bytes
from cpuserve.platforms.memory import BLOCK, kv_layer_bytes
from cpuserve.prepare import kv_cache_bytes

if TYPE_CHECKING:
    from cpuserve.bench.measure import Work
    from cpuserve.prepare import Prepared


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
        from cpuserve.cli.size_formats import compare

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
