#!/usr/bin/env python3
"""Measures pictures in cpuserve, llama.cpp and OpenVINO GenAI on equal weights, in alternation.

usage: pictures.py DIR [--openvino CONVERTED] [--peers llama openvino] [--rounds 3]
                   [--size 1275 1650] [--callers 8] [--own=OPTION ...]

DIR is a model that `make_picture_model.py SHAPE DIR --gguf` wrote; `openvino_convert.py DIR
CONVERTED` converts it. The table has medians of seconds, and of the ratios theirs / ours:
"first token" of a prompt with one picture; "second turn" about the same picture, with the whole
conversation sent again; and the time until all `--callers`, who come at once with a picture each,
have their first token. "kept" is a second turn within a program that holds the state of this one
conversation, which a server cannot count on; cpuserve has its prefix cache in both.
cpuserve is measured through HTTP, the others through their libraries. All decode the files.
Nothing else may run on the machine. Run install.sh first.
"""

import argparse
import asyncio
import base64
import io
import os
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from PIL import Image
from questions import ANSWER, FIRST, SECOND
from run import KEY, ScriptEngine, ServerEngine, alternated

from cpuserve.bench.driver import CHAT, complete
from cpuserve.bench.server import private_flags, serve_command

METRICS = {
    "first": "first token",
    "second turn": "second turn",
    "second turn, kept": "second turn, kept",
    "callers": "all callers have a token",
}


def jpeg(size, seed):
    """Return the bytes of a picture of this size; each seed has another one."""
    pixels = np.random.default_rng(seed).integers(0, 256, (24, 24, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def asked(data):
    """Return the message of the first turn."""
    url = f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": FIRST}]
    return {"role": "user", "content": parts}


async def times(target, args):
    """Return the seconds of cpuserve; its pictures are new in each round."""
    chat = replace(target, endpoint=CHAT)

    def ask(*messages):
        return complete(chat, "", 1, messages=messages)

    def new():
        return asked(jpeg(args.size, random.getrandbits(60)))

    await ask(new())
    message, answer = new(), {"role": "assistant", "content": ANSWER}
    first = await ask(message)
    second = await ask(message, answer, {"role": "user", "content": SECOND})
    each = await asyncio.gather(*map(ask, [new() for _ in range(args.callers)]))
    until = max(one.stamps[0] for one in each) - min(one.started for one in each)
    found = {"first": first.ttft, "second turn": second.ttft, "callers": until}
    return {**found, "second turn, kept": second.ttft, "prompt tokens": first.prompt_tokens}


def engines(args, pictures):
    """Start and yield the engines: cpuserve first, then those in --peers."""
    options = ["--max-model-len", "4096", "--served-model-name", "m", *args.own]
    own = [args.dir, *private_flags(args.port, KEY), *options]
    yield ServerEngine("cpuserve", serve_command(own), args.port, "m")
    if "llama" in args.peers:
        files = [str(Path(args.dir) / f"{part}-BF16.gguf") for part in ("model", "mmproj")]
        yield ScriptEngine("llama", "llama_pictures.py", (*files, pictures, args.threads))
    if "openvino" in args.peers and args.openvino:
        yield ScriptEngine("openvino", "openvino_pictures.py", (args.openvino, pictures))


def table(samples):
    """Print the median seconds of each engine, and the median ratios of its seconds to ours."""
    print("| engine | tokens of the prompt | " + " | ".join(METRICS.values()) + " |")
    print("|---" * (2 + len(METRICS)) + "|")
    for name, rounds in samples.items():
        cells = [name, str(rounds[0]["prompt tokens"])]
        for metric in METRICS:
            cell = f"{median(each[metric] for each in rounds):.2f} s"
            if name != "cpuserve":
                pairs = zip(rounds, samples["cpuserve"], strict=False)
                ratio = median(theirs[metric] / ours[metric] for theirs, ours in pairs)
                cell += f", {ratio:.1f} x"
            cells.append(cell)
        print("| " + " | ".join(cells) + " |", flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir")
    parser.add_argument("--openvino", metavar="CONVERTED")
    parser.add_argument("--peers", nargs="*", default=["llama", "openvino"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--size", type=int, nargs=2, default=[1275, 1650])
    parser.add_argument("--callers", type=int, default=8)
    parser.add_argument("--own", action="append", default=[], help="an option for cpuserve serve")
    parser.add_argument("--port", type=int, default=8101)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as pictures:
        for i in range(2 + args.callers):
            (Path(pictures) / f"{i}.jpg").write_bytes(jpeg(args.size, i))
        samples = alternated(
            engines(args, pictures), args.rounds, lambda engine: engine.measure(args, times)
        )
    table(samples)
    return 0


if __name__ == "__main__":
    sys.exit(main())
