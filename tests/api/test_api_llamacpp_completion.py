"""POST /completion and the other routes of llama-server, over a scripted engine."""

import struct

import pytest

from cpuserve.api.vectors.llamacpp import normalized
from cpuserve.engine.ipc import Output
from cpuserve.serving.calls.line_limits import LineLimits, LineRules
from tests.api.fakes import ANSWER, MAX_LEN, Api, tokenizer
from tests.api.llamacpp import llama_error_of, llama_events_of
from tests.api.tools import says
from tests.tokenizer.test_infill import tokenizer_with

ENDS = {
    "eos": ({}, "eos", "", ANSWER),
    "limit": ({"n_predict": 5}, "limit", "", "Hello"),
    "word": ({"stop": ["x", " w"]}, "word", " w", "Hello"),
    "max_tokens": ({"max_tokens": 2}, "limit", "", "He"),
    "nothing": ({"n_predict": 0}, "limit", "", ""),
}


def complete(prompt="hi", api=None, **fields):
    response = (api or Api()).post("/completion", prompt=prompt, **fields)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(("fields", "stop_type", "word", "text"), ENDS.values(), ids=ENDS)
def test_a_completion_says_how_it_ended_and_a_stream_is_the_same_text(
    fields, stop_type, word, text
):
    body = complete(**fields)
    assert (body["content"], body["stop_type"], body["stopping_word"]) == (text, stop_type, word)
    assert body["stop"] is True
    assert body["tokens"] == []
    assert body["tokens_evaluated"] == len(tokenizer().encode("hi"))
    assert body["prompt"] == tokenizer().decode(tokenizer().encode("hi"), skip_special_tokens=False)
    assert body["timings"]["predicted_n"] == body["tokens_predicted"]
    assert body["timings"]["prompt_n"] == body["tokens_evaluated"]
    assert (body["truncated"], body["has_new_line"]) == (False, False)
    *parts, last = llama_events_of(Api().post("/completion", prompt="hi", stream=True, **fields))
    assert "".join(part["content"] for part in parts) == text
    assert not any(part["stop"] for part in parts)
    assert all(part["tokens"] for part in parts)
    assert last["content"] == ""
    for name in ("stop", "stop_type", "stopping_word", "prompt", "tokens_predicted", "model"):
        assert last[name] == body[name]


PROMPTS = {
    "text": ("hi", ["hi"]),
    "one text": (["hi"], ["hi"]),
    "texts": (["hi", "you"], ["hi", "you"]),
    "ids": ([5, 6], [[5, 6]]),
    "lists": ([[5], [6, 7]], [[5], [6, 7]]),
    "object": ({"prompt_string": "hi"}, ["hi"]),
    "mixed": ([5, "hi", 6, "you"], [[5, "hi", 6, "you"]]),
    "all": (["a", [5, "b"], {"prompt_string": "c"}], ["a", [5, "b"], "c"]),
}


@pytest.mark.parametrize(("given", "meant"), PROMPTS.values(), ids=PROMPTS)
def test_prompts_may_be_texts_ids_and_both(given, meant):
    api = Api()
    body = complete(given, api, return_tokens=True)
    sent = [ids for ids, _ in api.engine.asked]
    assert sent == [flat(prompt) for prompt in meant]
    results = body if len(meant) > 1 else [body]
    assert [result["index"] for result in results] == list(range(len(meant)))
    for result in results:
        assert result["content"] == ANSWER
        assert tokenizer().decode(result["tokens"]) == ANSWER


def flat(prompt):
    """The ids of a prompt; only a text at its beginning gets special tokens."""
    if isinstance(prompt, str):
        return tokenizer().encode(prompt)
    ids = []
    for index, part in enumerate(prompt):
        ids += [part] if isinstance(part, int) else tokenizer().encode(part, not index)
    return ids


