"""The methods of `LLM` that keep prompts, and run them together later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cpuserve.errors import InvalidRequest
from cpuserve.llm_arguments import (
    Messages,
    PromptInput,
    Tokenization,
    check_text_only,
    tokenization_of,
)
from cpuserve.offline.adapters import OneAdapter
from cpuserve.offline.jobs import ChatOptions, Job, UseTqdm
from cpuserve.outputs import RequestOutput
from cpuserve.sampling.params import SamplingParams

ManyParams = SamplingParams | Sequence[SamplingParams] | None
ManyAdapters = OneAdapter | Sequence[OneAdapter | None] | None


class QueueMethods:
    """The methods of LLM that keep prompts until `wait_for_completion`."""

    _waiting: list[Job]

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
        check_text_only(mm_processor_kwargs, "auto")
        how = tokenization_of(tokenization_kwargs)
        return self._wait(self._prompt_job(prompts, sampling_params, lora_request, priority, how))

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
        check_text_only(mm_processor_kwargs, chat_template_content_format)
        options = ChatOptions(
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
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

    # --- methods that LLM implements ------------------------------------------------------------

    def _prompt_job(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: ManyParams,
        lora_request: ManyAdapters,
        priority: int | Sequence[int] | None,
        how: Tokenization,
    ) -> Job:
        """Return the job of prompts that are completed."""
        raise NotImplementedError

    def _chat_job(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: ManyParams,
        lora_request: ManyAdapters,
        priority: int | Sequence[int] | None,
        options: ChatOptions,
        how: Tokenization,
    ) -> Job:
        """Return the job of conversations that get a response."""
        raise NotImplementedError

    def _finish(self, jobs: Sequence[Job], use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Run jobs that generate tokens; return all requests with their outputs."""
        raise NotImplementedError
