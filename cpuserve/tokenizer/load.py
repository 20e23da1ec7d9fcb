"""A model's tokenizer and chat template, as an EngineConfig names them."""

from __future__ import annotations

from pathlib import Path

from cpuserve.errors import ModelError
from cpuserve.tokenizer.chat import ChatTemplate
from cpuserve.tokenizer.tokenizer import Tokenizer


def load_tokenizer(path: str, chat_template: str | None) -> tuple[Tokenizer, ChatTemplate]:
    """The tokenizer at `path`, and the template given, or else the model's.

    Raises:
        ModelError: there is no tokenizer, or no file of the template's name.
    """
    tokenizer = Tokenizer.load(Path(path))
    source = tokenizer.chat_template if chat_template is None else template_source(chat_template)
    return tokenizer, ChatTemplate(source, tokenizer)


def template_source(given: str) -> str:
    """The template itself, or what the file of that name holds; ModelError without the file."""
    if "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        msg = f"cannot read the chat template {given}: {error}"
        raise ModelError(msg) from None
