"""Write the reference of tests/fidelity: transformers in fp32 on the same dequantized weights.

    python -m tests.fidelity.make_reference PATH/TO/SmolLM2-135M-Instruct.Q4_1.gguf
    python -m tests.fidelity.make_reference PATH/TO/gemma-3-270m-q4_k_m.gguf

For each passage: its token ids' fingerprint, how many tokens are predicted (all but the first) and
the sum of their negative log-likelihoods in nats; the latter also for the weights rounded to
bfloat16 ("bf16_nll"), computed in fp32 all the same. For each prompt: the greedy continuation,
and by how much each of its tokens leads the next best (the logit margin).
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import tempfile
from collections.abc import Sequence as Texts
from pathlib import Path

import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from tests.fidelity.bf16_checkpoint import write_bf16
from tests.fidelity.passages import (
    GEMMA3,
    GEMMA3_PASSAGES,
    NUM_GREEDY,
    PROMPTS,
    REFERENCE,
    TEXT,
    fingerprint,
    passages,
)


def main(path: Path) -> None:
    torch.set_num_threads(1)  # one order of summation, whatever the machine
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    gemma = path.name.startswith("gemma")
    texts = passages()[:GEMMA3_PASSAGES] if gemma else passages()
    if not gemma:
        # transformers does not read tokenizer.ggml.pre; SmolLM2 splits every digit off first.
        split = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(split)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    with torch.inference_mode():
        ids = [ids_of(tokenizer, text, start=gemma) for text in texts]
        scored = [score(model, each) for each in ids]
        prompts = [ids_of(tokenizer, prompt, start=gemma) for prompt in PROMPTS]
        greedy = [continue_greedily(model, each) for each in prompts]
        rounded = {} if gemma else {"bf16_nll": scored_as_bf16(path, ids)}
    reference = {
        "command": f"python -m tests.fidelity.make_reference {path.name}",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "model": {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
        "text_sha256": hashlib.sha256(TEXT.read_bytes()).hexdigest(),
        "passages": scored,
        **rounded,
        "greedy": greedy,
    }
    file = GEMMA3 if gemma else REFERENCE
    file.write_text(json.dumps(reference, indent=1) + "\n", encoding="utf-8")
    total = sum(p["nll"] for p in scored) / sum(p["predicted"] for p in scored)
    sys.stdout.write(f"{file.name}: {len(scored)} passages, {total:.4f} nats a token\n")


def scored_as_bf16(path: Path, texts: Texts[list[int]]) -> list[object]:
    """The likelihoods by the model with weights rounded to bfloat16, computing in fp32."""
    with tempfile.TemporaryDirectory() as directory:
        source = write_bf16(path, Path(directory))
        made = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    return [score(made, ids)["nll"] for ids in texts]


def ids_of(tokenizer, text: str, *, start: bool) -> list[int]:
    """The ids of a text; start: with the token that begins a text, which Gemma needs."""
    return tokenizer(text, add_special_tokens=start).input_ids


def score(model, ids: list[int]) -> dict[str, object]:
    logits = model(torch.tensor([ids])).logits[0, :-1].double()
    logprobs = torch.log_softmax(logits, -1)
    nll = -logprobs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].sum().item()
    return {"ids": fingerprint(ids), "predicted": len(ids) - 1, "nll": round(nll, 6)}


def continue_greedily(model, ids: list[int]) -> dict[str, object]:
    output, margins = [], []
    for _ in range(NUM_GREEDY):
        top = model(torch.tensor([ids + output])).logits[0, -1].topk(2)
        output.append(int(top.indices[0]))
        margins.append(round(float(top.values[0] - top.values[1]), 4))
    return {"prompt": fingerprint(ids), "ids": output, "margins": margins}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
