"""How far cpuserve and llama.cpp agree about a picture, on the files of make_picture_model.py.

usage: picture_agreement.py reference DIR PICTURE RECORD    (where llama_cpp imports)
       picture_agreement.py compare DIR PICTURE RECORD      (where cpuserve imports)

`reference` asks llama-cpp-python's handler of conversations about the picture, and writes the
tokens of its prompt, log likelihoods after it, and greedy tokens. `compare` does the same with
cpuserve in fp32, with the checkpoint and with the two GGUF files, and prints the differences.
Both programs decode and scale the picture: take a smooth one, because they have other filters.
"""

import base64
import json
import sys
from pathlib import Path

from questions import FIRST

TOKENS, TOP = 32, 20


def main():
    """Run the subcommand."""
    works = {"reference": reference, "compare": compare}
    if len(sys.argv) != 5 or sys.argv[1] not in works:
        sys.exit(__doc__)
    works[sys.argv[1]](*map(Path, sys.argv[2:]))


def files(folder):
    """Return the GGUF files of the text part and of the tower."""
    return [str(folder / f"{part}-BF16.gguf") for part in ("model", "mmproj")]


def asked(picture):
    """Return the messages about a picture."""
    url = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": FIRST}]
    return [{"role": "user", "content": parts}]


def reference(folder, picture, record):
    """Write the record of llama.cpp."""
    import llama_cpp
    import numpy as np
    from llama_cpp.llama_chat_format import MTMDChatHandler

    text, mmproj = files(folder)
    handler = MTMDChatHandler(mmproj, verbose=False, use_gpu=False)
    options = {"n_ctx": 4096, "n_batch": 2048, "type_k": 0, "type_v": 0, "verbose": False}
    model = llama_cpp.Llama(text, chat_handler=handler, flash_attn=False, **options)

    def logits():
        last = llama_cpp.llama_get_logits_ith(model._ctx.ctx, -1)
        return np.ctypeslib.as_array(last, shape=(model.n_vocab(),)).astype(np.float64)

    whole = {model.tokenize(b"a", add_bos=False)[0]: 1000.0}  # a token that ends the call
    model.create_chat_completion(asked(picture), temperature=0, max_tokens=1, logit_bias=whole)
    found = {"prompt": model.input_ids[: model.n_tokens].tolist()}
    values, answer = logits(), []
    found["logprobs"] = (values - np.logaddexp.reduce(values)).tolist()
    for _ in range(TOKENS):
        answer.append(int(logits().argmax()))
        model.eval(answer[-1:])
    record.write_text(json.dumps({**found, "answer": answer}))


def compare(folder, picture, record):
    """Print how far cpuserve agrees with a record."""
    from cpuserve import LLM, SamplingParams

    theirs = json.loads(record.read_text())
    text, mmproj = files(folder)
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=TOP, ignore_eos=True)
    options = {"dtype": "float32", "max_model_len": 4096, "tokenizer": str(folder)}
    spread = max(theirs["logprobs"]) - min(theirs["logprobs"])
    for name, model, more in (
        ("checkpoint", str(folder), {}),
        ("GGUF", text, {"mmproj": mmproj}),
    ):
        with LLM(model, **options, **more) as llm:
            (found,) = llm.chat(asked(picture), greedy, use_tqdm=False)
        answer = found.outputs[0]
        first = {i: each.logprob for i, each in answer.logprobs[0].items()}
        off = max(abs(value - theirs["logprobs"][i]) for i, value in first.items())
        equal = sum(a == b for a, b in zip(answer.token_ids, theirs["answer"], strict=True))
        same = len(found.prompt_token_ids) == len(theirs["prompt"])
        print(
            f"{name}: {'as many' if same else 'other'} tokens in the prompt "
            f"({len(found.prompt_token_ids)}), {equal} of {TOKENS} greedy tokens, "
            f"likelihoods within {off:.4f} nats of a range of {spread:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
