"""Loads the tokenizer of a Hugging Face model directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from cpuserve.base.errors import ModelError
from cpuserve.base.registry import imported
from cpuserve.loader.load import find_model, read_json
from cpuserve.loader.mapped import most_values, read_small
from cpuserve.loader.pooling import lowers_case, prompts_of
from cpuserve.models import FAMILIES, add_plugins
from cpuserve.tokenizer.parts import (
    Parts,
    Scheme,
    byte_level_bytes,
    check_vocabulary,
    guarded,
    special_ids_of,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

    from cpuserve.tokenizer.vocabulary import Vocabulary

MAX_TOKENIZER_BYTES = 200_000_000
MAX_VALUES = 1 << 22  # XLM-V's million of pieces has 2.7 million values
MAX_LINES = 1 << 21  # of merges and of tokens: Gemma has 514,906 merges
MAX_TEMPLATE_BYTES = 1_000_000
TEMPLATE_FOLDER = "additional_chat_templates"
MAX_TEMPLATES = 64
PIECES = "tokenizer.model"  # of SentencePiece
ADDED = "added_tokens.json"  # {text: id}, of directories of 2023 and before
# Reads the tokenizer in a file that only some families have; settings: as in `_settings`.
TokenizerReader: TypeAlias = Callable[[Path, Mapping[str, Any]], "Core"]
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def directory_parts(path: Path) -> Parts:
    """Return the tokenizer of a model directory; ModelError if there is none or it is broken."""
    settings = _settings(path)
    texts = _special_tokens(settings)
    check_files(path)
    if (path / "tokenizer.json").exists():
        core, add_bos = _from_json(path / "tokenizer.json"), False
    elif (own := _file_of_a_family(path)) is not None:
        file, place = own
        read: TokenizerReader = imported(place)
        core, add_bos = read(file, settings), False
    elif _has_pair(path):
        core, add_bos = _from_vocab(path, texts), bool(settings.get("add_bos_token", False))
    else:
        core, found = _from_pieces(path, settings)
        texts, add_bos = {**found, **texts}, bool(settings.get("add_bos_token", True))
    if not (path / "tokenizer.json").exists():
        guarded(str(path), lambda: check_vocabulary(core))
    if lowers_case(path):
        _lower_case(core)
    scheme, strips = _scheme(core)
    bos = texts.get("bos_token")
    templates = _chat_templates(path, settings)
    return Parts(
        core=core,
        scheme=scheme,
        vocab_size=core.get_vocab_size(with_added_tokens=True),
        special_ids=special_ids_of(core),
        bos_id=core.token_to_id(bos) if bos else None,
        special_tokens=texts,
        chat_template=templates.get("default"),
        tool_template=templates.get("tool_use"),
        add_bos=add_bos,
        strips_leading_space=strips,
        prompts=prompts_of(path),
    )


def _lower_case(core: Core) -> None:
    """Let a tokenizer write texts in lower case before all other steps."""
    from tokenizers.normalizers import Lowercase, Sequence

    core.normalizer = Sequence([Lowercase(), *([core.normalizer] if core.normalizer else [])])


def why_limited(path: Path) -> str | None:
    """Return why texts of a directory's tokenizer must be encoded in a process with limits.

    None = its tokenizer.json is plain (plain.py), or it has none: the other files have fixed rules.

    Raises:
        ModelError: the file cannot be read, or is too large.
    """
    if not (path / "tokenizer.json").exists():
        return None
    from cpuserve.tokenizer.plain import why_not_plain

    return why_not_plain(read_values(path / "tokenizer.json", "tokenizer"))


def read_values(path: Path, what: str) -> bytes:
    """Return the content of a JSON file of a tokenizer; ModelError if it has too many values."""
    data = read_small(path, what, MAX_TOKENIZER_BYTES)
    _check_number(path, what, most_values(data), MAX_VALUES, "values")
    return data


def read_lines(path: Path, what: str) -> bytes:
    """Return the content of a file of a tokenizer; ModelError if it has too many lines."""
    data = read_small(path, what, MAX_TOKENIZER_BYTES)
    _check_number(path, what, data.count(b"\n") + data.count(b"\r"), MAX_LINES, "lines")
    return data


def _check_number(path: Path, what: str, number: int, most: int, of: str) -> None:
    if number > most:
        msg = f"{what} {path} has {number} {of}; at most {most} are accepted"
        raise ModelError(msg)


def find_tokenizer(path: Path) -> Path:
    """Return the directory or GGUF file with the tokenizer of `path`; ModelError if unsupported.

    If a directory has files of a tokenizer and a GGUF file, the files of the tokenizer are used.
    """
    path = path.expanduser()
    return path if path.is_dir() and _has_files(path) else find_model(path)


def _has_files(path: Path) -> bool:
    whole = any((path / name).exists() for name in ("tokenizer.json", PIECES))
    return _has_pair(path) or whole or _file_of_a_family(path) is not None


def _has_pair(path: Path) -> bool:
    return (path / "vocab.json").exists() and (path / "merges.txt").exists()


def _file_of_a_family(path: Path) -> tuple[Path, str] | None:
    """Return the tokenizer file in a directory that some family has, and what reads it; or None."""
    for name, place in FAMILIES.tokenizer.files.items():
        if (file := min(path.glob(name), default=None)) is not None:
            return file, place
    return None


def check_files(path: Path) -> None:
    """Raise a ModelError if directory `path` has no tokenizer; reads no file."""
    if not _has_files(path):
        add_plugins()
    if not _has_files(path):
        of_families = ", no ".join(FAMILIES.tokenizer.files)
        msg = (
            f"{path} holds no tokenizer.json, no vocab.json with merges.txt, no {of_families} "
            f"and no {PIECES}"
        )
        raise ModelError(msg)


def special_tokens(path: Path) -> dict[str, str]:
    """Return the special tokens of a model directory: {"eos_token": text, ...}."""
    return _special_tokens(_settings(path))


def piece_ids(path: Path) -> dict[str, int]:
    """Return {text: id} of a directory with a tokenizer.model, which may have added tokens."""
    return _read_pieces(path, _settings(path)).numbered()


def _settings(path: Path) -> dict[str, Any]:
    """Return special_tokens_map.json updated by tokenizer_config.json.

    The tokenizer class in the settings is not loaded.
    """
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (path / name).exists():
            found = read_json(path / name, "tokenizer settings")
            merged.update({k: v for k, v in found.items() if v is not None})
    return merged


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Return {name: text} of the tokens; a setting is the text or {"content": text, ...}."""
    found = {}
    for name in SPECIAL:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text:
            found[name] = text
    return found


