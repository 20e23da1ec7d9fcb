"""Prepare a call: its prompts, their tokens, the sampling parameters, and the sequences to run."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.calls.bad_words import bad_words_us, with_bad_word_ids
from cpuserve.serving.calls.params import check_values, sampling_params
from cpuserve.serving.calls.sampler_ids import VOCABULARY_US, reads_vocabulary, with_sampler_ids
from cpuserve.serving.generation.fan_out import check_capacity, fan_out, shared_beginning
from cpuserve.serving.generation.generate import Generation
from cpuserve.serving.generation.next_turn import TurnReader
from cpuserve.serving.prompts.prompts import prompts_of
from cpuserve.serving.threads import run_limited, run_sized
from cpuserve.serving.tools.use import response_plan, tool_use

if TYPE_CHECKING:
    from cpuserve.sampling.params import SamplingParams
    from cpuserve.sampling.structured import StructuredOutputs
    from cpuserve.serving.callers.allowance import Allowance
    from cpuserve.serving.calls.call import GenerateCall, Prompt
    from cpuserve.serving.generation.plan import SequencePlan
    from cpuserve.serving.models.context import ModelContext
    from cpuserve.serving.models.registry import Served
    from cpuserve.serving.tools.use import ToolUse

# How many prompt token ids are checked per microsecond.
_IDS_PER_US = 32

# Kinds of output, each as (its name in error messages, the endpoints to use).
_SCORES = ("scores of pairs of texts", "/v1/rerank or /v1/score")
_VECTORS = ("embeddings", "/v1/embeddings")
_SPARSE = ("sparse embeddings", "/embed_sparse or /pooling")
_CLASSES = ("labels of texts", "/classify")
_TOKEN_CLASSES = ("labels of tokens", "/pooling")
_TEXT = ("text", "/v1/chat/completions or /v1/completions")
# Hints for the error of a model that generates text: how to serve a model with each other output.
_SERVED_AS = {
    _VECTORS: "To get embeddings, serve a model with --pooling last or mean",
    _SCORES: "To get scores, serve a reranker (--pooling rank makes one of Qwen3-Reranker) or an "
    "embedding model",
    _CLASSES: "To get labels, serve a classifier",
}
_GIVES = {
    "none": _TEXT,
    "rank": _SCORES,
    "splade": _SPARSE,
    "classify": _CLASSES,
    "token_classify": _TOKEN_CLASSES,
}


async def prepare(
    served: Served,
    call: GenerateCall,
    num_bytes: int,
    *,
    caller: str = "",
    allowance: Allowance | None = None,
) -> Generation:
    """Check a call, and return the generation that will serve it.

    served: the model of the request, which may be an adapter.
    num_bytes: the size of the request's body (small and large requests render on separate threads).
    caller: the name of who sends the request.
    allowance: the part of its caller's limits that the request takes; None = there are no limits.

    Raises:
      InvalidRequest: this model cannot serve the call.
      TooManyRequests: there is no capacity for the call now, or its caller has no tokens left.
    """
    if allowance is not None:
        allowance.check_tokens()  # before the template costs time; fan_out reserves the tokens
    _check_kind(served.context, call)
    _choose_adapter(served, call)
    call.caller, call.allowance = caller, allowance
    # A search for tools makes further prompts, which need the messages and tools again.
    original_call = None if call.tool_search is None else msgspec.structs.replace(call)
    return await _prepared(served.context, num_bytes, call, original_call)


async def _prepared(
    context: ModelContext,
    num_bytes: int,
    call: GenerateCall,
    original_call: GenerateCall | None = None,
) -> Generation:
    """Return the generation of a call, and drop the call's inputs. kept: a copy with the inputs."""
    tools, form = None, None
    if call.decisions is None:  # only the first token counts, even if it begins a tool call
        tools, form = response_plan(call, context.learned_format, context.thoughts)
    prompts = await prompts_of(context, call, num_bytes, tools)
    sequences = await _sequences(context, call, prompts, form)
    beginning = shared_beginning(sequences)
    check_capacity(context, sequences)
    if len(prompts) == 1 and context.recent is not None:
        recent = await context.recent.record(call, prompts[0], context.decoder)
        sequences[0].tally.recent = recent
    turn = TurnReader.of(context, call, num_bytes, sequences)
    call.drop_inputs()
    num_tokens = sum(len(prompt.ids) for prompt in prompts)
    num_tokens -= prompts[0].shared * (len(prompts) - 1)
    searches = (
        None if original_call is None else (original_call, partial(_prepared, context, num_bytes))
    )
    return Generation(
        context, call, sequences, num_tokens, tools, beginning, turn=turn, searches=searches
    )


