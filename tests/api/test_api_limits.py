"""Every bad value of every field: 4xx naming the field, and the next request is answered."""

import pytest

from cpuserve.base.errors import brief
from cpuserve.config.values import parse_duration
from cpuserve.sampling.chain import MAX_SAMPLERS, stage_names
from tests.api.fakes import MAX_LEN, VOCAB, Api, error_of

# (fields, the parameter the error must name)
BOTH = {
    "n-0": ({"n": 0}, "n"),
    "n-negative": ({"n": -1}, "n"),
    "n-million": ({"n": 10**6}, "n"),
    "n-text": ({"n": "2"}, "n"),
    "n-float": ({"n": 1.5}, "n"),
    "n-bool": ({"n": True}, "n"),
    "temperature-negative": ({"temperature": -1}, "temperature"),
    "temperature-huge": ({"temperature": 1e308}, "temperature"),
    "temperature-text": ({"temperature": "hot"}, "temperature"),
    "top_p-above-1": ({"top_p": 1.01}, "top_p"),
    "top_p-negative": ({"top_p": -0.5}, "top_p"),
    "top_k-minus-5": ({"top_k": -5}, "top_k"),
    "top_k-2^31": ({"top_k": 2**31}, "top_k"),
    "min_p-negative": ({"min_p": -0.1}, "min_p"),
    "min_p-above-1": ({"min_p": 1.5}, "min_p"),
    "presence-above-2": ({"presence_penalty": 2.1}, "presence_penalty"),
    "presence-below-2": ({"presence_penalty": -2.1}, "presence_penalty"),
    "frequency-above-2": ({"frequency_penalty": 3}, "frequency_penalty"),
    "repetition-0": ({"repetition_penalty": 0}, "repetition_penalty"),
    "repetition-negative": ({"repetition_penalty": -1}, "repetition_penalty"),
    "seed-2^63": ({"seed": 2**63}, "seed"),
    "seed-below": ({"seed": -(2**63) - 1}, "seed"),
    "seed-text": ({"seed": "x"}, "seed"),
    "seed-float": ({"seed": 0.5}, "seed"),
    "max_tokens-0": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens-negative": ({"max_tokens": -1}, "max_tokens"),
    "max_tokens-text": ({"max_tokens": "5"}, "max_tokens"),
    "min_tokens-negative": ({"min_tokens": -1}, "min_tokens"),
    "min_tokens-over-max": ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    "min_tokens-over-context": ({"min_tokens": MAX_LEN + 1}, "min_tokens"),
    "stop-number": ({"stop": 5}, "stop"),
    "stop-number-in-list": ({"stop": ["a", 5]}, "stop"),
    "stop-100k": ({"stop": ["x"] * 10**5}, "stop"),
    "stop-long": ({"stop": "x" * 5000}, "stop"),
    "stop_token_ids-vocab": ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    "stop_token_ids-negative": ({"stop_token_ids": [-1]}, "stop_token_ids"),
    "stop_token_ids-text": ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    "stop_token_ids-many": ({"stop_token_ids": [1] * 5000}, "stop_token_ids"),
    "allowed-empty": ({"allowed_token_ids": []}, "allowed_token_ids"),
    "allowed-vocab": ({"allowed_token_ids": [1, VOCAB]}, "allowed_token_ids"),
    "logit_bias-vocab": ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
    "logit_bias-text-key": ({"logit_bias": {"hello": 1}}, "logit_bias"),
    "logit_bias-negative-key": ({"logit_bias": {"-1": 1}}, "logit_bias"),
    "logit_bias-float-key": ({"logit_bias": {"1.5": 1}}, "logit_bias"),
    "logit_bias-huge-key": ({"logit_bias": {"9" * 40: 1}}, "logit_bias"),
    "logit_bias-unicode-digit": ({"logit_bias": {"\N{SUPERSCRIPT TWO}": 1}}, "logit_bias"),
    "logit_bias-text-value": ({"logit_bias": {"1": "a"}}, "logit_bias"),
    "logit_bias-list": ({"logit_bias": [1]}, "logit_bias"),
    "logit_bias-300k": ({"logit_bias": {str(i): 1 for i in range(300_000)}}, "logit_bias"),
    "prompt_logprobs-21": ({"prompt_logprobs": 21}, "prompt_logprobs"),
    "prompt_logprobs-negative": ({"prompt_logprobs": -1}, "prompt_logprobs"),
    "stream_options-no-stream": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "stream_options-stream-false": ({"stream_options": {}, "stream": False}, "stream_options"),
    "stream_options-text": ({"stream_options": "x", "stream": True}, "stream_options"),
    "stream-text": ({"stream": "yes"}, "stream"),
    "best_of": ({"best_of": 3, "stream": True}, "best_of"),
    "best_of-million": ({"best_of": 10**6, "n": 2}, "best_of"),
    "beam-search-wide": ({"use_beam_search": True, "n": 11}, "n"),
    "beam-search-text": ({"use_beam_search": "x"}, "use_beam_search"),
    "length_penalty": ({"length_penalty": 2}, "length_penalty"),
    "guided_json": ({"guided_json": {}, "structured_outputs": {"regex": "a"}}, "guided_json"),
    "guided_choice": ({"guided_choice": ["a", ""]}, "guided_choice"),
    "guided_regex": ({"guided_regex": "x" * 300_000}, "guided_regex"),
    "mirostat": ({"mirostat": 3}, "mirostat"),
    "mirostat_tau": ({"mirostat": 2, "mirostat_tau": -1}, "mirostat_tau"),
    "mirostat_eta": ({"mirostat": 1, "mirostat_eta": -1}, "mirostat_eta"),
    "typical_p": ({"typical_p": 1.5}, "typical_p"),
    "min_keep": ({"min_keep": -1}, "min_keep"),
    "dynatemp_range": ({"dynatemp_range": -1}, "dynatemp_range"),
    "dynatemp_exponent": ({"dynatemp_range": 1, "dynatemp_exponent": -1}, "dynatemp_exponent"),
    "top_n_sigma": ({"top_n_sigma": 1e9}, "top_n_sigma"),
    "dry": ({"dry_multiplier": -0.8}, "dry_multiplier"),
    "dry_base": ({"dry_multiplier": 0.8, "dry_base": 0.5}, "dry_base"),
    "dry_allowed_length": (
        {"dry_multiplier": 0.8, "dry_allowed_length": -1},
        "dry_allowed_length",
    ),
    "dry_penalty_last_n": (
        {"dry_multiplier": 0.8, "dry_penalty_last_n": -2},
        "dry_penalty_last_n",
    ),
    "breakers-none": (
        {"dry_multiplier": 0.8, "dry_sequence_breakers": []},
        "dry_sequence_breakers",
    ),
    "breakers-empty": (
        {"dry_multiplier": 0.8, "dry_sequence_breakers": [""]},
        "dry_sequence_breakers",
    ),
    "breakers-long": (
        {"dry_multiplier": 0.8, "dry_sequence_breakers": ["x" * 41]},
        "dry_sequence_breakers",
    ),
    "breakers-many": (
        {"dry_multiplier": 0.8, "dry_sequence_breakers": list(map(str, range(65)))},
        "dry_sequence_breakers",
    ),
    "xtc": ({"xtc_probability": 1.5}, "xtc_probability"),
    "xtc_threshold": ({"xtc_probability": 0.5, "xtc_threshold": 2}, "xtc_threshold"),
    "samplers-many": ({"samplers": ["top_k"] * 65}, "samplers"),
    "samplers-numbers": ({"samplers": [1]}, "samplers"),
    "post_sampling_probs": ({"post_sampling_probs": True}, "post_sampling_probs"),
    "repeat_penalty": ({"repeat_penalty": -1}, "repeat_penalty"),
    "repeat_penalty-million": ({"repeat_penalty": 2e6}, "repeat_penalty"),
    "repeat_penalty-text": ({"repeat_penalty": "a"}, "repeat_penalty"),
    "repeat_last_n": ({"repeat_last_n": -2}, "repeat_last_n"),
    "repeat_last_n-text": ({"repeat_last_n": "all"}, "repeat_last_n"),
    "n_predict-0": ({"n_predict": 0}, "n_predict"),
    "n_predict-two": ({"n_predict": 3, "max_tokens": 4}, "n_predict"),
    "n_predict-newer": ({"n_predict": 3, "max_completion_tokens": 4}, "n_predict"),
    "two-penalties": ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty"),
    "structured_outputs-two": (
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "structured_outputs",
    ),
    "structured_outputs-none": ({"structured_outputs": {"regex": ""}}, "structured_outputs"),
    "structured_outputs-text": ({"structured_outputs": "json"}, "structured_outputs"),
    "structured_outputs-other": ({"structured_outputs": {"lark": "a"}}, "structured_outputs"),
    "structured_outputs-number": ({"structured_outputs": {"regex": 5}}, "structured_outputs"),
    "structured_outputs-empty-choice": (
        {"structured_outputs": {"choice": ["a", ""]}},
        "structured_outputs",
    ),
    "structured_outputs-5000": (
        {"structured_outputs": {"choice": [str(i) for i in range(5000)]}},
        "structured_outputs",
    ),
    "structured_outputs-and-format": (
        {
            "structured_outputs": {"regex": "a"},
            "response_format": {"type": "json_object"},
        },
        "structured_outputs",
    ),
    "json_schema-none": ({"response_format": {"type": "json_schema"}}, "response_format"),
    "json_schema-empty": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format",
    ),
    "json_schema-text": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
        "response_format",
    ),
    "json_object-schema": (
        {"response_format": {"type": "json_object", "schema": "x"}},
        "response_format",
    ),
    "grammar": ({"grammar": 'root ::= "a"'}, "grammar"),
    "json_schema": ({"json_schema": {"type": "object"}}, "json_schema"),
    "structural_tag": ({"response_format": {"type": "structural_tag"}}, "response_format"),
    "structural_tag-type": (
        {"response_format": {"type": "structural_tag", "format": {"type": "x"}}},
        "response_format",
    ),
    "structural_tag-list": ({"structured_outputs": {"structural_tag": "[]"}}, "structured_outputs"),
    "response_format-hiccup": ({"response_format": {"type": "hiccup"}}, "response_format"),
    "response_format-text": ({"response_format": "text"}, "response_format"),
    "response_format-empty": ({"response_format": {}}, "response_format"),
    "bad_words": ({"bad_words": [""]}, "bad_words"),
    "bad_words-text": ({"bad_words": "x"}, "bad_words"),
    "truncate": ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    "truncate-over-max-len": ({"truncate_prompt_tokens": MAX_LEN + 1}, "truncate_prompt_tokens"),
    "truncate-list": ({"truncate_prompt_tokens": []}, "truncate_prompt_tokens"),
    "truncate-text": ({"truncate_prompt_tokens": ""}, "truncate_prompt_tokens"),
    "watermarking": ({"watermarking": True}, "watermarking"),
    "ignore_eos-text": ({"ignore_eos": "yes"}, "ignore_eos"),
    "priority-2^63": ({"priority": 2**63}, "priority"),
    "model-number": ({"model": 5}, "model"),
    "cache_salt-empty": ({"cache_salt": ""}, "cache_salt"),
    "cache_salt-long": ({"cache_salt": "x" * 129}, "cache_salt"),
    "cache_salt-number": ({"cache_salt": 5}, "cache_salt"),
    **{f"cache_salt-{ord(c)}": ({"cache_salt": f"a{c}b"}, "cache_salt") for c in "@/\\\0"},
}

