"""The tokenizer of scripted models: a small byte-level BPE that needs no model files."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from cpuserve.tokenizer.parts import Parts
from cpuserve.tokenizer.tokenizer import Tokenizer

VOCAB_SIZE = 4096
_SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
_SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# The tokens of scripted models are learned from this text.
# Tests may compare numbers of tokens, so do not change the text.
_SAMPLE = """
The weather in Paris is mild today, with a light wind from the west and some rain in the evening.
There are many people who would like to know how long it will take, and which of them should go
first. This is the answer to your question: you can use the function to read the file, then write
the result of the search into a new file. Please try again later, because the server was not able
to find what you asked for. I think that we should look at the code before we make any changes to
it. When the test has passed, the user will see a message that says what has been done so far.
Every time that something goes wrong, there must be a reason, and the reason must be given in words
that everyone understands. Let me check the name of the city, the number of items, the date, the
time and the price. The model returns a list of tools and the value of each argument. Here is a
short summary of the conversation: the user wants to book a table for two people on Friday at seven.
Could you tell me more about the project, its history and the people behind it? Of course. It was
started in the year 2024 by a small group of friends, who were looking for a better way to work.
They did not have much money, but they had good ideas, and they never stopped learning from others.
You are a helpful assistant. Be kind, be brief, and do not make things up when you do not know.
{"name": "get_weather", "arguments": {"location": "Paris", "unit": "celsius", "days": 3}}
{"type": "object", "properties": {"path": {"type": "string", "description": "The path of a file"},
"query": {"type": "string"}, "content": {"type": "string"}}, "required": ["path", "query"]}
def main(items: list[str]) -> None: return [item for item in items if item is not None]
<tool_call> </tool_call> <think> </think> system user assistant tool tools
"""


def trained(texts: Iterable[str]) -> Tokenizer:
    """Return a BPE tokenizer trained on `texts`; it can encode any text."""
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models, pre_tokenizers, trainers

    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    special = frozenset(range(len(_SPECIAL_TOKENS)))  # the trainer assigns the first ids to them
    size = core.get_vocab_size(with_added_tokens=True)
    return Tokenizer(Parts(core, "byte_level", size, special, special_tokens=_SPECIAL))


@functools.cache
def scripted_tokenizer() -> Tokenizer:
    """Return the tokenizer of scripted models."""
    return trained([_SAMPLE])


def end_id(tokenizer: Tokenizer) -> int:
    """Return the id of the token that ends a response."""
    return tokenizer.encode("<|im_end|>", add_special_tokens=False)[0]
