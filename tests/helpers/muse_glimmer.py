"""Muse Glimmer as transformers has it: the part for text, in no class of its own."""

from __future__ import annotations

import functools

from tests.helpers.text_class import text_class


@functools.cache
def text_model():
    """A class of transformers with the part for text and the output head."""
    from transformers.models.muse_glimmer import modeling_muse_glimmer as theirs

    def scaled(config, logits):
        cap = config.final_logit_softcapping
        return cap * (logits * config.output_multiplier / cap).tanh()

    return text_class(theirs, "MuseGlimmer", "MuseGlimmerForCausalLM", scaled)
