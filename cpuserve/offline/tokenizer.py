"""OfflineTokenizer: the tokenizer of `LLM`, with the methods of transformers that programs call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cpuserve.base.errors import InvalidRequest

if TYPE_CHECKING:
    from cpuserve.tokenizer.chat import ChatTemplate
    from cpuserve.tokenizer.tokenizer import Tokenizer


class OfflineTokenizer:
    """Encodes and decodes as the tokenizers of transformers do, and renders conversations.

    Arguments of transformers that are not listed here are refused (TypeError).
    Lists are Python lists, because this package has no torch: return_tensors is refused.
    Other attributes, such as `token_bytes`, are those of cpuserve's Tokenizer.
    """

    is_fast = True
    padding_side = truncation_side = "right"

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, name: str, max_model_len: int
    ) -> None:
        self._own = tokenizer
        self._template = template
        self.name_or_path = name
        self.model_max_length = max_model_len

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._own, name)

    def __len__(self) -> int:
        return self._own.vocab_size

    # --- text to ids --------------------------------------------------------------------------

    def __call__(
        self,
        text: str | Sequence[str],
        text_pair: str | Sequence[str] | None = None,
        *,
        add_special_tokens: bool = True,
        padding: bool = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_attention_mask: bool = True,
        return_tensors: None = None,
    ) -> dict[str, Any]:
        """Return {"input_ids", "attention_mask"} of a text, or of each text of a list.

        truncation: whether texts are cut to max_length tokens (None: the context length).

        Raises:
            InvalidRequest: an argument is not supported.
        """
        if return_tensors is not None or padding:
            msg = "return_tensors and padding are not supported: the result has lists of ids"
            raise InvalidRequest(msg, param="return_tensors")
        one = isinstance(text, str)
        most = (max_length or self.model_max_length) if truncation else None
        ids = [self._ids(a, b, add_special_tokens, most) for a, b in _pairs(text, text_pair)]
        found: dict[str, Any] = {"input_ids": ids[0] if one else ids}
        if return_attention_mask:
            masks = [[1] * len(row) for row in ids]
            found["attention_mask"] = masks[0] if one else masks
        return found

    def encode(
        self,
        text: str,
        text_pair: str | None = None,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
    ) -> list[int]:
        """Return the token ids of a text, or of a pair of texts; see `__call__`."""
        most = (max_length or self.model_max_length) if truncation else None
        return self._ids(text, text_pair, add_special_tokens, most)

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """Return the tokens of a text, as written in the vocabulary."""
        return self.convert_ids_to_tokens(self.encode(text, None, add_special_tokens))

    def _ids(self, text: str, pair: str | None, special: bool, most: int | None) -> list[int]:
        if pair is None:
            return self._own.encode(text, special, most=most)
        if not special:
            msg = "a pair of texts always has its special tokens: omit add_special_tokens"
            raise InvalidRequest(msg, param="add_special_tokens")
        return self._own.encode_pair(text, pair, most)[0]

    # --- ids to text --------------------------------------------------------------------------

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids; as in transformers, special tokens are not left out."""
        ids = [token_ids] if isinstance(token_ids, int) else [int(i) for i in token_ids]
        return self._own.decode(ids, skip_special_tokens)

    def batch_decode(
        self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        """Return the text of each list of token ids."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the token of each id, as written in the vocabulary."""
        return [self._own.token_text(i) for i in ids]

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """Return the id of a token, or the ids of several; None for a token that is unknown."""
        if isinstance(tokens, str):
            return self._own.token_id(tokens)
        return [self._own.token_id(token) for token in tokens]

    # --- vocabulary ---------------------------------------------------------------------------

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token."""
        return {self._own.token_text(i): i for i in range(self._own.vocab_size)}

    @cached_property
    def special_tokens_map(self) -> dict[str, str]:
        """The special tokens by their keys, such as "eos_token"."""
        return dict(self._own.special_tokens)

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of all special tokens."""
        return sorted(self._own.special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        """All special tokens."""
        return self.convert_ids_to_tokens(self.all_special_ids)

    @property
    def eos_token(self) -> str | None:
        """The token that ends a text; None = the checkpoint has none."""
        return self.special_tokens_map.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id of eos_token."""
        return self._special_id("eos_token")

    @property
    def bos_token(self) -> str | None:
        """The token that begins a text; None = the checkpoint has none."""
        return self.special_tokens_map.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        """The id of bos_token."""
        return self._special_id("bos_token")

    @property
    def pad_token(self) -> str | None:
        """The token that fills rows; None = the checkpoint has none."""
        return self.special_tokens_map.get("pad_token")

    @property
    def pad_token_id(self) -> int | None:
        """The id of pad_token."""
        return self._special_id("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        """The id of the token for unknown text; None = the checkpoint has none."""
        return self._special_id("unk_token")

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self._own.token_id(token)

    # --- conversations ------------------------------------------------------------------------

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return the prompt of a conversation as token ids, or with tokenize=False as text.

        For a list of conversations, the result is a list of prompts.
        return_dict: return {"input_ids", "attention_mask"} instead of token ids.
        kwargs: variables of the template, such as enable_thinking.

        Raises:
            InvalidRequest: the conversation or the template cannot be rendered.
        """
        from cpuserve.tokenizer.chat import ChatTemplate

        if continue_final_message:
            msg = "continue_final_message is only possible in LLM.chat: omit it"
            raise InvalidRequest(msg, param="continue_final_message")
        template = self._template
        if chat_template is not None:
            template = ChatTemplate(chat_template, self._own)
        several = bool(conversation) and not isinstance(conversation[0], dict)
        texts = [
            template.render(
                [*each], tools=tools, add_generation_prompt=add_generation_prompt, **kwargs
            )
            for each in (conversation if several else [conversation])
        ]
        if not tokenize:
            return texts if several else texts[0]
        found = self(texts if several else texts[0], add_special_tokens=False)
        return found if return_dict else found["input_ids"]


def _pairs(
    text: str | Sequence[str], text_pair: str | Sequence[str] | None
) -> list[tuple[str, str | None]]:
    """Return each text with the text that follows it, or None."""
    firsts = [text] if isinstance(text, str) else list(text)
    if text_pair is None:
        return [(first, None) for first in firsts]
    seconds = [text_pair] if isinstance(text_pair, str) else list(text_pair)
    if len(firsts) != len(seconds):
        msg = f"text has {len(firsts)} texts, and text_pair has {len(seconds)}"
        raise InvalidRequest(msg, param="text_pair")
    return list(zip(firsts, seconds, strict=True))
