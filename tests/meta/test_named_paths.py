"""Source files that docstrings and comments name exist."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"(?<![\w./-])(?:\w[\w-]*/)*\w[\w-]*\.(?:py|cpp|h|js|css|md)\b(?!\.\w)")
CODE = {".py", ".cpp", ".h", ".js"}
# Files of other projects and of users, as their docstrings say, and names of projects.
OTHERS = {
    *("llama.cpp", "ik_llama.cpp", "bitnet.cpp", "deepseek.cpp", "pangu-embed.cpp", "arwkv7.cpp"),
    *("rwkv6qwen2.cpp", "orion.cpp", "ggml-common.h", "convert_hf_to_gguf.py", "docs/gguf.md"),
    *("convert_lora_to_gguf.py", "modeling_rwkv6.py", "integrations/mxfp4.py", "activations.py"),
    *("distributed/kv_events.py", "v1/metrics/loggers.py", "encoder.py", "json.py"),
    *("malloc.h", "asm/prctl.h", "arch/arm64/include/uapi/asm/hwcap.h"),
}


def texts(path):
    """Return the docstrings and comments of a file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return re.findall(r"//[^\n]*|/\*.*?\*/", source, re.S)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    docstrings = [text for node in nodes if (text := ast.get_docstring(node))]
    return docstrings + [token.string for token in tokens if token.type == tokenize.COMMENT]


def paths():
    """Return the paths of all files of the repository, and what each of them ends with."""
    ends = set()
    for folder in (
        "cpuserve",
        "csrc",
        "tests",
        "benchmarks",
        "docs",
        "cmake",
        "examples",
        "deploy",
    ):
        for path in (ROOT / folder).rglob("*"):
            parts = path.relative_to(ROOT).parts
            ends |= {"/".join(parts[at:]) for at in range(len(parts))}
    return ends | {path.name for path in ROOT.iterdir()}


@pytest.mark.parametrize("folder", ["cpuserve", "csrc", "benchmarks"])
def test_files_that_docstrings_and_comments_name_exist(folder):
    known = paths() | OTHERS
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in CODE
        for text in texts(path)
        for name in NAMED.findall(text)
        if name not in known
    ]
    assert not missing
