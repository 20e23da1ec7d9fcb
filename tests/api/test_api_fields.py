"""The request fields that OpenAI, vLLM, llama.cpp and Ollama document: each is honoured, refused
by name, or listed as without effect on the answer (the fields are in a file of tests/data)."""

import functools
import json
import re
from pathlib import Path

import pytest

from cpuserve.api.ollama.options import OllamaOptions
from cpuserve.api.ollama.schema import OllamaChat, OllamaGenerate
from cpuserve.api.openai.chat.schema import ChatRequest
from cpuserve.api.openai.completions.schema import CompletionRequest, to_call
from cpuserve.api.openai.responses.schema import ResponsesRequest
from cpuserve.api.request import fields
from tests.api.fakes import Api
from tests.helpers.depth import deep_but

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
BODIES = {
    CHAT: {"messages": HI},
    TEXT: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    "/api/chat": {"model": "tiny", "messages": HI, "stream": False},
    "/api/generate": {"model": "tiny", "prompt": "hi", "stream": False},
}
# A value for each field that changes the answer where the field has an effect.
HONOURED = {
    "vllm_xargs": {"no_repeat_ngram_size": 2},
    "add_generation_prompt": False,
    "allowed_token_ids": [5],
    "bad_words": ["w"],
    "cache_salt": "a",
    "chat_template_kwargs": {"mark": "m"},
    "continue_final_message": True,
    "echo": True,
    "frequency_penalty": 0.5,
    "guided_choice": ["a", "b"],
    "guided_grammar": 'start: "a"',
    "guided_json": {},
    "guided_regex": "a",
    "ignore_eos": True,
    "include": ["message.output_text.logprobs"],
    "include_stop_str_in_output": True,
    "input": "others",
    "instructions": "be kind",
    "logit_bias": {"5": 1},
    "logprob_token_ids": {
        CHAT: {"logprobs": True, "logprob_token_ids": [7]},
        TEXT: {"logprobs": 1, "logprob_token_ids": [7]},
    },
    "logprobs": {CHAT: True, TEXT: 1, "/api/chat": True, "/api/generate": True},
    "max_completion_tokens": 3,
    "max_output_tokens": 3,
    "max_tokens": 3,
    "messages": [{"role": "user", "content": "others"}],
    "metadata": {RESPONSES: {"a": "b"}},
    "min_p": 0.5,
    "min_tokens": 3,
    "model": "alias",
    "length_penalty": {
        CHAT: {"use_beam_search": True, "length_penalty": 2},
        TEXT: {"use_beam_search": True, "length_penalty": 2},
    },
    "n": {CHAT: 2, TEXT: 2},
    "n_predict": 3,
    "presence_penalty": 0.5,
    "priority": 3,
    "prompt": {TEXT: "others", "/api/generate": "others"},
    "prompt_logprobs": 1,
    "reasoning": {"effort": "low"},
    "reasoning_effort": {CHAT: "low"},
    "repeat_penalty": 1.5,
    "repetition_detection": {"max_pattern_size": 2, "min_count": 2},
    "request_id": {CHAT: "mine", TEXT: "mine"},
    "return_prompt_text": {CHAT: True},
    "repetition_penalty": 1.5,
    "response_format": {"type": "json_object"},
    "return_token_ids": True,
    "return_tokens_as_token_ids": {
        CHAT: {"logprobs": True, "return_tokens_as_token_ids": True},
        TEXT: {"logprobs": 1, "return_tokens_as_token_ids": True},
    },
    "seed": 3,
    "skip_special_tokens": False,
    "stop": ["w"],
    "stop_token_ids": [5],
    "stream": {CHAT: True, TEXT: True, RESPONSES: True, "/api/chat": True, "/api/generate": True},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "structured_outputs": {"regex": "a"},
    "temperature": 0.5,
    "truncate_prompt_tokens": 1,
    "text": {"format": {"type": "json_object"}},
    "thinking": {CHAT: {"type": "disabled"}},
    "top_k": 3,
    "top_p": 0.5,
    "top_logprobs": {
        CHAT: {"logprobs": True, "top_logprobs": 1},
        RESPONSES: {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
    },
    "format": "json",
    "raw": True,
    "system": "be kind",
    "timings_per_token": {CHAT: True, TEXT: True},
    "think": {"/api/chat": False},
    "use_beam_search": {CHAT: True, TEXT: True},
    "num_predict": 3,
    # The samplers of llama.cpp.
    "samplers": ["top_k"],
    "typical_p": 0.5,
    "min_keep": 3,
    "top_n_sigma": 1.5,
    "dynatemp_range": 0.5,
    "dynatemp_exponent": 2.0,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "repeat_last_n": 64,
    "dry_multiplier": 0.8,
    "dry_base": 2.0,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 4,
    "dry_sequence_breakers": ["a"],
    "mirostat": 2,
    "mirostat_tau": 4.0,
    "mirostat_eta": 0.2,
}
# Fields without effect on the text of an answer, and why.
NO_EFFECT = {
    # This tokenizer has no special tokens to add.
    "add_special_tokens": False,
    # The request is not changed by who asks, or by what is kept elsewhere.
    "user": "a", "metadata": {"a": "b"}, "store": True, "safety_identifier": "a",
    "service_tier": "auto", "request_id": "a", "session_id": "a",
    # Values that refer to nothing stored; tests/api/test_api_stored.py has the others.
    "previous_response_id": "", "conversation": None, "background": False,
    # This model reads no pictures; tests/api/test_api_pictures.py has one that does.
    "images": [],
    # About caches and machines.
    "prompt_cache_key": "a", "prompt_cache_retention": "24h", "cache_prompt": False, "id_slot": 1,
    "keep_alive": 60, "num_ctx": 64, "num_batch": 8, "num_gpu": 1, "main_gpu": 0, "use_mmap": True,
    "num_thread": 2, "numa": True, "low_vram": True, "f16_kv": True, "vocab_only": False,
    "use_mlock": True, "logits_all": True, "embedding_only": False, "kv_transfer_params": {"a": 1},
    "ec_transfer_params": {"a": 1}, "return_mm_kwargs": False, "return_token_offsets": True,
    "routed_experts_prompt_start": 1,
    "guided_decoding_backend": "xgrammar", "draft_num_predict": 4,
    # How events are cut and timed, not what is in them.
    "stream_interval": 4, "timings_per_token": True, "sse_ping_interval": 5,
    "return_progress": True,
    # A context is never shifted or cut, so nothing is kept of it.
    "n_keep": 4, "n_discard": 4, "num_keep": 4, "truncate": False, "shift": False,
    "truncation": "auto", "truncation_side": "left",
    # Images are refused where they are.
    "mm_processor_kwargs": {"a": 1}, "media_io_kwargs": {"a": 1}, "modalities": ["text"],
    # Of a sampler that is refused when it is switched on.
    "adaptive_decay": 0.5, "backend_sampling": True,
    "best_of": 1, "spaces_between_special_tokens": False,
    # The model does not think: tests/api/test_api_thoughts.py has models that do.
    "include_reasoning": False, "thinking_token_budget": 5, "thinking_budget_tokens": 5,
    "reasoning_budget_tokens": 5,
    # The model has no tokens for a suffix: tests/api/test_api_vllm_fields.py has one that does.
    "suffix": "",
    # An earlier conversation: tests/api/test_api_ollama.py has others.
    "context": [],
    # Hints that no model here reads; thoughts are apart from the text.
    "verbosity": "low", "reasoning_format": "none", "parallel_tool_calls": True, "tools": [],
    "tool_choice": "none", "max_tool_calls": 3, "functions": [], "function_call": "none",
}  # fmt: skip
# A value that sets a field which is refused.
SETS = {
    "include_reasoning": False, "penalize_newline": False, "length_penalty": 0.5, "n_cmpl": 2,
    "web_search_options": {}, "tfs_z": 0.5, "post_sampling_probs": True,
}  # fmt: skip
# The endpoints by their names in the table of fields.
ENDPOINTS = {
    CHAT: fields.CHAT,
    TEXT: fields.TEXT,
    RESPONSES: fields.RESPONSES,
    "/api/chat": fields.OLLAMA,
    "/api/generate": fields.OLLAMA_TEXT,
}
KINDS = {
    CHAT: ChatRequest,
    TEXT: CompletionRequest,
    RESPONSES: ResponsesRequest,
    "/api/chat": OllamaChat,
    "/api/generate": OllamaGenerate,
}

DOCUMENTED = json.loads((Path(__file__).parents[1] / "data" / "request_fields.json").read_text())
# (path, field, the object that has it)
CASES = sorted(
    {
        (route.partition(" ")[0], field, route.partition(" ")[2])
        for server, routes in DOCUMENTED.items()
        if server != "vllm pooling"  # tests/api/test_api_pooling_fields.py
        for route, fields in routes.items()
        for field in fields
    }
)


# A field of a sampler that is off has no effect, so the request switches the sampler on.
SAMPLER_ON = {
    **dict.fromkeys(("dry_base", "dry_allowed_length", "dry_penalty_last_n"), "dry_multiplier"),
    "dynatemp_exponent": "dynatemp_range",
    "mirostat_eta": "mirostat",
    "mirostat_tau": "mirostat",
    "xtc_threshold": "xtc_probability",
}


def asked(api, path, field="", value=None, inside="", switch=""):
    """Send a request with a field, and return the response; switch: a field that it needs."""
    fields = {field: value} if field else {}
    fields |= {switch: HONOURED[switch]} if switch else {}
    given = {inside: fields} if inside else fields
    if field and isinstance(value, dict) and field in value:
        given = value  # a field that needs others
    return api.post(path, **{**BODIES[path], **given})


def honoured(path, field):
    """The value with which a field has an effect on `path`, None if it has none there."""
    value = HONOURED.get(field)
    if isinstance(value, dict) and value.keys() & BODIES.keys():
        return value.get(path)
    return value


def endpoint_of(path, inside):
    """The name of the endpoint, or of its options, in the table of fields; None without such."""
    return (fields.OPTIONS if path.startswith("/api") else None) if inside else ENDPOINTS[path]


def refused(path, field, inside):
    """Whether the table has a rule for the field."""
    place = endpoint_of(path, inside)
    return any(rule.name == field and place in rule.endpoints for rule in fields.REFUSED)


def without_effect(path, inside):
    """The fields that are in the table as without effect."""
    place = endpoint_of(path, inside)
    return {name for row in fields.NO_EFFECT if place in row.endpoints for name in row.names}


def read_by(path, inside):
    """The fields of the endpoint's schema."""
    return (OllamaOptions if inside else KINDS[path]).__struct_fields__


TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
    "{{ messages[0].content }} {{ mark }} {{ reasoning_effort }} {{ enable_thinking }}"
)


