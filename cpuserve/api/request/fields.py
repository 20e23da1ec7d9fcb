"""Refuse fields that are not implemented, where ignoring them would change the answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from cpuserve.serving.call import unsupported


class Refused(NamedTuple):
    """When a field is refused, and what a client may do.

    None, false and empty values count as not set, because clients send them. off: further values
    that change nothing. sets: values that change something although they look like none.
    """

    instead: str = "omit it"
    off: tuple[Any, ...] = ()
    sets: tuple[Any, ...] = ()


_AS_SCHEMA = Refused("send structured_outputs", sets=({},))  # which matches any JSON, but no text
# The fields of OpenAI's API, vLLM's, llama.cpp's and Ollama's for the generation of text that this
# server does not have. tests/api/test_api_fields.py compares it with what they document.
REFUSED = {
    # OpenAI's
    "audio": Refused(),
    "moderation": Refused(),
    "prediction": Refused(),
    "suffix": Refused(),
    "web_search_options": Refused(sets=({},)),  # it switches a search on
    # vLLM's
    "bad_words": Refused(),
    "chat_template": Refused(),
    "documents": Refused(),
    "guided_choice": Refused("send structured_outputs"),
    "guided_grammar": Refused("send structured_outputs"),
    "guided_json": _AS_SCHEMA,
    "guided_regex": Refused("send structured_outputs"),
    "guided_whitespace_pattern": Refused(),
    "include_reasoning": Refused("omit it, or set it to true", off=(True,), sets=(False,)),
    "length_penalty": Refused(off=(1,)),
    "logits_processors": Refused(),
    "logprob_token_ids": Refused(),
    "prompt_embeds": Refused(),
    "repetition_detection": Refused(),
    "return_prompt_text": Refused(),
    "thinking_token_budget": Refused(off=(-1,)),
    "truncate_prompt_tokens": Refused(),
    "use_beam_search": Refused(),
    "vllm_xargs": Refused(),
    # llama.cpp's
    "adaptive_target": Refused(off=(-1,)),
    "dry_multiplier": Refused(off=(0,)),
    "dynatemp_range": Refused(off=(0,)),
    "grammar": Refused('send structured_outputs: {"grammar": ...}, which may be in GBNF'),
    "image_data": Refused(),
    "json_schema": Refused('send structured_outputs: {"json": ...}'),
    "lora": Refused("name the adapter as the model"),
    "min_keep": Refused(off=(0,)),
    "mirostat": Refused(off=(0,)),
    "n_cmpl": Refused("send n", off=(1,)),
    "n_indent": Refused(off=(0,)),
    "n_probs": Refused("send logprobs", off=(0,)),
    "penalize_nl": Refused(),
    "post_sampling_probs": Refused(),
    "reasoning_budget_tokens": Refused(off=(-1,)),
    "response_fields": Refused(),
    "return_tokens": Refused("send return_token_ids"),
    "samplers": Refused(),
    "t_max_predict_ms": Refused(off=(0, -1)),
    "tfs_z": Refused(off=(1,)),
    "thinking_budget_tokens": Refused(off=(-1,)),
    "top_n_sigma": Refused(off=(-1, 0)),
    "typical_p": Refused(off=(1,)),
    "xtc_probability": Refused(off=(0,)),
    # Ollama's
    "context": Refused("send messages"),
    "images": Refused(),
    "penalize_newline": Refused("omit it, or set it to true", off=(True,), sets=(False,)),
    "template": Refused(),
}
_OTHER = Refused()


def check_repeat_last_n(value: int | None, *penalties: tuple[float | None, float]) -> None:
    """Raise InvalidRequest if penalties should count fewer tokens than they do here: all.

    penalties: the value of each, and the one that switches it off.
    """
    if value in (None, -1) or all(given in (None, off) for given, off in penalties):
        return
    msg = (
        "repeat_last_n is not supported, because penalties count all tokens: omit it, or set it to "
        "-1 (0 would mean no penalties: omit them)"
    )
    raise unsupported(msg, "repeat_last_n")


def check_unset(request: object, names: Iterable[str] = REFUSED) -> None:
    """Raise InvalidRequest if one of these unsupported fields is set; it names the first."""
    if (name := first_set(request, names)) is not None:
        told = REFUSED.get(name, _OTHER)
        msg = f"{name} is not supported yet: {told.instead}"
        raise unsupported(msg, name)


def first_set(request: object, names: Iterable[str]) -> str | None:
    """Return the first of these fields that is set, None if none is; see Refused."""
    return next((name for name in names if _is_set(name, getattr(request, name, None))), None)


def _is_set(name: str, value: object) -> bool:
    if value is None:
        return False
    told = REFUSED.get(name, _OTHER)
    if value in told.sets:
        return True
    return value is not False and value not in ("", [], {}, *told.off)
