"""POST /v1/systemone: its format, its prompts, and what is refused."""

import math

import pytest

from cpuserve.engine.ipc import Output, TokenLogprob
from cpuserve.serving.models.limits import ClientLimits
from tests.api.fakes import Api, error_of, make_context, tokenizer

PATH = "/v1/systemone"
TEAM = {
    "type": "choice",
    "instructions": "Which team?",
    "criteria": {"billing": "pay", "security": None},
}
TONE = {"type": "score", "instructions": "How angry?", "criteria": ["calm", "angry", "furious"]}
URGENT = {"type": "noul", "instructions": "Is it urgent?"}
ALL = {"team": TEAM, "tone": TONE, "urgent": URGENT}


def decide(engine, number, prompt, params):
    """The most likely token is the first label; label i of n has a share of 1 + i."""
    if not params.max_tokens:
        yield Output(number, [], "length", cached_tokens=32)
        return
    assert (params.max_tokens, params.temperature, params.logprobs) == (1, 0.0, 0)
    ids = params.label_ids
    top = [(number, math.log((1 + i) / 100)) for i, number in enumerate(ids)]
    cached = 96 if engine.info.get("prefix_caching") else 0
    yield Output(
        number,
        [ids[0]],
        "length",
        logprobs=[TokenLogprob(ids[0], -0.1, 1, top)],
        cached_tokens=cached,
    )


@pytest.fixture
def api():
    return Api(decide)


@pytest.fixture
def caching():
    """A server with a prefix cache, which knows its blocks, and a context for long states."""
    made = Api(decide)
    made.engine.info |= {"block_size": 32, "prefix_caching": True, "max_model_len": 512}
    made.context.max_model_len = 512
    made.context.set_ready(tokenizer(), made.context.get_chat_template())
    return made


def test_each_question_has_a_result_and_diagnostics(api):
    answer = api.post(PATH, state="hi", questions=ALL).json()
    assert answer["id"].startswith("decision-")
    assert (answer["object"], answer["model"]) == ("structured_decision", "tiny")
    team, tone, urgent = (answer["answers"][name] for name in ALL)
    assert team == {
        "type": "choice",
        "choice": "security",
        "probabilities": pytest.approx({"billing": 1 / 3, "security": 2 / 3}),
        "confidence": pytest.approx(0.02),
    }
    assert tone == {
        "type": "score",
        "score": pytest.approx(8 / 6),
        "legend": {"0": "calm", "1": "angry", "2": "furious"},
        "probabilities": pytest.approx({"0": 1 / 6, "1": 2 / 6, "2": 3 / 6}),
        "confidence": pytest.approx(0.03),
    }
    assert urgent == {
        "type": "noul",
        "noul": pytest.approx(1 / 3),
        "probabilities": pytest.approx({"yes": 1 / 3, "no": 2 / 3}),
        "confidence": pytest.approx(0.02),
    }
    assert answer["diagnostics"]["tone"] == {
        "label_mass": pytest.approx(0.06),
        "argmax_is_label": True,
    }
    assert list(answer["answers"]) == list(answer["diagnostics"]) == list(ALL)
    prompts = [prompt for prompt, _ in api.engine.asked]
    assert answer["usage"] == {
        "input_tokens": sum(map(len, prompts)),
        "output_tokens": 3,
        "cached_tokens": 0,
    }