def _from_json(path: Path) -> Core:
    from tokenizers import Tokenizer

    data = read_values(path, "tokenizer")
    core = guarded(str(path), lambda: Tokenizer.from_buffer(data))
    # Some files contain settings from training, but a server must not truncate or pad prompts.
    core.no_truncation()
    core.no_padding()
    return core


def read_vocab(path: Path) -> dict[str, Any]:
    """Return {text: id} of the vocab.json in a directory; ModelError if it is broken."""
    read_values(path / "vocab.json", "vocabulary")  # counts its values
    return read_json(path / "vocab.json", "vocabulary", MAX_TOKENIZER_BYTES)


def _from_vocab(path: Path, texts: dict[str, str]) -> Core:
    """Return the tokenizer of vocab.json and merges.txt in the style of GPT-2 (facebook/opt-*)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    from cpuserve.tokenizer.splits import PreTokenizer, splitter

    vocab = read_vocab(path)
    raw = read_lines(path / "merges.txt", "merges")
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


def _from_pieces(path: Path, settings: dict[str, Any]) -> tuple[Core, dict[str, str]]:
    """Return the tokenizer of a model of SentencePiece, and the special tokens in it."""
    import tokenizers  # noqa: F401  (before the vocabulary is read, see gguf_parts)

    from cpuserve.tokenizer.pieces import by_pieces

    vocab = _read_pieces(path, settings)
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token"}
    texts = {names[n]: vocab.tokens[i] for n, i in vocab.ids.items() if n in names}
    return guarded(str(path / PIECES), lambda: by_pieces(vocab)), texts


def _read_pieces(path: Path, settings: dict[str, Any]) -> Vocabulary:
    """Return the vocabulary of the tokenizer.model in a directory, with the added tokens."""
    from cpuserve.tokenizer.pieces import read_pieces
    from cpuserve.tokenizer.ranks import control_tokens

    older = _older_added(path, settings)
    data = read_small(path / PIECES, "vocabulary", MAX_TOKENIZER_BYTES)

    def read() -> Vocabulary:
        vocab = read_pieces(data, {**older, **dict(control_tokens(settings))}.items())
        return replace(vocab, prefix_once=settings.get("legacy") is False)

    return guarded(str(path / PIECES), read)


def _older_added(path: Path, settings: dict[str, Any]) -> dict[int, tuple[str, bool]]:
    """Return {id: (text, whether it is special)} of added_tokens.json; {} if there is none."""
    if not (path / ADDED).exists():
        return {}
    more = settings.get("additional_special_tokens")
    special = {*_special_tokens(settings).values()}
    for entry in more if isinstance(more, list) else ():
        special.add(str(entry.get("content") if isinstance(entry, dict) else entry))
    listed = read_json(path / ADDED, "added tokens")
    return {i: (text, text in special) for text, i in listed.items() if type(i) is int and i >= 0}


def guarded_text(data: bytes, path: Path) -> str:
    """Return `data`, the content of file `path`, decoded; ModelError if it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        msg = f"{path} is not UTF-8 text"
        raise ModelError(msg) from error