CHAT = {
    "top_logprobs-21": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "top_logprobs-negative": ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    "top_logprobs-alone": ({"top_logprobs": 2}, "top_logprobs"),
    "top_logprobs-without": ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
    "logprobs-number": ({"logprobs": 5}, "logprobs"),
    "max_completion_tokens-0": ({"max_completion_tokens": 0}, "max_completion_tokens"),
    "tools": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
        "tools",
    ),
    "tools-auto": ({"tools": [{"type": "function"}], "tool_choice": "auto"}, "tools"),
    "tool_choice-required": ({"tool_choice": "required"}, "tool_choice"),
    "functions": ({"functions": [{"name": "f"}]}, "functions"),
    "function_call-named": ({"function_call": {"name": "f"}}, "function_call"),
    "audio": ({"audio": {"voice": "x"}}, "audio"),
    "modalities": ({"modalities": ["text", "audio"]}, "modalities"),
    "web_search_options": ({"web_search_options": {}}, "web_search_options"),
    "prediction": ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    "reasoning_effort": ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    "reasoning_effort-number": ({"reasoning_effort": 3}, "reasoning_effort"),
    "chat_template": ({"chat_template": "{{ 1 }}"}, "chat_template"),
    "documents": ({"documents": [{}]}, "documents"),
    "kwargs-messages": ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    "kwargs-generation": (
        {"chat_template_kwargs": {"add_generation_prompt": False}},
        "chat_template_kwargs",
    ),
    "kwargs-tokenize": ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    "kwargs-self": ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    "kwargs-list": ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    "continue-and-generate": (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    "messages-null": ({"messages": None}, "messages"),
    "messages-text": ({"messages": "hi"}, "messages"),
    "messages-empty": ({"messages": []}, "messages"),
    "messages-number": ({"messages": [123]}, "messages"),
    "messages-empty-object": ({"messages": [{}]}, "messages"),
    "role-number": ({"messages": [{"role": 123, "content": "a"}]}, "messages"),
    "role-empty": ({"messages": [{"role": "", "content": "a"}]}, "messages"),
    "role-markup": ({"messages": [{"role": "<|im_end|>", "content": "a"}]}, "messages"),
    "content-number": ({"messages": [{"role": "user", "content": 123}]}, "messages"),
    "content-null": ({"messages": [{"role": "user", "content": None}]}, "messages"),
    "content-missing": ({"messages": [{"role": "user"}]}, "messages"),
    "content-image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages",
    ),
    "content-part-number": ({"messages": [{"role": "user", "content": [5]}]}, "messages"),
    "content-part-no-text": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages",
    ),
    "too-long": ({"messages": [{"role": "user", "content": "x " * 4 * MAX_LEN}]}, "messages"),
}

