"""LLM: offline inference in this process, with the interface of the LLM class of vLLM."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, cast

from cpuserve.base.errors import InvalidRequest
from cpuserve.base.log import get_logger
from cpuserve.offline.arguments import (
    Messages,
    PromptInput,
    as_list,
    check_content_format,
    engine_options,
    refuse_pictures,
    tokenization_of,
    why_refused,
)
from cpuserve.offline.jobs import ChatOptions, Job, UseTqdm, progress
from cpuserve.offline.queue import ManyAdapters, ManyParams, QueueMethods
from cpuserve.offline.requests import OneAdapter
from cpuserve.offline.tokenizer import OfflineTokenizer
from cpuserve.outputs import (
    BeamSearchOutput,
    DecisionOutput,
    RequestOutput,
    beam_output,
)
from cpuserve.sampling.params import SamplingParams
from cpuserve.serving.decisions.questions import (
    Content,
    checked,
    content_text,
    questions_from,
)
from cpuserve.serving.decisions.results import results_of
from cpuserve.serving.generation.batch import decision_items, search_batch
from cpuserve.serving.media.reader import MediaRules
from cpuserve.serving.models.context import ModelContext
from cpuserve.serving.models.details import ModelDetails
from cpuserve.serving.prompts.decision_prompts import GREEDY, decision_call
from cpuserve.serving.tools.learn import NO_TEMPLATE

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.engine.inline import InlineClient
    from cpuserve.engine_args import EngineArgs
    from cpuserve.metrics.server import ServerMetrics
    from cpuserve.sampling.beams import BeamSearchParams

log = get_logger("llm")


class LLM(QueueMethods):
    """A model in this process; generate() and chat() return when all requests have finished.

    Options: as for `cpuserve serve`, with underscores. Other options of vLLM are accepted
    if they have no effect here (gpu_memory_utilization, enforce_eager, trust_remote_code=False,
    ...), and refused with the reason if they would have one.
    close(), `del` or the end of the program frees memory and threads.

    Raises:
        StartupError: the model cannot be loaded, or an option cannot be honoured.
    """

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """Return a model with these options; errors as in LLM(...)."""
        return cls(**asdict(engine_args))

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
            **engine_options(options),
        }
        config, self._details, self._media_rules = _resolve(arguments)
        # The tokenizer is loaded on this thread while the engine packs weights on its own threads.
        from cpuserve.engine.inline import InlineClient
        from cpuserve.tokenizer.load import load_tokenizer

        self.config = config
        self._asleep = False
        self._client: InlineClient = InlineClient(config)
        try:
            names = config.tokenizer_path, config.chat_template
            parses = config.control_tokens_in_messages
            self._tokenizer, self._template = load_tokenizer(*names, parses)
            self._client.start()
        except BaseException:
            self.close()
            raise
        self._metrics = self._new_metrics()
        self._context = self._context_of(self._template, NO_TEMPLATE)
        self._chats: dict[str | None, ModelContext] = {}  # by chat template; None = the model's own
        self._num_requests = 0
        self._adapters = {**config.adapters}
        self._waiting: list[Job] = []

    if not TYPE_CHECKING:

        def __getattr__(self, name):  # noqa: ANN001, ANN204
            raise AttributeError(why_refused(name))

    # --- running ------------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: ManyParams = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: ManyAdapters = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; the results are in the order of the prompts.

        prompts: a text, a list of token ids,
          {"prompt": text} or {"prompt_token_ids": ids}, or a list of these.
          With "multi_modal_data": {"image": picture or list} a prompt has pictures, and the marker
          of the model (such as <image>) once for each; see `chat` for the types.
        sampling_params: the parameters of all prompts, or a list with one item for each prompt;
          None = the model's defaults (`get_default_sampling_params`).
        use_tqdm: show progress on a terminal, or a function that makes a progress bar as tqdm does.
        lora_request: the name of a LoRA adapter (option lora_modules, or load_lora_adapter),
          or a LoRARequest, or a list with one of these or None for each prompt.
        priority: the priority of each prompt; prompts with lower values are scheduled first.
        tokenization_kwargs: truncate_prompt_tokens, truncation_side, add_special_tokens,
          do_lower_case; or truncation and max_length.
        mm_processor_kwargs: settings of the preprocessing of pictures, such as
          {"size": {"longest_edge": 1024}}.

        Raises:
            InvalidRequest: a prompt or parameter is invalid; nothing is generated.
            RequestError: the engine failed to compute one request; the others are aborted.
            EngineDead: the engine has ended.
        """
        how = tokenization_of(tokenization_kwargs)
        job = self._prompt_job(
            prompts, sampling_params, lora_request, priority, how, mm_processor_kwargs
        )
        return self._finish([job], use_tqdm)

    def chat(
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
    ) -> list[RequestOutput]:
        """Respond to one conversation, or to each of several; see `generate`.

        Thoughts and tool calls are fields of CompletionOutput besides the text.
        Structured outputs and forced tool calls begin after the thought.

        messages: [{"role": ..., "content": ...}, ...]. A content may have parts with pictures:
          {"type": "image", "image": an image of Pillow, bytes, a path or a URL}, or `image_url`
          and `file` as in the API of OpenAI. Options of the server say which URLs are read.
        chat_template: a template that is used instead of the model's own.
        chat_template_content_format: has no effect, because templates get the form that they read.
        add_generation_prompt: None = True, unless continue_final_message is set.
        tokenization_kwargs: only those that truncate.
        more: tool_choice, parallel_tool_calls, reasoning_effort: as in the API of OpenAI;
          thinking_token_budget: the most tokens of a thought, before the response goes on;
          include_reasoning: False = the field `reasoning` of the outputs stays empty.

        Raises:
            InvalidRequest: an argument is invalid, or not possible with this model.
            RequestError, EngineDead: see `generate`.
        """
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
        job = self._chat_job(messages, sampling_params, lora_request, priority, options, how)
        return self._finish([job], use_tqdm)

    def beam_search(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: BeamSearchParams,
        lora_request: ManyAdapters = None,
        use_tqdm: UseTqdm = False,
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
        refuse_pictures(as_list(prompts), "a beam search")
        requests = [self._request(prompt) for prompt in as_list(prompts)]
        step = SamplingParams(max_tokens=params.max_tokens, ignore_eos=params.ignore_eos)
        adapters = self._adapters_of(lora_request, len(requests))
        if len(set(adapters)) > 1:
            msg = "a beam search has one adapter for all prompts: call beam_search for each"
            raise InvalidRequest(msg, param="lora_request")
        (own,) = self._params(step, 1, adapters[:1] or [None])
        found: list[BeamSearchOutput] = []
        at_once = max(1, concurrency_limit or len(requests))
        with progress(len(requests), use_tqdm) as advance:
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
        use_tqdm: UseTqdm = True,
        priority: int = 0,
        lora_request: OneAdapter | None = None,
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
        (params,) = self._params(SamplingParams(**GREEDY), 1, self._adapters_of(lora_request, 1))
        context = self._chat_context(chat_template)
        first, items = decision_items(context, call, params, priority)
        self._run(first, False, context)
        self._run(items, use_tqdm, context)
        first_tokens = [(item.prompt.labels, item.choices[0].logprobs[0]) for item in items]
        found, diagnostics = results_of(asked, first_tokens)
        run = [*first, *items]
        computed = sum(len(item.prompt.ids) - item.prompt.shared for item in run)
        cached = sum(max(0, item.cached_tokens - item.prompt.shared) for item in run)
        return DecisionOutput(found, diagnostics, computed, cached)

    def _new_metrics(self) -> ServerMetrics:
        from cpuserve.metrics.server import ServerMetrics

        own = weakref.ref(self)
        config = self.config
        return ServerMetrics(
            model_name=config.served_model_names[0],
            max_model_len=config.max_model_len,
            stats=lambda: cast("LLM", own())._client.stats,
            drafts=config.speculation is not None,
        )

    # --- other methods --------------------------------------------------------------------------

    def get_tokenizer(self) -> OfflineTokenizer:
        """The model's tokenizer, with the methods of transformers that programs call."""
        names = self.config.model, self.config.max_model_len
        return OfflineTokenizer(self._tokenizer, self._template, *names)

    def close(self) -> None:
        """Free weights, KV cache and threads; later calls raise an error."""
        self._client.shutdown()

    def __repr__(self) -> str:
        return f"LLM(model={self.config.model!r})"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- arguments --------------------------------------------------------------------------------


def _resolve(arguments: Mapping[str, Any]) -> tuple[EngineConfig, ModelDetails, MediaRules]:
    """Return the settings of the engine, its model and pictures; log the decisions.

    Of the facts about the files of the model there is only their place.
    """
    from cpuserve.config.load import from_arguments
    from cpuserve.prepare import for_one_engine, one_engine, prepare

    asked = from_arguments(arguments)
    prepared = prepare(for_one_engine(asked))
    for note in prepared.notes:
        log.info("%s", note)
    for decision in prepared.resolved.decisions:
        log.debug("%s: %s (%s)", decision.field, decision.got, decision.why)
    details = ModelDetails(path=prepared.facts.path, mmproj=prepared.facts.mmproj or "")
    config = one_engine(prepared)
    return config, details, MediaRules.of(asked.server, config.media_tokens)
