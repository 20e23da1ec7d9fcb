#!/usr/bin/env python3
"""Decode rates with speculation in cpuserve and in other servers, on equal weights and texts.

usage: speculation.py DIR [--gguf FILE.gguf] [--draft FILE.gguf] [--rounds 8] [--text NAME ...]
                      [--llama-server PROGRAM] [--llama KIND ...]

Without --gguf, cpuserve and vLLM (n-grams) serve DIR, a Hugging Face directory, in bfloat16.
With it, cpuserve and llama-server serve FILE. llama-server is started once for each KIND of its
--spec-type, and with --draft once more with this draft model. cpuserve always has its default
settings; a second table has the gain over cpuserve without drafts.

Each round has new texts, so that no server knows them from earlier rounds: `code` asks for a
program with another name for its class, `json` for records under a JSON schema, `quote` for
a passage word for word, and `prose` for a story. `--text rename` asks for a program of about
300 lines with another name for its class; it needs `--context 8192`. All servers get the same chat
requests one after another, greedy, in the other order each round, and all others are suspended
meanwhile.
A rate counts the tokens after the first chunk. The tables have medians of the rates,
and of the ratios within the rounds.
Servers learn their costs in the first round, which does not count.
Nothing else may run on the machine. Run `install.sh vllm llama_server` first.
"""

import argparse
import json
import os
import random
import sys
from dataclasses import replace
from functools import partial

from run import KEY, PEERS, ServerEngine, table

from cpuserve.bench import programs
from cpuserve.bench.driver import CHAT, complete
from cpuserve.bench.server import private_flags, serve_command

LLAMA_SERVER = PEERS / "llama_server/build/bin/llama-server"
KINDS = ("ngram-simple", "ngram-map-k", "ngram-mod", "ngram-cache")
PLAIN = "cpuserve, no drafts"
NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
NAMES = ("Account", "Ledger", "Garden", "Engine", "Harbor", "Library", "Market", "Orchard")
FIELDS = ("amount", "balance", "weight", "height", "stock", "water", "distance", "speed")
PEOPLE = ("Mara", "Jonas", "Edith", "Pavel", "Ines", "Tomas", "Greta", "Anton")
THINGS = ("a lamp", "a red book", "a silver key", "a wooden boat", "a letter", "an old map")
PLACES = ("on the rock", "near the harbor", "in the tower", "behind the mill", "by the river")
DEEDS = ("found", "carried", "hid", "painted", "sold", "repaired", "forgot", "buried")
SCHEMA = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "minItems": 6,
            "maxItems": 6,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 12},
                    "deed": {"enum": list(DEEDS)},
                    "age": {"type": "integer", "minimum": 1, "maximum": 99},
                },
                "required": ["name", "deed", "age"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["people"],
    "additionalProperties": False,
}


def code(chance):
    """Return a request for a program with another name."""
    name, other = chance.sample(NAMES, 2)
    methods = "".join(
        f"""
    def add_{field}(self, {field}):
        if {field} <= 0:
            raise ValueError("{field} must be positive")
        self.{field} = self.{field} + {field}
        return self.{field}
"""
        for field in chance.sample(FIELDS, 4)
    )
    program = (
        f"class {name}:\n    def __init__(self, owner):\n        self.owner = owner\n{methods}"
    )
    return f"Repeat this program, with the name {other}:\n\n```python\n{program}```", {}


def sentences(chance, count):
    """Return sentences about people."""
    return " ".join(
        f"{chance.choice(PEOPLE)}, who was {chance.randrange(8, 90)}, {chance.choice(DEEDS)} "
        f"{chance.choice(THINGS)} {chance.choice(PLACES)}."
        for _ in range(count)
    )


def records(chance):
    """Return a request for records under a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "people", "schema": SCHEMA}}
    text = sentences(chance, 6)
    return f"Write the people in this text as JSON:\n\n{text}", {"response_format": form}


def quote(chance):
    """Return a request for a passage word for word."""
    return f"Repeat this text word for word:\n\n{sentences(chance, 12)}", {}


def prose(chance):
    """Return a request for a story."""
    who = " and ".join(chance.sample(PEOPLE, 2))
    return f"Write a long story about {who}, who {chance.choice(DEEDS)} something.", {}


def rename(chance):
    """Return a request for a long program with another name."""
    return programs.rename(chance), {}


USUAL = {"code": code, "json": records, "quote": quote, "prose": prose}
TEXTS = {**USUAL, "rename": rename}


async def rate(request, target, args):
    """Return the tokens per second after the first chunk of a response."""
    text, fields = request
    chat = replace(target, endpoint=CHAT)
    found = await complete(chat, text, args.output_tokens, ignore_eos=False, **fields)
    return found.decode_rate


def servers(args):
    """Start and yield the servers: cpuserve first."""
    model, port = args.gguf or args.dir, args.port
    sizes = ["--max-model-len", str(args.context), "--served-model-name", "m"]
    for name, more in (("cpuserve", []), (PLAIN, ["--speculate", "off"])):
        yield ServerEngine(
            name, serve_command([model, *private_flags(port, KEY), *sizes, *more]), port, "m"
        )
        port += 1
    if not args.gguf:
        command = [str(PEERS / "vllm/bin/vllm"), "serve", args.dir, "--host", "127.0.0.1"]
        command += ["--port", str(port), "--api-key", KEY, *sizes]
        env = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}",
        }
        drafts = ["--speculative-config", json.dumps(NGRAMS)]
        yield ServerEngine("vllm, n-grams", [*command, *drafts], port, "m", env)
        return
    kinds = {f"llama.cpp, {kind}": ["--spec-type", kind] for kind in args.llama}
    if args.draft:
        kinds["llama.cpp, draft model"] = ["--spec-type", "draft-simple", "-md", args.draft]
    for name, more in kinds.items():
        command = [args.llama_server, "-m", model, "-c", str(args.context), "--parallel", "1"]
        command += ["-t", str(args.threads), "--host", "127.0.0.1", "--port", str(port), "--jinja"]
        yield ServerEngine(name, [*command, "--api-key", KEY, *more], port, "m")
        port += 1


def measured(running, number, args):
    """Return {server: {text: rate}} of one round."""
    found = {server.name: {} for server in running}
    for name in args.text:
        request = TEXTS[name](random.Random(f"{name} {number}"))
        order = running if number % 2 else running[::-1]
        for server in order:
            found[server.name][name] = server.measure(args, partial(rate, request))
    return found


def main(argv=None):
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir")
    parser.add_argument("--gguf")
    parser.add_argument("--draft", help="a GGUF file of a smaller model for llama-server")
    parser.add_argument("--llama", nargs="*", default=KINDS, metavar="KIND")
    parser.add_argument("--llama-server", default=str(LLAMA_SERVER))
    parser.add_argument("--text", nargs="+", choices=TEXTS, default=list(USUAL))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output-tokens", type=int, default=320)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--port", type=int, default=8101, help="port of the first server")
    args = parser.parse_args(argv)
    samples, running = {}, []
    try:
        for server in servers(args):
            running.append(server)
            samples[server.name] = []
        for number in range(args.rounds + 1):
            for name, found in measured(running, number, args).items():
                print(json.dumps({"round": number, "engine": name, **found}), file=sys.stderr)
                if number:
                    samples[name].append(found)
    finally:
        for server in running:
            server.close()
    plain = samples.pop(PLAIN)
    table(samples)
    print()
    table({"cpuserve": samples["cpuserve"], PLAIN: plain})
    return 0


if __name__ == "__main__":
    sys.exit(main())