@functools.cache
def plain(path):
    """The outcome of a request without more fields."""
    return outcome(path)


def outcome(path, *field):
    """What the engine gets and the client is told, without what differs at each time."""
    api = Api(default_sampling={"temperature": 1.0})
    api.context.chat_template.source = TEMPLATE
    response = asked(api, path, *field)
    assert response.status_code == 200, response.text
    body = response.text
    if response.headers["content-type"] == "application/json":
        body = response.json()
        if "id" in body:  # without the random part; an id from the client stays
            body["id"] = re.sub("[0-9a-f]{32}", "", body["id"])
        for name in ("created", "created_at", "total_duration", "prompt_eval_duration"):
            body.pop(name, None)
        body.pop("eval_duration", None)
        for item in body.get("output", ()):
            item.pop("id", None)
        body.pop("completed_at", None)
    return api.engine.asked, api.engine.wishes, body, api.engine.priorities


@pytest.mark.parametrize(("path", "field", "inside"), CASES)
def test_a_documented_field_is_honoured_refused_or_without_effect(path, field, inside):
    value = honoured(path, field)
    if value is not None:
        switch = SAMPLER_ON.get(field, "")
        before = outcome(path, "", None, inside, switch) if switch else plain(path)
        assert outcome(path, field, value, inside, switch) != before
    elif refused(path, field, inside):
        value = SETS.get(field, [1])
        response = asked(Api(), path, field, value, inside)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert field in (error["message"] if isinstance(error, dict) else error)
        if isinstance(error, dict):
            assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    else:
        assert field in without_effect(path, inside) or field in read_by(path, inside)
        given = outcome(path, field, NO_EFFECT[field], inside)
        assert given[:2] == plain(path)[:2]
        echoed = [{**body, field: None} for _, _, body, _ in (given, plain(path))]
        if path == RESPONSES:
            assert echoed[0]["output"] == echoed[1]["output"]
        else:
            assert echoed[0] == echoed[1]


