"""The part for text of a model of transformers that has no class of its own, as a class."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any


def text_class(
    theirs: ModuleType, prefix: str, name: str, scaled: Callable[[Any, Any], Any] | None = None
) -> type:
    """Return a class `name` with the part for text in the module `theirs`, and the output head.

    prefix: of the names of classes in `theirs`. scaled: makes the logits of (config, head(x)).
    """
    from torch import nn
    from transformers.modeling_outputs import CausalLMOutputWithPast

    model = getattr(theirs, f"{prefix}TextModel")

    class TextModel(getattr(theirs, f"{prefix}PreTrainedModel")):
        config_class = getattr(theirs, f"{prefix}TextConfig")

        def __init__(self, config):
            super().__init__(config)
            self.model = model(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids=None, **inputs):
            hidden = self.model(input_ids, use_cache=False, **inputs).last_hidden_state
            logits = self.lm_head(hidden)
            return CausalLMOutputWithPast(logits=scaled(self.config, logits) if scaled else logits)

    TextModel.__name__ = TextModel.__qualname__ = name
    return TextModel
