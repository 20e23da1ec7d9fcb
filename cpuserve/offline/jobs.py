"""Jobs: the prompts of one call of `LLM`, which run now, or later together with others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from cpuserve.base.errors import InvalidRequest
from cpuserve.offline.arguments import Tokenization, chosen_tool, with_media
from cpuserve.outputs import RequestOutput
from cpuserve.serving.calls.call import GenerateCall

if TYPE_CHECKING:
    from cpuserve.sampling.params import SamplingParams
    from cpuserve.serving.generation.batch import BatchItem
    from cpuserve.serving.models.context import ModelContext

Advance = Callable[[int], None]
# Whether a progress bar is shown, or a function that makes one, with the interface of tqdm.
UseTqdm = bool | Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Job:
    """The requests of one call, with the batch item and the parameters of each."""

    requests: list[RequestOutput]
    items: list[BatchItem]
    params: list[SamplingParams]
    context: ModelContext


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The arguments of `LLM.chat` about the conversation; see there."""

    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: Mapping[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None
    include_reasoning: bool = True
    mm_processor_kwargs: Mapping[str, Any] | None = None

    def call(
        self, conversation: Sequence[Mapping[str, Any]], own: SamplingParams, how: Tokenization
    ) -> GenerateCall:
        """Return the call of a conversation; own: its sampling parameters.

        Raises:
            InvalidRequest: an argument is invalid.
        """
        if not how.special or how.lower:
            msg = "tokenization_kwargs of a chat may only truncate: the template writes the prompt"
            raise InvalidRequest(msg, param="tokenization_kwargs")
        choice, name = chosen_tool(self.tool_choice)
        budget = self.thinking_token_budget
        return GenerateCall(
            messages=with_media(conversation),
            mm_processor_kwargs=dict(self.mm_processor_kwargs or {}) or None,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            tools=self.tools,
            tool_choice=choice,
            tool_name=name,
            parallel_tool_calls=self.parallel_tool_calls,
            chat_template_kwargs=dict(self.chat_template_kwargs or {}),
            reasoning_effort=self.reasoning_effort,
            reasoning_budget=own.thinking_token_budget if budget is None else budget,
            include_reasoning=self.include_reasoning,
            structured_outputs=own.structured_outputs,
            truncate_prompt_tokens=(
                own.truncate_prompt_tokens if how.truncate is None else how.truncate
            ),
            truncation_side=how.side,
            max_tokens=own.max_tokens,
        )


def by_context(jobs: Sequence[Job]) -> list[list[Job]]:
    """Return the jobs in groups that can run as one batch, because they have the same context."""
    groups: dict[int, list[Job]] = {}
    for job in jobs:
        groups.setdefault(id(job.context), []).append(job)
    return list(groups.values())


@contextmanager
def progress(total: int, show: UseTqdm) -> Iterator[Advance]:
    """Show a progress bar: the caller's, or one on stderr if that is a terminal."""
    import sys

    if callable(show):
        bar = show(total=total, desc="Processed prompts", dynamic_ncols=True)
        try:
            yield lambda count: cast("None", bar.update(count))
        finally:
            bar.close()
        return
    if not show or not total or not sys.stderr.isatty():
        yield lambda _count: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("Prompts", total=total)
        yield lambda count: shown.advance(task, count)
