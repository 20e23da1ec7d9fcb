"""A request gets the same text alone and in a batch with 31 others, greedy or seeded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.served import running_server
from tests.helpers.tiny import tiny_model


def bodies():
    """32 requests of different lengths, prompts and sampling, three of them longer than a chunk."""
    return [
        {
            "prompt": [
                (i * 31 + j * j * 7 + j) % 250 for j in range(3 + 13 * i % 97 + 260 * (i % 9 == 8))
            ],
            "max_tokens": 100 + i % 5 * 30,
            "temperature": 0.0 if i % 3 == 0 else 1.0,
            "top_p": 0.9,
            "seed": i,
            "frequency_penalty": 0.5 if i % 4 == 1 else 0.0,
            "ignore_eos": True,
            "logprobs": 2,
            "return_token_ids": True,
        }
        for i in range(32)
    ]


def answer(server, body):
    choice = server.post("/v1/completions", **body)["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["text"]


@pytest.mark.deep
@pytest.mark.parametrize("kv_gib", ["1", "0.00025"], ids=["roomy", "preempted"])
def test_text_alone_equals_text_among_31_others(kv_gib):
    """With the small KV cache the 32 requests preempt each other repeatedly."""
    model = tiny_model("llama", dtype="bfloat16")
    options = ["--kv-cache-memory", kv_gib, "--max-num-batched-tokens", "160"]
    with running_server(model, *options) as server:
        alone = [answer(server, body) for body in bodies()]
        with ThreadPoolExecutor(32) as pool:
            together = list(pool.map(lambda body: answer(server, body), bodies()))
        preempted = _counter(server, "vllm:num_preemptions_total")
    assert together == alone
    assert (preempted > 0) == (kv_gib != "1"), preempted


def _counter(server, name):
    lines = server.get("/metrics").decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))
