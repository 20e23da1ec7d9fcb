"""Every field of SamplingParams changes what both executors sample, or is read elsewhere.

The fields come from the type itself, so that a new field fails here until it has a sampler, or a
place on the list of those that executors do not read.
"""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import cpuserve
from cpuserve.core.step import LogitRow
from cpuserve.loader.load import open_checkpoint
from cpuserve.models import build_program, spec_from_config
from cpuserve.runtime.torch_executor import TorchExecutor
from cpuserve.sampling.fields import REFUSED
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.slot import SlotRequest
from tests.helpers.steps import Sequence, step
from tests.helpers.tiny import tiny_model
from tests.runtime.test_executors_agree import VOCAB, config

_C = pytest.importorskip("cpuserve._C")

PACKAGE = Path(cpuserve.__file__).parent
PROMPT = [(i * 37 + i * i * 5) % 509 for i in range(20)]
TOKENS = 12
SEED = 11
# Greedy, with tokens that are more likely than all others, so that they repeat.
TWO = {"temperature": 0.0, "logit_bias": {3: 40.0, 4: 39.0}}
SIX = {"temperature": 0.0, "logit_bias": dict.fromkeys(range(3, 9), 40.0)}
DRY = {**TWO, "dry_multiplier": 5.0, "dry_allowed_length": 1}
MIROSTAT = {"mirostat": 2}
# At this temperature tokens 4 and 5 are equally likely, and no other token is.
INFILL = {
    "samplers": ["temperature", "infill"],
    "temperature": 50.0,
    "logit_bias": {4: 1000.0, 5: 1000.0},
}
# For each id, the longest other token that its text begins with: none, or 4 for token 5.
NO_PREFIXES = np.full(VOCAB, -1, "<i4")
PREFIXES = np.where(np.arange(VOCAB) == 5, 4, NO_PREFIXES).astype("<i4")

# The field: (other fields that it needs, its value). Without this value, the others sample other
# tokens, or report other alternatives.
SAMPLED = {
    "temperature": ({}, 0.0),
    "top_p": ({}, 0.02),
    "top_k": ({}, 2),
    "min_p": ({}, 0.9),
    "repetition_penalty": (TWO, 1000.0),
    "presence_penalty": (SIX, 2.0),
    "frequency_penalty": (SIX, 2.0),
    "min_tokens": (TWO, 5),  # token 3 ends a text, see `sampled`
    "logprob_token_ids": ({"logprobs": 2}, [5, 6]),
    "logit_bias": ({}, {7: 90.0}),
    "allowed_token_ids": ({}, [8, 9]),
    "bad_word_ids": (TWO, [[3]]),
    "no_repeat_ngram_size": (TWO, 2),
    "ngram_size": (TWO, 2),
    "window_size": ({**TWO, "ngram_size": 2}, 2),
    "whitelist_token_ids": ({**TWO, "ngram_size": 2}, [3]),
    "samplers": ({"top_k": 2}, ["temperature"]),
    "typical_p": ({}, 0.02),
    "min_keep": ({"typical_p": 0.001}, 300),
    "top_n_sigma": ({}, 0.1),
    "dynatemp_range": ({}, 1.0),
    "dynatemp_exponent": ({"dynatemp_range": 1.0}, 900.0),
    "xtc_probability": ({"xtc_threshold": 0.001}, 1.0),
    "xtc_threshold": ({"xtc_probability": 1.0}, 0.001),
    "repeat_last_n": ({**TWO, "repetition_penalty": 1000.0}, 1),
    "dry_multiplier": ({**TWO, "dry_allowed_length": 1}, 5.0),
    "dry_base": ({**DRY, "dry_multiplier": 0.3}, 90.0),
    "dry_allowed_length": ({**TWO, "dry_multiplier": 5.0}, 90),
    "dry_penalty_last_n": ({**TWO, "dry_multiplier": 5.0}, 2),
    "dry_breaker_ids": ({**DRY, "dry_breaker_ends": [1]}, [3]),
    "dry_breaker_ends": ({**DRY, "dry_breaker_ids": [200, 3]}, [1, 2]),
    "mirostat": ({}, 2),
    "mirostat_tau": (MIROSTAT, 0.1),
    "mirostat_eta": ({**MIROSTAT, "mirostat_tau": 1.0}, 5.0),
    "mirostat_mu": (MIROSTAT, 0.5),
    "infill_prefixes": (INFILL, PREFIXES.tobytes()),
    "post_sampling_probs": ({"logprobs": 2, "top_k": 2}, True),
}
# The values of fields that must not be missing beside the others.
OTHERWISE = {
    "dry_breaker_ids": [200],
    "dry_breaker_ends": [2],
    "infill_prefixes": NO_PREFIXES.tobytes(),
}
# The field: the file that reads it, and why executors do not.
ELSEWHERE = {
    "n": ("serving/generation/fan_out.py", "each of the n sequences is a request of its own"),
    "seed": ("engine/core.py", "executors get the seed as an argument"),
    "max_tokens": ("core/admission.py", "the scheduler ends a text at its last token"),
    "stop": ("serving/generation/text.py", "the front end looks for texts"),
    "stop_token_ids": ("core/exclusion.py", "executors get them with the end tokens"),
    "ignore_eos": ("core/exclusion.py", "executors get the ids that end a text"),
    "include_stop_str_in_output": ("serving/generation/text.py", "it is about the text"),
    "skip_special_tokens": ("serving/generation/text.py", "it is about the text"),
    "logprobs": ("sampling/params.py", "the rows of a step have the number of alternatives"),
    "prompt_logprobs": ("core/request.py", "the prompt gets rows of a step"),
    "bad_words": ("serving/calls/bad_words.py", "the front end turns them into bad_word_ids"),
    "repetition_detection": ("core/request.py", "the scheduler ends a text that repeats itself"),
    "label_ids": ("core/request.py", "each label gets a row of a step"),
    "cache_salt": ("engine/core.py", "it is a part of the keys of the prefix cache"),
    "adapter": ("engine/core.py", "the chunks of a step have the number of the adapter"),
    "adapter_scale": ("core/request.py", "the chunks of a step have it"),
    "structured_outputs": ("engine/core.py", "executors get the bitmask of each row"),
    "caller": ("engine/grammars/client.py", "clients take turns in queues"),
    "vectors": ("engine/core.py", "the engine pools vectors"),
    "truncate_prompt_tokens": ("offline/queue.py", "the prompt is cut before it is sent"),
    "extra_args": ("sampling/params.py", "it sets other fields"),
    "detokenize": ("outputs.py", "it is about the text"),
    "thinking_token_budget": ("offline/jobs.py", "a thought is a request of its own"),
    "skip_reading_prefix_cache": ("core/request.py", "the scheduler then reads no cached blocks"),
    "dry_sequence_breakers": ("serving/calls/sampler_ids.py", "it becomes dry_breaker_ids"),
}
# The field: why no value of it has an effect.
WITHOUT_EFFECT = {
    "spaces_between_special_tokens": "no tokenizer adds spaces",
    "output_kind": "LLM returns whole outputs",
    "stream_interval": "LLM does not stream, and the server has a field of its own",
    "skip_clone": "parameters are never changed, so they are not copied",
    "output_text_buffer_length": "LLM does not stream",
}