@pytest.mark.parametrize(
    "rule",
    deep_but(fields.REFUSED[::3], fields.REFUSED),
    ids=lambda rule: f"{rule.name}-{rule.endpoints[0]}",
)
def test_a_refused_field_is_read_by_its_endpoints_and_may_be_switched_off(rule):
    places = [(path, inside) for path in BODIES for inside in ("", "options")]
    places = [place for place in places if endpoint_of(*place) in rule.endpoints]
    api = Api()
    for path, inside in places:
        assert rule.name in read_by(path, inside), path
        for off in (None, False, "", [], {}, *rule.off):
            if off in rule.sets:
                continue
            response = asked(api, path, rule.name, off, inside)
            where = response.json().get("error")
            if response.status_code == 400:  # such as images: {}, which has a wrong type
                assert "not supported" not in str(where), (path, off)


def test_a_refused_field_that_is_off_is_as_if_the_request_lacked_it():
    """So no code that turns the body into a call reads a value that belongs to another server."""
    body = CompletionRequest(prompt="a", suffix="b", include_reasoning=True, n_probs=0, audio={})
    fields.check_fields(body)
    assert (body.include_reasoning, body.n_probs, body.audio) == (None, None, None)
    assert to_call(body).include_reasoning is None
    assert (body.prompt, body.suffix) == ("a", "b")


