"""An Api whose model reads pictures, in the way of SmolVLM, with a scripted engine."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Core

from cpuserve.media.kinds import KindRules
from cpuserve.media.sources import SourceRules
from cpuserve.serving.media.reader import MediaRules
from cpuserve.serving.models.details import ModelDetails
from cpuserve.tokenizer.chat import ChatTemplate
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.api.fakes import Api
from tests.api.tools import says
from tests.helpers.drawn import write_processor
from tests.helpers.tiny import copy_of, tiny_model

# The template of SmolVLM, with ends of turns that the tokenizer has.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{message['role'] | capitalize}}"
    "{% if message['content'] is string %}{{ ': ' + message['content'] }}"
    "{% else %}{% if message['content'][0]['type'] == 'image' %}{{':'}}"
    "{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
IMAGE = "<image>"
LENGTH = 8192


@functools.cache
def folder(**processor: Any) -> Path:
    """A tiny checkpoint with the tokens and the files of SmolVLM."""
    path = copy_of(tiny_model("llama"), "sees")
    core = Core.from_file(str(path / "tokenizer.json"))
    names = [IMAGE, "<fake_token_around_image>", "<global-img>"]
    names += [f"<row_{y}_col_{x}>" for y in range(1, 7) for x in range(1, 7)]
    core.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    core.save(str(path / "tokenizer.json"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    config.pop("added_tokens_decoder", None)
    config["chat_template"] = TEMPLATE
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "chat_template.jinja").unlink(missing_ok=True)
    write_processor(path, **processor)
    return path


@functools.cache
def tokenizer() -> Tokenizer:
    """The tokenizer of `folder`."""
    return Tokenizer.load(folder())


def write_seeing_model(path: Path, *, side: int, merge: int) -> Any:
    """Write a random SmolVLM with the tokenizer of `folder`; return the model of transformers."""
    from tests.helpers.pictures import write_tower_model  # imports torch

    name = "SmolVLMForConditionalGeneration"
    theirs = write_tower_model(name, path, side=side, merge=merge, vocab=448)
    theirs.config.image_token_id = theirs.model.image_token_id = tokenizer().token_id(IMAGE)
    for file in folder().glob("tokenizer*"):
        shutil.copy(file, path)
    return theirs


def write_served_model(path: Path) -> Seeing:
    """Write a random SmolVLM with tiles of 64 x 64 pixels; each becomes 4 rows."""
    theirs = write_seeing_model(path, side=8, merge=4)
    settings = path / "preprocessor_config.json"
    found = json.loads(settings.read_text())
    settings.write_text(json.dumps({**found, "size": {"longest_edge": 256}, "resample": 1}))
    return Seeing(path, theirs)


@dataclass(frozen=True, slots=True)
class Seeing:
    """A checkpoint that reads pictures, and the model of transformers with the same weights."""

    path: Path
    theirs: Any

    def answer(self, parts: list[Any], most: int) -> tuple[list[int], list[int]]:
        """The prompt and the greedy response of transformers. parts: texts and images of Pillow."""
        import torch

        ids, inputs = self._inputs(parts, generates=True)
        count = ids.shape[1]
        with torch.inference_mode():
            for _ in range(most):
                last = self.theirs(input_ids=ids, **inputs).logits[0, -1]
                ids = torch.cat([ids, last.argmax().reshape(1, 1)], dim=1)
        return ids[0, :count].tolist(), ids[0, count:].tolist()

    def embedding(self, parts: list[Any]) -> tuple[list[int], Any]:
        """The prompt, and the vector of its last token with length 1, as transformers has them."""
        import torch

        ids, inputs = self._inputs(parts, generates=False)
        with torch.inference_mode():
            last = self.theirs.model(input_ids=ids, **inputs).last_hidden_state[0, -1]
        return ids[0].tolist(), torch.nn.functional.normalize(last, dim=0).numpy()

    def _inputs(self, parts: list[Any], *, generates: bool) -> tuple[Any, dict[str, Any]]:
        """The token ids and the other inputs of the model of transformers."""
        from transformers import PreTrainedTokenizerFast
        from transformers.models.idefics3.image_processing_pil_idefics3 import (
            Idefics3ImageProcessorPil,
        )
        from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

        from tests.helpers.pictures import DEVIATION, MEAN

        processor = Idefics3Processor(
            Idefics3ImageProcessorPil(
                size={"longest_edge": 256},
                max_image_size={"longest_edge": 64},
                resample=1,
                image_mean=MEAN,
                image_std=DEVIATION,
            ),
            PreTrainedTokenizerFast(tokenizer_file=str(folder() / "tokenizer.json")),
            image_seq_len=4,
            chat_template=TEMPLATE,
        )
        shown = [
            {"type": "text", "text": each} if isinstance(each, str) else {"type": "image"}
            for each in parts
        ]
        text = processor.apply_chat_template(
            [{"role": "user", "content": shown}], add_generation_prompt=generates, tokenize=False
        )
        images = [each for each in parts if not isinstance(each, str)]
        given = processor(
            text=text, images=images or None, add_special_tokens=False, return_tensors="pt"
        )
        ids = given.pop("input_ids")
        given.pop("attention_mask")
        return ids, given


def picture_api(
    answer: str = "Fine.",
    *,
    template: str = TEMPLATE,
    sources: SourceRules | None = None,
    others: Mapping[str, KindRules] | None = None,
    **rules: Any,
) -> Api:
    """An Api whose model reads pictures. rules: the members of KindRules.

    others: the rules of other kinds of media.
    """
    api = Api(says(answer))
    api.engine.info.update(kv_tokens=LENGTH, max_model_len=LENGTH, media_rows={"image": 1024})
    context = api.context
    context.max_model_len = LENGTH
    context.details = ModelDetails(path=str(folder()))
    kinds = {"image": KindRules(**rules), **(others or {})}
    context.media_rules = MediaRules(kinds, sources or SourceRules())
    context.set_ready(tokenizer(), ChatTemplate(template, tokenizer()))
    assert context.media is not None
    return api


def prompt_of(api: Api, which: int = -1) -> str:
    """The text of a prompt that the engine got, with all special tokens."""
    ids, _ = api.engine.asked[which]
    return tokenizer().decode(ids, skip_special_tokens=False)
