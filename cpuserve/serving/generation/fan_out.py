"""Turn a call into sequences, n for each prompt, and count them from admission to their end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.calls.call import Prompt
from cpuserve.serving.calls.events import TokenUsage
from cpuserve.serving.generation.plan import SequencePlan, Tally

if TYPE_CHECKING:
    from cpuserve.sampling.params import SamplingParams
    from cpuserve.serving.calls.call import GenerateCall
    from cpuserve.serving.models.context import ModelContext

MAX_SEQUENCES_PER_REQUEST = 1024
# The most list items (token ids, biases, ...) in all sequences of a request together.
# Each item takes about 50 bytes in the engine.
MAX_REQUEST_ITEMS = 1 << 22
# The most values of prompt logprobs in a response: for each token its own logprob,
# the logprobs of its alternatives, and one more for their list. Each value takes about 300 bytes
# in this process until the response has been written, so this number of values takes 160 MB.
MAX_PROMPT_LOGPROBS = 1 << 19
MAX_TIMEOUT_S = 1e6
NO_SEED = -1  # as in vLLM, llama.cpp and Ollama; their clients send it


def fan_out(
    call: GenerateCall,
    prompts: list[Prompt],
    params: list[SamplingParams],
    longest_s: float | None,
) -> list[SequencePlan]:
    """Return n sequences for each prompt; prompt i has the choices i*n to i*n + n-1.

    The sequences end with an error after the smaller of the call's timeout and longest_s seconds.
    If the call has a seed, sequence k of a prompt uses seed + k.
    The first sequence of a prompt computes the prompt logprobs for all of its sequences.

    Raises:
      InvalidRequest: the call has too many sequences, list items in all sequences,
        or prompt logprobs.
    """
    total = sum(p.n for p in params)
    if total > MAX_SEQUENCES_PER_REQUEST:
        msg = (
            f"n times the number of prompts is {total}: at most {MAX_SEQUENCES_PER_REQUEST} "
            f"sequences per request are allowed"
        )
        raise InvalidRequest(msg, role="n")
    if total > 1:
        _check_size(prompts, params, call.echo)
    _check_scores(prompts, params, call.echo)
    timeout_s, interval = _timeout(call.timeout, longest_s), _interval(call)
    sequences: list[SequencePlan] = []
    for prompt, of_prompt in zip(prompts, params, strict=True):
        first_index = len(sequences)
        for sequence in sequences_of(prompt, of_prompt, call.priority or 0, first_index):
            is_scored = sequence.index > first_index and of_prompt.prompt_logprobs is not None
            sequence.tally.allowance = call.allowance
            sequences.append(
                replace(
                    sequence,
                    timeout_s=timeout_s,
                    progress=call.stream and call.return_progress,
                    interval=interval,
                    scored_by=first_index if is_scored else None,
                    lines=call.lines,
                )
            )
    return sequences


def sequences_of(
    prompt: Prompt, params: SamplingParams, priority: int = 0, first_index: int = 0
) -> list[SequencePlan]:
    """Return params.n sequences for a prompt, which are the choices from `first_index` on."""
    sequences = []
    if prompt.labels is not None:
        params = msgspec.structs.replace(params, label_ids=prompt.labels.flat)
    for k in range(params.n):
        sequence_params, after_thought = _params_of(params, k), None
        if prompt.later is not None:
            after_thought, form = sequence_params, sequence_params.structured_outputs
            if form is not None:
                form = msgspec.structs.replace(form, later=True)
                sequence_params = msgspec.structs.replace(sequence_params, structured_outputs=form)
        sequences.append(
            SequencePlan(
                first_index + k,
                prompt,
                sequence_params,
                params.n,
                priority,
                after_thought=after_thought,
            )
        )
    return sequences


def _params_of(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters (with n = 1) of sequence `index` of the n sequences of a prompt.

    The seed is increased by `index`, as a signed 64-bit number, so that the sequences differ;
    a seed of -1 means no seed. Only sequence 0 scores the prompt, which is the same for all.
    """
    seed = None if params.seed == NO_SEED else params.seed
    if params.n == 1 and seed == params.seed:
        return params
    if seed is not None:
        seed = (seed + index + 2**63) % 2**64 - 2**63
    scores = None if index else params.prompt_logprobs
    return msgspec.structs.replace(params, n=1, seed=seed, prompt_logprobs=scores)


