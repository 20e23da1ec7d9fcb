"""Detokenization: no part of a stop string is shown; finish reasons, counts, logprobs."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpuserve.base.errors import RequestError
from cpuserve.engine.ipc import Output, TokenLogprob
from cpuserve.sampling.params import SamplingParams
from cpuserve.serving.calls.events import Finish, Text
from cpuserve.serving.generation.text import StopFilter, TextProcessor
from cpuserve.serving.tools.families import HERMES

EOS = 256


class ByteTokenizer:
    """Token i < 256 is the byte i; 256 is end-of-text, which is special."""

    special_ids = frozenset({EOS})
    strips_leading_space = False

    def token_bytes(self, token):
        return bytes([token]) if token < 256 else b"<eos>"


def process(text, finish="length", cut=1, **params):
    """(text, token ids, Finish or None) of `text` as byte tokens, `cut` tokens an output."""
    ids = list(text.encode()) if isinstance(text, str) else text
    processor = TextProcessor(ByteTokenizer(), [], SamplingParams(**params))
    shown, tokens, last = "", [], None
    for start in range(0, len(ids), cut):
        end = start + cut >= len(ids)
        output = Output(1, ids[start : start + cut], finish if end else None)
        (event, *rest), count = processor.push(output)
        assert count == len(event.token_ids)
        shown += event.text
        tokens += event.token_ids
        if rest:
            (last,) = rest
            break
    assert processor.finish == (last and last.reason)
    return shown, tokens, last


def plain_stop(text, stops, include):
    """Find by brute force the first character at which a stop string is complete."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            return (text[:end] if include else text[: end - max(map(len, ending))]), True
    return text, False


def text_of(pushed):
    """The text of what `push` returned."""
    return "".join(event.text for event in pushed[0] if isinstance(event, Text))


ALPHABET = st.text("abé", max_size=24)
STOPS = st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=400, derandomize=True, deadline=None)
@given(ALPHABET, STOPS, st.booleans(), st.lists(st.integers(1, 5), max_size=30))
def test_stop_filter_equals_brute_force_for_any_cuts(text, stops, include, cuts):
    want, matched = plain_stop(text, stops, include)
    stop_filter, shown, position = StopFilter(stops, include), "", 0
    for cut in [*cuts, len(text) + 1]:
        shown += stop_filter.push(text[position : position + cut])
        position += cut
        assert want.startswith(shown), "text was shown that must be held back"
        if stop_filter.matched:
            break
    if not stop_filter.matched:
        shown += stop_filter.flush()
    assert shown == want
    assert (stop_filter.matched is not None) == matched


class CountedStop(str):
    """A stop string that counts how often a part of it is looked at."""

    __slots__ = ()
    looks = 0

    def __getitem__(self, where):
        CountedStop.looks += 1
        return str.__getitem__(self, where)


def test_time_is_for_new_characters_however_much_is_held_back():
    stops = ["a" * 4096, *("b" * k for k in range(4033, 4096))]
    stop_filter = StopFilter([CountedStop(stop) for stop in stops], False)
    assert stop_filter.push("a" * 4000) == ""
    CountedStop.looks = 0
    assert stop_filter.push("aaaa") == ""
    assert 0 < CountedStop.looks <= 10 * len(stops)
    assert stop_filter.push("b") == "a" * 4004


@settings(max_examples=400, derandomize=True, deadline=None)
@given(st.text("ab", max_size=60), st.lists(st.text("ab", min_size=3, max_size=12), min_size=1))
def test_stop_strings_that_repeat_themselves_are_found(text, stops):
    stop_filter = StopFilter(stops, True)
    shown = "".join(stop_filter.push(c) for c in text if stop_filter.matched is None)
    want, matched = plain_stop(text, stops, True)
    assert shown + stop_filter.flush() == want
    assert (stop_filter.matched is not None) == matched


@settings(max_examples=200, derandomize=True, deadline=None)
@given(ALPHABET, STOPS, st.booleans(), st.integers(1, 7))
def test_text_and_token_count_do_not_depend_on_tokens_per_output(text, stops, include, cut):
    one = process(text, stop=stops, include_stop_str_in_output=include)
    many = process(text, cut=cut, stop=stops, include_stop_str_in_output=include)
    assert one[:2] == many[:2]
    if one[2] is not None:
        assert one[2].reason == many[2].reason
        assert one[2].stop_reason == many[2].stop_reason


def test_stop_string_over_several_tokens_is_cut_and_named():
    text, tokens, last = process("one two STOP three", stop=["STOP"])
    assert text == "one two "
    assert len(tokens) == len("one two STOP")
    assert (last.reason, last.stop_reason) == ("stop", "STOP")


def test_stop_string_is_kept_on_request():
    assert process("one END two", stop=["END"], include_stop_str_in_output=True)[0] == "one END"