BAD = {
    "no prompt": ({}, "prompt is missing"),
    "empty list": ({"prompt": []}, "prompt is an empty list"),
    "ids among lists": ({"prompt": [1, [2]]}, "prompt mixes token ids with lists"),
    "multimodal": (
        {"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}},
        "prompt.multimodal_data is not possible: this model reads text only",
    ),
    "vocabulary": ({"prompt": [9999]}, "9999"),
    "negative id": ({"prompt": [-1]}, "-1"),
    "two forms": ({"prompt": "a", "grammar": 'root ::= "a"', "json_schema": {}}, "json_schema"),
    "schema": ({"prompt": "a", "json_schema": [1]}, "json_schema must be"),
    "bias": ({"prompt": "a", "logit_bias": [[5, True]]}, "logit_bias must be"),
    "bias of three": ({"prompt": "a", "logit_bias": [[5, 1, 2]]}, "logit_bias must be"),
    "alternatives": ({"prompt": "a", "n_probs": 21}, "n_probs must be between"),
    "completions": ({"prompt": "a", "n_cmpl": 0}, "n_cmpl must be"),
    "adapter": ({"prompt": "a", "lora": [{"id": 0, "scale": 1}]}, "no adapter is loaded"),
    "window": ({"prompt": "a", "repeat_last_n": -2}, "repeat_last_n must be"),
    "penalty": ({"prompt": "a", "repeat_penalty": 0}, "repeat_penalty must be above 0"),
}


@pytest.mark.parametrize(("fields", "told"), BAD.values(), ids=BAD)
def test_bad_fields_are_400_in_the_shape_of_llama_server(fields, told):
    api = Api()
    response = api.post("/completion", **fields)
    assert response.status_code == 400, response.text
    assert told in llama_error_of(response)["message"]
    assert not api.engine.asked


def test_a_prompt_that_does_not_fit_has_its_size_in_the_error():
    response = Api().post("/completion", prompt=[5] * (MAX_LEN + 1))
    error = llama_error_of(response)
    assert error["type"] == "exceed_context_size_error"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (MAX_LEN + 1, MAX_LEN)


def test_the_defaults_are_those_of_llama_server_and_only_here():
    api = Api()
    complete(api=api)
    params = api.engine.asked[-1][1]
    assert (params.temperature, params.top_k) == (0.8, 40)
    assert (params.top_p, params.min_p) == (0.95, 0.05)
    assert params.max_tokens == MAX_LEN - len(tokenizer().encode("hi"))
    api.complete()
    assert (api.engine.asked[-1][1].temperature, api.engine.asked[-1][1].top_k) == (1.0, 0)
    api = Api(default_sampling={"temperature": 0.3})
    complete(api=api)
    assert api.engine.asked[-1][1].temperature == 0.3
    body = complete(api=api, temperature=-1, top_k=-1)
    params = api.engine.asked[-1][1]
    assert (params.temperature, params.top_k) == (0.0, 0)
    assert body["generation_settings"]["temperature"] == 0


def test_biases_may_be_pairs_or_an_object_with_ids_or_texts():
    hi = dict.fromkeys(tokenizer().encode("hi", add_special_tokens=False), 2.0)
    for given, meant in (
        ([[5, 1], [6, False]], {5: 1.0, 6: -100.0}),
        ([["hi", 2]], hi),
        ({"5": 1, "hi": 2}, {5: 1.0, **hi}),
        ([], None),
    ):
        api = Api()
        complete(api=api, logit_bias=given)
        assert api.engine.asked[-1][1].logit_bias == meant


def test_probabilities_have_ids_and_bytes_and_are_the_same_in_a_stream():
    body = complete(n_probs=3, n_predict=4)
    entries = body["completion_probabilities"]
    assert len(entries) == 4
    for entry in entries:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 3
        assert all(each["logprob"] <= 0 for each in (entry, *entry["top_logprobs"]))
    events = llama_events_of(
        Api().post("/completion", prompt="hi", n_probs=3, n_predict=4, stream=True)
    )
    streamed = [e for event in events for e in event.get("completion_probabilities", [])]
    assert streamed == entries


def test_response_fields_select_members_and_unnest():
    fields = ["content", "generation_settings/n_predict", "timings/prompt_n", "no/such", "stop"]
    body = complete(n_predict=5, response_fields=fields)
    prompt_n = len(tokenizer().encode("hi"))
    assert body == {
        "content": "Hello",
        "generation_settings/n_predict": 5,
        "timings/prompt_n": prompt_n,
        "stop": True,
    }
    assert "generation_settings" in complete(response_fields=[])


def test_structured_outputs_and_adapters_reach_the_engine():
    api = Api()
    complete(api=api, json_schema={"type": "integer"})
    assert api.engine.asked[-1][1].structured_outputs.json == '{"type":"integer"}'
    complete(api=api, grammar='root ::= "a"')
    assert api.engine.asked[-1][1].structured_outputs.grammar == 'root ::= "a"'
    complete(api=api, grammar="")
    assert api.engine.asked[-1][1].structured_outputs is None
    api.context.adapters |= {"polite": "/x/polite.gguf", "rude": "/x/rude.gguf"}
    for scale in (1.0, 0.25, -2):
        complete(api=api, lora=[{"id": 1, "scale": scale}, {"id": 0, "scale": 0}])
        params = api.engine.asked[-1][1]
        assert (params.adapter, params.adapter_scale) == ("rude", scale)
    both = [{"id": 0, "scale": 1}, {"id": 1, "scale": 0.5}]
    error = llama_error_of(api.post("/completion", prompt="a", lora=both))
    assert error["type"] == "not_supported_error"
    error = llama_error_of(api.post("/completion", prompt="a", lora=[{"id": 0, "scale": 1e9}]))
    assert "the scale of lora must be between -1000 and 1000, got 1000000000" in error["message"]


def test_an_adapter_as_the_model_has_the_scale_of_lora_and_no_other_adapter():
    api = Api()
    api.context.adapters |= {"polite": "/x/polite.gguf", "rude": "/x/rude.gguf"}
    complete(api=api, model="polite", lora=[{"id": 0, "scale": 0.5}])
    params = api.engine.asked[-1][1]
    assert (params.adapter, params.adapter_scale) == ("polite", 0.5)
    for scales, other in (([{"id": 1, "scale": 1}], "rude"), ([], "none")):
        response = api.post("/completion", model="polite", prompt="a", lora=scales)
        message = llama_error_of(response)["message"]
        assert f"model is the adapter 'polite', but lora or task selects {other}" in message


def test_timings_per_token_are_in_every_part():
    response = Api().post("/completion", prompt="hi", stream=True, timings_per_token=True)
    counts = [event["timings"]["predicted_n"] for event in llama_events_of(response)]
    assert counts[:3] == [1, 2, 3]


LINES = {
    "kept": (LineRules(2), "a\n  b\n  c", "a\n  b\n  c", False),
    "cut": (LineRules(2), "a\n  b\n c", "a\n  b", True),
    "empty lines": (LineRules(2), "a\n\n  b\n\nc", "a\n\n  b\n", True),
    "first line": (LineRules(4), "a", "a", False),
    "spaces at the end": (LineRules(2), "a\n ", "a\n ", False),
}


@pytest.mark.parametrize(("rules", "text", "shown", "ended"), LINES.values(), ids=LINES)
@pytest.mark.parametrize("size", [1, 2, 99])
def test_a_line_with_less_indentation_ends_the_text(rules, text, shown, ended, size):
    limits = LineLimits(rules)
    pieces = [limits.push(text[start : start + size]) for start in range(0, len(text), size)]
    assert "".join(pieces) + limits.flush() == shown
    assert limits.ended == ended


def test_the_first_line_that_ends_after_the_time_ends_the_text():
    now = [0.0]
    limits = LineLimits(LineRules(most_s=1.0), lambda: now[0])
    assert limits.push("a\nb") == "a\nb"
    now[0] = 2.0
    assert limits.push("c") == "c"
    assert limits.push("d\ne") == "d\n"
    assert limits.ended
    assert limits.push("f") == ""


def test_an_indentation_ends_a_completion():
    body = complete(api=Api(says("a\n  b\nc")), n_indent=2)
    assert (body["content"], body["stop_type"]) == ("a\n  b", "limit")
    assert body["has_new_line"] is True


def test_slots_show_what_runs_and_have_no_files():
    api = Api()
    (slot, *_) = api.get("/slots").json()
    assert slot == {"id": 0, "n_ctx": MAX_LEN, "is_processing": False, "speculative": False}
    assert len(api.get("/slots").json()) == api.context.limits.slots
    assert api.get("/slots?fail_on_no_slot=1").status_code == 200
    api.context.active_sequences = api.context.limits.slots
    busy = api.get("/slots?fail_on_no_slot=1")
    assert (busy.status_code, llama_error_of(busy)["type"]) == (503, "unavailable_error")
    assert api.get("/slots").json()[0]["is_processing"] is True
    for action in ("save", "restore", "erase"):
        error = llama_error_of(api.post(f"/slots/0?action={action}", filename="a"))
        assert error["type"] == "not_supported_error"
        assert action in error["message"]
    assert "action must be one of" in llama_error_of(api.post("/slots/0"))["message"]


def test_apply_template_returns_the_prompt_of_a_chat():
    api = Api()
    messages = [{"role": "user", "content": "hi"}]
    prompt = api.post("/apply-template", messages=messages).json()["prompt"]
    assert not api.engine.asked
    api.chat("hi")
    assert tokenizer().encode(prompt, add_special_tokens=False) == api.engine.asked[-1][0]


def test_adapters_are_listed_and_changed_only_with_the_option():
    api = Api()
    api.context.adapters |= {"polite": "/secret/polite.gguf"}
    one = {"id": 0, "path": "polite.gguf", "scale": 0.0, "name": "polite"}
    assert api.get("/lora-adapters").json() == [one]
    used = b'[{"id": 0, "scale": 1.0}]'
    error = llama_error_of(api.raw("/lora-adapters", used))
    assert "--allow-runtime-lora-updating" in error["message"]
    assert api.raw("/lora-adapters", b'[{"id": 0, "scale": 0}]').json() == {"success": True}
    api.context.adapters_change = True
    assert api.raw("/lora-adapters", used).json() == {"success": True}
    assert api.get("/lora-adapters").json() == [{**one, "scale": 1.0}]
    assert api.raw("/lora-adapters", b'[{"id": 0, "scale": 0.5}]').json() == {"success": True}
    assert api.get("/lora-adapters").json() == [{**one, "scale": 0.5}]
    complete(api=api)
    params = api.engine.asked[-1][1]
    assert (params.adapter, params.adapter_scale) == ("polite", 0.5)
    for scales in ([], [{"id": 0, "scale": 0}]):
        complete(api=api, lora=scales)
        assert api.engine.asked[-1][1].adapter is None
    complete(api=api, model="polite")
    assert api.engine.asked[-1][1].adapter_scale == 1.0
    for bad in (b"[{}]", b"{", b'[{"id": 7}]', b"[" * 9000):
        assert llama_error_of(api.raw("/lora-adapters", bad))["code"] == 400


def vectors(engine, number, prompt, params):
    yield Output(number, [], "stop", vector=struct.pack("<3f", 0.5, -0.5, 0.7071068))


def test_embeddings_are_lists_in_lists():
    api = Api(vectors)
    api.context.pooling = "last"
    for fields in ({"content": "hi"}, {"input": ["hi"]}):
        (item,) = api.post("/embedding", **fields).json()
        assert (item["index"], len(item["embedding"])) == (0, 1)
        assert item["embedding"][0] == pytest.approx([0.5, -0.5, 0.7071068])
    assert [item["index"] for item in api.post("/embeddings", content=["a", [5, "b"]]).json()] == [
        0,
        1,
    ]
    for bad in ({}, {"content": "a", "embd_normalize": -1}, {"content": "a", "embd_normalize": -2}):
        assert llama_error_of(api.post("/embedding", **bad))["code"] == 400


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (0, [16380.0, -32760.0]),
        (1, [1 / 3, -2 / 3]),
        (2, [1.0, -2.0]),
        (3, [1 / 9 ** (1 / 3), -2 / 9 ** (1 / 3)]),
    ],
)
def test_vectors_can_have_another_norm(norm, expected):
    assert normalized([1.0, -2.0], norm) == pytest.approx(expected)
    assert normalized([0.0, 0.0], norm) == [0.0, 0.0]


