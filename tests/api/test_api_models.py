"""What clients of several servers read in lists of models: /v1/models, /api/tags, /api/show."""

import pytest

from cpuserve.api.lifecycle.front_end import FrontEnd
from cpuserve.config.server import ServerOptions
from cpuserve.platforms.cpu import CpuPlatform
from cpuserve.serving.models.details import ModelDetails
from tests.api.fakes import MAX_LEN, Api, FakeEngine
from tests.api.test_api_served import Second
from tests.api.tools import TEMPLATE, says, tool_api
from tests.helpers.fake_executor import fake_config

DETAILS = ModelDetails(
    source="tiny.gguf",
    family="llama",
    format="gguf",
    quantization="Q4_K",
    parameters=134_515_008,
    size_bytes=98_000_000,
    trained_len=8192,
    vocab=512,
    width=64,
    layers=2,
)
ANTHROPIC = {"anthropic-version": "2023-06-01"}
THINKS = TEMPLATE + "{# <think> </think> #}{{ reasoning_effort }}"


def described(**options):
    api = Api(**options)
    api.context.details = DETAILS
    return api


def cards(api, query=""):
    return {card["id"]: card for card in api.get(f"/v1/models{query}").json()["data"]}


def test_a_card_has_the_numbers_of_the_model_under_each_servers_name():
    card = cards(described())["tiny"]
    lengths = ("max_model_len", "context_length", "max_context_length")
    assert [card[name] for name in lengths] == [MAX_LEN] * 3
    assert card["meta"] == {
        "n_ctx": MAX_LEN,
        "n_ctx_train": 8192,
        "n_vocab": 512,
        "n_embd": 64,
        "n_params": 134_515_008,
        "size": 98_000_000,
        "ftype": "Q4_K",
    }
    assert card["status"] == {"value": "loaded"}
    assert card["architecture"] == {"input_modalities": ["text"], "output_modalities": ["text"]}
    assert (card["root"], card["parent"], card["aliases"]) == ("tiny", None, ["alias"])
    (permission,) = card["permission"]
    assert permission["object"] == "model_permission"
    assert permission["allow_sampling"] is True
    assert permission["allow_fine_tuning"] is False


def test_numbers_that_are_unknown_are_null():
    meta = cards(Api())["tiny"]["meta"]
    assert meta["n_ctx"] == MAX_LEN
    assert {meta[name] for name in ("n_ctx_train", "n_params", "size", "n_vocab")} == {None}


def test_an_adapter_has_its_path_and_its_model():
    api = described()
    api.context.adapters["polite"] = "/adapters/polite"
    card = cards(api)["polite"]
    assert (card["root"], card["parent"]) == ("/adapters/polite", "tiny")
    assert card["aliases"] == []
    assert card["meta"]["n_ctx"] == MAX_LEN
    (listed,) = [m for m in api.get("/api/tags").json()["models"] if m["name"] == "polite"]
    assert listed["details"]["parent_model"] == "tiny"


@pytest.mark.parametrize(
    ("pooling", "result"), [("last", "embeddings"), ("mean", "embeddings"), ("rank", "scores")]
)
def test_a_model_without_text_says_so(pooling, result):
    api = described()
    api.context.pooling = pooling
    card = cards(api)["tiny"]
    assert card["architecture"]["output_modalities"] == [result]
    assert card["supported_parameters"] == []
    assert card["permission"][0]["allow_sampling"] is False
    able = api.post("/api/show", model="tiny").json()["capabilities"]
    assert able == (["embedding"] if result == "embeddings" else [])
    found = api.request("GET", "/v1/models/tiny", headers=ANTHROPIC).json()["capabilities"]
    assert found["structured_outputs"] == {"supported": False}


