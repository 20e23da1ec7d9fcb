"""LLM.decide with real executors: logprobs of the same prompts, bits, and computed tokens."""

import math

import pytest

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.decisions.questions import checked, questions_from
from cpuserve.serving.generation.batch import decision_items
from cpuserve.serving.prompts.decision_prompts import GREEDY, decision_call
from tests.helpers.depth import deep_but
from tests.helpers.embedder import embedding_model
from tests.helpers.tiny import tiny_model

STATE = " ".join(f"item {i} costs {i * i % 97}." for i in range(40))
QUESTIONS = {
    "team": {
        "type": "choice",
        "instructions": "Which team should see this?",
        "criteria": {"billing": "payments and refunds", "security": None, "sales": "offers"},
    },
    "tone": {
        "type": "score",
        "instructions": "How angry is the writer?",
        "criteria": [f"level {i} of anger" for i in range(10)],
    },
    "urgent": {"type": "noul", "criteria": {"true": "there is a deadline"}},
    "letter": {"type": "choice", "criteria": {f"option {i}": None for i in range(26)}},
}
SIZES = {"max_model_len": 2048, "max_num_seqs": 8, "max_num_batched_tokens": 128}


def make(family="llama", **options):
    path = tiny_model(family, max_position_embeddings=4096)
    return LLM(str(path), **{"executor": "native", **SIZES, **options})


def computed(llm):
    """The prompt tokens that the engine has computed so far."""
    stats = llm._client.stats
    return stats.prefix_queries - stats.prefix_hits


def label_logprobs(llm, state, questions):
    """For each question the logprob of each label id, from the prompt and the label as a prompt."""
    call = decision_call(state, checked(questions_from(questions)))
    _, items = decision_items(llm._chat_context(None), call, SamplingParams(**GREEDY))
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = {}
    for name, item in zip(questions, items, strict=True):
        ids = item.prompt.labels.flat
        outputs = llm.generate([[*item.prompt.ids, number] for number in ids], scored)
        found[name] = [
            output.prompt_logprobs[-1][number].logprob
            for output, number in zip(outputs, ids, strict=True)
        ]
    return found


@pytest.mark.parametrize("executor", deep_but(["native"], ["native", "torch"]))
def test_probabilities_are_those_of_the_labels_logprobs(executor):
    questions = {name: QUESTIONS[name] for name in ("team", "tone", "urgent")}
    with make(executor=executor, max_num_batched_tokens=512) as llm:
        done = llm.decide("a short state", questions)
        wanted = label_logprobs(llm, "a short state", questions)
    for name, logprobs in wanted.items():
        each = [math.exp(logprob) for logprob in logprobs]
        shares = [p / sum(each) for p in each]
        assert [*done.answers[name].probabilities.values()] == pytest.approx(shares, abs=1e-6)
        assert done.diagnostics[name].label_mass == pytest.approx(sum(each), abs=1e-6)
        assert done.answers[name].confidence == pytest.approx(max(each), abs=1e-6)


@pytest.fixture(scope="module")
def alone():
    """The result of each question in an engine that caches nothing, one after another."""
    with make(enable_prefix_caching=False, omp_threads_bind="0") as llm:
        done = [llm.decide(STATE, {name: question}) for name, question in QUESTIONS.items()]
    return {
        name: (each.answers[name], each.diagnostics[name]) for each in done for name in each.answers
    }


@pytest.mark.parametrize("budget", deep_but([64], [64, 128, 2048]))
def test_number_and_order_of_questions_change_no_bit(alone, budget):
    with make(max_num_batched_tokens=budget) as llm:
        for names in (list(QUESTIONS), list(QUESTIONS)[::-1], ["urgent", "letter"], ["team"]):
            done = llm.decide(STATE, {name: QUESTIONS[name] for name in names})
            assert list(done.answers) == names
            for name in names:
                assert (done.answers[name], done.diagnostics[name]) == alone[name]


def test_many_equal_questions_beside_other_requests_change_no_bit(alone):
    with make(max_num_batched_tokens=256) as llm:
        many = {f"{name} {i}": QUESTIONS[name] for i in range(20) for name in QUESTIONS}
        done = llm.decide(STATE, many)
    for name, found in done.answers.items():
        assert found == alone[name.split()[0]][0]


@pytest.mark.parametrize("family", deep_but(["llama", "lfm2"], ["llama", "lfm2", "qwen3-next"]))
def test_the_state_is_computed_once(family):
    with make(family, max_num_batched_tokens=256) as llm:
        done = llm.decide(STATE, QUESTIONS)
        first = computed(llm)
        assert first == done.num_prompt_tokens
        assert done.num_cached_tokens == 0
        call = decision_call(STATE, checked(questions_from(QUESTIONS)))
        beginning, items = decision_items(llm._chat_context(None), call, SamplingParams(**GREEDY))
        (shared,) = {item.prompt.shared for item in items}
        assert len(beginning[0].prompt.ids) == shared
        assert shared % llm.config.block_size == 0
        assert first == shared + sum(len(item.prompt.ids) - shared for item in items)
        # Less than a block of the state is computed for each question (the header is short).
        state = llm.get_tokenizer().encode(STATE, add_special_tokens=False)
        assert abs(len(state) - shared) < llm.config.block_size
        again = llm.decide(STATE, QUESTIONS)
        assert again.answers == done.answers
        assert again.num_cached_tokens >= shared
        assert computed(llm) - first == again.num_prompt_tokens - again.num_cached_tokens


def test_questions_share_steps():
    """32 questions of about equal lengths, whose labels need more rows than some have tokens."""
    with make(max_num_batched_tokens=2048, max_num_seqs=64) as llm:
        questions = {str(i): {**QUESTIONS["tone"], "instructions": f"{i:02}?"} for i in range(32)}
        llm.decide("state", {"first": QUESTIONS["urgent"]})
        before = llm._client.stats.steps
        llm.decide(STATE, questions)
        first = llm._client.stats.steps - before
        llm.decide(STATE, questions)
        again = llm._client.stats.steps - before - first
    assert first <= 4
    assert again <= 3


def test_more_options_than_a_step_has_rows_are_refused():
    with make(max_num_batched_tokens=16, max_num_seqs=4) as llm:
        with pytest.raises(InvalidRequest, match="--max-num-batched-tokens"):
            llm.decide("state", {"a": QUESTIONS["letter"]})
        assert llm.decide("state", {"a": QUESTIONS["tone"]}).answers["a"].score >= 0


def test_instructions_and_template_are_those_of_the_caller():
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}bot:\n"
    with make() as llm:
        plain = llm.decide({"a": 1}, {"q": QUESTIONS["team"]})
        told = llm.decide({"a": 1}, {"q": QUESTIONS["team"]}, instructions="Be strict.")
        other = llm.decide({"a": 1}, {"q": QUESTIONS["team"]}, chat_template=template)
    assert plain.answers != told.answers
    assert plain.answers != other.answers
    assert plain.num_prompt_tokens < told.num_prompt_tokens


def test_a_model_of_embeddings_decides_nothing():
    made = LLM(str(embedding_model("last")), executor="native", max_model_len=256)
    with made as llm, pytest.raises(InvalidRequest, match="call embed"):
        llm.decide("state", {"a": QUESTIONS["urgent"]})


@pytest.mark.parametrize(
    ("questions", "words"),
    [
        ({}, "0 questions"),
        ({"a": {"type": "choice", "criteria": {}}}, "needs criteria"),
        ([1], "object"),
    ],
)
def test_bad_questions_are_refused(questions, words):
    with make() as llm, pytest.raises(InvalidRequest, match=words):
        llm.decide("state", questions)