CODER = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")


def coder(tmp_path, *tokens):
    api = Api(says("x"))
    api.context.tokenizer = tokenizer_with(tmp_path, *tokens)
    return api


def test_infill_writes_the_parts_in_the_order_of_the_model(tmp_path):
    api = coder(tmp_path, *CODER, "<|fim_pad|>")
    extra = [{"filename": "a.py", "text": "A = 1\n"}]
    fields = {"input_prefix": "x = ", "input_suffix": "\nend", "prompt": "A", "n_predict": 9}
    body = api.post("/infill", **fields).json()
    assert body["content"] == "x"
    decode = api.context.tokenizer.decode
    ids, params = api.engine.asked[-1]
    plain = "<|fim_prefix|>x = <|fim_suffix|>\nend<|fim_middle|>A"
    assert decode(ids, skip_special_tokens=False) == plain
    ends = {decode([i], skip_special_tokens=False) for i in params.stop_token_ids}
    assert ends == {*CODER, "<|fim_pad|>"}
    api.post("/infill", input_extra=extra, **fields)
    ids, _ = api.engine.asked[-1]
    files = "<|repo_name|>myproject\n<|file_sep|>a.py\nA = 1\n<|file_sep|>filename\n"
    assert decode(ids, skip_special_tokens=False) == files + plain