@pytest.mark.parametrize(
    ("source", "tools", "thinks"),
    [(TEMPLATE, True, False), (THINKS, True, True), ("{{ tools }}{{ messages }}", False, False)],
    ids=["tools", "thoughts", "unknown calls"],
)
def test_every_dialect_says_what_the_template_can_do(source, tools, thinks):
    api = tool_api(says(""), source=source)
    card = cards(api)["tiny"]
    parameters = {*card["supported_parameters"]}
    assert {"temperature", "top_k", "response_format", "structured_outputs", "stop"} <= parameters
    assert ({"tools", "tool_choice"} <= parameters) == tools
    assert ("reasoning_effort" in parameters) == thinks
    assert "prediction" not in parameters, "it is refused"
    able = api.post("/api/show", model="tiny").json()["capabilities"]
    assert able == ["completion", *["tools"] * tools, *["thinking"] * thinks]
    assert api.get("/v1/models").json()["models"][0]["capabilities"] == able
    found = api.request("GET", "/v1/models/tiny", headers=ANTHROPIC).json()["capabilities"]
    assert found["thinking"]["supported"] == found["effort"]["supported"] == thinks
    assert found["thinking"]["types"]["disabled"] == {"supported": True}


def test_anthropics_types_accept_the_capabilities():
    types = pytest.importorskip("anthropic.types")
    body = described().request("GET", "/v1/models/tiny", headers=ANTHROPIC).json()
    info = types.ModelInfo.model_validate(body)
    assert info.max_input_tokens == MAX_LEN
    assert info.capabilities.structured_outputs.supported
    assert not info.capabilities.image_input.supported


def test_a_model_that_is_not_loaded_is_listed_without_numbers():
    second = Second()
    api = Api(loaders=[second])
    card = cards(api)["b"]
    assert card["status"] == {"value": "unloaded"}
    assert [card[name] for name in ("max_model_len", "meta", "architecture")] == [None] * 3
    assert card["supported_parameters"] == []
    found = api.request("GET", "/v1/models/b", headers=ANTHROPIC).json()
    assert (found["max_tokens"], found["capabilities"]) == (None, None)
    assert second.loads == 0, "a list loads nothing"
    assert api.complete(model="b").status_code == 200
    assert cards(api)["b"]["status"] == {"value": "loaded"}


def test_a_model_with_an_engine_that_starts_again_is_loading():
    api = described()
    api.engine.alive = False
    assert cards(api)["tiny"]["status"] == {"value": "loading"}


def test_codex_gets_no_entry_that_would_replace_its_prompt():
    """An entry in its format needs instructions, and a list without any is valid."""
    api = described()
    body = api.get("/v1/models?client_version=0.169.0").json()
    assert body["models"] == []
    assert [card["id"] for card in body["data"]] == ["tiny", "alias"]
    (first, _) = api.get("/v1/models").json()["models"]
    assert (first["name"], first["model"], first["type"]) == ("tiny", "tiny", "model")
    assert first["size"] == 98_000_000


def test_clients_of_ollama_get_the_details_of_the_model():
    api = described(default_sampling={"temperature": 0.5, "repetition_penalty": 1.1})
    details = {
        "parent_model": "",
        "format": "gguf",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "134.52M",
        "quantization_level": "Q4_K",
    }
    for path in ("/api/tags", "/api/ps"):
        model = api.get(path).json()["models"][0]
        assert (model["details"], model["size"]) == (details, 98_000_000)
    shown = api.post("/api/show", model="tiny").json()
    assert shown["details"] == details
    assert shown["model_info"] == {
        "general.architecture": "llama",
        "general.basename": "tiny",
        "general.parameter_count": 134_515_008,
        "llama.context_length": MAX_LEN,
        "llama.embedding_length": 64,
        "llama.block_count": 2,
    }
    lines = dict(line.split() for line in shown["parameters"].splitlines())
    assert lines == {"num_ctx": str(MAX_LEN), "temperature": "0.5", "repeat_penalty": "1.1"}


@pytest.mark.parametrize(
    ("parameters", "shown"),
    [(0, ""), (999, "999"), (26_464, "26.46K"), (134_515_008, "134.52M"), (7_615_616_512, "7.6B")],
)
def test_a_number_of_parameters_is_shown_as_ollama_shows_it(parameters, shown):
    assert ModelDetails(parameters=parameters).parameter_size == shown


def test_the_front_end_shows_the_details_that_it_was_given():
    engine, config, options = FakeEngine(), fake_config(), ServerOptions()
    assert FrontEnd(engine, [config], options, "", CpuPlatform()).context.details == ModelDetails()
    described = FrontEnd(engine, [config], options, "", CpuPlatform(), details=DETAILS)
    assert described.context.details is DETAILS
