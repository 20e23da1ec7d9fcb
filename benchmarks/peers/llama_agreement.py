"""How far cpuserve and llama.cpp agree on GGUF files of one model in several types.

usage: llama_agreement.py reference BASE.gguf DIR [TYPE ...]    (where llama_cpp imports)
       llama_agreement.py compare DIR                           (where cpuserve imports)

`reference` lets llama.cpp quantize BASE to each type (even from 8 bits or fewer), and writes
to DIR the files, its likelihoods of a text, and its greedy tokens for ten prompts. `compare` does
the same with cpuserve, with activations of one and of two int8 terms, and prints a line for each:
the difference in likelihood in nats per token; how many of the ten prompts have the same tokens;
and for how many llama.cpp agrees with itself when it computes attention in another order
(flash_attn). Rounding decides between tokens that are nearly as likely. Therefore the prompts
("sure") are the first ten parts of the text after which the best token of llama.cpp leads by
at least SURE nats in every step. The column "same, any" is for ten prompts that were not selected.
Keys and values are fp32 in both. llama.cpp rounds activations to 8 bits, in groups of 32 values
(256 for K types). So one term is the computation of llama.cpp, and two terms are more exact.
"""

import itertools
import json
import sys
from pathlib import Path

TEXT = Path(__file__).resolve().parents[2] / "tests" / "data" / "fidelity.txt"
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL", "Q6_K", "Q4_K_M")
WINDOW, WINDOWS = 512, 2  # tokens of a range that is scored, and number of ranges
PROMPTS, PROMPT, ANSWER = 10, 40, 8
SURE = 0.25  # nats


def main():
    """Run the subcommand."""
    if sys.argv[1:2] == ["reference"] and len(sys.argv) > 3:
        reference(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:] or TYPES)
    elif sys.argv[1:2] == ["compare"] and len(sys.argv) == 3:
        compare(Path(sys.argv[2]))
    else:
        sys.exit(__doc__)


def reference(base, folder, types):
    """Write a file of each type, and the likelihoods and tokens of llama.cpp with that file."""
    folder.mkdir(exist_ok=True)
    for kind in types:
        path = folder / f"{kind}.gguf"
        if not path.exists():
            quantize(base, path, kind)
        record = read_by_llama(path)
        path.with_suffix(".json").write_text(json.dumps(record))
        print(f"{kind}: {mean(record['nll']):.4f} nats per token", flush=True)


def quantize(base, path, kind):
    """Write `base` in another type by the quantizer of llama.cpp."""
    import llama_cpp as llama

    params = llama.llama_model_quantize_default_params()
    whole = {"F32": "ALL_F32"}.get(kind, f"MOSTLY_{kind}")
    params.ftype = getattr(llama, f"LLAMA_FTYPE_{whole}")
    params.allow_requantize = True
    if llama.llama_model_quantize(str(base).encode(), str(path).encode(), params):
        sys.exit(f"llama.cpp could not write {path}")


def read_by_llama(path):
    """Return a record: scored windows of tokens, their losses, prompts and greedy continuations.

    Each prompt has two continuations; "again" is from a model with flash_attn, which sums attention
    in another order.
    """
    import llama_cpp.llama_cpp as low
    import numpy as np
    from llama_cpp import Llama

    defaults = low.llama_model_default_params

    def plain():  # no repacked weights: the kernels for AMX crash on some hosts
        params = defaults()
        params.use_extra_bufts = False
        return params

    low.llama_model_default_params = plain
    options = {"n_ctx": WINDOW, "n_batch": WINDOW, "logits_all": True, "verbose": False}
    options |= {"type_k": 0, "type_v": 0}  # fp32
    model = Llama(str(path), flash_attn=False, **options)
    ids = model.tokenize(TEXT.read_bytes(), add_bos=False, special=False)
    windows = [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(WINDOWS)]
    losses = []
    for window in windows:
        model.reset()
        model.eval(window)
        rows = np.array(model.scores[: WINDOW - 1], np.float64)
        top = rows.max(axis=1)
        total = top + np.log(np.exp(rows - top[:, None]).sum(axis=1))
        losses += (total - rows[np.arange(WINDOW - 1), window[1:]]).tolist()
    step = len(ids) // (PROMPTS + 1)
    other = Llama(str(path), flash_attn=True, **options)
    record = {"windows": windows, "nll": losses}
    for name, prompts in (
        ("any", [ids[i * step : i * step + PROMPT] for i in range(1, PROMPTS + 1)]),
        ("sure", sure_prompts(model, ids)),
    ):
        answers = [greedy_of_llama(model, prompt)[0] for prompt in prompts]
        again = [greedy_of_llama(other, prompt)[0] for prompt in prompts]
        record[name] = {"prompts": prompts, "answers": answers, "again": again}
    return record