def test_infill_cuts_what_does_not_fit(tmp_path):
    api = coder(tmp_path, *CODER[:3])
    fields = {"input_prefix": "p" * 500 + "PRE", "input_suffix": "SUF" + "s" * 500}
    extra = [{"filename": "a.py", "text": "E" * 50}]
    body = api.post("/infill", **fields, input_extra=extra, n_predict=8).json()
    prompt = body["prompt"]
    assert body["tokens_evaluated"] <= MAX_LEN - 8
    assert "PRE<|fim_suffix|>SUF" in prompt
    assert "E" * 50 not in prompt
    api.post("/infill", input_prefix="a", input_suffix="b", input_extra=extra)
    assert "--- snippet ---" in api.context.tokenizer.decode(api.engine.asked[-1][0])


@pytest.mark.parametrize(
    "extra", [{}, {"filename": "ok"}, {"filename": 1, "text": "a"}, {"filename": "a", "text": 1}]
)
def test_infill_refuses_other_files_without_name_or_text(tmp_path, extra):
    api = coder(tmp_path, *CODER)
    given = {"input_prefix": "a", "input_suffix": "b", "input_extra": [extra]}
    assert llama_error_of(api.post("/infill", **given))["code"] == 400


def test_infill_needs_a_model_with_the_tokens():
    error = llama_error_of(Api().post("/infill", input_prefix="a", input_suffix="b"))
    assert error["type"] == "not_supported_error"
    assert "no tokens for fill-in-the-middle" in error["message"]
