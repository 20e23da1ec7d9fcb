"""Rates of OpenVINO GenAI on a GGUF file or a converted directory, one request at a time.

usage: openvino_bench.py MODEL PROMPT OUTPUT

Run it in the virtual environment that install.sh made. It prints one JSON object in tokens/s:
decode and prefill of one sequence.
"""

import json
import random
import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai

rng = random.Random(0)


def generate(pipe, tokens, output):
    """Return (seconds, metrics) of `output` tokens after a random prompt."""
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = output
    config.do_sample, config.ignore_eos, config.apply_chat_template = False, True, False
    ids = np.array([[rng.randrange(300, 40000) for _ in range(tokens)]], np.int64)
    inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
    started = time.perf_counter()
    result = pipe.generate(inputs, config)
    return time.perf_counter() - started, result.perf_metrics


def main():
    path, prompt, output = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    pipe = genai.LLMPipeline(path, "CPU")
    generate(pipe, 64, 4)
    seconds, _ = generate(pipe, prompt, 1)
    _, metrics = generate(pipe, 32, output)
    print(json.dumps({"decode": 1000 / metrics.get_tpot().mean, "prefill": prompt / seconds}))


main()