def sure_prompts(model, ids):
    """Return the first PROMPTS parts of the text where rounding cannot change the continuation."""
    parts = (ids[i : i + PROMPT] for i in range(0, len(ids) - PROMPT, PROMPT // 4))
    sure = (part for part in parts if greedy_of_llama(model, part, SURE)[1] >= SURE)
    found = list(itertools.islice(sure, PROMPTS))
    if len(found) < PROMPTS:
        sys.exit(f"only {len(found)} prompts have an answer that leads by {SURE} nats everywhere")
    return found


def greedy_of_llama(model, prompt, least=-1.0):
    """Return (greedy tokens after a prompt, the smallest lead of a token over the next, in nats).

    It stops after a token that leads by less than `least` nats.
    """
    model.reset()
    model.eval(prompt)
    answer, lead = [], float("inf")
    while len(answer) < ANSWER and lead >= least:
        logits = model.scores[model.n_tokens - 1]
        answer.append(int(logits.argmax()))
        second, first = sorted(logits.tolist())[-2:]
        lead = min(lead, first - second)
        model.eval(answer[-1:])
    return answer, lead


def compare(folder):
    """Print how far cpuserve agrees with each record of `folder`."""
    print(
        f"{'type':8} {'terms':>5} {'llama.cpp':>9} {'cpuserve':>9} {'more':>8} "
        f"{'same tokens':>12} {'itself':>7} {'same, any':>10} {'itself':>7}"
    )
    for record in sorted(folder.glob("*.json")):
        theirs = json.loads(record.read_text())
        for bits in (8, 16):
            losses, answers = read_by_cpuserve(record.with_suffix(".gguf"), theirs, bits)
            a, b = mean(theirs["nll"]), mean(losses)
            line = f"{record.stem:8} {bits // 8:5d} {a:9.4f} {b:9.4f} {b - a:+8.4f} "
            for name, width in (("sure", 12), ("any", 10)):
                wanted, again = theirs[name]["answers"], theirs[name]["again"]
                line += f" {equal(wanted, answers[name]):{width}d} {equal(wanted, again):7d}"
            print(line, flush=True)


def equal(answers, others):
    """Return how many of the token lists are the same."""
    return sum(a == b for a, b in zip(answers, others, strict=True))


def read_by_cpuserve(path, record, bits):
    """Return (losses of the record's tokens, {"sure", "any": continuations of its prompts})."""
    from cpuserve import LLM, SamplingParams

    scored = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    greedy = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
    options = {"kv_cache_dtype": "float32", "activation_bits": bits, "max_model_len": 1024}
    with LLM(str(path), **options) as llm:
        losses = []
        for output in llm.generate(record["windows"], scored, use_tqdm=False):
            rows = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
            losses += [-row[token].logprob for token, row in rows]
        answers = {}
        for name in ("sure", "any"):
            outputs = llm.generate(record[name]["prompts"], greedy, use_tqdm=False)
            answers[name] = [list(output.outputs[0].token_ids) for output in outputs]
        return losses, answers


def mean(values):
    """Return the mean of a list."""
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