def _scheme(core: Core) -> tuple[Scheme, bool]:
    """Return (byte scheme, whether decoding drops the first space) of a tokenizer.

    The vocabulary decides whether its tokens are bytes, because files that were saved again or
    converted may have the decoder of SentencePiece, or none, beside a byte-level vocabulary.
    """
    kinds = {step.get("type") for step in _steps(core.decoder)}
    if _has_byte_tokens(core, decodes="ByteLevel" in kinds):
        return "byte_level", False
    if not kinds & {"ByteFallback", "Metaspace", "Replace", "ByteLevel"}:
        return "plain", False
    strips = any(
        (step.get("type") == "Strip" and step.get("start", 0) > 0)
        or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")
        for step in _steps(core.decoder)
    )
    return "byte_fallback", strips


def _has_byte_tokens(core: Core, *, decodes: bool) -> bool:
    """Return whether each character of a token stands for a byte; decodes: the decoder says so.

    The vocabularies of Gemma have all 256 characters of the alphabet too, but also U+2581,
    the space of SentencePiece, which the alphabet of bytes lacks.
    """
    space = core.token_to_id("\u2581")
    if space is not None and space not in core.get_added_tokens_decoder():
        return False
    splits = [*_steps(core.pre_tokenizer), *_steps(core.normalizer)]
    if decodes or any(step.get("type") == "ByteLevel" for step in splits):
        return True
    is_bpe = type(core.model).__name__ == "BPE"
    return is_bpe and all(core.token_to_id(char) is not None for char in byte_level_bytes())


def _steps(part: Any) -> list[dict[str, Any]]:
    """Return the steps of a part of a tokenizer, such as its decoder; [] if there is no part."""
    found, left = [], [] if part is None else [json.loads(part.__getstate__())]
    while left:
        step = left.pop()
        found.append(step)
        for inner in ("decoders", "pretokenizers", "normalizers"):
            left += step.get(inner) or []
    return found


def _chat_templates(path: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name ("default", "tool_use"), where transformers stores them.

    chat_template.jinja is "default"; a file in TEMPLATE_FOLDER counts under its own name.
    The templates in the settings are added only if there is no chat_template.jinja.
    """
    files = {"default": path / "chat_template.jinja"}
    with suppress(OSError):
        found = sorted((path / TEMPLATE_FOLDER).glob("*.jinja"))
        files.update({file.stem: file for file in found[:MAX_TEMPLATES]})
    texts = {
        name: guarded_text(read_small(file, "chat template", MAX_TEMPLATE_BYTES), file)
        for name, file in files.items()
        if file.exists()
    }
    older = {} if "default" in texts else _templates_in_settings(path, settings)
    return {name: text for name, text in {**older, **texts}.items() if text}


def _templates_in_settings(path: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return the templates in tokenizer_config.json or chat_template.json, by name.

    A single template without a name is "default". If several have one name, the first counts.
    """
    given = settings.get("chat_template")
    if given is None and (path / "chat_template.json").exists():
        given = read_json(path / "chat_template.json", "chat template").get("chat_template")
    if isinstance(given, list):
        named = [t for t in given if isinstance(t, dict) and isinstance(t.get("name"), str)]
        given = {t["name"]: t.get("template") for t in reversed(named)}
    elif not isinstance(given, dict):
        given = {"default": given}
    return {name: text for name, text in given.items() if isinstance(text, str)}
