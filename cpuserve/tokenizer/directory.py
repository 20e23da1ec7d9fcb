"""Tokenizers of Hugging Face model directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuserve.errors import ModelError
from cpuserve.loader.load import read_json, token_ids
from cpuserve.loader.mapped import read_small
from cpuserve.tokenizer.parts import (
    TURN_ENDS,
    Parts,
    Scheme,
    end_ids,
    guarded,
    special_ids_of,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

MAX_TOKENIZER_BYTES = 200_000_000
MAX_TEMPLATE_BYTES = 1_000_000
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def directory_parts(path: Path) -> Parts:
    """The tokenizer of a model directory; ModelError if it has none or it is broken."""
    settings = _settings(path)
    texts = _special_tokens(settings)
    if (path / "tokenizer.json").exists():
        core, add_bos = _from_json(path / "tokenizer.json"), False
    elif (path / "vocab.json").exists() and (path / "merges.txt").exists():
        core, add_bos = _from_vocab(path, texts), bool(settings.get("add_bos_token", False))
    else:
        msg = f"{path} holds no tokenizer.json and no vocab.json with merges.txt"
        raise ModelError(msg)
    special = special_ids_of(core)
    scheme, strips = _scheme(core)
    bos = texts.get("bos_token")
    return Parts(
        core=core,
        scheme=scheme,
        vocab_size=core.get_vocab_size(with_added_tokens=True),
        special_ids=special,
        bos_id=core.token_to_id(bos) if bos else None,
        eos_ids=_eos_ids(path, core, special, texts),
        special_tokens=texts,
        chat_template=_chat_template(path, settings),
        add_bos=add_bos,
        strips_leading_space=strips,
    )


def _settings(path: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json; only data, whatever class they name."""
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (path / name).exists():
            found = read_json(path / name, "tokenizer settings")
            merged.update({k: v for k, v in found.items() if v is not None})
    return merged


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Names to texts; a token is written as its text or as {"content": text, ...}."""
    found = {}
    for name in SPECIAL:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text:
            found[name] = text
    return found


def _from_json(path: Path) -> Core:
    from tokenizers import Tokenizer

    data = read_small(path, "tokenizer", MAX_TOKENIZER_BYTES)
    core = guarded(str(path), lambda: Tokenizer.from_buffer(data))
    # Training-time settings some files carry; a server never cuts or pads a prompt silently.
    core.no_truncation()
    core.no_padding()
    return core


def _from_vocab(path: Path, texts: dict[str, str]) -> Core:
    """GPT-2 style vocab.json and merges.txt (facebook/opt-*)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    from cpuserve.tokenizer.from_gguf import PreTokenizer, splitter

    vocab = read_json(path / "vocab.json", "vocabulary", MAX_TOKENIZER_BYTES)
    raw = read_small(path / "merges.txt", "merges", MAX_TOKENIZER_BYTES)
    lines = guarded_text(raw, path / "merges.txt").split("\n")
    rules = [line.partition(" ")[::2] for line in lines if line and not line.startswith("#version")]

    def build() -> Core:
        core = Tokenizer(models.BPE(vocab=vocab, merges=rules))
        core.pre_tokenizer = splitter(PreTokenizer())
        core.decoder = decoders.ByteLevel()
        core.add_special_tokens(
            [AddedToken(t, special=True, normalized=False) for t in dict.fromkeys(texts.values())]
        )
        return core

    return guarded(str(path), build)


def guarded_text(data: bytes, path: Path) -> str:
    """UTF-8 text of a file's bytes; ModelError if it is none."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        msg = f"{path} is not UTF-8 text"
        raise ModelError(msg) from error


def _scheme(core: Core) -> tuple[Scheme, bool]:
    """How tokens become bytes, and whether decoding drops the first space, from the decoder."""
    if core.decoder is None:
        return "plain", False
    state = json.loads(core.decoder.__getstate__())
    steps = state.get("decoders", [state])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return "byte_level", False
    if not kinds & {"ByteFallback", "Metaspace", "Replace"}:
        return "plain", False
    strips = any(
        (step.get("type") == "Strip" and step.get("start", 0) > 0)
        or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")
        for step in steps
    )
    return "byte_fallback", strips


def _eos_ids(
    path: Path, core: Core, special: frozenset[int], texts: dict[str, str]
) -> tuple[int, ...]:
    ids: list[int] = []
    if texts.get("eos_token"):
        found = core.token_to_id(texts["eos_token"])
        ids += [] if found is None else [found]
    for name in ("config.json", "generation_config.json"):
        if (path / name).exists():
            ids += token_ids(read_json(path / name, name).get("eos_token_id"))
    return tuple(dict.fromkeys(ids + end_ids(core, special, TURN_ENDS)))


def _chat_template(path: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja, else the one in the settings (the "default" of a list of named ones)."""
    file = path / "chat_template.jinja"
    if file.exists():
        return guarded_text(read_small(file, "chat template", MAX_TEMPLATE_BYTES), file) or None
    found = settings.get("chat_template")
    if found is None and (path / "chat_template.json").exists():
        found = read_json(path / "chat_template.json", "chat template").get("chat_template")
    if isinstance(found, list):
        named = [t for t in found if isinstance(t, dict) and t.get("name") == "default"]
        found = named[0].get("template") if named else None
    return found if isinstance(found, str) and found else None
