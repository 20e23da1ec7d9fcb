"""The bodies of POST /tokenize and /detokenize, and of their responses."""

from __future__ import annotations

from typing import Any

import msgspec

from cpuserve.api.request.fields import with_refused

# The alternative fields with a text or messages; a request must have exactly one of them.
INPUTS = ("prompt", "messages", "content")


@with_refused("tokenize")
class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of POST /tokenize: either `prompt` or `messages`.

    content, add_special: the llama.cpp fields for `prompt` and `add_special_tokens`;
      with `content`, special tokens are added only if the request asks for them.
    with_pieces: return tokens as objects with their texts, as in llama.cpp.
    """

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    add_special: bool | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class TokenPiece(msgspec.Struct):
    """A token id and its text, or its bytes if they are not valid UTF-8."""

    id: int
    piece: str | list[int]


class TokenizeResponse(msgspec.Struct):
    """The token ids of a text, and their strings if `return_token_strs` is set.

    tokens: token ids, or a TokenPiece per token if `with_pieces` is set.
    """

    count: int
    max_model_len: int
    tokens: list[int | TokenPiece]
    token_strs: list[str] | None


class TokenizerInfo(msgspec.Struct, omit_defaults=True):
    """The body of GET /tokenizer_info: fields of tokenizer_config.json, with tokens as texts."""

    tokenizer_class: str
    model_max_length: int
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None


class DetokenizeResponse(msgspec.Struct):
    """The text of the tokens, once in the vLLM field and once in the llama.cpp field."""

    prompt: str
    content: str


def words(request: TokenizeRequest) -> dict[str, str]:
    """Return {"prompt": the request field with the text or the messages}."""
    given = [name for name in INPUTS if getattr(request, name) is not None]
    return {"prompt": given[0]} if given else {}
