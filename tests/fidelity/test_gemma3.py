"""A second real model, Gemma 3 270M from a Q4_K_M file, against transformers in fp32.

It has windows, one KV head, 262,144 tokens and a SentencePiece vocabulary, as larger models have.
"""

import hashlib

import pytest

from tests.fidelity.passages import (
    GEMMA3,
    GEMMA3_PASSAGES,
    TEXT,
    passages,
    reference,
)
from tests.fidelity.test_nll import compare, compare_greedy
from tests.helpers.second_model import MODEL, second_model
from tests.helpers.served import running_server

pytestmark = [pytest.mark.deep, pytest.mark.network]  # 240 MB, and a minute of the model

MEAN_TOLERANCE = 0.005  # nats a token; 0.0004 were measured


@pytest.fixture(scope="module")
def golden():
    return reference(GEMMA3)


@pytest.fixture(scope="module")
def server():
    with running_server(second_model()) as client:
        yield client


def test_the_reference_is_of_this_text_and_model(golden):
    assert golden["text_sha256"] == hashlib.sha256(TEXT.read_bytes()).hexdigest()
    assert golden["model"]["sha256"] == MODEL.sha256
    assert len(golden["passages"]) == GEMMA3_PASSAGES


def test_the_negative_log_likelihood_is_the_references(server, golden):
    compare(server, golden["passages"], MEAN_TOLERANCE, passages()[:GEMMA3_PASSAGES], start=True)


def test_greedy_continuations_agree(server, golden):
    compare_greedy(server, golden["greedy"])