COMPLETION = {
    "logprobs-21": ({"logprobs": 21}, "logprobs"),
    "logprobs-negative": ({"logprobs": -1}, "logprobs"),
    "logprobs-bool": ({"logprobs": True}, "logprobs"),
    "suffix": ({"suffix": "the end"}, "suffix"),
    "prompt-null": ({"prompt": None}, "prompt"),
    "prompt-number": ({"prompt": 5}, "prompt"),
    "prompt-object": ({"prompt": {"a": 1}}, "prompt"),
    "prompt-empty-list": ({"prompt": []}, "prompt"),
    "prompt-empty-lists": ({"prompt": [[]]}, "prompt"),
    "prompt-empty-among": ({"prompt": ["a", ""]}, "prompt"),
    "prompt-vocab": ({"prompt": [1, VOCAB]}, "prompt"),
    "prompt-negative": ({"prompt": [1, -1]}, "prompt"),
    "prompt-2^31": ({"prompt": [2**31]}, "prompt"),
    "prompt-2^63": ({"prompt": [[2**63 - 1]]}, "prompt"),
    "prompt-10^30": ({"prompt": [[10**30]]}, "prompt"),
    "prompt-mixed": ({"prompt": ["a", 5]}, "prompt"),
    "prompt-float": ({"prompt": [1.5]}, "prompt"),
    "prompt-bool": ({"prompt": [True]}, "prompt"),
    "prompt-max-len": ({"prompt": [5] * MAX_LEN}, "prompt"),
    "prompt-over-max-len": ({"prompt": [5] * (MAX_LEN + 1)}, "prompt"),
    "prompt-score-over-max-len": (
        {"prompt": [5] * (MAX_LEN + 1), "echo": True, "max_tokens": 0},
        "prompt",
    ),
    "prompt-many": ({"prompt": [[5]] * 2000}, "prompt"),
    "n-times-prompts": ({"prompt": [[5]] * 512, "n": 100}, "n"),
    "prompt_embeds": ({"prompt_embeds": "xxxx"}, "prompt_embeds"),
}


