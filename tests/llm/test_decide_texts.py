"""Options that are scored as texts: the logprobs of their tokens, and the same bits anywhere."""

import math

import pytest

from cpuserve import SamplingParams
from cpuserve.base.errors import InvalidRequest
from tests.helpers.depth import deep_but
from tests.llm.test_decide import QUESTIONS, STATE, make

NAMES = ("refund the whole order", "refund", "send a new parcel", "do nothing at all")
TEXTS = {
    "what": {
        "type": "choice",
        "instructions": "What should we do?",
        "criteria": dict.fromkeys(NAMES) | {"refund": "only a part"},
        "as_texts": True,
    },
    "mood": {"type": "score", "criteria": ["calm", "very angry"], "as_texts": True},
    "now": {"type": "noul", "as_texts": True},
}
SHOWN = {
    "what": "What should we do?\n- refund the whole order\n- refund: only a part\n"
    "- send a new parcel\n- do nothing at all\n",
    "mood": "- calm\n- very angry\n",
    "now": "- yes\n- no\n",
}
OPTIONS = {"what": NAMES, "mood": ("calm", "very angry"), "now": ("yes", "no")}
END = "Reply with one of these options, and write nothing else."


def logprobs(llm, name):
    """The sum of the logprobs of each text's tokens, from the prompt and the text as a prompt."""
    message = {"role": "user", "content": f"{STATE}\n\n{SHOWN[name]}{END}"}
    (chat,) = llm.chat([message], SamplingParams(max_tokens=1), use_tqdm=False)
    found = []
    for text in OPTIONS[name]:
        prompt = chat.prompt_token_ids
        ids = llm._tokenizer.encode(text, add_special_tokens=False)
        scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
        (done,) = llm.generate([[*prompt, *ids]], scored, use_tqdm=False)
        rows = done.prompt_logprobs[len(prompt) :]
        found.append(sum(row[token].logprob for row, token in zip(rows, ids, strict=True)))
    return found


@pytest.mark.parametrize("executor", deep_but(["native"], ["native", "torch"]))
def test_probabilities_are_those_of_the_tokens_of_the_texts(executor):
    with make(executor=executor) as llm:
        done = llm.decide(STATE, TEXTS, use_tqdm=False)
        wanted = {name: logprobs(llm, name) for name in TEXTS}
    for name, found in wanted.items():
        each = [math.exp(logprob) for logprob in found]
        most = max(found)
        total = sum(math.exp(logprob - most) for logprob in found)
        shares = [math.exp(logprob - most) / total for logprob in found]
        result, seen = done.answers[name], done.diagnostics[name]
        assert [*result.probabilities.values()] == pytest.approx(shares, abs=1e-6)
        assert result.confidence == pytest.approx(max(each), abs=1e-6)
        assert seen.label_mass == pytest.approx(sum(each), abs=1e-6)
    assert len(set(wanted["what"])) == len(NAMES)


@pytest.mark.deep
def test_a_result_has_the_same_bits_among_other_questions_and_with_any_cache():
    with make(enable_prefix_caching=False, max_num_seqs=1) as llm:
        alone = {name: llm.decide(STATE, {name: TEXTS[name]}).answers[name] for name in TEXTS}
    with make() as llm:
        for asked in ({**TEXTS, **QUESTIONS}, {**QUESTIONS, **TEXTS}, TEXTS):
            found = llm.decide(STATE, asked, use_tqdm=False).answers
            assert {name: found[name] for name in TEXTS} == alone


def test_a_prompt_that_leaves_no_room_for_the_texts_is_refused():
    with make(max_model_len=256, max_num_batched_tokens=256) as llm:
        long = {"a": {"type": "choice", "criteria": {"b " * 200: None}, "as_texts": True}}
        with pytest.raises(InvalidRequest, match="maximum context length"):
            llm.decide("a", long)
