"""Tables of request fields of other servers that this server refuses, or that have no effect.

A field in neither table is honoured if the schema of its endpoint has it, otherwise ignored.
docs/fields.md lists all fields (`python -m docs.tables`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from cpuserve.base.errors import InvalidRequest
from cpuserve.sampling.fields import fields_in

S = TypeVar("S", bound=type[msgspec.Struct])

# Endpoint keys of the tables; a field has the same meaning at all endpoints of its row.
CHAT, TEXT, RESPONSES = "chat", "completions", "responses"
MESSAGES, EMBEDDINGS, RERANK, TOKENIZE = "messages", "embeddings", "rerank", "tokenize"
POOLING = "pooling"
TOKENS = "inference"
TEI_FIELDS = "tei"
TGI, TGI_PARAMETERS = "tgi", "tgi parameters"
COHERE_FIELDS = "cohere embed"
DECISIONS = "systemone"
COMPLETION = "completion"
OLLAMA, OLLAMA_TEXT, OPTIONS = "ollama chat", "ollama generate", "ollama options"
OPENAI = (CHAT, TEXT, RESPONSES)
# Anthropic clients check for this error code, and then send the whole conversation in each request.
NO_THREADS = "thread_unsupported_request"


class Refused(NamedTuple):
    """A field that raises an error if it is set, because ignoring it would change the response.

    why: the error message after the field name. None, false and empty values count as not set,
      because clients send them by default.
    off: additional values that count as not set.
    sets: values that count as set although they are false or empty.
    code: the error code in the response.
    """

    name: str
    endpoints: tuple[str, ...]
    why: str = "is not supported yet: omit it"
    off: tuple[Any, ...] = ()
    sets: tuple[Any, ...] = ()
    code: str = "unsupported_parameter"

    def is_set_by(self, value: object) -> bool:
        """Return whether `value` counts as set, so that the request must be refused."""
        return value in self.sets or (is_set(value) and value not in self.off)


class NoEffect(NamedTuple):
    """Fields that never change a response of this server, and the reason."""

    names: tuple[str, ...]
    endpoints: tuple[str, ...]
    why: str


def is_set(value: object) -> bool:
    """Return whether `value` differs from null, false and the empty values for "not set"."""
    return value is not None and value is not False and value not in ("", [], {})


def _send(what: str) -> str:
    return f"is not supported yet: send {what}"


def _moved(where: str) -> str:
    return f"is no field of /v1/responses: use {where}"


_TRUE = "is not supported yet: omit it, or set it to true"
_LOGPROBS = 'include: ["message.output_text.logprobs"]'

# tests/api/test_api_fields.py compares this table with the documented fields of OpenAI, vLLM,
# llama.cpp and Ollama. If a request sets several refused fields, the error is about the first one.
REFUSED = (
    # Fields of the OpenAI API
    Refused("audio", OPENAI),
    Refused("moderation", OPENAI),
    Refused("prediction", OPENAI),
    Refused("suffix", (CHAT, RESPONSES)),
    Refused("web_search_options", OPENAI, sets=({},)),  # {} asks for a web search: refused
    # Fields of vLLM
    Refused("chat_template", (*OPENAI, TOKENIZE, EMBEDDINGS, POOLING)),
    Refused("documents", OPENAI),
    Refused("guided_whitespace_pattern", OPENAI),
    Refused("include_reasoning", (TEXT,), _TRUE, off=(True,), sets=(False,)),
    Refused("early_stopping", OPENAI),
    Refused("length_penalty", (RESPONSES,), off=(1,)),
    Refused("logits_processors", OPENAI),
    Refused("prompt_embeds", OPENAI),
    Refused("return_prompt_text", (TEXT, RESPONSES)),
    Refused("thinking_token_budget", (TEXT,), off=(-1,)),
    Refused("use_beam_search", (RESPONSES,)),
    Refused("watermarking", OPENAI),
    Refused(
        "padding",
        (EMBEDDINGS, POOLING, RERANK),
        "is not supported, because no prompt is padded: omit it",
        off=("do_not_pad",),
    ),
    # Fields of llama.cpp
    Refused("adaptive_target", (*OPENAI, COMPLETION), off=(-1,)),
    Refused(
        "grammar",
        OPENAI,
        _send('structured_outputs: {"grammar": ...}, which may be in GBNF'),
    ),
    Refused("image_data", (*OPENAI, COMPLETION)),
    Refused("json_schema", OPENAI, _send('structured_outputs: {"json": ...}')),
    Refused("lora", OPENAI, "is not supported yet: name the adapter as the model"),
    Refused("n_cmpl", OPENAI, _send("n"), off=(1,)),
    Refused("n_indent", OPENAI, off=(0,)),
    Refused("n_probs", OPENAI, _send("logprobs"), off=(0,)),
    Refused("penalize_nl", OPENAI),
    Refused("post_sampling_probs", OPENAI, _send("logprobs")),
    Refused("reasoning_budget_tokens", (TEXT,), off=(-1,)),
    Refused("response_fields", OPENAI),
    Refused("return_tokens", OPENAI, _send("return_token_ids")),
    Refused("t_max_predict_ms", OPENAI, off=(0, -1)),
    Refused("tfs_z", (*OPENAI, COMPLETION, OPTIONS), off=(1,)),
    Refused("thinking_budget_tokens", (TEXT,), off=(-1,)),
    # Fields of Ollama
    Refused("images", (DECISIONS, COHERE_FIELDS)),
    Refused("penalize_newline", (OPTIONS,), _TRUE, off=(True,), sets=(False,)),
    Refused("template", (OLLAMA_TEXT,)),
    # Fields of System One
    Refused("stream", (DECISIONS,), "is not possible, because nothing is written: omit it"),
    Refused("decision_template", (DECISIONS,)),
    # Fields of the Anthropic API
    Refused(
        "thread",
        (MESSAGES,),
        "is not supported: send all messages of the conversation, without it",
        sets=(False, "", [], {}),
        code=NO_THREADS,
    ),
    Refused("mcp_servers", (MESSAGES,)),
    Refused("container", (MESSAGES,)),
    # Fields of other endpoints, which this endpoint lacks or has under another name.
    Refused("thinking", (TEXT,)),  # completions use no chat template that could read it
    Refused(
        "prompt",
        (RESPONSES,),
        "is not supported, because this server has no stored prompts: send the text as "
        "instructions and input",
    ),
    Refused("messages", (RESPONSES,), _moved("input")),
    Refused("max_tokens", (RESPONSES,), _moved("max_output_tokens")),
    Refused("max_completion_tokens", (RESPONSES,), _moved("max_output_tokens")),
    Refused("n_predict", (RESPONSES,), _moved("max_output_tokens")),
    Refused("response_format", (RESPONSES,), _moved("text.format")),
    Refused("reasoning_effort", (RESPONSES,), _moved("reasoning.effort")),
    Refused("thinking", (RESPONSES,), _moved("reasoning.effort")),
    Refused("logprobs", (RESPONSES,), _moved(_LOGPROBS)),
    Refused("previous_response", (RESPONSES,), _moved("previous_response_id")),
    Refused("previous_input_messages", (RESPONSES,), _moved("input")),
    # The Response object has no members for the results of these fields.
    Refused("enable_response_messages", (RESPONSES,)),
    Refused("prompt_logprobs", (RESPONSES,)),
    Refused("return_token_ids", (RESPONSES,)),
    Refused("context_management", (RESPONSES,)),
    Refused("add_generation_prompt", (RESPONSES,)),
    Refused("continue_final_message", (RESPONSES,)),
    Refused("echo", (RESPONSES,)),
    Refused("functions", (RESPONSES,)),
    Refused("function_call", (RESPONSES,)),
    Refused("data", (POOLING,)),
    # Fields of Jina and mixedbread
    Refused("late_chunking", (EMBEDDINGS,)),
    Refused(
        "return_multivector", (EMBEDDINGS,), 'is not supported: use /pooling with "token_embed"'
    ),
    Refused(
        "prompt", (EMBEDDINGS,), "is not supported: put it before the input, or send prompt_name"
    ),
    Refused("return_embeddings", (RERANK,)),
    Refused("max_doc_length", (RERANK,), _send("truncate_prompt_tokens")),
    Refused("max_query_length", (RERANK,)),
    Refused("encoding_format", (TEI_FIELDS,), "is not supported: omit it", off=("float",)),
    # Fields of TGI, and of the pipelines of transformers
    Refused("watermark", (TGI_PARAMETERS,)),
    Refused("num_return_sequences", (TGI_PARAMETERS,), off=(1,)),
    Refused("stop_sequences", (TGI_PARAMETERS,), _send("stop")),
    Refused("max_length", (TGI_PARAMETERS,), _send("max_new_tokens")),
    Refused("max_time", (TGI_PARAMETERS,), "is not supported: send timeout beside parameters"),
    Refused("max_chunks_per_doc", (RERANK,)),
    Refused("max_tokens_per_doc", (RERANK,)),
    Refused("rank_fields", (RERANK,)),
    Refused("features", (TOKENS,)),
    Refused("kv_transfer_params", (TOKENS,)),
    Refused("ec_transfer_params", (TOKENS,)),
)

_CACHES = "the server decides how it uses its caches and its machine"
_EVENTS = "the server decides when it sends events, and how much text each has"
_SAMPLERS = "it belongs to a sampler that is refused if a request switches it on"
_SENDER = "the response does not depend on the sender"
_CONTEXT = "a context is never shifted or cut, so no part of it must be kept"
NO_EFFECT = (
    NoEffect(
        ("user", "metadata", "safety_identifier", "service_tier", "session_id"),
        OPENAI,
        "the response does not depend on the sender or on data in other systems",
    ),
    NoEffect(("store",), (CHAT, TEXT), "only /v1/responses stores responses"),
    NoEffect(("request_id",), (RESPONSES,), "a response has an id of its own"),
    NoEffect(
        ("prompt_cache_key", "prompt_cache_retention", "cache_prompt", "id_slot",
         "kv_transfer_params", "ec_transfer_params", "guided_decoding_backend"),
        OPENAI,
        _CACHES,
    ),
    NoEffect(("user", "request_id"), (POOLING,), _SENDER),
    NoEffect(("user", "request_id"), (EMBEDDINGS, RERANK), _SENDER),
    NoEffect(
        ("mm_processor_kwargs", "media_io_kwargs"),
        (RERANK,),
        "the endpoint refuses the images themselves",
    ),
    NoEffect(("media_io_kwargs",), (EMBEDDINGS, POOLING), "pictures are read in one way only"),
    NoEffect(("user", "request_id"), (DECISIONS,), _SENDER),
    NoEffect(("keep_alive",), (DECISIONS,), _CACHES),
    NoEffect(("metadata",), (MESSAGES,), _SENDER),
    NoEffect(
        ("prompt", "input"), (OLLAMA,),
        "a field of another endpoint; refused if `messages` is empty",
    ),
    NoEffect(
        ("messages", "input"), (OLLAMA_TEXT,),
        "a field of another endpoint; refused without `prompt`",
    ),
    NoEffect(("keep_alive",), (OLLAMA, OLLAMA_TEXT), "it only sets how long a model stays loaded"),
    NoEffect(
        ("num_ctx", "num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread", "numa",
         "low_vram", "f16_kv", "vocab_only", "use_mlock", "logits_all", "embedding_only",
         "draft_num_predict"),
        (OPTIONS,),
        _CACHES,
    ),
    NoEffect(("sse_ping_interval",), OPENAI, _EVENTS),
    NoEffect(("cache_prompt", "id_slot", "n_cache_reuse"), (COMPLETION,), _CACHES),
    NoEffect(("sse_ping_interval",), (COMPLETION,), _EVENTS),
    NoEffect(("n_keep", "n_discard"), (COMPLETION,), _CONTEXT),
    NoEffect(("timings_per_token",), (RESPONSES,), _EVENTS),
    NoEffect(("n_keep", "n_discard"), OPENAI, _CONTEXT),
    NoEffect(("truncate", "shift"), (OLLAMA, OLLAMA_TEXT), _CONTEXT),
    NoEffect(("num_keep",), (OPTIONS,), _CONTEXT),
    NoEffect(
        ("media_io_kwargs", "return_mm_kwargs"),
        OPENAI,
        "pictures are read in one way only",
    ),
    NoEffect(
        ("mm_processor_kwargs",),
        (TEXT, RESPONSES),
        "only chat completions change how pictures are read",
    ),
    NoEffect(
        ("return_token_offsets", "routed_experts_prompt_start"),
        (CHAT, TEXT),
        "vLLM heeds them only where it renders prompts, or returns the experts of tokens",
    ),
    NoEffect(("adaptive_decay", "backend_sampling"), (*OPENAI, COMPLETION), _SAMPLERS),
    NoEffect(
        ("spaces_between_special_tokens",), OPENAI, "the tokenizer decides where spaces are"
    ),
    NoEffect(
        ("ec_transfer_params", "routed_experts_prompt_start"), (CHAT, TEXT), _CACHES
    ),
    NoEffect(
        ("return_token_offsets", "return_mm_kwargs"),
        (CHAT, TEXT),
        "it belongs to the render endpoints of vLLM",
    ),
    NoEffect(("verbosity",), OPENAI, "no chat template reads it"),
    NoEffect(("reasoning_format",), OPENAI, "thoughts are apart from the text"),
)  # fmt: skip

_REFUSED_BY: dict[type, tuple[Refused, ...]] = {}


def with_refused(*endpoints: str) -> Callable[[S], S]:
    """Return a decorator that adds the refused fields of `endpoints` to a body schema.

    The added fields accept values of any type, so that `check_fields` can refuse them by name.
    """
    rules = tuple(rule for rule in REFUSED if set(endpoints) & set(rule.endpoints))

    def extend(schema: S) -> S:
        known = schema.__struct_fields__
        extended = _extended(schema, {rule.name: Any for rule in rules if rule.name not in known})
        _REFUSED_BY[extended] = rules
        return extended

    return extend


def with_sampling(dialect: str) -> Callable[[S], S]:
    """Return a decorator that adds to a body schema the sampling fields that `dialect` has.

    The schema declares those that its own code reads, or that have another type there.
    """

    def extend(schema: S) -> S:
        fields = fields_in(dialect)
        lacks = [name for name in fields if name not in schema.__struct_fields__]
        return _extended(schema, {name: fields[name] for name in lacks})

    return extend


def _extended(schema: S, fields: Mapping[str, Any]) -> S:
    """Return `schema` with further fields of these types, which are None if they are not set."""
    return msgspec.defstruct(  # type: ignore[return-value]
        schema.__name__,
        [(name, kind, None) for name, kind in fields.items()],
        bases=(schema,),
        module=schema.__module__,
        namespace={"__doc__": schema.__doc__},
        kw_only=True,
    )


def check_fields(body: object) -> None:
    """Raise InvalidRequest for the first field that is set although the endpoint refuses it.

    Values of refused fields that mean "not set", such as false, become None in `body`.
    """
    for rule in refused_by(type(body)):
        value = getattr(body, rule.name)
        if value is None:
            continue
        if rule.is_set_by(value):
            msg = f"{rule.name} {rule.why}"
            raise InvalidRequest(msg, param=rule.name, code=rule.code)
        setattr(body, rule.name, None)


def refused_by(schema: type) -> Iterable[Refused]:
    """Return the fields that the endpoints of `schema` refuse."""
    return _REFUSED_BY.get(schema, ())


def honoured(endpoint: str, schema: type[msgspec.Struct]) -> list[str]:
    """Return the fields of `schema` that its endpoint reads and does not refuse."""
    refused = {rule.name for rule in refused_by(schema)}
    unread = {name for row in NO_EFFECT if endpoint in row.endpoints for name in row.names}
    return sorted({*schema.__struct_fields__} - refused - unread)