def shared_beginning(sequences: Sequence[SequencePlan]) -> SequencePlan | None:
    """Return the sequence that computes the beginning of all prompts; None = they share none.

    The sequence generates no tokens. The other sequences find its KV blocks in the prefix cache,
    and the states of recurrent layers, which exist only at the end of a prompt that has run.
    """
    sequence = sequences[0]
    if not sequence.prompt.shared:
        return None
    prompt = Prompt(sequence.prompt.ids[: sequence.prompt.shared])
    params = msgspec.structs.replace(sequence.params, max_tokens=0, logprobs=None, label_ids=[])
    tally = Tally(allowance=sequence.tally.allowance)
    return SequencePlan(
        sequence.index, prompt, params, 1, sequence.priority, sequence.timeout_s, tally=tally
    )


def _check_size(prompts: list[Prompt], params: list[SamplingParams], echo: bool) -> None:
    """Raise InvalidRequest if the lists, which each sequence copies, would fill the memory."""
    items = 0
    for prompt, of_prompt in zip(prompts, params, strict=True):
        scored = 0 if of_prompt.prompt_logprobs is None else of_prompt.prompt_logprobs + 1
        # One sequence computes the prompt logprobs; with echo every sequence shows them.
        items += (of_prompt.n if echo else 1) * scored * len(prompt.ids)
        items += of_prompt.n * _num_items(len(prompt.ids), of_prompt)
    if items > MAX_REQUEST_ITEMS:
        msg = (
            f"The sequences of this request have {items} list items in total (prompt tokens, "
            f"prompt logprobs, ids in allowed_token_ids, stop_token_ids, logit_bias and "
            f"bad_words, characters of stop strings and schemas): at most {MAX_REQUEST_ITEMS} are "
            f"allowed. Send fewer prompts in a request, or lower n"
        )
        raise InvalidRequest(msg, role="n")


def _check_scores(prompts: list[Prompt], params: list[SamplingParams], echo: bool) -> None:
    """Raise InvalidRequest if the prompt logprobs of a response would fill the memory."""
    top = params[0].prompt_logprobs if params else None
    if top is None:
        return
    num_shown = params[0].n if echo else 1
    tokens = num_shown * sum(len(prompt.ids) for prompt in prompts)
    if tokens * (top + 2) > MAX_PROMPT_LOGPROBS:
        max_alternatives = MAX_PROMPT_LOGPROBS // tokens - 2
        lower = (
            f"ask for at most {max_alternatives} alternatives, or " if max_alternatives >= 0 else ""
        )
        msg = (
            f"The logprobs of {tokens} prompt tokens with {top} alternatives each are "
            f"{tokens * (top + 2)} values: at most {MAX_PROMPT_LOGPROBS} are allowed in an answer. "
            f"To get them, {lower}send fewer or shorter prompts in a request"
        )
        raise InvalidRequest(msg, role="prompt_logprobs")


def _num_items(num_prompt: int, params: SamplingParams) -> int:
    """Return the number of list items in one sequence, without its prompt logprobs."""
    form = params.structured_outputs
    lists = (
        params.allowed_token_ids,
        params.stop_token_ids,
        params.logit_bias,
        *params.stop,
        params.dry_breaker_ids,
        params.exempt_ids,
        *params.bad_word_ids,
    )
    num_listed = sum(len(items) for items in lists if items is not None)
    return num_prompt + num_listed + (0 if form is None else form.num_chars)


def _interval(call: GenerateCall) -> int:
    """Return SequencePlan.interval: the least number of tokens in a list of events."""
    interval = call.stream_interval
    if interval is not None and interval < 1:
        msg = f"stream_interval must be at least 1, got {interval}"
        raise InvalidRequest(msg, role="stream_interval")
    return interval if interval is not None and call.stream else 1


def _timeout(timeout_s: float | None, longest_s: float | None) -> float | None:
    if timeout_s is None:
        return longest_s
    if not 0.0 < timeout_s <= MAX_TIMEOUT_S:
        msg = f"timeout must be above 0 and at most {MAX_TIMEOUT_S:g} seconds, got {timeout_s:g}"
        raise InvalidRequest(msg, role="timeout")
    return timeout_s if longest_s is None else min(timeout_s, longest_s)