@pytest.fixture(scope="module", params=["native", "torch"])
def executor(request):
    """The executor of a tiny model."""
    from cpuserve.runtime.native import NativeExecutor

    checkpoint = open_checkpoint(tiny_model("llama"))
    program = build_program(spec_from_config(checkpoint.config))
    arguments = config(request.param), program, checkpoint.weights
    if request.param == "native":
        made = NativeExecutor(*arguments, _C.Team(1, None))
    else:
        made = TorchExecutor(*arguments)
    yield made
    made.close()


def sampled(executor, **fields):
    """Return the tokens after PROMPT and their alternatives."""
    params = SamplingParams(**fields)
    executor.admit(0, SlotRequest(params, SEED, PROMPT, [], [3]))
    sequence = Sequence(0, list(PROMPT), [0, 1])
    found = []
    for _ in range(TOKENS):
        row = LogitRow(len(sequence.tokens) - sequence.done - 1, num_top=params.num_top or 0)
        results = executor.step(step(sequence.chunk(rows=[row])))
        token, count = int(results.tokens[0]), params.num_top or 0
        tops = results.top_ids[0, :count].tolist(), results.top_logprobs[0, :count].tolist()
        found.append((token, tops))
        sequence.tokens.append(token)
    executor.release(0)
    return found


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sampling_field_changes_what_an_executor_samples(executor, name):
    others, value = SAMPLED[name]
    without = {name: OTHERWISE[name]} if name in OTHERWISE else {}
    assert sampled(executor, **others, **{name: value}) != sampled(executor, **others, **without)


def test_every_field_has_a_sampler_or_another_reader():
    known = [*SAMPLED, *ELSEWHERE, *WITHOUT_EFFECT, *REFUSED]  # REFUSED: any value is an error
    assert sorted(known) == sorted(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_field_that_no_sampler_reads_is_read_in_the_file_that_the_list_says(name):
    place, why = ELSEWHERE[name]
    assert why
    nodes = ast.walk(ast.parse((PACKAGE / place).read_text()))
    reads = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert name in reads, f"{place} does not read {name}"
