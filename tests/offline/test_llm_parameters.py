"""`LLM` takes bad_words, logprob_token_ids and other fields of vLLM, as the server does."""

from __future__ import annotations

import pytest

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import InvalidRequest
from tests.helpers.tiny import tiny_model

PROMPT = [(7 * i) % 250 for i in range(30)]
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm():
    with LLM(str(tiny_model("llama")), max_model_len=128) as made:
        yield made


def output(llm, **fields):
    params = SamplingParams(**{**GREEDY, **fields})
    return llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0]


def test_a_bad_word_is_not_written_and_the_parameters_do_not_change(llm):
    free = output(llm)
    tokenizer = llm.get_tokenizer()
    texts = {i: tokenizer.decode([i]) for i in free.token_ids}
    token, word = next(
        (i, text)
        for i, text in texts.items()
        if text.strip() == text and tokenizer.encode(text, add_special_tokens=False) == [i]
    )
    params = SamplingParams(**GREEDY, bad_words=[word])
    found = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0]
    assert token not in found.token_ids
    assert params.bad_word_ids == []


def test_named_tokens_have_logprobs_without_ranks(llm):
    free = output(llm, logprobs=1)
    found = output(llm, logprobs=1, logprob_token_ids=[300, 9])
    assert found.token_ids == free.token_ids
    for token, row, usual in zip(found.token_ids, found.logprobs, free.logprobs, strict=True):
        assert set(row) == {token, 300, 9}
        assert row[token] == usual[token]
        assert {row[i].rank for i in (300, 9) if i != token} <= {None}


def test_a_text_that_repeats_itself_ends(llm):
    loop = {"max_pattern_size": 2, "min_count": 3}
    found = output(llm, logit_bias={7: 100.0}, repetition_detection=loop)
    assert found.token_ids == [7, 7, 7]
    assert (found.finish_reason, found.stop_reason) == ("repetition", "repetition_detected")


def test_bad_values_are_refused(llm):
    with pytest.raises(InvalidRequest, match="needs logprobs"):
        output(llm, logprob_token_ids=[5])
    with pytest.raises(InvalidRequest, match="at most"):
        output(llm, bad_words=["a"] * 2000)


def test_a_prompt_is_cut_to_its_last_tokens(llm):
    prompt = list(range(20, 142))
    fields = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    for asked, kept in ((10, 10), (-1, 122), (122, 122)):
        params = SamplingParams(truncate_prompt_tokens=asked, **fields)
        (cut,) = llm.generate([prompt], params)
        assert cut.prompt_token_ids == prompt[-kept:]
        (whole,) = llm.generate([prompt[-kept:]], SamplingParams(**fields))
        assert cut.outputs[0].token_ids == whole.outputs[0].token_ids
    (cut,) = llm.generate([prompt + prompt], SamplingParams(truncate_prompt_tokens=-1, **fields))
    assert cut.prompt_token_ids == prompt, "the context of 128 tokens has room for max_tokens"
    message = [{"role": "user", "content": "a " * 500}]
    (chat,) = llm.chat(message, SamplingParams(truncate_prompt_tokens=-1, **fields))
    assert len(chat.prompt_token_ids) == 122
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens"):
        llm.generate([prompt], SamplingParams(truncate_prompt_tokens=0, **fields))
