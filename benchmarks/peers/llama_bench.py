"""Rates of llama.cpp on a GGUF file through its C API, without a server, which favours llama.cpp.

usage: llama_bench.py FILE.gguf THREADS PROMPT OUTPUT [STREAMS ...]

Run it in the virtual environment that install.sh made. It prints one JSON object in tokens/s:
the decode and prefill rates of one sequence, and the output rate of STREAMS sequences together.
"""

import ctypes
import json
import random
import sys
import time

import llama_cpp as llama

BATCH = 2048


class Engine:
    """A llama.cpp context and a batch that is filled for each call."""

    def __init__(self, path, threads, context, sequences):
        self.quiet = llama.llama_log_callback(lambda *_: None)
        llama.llama_log_set(self.quiet, ctypes.c_void_p(0))
        llama.llama_backend_init()
        model_params = llama.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self.model = llama.llama_model_load_from_file(path.encode(), model_params)
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, BATCH, 512
        params.n_threads = params.n_threads_batch = threads
        params.n_seq_max = sequences
        params.kv_unified = True
        self.context = llama.llama_init_from_model(self.model, params)
        self.memory = llama.llama_get_memory(self.context)
        self.batch = llama.llama_batch_init(BATCH, 0, 1)
        self.vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.rng = random.Random(0)

    def clear(self):
        llama.llama_memory_clear(self.memory, True)

    def run(self, rows):
        """Decode (position, sequence, wants logits) rows of random tokens."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (position, sequence, logits) in enumerate(rows):
            batch.token[i] = self.rng.randrange(300, min(self.vocab, 40000))
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = logits
        code = llama.llama_decode(self.context, batch)
        llama.llama_synchronize(self.context)
        if code:
            raise SystemExit(f"llama_decode: {code}")


def timed(work):
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def prefill(engine, tokens):
    engine.clear()
    return tokens / timed(lambda: engine.run([(i, 0, i == tokens - 1) for i in range(tokens)]))


def decode(engine, prompt, output, sequences):
    """Return the output tokens per second of `sequences` sequences that decode together."""
    engine.clear()
    for s in range(sequences):
        engine.run([(i, s, i == prompt - 1) for i in range(prompt)])

    def steps():
        for k in range(output):
            engine.run([(prompt + k, s, True) for s in range(sequences)])

    return sequences * output / timed(steps)


def main():
    path = sys.argv[1]
    threads, prompt, output, *streams = map(int, sys.argv[2:])
    most = max(streams, default=1)
    engine = Engine(path, threads, max(prompt, (32 + output) * most) + 64, most)
    engine.run([(i, 0, i == 63) for i in range(64)])
    found = {"decode": decode(engine, 32, output, 1), "prefill": prefill(engine, prompt)}
    for n in streams:
        found[f"{n} streams"] = decode(engine, 32, output, n)
    print(json.dumps(found))


main()
