"""The methods of `LLM` that make jobs of prompts, and run them now or together later."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from cpuserve.base.errors import InvalidRequest
from cpuserve.offline.arguments import (
    Messages,
    PromptInput,
    Tokenization,
    as_list,
    check_content_format,
    conversations_of,
    one_each,
    priorities_of,
    tokenization_of,
    with_salts,
    without_media,
)
from cpuserve.offline.jobs import ChatOptions, Job, UseTqdm, by_context
from cpuserve.offline.pooling import PoolingMethods, items_of
from cpuserve.offline.requests import OneAdapter, name_of
from cpuserve.outputs import RequestOutput, completion_of, position_logprobs, stats_of
from cpuserve.sampling.params import SamplingParams
from cpuserve.serving.calls.bad_words import with_own_bad_word_ids
from cpuserve.serving.calls.call import GenerateCall
from cpuserve.serving.calls.sampler_ids import with_own_sampler_ids
from cpuserve.serving.generation.batch import chat_items
from cpuserve.serving.models.context import ModelContext
from cpuserve.serving.prompts.encode import cut_of
from cpuserve.serving.tools.learn import NO_TEMPLATE, LearnedFormat, learn_format, parsers_of

if TYPE_CHECKING:
    from cpuserve.engine.client import EngineClient
    from cpuserve.metrics.server import ServerMetrics
    from cpuserve.serving.calls.events import Choice
    from cpuserve.serving.media.reader import MediaRules
    from cpuserve.serving.models.details import ModelDetails
    from cpuserve.tokenizer.chat import ChatTemplate

ManyParams = SamplingParams | Sequence[SamplingParams] | None
ManyAdapters = OneAdapter | Sequence[OneAdapter | None] | None


class QueueMethods(PoolingMethods):
    """The methods of LLM that keep prompts until `wait_for_completion`, and that make jobs."""

    _waiting: list[Job]
    _metrics: ServerMetrics
    _template: ChatTemplate
    _details: ModelDetails
    _media_rules: MediaRules

    def enqueue(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: ManyParams = None,
        lora_request: ManyAdapters = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: UseTqdm = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Keep the prompts until `wait_for_completion`; return the id of each request.

        use_tqdm: has no effect. For the other arguments and errors see `generate`.
        """
        del use_tqdm
        how = tokenization_of(tokenization_kwargs)
        job = self._prompt_job(
            prompts, sampling_params, lora_request, priority, how, mm_processor_kwargs
        )
        return self._wait(job)

    def enqueue_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: ManyParams = None,
        use_tqdm: UseTqdm = True,
        lora_request: ManyAdapters = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> list[str]:
        """Keep the conversations until `wait_for_completion`; return the id of each request.

        use_tqdm: has no effect. For the other arguments and errors see `chat`.
        """
        del use_tqdm
        check_content_format(chat_template_content_format)
        options = ChatOptions(
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
            **more,
        )
        how = tokenization_of(tokenization_kwargs)
        return self._wait(
            self._chat_job(messages, sampling_params, lora_request, priority, options, how)
        )

    def wait_for_completion(
        self,
        output_type: type[Any] | tuple[type[Any], ...] | None = None,
        *,
        use_tqdm: UseTqdm = True,
    ) -> list[RequestOutput]:
        """Run all requests of `enqueue` and `enqueue_chat`, and return them in their order.

        output_type: the type that all outputs must have, or several; None = any.

        Raises:
            InvalidRequest: the outputs have another type, which is RequestOutput.
            RequestError, EngineDead: see `generate`.
        """
        if output_type is not None and not issubclass(RequestOutput, output_type):
            msg = f"output_type must be RequestOutput, got {output_type}"
            raise InvalidRequest(msg, param="output_type")
        jobs, self._waiting = self._waiting, []
        return self._finish(jobs, use_tqdm)

    def _wait(self, job: Job) -> list[str]:
        self._waiting.append(job)
        return [request.request_id for request in job.requests]

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default sampling parameters of vLLM, with the values that the model sets."""
        return SamplingParams(**self.config.default_sampling)  # type: ignore[arg-type]

    # --- jobs -----------------------------------------------------------------------------------

    def _prompt_job(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: ManyParams,
        lora_request: ManyAdapters,
        priority: int | Sequence[int] | None,
        how: Tokenization,
        settings: Mapping[str, Any] | None,
    ) -> Job:
        """Return the job of prompts that are completed; see `generate`."""
        self._check_kind("generate")
        self._check_settings(settings)
        split = [without_media(each, f"prompts[{i}]") for i, each in enumerate(as_list(prompts))]
        listed = [prompt for prompt, _, _ in split]
        adapters = self._adapters_of(lora_request, len(listed))
        params = with_salts(self._params(sampling_params, len(listed), adapters), listed)
        requests = [self._media_request(prompt, parts, how=how) for prompt, parts, _ in split]
        for request, own, adapter in zip(requests, params, adapters, strict=True):
            if own.thinking_token_budget not in (None, -1):
                msg = "thinking_token_budget is only possible in chat()"
                raise InvalidRequest(msg, param="thinking_token_budget")
            self._truncate(request, own, how)
            request.lora_request = adapter
        priorities = priorities_of(priority, len(requests))
        items = items_of(requests, params, priorities)
        for index, (_, pictures, own_settings) in enumerate(split):
            if pictures:
                how_shown = {**(settings or {}), **(own_settings or {})}
                items[index] = self._with_media(requests[index], pictures, how_shown, items[index])
        return Job(requests, items, params, self._context)

    def _check_settings(self, settings: Mapping[str, Any] | None) -> None:
        if settings and self._context.media is None:
            msg = "mm_processor_kwargs is for pictures, and this model reads text only: omit it"
            raise InvalidRequest(msg, param="mm_processor_kwargs")

    def _chat_job(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: ManyParams,
        lora_request: ManyAdapters,
        priority: int | Sequence[int] | None,
        options: ChatOptions,
        how: Tokenization,
    ) -> Job:
        """Return the job of conversations that get a response; see `chat`."""
        self._check_kind("generate")
        self._check_settings(options.mm_processor_kwargs)
        conversations = conversations_of(messages)
        count = len(conversations)
        adapters = self._adapters_of(lora_request, count)
        params = self._params(sampling_params, count, adapters)
        context = self._chat_context(options.chat_template)
        calls = [
            options.call(conversation, own, how)
            for conversation, own in zip(conversations, params, strict=True)
        ]
        for call, own in zip(calls, priorities_of(priority, count), strict=True):
            call.priority = own
        items = chat_items(context, calls, params)
        requests = [self._of_ids(item.prompt.ids) for item in items]
        for request, adapter in zip(requests, adapters, strict=True):
            request.lora_request = adapter
        return Job(requests, items, params, context)

    def _finish(self, jobs: Sequence[Job], use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Run jobs that generate tokens; return all requests with their outputs."""
        for own in by_context(jobs):
            requests = [request for job in own for request in job.requests]
            params = [each for job in own for each in job.params]
            items = [item for job in own for item in job.items]
            self._run(items, use_tqdm, own[0].context, self._keeper(requests, params))
            for request, item in zip(requests, items, strict=True):
                request.outputs.sort(key=lambda completion: completion.index)
                request.num_cached_tokens, request.finished = item.cached_tokens, True
                request.metrics = stats_of(item.records[0])
        return [request for job in jobs for request in job.requests]

    def _keeper(
        self, requests: Sequence[RequestOutput], params: Sequence[SamplingParams]
    ) -> Callable[[int, Choice], None]:
        def keep(position: int, choice: Choice) -> None:
            self._keep(requests[position], choice, params[position])

        return keep

    def _keep(self, request: RequestOutput, choice: Choice, params: SamplingParams) -> None:
        """Add the result of a sequence to its request."""
        completion = completion_of(choice, params, self._tokenizer)
        completion.lora_request = request.lora_request
        request.outputs.append(completion)
        if choice.scores is not None:
            request.prompt_logprobs = [
                None if row is None else position_logprobs(row, self._tokenizer)
                for row in choice.scores
            ]

    def _truncate(self, request: RequestOutput, params: SamplingParams, how: Tokenization) -> None:
        """Cut a prompt with more tokens than the parameters or tokenization_kwargs say."""
        asked = params.truncate_prompt_tokens if how.truncate is None else how.truncate
        call = GenerateCall(
            truncate_prompt_tokens=asked, truncation_side=how.side, max_tokens=params.max_tokens
        )
        if (cut := cut_of(self._context, call)) is not None:
            request.prompt_token_ids = cut.apply(request.prompt_token_ids)

    def _of_ids(self, ids: list[int]) -> RequestOutput:
        """Return an empty RequestOutput for the token ids of a rendered conversation."""
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return self._request({"prompt": text, "prompt_token_ids": ids})

    def _params(
        self, given: ManyParams, count: int, adapters: Sequence[OneAdapter | None]
    ) -> list[SamplingParams]:
        """Return the sampling parameters of each prompt; None: the model's defaults."""
        default = self.get_default_sampling_params() if given is None else given
        params = one_each(default, count, "sampling_params")
        params = [with_own_bad_word_ids(own, self._tokenizer) for own in params]
        vocab = self._context.bounds.vocab
        params = [with_own_sampler_ids(own, self._tokenizer, vocab) for own in params]
        return [
            own if adapter is None else msgspec.structs.replace(own, adapter=name_of(adapter))
            for own, adapter in zip(params, adapters, strict=True)
        ]

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
        # Without the weak proxy, reference cycles would keep the engine's memory after `del`.
        client = cast("EngineClient", weakref.proxy(self._client))
        names, most = self.config.served_model_names, self.config.max_model_len
        context = ModelContext(
            client,
            self._metrics,
            tuple(names),
            most,
            pooling=self.config.pooling,
            details=self._details,
            media_rules=self._media_rules,
        )
        context.set_ready(self._tokenizer, template, learned)
        return context
