"""Every endpoint answers to the byte as recorded: answers, streams, errors (see recorded.py)."""

import json

import pytest

from tests.api import recorded

ANSWERS = json.loads(recorded.GOLDEN.read_text("utf-8"))
REQUESTS = recorded.requests()


def test_each_request_has_a_recorded_answer():
    assert list(REQUESTS) == list(ANSWERS)


@pytest.mark.parametrize("name", REQUESTS)
def test_the_answer_is_the_recorded_one(name):
    assert recorded.recorded(REQUESTS[name]) == ANSWERS[name]


def test_recorded_streams_end_and_whole_answers_are_json():
    for name, answer in ANSWERS.items():
        body = "".join(answer["body"])
        if answer["headers"].get("content-type", "").startswith("text/event-stream"):
            ends = ("data: [DONE]\n\n", 'data: {"type":"message_stop"}\n\n')
            ends += ("}}\n\n", '},"request_id":"recorded"}\n\n')  # of errors
            assert body.endswith(ends), name
            assert '"stream": true' in json.dumps(REQUESTS[name]["body"])
        else:  # a whole answer, or lines of JSON
            for line in body.splitlines():
                json.loads(line)
