"""The purposes of embeddings that clients send as input_type, and the prompts for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cpuserve.base.errors import InvalidRequest

if TYPE_CHECKING:
    from cpuserve.serving.models.context import ModelContext

# For each input_type, the possible keys of its prompt in the configuration of a checkpoint.
# The first key that the checkpoint has is used.
INPUT_TYPES = {
    "search_query": ("search_query", "query", "retrieval.query"),
    "search_document": ("search_document", "document", "passage", "retrieval.passage"),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering", "separation"),
}
_DOCUMENT = ("document", "passage", "search_document", "retrieval.passage")
# The values of Voyage and NVIDIA as well.
ANY_INPUT_TYPES = {
    **INPUT_TYPES,
    "query": ("query", "search_query", "retrieval.query"),
    "document": _DOCUMENT,
    "passage": _DOCUMENT,
}


def prompt_for(
    input_type: str | None, context: ModelContext, known: Mapping[str, tuple[str, ...]]
) -> str | None:
    """Return the checkpoint's prompt name for an input_type; None = its default prompt, if any."""
    if input_type is None:
        return None
    if input_type not in known:
        msg = f"input_type must be one of {', '.join(known)}, got {input_type[:40]!r}"
        raise InvalidRequest(msg, param="input_type")
    prompts = context.get_tokenizer().prompts
    found = next((name for name in known[input_type] if name in prompts), None)
    if found is None and any(prompts):
        offered = ", ".join(name for name in prompts if name)
        msg = f"input_type {input_type}: this model has prompts for {offered}"
        raise InvalidRequest(msg, param="input_type")
    return found
