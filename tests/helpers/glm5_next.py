"""GLM-5.3-Flash without its part for images, which transformers has in no class of its own."""

from __future__ import annotations

import functools


@functools.cache
def text_model():
    """A class of transformers with the part for text and the output head."""
    from torch import nn
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.models.glm5_next import modeling_glm5_next as theirs

    class Glm5NextForCausalLM(theirs.Glm5NextPreTrainedModel):
        config_class = theirs.Glm5NextTextConfig

        def __init__(self, config):
            super().__init__(config)
            self.model = theirs.Glm5NextTextModel(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids):
            hidden = self.model(input_ids, use_cache=False).last_hidden_state
            return CausalLMOutputWithPast(logits=self.lm_head(hidden))

    return Glm5NextForCausalLM
