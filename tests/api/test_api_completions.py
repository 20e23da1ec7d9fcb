"""Completions: all types of prompts, echo, legacy logprobs, and logprobs of prompts."""

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Core

from cpuserve.api.openai.logprobs import LegacyBuilder, TokenNames
from cpuserve.engine.ipc import Output, TokenLogprob
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.api.fakes import ANSWER, Api, close_to, error_of, events_of, logprob_of, tokenizer

IDS = tokenizer().encode("hi", add_special_tokens=True)


def text_of(ids):
    return tokenizer().decode(ids)


@pytest.fixture
def api():
    return Api()


def test_the_whole_answer_has_openais_shape(api):
    body = api.complete(max_tokens=5).json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    tokens = tokenizer().encode(ANSWER, add_special_tokens=False)[:5]
    assert body["choices"] == [
        {
            "index": 0,
            "text": text_of(tokens),
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "prompt_logprobs": None,
        }
    ]
    assert body["usage"]["prompt_tokens"] == len(IDS)
    assert body["usage"]["completion_tokens"] == 5


def test_an_error_names_the_prompt_that_causes_it(api):
    error = error_of(api.complete(prompt=[IDS, [], IDS]))
    assert (error["param"], error["message"]) == ("prompt", "Prompt 1 is empty: leave it out")
    error = error_of(api.complete(prompt=[IDS, IDS, IDS * 9999]))
    assert "Prompt 2 has 19998 tokens" in error["message"]
    error = error_of(api.complete(prompt=[IDS, "word " * 99_999]))
    assert "Prompt 1 has 499995 characters" in error["message"]
    error = error_of(api.complete(prompt="word " * 99_999))
    assert "The text has 499995 characters" in error["message"]
    assert "The prompt is empty" in error_of(api.complete(prompt=[[]]))["message"]


def test_max_tokens_default_to_16(api):
    for fields in ({}, {"max_tokens": None}):
        api.complete(**fields)
        assert api.engine.asked[-1][1].max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("hi", [IDS]),
        (["hi"], [IDS]),
        (["hi", "ho"], [IDS, tokenizer().encode("ho")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["hi", [7, 8]], [IDS, [7, 8]]),
        ([511], [[511]]),
    ],
    ids=str,
)
def test_prompts_of_every_kind_reach_the_engine(api, prompt, asked):
    body = api.complete(prompt, max_tokens=3).json()
    assert [ids for ids, _ in api.engine.asked] == asked
    assert [c["index"] for c in body["choices"]] == list(range(len(asked)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, asked))
    assert body["usage"]["completion_tokens"] == 3 * len(asked)


def test_choices_of_prompt_i_are_i_n_to_i_n_plus_n(api):
    body = api.complete(["a", "b"], n=2, echo=True, max_tokens=1).json()
    assert [c["text"][0] for c in body["choices"]] == ["a", "a", "b", "b"]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == sum(len(tokenizer().encode(p)) for p in "ab")


def test_streamed_prompts_are_told_apart_by_index(api):
    events = events_of(api.complete(["a", "b"], n=2, echo=True, stream=True, max_tokens=50))
    texts = [""] * 4
    for event in events:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == ["a" + ANSWER] * 2 + ["b" + ANSWER] * 2
    finished = [c["index"] for e in events for c in e["choices"] if c["finish_reason"]]
    assert sorted(finished) == [0, 1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["h\N{LATIN SMALL LETTER O WITH DIAERESIS} ho", [72, 73, 74]])
def test_echo_puts_the_prompt_in_front(api, stream, prompt):
    response = api.complete(prompt, echo=True, stream=stream, max_tokens=50)
    if stream:
        text = "".join(e["choices"][0]["text"] for e in events_of(response))
    else:
        text = response.json()["choices"][0]["text"]
    shown = prompt if isinstance(prompt, str) else text_of(prompt)
    assert text == shown + ANSWER


def merged(events):
    """Return the logprobs of all chunks of a stream, joined."""
    out = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    for event in events:
        for name, values in (event["choices"][0]["logprobs"] or {}).items():
            out[name] += values
    return out


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [0, 1, 5])
def test_legacy_logprobs_are_parallel_lists(api, stream, top):
    response = api.complete("hi", logprobs=top, max_tokens=6, stream=stream)
    tokens = tokenizer().encode(ANSWER, add_special_tokens=False)[:6]
    logprobs = merged(events_of(response)) if stream else response.json()["choices"][0]["logprobs"]
    assert len({len(values) for values in logprobs.values()}) == 1
    assert len(logprobs["tokens"]) == 6
    for token, value, alternatives in zip(
        tokens, logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert close_to(value, logprob_of(token, 0).logprob)
        assert top <= len(alternatives) <= top + 1
        name = tokenizer().token_bytes(token).decode("utf-8", "replace")
        assert name in alternatives
    assert logprobs["text_offset"][0] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_text_offset_is_where_each_token_starts(api, stream):
    prompt = "a \N{LATIN SMALL LETTER O WITH DIAERESIS}\N{WAVING HAND SIGN} b"
    response = api.complete(prompt, logprobs=1, echo=True, stream=stream, max_tokens=50)
    logprobs = merged(events_of(response)) if stream else response.json()["choices"][0]["logprobs"]
    text = prompt + ANSWER
    end = len(text)
    pieces = list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))
    whole = [
        (token, offset) for token, offset in pieces if "\ufffd" not in token and "<|" not in token
    ]
    assert len(whole) > 4
    for token, offset in whole:
        assert text[offset : offset + len(token)] == token
    for token, offset in pieces:
        if "\ufffd" in token:
            assert ord(text[offset]) > 127, (token, offset)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert logprobs["text_offset"][-1] == end  # end-of-text adds nothing to the text


