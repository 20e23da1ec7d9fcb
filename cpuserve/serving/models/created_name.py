"""CreatedName: the name of a created model, which shares the engine of another model."""

from __future__ import annotations

import asyncio
from copy import copy
from typing import TYPE_CHECKING

from cpuserve.serving.tools.learn import LearnedFormat, learn_format
from cpuserve.tokenizer.chat import ChatTemplate

if TYPE_CHECKING:
    from cpuserve.serving.models.context import ModelContext
    from cpuserve.serving.models.preset import Preset
    from cpuserve.tokenizer.tokenizer import Tokenizer


class CreatedName:
    """The name of a created model, and its context made from the context of another model.

    adapter: the LoRA adapter of the requests; None = no adapter.
    """

    def __init__(self, name: str, preset: Preset, adapter: str | None = None) -> None:
        self.name = name
        self.adapter = adapter
        self._preset = preset
        self._texts: tuple[Tokenizer, ChatTemplate, LearnedFormat] | None = None

    def view(self, base: ModelContext) -> ModelContext:
        """Return the context of the created model, which shares the engine and limits of `base`.

        Until `prepared` has run, the returned context has the chat template of `base`.
        """
        made, preset = copy(base), self._preset
        made.model_names = (self.name,)
        made.any_name = False
        made.started = preset.created
        made.preset = preset
        made.default_sampling = {**base.default_sampling, **preset.sampling}
        if self._texts is not None and self._texts[0] is base.tokenizer:
            tokenizer, made.chat_template, made.learned_format = self._texts
            made.shown_ids = made.learned_format.shown_ids(tokenizer)
            made.own_marks = made.learned_format.own_marks(tokenizer)
        return made

    async def prepared(self, base: ModelContext) -> ModelContext:
        """Return the context after its template has been read; `base` is loaded."""
        source, tokenizer = self._preset.template, base.get_tokenizer()
        if source is not None and (self._texts is None or self._texts[0] is not tokenizer):
            parses = base.get_chat_template().parses_messages
            template = ChatTemplate(source, tokenizer, parses_messages=parses)
            learned = await asyncio.to_thread(learn_format, template)
            self._texts = tokenizer, template, learned
        return self.view(base)
