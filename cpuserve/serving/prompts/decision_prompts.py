"""The call that asks a model questions about a state, and its prompts."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from cpuserve.base.errors import InvalidRequest
from cpuserve.sampling.fields import NEUTRAL
from cpuserve.serving.calls.call import GenerateCall, Prompt, thinking_variables
from cpuserve.serving.decisions.labels import LabelFinder, Labels, question_text
from cpuserve.serving.decisions.questions import MAX_QUESTIONS, DecisionQuestion, Decisions
from cpuserve.serving.decisions.texts import Ids, PromptEnd, option_texts, text_question
from cpuserve.serving.prompts.chat_prompt import begins_thought, render_chat
from cpuserve.serving.prompts.encode import encode
from cpuserve.serving.threads import run_rendering, run_sized, run_tokenizing
from cpuserve.serving.tools.thoughts import THINK

if TYPE_CHECKING:
    from cpuserve.serving.models.context import ModelContext

# The most characters in all prompts of a call together. Each question has a prompt of its own,
# and each prompt counts the whole text of the state (the facts that the questions are about).
# Four characters are about one token, which takes 40 bytes in this process: 160 MB in total.
MAX_CHARS = 1 << 24
# A decision generates one token, the most likely one, and reads the distribution of all tokens.
GREEDY: dict[str, Any] = {
    **NEUTRAL,
    "n": 1,
    "max_tokens": 1,
    "min_tokens": 0,
    "temperature": 0.0,
    "logprobs": 0,
}


def decision_call(
    state: str,
    questions: Sequence[DecisionQuestion],
    *,
    instructions: str = "",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **more: Any,
) -> GenerateCall:
    """Return the call for questions about a state; each question becomes a prompt.

    instructions: the text of the system message.
    more: further fields of the call.

    Raises:
      InvalidRequest: chat_template_kwargs switch thinking on.
    """
    given = dict(chat_template_kwargs or {})
    for name in thinking_variables(on=True):
        if given.get(name):
            msg = (
                f"chat_template_kwargs: {name} must be false or omitted, because a decision is "
                "read where the response begins, before any thought"
            )
            raise InvalidRequest(msg, role="chat_template_kwargs")
    mark = f"question{uuid.uuid4().hex}"
    user = {"role": "user", "content": f"{state}\n\n{mark}" if state else mark}
    system = [{"role": "system", "content": instructions}] if instructions else []
    return GenerateCall(
        messages=[*system, user],
        chat_template_kwargs={**thinking_variables(on=False), **given},
        decisions=Decisions(questions, mark),
        **GREEDY,
        **more,
    )


async def decision_prompts(
    context: ModelContext, call: GenerateCall, decisions: Decisions, num_bytes: int
) -> list[Prompt]:
    """Return the prompt of each question, in order; num_bytes: see chat_prompt.

    Raises:
      InvalidRequest: the template cannot be rendered, a prompt is too long,
        or the options of a question have no labels in this model's tokenizer.
    """
    rendered = await run_rendering(num_bytes, lambda: render_chat(context, call))
    head, *rest = (rendered + _opening(context, rendered)).split(decisions.mark)
    if not rest:
        msg = "the chat template leaves out the user's message: use another --chat-template"
        raise InvalidRequest(msg, role="messages")
    tokenizer, hide = context.get_tokenizer(), context.get_chat_template().mask

    def find_labels() -> list[_PromptQuestion]:
        end = PromptEnd(tokenizer, rest[-1])
        finder = LabelFinder(end)
        questions = [_without_control_texts(one, hide) for one in decisions.questions]
        return [_PromptQuestion.of(finder, end, question) for question in questions]

    questions = await run_tokenizing(len(rest[-1]), find_labels, waits=tokenizer.waits)
    _check_number(questions)
    texts = [question.text for question in questions]
    _check_size(len(head) + sum(map(len, rest)), texts)
    prompts = [text.join([head, *rest]) for text in texts]
    ids = await encode(context, prompts, add_special_tokens=False, masked=True)
    return await run_sized(sum(map(len, ids)) // 8, lambda: _prompts(context, ids, questions))


@dataclass(frozen=True, slots=True)
class _PromptQuestion:
    """The text of a question in its prompts, and the labels of its options.

    text: the question with its labels.
    labels: one entry for each prompt of the question: tokens that follow the question,
      and the labels that may come after them.
    """

    text: str
    labels: tuple[tuple[Ids, Labels], ...]

    @staticmethod
    def of(finder: LabelFinder, end: PromptEnd, question: DecisionQuestion) -> _PromptQuestion:
        """Return the text and labels of a question at the end of its prompts.

        Raises:
          InvalidRequest: this model's tokenizer has no labels for the options.
        """
        if not question.as_texts:
            labels = finder.labels(question)
            return _PromptQuestion(question_text(question, labels), (((), labels),))
        texts = option_texts(end, question)
        nodes = [
            (before, Labels((), tuple((token,) for token in following), texts))
            for before, following in texts.nodes.items()
        ]
        return _PromptQuestion(text_question(question), tuple(nodes))


def _without_control_texts(
    question: DecisionQuestion, hide: Callable[[str], str]
) -> DecisionQuestion:
    """Return a question with masks for control texts, as the rendered prompt has them.

    hide: ChatTemplate.mask.
    """
    options = [
        replace(option, name=hide(option.name), description=hide(option.description or ""))
        for option in question.options
    ]
    return replace(question, instructions=hide(question.instructions), options=tuple(options))


def _check_number(questions: Sequence[_PromptQuestion]) -> None:
    count = sum(len(question.labels) for question in questions)
    if count > MAX_QUESTIONS:
        msg = (
            f"the options that are scored as texts need {count} prompts, one for each token: at "
            f"most {MAX_QUESTIONS} are allowed. Send fewer questions or shorter options"
        )
        raise InvalidRequest(msg, param="questions")


def _opening(context: ModelContext, rendered: str) -> str:
    """Return the text after `rendered`: the end of an open thought, and the response's start."""
    learned = context.learned_format
    thinks = begins_thought(rendered, learned.tags or THINK)
    return (learned.thought_end.closed if thinks else "") + learned.form_opening