def sentencepiece(spaces):
    """A tokenizer like Llama 2's: U+2581 for spaces, also before the text, <s> first, and bytes."""
    vocab = {"<unk>": 0, "<s>": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)}}
    for token in ("\u2581", *"abcde", "\u2581a", "bc", "\u2581abc"):
        vocab[token] = len(vocab)
    merges = [("\u2581", "a"), ("b", "c"), ("\u2581a", "bc")]
    core = Core(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    core.add_special_tokens([AddedToken("<s>", special=True)])
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    if spaces == "normalizer":
        space = normalizers.Replace(" ", "\u2581")
        core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), space])
        whole = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        core.decoder = decoders.Sequence([*whole, decoders.Strip(" ", 1, 0)])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
        core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return core


@pytest.mark.matrix
@pytest.mark.parametrize("spaces", ["normalizer", "pre-tokenizer"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(
    "prompt", ["abc abc d", " abc d", "a b\N{LATIN SMALL LETTER O WITH DIAERESIS}c", "d", "ids"]
)
def test_text_offset_does_not_count_the_space_that_sentencepiece_adds(
    tmp_path, spaces, stream, skip, prompt
):
    core = sentencepiece(spaces)
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    answer = [core.token_to_id(token) for token in ("\u2581abc", "d", "bc")]

    def speak(engine, number, ids, params):
        scores = [None, *(logprob_of(token, 0) for token in ids[1:])]
        for at, token in enumerate(answer):
            given = {"logprobs": [logprob_of(token, 0)], "prompt_logprobs": None if at else scores}
            yield Output(number, [token], "length" if at == 2 else None, **given)

    api = Api(speak)
    api.context.tokenizer = Tokenizer.load(tmp_path)
    ids = core.encode("abc d").ids
    given = ids if prompt == "ids" else prompt
    fields = {"echo": True, "logprobs": 0, "max_tokens": 3, "skip_special_tokens": skip}
    response = api.complete(given, stream=stream, **fields)
    assert response.status_code == 200, response.text
    if stream:
        events = events_of(response)
        logprobs, text = merged(events), "".join(e["choices"][0]["text"] for e in events)
    else:
        choice = response.json()["choices"][0]
        logprobs, text = choice["logprobs"], choice["text"]
    shown = Tokenizer.load(tmp_path).decode(ids, skip) if prompt == "ids" else prompt
    assert text == shown + " abcdbc"
    offsets, tokens = logprobs["text_offset"], logprobs["tokens"]
    assert offsets[-3:] == [len(shown), len(shown) + 4, len(shown) + 5]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    for token, offset in list(zip(tokens, offsets, strict=True))[1:]:
        seen = token.removeprefix(" ") if offset == 0 and not shown.startswith(" ") else token
        if "\ufffd" not in seen:
            assert text[offset : offset + len(seen)] == seen, (token, offset)


@pytest.mark.parametrize("skip", [False, True])
def test_text_offset_counts_special_tokens_of_a_text_that_is_echoed(api, skip):
    prompt = "a<|im_start|>b"
    fields = {"echo": True, "logprobs": 0, "max_tokens": 1, "skip_special_tokens": skip}
    choice = api.complete(prompt, **fields).json()["choices"][0]
    assert choice["text"] == prompt + "H"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "<|im_start|>", "b", "H"]
    assert logprobs["text_offset"] == [0, 1, len(prompt) - 1, len(prompt)]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_leads_with_the_prompts(api, stream):
    response = api.complete([72, 73, 74], logprobs=2, echo=True, max_tokens=2, stream=stream)
    logprobs = merged(events_of(response)) if stream else response.json()["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 5
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert close_to(logprobs["token_logprobs"][1], logprob_of(73, 0).logprob)
    assert all(value is not None for value in logprobs["token_logprobs"][1:])
    assert api.engine.asked[-1][1].prompt_logprobs == 2


def test_max_tokens_0_with_echo_only_scores(api):
    body = api.complete([72, 73, 74], logprobs=1, echo=True, max_tokens=0).json()
    choice = body["choices"][0]
    assert choice["text"] == text_of([72, 73, 74])
    assert len(choice["logprobs"]["tokens"]) == 3
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    assert api.engine.asked[-1][1].max_tokens == 0


def test_prompt_logprobs_name_ids_ranks_and_texts(api):
    body = api.complete([72, 73], prompt_logprobs=2, max_tokens=1).json()
    first, second = body["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second["73"] == {
        "logprob": logprob_of(73, 0).logprob,
        "rank": 2,
        "decoded_token": text_of([73]),
    }
    assert second["0"]["rank"] == 1
    assert second["1"]["rank"] == 2
    assert body["choices"][0]["logprobs"] is None


def test_prompt_logprobs_with_max_tokens_0_need_no_echo(api):
    body = api.complete([72, 73], prompt_logprobs=0, max_tokens=0).json()
    assert body["choices"][0]["text"] == ""
    assert body["choices"][0]["prompt_logprobs"][1].keys() == {"73"}


def test_of_two_ids_with_one_text_the_chosen_one_keeps_it():
    class Twins(TokenNames):
        """Ids 5 and 6 have the same text, as an added token and an ordinary token may."""

        def raw(self, token):
            return b"twin" if token in (5, 6) else b"t%d" % token

    names = Twins(tokenizer(), as_ids=False, skip_special_tokens=True)
    entry = TokenLogprob(6, -3.0, 3, [(5, -0.5), (7, -1.5)])
    piece = LegacyBuilder(names, 2).piece([6], [entry])
    assert piece.top_logprobs == [{"token_id:5": -0.5, "t7": -1.5, "twin": -3.0}]
    assert piece.token_logprobs == [-3.0]


def test_minus_infinity_is_written_as_minus_9999():
    def banned(engine, number, prompt, params):
        entry = logprob_of(5, 1)
        entry.logprob = float("-inf")
        entry.top = [(1, float("-inf"))]
        yield Output(number, [5], "length", logprobs=[entry])

    logprobs = Api(banned).complete(logprobs=1, max_tokens=1).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0]
    assert set(logprobs["top_logprobs"][0].values()) == {-9999.0}


def test_tokens_can_be_written_as_ids(api):
    body = api.complete(logprobs=1, max_tokens=2, return_tokens_as_token_ids=True).json()
    tokens = tokenizer().encode(ANSWER, add_special_tokens=False)[:2]
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{t}" for t in tokens]
    assert "token_id:0" in logprobs["top_logprobs"][0]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned_when_asked_for(api, stream):
    response = api.complete("hi", return_token_ids=True, stream=stream, max_tokens=4)
    expected = tokenizer().encode(ANSWER, add_special_tokens=False)[:4]
    if stream:
        choices = [e["choices"][0] for e in events_of(response)]
        assert choices[0]["prompt_token_ids"] == IDS
        assert not any("prompt_token_ids" in c for c in choices[1:])
        ids = [i for c in choices for i in c["token_ids"]]
    else:
        choice = response.json()["choices"][0]
        assert choice["prompt_token_ids"] == IDS
        ids = choice["token_ids"]
    assert ids == expected


@pytest.mark.parametrize(("skip", "text"), [(False, "f<|im_start|>g"), (True, "fg")])
def test_special_tokens_are_shown_unless_skipped(skip, text):
    def special(engine, number, prompt, params):
        yield Output(number, [72, 1])
        yield Output(number, [73], "length")

    body = Api(special).complete([72, 1, 73], skip_special_tokens=skip, echo=True).json()
    assert body["choices"][0]["text"] == text * 2


def test_the_finish_of_a_stream_names_the_stop_string(api):
    choices = [
        e["choices"][0] for e in events_of(api.complete(stop="!", stream=True, max_tokens=50))
    ]
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == "!"
    assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)


