"""Beam search with a real engine: against transformers, and in company."""

import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

from cpuserve import LLM, BeamSearchParams, SamplingParams
from cpuserve.base.errors import InvalidRequest, PromptTooLong
from tests.helpers.served import running_server
from tests.helpers.tiny import tiny_end_ids, tiny_model

PROMPTS = [[5, 6, 7], [9] * 40, [30, 31, 32, 33, 34, 35]]
SIZES = {"max_model_len": 96, "max_num_batched_tokens": 64, "kv_cache_memory": "16MiB"}


@pytest.fixture(scope="module")
def path():
    return str(tiny_model("llama"))


@pytest.fixture(scope="module")
def llm(path):
    with LLM(path, **SIZES) as made:
        yield made


@pytest.fixture(scope="module")
def oracle(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()


def tokens_of(outputs):
    return [[sequence.tokens for sequence in output.sequences] for output in outputs]


@pytest.mark.parametrize("width", [1, 3, 6])
def test_the_beams_are_those_of_transformers(llm, oracle, width):
    params = BeamSearchParams(beam_width=width, max_tokens=9, ignore_eos=True, length_penalty=0.7)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        wanted = oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=9,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert [sequence.tokens for sequence in output.sequences] == wanted.tolist()
        for sequence in output.sequences:
            with torch.no_grad():
                logits = oracle(torch.tensor([sequence.tokens])).logits[0].log_softmax(-1)
            new = sequence.tokens[len(prompt) :]
            each = [float(logits[len(prompt) - 1 + i, token]) for i, token in enumerate(new)]
            assert sequence.cum_logprob == pytest.approx(sum(each), abs=1e-3)
            assert [
                row[token].logprob for row, token in zip(sequence.logprobs, new, strict=True)
            ] == (pytest.approx(each, abs=1e-3))
            assert sequence.finish_reason == "length"
            assert sequence.text == llm.get_tokenizer().decode(
                sequence.tokens, skip_special_tokens=True
            )


def test_one_beam_is_the_greedy_text(llm):
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    wanted = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    beams = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=1, max_tokens=12, ignore_eos=True))
    assert [
        tokens[0][len(prompt) :] for tokens, prompt in zip(tokens_of(beams), PROMPTS, strict=True)
    ] == wanted


@pytest.mark.deep
def test_prompts_searched_together_and_alone_have_the_same_beams(llm):
    params = BeamSearchParams(beam_width=4, max_tokens=40, ignore_eos=True)
    together = llm.beam_search(PROMPTS, params)
    alone = llm.beam_search(PROMPTS, params, concurrency_limit=1)
    assert together == alone, "tokens, texts and logprobs are equal, bit for bit"
    llm.generate([[8] * 30, [9] * 41], SamplingParams(max_tokens=20))
    assert llm.beam_search(PROMPTS[::-1], params) == alone[::-1]


def test_a_text_ends_at_the_end_of_text_or_at_the_context(llm):
    (end, *_) = tiny_end_ids("llama")
    params = BeamSearchParams(beam_width=10, max_tokens=500)
    (output,) = llm.beam_search([[5] * 90], params)
    for sequence in output.sequences:
        assert end not in sequence.tokens
        assert sequence.finish_reason == ("stop" if len(sequence.tokens) < 96 else "length")
    with pytest.raises(PromptTooLong):
        llm.beam_search([[5] * 96], params)
    with pytest.raises(InvalidRequest, match="no adapter"):
        llm.beam_search([[5]], params, lora_request="other")


@pytest.mark.deep
def test_a_server_finds_the_same_texts_in_any_company(llm, path):
    params = BeamSearchParams(beam_width=3, max_tokens=20, ignore_eos=True)
    wanted = [
        [sequence.tokens[len(prompt) :] for sequence in output.sequences]
        for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True)
    ]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    with running_server(tiny_model("llama"), "--served-model-name", "tiny", *flags) as server:

        def ask(prompt, **fields):
            body = {"max_tokens": 20, "ignore_eos": True, "return_token_ids": True, **fields}
            found = server.post("/v1/completions", prompt=prompt, use_beam_search=True, **body)
            return [choice["token_ids"] for choice in found["choices"]]

        company = threading.Thread(
            target=server.post, args=("/v1/completions",), kwargs={"prompt": "a", "max_tokens": 60}
        )
        company.start()
        each = [ask(prompt, n=3) for prompt in PROMPTS]
        company.join()
        assert each == wanted
        assert ask(PROMPTS, n=3) == [tokens for of_prompt in wanted for tokens in of_prompt]
        assert ask(PROMPTS[0], best_of=3) == wanted[0][:1]
