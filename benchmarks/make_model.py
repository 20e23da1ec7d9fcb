"""Writes checkpoints with random weights in Hugging Face format, without torch.

    python benchmarks/make_model.py qwen2.5-0.5b DIR [--seed 0]

For benchmarks and tests: the shapes come from the named models, the weights are random, and a small
byte-level tokenizer allows text prompts. Memory use does not depend on the model's size.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cpuserve.base.errors import CpuserveError
from cpuserve.models import build_program, spec_from_config
from cpuserve.program.operations.attention import RopeStoreKV
from cpuserve.program.ops import Op
from cpuserve.program.parts import parse, stored_needs
from cpuserve.program.program import Program, WeightNeed

SHARD_BYTES = 2_000_000_000
CHUNK = 1 << 22  # number of elements that are generated at a time: 16 MB of fp32
SAFETENSORS_DTYPE = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENIZER_VOCAB = 384  # 3 special tokens, 256 bytes, 125 merges
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = """The quick brown fox jumps over the lazy dog. What is the capital of France? Paris is the
capital of France, and it lies on the river Seine. There are three hundred and sixty five days in
the year, and the sun rises in the east. A server answers one request after another; each request
is a list of tokens, and each token is a number. The user asks a question and the assistant answers.
for i in range(10): print(i, i * i)  # 0 1 2 3 4 5 6 7 8 9
"""

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads", "num_key_value_heads")


def read_shapes() -> dict[str, dict[str, Any]]:
    """Return the configs of shapes.json by name.

    A shape has its architecture, its SIZES (null: the config lacks the key), the kinds of its
    layers, whose keys it takes from the records under "layers", and further keys of the config,
    which come last. Its "note" is for readers.
    """
    table = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))
    return {name: _config(shape, table["layers"]) for name, shape in table["shapes"].items()}


def _config(shape: dict[str, Any], layers: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    name = shape.pop("architecture")
    kind = name.removesuffix("ForCausalLM").lower()
    config = {
        "architectures": [name],
        "model_type": kind.replace("moe", "_moe").replace("seekv", "seek_v"),
    }
    sizes = zip(SIZES, shape.pop("sizes", ()), strict=False)
    config |= {key: size for key, size in sizes if size is not None}
    for layer in shape.pop("layers", ()):
        config |= layers[layer]
    shape.pop("note", None)
    return config | shape


SHAPES = read_shapes()


def make_model(config: Mapping[str, Any], directory: Path, seed: int = 0) -> Path:
    """Write the checkpoint of `config` with random weights into `directory`; return the directory.

    The config gets the tokenizer's end-of-text id. Raises ModelError for an invalid config.
    """
    end = SPECIAL_TOKENS.index("<|im_end|>")
    config = {**config, "bos_token_id": 0, "eos_token_id": end, "pad_token_id": 0}
    program = build_program(spec_from_config(config))
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", ids)
    write_tokenizer(directory)
    # transformers reads Mamba only as published.
    prefix = "backbone." if "mamba" in str(config.get("model_type")) else "model."
    write_weights(program, directory, str(config["torch_dtype"]), seed, prefix)
    return directory


def write_tokenizer(directory: Path) -> None:
    """Write a byte-level BPE, trained on a few sentences: tokenizer.json, tokenizer_config.json."""
    (directory / "tokenizer.json").write_text(_tokenizer_json(), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", settings)


@functools.cache
def _tokenizer_json() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_VOCAB,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer.to_str(pretty=True)


def write_weights(
    program: Program,
    directory: Path,
    dtype: str,
    seed: int,
    prefix: str = "model.",
    more: Sequence[WeightNeed] = (),
) -> None:
    """Write all tensors of the program to one safetensors file, or to shards of at most 2 GB.

    prefix: it replaces "model." in them. more: further tensors.
    """
    stored = [
        replace(need, name=re.sub(r"^model\.", prefix, need.name))
        for need in stored_needs(program.weights)
    ]
    stored += more
    offsets = {name for op in program.ops if getattr(op, "plus_one", False) for name in _norms(op)}
    parts = [part for need in program.weights if (part := parse(need.name))]
    kinds = _Kinds(offsets, {part.tensor for part in parts if part.columns})
    shards = _plan_shards(stored, dtype)
    if len(shards) == 1:
        _write_safetensors(directory / "model.safetensors", shards[0], dtype, seed, kinds)
        return
    where = {}
    for i, needs in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _write_safetensors(directory / name, needs, dtype, seed, kinds)
        where |= {need.name: name for need in needs}
    total = sum(_num_bytes(need, dtype) for need in stored)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    _write_json(directory / "model.safetensors.index.json", index)


class _Kinds(NamedTuple):
    """Names of tensors that need other values: norm weights that are stored as offsets from 1, and
    matrices that are stored as [inputs, outputs].
    """

    offsets: set[str | None]
    transposed: set[str]


def _plan_shards(needs: Sequence[WeightNeed], dtype: str) -> list[list[WeightNeed]]:
    shards: list[list[WeightNeed]] = [[]]
    used = 0
    for need in needs:
        size = _num_bytes(need, dtype)
        if shards[-1] and used + size > SHARD_BYTES:
            shards.append([])
            used = 0
        shards[-1].append(need)
        used += size
    return shards


def _num_bytes(need: WeightNeed, dtype: str) -> int:
    return math.prod(need.shape) * (8 if need.role == "ids" else SAFETENSORS_DTYPE[dtype][1])


def _norms(op: Op) -> tuple[str | None, ...]:
    return (op.q_norm, op.k_norm) if isinstance(op, RopeStoreKV) else (op.weight,)


def _write_safetensors(
    path: Path, needs: list[WeightNeed], dtype: str, seed: int, kinds: _Kinds
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for need in needs:
        end = start + _num_bytes(need, dtype)
        header[need.name] = {
            "dtype": "I64" if need.role == "ids" else SAFETENSORS_DTYPE[dtype][0],
            "shape": list(need.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for need in needs:
            if need.role == "ids":
                file.write(_random_ids(need, needs, seed).astype("<i8").tobytes())
                continue
            for values in _random_values(need, seed, kinds):
                file.write(_as_bytes(values, dtype))


def _random_ids(need: WeightNeed, needs: list[WeightNeed], seed: int) -> npt.NDArray[np.int64]:
    """Return distinct experts for each token id: the ids are below the rows of the router."""
    router = need.name.rpartition(".")[0] + ".weight"
    experts = next(other.shape[0] for other in needs if other.name == router)
    stream = np.random.default_rng([seed, zlib.crc32(need.name.encode())])
    order = stream.random((need.shape[0], experts)).argsort(axis=1)
    return order[:, : need.shape[1]]


def _random_values(need: WeightNeed, seed: int, kinds: _Kinds) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the tensor in chunks of fp32; its random values depend only on its name and the seed.

    Matrices have variance 1 / inputs, so products keep the variance of their input. Norm weights
    and scales are near 1 (near 0 if they are offsets from 1) and biases near 0, but not equal
    to these values, so a test notices a missing tensor. Recurrent states halve in about 20 tokens.
    """
    stream = np.random.default_rng([seed, zlib.crc32(need.name.encode())])
    parts = ("norm", "Norm", ".ln_", "_ln.")
    norm = need.role == "vector" and any(part in need.name for part in parts)
    norm = norm and need.name.endswith(".weight")
    factors = ("layer_scalar", "router.scale", "per_expert_scale", "correct_output_scale")
    factors += ("hc_attn_scale", "hc_ffn_scale", "_layer.hc_scale", "hc_head_scale")
    factors += ("hc_head.hc_scale",)
    norm = norm or need.name.endswith(factors)
    middle, spread = 1.0 if norm and need.name not in kinds.offsets else 0.0, 0.2
    if need.name.endswith(".A_log"):
        middle = -3.0
    # RWKV's factors between a row and the one before
    if re.search(r"\.x_[agkrvwx](\.bias)?$|\.mu$|\.x_proj\.2\.bias$", need.name):
        middle, spread = 0.5, 0.4
    if need.name.endswith(".w_proj.linear.lora.2.bias"):
        middle = -3.0
    if need.name.endswith((".k_k", ".k_a")):
        middle = 1.0
    if need.name.endswith(".act_fn.eps"):  # of xIELU
        middle, spread = -1e-6, 0.0
    if need.role != "vector":
        inputs = need.shape[0 if need.name in kinds.transposed else -1]
        if "patch_embed" in need.name:
            inputs = math.prod(need.shape[1:])
        spread = math.sqrt(3.0 / inputs)  # uniform numbers have variance spread^2 / 3
        if need.name.endswith("modality_router.weight"):
            spread *= inputs  # Gemma 3n divides its input by `inputs`
        if need.name.endswith("_coefs.weight"):
            spread /= 4  # otherwise the AltUp streams grow from layer to layer
    left = math.prod(need.shape)
    while left:
        values = stream.random(min(left, CHUNK), np.float32)
        values *= np.float32(2 * spread)
        values += np.float32(middle - spread)
        left -= len(values)
        yield values


def _as_bytes(values: npt.NDArray[np.float32], dtype: str) -> bytes:
    if dtype == "float32":
        return values.astype("<f4").tobytes()
    if dtype == "float16":
        return values.astype("<f2").tobytes()
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16  # to nearest even
    return rounded.astype("<u2").tobytes()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """The command line; an error means exit code 2 and one line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shape", choices=sorted(SHAPES), metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("directory", type=Path, metavar="DIR", help="a new or empty directory")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    args = parser.parse_args(argv)
    try:
        if args.directory.exists() and any(args.directory.iterdir()):
            print(f"{args.directory} is not empty; give a new directory", file=sys.stderr)
            return 2
        make_model(SHAPES[args.shape], args.directory, args.seed)
    except (OSError, CpuserveError) as error:
        print(f"make_model: {error}", file=sys.stderr)
        return 2
    size = sum(f.stat().st_size for f in args.directory.iterdir())
    print(f"{args.directory}: {args.shape}, {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
