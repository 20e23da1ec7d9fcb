"""Architectures of llama.cpp that cpuserve does not run, and similar models that it runs."""

from __future__ import annotations

# The model_type in transformers that can run the safetensors of the same model, but slowly.
THROUGH_TRANSFORMERS = {
    "bitnet": "bitnet",
    "bloom": "bloom",
    "dbrx": "dbrx",
    "exaone": "exaone",
    "exaone-moe": "exaone_moe",
    "gemma": "gemma",
    "gptj": "gptj",
    "jais2": "jais2",
    "llama4": "llama4",
    "mimo2": "mimo_v2_flash",
    "minicpm3": "minicpm3",
    "mpt": "mpt",
    "nemotron": "nemotron",
    "olmo": "olmo",
    "phi2": "phi",
    "phimoe": "phimoe",
    "starcoder": "gpt_bigcode",
}
_NO_ATTENTION = "no layer of it attends. Hybrids run: Falcon-H1, Granite 4 and Nemotron 3"
_DIFFUSION = "it generates by diffusion, not token by token. Qwen3 and Llama run"
_PICTURES = "it is for images or sound, and cpuserve reads texts. Gemma 3, Qwen3 and Qwen3.5 run"
_ENCODER = "its attention has biases by distance. EuroBERT and jina-embeddings v3 and v5 run"
_PAIR = "it is of an encoder-decoder. Decoders such as Qwen3 and encoders such as EuroBERT run"
REASONS = {
    **dict.fromkeys(("mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"), _NO_ATTENTION),
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), _DIFFUSION),
    **dict.fromkeys(
        ("clip", "chameleon", "cogvlm", "deepseek2-ocr", "hunyuan_vl", "paddleocr"), _PICTURES
    ),
    "wavtokenizer-dec": _PICTURES,
    "jina-bert-v2": _ENCODER,
    **dict.fromkeys(("t5", "t5encoder"), _PAIR),
    "neo-bert": "transformers has nothing to compare it with. ModernBERT and EuroBERT run",
    "chatglm": "of its kind, GLM-4 (glm4) runs",
    "deepseek": "of its kind, DeepSeek V2, V3 and V3.2 run",
    "glm-dsa": "of its kind, DeepSeek V3.2 and GLM-4.7-Flash run",
    "jamba": "of its kind, Falcon-H1, Granite 4 and Nemotron 3 run",
    "jais": "of its kind, GPT-2 runs",
    "qwen": "of its kind, Qwen2, Qwen3 and Qwen3.5 run",
    **dict.fromkeys(
        (
            *("arctic", "baichuan", "bailingmoe", "bailingmoe2", "codeshell", "deci", "grok"),
            *("grovemoe", "internlm2", "maincoder", "minicpm", "openelm", "orion"),
            *("pangu-embedded", "plamo", "plamo2", "plamo3", "plm", "refact", "smallthinker"),
            *("step35", "xverse"),
        ),
        "transformers has no such family. Dense models such as Llama and Qwen3, mixtures such as "
        "Qwen3-MoE, and hybrids such as Falcon-H1 run",
    ),
}


def why_refused(name: str) -> str | None:
    """Return why files of this architecture are refused; None if the architecture is unknown."""
    if name in THROUGH_TRANSFORMERS:
        return (
            "give the safetensors of the model, which run through transformers, slowly "
            "(pip install 'cpuserve[torch]')"
        )
    return REASONS.get(name)
