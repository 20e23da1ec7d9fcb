"""LLM: offline inference in this process, with the interface of the LLM class of vLLM."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from cpuserve.errors import InvalidRequest
from cpuserve.llm_arguments import (
    Messages,
    PromptInput,
    as_list,
    chosen_tool,
    conversations_of,
    one_each,
    text_and_ids,
)
from cpuserve.llm_pooling import PoolingMethods, items_of
from cpuserve.log import get_logger
from cpuserve.outputs import (
    BeamSearchOutput,
    DecisionOutput,
    RequestOutput,
    beam_output,
    completion_of,
    position_logprobs,
)
from cpuserve.sampling.params import SamplingParams
from cpuserve.serving.bad_words import with_own_bad_word_ids
from cpuserve.serving.batch import BatchItem, chat_items, decision_items, run_batch
from cpuserve.serving.beam_batch import search_batch
from cpuserve.serving.call import GenerateCall
from cpuserve.serving.context import ModelContext
from cpuserve.serving.decisions.call import GREEDY, decision_call
from cpuserve.serving.decisions.questions import (
    Content,
    checked,
    content_text,
    questions_from,
)
from cpuserve.serving.decisions.results import results_of
from cpuserve.serving.encode import cut_of
from cpuserve.serving.sampler_ids import with_own_sampler_ids
from cpuserve.serving.tools.learn import NO_TEMPLATE, LearnedFormat, learn_format, parsers_of

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.engine.client import EngineClient
    from cpuserve.engine.inline import InlineClient
    from cpuserve.sampling.beams import BeamSearchParams
    from cpuserve.serving.events import Choice
    from cpuserve.tokenizer.chat import ChatTemplate
    from cpuserve.tokenizer.tokenizer import Tokenizer

log = get_logger("llm")

Advance = Callable[[int], None]


class LLM(PoolingMethods):
    """A model in this process; generate() and chat() return when all requests have finished.

    Options: as for `cpuserve serve`, with underscores. Other options of vLLM are accepted
    if they have no effect here (gpu_memory_utilization, enforce_eager, trust_remote_code=False,
    ...). close(), `del` or the end of the program frees memory and threads.

    Raises:
        StartupError: the model cannot be loaded, or an option cannot be honoured.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        tokenizer: str | None = None,
        dtype: str | None = None,
        seed: int | None = None,
        max_model_len: int | None = None,
        tensor_parallel_size: int | Literal["auto"] | None = None,
        **options: Any,
    ) -> None:
        arguments = {
            "model": model,
            "tokenizer": tokenizer,
            "dtype": dtype,
            "seed": seed,
            "max_model_len": max_model_len,
            "tensor_parallel_size": tensor_parallel_size,
            "itl_target_ms": 0,  # throughput matters here, not a steady stream
            **options,
        }
        config = _resolve(arguments)
        # The tokenizer is loaded on this thread while the engine packs weights on its own threads.
        from cpuserve.engine.inline import InlineClient
        from cpuserve.tokenizer.load import load_tokenizer

        self.config = config
        self._client: InlineClient = InlineClient(config)
        try:
            names = config.tokenizer_path, config.chat_template
            parses = config.control_tokens_in_messages
            self._tokenizer, self._template = load_tokenizer(*names, parses)
            self._client.start()
        except BaseException:
            self.close()
            raise
        self._context = self._context_of(self._template, NO_TEMPLATE)
        self._chats: dict[str | None, ModelContext] = {}  # by chat template; None = the model's own
        self._num_requests = 0
        self._adapters = {*config.adapters}

    # --- running ------------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora_request: str | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; the results are in the order of the prompts.

        prompts: a text, a list of token ids,
          {"prompt": text} or {"prompt_token_ids": ids}, or a list of these.
        sampling_params: the parameters of all prompts, or a list with one item for each prompt;
          None = the model's defaults (`get_default_sampling_params`).
        use_tqdm: show progress on a terminal.
        priority: the priority of each prompt; prompts with lower values are scheduled first.
        lora_request: the name of a LoRA adapter (option lora_modules, or load_lora_adapter)
          that all prompts use.

        Raises:
            InvalidRequest: a prompt or parameter is invalid; nothing is generated.
            RequestError: the engine failed to compute one request; the others are aborted.
            EngineDead: the engine has ended.
        """
        self._check_kind("generate")
        requests = [self._request(prompt) for prompt in as_list(prompts)]
        params = self._params(sampling_params, len(requests), lora_request)
        for request, own in zip(requests, params, strict=True):
            self._truncate(request, own)
        priorities = list(priority or [0] * len(requests))
        if len(priorities) != len(requests):
            msg = f"{len(priorities)} priorities for {len(requests)} prompts"
            raise InvalidRequest(msg, param="priority")
        return self._finished(requests, items_of(requests, params, priorities), params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: str | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        thinking_token_budget: int | None = None,
        include_reasoning: bool = True,
    ) -> list[RequestOutput]:
        """Respond to one conversation, or to each of several; see `generate`.

        Thoughts and tool calls are fields of CompletionOutput besides the text.
        Structured outputs and forced tool calls begin after the thought.

        messages: [{"role": ..., "content": ...}, ...].
        chat_template: a template that is used instead of the model's own.
        tools, tool_choice, parallel_tool_calls, reasoning_effort: as in the API of OpenAI.
        thinking_token_budget: the most tokens of a thought; the response goes on after the thought.
        include_reasoning: False = the field `reasoning` of the outputs stays empty.

        Raises:
            InvalidRequest: an argument is invalid, or not possible with this model.
            RequestError, EngineDead: see `generate`.
        """
        self._check_kind("generate")
        conversations = conversations_of(messages)
        params = self._params(sampling_params, len(conversations), lora_request)
        choice, name = chosen_tool(tool_choice)
        context = self._chat_context(chat_template)
        calls = [
            GenerateCall(
                messages=cast("list[dict[str, Any]]", list(conversation)),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                tool_choice=choice,
                tool_name=name,
                parallel_tool_calls=parallel_tool_calls,
                chat_template_kwargs=dict(chat_template_kwargs or {}),
                reasoning_effort=reasoning_effort,
                reasoning_budget=thinking_token_budget,
                include_reasoning=include_reasoning,
                structured_outputs=own.structured_outputs,
                truncate_prompt_tokens=own.truncate_prompt_tokens,
                max_tokens=own.max_tokens,
            )
            for conversation, own in zip(conversations, params, strict=True)
        ]
        items = chat_items(context, calls, params)
        requests = [self._of_ids(item.prompt.ids) for item in items]
        return self._finished(requests, items, params, use_tqdm, context)

    def beam_search(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: BeamSearchParams,
        lora_request: str | None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the params.beam_width best texts of each prompt; prompts as in `generate`.

        use_tqdm: show progress on a terminal.
        concurrency_limit: the number of prompts that are searched at a time;
          None = all, so that each step computes the beams of all prompts.

        Raises:
            InvalidRequest: a prompt or parameter is invalid.
            RequestError, EngineDead: see `generate`.
        """
        self._check_kind("generate")
        requests = [self._request(prompt) for prompt in as_list(prompts)]
        step = SamplingParams(max_tokens=params.max_tokens, ignore_eos=params.ignore_eos)
        (own,) = self._params(step, 1, lora_request)
        found: list[BeamSearchOutput] = []
        at_once = max(1, concurrency_limit or len(requests))
        with _progress(len(requests), use_tqdm) as advance:
            for start in range(0, len(requests), at_once):
                ids = [each.prompt_token_ids for each in requests[start : start + at_once]]
                searched = search_batch(self._client, self._context, ids, own, params.rules)
                for prompt, beams in zip(ids, searched, strict=True):
                    found.append(beam_output(prompt, beams, params, self._tokenizer))
                advance(len(ids))
        return found

    def decide(
        self,
        state: Content,
        questions: Mapping[str, Mapping[str, Any]],
        *,
        instructions: Content | None = None,
        use_tqdm: bool = True,
        priority: int = 0,
        lora_request: str | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> DecisionOutput:
        """Return the probability of each option of questions about a state; no text is generated.

        The state is computed once. A result does not depend on the other questions.

        state: a text, or JSON.
        questions: {id: {"type", "instructions", "criteria"}}, as in POST /v1/systemone.
          The caller chooses the ids. The criteria of a "choice" are {option: description or None},
          of a "score" a list of levels, and of a "noul" (yes or no) nothing or {"true", "false"}.
          With "as_texts": True the options are scored as texts of any length.
        instructions: a system message. For the other arguments see `chat`.

        Raises:
            InvalidRequest: a question or another argument is invalid, or its options have no labels
                of one token each.
            RequestError, EngineDead: see `generate`.
        """
        self._check_kind("generate")
        asked = checked(questions_from(questions))
        call = decision_call(
            content_text(state).strip(),
            asked,
            instructions=content_text(instructions).strip(),
            chat_template_kwargs=chat_template_kwargs,
        )
        (params,) = self._params(SamplingParams(**GREEDY), 1, lora_request)
        context = self._chat_context(chat_template)
        first, items = decision_items(context, call, params, priority)
        self._run(first, False, context)
        self._run(items, use_tqdm, context)
        found, diagnostics = results_of(asked, [item.choices[0] for item in items])
        run = [*first, *items]
        computed = sum(len(item.prompt.ids) - item.prompt.shared for item in run)
        cached = sum(max(0, item.cached_tokens - item.prompt.shared) for item in run)
        return DecisionOutput(found, diagnostics, computed, cached)

    def _finished(
        self,
        requests: list[RequestOutput],
        items: list[BatchItem],
        params: list[SamplingParams],
        use_tqdm: bool,
        context: ModelContext | None = None,
    ) -> list[RequestOutput]:
        """Run requests that generate tokens; return them with their outputs."""

        def keep(position: int, choice: Choice) -> None:
            self._keep(requests[position], choice, params[position])

        self._run(items, use_tqdm, context or self._context, keep)
        for request, item in zip(requests, items, strict=True):
            request.outputs.sort(key=lambda completion: completion.index)
            request.num_cached_tokens, request.finished = item.cached_tokens, True
        return requests

    def _run(
        self,
        items: list[BatchItem],
        use_tqdm: bool,
        context: ModelContext,
        keep: Callable[[int, Choice], None] | None = None,
    ) -> None:
        """Run all items until their sequences have ended; raises RequestError and EngineDead.

        keep(position of the item, choice) is called when a sequence has ended, while others run.
        """
        with _progress(sum(len(item.sequences) for item in items), use_tqdm) as advance:

            def ended(position: int, choice: Choice) -> None:
                if keep is not None:
                    keep(position, choice)
                advance(1)

            run_batch(self._client, context, items, ended)

    def _keep(self, request: RequestOutput, choice: Choice, params: SamplingParams) -> None:
        """Add the result of a sequence to its request."""
        request.outputs.append(completion_of(choice, params, self._tokenizer))
        if choice.scores is not None:
            request.prompt_logprobs = [
                None if row is None else position_logprobs(row, self._tokenizer)
                for row in choice.scores
            ]

    def _request(self, prompt: PromptInput, before: str = "") -> RequestOutput:
        """Return an empty RequestOutput for a prompt. before: the text to put before the prompt."""
        text, ids = text_and_ids(prompt)
        if ids is None:
            ids = self._tokenizer.encode(before + (text or ""))
        self._num_requests += 1
        return RequestOutput(str(self._num_requests - 1), text, ids)

    def _truncate(self, request: RequestOutput, params: SamplingParams) -> None:
        """Cut the beginning of a prompt with more tokens than params.truncate_prompt_tokens."""
        asked, most = params.truncate_prompt_tokens, params.max_tokens
        call = GenerateCall(truncate_prompt_tokens=asked, max_tokens=most)
        if (cut := cut_of(self._context, call)) is not None:
            request.prompt_token_ids = cut.apply(request.prompt_token_ids)

    def _of_ids(self, ids: list[int]) -> RequestOutput:
        """Return an empty RequestOutput for the token ids of a rendered conversation."""
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return self._request({"prompt": text, "prompt_token_ids": ids})

    def _params(
        self,
        given: SamplingParams | Sequence[SamplingParams] | None,
        count: int,
        lora_request: str | None,
    ) -> list[SamplingParams]:
        """Return the sampling parameters of each prompt; None: the model's defaults."""
        params = one_each(self.get_default_sampling_params() if given is None else given, count)
        params = [with_own_bad_word_ids(own, self._tokenizer) for own in params]
        vocab = self._context.bounds.vocab
        params = [with_own_sampler_ids(own, self._tokenizer, vocab) for own in params]
        if lora_request is None:
            return params
        if lora_request not in self._adapters:
            msg = f"there is no adapter {lora_request!r}: name it in lora_modules"
            raise InvalidRequest(msg, param="lora_request")
        return [msgspec.structs.replace(p, adapter=lora_request) for p in params]

    def _chat_context(self, source: str | None) -> ModelContext:
        """Return the ModelContext for a chat template (None: the model's own template).

        The first call for a template learns the format of its thoughts and tool calls.
        If there is no template, or a broken one, rendering a conversation raises the error.
        """
        from cpuserve.tokenizer.chat import ChatTemplate
        from cpuserve.tokenizer.load import template_source

        found = self._chats.get(source)
        if found is None:
            template = self._template
            if source is not None:
                given, parses = template_source(source), template.parses_messages
                template = ChatTemplate(given, self._tokenizer, parses_messages=parses)
            parsers = parsers_of(self.config)
            learned = NO_TEMPLATE if template.fault() else learn_format(template, *parsers)
            found = self._chats[source] = self._context_of(template, learned)
        return found

    def _context_of(self, template: ChatTemplate, learned: LearnedFormat) -> ModelContext:
        """Return the context of the serving pipeline for the engine of this process."""
        from cpuserve.engine.ipc import Stats
        from cpuserve.metrics.server import ServerMetrics

        # Without the weak proxy, reference cycles would keep the engine's memory after `del`.
        client = cast("EngineClient", weakref.proxy(self._client))
        names, most = self.config.served_model_names, self.config.max_model_len
        metrics = ServerMetrics(model_name=names[0], max_model_len=most, stats=Stats)
        context = ModelContext(client, metrics, tuple(names), most, pooling=self.config.pooling)
        context.set_ready(self._tokenizer, template, learned)
        return context

    # --- adapters -------------------------------------------------------------------------------

    def load_lora_adapter(self, name: str, path: str, *, load_inplace: bool = False) -> None:
        """Load a LoRA adapter; needs the option allow_runtime_lora_updating.

        path: a directory of PEFT, or a GGUF file.
        load_inplace: replace the adapter that is loaded under this name.

        Raises:
            InvalidRequest: the adapter cannot be loaded; the loaded adapters have not changed.
        """
        if name in (names := self.config.served_model_names):
            msg = f"{name} is the name of the model itself: give another one than {names}"
            raise InvalidRequest(msg, param="name")
        self._change("stage_adapter", name=name, path=path, in_place=load_inplace)
        self._change("use_adapter", name=name)
        self._adapters.add(name)

    def unload_lora_adapter(self, name: str) -> None:
        """Unload a LoRA adapter; needs the option allow_runtime_lora_updating.

        Raises:
            InvalidRequest: no adapter has this name, or it cannot be unloaded.
        """
        if name not in self._adapters or not self.config.adapter_slots:
            loaded = ", ".join(sorted(self._adapters)) if self.config.adapter_slots else "none"
            msg = f"no adapter {name!r} can be unloaded; those that can be: {loaded}"
            raise InvalidRequest(msg, param="name")
        self._adapters.remove(name)
        self._change("unload_adapter", name=name)

    def _change(self, what: str, **details: object) -> None:
        answer = self._client.ask_now(what, **details)
        if "error" in answer:
            raise InvalidRequest(str(answer["error"]), param="path")

    # --- other methods --------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default sampling parameters of vLLM, with the values that the model sets."""
        return SamplingParams(**self.config.default_sampling)  # type: ignore[arg-type]

    def close(self) -> None:
        """Free weights, KV cache and threads; later calls raise an error."""
        self._client.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- arguments --------------------------------------------------------------------------------


def _resolve(arguments: Mapping[str, Any]) -> EngineConfig:
    """Return the EngineConfig for LLM's arguments, and log the decisions."""
    from cpuserve.config.load import from_arguments
    from cpuserve.prepare import for_one_engine, one_engine, prepare

    asked = from_arguments(arguments)
    prepared = prepare(for_one_engine(asked))
    for note in prepared.notes:
        log.info("%s", note)
    for decision in prepared.resolved.decisions:
        log.debug("%s: %s (%s)", decision.field, decision.got, decision.why)
    return one_engine(prepared)


@contextmanager
def _progress(total: int, show: bool) -> Iterator[Advance]:
    """Show a progress bar if stderr is a terminal."""
    import sys

    if not show or not total or not sys.stderr.isatty():
        yield lambda _count: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Prompts", total=total)
        yield lambda count: bar.advance(task, count)
