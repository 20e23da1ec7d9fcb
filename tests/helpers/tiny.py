"""Tiny random checkpoints for all tests: one call makes a model once, in a fraction of a second.

    from tests.helpers.tiny import tiny_model
    path = tiny_model("qwen2")                      # a directory: config.json, tokenizer.json, ...
    path = tiny_model("llama", dtype="bfloat16", num_hidden_layers=1)

Weights are noise. The tokenizer is a real byte-level BPE of 384 tokens with a ChatML template (ids
0-2: <|endoftext|>, <|im_start|>, <|im_end|>); the vocabulary of the model has 512 ids. Torch is not
needed.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import shutil
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

_MAKE_MODEL = Path(__file__).parents[2] / "benchmarks" / "make_model.py"


@functools.cache
def make_model_module() -> ModuleType:
    """benchmarks/make_model.py, loaded by path: benchmarks is no installed package."""
    spec = importlib.util.spec_from_file_location("make_model", _MAKE_MODEL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# One family for each op, and for each way to use an op, in the programs of all families.
KINDS = (
    "llama",
    "llama3",
    "mistral",
    "ministral3",
    "hunyuan",
    "apertus",
    "laguna",
    "qwen2",
    "qwen3",
    "qwen3-moe",
    "qwen3-next",
    "granite4-hybrid",
    "falcon-h1",
    "lfm2",
    "lfm3",
    "olmo-hybrid",
    "kimi-linear",
    "glm5-next",
    "qwen4-exp",
    "hy-v4",
    "rwkv6",
    "rwkv7",
    "minimax",
    "mixtral",
    "mellum",
    "deepseek-v2",
    "deepseek-v3",
    "deepseek-v4",
    "glm4-moe-lite",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4-moe",
    "gpt-oss",
    "olmo2",
    "opt",
    "opt-350m",
    "dbrx",
    "diffllama",
    "xglm",
    "persimmon",
)
# A few families with different layers, for slow tests of facts that hold for all families.
SAMPLE = ("llama", "qwen3-next", "deepseek-v2", "gemma3n", "gpt-oss")
FAMILIES = (
    *KINDS,
    "qwen3.5",
    "qwen3.5-moe",
    "smollm3",
    "granite",
    "granite-moe",
    "granite4",
    "lfm2-moe",
    "phi3",
    "glm4",
    "glm4-moe",
    "qwen2-moe",
    "stablelm",
    "cohere",
    "cohere2",
    "gpt-neox",
    "starcoder2",
    "olmo3",
    "olmoe",
    "gpt2",
    "falcon",
    "falcon-40b",
    "arcee",
    "nemotron-h",
    "nemotron-h-moe",
    "seed-oss",
    "exaone",
    "exaone4",
    "ernie4.5",
    "ernie4.5-moe",
    "afmoe",
    "dots1",
    "minimax-m2",
    "minimax-m3",
    "hunyuan-moe",
    "cohere2-moe",
    "deepseek-v3.2",
    "mistral4",
    "vaultgemma",
    "granite-swa",
    *("gemma", "glm", "helium", "ministral", "phi"),
    *("gpt-bigcode", "gptj", "gpt-neo"),
    *("olmo", "flex-olmo", "nemotron", "jais2", "nanochat", "bitnet", "bloom", "mpt"),
    *("bamba", "exaone-moe", "codegen", "minicpm3", "solar-open"),
    *("mamba", "falcon-mamba", "mamba2", "jamba", "zamba", "zamba2", "arwkv7", "rwkv6qwen2"),
    *("glm-moe-dsa", "phimoe", "flint"),
    *(
        "llama4",
        "kolibri1",
        "sarvam",
        "sarvam-mla",
        "step3.5",
        "mimo-v2",
        "longcat",
        "bailing-hybrid",
    ),
    *("axk2", "gemma4-unified", "aria", "lara-mini", "cohere-compass", "biogpt", "openai-gpt"),
    "ctrl",
    *("apertus1.5", "internlm3", "iquestcoder", "modernbert-decoder"),
    *("hy-v3", "youtu", "axk1", "cwm", "granite-moe-swa", "hyperclovax", "muse-glimmer"),
    "molmo2",
)

# Families that transformers does not have. tests/models/test_published_code.py compares their
# logits with those of a relative.
RELATIVES = (
    *("minicpm", "internlm2", "ling", "ling2"),
    *("baichuan", "baichuan2", "baichuan2-13b"),
)

# Families that give vectors and no text.
ENCODERS = (
    *("bert", "xlm-roberta", "modernbert", "nomic-bert", "embeddinggemma"),
    *("gte", "jina-v3", "eurobert", "distilbert"),
    *("deberta", "mpnet", "t5", "umt5"),
)


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """The config.json of a tiny model of `family`; overrides are its keys."""
    return {**make_model_module().SHAPES[f"tiny-{family}"], **overrides}


def tiny_model(family: str, *, dtype: str = "float32", seed: int = 0, **overrides: Any) -> Path:
    """Directory of a tiny random checkpoint; the same arguments give the same directory.

    dtype: "float32", "bfloat16" or "float16"; overrides: keys of config.json.
    """
    key = json.dumps([family, dtype, seed, overrides], sort_keys=True)
    return _made(key, family, dtype, seed)


def copy_of(source: Path, prefix: str) -> Path:
    """A copy of a checkpoint beside it, in a new directory whose name begins with `prefix`."""
    path = Path(tempfile.mkdtemp(dir=source.parent, prefix=prefix)) / "model"
    shutil.copytree(source, path)
    return path


@functools.cache
def tiny_end_ids(family: str) -> frozenset[int]:
    """Return the ids that end a response of tiny_model(family), from the files the engine reads."""
    from cpuserve.loader.load import read_config
    from cpuserve.models import spec_from_config
    from cpuserve.tokenizer.ends import end_ids

    path = tiny_model(family)
    spec = spec_from_config(read_config(path))
    return end_ids(spec.eos_ids, path, spec.vocab)


@functools.cache
def _made(key: str, family: str, dtype: str, seed: int) -> Path:
    overrides = json.loads(key)[3]
    directory = _root() / f"{len(list(_root().iterdir()))}-{family}"
    config = tiny_config(family, torch_dtype=dtype, **overrides)
    return make_model_module().make_model(config, directory, seed)


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="cpuserve-tiny-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root