def _check_size(around: int, texts: Sequence[str]) -> None:
    total = around * len(texts) + sum(map(len, texts))
    if total > MAX_CHARS:
        msg = (
            f"{len(texts)} questions about a state of {around} characters are prompts of {total} "
            f"characters: at most {MAX_CHARS} are allowed. Send fewer questions in a request"
        )
        raise InvalidRequest(msg, param="questions")


def _prompts(
    context: ModelContext, ids: Sequence[list[int]], questions: Sequence[_PromptQuestion]
) -> list[Prompt]:
    prompts = [
        ([*prompt_ids, *before], labels)
        for prompt_ids, question in zip(ids, questions, strict=True)
        for before, labels in question.labels
    ]
    shared = _num_shared(context, [prompt_ids for prompt_ids, _ in prompts])
    return [Prompt(prompt_ids, labels=labels, shared=shared) for prompt_ids, labels in prompts]


def _num_shared(context: ModelContext, ids: Sequence[list[int]]) -> int:
    """Return how many tokens at the beginning of all prompts are equal, in whole KV blocks.

    The equal tokens are computed once. If the prompts differ within a block,
    the equal tokens at its beginning (at most 31) are computed again for each question.
    The result is 0 if there is only one prompt, or if prefixes are not cached.
    """
    info = context.client.info
    block = info.get("block_size")
    if len(ids) == 1 or not isinstance(block, int) or not info.get("prefix_caching"):
        return 0
    num_equal = min(len(commonprefix(ids)), min(map(len, ids)) - 1)
    return num_equal // block * block