def _cases(table):
    """The cases of a table: of each field that the errors name, one is not deep."""
    first = {param: name for name, (_, param) in reversed(table.items())}
    return [
        pytest.param(*case, id=name, marks=() if first[case[1]] == name else pytest.mark.deep)
        for name, case in table.items()
    ]


@pytest.fixture(scope="module")
def api():
    return Api()


@pytest.mark.parametrize(("fields", "param"), _cases({**BOTH, **CHAT}))
def test_chat_with_a_bad_field_is_400_naming_it(api, fields, param):
    response = api.chat(**fields)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["type"] == "BadRequestError"
    assert error["param"] == param, error
    assert param in error["message"] or error["code"] == "context_length_exceeded"
    assert api.alive()


@pytest.mark.parametrize(("fields", "param"), _cases({**BOTH, **COMPLETION}))
def test_completion_with_a_bad_field_is_400_naming_it(api, fields, param):
    response = api.complete(**fields)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["type"] == "BadRequestError"
    assert error["param"] == param, error
    assert api.alive()


def test_empty_prompt_is_400_where_no_token_is_put_in_front(api):
    error = error_of(api.complete(""))
    assert error["param"] == "prompt"
    assert "empty" in error["message"]


@pytest.mark.matrix
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"temperature": 0},
        {"temperature": 5.0},
        {"top_p": 1},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 10**6},
        {"min_p": 1},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 0.1},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"max_tokens": 1},
        {"max_tokens": 32, "min_tokens": 32},
        {"stop": []},
        {"stop": ["x"] * 64},
        {"stop_token_ids": [0, VOCAB - 1]},
        {"allowed_token_ids": [5]},
        {"logit_bias": {"0": -1000, str(VOCAB - 1): 1000}},
        {"logit_bias": {}},
        {"bad_words": []},
        {"guided_choice": []},
        {"bad_words": ["x"]},
        {"truncate_prompt_tokens": None, "suffix": ""},
        {"truncate_prompt_tokens": 5},
        {"watermarking": False},
        {"grammar": "", "json_schema": None},
        {"guided_regex": "", "guided_grammar": "", "structured_outputs": {}},
        {"best_of": 1},
        {
            "mirostat": 0,
            "typical_p": 1.0,
            "tfs_z": 1,
            "dynatemp_range": 0.0,
            "xtc_probability": 0,
            "dry_multiplier": 0.0,
            "top_n_sigma": -1.0,
        },
        {"repeat_penalty": 1.1, "repetition_penalty": 1.1},
        {"repeat_penalty": 1.1, "repeat_last_n": -1},
        {"repeat_penalty": 1.1, "repeat_last_n": 64, "frequency_penalty": 1},
        {"repeat_last_n": 0, "presence_penalty": 0.5},
        {"mirostat": 2, "mirostat_tau": 4, "mirostat_eta": 0.2, "top_k": 3},
        {"typical_p": 0.5, "min_keep": 2, "samplers": ["typ_p", "unheard_of"]},
        {"dry_multiplier": 0.8, "dry_base": 2, "dry_sequence_breakers": ["\n", "a"]},
        {"xtc_probability": 0.5, "dynatemp_range": 0.2, "top_n_sigma": 1},
        {"samplers": "edkypmxt"},
        {"repeat_penalty": 1.0, "presence_penalty": 0, "repeat_last_n": 64},
        {"n_predict": 4, "max_tokens": 4},
        {"n_predict": -1, "max_tokens": 4},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
        {"structured_outputs": {"regex": "a+"}, "guided_json": None},
        {"structured_outputs": {"choice": ["a", "b"]}, "response_format": {"type": "text"}},
        {"use_beam_search": False, "length_penalty": 1},
        {"user": "someone", "priority": 0, "ignore_eos": True},
        {"unknown_field": {"deep": [1, 2, 3]}, "vllm_xargs": {}, "store": True},
        {"cache_salt": "x" * 128},
        {"cache_salt": "tenant-7 ü"},
        {"model": "alias"},
        {"model": ""},
        dict.fromkeys(("n", "temperature", "stop", "seed", "model", "stream_options")),
    ],
    ids=lambda fields: "-".join(fields),
)
def test_a_good_field_is_accepted(api, endpoint, fields):
    response = getattr(api, endpoint)(**fields)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_the_name_of_llama_cpp_sets_the_repetition_penalty(api, path):
    text = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {}
    body = {"prompt": "hi"} if path == "/v1/completions" else {"input": "hi"}
    assert api.post(path, repeat_penalty=1.25, **(text or body)).status_code == 200
    assert api.engine.asked[-1][1].repetition_penalty == 1.25


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"n_predict": 3}, 3),
        ({"n_predict": -1}, None),
        ({"n_predict": -2, "max_tokens": 5}, 5),
        ({"n_predict": -1, "max_completion_tokens": 6}, 6),
    ],
    ids=str,
)
def test_the_name_of_llama_cpp_limits_the_answer(api, endpoint, fields, tokens):
    """Its negative values mean no limit, also where OpenAI's default is 16 tokens."""
    assert getattr(api, endpoint)(**fields).status_code == 200
    prompt, params = api.engine.asked[-1]
    assert params.max_tokens == (tokens or MAX_LEN - len(prompt))


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": [], "tool_choice": "auto"},
        {"tools": [TOOL], "tool_choice": "none"},
        {"functions": []},
        {"functions": [TOOL["function"]], "function_call": "none"},
        {"documents": []},
        {"audio": {}},
        {"modalities": ["text"]},
        {"verbosity": "low"},
        {"reasoning_effort": "low"},  # the template does not read it
        {"chat_template": ""},
    ],
    ids=str,
)
def test_a_chat_field_without_effect_is_accepted(api, fields):
    assert api.chat().status_code == 200
    plain = api.engine.asked[-1]
    response = api.chat(**fields)
    assert response.status_code == 200, response.text
    assert api.engine.asked[-1] == plain


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt": [5] * 200}, "context_length_exceeded"),
        ({"prompt": [5] * 100, "min_tokens": 100}, "context_length_exceeded"),
        ({"prompt": "x " * 20_000}, "context_length_exceeded"),
        ({"model": "other"}, "model_not_found"),
        ({"best_of": 3, "stream": True}, "unsupported_parameter"),
        ({"response_format": {"type": "structural_tag"}}, "invalid_value"),
        ({"response_format": {"type": "hiccup"}}, "invalid_value"),
        ({"watermarking": True}, "unsupported_parameter"),
        ({"bad_words": [""]}, "invalid_value"),
        ({"truncate_prompt_tokens": 0}, "invalid_value"),
        ({"temperature": -1}, "invalid_value"),
        ({"temperature": "x"}, "invalid_type"),
    ],
)
def test_the_code_of_an_error_is_openais(api, fields, code):
    assert error_of(api.complete(**fields))["code"] == code


