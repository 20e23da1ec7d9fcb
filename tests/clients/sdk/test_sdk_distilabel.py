"""distilabel: InferenceEndpointsLLM, which asks for prompts with `details`, and for chats."""

import logging

import pytest
from distilabel.models import InferenceEndpointsLLM

from tests.clients.sdk.flows import SAID, SAY, user


@pytest.fixture
def model(server):
    """The client, which only logs errors; the test fails if it does."""
    found = InferenceEndpointsLLM(base_url=server.url, api_key="none")
    found.load()
    return found


@pytest.mark.parametrize("asked", [SAY, user(SAY)], ids=["prompt", "chat"])
def test_texts_are_generated(model, asked, caplog):
    with caplog.at_level(logging.WARNING):
        found = model.generate_outputs(inputs=[asked], max_new_tokens=64)
    assert not caplog.records
    assert found[0]["generations"] == [SAID]
    assert found[0]["statistics"]["output_tokens"][0] > 2


def test_sampling_and_logprobs_are_taken(model):
    sampling = {"do_sample": True, "temperature": 0.5, "top_k": 4, "stop_sequences": ["zzz"]}
    found = model.generate_outputs(inputs=[SAY], top_n_tokens=2, **sampling)
    assert found[0]["generations"] == [SAID]
    assert all(len(top) == 2 for top in found[0]["logprobs"][0])