def test_a_long_prompt_is_encoded_off_the_event_loop_and_refused(api):
    error = error_of(api.complete("lorem ipsum " * 2000))
    assert error["param"] == "prompt"
    assert "maximum context length" in error["message"]


def test_chat_logprobs_have_tokens_bytes_and_alternatives(api):
    body = api.chat(logprobs=True, top_logprobs=3).json()
    content = body["choices"][0]["logprobs"]["content"]
    said = b"".join(bytes(entry["bytes"]) for entry in content[:-1])
    assert said.decode() == ANSWER
    for entry in content:
        assert entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] == -0.5
        assert set(entry["top_logprobs"][0]) == {"token", "logprob", "bytes"}


@pytest.mark.parametrize("top", [None, 0, 2, 20])
def test_streamed_chat_logprobs_equal_the_whole(api, top):
    fields = {"logprobs": True, "top_logprobs": top}
    whole = api.chat(**fields).json()["choices"][0]["logprobs"]["content"]
    streamed = [
        entry
        for event in events_of(api.chat(stream=True, **fields))
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == whole
    assert {len(entry["top_logprobs"]) for entry in whole} == {top or 0}


def test_without_logprobs_none_are_computed(api):
    api.chat(logprobs=False)
    assert api.engine.asked[-1][1].logprobs is None
