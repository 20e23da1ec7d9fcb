#!/usr/bin/env python3
"""Likelihood lost by the fast kernels, in nats per token, compared with fp32 on equal weights.

usage: accuracy.py [--only NAME ...] [--kv-cache-dtype TYPE]

Scores tests/data/fidelity.txt with SmolLM2-135M; the reference is transformers in fp32
(tests/golden/fidelity_smollm2.json). Prints one line per configuration: the mean over all tokens,
and the worst passage. Without --kv-cache-dtype, the KV cache has the dtype of the configuration.
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cpuserve import LLM, SamplingParams  # noqa: E402
from tests.fidelity.bf16_checkpoint import write_bf16  # noqa: E402
from tests.fidelity.passages import passages, reference  # noqa: E402
from tests.helpers.served import DEFAULT_MODEL, default_model  # noqa: E402

# {configuration: (weights, which the fp32 reference uses as well; options of LLM)}
CONFIGURATIONS = {
    "bf16": ("bf16", {}),
    "Q4_1, 16-bit activations": ("gguf", {"activation_bits": 16}),
    "Q4_1, 8-bit activations": ("gguf", {"activation_bits": 8}),
    "Q8_0, 8-bit activations": ("bf16", {"quantization": "int8", "activation_bits": 8}),
    "int8": ("bf16", {"quantization": "int8"}),
    "w8a8": ("bf16", {"quantization": "w8a8"}),
    "int4": ("bf16", {"quantization": "int4"}),
    "int4_mixed": ("bf16", {"quantization": "int4_mixed"}),
}


def cost(model, tokenizer, golden, options):
    """Return (mean, worst passage) of the loss compared with the reference, in nats per token."""
    llm = LLM(model=str(model), tokenizer=str(tokenizer), max_model_len=2048, **options)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    total = tokens = worst = 0.0
    for text, (predicted, nll) in zip(passages(), golden, strict=True):
        (output,) = llm.generate([text], params, use_tqdm=False)
        scores = [next(iter(entry.values())) for entry in output.prompt_logprobs[1:]]
        ours = -sum(getattr(s, "logprob", s) for s in scores)
        if len(scores) != predicted:
            raise SystemExit("the tokens differ from those of the reference: check the tokenizer")
        total, tokens = total + ours - nll, tokens + predicted
        worst = max(worst, abs(ours - nll) / predicted)
    return total / tokens, worst


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=list(CONFIGURATIONS))
    parser.add_argument("--kv-cache-dtype", default="auto")
    args = parser.parse_args()
    golden = reference()
    predicted = [p["predicted"] for p in golden["passages"]]
    nll = {"gguf": [p["nll"] for p in golden["passages"]], "bf16": golden["bf16_nll"]}
    gguf = default_model()
    with tempfile.TemporaryDirectory() as directory:
        models = {"gguf": DEFAULT_MODEL, "bf16": write_bf16(gguf, Path(directory))}
        for name in args.only or CONFIGURATIONS:
            weights, options = CONFIGURATIONS[name]
            against = list(zip(predicted, nll[weights], strict=True))
            options = {**options, "kv_cache_dtype": args.kv_cache_dtype}
            mean, worst = cost(models[weights], gguf, against, options)
            print(f"{name:28s} {mean:+.5f} nats per token, worst passage {worst:.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
