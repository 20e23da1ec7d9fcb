"""The render routes of vLLM, which return the tokens of prompts without generating responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.serving.calls.call import unsupported

if TYPE_CHECKING:
    from cpuserve.api.request.context import RequestContext
    from cpuserve.serving.generation.generate import Generation

# Sampling parameters that the server sets itself, so clients should not see them.
_OWN = ("caller", "adapter", "adapter_scale", "bad_word_ids", "label_ids", "vectors")


class TokenizedPrompt(msgspec.Struct):
    """The token ids of a prompt, and the sampling parameters of its response.

    sampling_params: only parameters that differ from the defaults of vLLM.
    features: always null, because prompts have no images or sounds.
    prompt_text: the text of the prompt, set only with `return_prompt_text`.
    """

    request_id: str
    model: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    features: None = None
    token_offsets: None = None
    prompt_text: str | msgspec.UnsetType = msgspec.UNSET


def refuse_offsets(body: object) -> None:
    """Raise InvalidRequest if the request sets return_token_offsets, which is not supported."""
    if getattr(body, "return_token_offsets", None):
        msg = "return_token_offsets is not supported yet: omit it"
        raise unsupported(msg, "return_token_offsets")


def rendered(
    request: RequestContext, generation: Generation, *, with_text: bool = False
) -> list[TokenizedPrompt]:
    """Return the prompts of a prepared generation that never runs."""
    found: dict[int, TokenizedPrompt] = {}
    for sequence in generation.sequences:
        prompt = sequence.prompt
        if id(prompt) in found:  # the n responses to a prompt share its object
            continue
        params = msgspec.to_builtins(sequence.params)
        shown = {name: value for name, value in params.items() if name not in _OWN}
        made = TokenizedPrompt(request.id, request.served.name, prompt.ids, shown)
        if with_text:
            made.prompt_text = prompt_text(request, generation)
        found[id(prompt)] = made
    return list(found.values())


def prompt_text(request: RequestContext, generation: Generation) -> str:
    """Return the prompt as the template rendered it; without a template, decode its tokens."""
    prompt = generation.sequences[0].prompt
    if prompt.rendered is not None:
        text = prompt.rendered + prompt.opening
        return request.context.get_tokenizer().masks.unmask(text)
    return request.context.get_tokenizer().decode(prompt.ids, skip_special_tokens=False)
