"""The tables of `cpuserve models --supported`: families, formats and kernels.

docs/models.md has the tables of families and formats. The rows come from the registries of both.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from importlib import import_module

# Families that share the architecture name of another family in GGUF files;
# other metadata of the file decides which family it is.
SAME_FILES = {
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "GraniteMoeSharedForCausalLM": "granitemoe",
    "DeepseekV2ForCausalLM": "deepseek2",
    "Glm4MoeLiteForCausalLM": "deepseek2",
    "Olmo3ForCausalLM": "olmo2",
    "RobertaModel": "bert",
    "XLMRobertaModel": "bert",
}
ROWS = {
    "bf16": "bf16",
    "f32": "fp32",
    "q8g32": "int8, one scale for 32 values",
    "q8g128": "int8, one scale for 128 values",
    "q8g256": "int8, one scale for 256 values",
    "q8row": "int8, one scale for a row",
}


def families() -> list[list[str]]:
    """Return a row per architecture: its name, a description, and its names in GGUF files."""
    from cpuserve.loader.gguf.archs.table import ARCHS
    from cpuserve.models import CLASSIFIERS, MASKED, MODELS, RERANKERS, TAGGERS, TEXT_PARTS

    rows = [["architecture", "what sets it apart", "in GGUF files"]]
    for name in MODELS.names():
        archs = [arch for arch, found in ARCHS.items() if found.family == name]
        archs += [SAME_FILES[name]] if name in SAME_FILES else []
        rows.append([name, _sentence(MODELS.get(name)), ", ".join(archs)])
    rows += [[name, f"only its part for text runs, as {_parts(name)}", ""] for name in TEXT_PARTS]
    what = "labels texts, or ranks them if it has one label"
    rows += [[name, f"{what}: {part} and its head", ""] for name, part in RERANKERS.items()]
    for what, heads in (
        ("labels texts", CLASSIFIERS),
        ("labels each token", TAGGERS),
        ("computes sparse embeddings (SPLADE)", MASKED),
    ):
        rows += [[name, f"{what}: {part} and its head", ""] for name, part in heads.items()]
    return rows


def _parts(name: str) -> str:
    """Return the architecture of the text part of a model for images and text, or several."""
    from cpuserve.models.text_parts import text_architectures

    *others, last = text_architectures(name)
    return f"{', '.join(others)} or {last}" if others else last


def formats() -> list[list[str]]:
    """Return a row per format of safetensors files: its quant_method and a description."""
    from cpuserve.quant.registry import BUILTIN

    rows = [["quant_method", "what is read"]]
    for name, place in BUILTIN.items():
        if name != "gguf":
            shown = "none" if name == "dense" else name
            rows.append([shown, _sentence(import_module(place.partition(":")[0]))])
    return rows


def types() -> list[list[str]]:
    """Return a row per GGUF type: its name, its weight kind, and the format of activations."""
    from cpuserve.program.row_formats import ACT_FORMAT, CONVERTED_KIND
    from cpuserve.quant.gguf.blocks import QUANTIZED
    from cpuserve.quant.gguf.converted import CONVERTED
    from cpuserve.quant.gguf.sizes import DECODED
    from cpuserve.quant.stored import QUANTIZED_KINDS

    rows = [["GGUF type", "weight kind", "activations"]]
    for dtype, source in QUANTIZED.items():
        kind = QUANTIZED_KINDS[source]
        rows.append([dtype, f"codes kept, in weight kind {kind}", ROWS[ACT_FORMAT[kind]]])
    rows += [
        [dtype, f"converted to {how.to} while loading", ""] for dtype, how in CONVERTED.items()
    ]
    rows += [[dtype, f"converted to {CONVERTED_KIND} while loading", ""] for dtype in DECODED]
    return rows


def levels() -> list[list[str]]:
    """Return a row per kernel: its name, and for each ISA level the level that provides it."""
    from cpuserve.platforms.cpu import CpuPlatform

    platform = CpuPlatform()
    names = platform.host().isa_levels
    tables = [platform.kernels(level) for level in names]
    kernels = tables[0] if tables else {}
    return [["kernel", *names]] + [[k, *(table[k] for table in tables)] for k in kernels]


def page() -> str:
    """Return Markdown with the tables that are the same on every machine."""
    return "\n\n".join("\n".join(markdown(rows)) for rows in (families(), formats(), types()))


def _sentence(described: object) -> str:
    """Return the first paragraph of a docstring, without the text from "Source:" on."""
    paragraph = (inspect.getdoc(described) or "").split("\n\n")[0].replace("\n", " ")
    return re.sub(r" ?Source:.*", "", paragraph)


def markdown(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table; the first row is the header."""
    head, *body = rows
    for cells in (head, ["---"] * len(head), *body):
        yield f"| {' | '.join(cells)} |"