def test_beginning_of_a_stop_string_is_shown_when_the_sequence_ends():
    text, _, last = process("one STO", stop=["STOP"])
    assert (text, last.reason, last.stop_reason) == ("one STO", "length", None)


def test_stop_string_within_min_tokens_does_not_end_the_sequence():
    text, tokens, last = process("STOP and STOP", stop=["STOP"], min_tokens=6)
    assert text == "STOP and "
    assert len(tokens) == 13
    assert last.reason == "stop"


@pytest.mark.parametrize("cut", [1, 2, 7])
@pytest.mark.parametrize(
    ("min_tokens", "shown", "count"),
    [(2, "ab", 3), (3, "ab.d", 5), (4, "ab.d", 5), (5, "ab.d.", 6), (6, "ab.d..g", 7)],
)
def test_stop_strings_count_from_the_token_after_min_tokens(cut, min_tokens, shown, count):
    text, tokens, _ = process("ab.d..g", cut=cut, stop=["."], min_tokens=min_tokens)
    assert (text, len(tokens)) == (shown, count)


def test_stop_string_completed_by_the_end_of_an_unfinished_character():
    text, _, last = process([0x61, 0xE2, 0x82], stop=["\ufffd"])
    assert (text, last.reason) == ("a", "stop")


def test_text_of_a_stop_token_is_left_out_and_kept_on_request():
    ids = [*b"hi", 0x21]
    assert process(ids, "stop")[0] == "hi"
    assert process(ids, "stop")[1] == ids
    assert process(ids, "stop", include_stop_str_in_output=True)[0] == "hi!"
    eos = [*b"hi", EOS]
    assert process(eos, "stop", include_stop_str_in_output=True)[0] == "hi"
    kept = process(eos, "stop", include_stop_str_in_output=True, skip_special_tokens=False)
    assert kept[0] == "hi<eos>"


def test_half_a_character_waits_and_becomes_a_replacement_at_the_end():
    processor = TextProcessor(ByteTokenizer(), [], SamplingParams())
    first, second, third = "€".encode()
    assert text_of(processor.push(Output(1, [first]))) == ""
    assert text_of(processor.push(Output(1, [second]))) == ""
    assert text_of(processor.push(Output(1, [third]))) == "€"
    assert text_of(processor.push(Output(1, [first], "length"))) == "\ufffd"


def test_logprobs_are_cut_with_the_tokens_and_prompt_logprobs_pass():
    rows = [TokenLogprob(t, -0.5, 1, []) for t in b"a.b"]
    processor = TextProcessor(ByteTokenizer(), [], SamplingParams(stop=["."]))
    events, count = processor.push(Output(1, list(b"a.b"), None, None, rows, [None]))
    scored, text, finish = events
    assert [r.token for r in text.logprobs] == list(b"a.")
    assert count == 2
    assert scored.scores == [None]
    assert finish == Finish(0, "stop", ".")


def test_stop_id_passes():
    processor = TextProcessor(ByteTokenizer(), [], SamplingParams(), 3)
    events, _ = processor.push(Output(1, [65], "stop", 65, cached_tokens=32, scheduled=1.5))
    assert events == [Text(3, "", [65]), Finish(3, "stop", 65)]


def test_error_of_the_engine_is_raised():
    processor = TextProcessor(ByteTokenizer(), [], SamplingParams())
    with pytest.raises(RequestError, match="NaN"):
        processor.push(Output(1, [], "error", error="the model produced NaN logits"))


class Pieces:
    """A tokenizer with these texts as tokens."""

    special_ids = frozenset()
    strips_leading_space = False

    def __init__(self, texts):
        self.texts = texts

    def token_bytes(self, token):
        return self.texts[token].encode()


WORDS = ["<think>", "</think>", "<th", "ink>", "a", "b>", "\n", " ", ">", "<tool_call>",
         '{"name": "f", "arguments": {"x": "ab"}}', "</tool_call>", "ab"]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map("".join), max_size=12),
    st.lists(st.sampled_from(["ab", ">>", "a\n", "k>a", "<", '"x"', "\n\n", "b>a"]), min_size=1),
)
@example(["<think>", "xab"], [">>", "ab"])  # the end of the tag is held back
def test_stop_strings_near_thoughts_do_not_depend_on_the_size_of_steps(texts, stops):
    def read(stops_alike):
        params = SamplingParams(max_tokens=999, stop=stops)
        processor = TextProcessor(Pieces(texts), [], params)
        parser = HERMES.parser(0)
        parser._id = lambda: "id"
        with pytest.MonkeyPatch.context() as patch:
            if not stops_alike:
                patch.setattr(type(parser), "stops_alike", lambda self, text: False)
            processor.find_calls(parser, frozenset())
            events = []
            for token in range(len(texts)):
                finish = "length" if token == len(texts) - 1 else None
                events += processor.push(Output(0, [token], finish))[0]
                if processor.finish is not None:
                    break
        return processor.num_reasoning, [event for event in events if event != Text(0, "", [])]

    assert read(True) == read(False)