def test_a_request_that_never_fits_the_kv_cache_has_the_contexts_code():
    api = Api()
    api.engine.info["kv_tokens"] = 16
    api.context.set_ready(api.context.tokenizer, api.context.chat_template)
    assert error_of(api.complete([5] * 20, max_tokens=50))["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 1e308}, "temperature must be between 0 and 1000000, got 1e+308"),
        ({"repetition_penalty": 1e7}, "repetition_penalty must be above 0 and at most 1000000, "
                                      "got 10000000.0"),
        ({"top_k": 2**31}, "top_k must be -1 or 0 (all), or between 1 and 2147483647, "
                           "got 2147483648"),
        ({"n": "2"}, "n must be an integer, got a string"),
        ({"stream": "yes"}, "stream must be true or false, got a string"),
        ({"stop": 5}, "stop must be a string or a list, got an integer"),
        ({"stop": ["a", 5]}, "stop[1] must be a string, got an integer"),
        ({"top_p": [1]}, "top_p must be a number, got a list"),
        ({"model": True}, "model must be a string, got a boolean"),
        ({"logit_bias": 1.5}, "logit_bias must be an object, got a number"),
        ({"prompt": None}, "prompt must be a string or a list, got null"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_wrong_value_is_told(api, fields, message):
    assert error_of(api.complete(**fields))["message"] == message


def test_a_missing_field_is_named(api):
    error = error_of(api.post("/v1/chat/completions", model="tiny"))
    assert (error["param"], error["code"]) == ("messages", "missing_required_parameter")
    assert error["message"] == "messages is missing"


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({}, "must be a string or a part with a type"),
        (None, "must be a string or a part with a type"),
        ({"text": "hi"}, "must be a string or a part with a type"),
        ({"type": None, "text": "hi"}, "must be a string or a part with a type"),
        ({"type": "image_url", "image_url": {}}, "has type 'image_url'; this model reads text"),
    ],
    ids=str,
)
def test_what_a_wrong_content_part_is_told(api, part, why):
    assert error_of(api.chat([part]))["message"].startswith(f"messages[0].content[0] {why}")


