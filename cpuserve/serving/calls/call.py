"""GenerateCall: a request to a model, independent of the dialect.

A dialect's schema.py makes the call from its own fields.
`prompts.py`, `chat_prompt.py` and `params.py` check the call,
so all dialects have the same error messages. None means that the client did not set the field.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from cpuserve.base.errors import InvalidRequest
from cpuserve.core.media import MediaItem
from cpuserve.media.kinds import SeenItem
from cpuserve.sampling.beams import BeamRules
from cpuserve.sampling.fields import RequestFields
from cpuserve.sampling.structured import InputGrammar
from cpuserve.serving.callers.allowance import Allowance
from cpuserve.serving.calls.line_limits import LineRules
from cpuserve.serving.calls.tool_catalog import ToolSearch
from cpuserve.serving.decisions.labels import Labels
from cpuserve.serving.decisions.questions import Decisions
from cpuserve.tokenizer.conversation import ConversationMessage

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096
MAX_ID_LIST = 1024
MAX_PROMPTS = 1024
NO_LIMIT = 2**31 - 1  # as max_tokens: up to the end of the context, instead of the default


def thinking_variables(on: bool) -> dict[str, Any]:
    """Return the template variables that switch thinking on or off; a template reads one of them.

    Templates of Qwen and GLM read enable_thinking, templates of DeepSeek and Granite thinking.
    """
    return {"enable_thinking": on, "thinking": on}


# Template variables that keep the thoughts of earlier turns in the prompt;
# a template reads one of them, or none. Without these variables the prompt loses thoughts
# when the user writes again, and all tokens after the first thought are computed again.
KEEPS_THOUGHTS = {"preserve_thinking": True, "clear_thinking": False}


@dataclass(frozen=True, slots=True)
class Prompt:
    """The token ids of a prompt, and its text if it was sent as text.

    thinks: whether the prompt ends within a thought.
    continues: whether the prompt ends with the beginning of the response's text.
    rendered: the messages as the chat template wrote them, with masks (tokenizer/masks.py).
    opening: the forced beginning of the response, which follows `rendered` in the prompt.
    later: the forced beginning that comes after the model's thought, if the model thinks;
      the grammar of the response begins only there. None = the grammar begins at once.
    labels: the labels of the options, if the prompt is a question of a decision.
    shared: the number of tokens that all prompts of the call share at their beginning
      and that are computed once, in whole KV blocks; 0 = each prompt is computed by itself.
    media: the media items of the prompt, in order.
    shown: their sizes and tokens, for the client.
    payload_of: see EngineClient.generate.
    """

    ids: list[int]
    text: str | None = None
    thinks: bool = False
    continues: bool = False
    rendered: str | None = None
    opening: str = ""
    later: str | None = None
    labels: Labels | None = None
    shared: int = 0
    media: Sequence[MediaItem] = ()
    shown: Sequence[SeenItem] = ()
    payload_of: Callable[[int], Awaitable[bytes]] | None = None


@dataclass(frozen=True, slots=True)
class Earlier:
    """The token ids of an earlier prompt and response, which go before the new prompt.

    mark: a text in the messages. Only the rendered text after the mark belongs to the new prompt.
      If the mark is "", the new prompt is all rendered text, without a BOS token.
    """

    ids: tuple[int, ...]
    mark: str = ""


class CommonFields(RequestFields, kw_only=True):
    """Fields that GenerateCall and the OpenAI dialect share, mostly sampling parameters.

    response_format, structured_outputs: see calls/response_format.py. A dialect with another
      field for structured outputs sets response_format to a StructuredOutputs object.
    truncation_side: "left" (the default if text is generated) or "right".
    """

    model: str | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    timeout: float | None = None
    response_format: Any = None


class GenerateCall(CommonFields, kw_only=True):
    """A request to generate text: either `prompt` or `messages`, how to sample, what to report.

    Inputs:

    prompt: a text, token ids, or a list of texts, of lists of token ids or of Prompts.
    messages: the messages of a chat.
    conversations: the messages of several chats, instead of `messages`.
    joins_texts: whether neighbouring texts of a content are one text, with a line break between.
    pairs: pairs of texts, or single texts, instead of a prompt.
      The response has a score, or the logits of a classifier, for each pair.
    instruction: the task that a reranker reads with each pair.
    prompt_name: the key of a prompt in the checkpoint's config of sentence-transformers.
      The prompt with this key goes before each text that is embedded.
    suffix: the text after the response. The model fills in the text between `prompt` and `suffix`.
    earlier: the tokens of an earlier prompt and its response, which the prompt continues.
    decisions: questions about the messages. Each question becomes a prompt (decision_prompts.py).

    mm_processor_kwargs: settings of the preprocessing of media.

    Thoughts:

    reasoning_effort: one of REASONING_EFFORTS, which the chat template reads.
    include_reasoning: False = the response leaves out thoughts.
    reasoning_budget: the most tokens of a thought, -1 = any number.

    Tools:

    tools: functions, in the format that chat templates read.
    tool_choice: "none", "auto" or "required".
    tool_name: the function that "required" forces, None = any function.
    found_tools: functions that may be called in addition to `tools`.
      The messages already describe these functions, so the chat template does not get them.
    custom_tools: the grammar of each custom tool by its name.
      The model sees a custom tool as a function with one text as its argument.
    tool_search: a search for further tools, which the server runs
      when the model calls its function. That function is in `tools`.

    Results:

    default_max_tokens: used if max_tokens is None; None = the rest of the context.
    logprobs: None = no logprobs, k = the logprobs of each token and of k alternatives.
    embed: the response has a vector for each prompt, or a score for each pair, instead of text.
    classify: the vectors are the logits of a classifier, one for each label:
      "text" = one vector for each prompt, "tokens" = one for each token. "" = embeddings or scores.
    vectors: the kind of vectors, one of VECTORS of sampling/params.py.
    num_best: the response has this number of the n sequences of each prompt, those with the
      highest mean logprob; the call sets `logprobs` as well. None = all n.
    beams: the response has the best texts that a beam search finds; None = sampled texts.
    lines: the rules for ending the response at a line; None = no rules.
    fills_cache: max_tokens may be 0, to compute the prompt for later requests.
    stream_interval: the number of tokens in each event of a stream after the first event.
    usage_in_each: each list of events ends with TokenUsage. If false, only the last list does.

    The client:

    adapter: the LoRA adapter that the request selects; "" = no adapter, None = the default.
    adapter_scale: the factor of the adapter's change of the model.
    ignored: fields that have no effect, for a header of the response.
    caller: the name of who sends the request (Caller.name). Callers take turns in queues.
    allowance: the part of its caller's limits that the request takes; None = there are no limits.
    session: the id of the client's session, which other clients cannot know.
    """

    prompt: str | list[str | int | list[int] | Prompt] | None = None
    messages: list[ConversationMessage] | None = None
    joins_texts: bool = False
    pairs: Sequence[tuple[str, ...]] | None = None
    instruction: str | None = None
    prompt_name: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    reasoning_budget: int | None = None

    tools: list[Any] | None = None
    tool_choice: str = "auto"
    tool_name: str | None = None
    parallel_tool_calls: bool | None = None
    found_tools: list[Any] | None = None
    custom_tools: dict[str, InputGrammar] | None = None
    tool_search: ToolSearch | None = None
    decisions: Decisions | None = None

    default_max_tokens: int | None = None

    logprobs: int | None = None
    num_best: int | None = None
    echo: bool = False
    suffix: str | None = None
    earlier: Earlier | None = None
    conversations: list[list[ConversationMessage]] | None = None
    stream_interval: int | None = None
    embed: bool = False
    classify: str = ""
    vectors: str = ""
    adapter: str | None = None
    adapter_scale: float = 1.0
    caller: str = ""
    allowance: Allowance | None = None
    ignored: list[str] = msgspec.field(default_factory=list)
    session: str | None = None
    stream: bool = False
    return_progress: bool = False
    usage_in_each: bool = False
    lines: LineRules | None = None
    fills_cache: bool = False
    beams: BeamRules | None = None

    @property
    def callable_tools(self) -> list[Any]:
        """All functions that the model may call."""
        return [*(self.tools or ()), *(self.found_tools or ())]

    def drop_inputs(self) -> None:
        """Release texts, lists and objects that have been turned into tokens and parameters.

        The messages may take many times the memory of their tokens,
        and would otherwise stay in memory until the response ends.
        """
        for name in self.__struct_fields__:
            if isinstance(getattr(self, name), list | dict):
                setattr(self, name, None)
        self.prompt = None


def call_from(
    asked: msgspec.Struct,
    own: Collection[str] = (),
    names: Mapping[str, str] = MappingProxyType({}),
    **more: Any,
) -> GenerateCall:
    """Return a GenerateCall with the fields that the body `asked` shares with it, and with `more`.

    own: fields that are not copied, because the dialect gives them a meaning of its own.
    names: for fields of the call that are called otherwise in the body, the field there (names_in).
    """
    known = set(GenerateCall.__struct_fields__) - set(own)
    shared = {name: name for name in asked.__struct_fields__ if name in known} | dict(names)
    given = {name: getattr(asked, field) for name, field in shared.items()}
    return GenerateCall(**{name: v for name, v in given.items() if v is not None} | more)


def unsupported(message: str, param: str) -> InvalidRequest:
    """Return the error for a field that this server does not implement."""
    return InvalidRequest(message, param=param, code="unsupported_parameter")
