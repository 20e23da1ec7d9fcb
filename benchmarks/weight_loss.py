#!/usr/bin/env python3
"""Likelihood lost by quantized weights alone, by scheme and by GGUF type, on SmolLM2.

usage: weight_loss.py reorder BASE.gguf OUT.gguf
       weight_loss.py measure OUT.gguf [--schemes NAME ...] [--files FILE.gguf ...]

The only published weights at hand come from a Q4_1 file, so they are already multiples of a scale
per group of 32. Quantizing them again in the same groups loses nothing, and so says nothing
about a scheme. `reorder` writes the same model as F32 with its hidden, feed-forward
and value channels in another order. Every product has the same terms, so the model computes
the same (the likelihoods agree to 1e-6), but no group consists of weights that shared a scale.

`measure` scores tests/data/fidelity.txt with transformers in fp32.
The weights have the values that each scheme of quantization at load makes of them,
or the values in each further file (such as files that the llama.cpp quantizer writes from OUT).
It prints nats per token, the difference to the result with bf16 weights, and the mean KL divergence
from the distributions with bf16 weights. Activations are not quantized here;
accuracy.py measures both together. A row takes half a minute on two cores.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cpuserve.loader.load import open_checkpoint  # noqa: E402
from cpuserve.models import build_program, spec_from_config  # noqa: E402
from cpuserve.platforms.formats import scheme_for  # noqa: E402
from cpuserve.quant import dequantize  # noqa: E402
from cpuserve.quant.online import kind_of, quantize  # noqa: E402
from tests.fidelity.passages import passages  # noqa: E402

SCHEMES = ("int8", "w8a8", "int4", "int4_mixed")
SEED = 0


def main():
    """Run the subcommand."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    reorder = commands.add_parser("reorder")
    reorder.add_argument("base", type=Path)
    reorder.add_argument("out", type=Path)
    measure = commands.add_parser("measure")
    measure.add_argument("base", type=Path)
    measure.add_argument("--schemes", nargs="*", choices=SCHEMES, default=SCHEMES)
    measure.add_argument("--files", nargs="*", type=Path, default=())
    args = parser.parse_args()
    if args.command == "reorder":
        write_reordered(args.base, args.out)
    else:
        print_losses(args.base, args.schemes, args.files)
    return 0


def write_reordered(base, out):
    """Copy a GGUF file of the architecture llama, with its channels reordered, as F32."""
    import gguf

    reader = gguf.GGUFReader(base)
    writer = gguf.GGUFWriter(out, "llama")
    for field in reader.fields.values():
        kept = not field.name.startswith("GGUF.") and field.name != "general.architecture"
        if kept:
            kind = field.types[0]
            sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type)
    tensors = {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1].tolist())
        for t in reader.tensors
    }
    count = {name: int(reader.fields[f"llama.{name}"].contents()) for name in COUNTS}
    for name, values in reordered(tensors, count).items():
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


COUNTS = ("block_count", "attention.head_count", "attention.head_count_kv")