def test_over_long_requests_are_told_the_numbers(api):
    message = error_of(api.complete([5] * 200))["message"]
    assert "200" in message
    assert str(MAX_LEN) in message
    message = error_of(api.complete([5] * 100, min_tokens=100))["message"]
    assert all(text in message for text in ("100", "28"))


def test_bad_logit_bias_keys_are_all_named(api):
    message = error_of(api.chat(logit_bias={"x": 1, "y": 1, "3": 1}))["message"]
    assert "'x'" in message
    assert "'y'" in message


def test_logit_bias_out_of_vocabulary_names_id_and_vocabulary(api):
    message = error_of(api.chat(logit_bias={"99999": 1}))["message"]
    assert "99999" in message
    assert str(VOCAB - 1) in message


def test_max_tokens_of_all_that_is_left_is_accepted(api):
    assert api.complete([5] * (MAX_LEN - 1), max_tokens=1).status_code == 200
    assert api.complete([5] * (MAX_LEN - 1)).status_code == 200
    assert api.engine.asked[-1][1].max_tokens == 1


def test_a_prompt_that_fills_the_context_can_be_scored(api):
    response = api.complete([5] * MAX_LEN, max_tokens=0, echo=True, logprobs=0)
    assert response.status_code == 200, response.text


def test_a_request_that_never_fits_the_kv_cache_is_400():
    api = Api()
    api.engine.info["kv_tokens"] = 16
    api.context.set_ready(api.context.tokenizer, api.context.chat_template)
    error = error_of(api.complete([5] * 20, max_tokens=50))
    assert "KV cache" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_fields_that_exclude_every_token_are_400_before_the_engine_gets_the_prompt(stream):
    api = Api()
    api.engine.info["eos_ids"] = [7]
    api.context.set_ready(api.context.tokenizer, api.context.chat_template)
    response = api.complete(allowed_token_ids=[7, 8], stop_token_ids=[8], min_tokens=1, n=2,
                            stream=stream)  # fmt: skip
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == "allowed_token_ids"
    assert "allowed_token_ids and min_tokens" in error["message"]
    assert api.engine.asked == []


class Unread(list):
    """A list that fails when somebody makes a text of it."""

    def __repr__(self):
        pytest.fail("its text was made")

    __str__ = __repr__


def test_a_message_names_a_list_instead_of_showing_megabytes():
    assert brief(Unread([1])) == "a list"
    assert brief({"a": Unread()}) == "an object"
    assert (brief("x" * 100), brief(5), brief(None), brief("xyz", 2)) == (
        "x" * 80,
        "5",
        "None",
        "xy",
    )
    with pytest.raises(ValueError, match="must be seconds or a time"):
        parse_duration(Unread([1]))


@pytest.mark.parametrize("samplers", ["k" * 100_000, ["top_k"] * 1000])
def test_a_long_list_of_samplers_is_refused_before_all_of_it_is_read(samplers):
    assert len(stage_names(samplers)) == MAX_SAMPLERS
    error = error_of(Api().chat(samplers=samplers))
    assert error["param"] == "samplers"