def test_the_question_follows_the_state_and_instructions_are_a_system_message(api):
    api.post(PATH, state={"n": 1}, questions={"a": TEAM}, instructions="be fair")
    ((prompt, params),) = api.engine.asked
    assert tokenizer().decode(prompt, skip_special_tokens=False) == (
        "<|im_start|>system\nbe fair<|im_end|>\n"
        '<|im_start|>user\n{"n": 1}\n\nWhich team?\nA. billing: pay\nB. security\n'
        "Reply with A or B, and write nothing else.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert params.label_ids == [tokenizer().encode(c, add_special_tokens=False)[0] for c in "AB"]


def test_salt_priority_and_timeout_are_those_of_the_request(api):
    api.post(PATH, state="hi", questions={"a": TEAM}, cache_salt="s", priority=3, timeout=7)
    ((_, params),) = api.engine.asked
    assert (params.cache_salt, api.engine.priorities, api.engine.wishes) == (
        "s",
        [3],
        [(7.0, False)],
    )


def test_the_state_is_computed_first_and_counts_once(caching):
    answer = caching.post(PATH, state="s" * 120, questions=ALL).json()
    (first, alone), *questions = caching.engine.asked
    assert (alone.max_tokens, alone.label_ids, len(first) % 32) == (0, [], 0)
    assert len(first) >= 96
    assert len(questions) == 3
    assert all(prompt[: len(first)] == first for prompt, _ in questions)
    own = sum(len(prompt) - len(first) for prompt, _ in questions)
    assert answer["usage"]["input_tokens"] == len(first) + own
    assert answer["usage"]["output_tokens"] == 3
    assert answer["usage"]["cached_tokens"] == 32 + 3 * max(0, 96 - len(first))


def test_one_question_needs_no_step_of_its_own_for_the_state(caching):
    assert caching.post(PATH, state="s" * 120, questions={"a": TEAM}).status_code == 200
    assert len(caching.engine.asked) == 1


def test_a_failure_while_the_state_is_computed_is_the_response(caching):
    def fails(engine, number, prompt, params):
        yield Output(number, [], "error", error="it broke")

    caching.engine.script = fails
    response = caching.post(PATH, state="s" * 120, questions=ALL)
    assert response.status_code == 500
    assert len(caching.engine.asked) == 1
    assert caching.context.active_sequences == 0


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"questions": {}}, "questions", "0 questions"),
        ({"questions": None}, "questions", "must be an object"),
        ({"questions": []}, "questions", "must be an object"),
        ({"questions": {"a": {"type": "maybe"}}}, "questions", "maybe"),
        ({"questions": {"a": {"instructions": "?"}}}, "questions", "type"),
        ({"questions": {str(i): URGENT for i in range(2000)}}, "questions", "2000 questions"),
        ({"questions": {str(i): URGENT for i in range(10_000)}}, "questions", "at most"),
        ({"questions": {"a": {**TEAM, "weight": 2}}}, "questions", "weight"),
        ({"state": None}, "state", "state must be"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "an object"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs", "thought"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "reserved"),
        ({"cache_salt": "a@b"}, "cache_salt", "cache_salt"),
        ({"priority": 2**40}, "priority", "32-bit"),
        ({"stream": True}, "stream", "stream is not possible"),
        ({"images": ["aGk="]}, "images", "not supported"),
        ({"decision_template": "{{ x }}"}, "decision_template", "not supported"),
        ({"state": "x" * 5000}, "state", "context length"),
        ({"model": "other"}, "model", "other"),
    ],
)
def test_a_request_that_is_not_possible_is_refused(api, change, param, words):
    body = {"state": "hi", "questions": {"a": URGENT}, **change}
    response = api.post(PATH, **body)
    assert response.status_code == (404 if param == "model" else 400)
    error = error_of(response)
    assert error["param"] == param
    assert words in error["message"]
    assert not api.engine.asked


def test_a_missing_state_and_missing_questions_are_refused(api):
    assert error_of(api.post(PATH, questions=ALL))["message"] == "state is missing"
    assert error_of(api.post(PATH, state="hi"))["message"] == "questions is missing"


def test_a_name_that_occurs_twice_is_refused(api):
    body = b'{"state": "hi", "questions": {"a": {"type": "noul"}, "a": {"type": "noul"}}}'
    response = api.raw(PATH, body)
    assert response.status_code == 400
    assert "occurs twice" in error_of(response)["message"]


def test_prompts_of_too_many_characters_are_refused(api, monkeypatch):
    monkeypatch.setattr("cpuserve.serving.prompts.decision_prompts.MAX_CHARS", 300)
    response = api.post(PATH, state="hi", questions=ALL)
    assert response.status_code == 400
    assert "Send fewer questions" in error_of(response)["message"]


def test_a_model_of_embeddings_or_without_a_template_is_refused(api):
    api.context.pooling = "mean"
    response = api.post(PATH, state="hi", questions=ALL)
    assert response.status_code == 400
    assert "/v1/embeddings" in error_of(response)["message"]
    bare = Api(decide)
    bare.context.get_chat_template().source = None
    response = bare.post(PATH, state="hi", questions=ALL)
    assert response.status_code == 400
    assert "--chat-template" in error_of(response)["message"]


def test_a_template_without_the_users_text_is_refused(api):
    api.context.get_chat_template().source = "hello {% for m in messages %}{% endfor %}"
    response = api.post(PATH, state="hi", questions=ALL)
    assert response.status_code == 400


def test_a_thought_that_the_template_begins_is_ended(api):
    template = api.context.get_chat_template()
    template.source = template.source + "{% if add_generation_prompt %}<think>\n{% endif %}"
    assert api.post(PATH, state="hi", questions={"a": TEAM}).status_code == 200
    ((prompt, _),) = api.engine.asked
    text = tokenizer().decode(prompt, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_full_server_refuses_the_questions_together():
    api = Api(decide, http=ClientLimits(max_sequences=2))
    response = api.post(PATH, state="hi", questions=ALL)
    assert response.status_code == 429
    assert make_context().active_sequences == api.context.active_sequences == 0
