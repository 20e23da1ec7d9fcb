#!/usr/bin/env python3
"""Runs all comparisons of one model with run.py; prints one table per comparison.

usage: suite.py DIR FILE.gguf ... [--only NAME ...] [options of run.py]

DIR is a Hugging Face directory; the files are GGUF files of the same model, one per type.
The comparison "bf16" measures cpuserve and vLLM on DIR, and llama.cpp on the BF16 file if there
is one. For each file of another type: cpuserve, llama.cpp and OpenVINO on that file. "w8a8":
cpuserve on DIR with --quantization w8a8, compared with llama.cpp and OpenVINO on the Q8_0 file.
"""

import argparse
import re
import sys
from pathlib import Path

import run

FULL_PRECISION = {"BF16", "F16", "F32"}


def type_of(path):
    """Return the type in a GGUF file's name, such as Q4_0 in model.Q4_0.gguf or model-Q4_0.gguf."""
    found = re.search(r"[.-]([A-Za-z]+\d+(_\w+)?)\.gguf$", Path(path).name)
    if not found:
        raise SystemExit(f"{path}: its name does not end with its type, as in model.Q4_0.gguf")
    return found[1].upper()


def comparisons(directory, files):
    """Return {name of a comparison: arguments of run.py}."""
    by_type = {type_of(file): file for file in files}
    plain = next((by_type[t] for t in ("BF16", "F16") if t in by_type), None)
    found = {"bf16": [directory, "--peers", "vllm"]}
    if plain:
        found["bf16"] += ["llama", "--from-dir", "--gguf", plain]
    for name, file in by_type.items():
        if name not in FULL_PRECISION:
            found[name] = [directory, "--gguf", file, "--peers", "llama", "openvino"]
    if "Q8_0" in by_type:
        more = ["--from-dir", "--own=--quantization=w8a8", "--peers", "llama", "openvino"]
        found["w8a8"] = [directory, "--gguf", by_type["Q8_0"], *more]
    return found


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir")
    parser.add_argument("files", nargs="*")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    args, more = parser.parse_known_args(argv)
    found = comparisons(args.dir, args.files)
    unknown = set(args.only or ()) - set(found)
    if unknown:
        raise SystemExit(f"no comparison {unknown.pop()!r}; available: {', '.join(found)}")
    failed = []
    for name in args.only or found:
        print(f"\n## {name}\n", flush=True)
        try:
            run.main([*found[name], *more])
        except (SystemExit, Exception) as error:  # the others may take an hour, so continue
            print(f"failed: {error}", flush=True)
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