def check_capacity(context: ModelContext, sequences: Sequence[SequencePlan]) -> None:
    """Raise TooManyRequests (429) if these sequences exceed the capacity.

    The same error is raised if the first token would come after the call's timeout.
    """
    count = len(sequences)
    active = context.active_sequences
    max_sequences = context.limits.max_sequences
    caller = sequences[0].params.caller
    context.backlog.check(sequences[0].timeout_s, caller)
    if active + count > max_sequences and not context.backlog.has_share(caller):
        msg = (
            f"This request needs {count} sequences, but {active} of at most {max_sequences} are in "
            f"use: try again later"
        )
        raise context.backlog.refusal(msg)


def admit(context: ModelContext, sequences: Sequence[SequencePlan]) -> None:
    """Count sequences as waiting until `start`, and as active until `dismiss`.

    Sequences are counted before they run, so that the check of the next request includes them.
    The tokens that they may use are reserved for their caller.
    The errors are the same as in check_capacity, and LimitReached.
    """
    check_capacity(context, sequences)
    prompt_ids: set[int] = set()
    for sequence in sequences:
        # A prompt is computed once for its n sequences, so its tokens count once.
        prompt = sequence.prompt
        sequence.tally.num_queued = (
            0 if id(prompt) in prompt_ids else len(prompt.ids) - prompt.shared
        )
        prompt_ids.add(id(prompt))
    if (allowance := sequences[0].tally.allowance) is not None:
        allowance.reserve(sum(s.tally.num_queued + (s.params.max_tokens or 0) for s in sequences))
    for sequence in sequences:
        sequence.tally.counted_active = sequence.tally.in_backlog = True
        context.active_sequences += 1
        context.backlog.enter(sequence.tally.num_queued, sequence.params.caller)


def start(context: ModelContext, sequence: SequencePlan, cached_tokens: int) -> None:
    """Count `sequence` as running; `cached_tokens` of its prompt were found in the prefix cache."""
    tally = sequence.tally
    tally.in_backlog = False
    tally.first_output = time.monotonic()
    computed = len(sequence.prompt.ids) - cached_tokens
    context.backlog.start(tally.num_queued, computed, sequence.params.caller)
    if tally.allowance is not None:
        tally.allowance.spend(min(tally.num_queued, computed))


def dismiss(context: ModelContext, sequence: SequencePlan, reason: str = "") -> None:
    """Stop counting `sequence`, which has ended or will never run; repeated calls do nothing.

    reason: "abort" or "late" if its client has ended it, by disconnecting or by a timeout.
      Before the first output, all of its prompt then counts for its caller. How much of it was
      computed is not known here, and clients must not have long prompts computed for free.
    """
    tally = sequence.tally
    if tally.in_backlog:
        context.backlog.leave(tally.num_queued, sequence.params.caller)
        if tally.allowance is not None and reason in ("abort", "late"):
            tally.allowance.spend(tally.num_queued)
    if tally.counted_active:
        tally.ended = time.monotonic()
    context.active_sequences -= tally.counted_active
    tally.counted_active = tally.in_backlog = False


def usage_of(prompt_tokens: int, sequences: Sequence[SequencePlan]) -> TokenUsage:
    """Return the token counts of a call; `prompt_tokens` must count each prompt once."""
    completion = sum(sequence.tally.completion_tokens for sequence in sequences)
    cached: dict[int, int] = {}
    for sequence in sequences:
        # The prompt tokens that all prompts of the call share are counted by another sequence.
        num_cached = max(0, sequence.tally.cached_tokens - sequence.prompt.shared)
        num_prompt_cached = cached.get(id(sequence.prompt), num_cached)
        # The later ones of the n sequences of a new prompt find the blocks of the first one.
        # Blocks of the first sequence are no cache hits of the request,
        # so the smallest number of cached tokens of the n sequences counts.
        cached[id(sequence.prompt)] = min(num_prompt_cached, num_cached)
    reasoning = sum(sequence.tally.reasoning_tokens for sequence in sequences)
    shown_prompts = {
        id(sequence.prompt): sequence.prompt.shown
        for sequence in sequences
        if sequence.prompt.shown
    }
    media = [item for items in shown_prompts.values() for item in items]
    usage = TokenUsage(prompt_tokens, completion, sum(cached.values()), reasoning, media)
    usage.drafts = sum(sequence.tally.draft_tokens for sequence in sequences)
    usage.accepted = sum(sequence.tally.accepted_tokens for sequence in sequences)
    return usage
