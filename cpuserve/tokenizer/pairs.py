"""Pairs of texts as rerankers read them: with an encoder's separators, or in a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cpuserve.base.errors import InvalidRequest, ModelError
from cpuserve.tokenizer.cut import Cut
from cpuserve.tokenizer.tokenizer import Tokenizer

# The prompt of the model card of Qwen3-Reranker, and its default instruction.
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
QUESTION = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
NO_INSTRUCTION = "this model takes no instruction: omit it"


def answer_id(path: Path, text: str) -> int:
    """Return the id of `text` in the tokenizer at `path`; ModelError if it is not one token."""
    ids = Tokenizer.load(path).encode(text, add_special_tokens=False)
    if len(ids) != 1:
        msg = f"{path}: {text!r} is no token of this model, so it is no reranker that answers it"
        raise ModelError(msg)
    return ids[0]


@dataclass(frozen=True)
class PairEncoder:
    """Encodes pairs of texts to token ids.

    asks: the prompt is a question about the pair (Qwen3-Reranker).
    type_ids: the number added to the ids of tokens of type 1, which selects the second copy
      of the word embeddings of BERT; 0 for a model without token types.
    mask: masks the control texts in a question about a pair; None = the tokenizer's own masks.
    """

    tokenizer: Tokenizer
    asks: bool
    type_ids: int = 0
    mask: Callable[[str], str] | None = None

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, info: Mapping[str, object], mask: Callable[[str], str]
    ) -> PairEncoder:
        """Return the encoder of a reranker; info: the report of its engine."""
        types = info.get("type_ids")
        type_ids = types if isinstance(types, int) else 0
        return cls(tokenizer, info.get("asks") is True, type_ids, mask)

    def encode(
        self,
        query: str,
        document: str,
        instruction: str | None = None,
        cut: Cut | None = None,
    ) -> list[int]:
        """Return the token ids of a pair; cut: how its texts are cut, None = they are not cut.

        Raises:
            InvalidRequest: the model takes no instruction, or a text is not valid Unicode.
        """
        if not self.asks:
            if instruction is not None:
                raise InvalidRequest(NO_INSTRUCTION, role="instruction")
            return self._joined(query, document, cut)
        text = QUESTION.format(
            instruction=instruction or INSTRUCTION, query=query, document=document
        )
        before, behind = self._around
        ids = self.tokenizer.encode_masked((self.mask or self.tokenizer.masks.mask)(text))
        if cut is not None:
            around = len(before) + len(behind)
            if cut.most < around:
                msg = f"the prompt around a pair has {around} tokens: keep at least as many"
                raise InvalidRequest(msg, role="truncate_prompt_tokens")
            ids = Cut(cut.most - around, cut.left).apply(ids)
        return [*before, *ids, *behind]

    def encode_single(self, text: str, cut: Cut | None = None) -> list[int]:
        """Return the token ids of one text; cut: how the text is cut, None = it is not cut.

        Raises:
            InvalidRequest: the model reads pairs only, or the text is not valid Unicode.
        """
        if self.asks:
            msg = "this model scores pairs of texts: give two texts"
            raise InvalidRequest(msg, role="prompt")
        most, left = cut or (None, False)
        return self.tokenizer.encode(text, most=most, left=left)

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        encode = self.tokenizer.encode
        return encode(BEFORE, add_special_tokens=False), encode(BEHIND, add_special_tokens=False)

    def _joined(self, query: str, document: str, cut: Cut | None) -> list[int]:
        most, left = cut or (None, False)
        ids, types = self.tokenizer.encode_pair(query, document, most, left=left)
        if not self.type_ids:
            return ids
        return [i + self.type_ids * kind for i, kind in zip(ids, types, strict=True)]
