"""The types of prompts of `LLM`, called as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict


class _Options(TypedDict, total=False):
    """The members that a prompt may have besides its text or its tokens.

    cache_salt: only prompts with the same salt share cached prefixes.
    multi_modal_data: {"image": a picture, or a list of them}; see `LLM.chat` for their types.
    mm_processor_kwargs: settings of the preprocessing of these pictures.
    """

    cache_salt: str
    multi_modal_data: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]


class TextPrompt(_Options):
    """A prompt as text."""

    prompt: str


class _Text(TypedDict, total=False):
    prompt: str


class TokensPrompt(_Options, _Text):
    """A prompt as token ids. prompt: its text, which only the output shows."""

    prompt_token_ids: list[int]


SingletonPrompt: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt
PromptType: TypeAlias = SingletonPrompt

__all__ = ["PromptType", "SingletonPrompt", "TextPrompt", "TokensPrompt"]
