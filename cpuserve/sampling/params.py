"""SamplingParams: fields and defaults of vLLM, checked on creation, sent to the engine."""

from __future__ import annotations

from copy import deepcopy
from enum import Enum, IntEnum
from typing import Any

import msgspec

from cpuserve.base.errors import InvalidRequest
from cpuserve.sampling.chain import Chain, chain_of, check_samplers
from cpuserve.sampling.extra_args import known_extras
from cpuserve.sampling.fields import OF_SAMPLERS, SamplingFields, check_fields
from cpuserve.sampling.repetition import repetition_from
from cpuserve.sampling.structured import structured_from

MAX_SALT = 128
# A salt is a part of keys and file names, where these characters could make two salts equal.
NOT_IN_SALT = frozenset("@/\\\0")
SALT_RULE = "characters without @, /, \\ and NUL"
# The kinds of vectors that a request can ask an embedding model for:
#   ""           the embedding of the prompt, scaled to length 1; "plain" is not scaled
#   tokens       the vectors of all tokens; "unit_tokens" scales each to length 1
#   raw          the score of a reranker, before its activation
#   weights      a weight for each token (BGE-M3); "raw_weights" is before the activation
#   multi        a vector for each token (BGE-M3); "unit_multi" scales each to length 1
#   words        the sparse embedding of SPLADE, a value for each token id
VECTORS = (
    *("", "plain", "tokens", "unit_tokens", "raw"),
    *("weights", "raw_weights", "multi", "unit_multi", "words"),
)
GREEDY_BELOW = 1e-5  # below this temperature sampling is greedy