def test_every_refused_field_of_another_servers_text_endpoints_is_documented():
    documented = {field for _, field, _ in CASES}
    others = {*fields.OPENAI, fields.OLLAMA, fields.OLLAMA_TEXT, fields.OPTIONS}
    own = {fields.RESPONSES}  # whose rules are for fields of chat completions, too
    rules = [rule for rule in fields.REFUSED if {*rule.endpoints} & others - own]
    assert {rule.name for rule in rules} <= documented


@pytest.mark.parametrize("path", BODIES)
def test_a_top_p_of_0_is_accepted(path):
    api = Api()
    inside = "options" if path.startswith("/api") else ""
    assert asked(api, path, "top_p", 0, inside).status_code == 200
    assert api.engine.asked[0][1].top_p == 0


@pytest.mark.parametrize(
    ("stop", "kept"), [("", []), ([""], []), (["", "a", ""], ["a"]), ([], []), ("a", ["a"])]
)
@pytest.mark.parametrize("path", [*BODIES, "/v1/messages"])
def test_an_empty_stop_string_is_none(path, stop, kept):
    api = Api()
    if path == "/v1/messages":
        given = [stop] if isinstance(stop, str) else stop
        response = api.post(path, messages=HI, max_tokens=9, stop_sequences=given)
    else:
        response = asked(api, path, "stop", stop, "options" if path.startswith("/api") else "")
    assert response.status_code == 200, response.text
    assert api.engine.asked[0][1].stop == kept


@pytest.mark.parametrize(
    ("thinking", "shows"),
    [
        ({"type": "enabled"}, "True"),
        ({"type": "enabled", "budget_tokens": 64}, "True"),
        ({"type": "disabled"}, "False"),
        ({"type": "adaptive"}, "unset"),
        ({}, "unset"),
        (None, "unset"),
    ],
    ids=str,
)
def test_thinking_reaches_the_template(thinking, shows):
    api = Api()
    api.context.chat_template.source = "{{ enable_thinking | default('unset') }}"
    assert api.chat(thinking=thinking).status_code == 200
    tokenizer = api.context.get_tokenizer()
    assert tokenizer.decode(api.engine.asked[0][0], skip_special_tokens=False) == shows


@pytest.mark.parametrize("thinking", ["on", True, {"type": "maybe"}, {"type": 1}, [1]], ids=str)
def test_thinking_that_means_nothing_is_refused(thinking):
    response = Api().chat(thinking=thinking)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "thinking"
