"""Decisions of a real server are the logprobs of /v1/completions after the same prompt."""

import math

import pytest

from tests.helpers.served import default_model
from tests.helpers.tiny import tiny_model

STATE = "The parcel was late, and the box was wet. I want my money back today."
QUESTIONS = {
    "team": {
        "type": "choice",
        "instructions": "Which team should handle this?",
        "criteria": {"billing": "refunds", "shipping": None, "sales": "offers"},
    },
    "tone": {"type": "score", "instructions": "How upset?", "criteria": ["calm", "angry"]},
}
TEXTS = {
    "team": "Which team should handle this?\nA. billing: refunds\nB. shipping\nC. sales: offers\n"
    "Reply with A or B or C, and write nothing else.",
    "tone": "How upset?\n0. calm\n1. angry\nReply with 0 or 1, and write nothing else.",
}
LABELS = {"team": "ABC", "tone": "01"}


def tiny():
    return tiny_model("llama", dtype="bfloat16")


@pytest.mark.parametrize(
    "model",
    [tiny, pytest.param(default_model, marks=[pytest.mark.network, pytest.mark.deep])],
    ids=["tiny", "smollm2"],
)
def test_probabilities_are_the_logprobs_of_completions(shared_server, model):
    server = shared_server(model(), "--served-model-name", "tiny")
    done = server.post("/v1/systemone", state=STATE, questions=QUESTIONS)
    first = server.post("/v1/systemone", state=STATE, questions={"tone": QUESTIONS["tone"]})
    wanted = {name: logprobs(server, name) for name in QUESTIONS}
    for name, found in wanted.items():
        each = [math.exp(logprob) for logprob in found]
        shares = [p / sum(each) for p in each]
        answer, seen = done["answers"][name], done["diagnostics"][name]
        assert [*answer["probabilities"].values()] == pytest.approx(shares, abs=1e-6)
        assert answer["confidence"] == pytest.approx(max(each), abs=1e-6)
        assert seen["label_mass"] == pytest.approx(sum(each), abs=1e-6)
    assert first["answers"]["tone"] == done["answers"]["tone"]
    assert done["usage"]["output_tokens"] == 2


def logprobs(server, name):
    """The logprob of each label after the prompt of a question."""
    message = {"role": "user", "content": f"{STATE}\n\n{TEXTS[name]}"}
    prompt = server.post("/tokenize", messages=[message], add_generation_prompt=True)["tokens"]
    found = []
    for label in LABELS[name]:
        (number,) = server.post("/tokenize", prompt=label, add_special_tokens=False)["tokens"]
        body = {"prompt": [*prompt, number], "max_tokens": 1, "prompt_logprobs": 0}
        (choice,) = server.post("/v1/completions", **body)["choices"]
        found.append(choice["prompt_logprobs"][-1][str(number)]["logprob"])
    return found