def reordered(tensors, count):
    """Return the tensors of a GGUF llama with channels in another order (see the module's text).

    count: the values of the metadata keys in COUNTS.
    """
    random = np.random.default_rng(SEED)
    hidden = random.permutation(tensors["token_embd.weight"].shape[1])
    reads = ("token_embd", "output", "attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
    writes = ("attn_output", "ffn_down", "attn_norm", "ffn_norm", "output_norm")
    out = {}
    for name, x in tensors.items():
        role = name.removesuffix(".weight").rpartition(".")[2]
        out[name] = x[:, hidden] if role in reads else x[hidden] if role in writes else x
    heads, kv_heads = count["attention.head_count"], count["attention.head_count_kv"]
    for layer in range(count["block_count"]):
        gate, up, down, value, output = (
            f"blk.{layer}.{role}.weight"
            for role in ("ffn_gate", "ffn_up", "ffn_down", "attn_v", "attn_output")
        )
        inner = random.permutation(out[gate].shape[0])
        out[gate], out[up], out[down] = out[gate][inner], out[up][inner], out[down][:, inner]
        width = out[value].shape[0] // kv_heads
        by_head = [head * width + random.permutation(width) for head in range(kv_heads)]
        rows = np.concatenate(by_head)
        # Query heads that share a value head read its channels in the same order.
        shared = heads // kv_heads
        columns = [
            rows[kv * width : (kv + 1) * width] + (kv * (shared - 1) + query) * width
            for kv in range(kv_heads)
            for query in range(shared)
        ]
        out[value], out[output] = out[value][rows], out[output][:, np.concatenate(columns)]
    return out


def print_losses(base, schemes, files):
    """Print a line for bf16, for each scheme and for each file."""
    import torch

    checkpoint = open_checkpoint(base)
    texts = ids_of(base)
    model = llama(checkpoint.config)
    program = build_program(spec_from_config(checkpoint.config))
    uses = {need.name: need.use for need in program.weights}
    tokens = sum(len(ids) - 1 for ids in texts)

    @torch.inference_mode()
    def logprobs(weights):
        model.load_state_dict({name: torch.from_numpy(x) for name, x in weights.items()})
        logits = (model(torch.tensor([ids])).logits[0, :-1] for ids in texts)
        return [torch.log_softmax(x, -1) for x in logits]

    def nats(rows):
        picked = (
            row[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].double().sum().item()
            for row, ids in zip(rows, texts, strict=True)
        )
        return -sum(picked) / tokens

    def divergence(rows):
        each = ((a.exp() * (a - b)).sum().item() for a, b in zip(reference, rows, strict=True))
        return sum(each) / tokens

    def show(name, rows):
        here = nats(rows)
        more = f"{here - least:+8.4f} {100 * (here / least - 1):+7.2f} %"
        print(f"{name:28} {here:7.4f} {more} {divergence(rows):8.4f}", flush=True)

    reference = logprobs(named(checkpoint, in_bf16))
    least = nats(reference)
    print(f"{'weights':28} {'nats':>7} {'more':>8} {'':>9} {'KL':>8}")
    show("bf16", reference)
    sizes = sum(np.prod(checkpoint.weights.get(n).shape) for n in checkpoint.weights.names())
    for scheme in schemes:
        exact = scheme_for(scheme, int(sizes))
        show(exact, logprobs(named(checkpoint, lambda n, x, s=exact: packed(n, x, s, uses))))
    for file in files:
        show(file.name, logprobs(named(open_checkpoint(file), lambda _, x: x)))


def named(checkpoint, change):
    """Return {name in transformers: change(name, x)} of the fp32 weights x of a checkpoint."""
    weights = {}
    for name in checkpoint.weights.names():
        tensor = checkpoint.weights.get(name)
        x = np.array(dequantize(tensor), np.float32).reshape(tensor.shape)
        weights[name] = np.ascontiguousarray(change(name, x), np.float32)
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    return weights


def in_bf16(_, x):
    """Return fp32 values rounded to bf16, as fp32."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def packed(name, x, scheme, uses):
    """Return the fp32 values of a tensor after `scheme` has quantized it from bf16."""
    rows = in_bf16(name, x)
    if x.ndim < 2:
        return rows
    return quantize(rows, kind_of(name, uses.get(name, "linear"), scheme)).values()


def llama(config):
    """Return a model of transformers in fp32 with this config; its weights are set later."""
    import transformers

    kept = {k: v for k, v in config.items() if k not in ("architectures", "torch_dtype", "dtype")}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**kept)).float().eval()


def ids_of(path):
    """Return the token ids of each passage."""
    from cpuserve.tokenizer.load import load_tokenizer

    tokenizer, _ = load_tokenizer(str(path), None)
    return [list(tokenizer.encode(text)) for text in passages()]


if __name__ == "__main__":
    sys.exit(main())
