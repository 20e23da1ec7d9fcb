"""Loads the tokenizer and the chat template of an EngineConfig."""

from __future__ import annotations

from pathlib import Path

from cpuserve.base.errors import ModelError
from cpuserve.base.fault_points import fault
from cpuserve.loader.mapped import check_folder, read_small, regular_file
from cpuserve.tokenizer.chat import ChatTemplate
from cpuserve.tokenizer.directory import MAX_TEMPLATE_BYTES, check_files, find_tokenizer
from cpuserve.tokenizer.tokenizer import Tokenizer


def load_tokenizer(
    path: str, chat_template: str | None, parses_messages: bool = False
) -> tuple[Tokenizer, ChatTemplate]:
    """Return (tokenizer at `path`, chat template); chat_template = None: the model's template.

    parses_messages: texts of control tokens in messages become these tokens.

    Raises:
        ModelError: there is no tokenizer, or `chat_template` is a file that does not exist.
    """
    tokenizer = Tokenizer.load(Path(path))
    with tokenizer.unloaded_on_error():
        source, tool_source = tokenizer.chat_template, tokenizer.tool_template
        if chat_template is not None:
            source, tool_source = template_source(chat_template), None
        template = ChatTemplate(source, tokenizer, tool_source, parses_messages=parses_messages)
    return tokenizer, template


def check_tokenizer(given: str) -> None:
    """Raise a ModelError unless `given` is a file or a directory with a tokenizer; read nothing."""
    try:
        path = Path(given).expanduser()
        found = path.is_dir()
    except (OSError, RuntimeError) as error:  # the name is too long, or its ~user does not exist
        msg = f"tokenizer {given[:100]} cannot be read: {error}"
        raise ModelError(msg) from None
    if found:
        check_folder(path, "tokenizer")
    else:
        regular_file(path, "tokenizer")
    path = find_tokenizer(path)
    if path.is_dir():
        check_files(path)


def template_source(given: str) -> str:
    """Return a template that is given as text or as a file name; ModelError if it is unreadable."""
    if "{" in given:
        return given
    try:
        path = Path(given).expanduser()
        fault("template_file.read")
        path.stat()
        return read_small(path, "chat template", MAX_TEMPLATE_BYTES).decode("utf-8")
    except (OSError, ValueError, RuntimeError) as error:  # no ~user, no text, a null character
        msg = f"cannot read the chat template {given}: {error}"
        raise ModelError(msg) from None
