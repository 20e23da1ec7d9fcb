"""The part of a tokenizer that a chat template needs, without a vocabulary."""

from types import SimpleNamespace

from cpuserve.tokenizer.masks import Masks


def bare_tokens(**special_tokens):
    """Return a tokenizer with these texts as variables of templates, and no control tokens."""
    return SimpleNamespace(
        special_tokens=special_tokens, masks=Masks({}), prepare_masks=lambda: None, special_ids=()
    )
