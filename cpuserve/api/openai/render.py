"""Prompts as the model reads them, without a response: the render routes of vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.serving.call import unsupported

if TYPE_CHECKING:
    from cpuserve.api.request.context import RequestContext
    from cpuserve.serving.generate import Generation

# Parameters that the server sets, and that clients do not know.
_OWN = ("caller", "adapter", "adapter_scale", "bad_word_ids", "label_ids", "vectors")


class TokenizedPrompt(msgspec.Struct):
    """The token ids of a prompt, and how its response would be sampled.

    sampling_params: the ones that differ from the defaults of vLLM.
    features: null, because prompts are texts.
    prompt_text: only with `return_prompt_text`.
    """

    request_id: str
    model: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    features: None = None
    token_offsets: None = None
    prompt_text: str | msgspec.UnsetType = msgspec.UNSET


def refuse_offsets(asked: object) -> None:
    """Raise InvalidRequest if the request asks for the places of the tokens in the text."""
    if getattr(asked, "return_token_offsets", None):
        msg = "return_token_offsets is not supported yet: omit it"
        raise unsupported(msg, "return_token_offsets")


def rendered(
    received: RequestContext, generation: Generation, *, with_text: bool = False
) -> list[TokenizedPrompt]:
    """Return each prompt of a generation that does not run."""
    found: dict[int, TokenizedPrompt] = {}
    for sequence in generation.sequences:
        prompt = sequence.prompt
        if id(prompt) in found:  # one of n responses to it
            continue
        params = msgspec.to_builtins(sequence.params)
        shown = {name: value for name, value in params.items() if name not in _OWN}
        made = TokenizedPrompt(received.id, received.served.name, prompt.ids, shown)
        if with_text:
            made.prompt_text = prompt_text(received, generation)
        found[id(prompt)] = made
    return list(found.values())


def prompt_text(received: RequestContext, generation: Generation) -> str:
    """Return the text of a prompt as the template wrote it, or of the tokens that were kept."""
    prompt = generation.sequences[0].prompt
    if prompt.rendered is not None:
        return prompt.rendered + prompt.opening
    return received.context.get_tokenizer().decode(prompt.ids, skip_special_tokens=False)