class SamplingType(IntEnum):
    """How tokens are chosen: the most likely one, at random, or at random from a seed."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


# The window of n-grams in vLLM, in tokens.
DEFAULT_WINDOW = 100


class SamplingParams(SamplingFields, omit_defaults=True, kw_only=True):
    """The sampling parameters of a request; fields.py lists them, with their types and limits.

    A list of None means an empty list, as in vLLM.

    csrc/kernels/table/sampling.h, "Sampling of one row", defines the arithmetic.
    A top_p of 0 keeps the most likely token, as in the API of OpenAI, llama.cpp and Ollama.
    The front end handles the `stop` strings, the engine all other parameters.
    `max_tokens` None means up to the context length.
    `logprobs`, `prompt_logprobs`: None = no logprobs, 0 = the logprob of each token,
      k = the logprobs of each token and of k alternatives.
    `logprob_token_ids`: the alternatives are these tokens in this order, if logprobs is not None.
    `bad_words`: texts that are not written; the front end sets `bad_word_ids`, their token ids.
      The last token of a word cannot be sampled when the output ends with the tokens before it.
    `label_ids`: tokens that the first generated token has as alternatives,
      with their logprobs, in place of the most likely tokens.
    `cache_salt`: only requests with the same salt share cached prefixes.
    `adapter`: the name of the LoRA adapter that changes the model for this request.
    `adapter_scale`: the factor for the weights that the adapter adds to the model.
    `structured_outputs`: the grammar that the text must match;
      the response ends where the grammar allows nothing more.
    `caller`: the client of a server; waiting requests
      and new grammars of several clients take turns.
    `vectors`: the kind of result of an embedding model or a reranker, one of VECTORS,
      or several of them joined by "+", which follow each other in the result.
    `truncate_prompt_tokens`: `LLM` keeps this number of tokens at the end of a prompt; -1 = as many
      as fit into the context with max_tokens.
    """

    def __post_init__(self) -> None:
        """Raise InvalidRequest, with the name of the parameter, for a value out of range."""
        try:
            self._complete()
            self._check_all()
        except TypeError:  # a number is compared with a text, for example
            raise _wrong_type(self) from None

    def _complete(self) -> None:
        """Replace values that mean the same as others, as in vLLM."""
        stop: object = self.stop
        if isinstance(stop, str):  # a single string is allowed
            self.stop = [stop]
        self.stop = self.stop or []
        self.stop_token_ids = self.stop_token_ids or []
        self.bad_words = self.bad_words or []
        if self.extra_args:
            fields, _ = known_extras(self.extra_args)
            for name, value in fields.items():
                setattr(self, name, value)
        if self.top_k == -1:
            self.top_k = 0
        for name, switch in OF_SAMPLERS.items():
            if not getattr(self, switch):
                setattr(self, name, None)
        if self.logit_bias and not all(type(key) is int for key in self.logit_bias):
            self.logit_bias = bias_by_id(self.logit_bias)

    def _check_all(self) -> None:
        check_fields(self)
        if self.ngram_size and (self.no_repeat_ngram_size or 0) > 0:
            msg = "ngram_size and no_repeat_ngram_size exclude each other: set one of them"
            raise InvalidRequest(msg, role="ngram_size")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            msg = f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})"
            raise InvalidRequest(msg, role="min_tokens")
        kinds = self.vectors.split("+")
        self._check("vectors", all(kind in VECTORS for kind in kinds), f"one of {VECTORS}")
        self._check_named()
        check_samplers(self)
        self._check("stop", all(self.stop), "non-empty strings")
        if not all(map(str.strip, self.bad_words)):
            msg = "bad_words has an empty word, or one of white space: omit it"
            raise InvalidRequest(msg, role="bad_words")
        repeats: object = self.repetition_detection
        if repeats is not None:
            self.repetition_detection = repetition_from(repeats)
        if not is_salt(self.cache_salt):  # a salt may be secret, so the error does not quote it
            msg = f"cache_salt must be 1 to {MAX_SALT} {SALT_RULE}"
            raise InvalidRequest(msg, role="cache_salt")
        structured: object = self.structured_outputs
        if isinstance(structured, dict):
            self.structured_outputs = structured_from(structured)

    @property
    def scored_ids(self) -> list[int]:
        """The tokens with logprobs that replace the alternatives of a generated token."""
        return [] if self.logprobs is None else self.logprob_token_ids or []

    @property
    def num_top(self) -> int | None:
        """The number of alternatives of each generated token; None = no logprobs."""
        return len(self.scored_ids) or self.logprobs

    @property
    def chain(self) -> Chain | None:
        """The samplers of llama.cpp that choose the tokens; None = the kernels choose them."""
        reports = bool(self.post_sampling_probs) and self.num_top is not None
        return chain_of(self, reports=reports)

    @property
    def penalty_window(self) -> int:
        """How many of the last tokens penalties count; -1 = all."""
        return -1 if self.repeat_last_n is None else self.repeat_last_n

    @property
    def banned_ngram_size(self) -> int:
        """How many tokens an n-gram has that may not occur twice in the output; 0 = any may."""
        return max(0, self.no_repeat_ngram_size or 0) or self.ngram_size or 0

    @property
    def banned_ngram_window(self) -> int:
        """How many of the last output tokens banned_ngram_size is about; -1 = all."""
        whole = (self.no_repeat_ngram_size or 0) > 0
        return -1 if whole else self.window_size or DEFAULT_WINDOW

    @property
    def ngram_field(self) -> str:
        """The field that banned_ngram_size comes from."""
        return "ngram_size" if self.ngram_size else "no_repeat_ngram_size"

    @property
    def exempt_ids(self) -> list[int]:
        """The ids of tokens that may complete an n-gram a second time."""
        return self.whitelist_token_ids or [] if self.banned_ngram_size else []

    @property
    def bars_tokens(self) -> bool:
        """Whether bans, biases, penalties or a grammar could exclude all tokens."""
        return bool(
            self.allowed_token_ids is not None
            or self.masks_tokens
            or self.logit_bias
            or self.bad_word_ids
            or self.banned_ngram_size
            or self.min_tokens
            or self.penalizes
        )

    @property
    def penalizes(self) -> bool:
        """Whether penalties depend on the tokens before."""
        return bool(
            self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        )

    @property
    def scale_key(self) -> str:
        """The suffix of the adapter's key, which `scale_key` makes from the scale."""
        return scale_key(self.adapter_scale)

    @property
    def masks_tokens(self) -> bool:
        """Whether a grammar decides which tokens may be sampled."""
        form = self.structured_outputs
        return form is not None and not form.later

    @property
    def num_logprobs(self) -> int | None:
        """`num_top`, under its name in vLLM."""
        return self.num_top

    @property
    def sampling_type(self) -> SamplingType:
        """How tokens are chosen."""
        if self.temperature < GREEDY_BELOW:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @staticmethod
    def from_optional(**fields: Any) -> SamplingParams:
        """Return parameters; a field that is None has its default value.

        The values of logit_bias are limited to -100 to 100, as in the API of OpenAI.

        Raises:
            InvalidRequest: a value is out of range.
        """
        given = {
            name: value
            for name, value in fields.items()
            if value is not None or name == "max_tokens"
        }
        if bias := given.get("logit_bias"):
            limited = bias_by_id(bias).items()
            given["logit_bias"] = {i: min(100.0, max(-100.0, value)) for i, value in limited}
        return SamplingParams(**given)

    def clone(self) -> SamplingParams:
        """Return a copy that shares nothing with these parameters."""
        return deepcopy(self)

    def _check_named(self) -> None:
        ids = self.logprob_token_ids
        if ids is None:
            return
        if self.logprobs is None:
            msg = "logprob_token_ids needs logprobs: set it"
            raise InvalidRequest(msg, role="logprob_token_ids")
        if self.post_sampling_probs:
            msg = "post_sampling_probs and logprob_token_ids exclude each other: omit one of them"
            raise InvalidRequest(msg, role="post_sampling_probs")
        if not ids or len(set(ids)) < len(ids):
            msg = "logprob_token_ids must have at least one token id, and each only once"
            raise InvalidRequest(msg, role="logprob_token_ids")

    def _check(self, name: str, ok: bool, want: str) -> None:
        if not ok:
            msg = f"{name} must be {want}, got {getattr(self, name)!r}"
            raise InvalidRequest(msg, role=name)


def bias_by_id(bias: dict[Any, float]) -> dict[int, float]:
    """Return logit_bias with token ids as its keys, which may be texts as in JSON.

    Raises:
        InvalidRequest: a key is not a token id.
    """
    try:
        return {int(key): value for key, value in bias.items()}
    except (TypeError, ValueError):
        bad = next(key for key in bias if not str(key).lstrip("-").isdigit())
        msg = f"logit_bias must have token ids as its keys, got {bad!r}"
        raise InvalidRequest(msg, role="logit_bias") from None


def _wrong_type(params: SamplingParams) -> InvalidRequest:
    """Return the error for the first field of a wrong type."""
    for each in msgspec.structs.fields(SamplingParams):
        value = getattr(params, each.name)
        try:
            if not isinstance(value, Enum):
                msgspec.convert(value, each.type)
        except msgspec.ValidationError as error:
            return InvalidRequest(f"{each.name} has a wrong type: {error}", role=each.name)
    return InvalidRequest("a sampling parameter has a value of a wrong type")


def scale_key(scale: float) -> str:
    """Return a suffix for an adapter's key: different scales may not share cached prefixes."""
    return "" if scale == 1.0 else f"*{scale}"


def is_salt(salt: str | None) -> bool:
    if salt is None:
        return True
    return 1 <= len(salt) <= MAX_SALT and not NOT_IN_SALT.intersection(salt)