async def read_prompts(
    context: ModelContext, call: GenerateCall, num_bytes: int
) -> tuple[ToolUse | None, list[Prompt]]:
    """Return how tools and thoughts are used (None: not at all), and the prompts of a call.

    num_bytes: the size of the request's body.

    Raises:
      InvalidRequest: the tools, the messages, the template or the prompts are invalid.
    """
    tools = None
    if call.decisions is None:
        tools = tool_use(call, context.learned_format, context.thoughts)
    return tools, await prompts_of(context, call, num_bytes, tools)


async def _sequences(
    context: ModelContext,
    call: GenerateCall,
    prompts: list[Prompt],
    form: StructuredOutputs | None,
) -> list[SequencePlan]:
    """Return the sequences of a call; long lists of tokens are checked on another thread."""
    ids, tokenizer = [prompt.ids for prompt in prompts], context.get_tokenizer()
    num_ids = sum(map(len, ids))
    words_us = bad_words_us(call.bad_words)
    vocabulary_us = VOCABULARY_US if reads_vocabulary(call) else 0

    def parameters() -> list[SamplingParams]:
        check_values(call, num_ids, {**context.token_widths, "tokens": context.vector_width})
        params = sampling_params(call, ids, context.bounds, context.default_sampling, form)
        with_bad_word_ids(params, tokenizer)
        with_sampler_ids(params, tokenizer, context.bounds.vocab)
        return params

    def sequences() -> list[SequencePlan]:
        return fan_out(call, prompts, parameters(), context.limits.longest_s)

    reads_texts = words_us + vocabulary_us
    run = run_limited if reads_texts and tokenizer.waits else run_sized
    return await run(num_ids // _IDS_PER_US + reads_texts, sequences)


def _check_kind(context: ModelContext, call: GenerateCall) -> None:
    """Raise InvalidRequest unless the model can output what the call needs, such as text."""
    gives = _GIVES.get(context.pooling, _VECTORS)
    task = _SCORES if call.pairs is not None else _VECTORS if call.embed else _TEXT
    if call.vectors == "words":
        task = _SPARSE
    if call.classify:
        task = _TOKEN_CLASSES if call.classify == "tokens" else _CLASSES
    if gives == task or (context.pooling == "rank" and task == _CLASSES):  # it has one label
        return
    name = context.model_names[0]
    if gives == _TEXT:
        msg = f"{name} generates text. {_SERVED_AS.get(task, _SERVED_AS[_CLASSES])}"
    else:
        msg = f"{name} gives {gives[0]} and no {task[0]}: use {gives[1]}"
    raise InvalidRequest(msg, role="model")


def _choose_adapter(served: Served, call: GenerateCall) -> None:
    """Set the adapter of a call, or None; InvalidRequest if its model is another adapter."""
    if served.adapter is not None:
        if call.adapter not in (None, served.adapter):
            msg = (
                f"model is the adapter {served.adapter!r}, but lora or task selects "
                f"{call.adapter or 'none'}: name the base model, or omit the other field"
            )
            raise InvalidRequest(msg, role="model")
        call.adapter = served.adapter
    elif call.adapter is None:
        task = served.context.tasks.get(call.prompt_name or "")
        call.adapter = None if task is None else task.adapter
        if call.adapter is None:
            call.adapter = served.context.default_adapter
            call.adapter_scale = served.context.default_scale
    call.adapter = call.adapter or None
