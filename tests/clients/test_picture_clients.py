"""Client libraries send pictures to a small SmolVLM: each gets the response of transformers."""

import asyncio
import base64
import json

import anthropic
import ollama
import openai
import pytest

from tests.api.sees import tokenizer, write_served_model
from tests.helpers.drawn import data_url, document, invoice, picture, saved
from tests.helpers.served import running_server

TOKENS = 6
QUESTION = "what is this?"
SCREEN, NEXT = picture(160, 100, seed=31), picture(160, 100, seed=32)
pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_served_model(tmp_path_factory.mktemp("sees"))


@pytest.fixture(scope="module")
def server(model):
    options = "--served-model-name", "m", "--dtype", "float32", "--max-model-len", "512"
    with running_server(model.path, *options) as made:
        yield made


@pytest.fixture(scope="module")
def wanted(model):
    """The text of the greedy response to a question and a picture, and the tokens of the prompt."""
    return answer_to(model, QUESTION, SCREEN)


@pytest.fixture(scope="module")
def wanted_by_ollama(model):
    """The same, where the pictures of a message go before its text, as Ollama has them."""
    return answer_to(model, SCREEN, QUESTION)


def answer_to(model, *parts):
    prompt, tokens = model.answer(list(parts), TOKENS)
    end = tokens.index(2) if 2 in tokens else len(tokens)
    return tokenizer().decode(tokens[:end]), len(prompt)


def encoded(image):
    return base64.b64encode(saved(image)).decode()


CHAT = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": QUESTION},
            {"type": "image_url", "image_url": {"url": data_url(saved(SCREEN)), "detail": "high"}},
        ],
    }
]
INPUT = [
    {
        "role": "user",
        "content": [
            {"type": "input_text", "text": QUESTION},
            {"type": "input_image", "image_url": data_url(saved(SCREEN)), "detail": "auto"},
        ],
    }
]
BLOCKS = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": QUESTION},
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": encoded(SCREEN)},
            },
        ],
    }
]


def test_openai_chats_whole_and_in_streams(server, wanted):
    asked = {"model": "m", "messages": CHAT, "temperature": 0, "max_tokens": TOKENS}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        whole = client.chat.completions.create(**asked)
        assert (whole.choices[0].message.content, whole.usage.prompt_tokens) == wanted
        details = whole.usage.prompt_tokens_details
        assert 0 < details.multimodal_tokens["image"] < whole.usage.prompt_tokens
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = client.chat.completions.create(**asked, **options)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert (text, last.usage.prompt_tokens) == wanted
        assert last.usage.prompt_tokens_details.multimodal_tokens == details.multimodal_tokens

    async def both():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            one, stream = await asyncio.gather(
                client.chat.completions.create(**asked),
                client.chat.completions.create(**asked, stream=True),
            )
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return one.choices[0].message.content, "".join(parts)

    assert asyncio.run(both()) == (wanted[0], wanted[0])


def test_openai_responses_whole_and_in_streams(server, wanted):
    asked = {"model": "m", "input": INPUT, "temperature": 0, "max_output_tokens": TOKENS}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        whole = client.responses.create(**asked)
        assert (whole.output_text, whole.usage.input_tokens) == wanted
        assert whole.usage.input_tokens_details.multimodal_tokens["image"] > 0
        events = list(client.responses.create(**asked, stream=True))
        deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
        assert "".join(deltas) == wanted[0]
        counted = client.responses.input_tokens.count(model="m", input=INPUT)
        assert counted.input_tokens == wanted[1]
        pages = {"type": "input_file", "filename": "a.pdf"}
        pages["file_data"] = data_url(document(2), "application/pdf")
        read = client.responses.create(
            model="m", input=[{"role": "user", "content": [pages]}], max_output_tokens=TOKENS
        )
        assert read.usage.input_tokens_details.multimodal_tokens["image"] > 0

    async def both():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            one, stream = await asyncio.gather(
                client.responses.create(**asked), client.responses.create(**asked, stream=True)
            )
            events = [event async for event in stream]
            deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
            return one.output_text, "".join(deltas)

    assert asyncio.run(both()) == (wanted[0], wanted[0])


def test_anthropic_messages_whole_and_in_streams(server, wanted):
    asked = {"model": "m", "messages": BLOCKS, "max_tokens": TOKENS}
    asked["extra_body"] = {"temperature": 0}
    with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        whole = client.messages.create(**asked)
        assert whole.content[0].text == wanted[0]
        with client.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == wanted[0]
        counted = client.messages.count_tokens(model="m", messages=BLOCKS)
        assert counted.input_tokens == wanted[1]
        bad = {"type": "base64", "media_type": "image/png", "data": "aGk="}
        asked["messages"] = [{"role": "user", "content": [{"type": "image", "source": bad}]}]
        with pytest.raises(anthropic.BadRequestError, match="is no picture"):
            client.messages.create(**asked)


def test_anthropic_messages_in_parallel(server, wanted):
    asked = {"model": "m", "messages": BLOCKS, "max_tokens": TOKENS}
    asked["extra_body"] = {"temperature": 0}

    async def streamed(client):
        async with client.messages.stream(**asked) as stream:
            return "".join([part async for part in stream.text_stream])

    async def both():
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as client:
            whole, stream, counted = await asyncio.gather(
                client.messages.create(**asked),
                streamed(client),
                client.messages.count_tokens(model="m", messages=BLOCKS),
            )
            return whole.content[0].text, stream, counted.input_tokens

    assert asyncio.run(both()) == (wanted[0], *wanted)


def test_ollama_chats_and_generates_in_parallel(server, wanted_by_ollama, tmp_path):
    path = tmp_path / "screen.png"
    path.write_bytes(saved(SCREEN))
    options = {"temperature": 0, "num_predict": TOKENS}
    turn = {"role": "user", "content": QUESTION, "images": [str(path)]}

    async def streamed(client):
        parts = await client.chat(model="m", messages=[turn], options=options, stream=True)
        return "".join([part.message.content async for part in parts])

    async def generated(client):
        given = {"prompt": QUESTION, "images": [str(path)], "options": options}
        parts = await client.generate(model="m", **given, stream=True)
        return "".join([part.response async for part in parts])

    async def all_of_them():
        client = ollama.AsyncClient(host=server.url)
        try:
            whole, made, *texts = await asyncio.gather(
                client.chat(model="m", messages=[turn], options=options),
                client.generate(
                    model="m", prompt=QUESTION, images=[saved(SCREEN)], options=options
                ),
                streamed(client),
                generated(client),
            )
        finally:
            await client._client.aclose()
        return (whole.message.content, whole.prompt_eval_count), made.response, *texts

    assert asyncio.run(all_of_them()) == (wanted_by_ollama, *[wanted_by_ollama[0]] * 3)


def test_ollama_chats_and_generates(server, wanted_by_ollama, tmp_path):
    with ollama.Client(host=server.url) as client:
        options = {"temperature": 0, "num_predict": TOKENS}
        path = tmp_path / "screen.png"
        path.write_bytes(saved(SCREEN))
        for image in (saved(SCREEN), str(path), encoded(SCREEN)):
            turn = {"role": "user", "content": QUESTION, "images": [image]}
            reply = client.chat(model="m", messages=[turn], options=options)
            assert (reply.message.content, reply.prompt_eval_count) == wanted_by_ollama
            found = client.generate(model="m", prompt=QUESTION, images=[image], options=options)
            assert (found.response, found.prompt_eval_count) == wanted_by_ollama
        parts = client.generate(
            model="m", prompt=QUESTION, images=[str(path)], options=options, stream=True
        )
        assert "".join(each.response for each in parts) == wanted_by_ollama[0]
        assert "vision" in client.show("m").capabilities


def test_the_requests_of_doclings_pipeline_have_a_response(server, model):
    """The body that docling's pipeline for vision models sends to an API, one for each page."""
    page = invoice().resize((128, 166)).convert("RGB")
    body = {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": data_url(saved(page))}},
                    {"type": "text", "text": QUESTION},
                ],
            }
        ],
        "model": "m",
        "max_tokens": TOKENS,
        "skip_special_tokens": False,
        "temperature": 0,
    }
    reply = server.post("/v1/chat/completions", **body)
    prompt, tokens = model.answer([page, QUESTION], TOKENS)
    end = tokens.index(2) + 1 if 2 in tokens else len(tokens)
    assert reply["usage"]["prompt_tokens"] == len(prompt)
    shown = reply["choices"][0]["message"]["content"]
    # The end of the turn is not part of a text, whatever the request says about special tokens.
    assert shown == tokenizer().decode(tokens[: end - (2 in tokens)], skip_special_tokens=False)


def test_an_agent_looks_at_screenshots_turn_after_turn(server):
    """Screenshots as results of tools: earlier ones stay in the cache, and each is seen once."""

    def seen():
        names = "mm_cache_queries_total", "mm_cache_hits_total"
        queries, hits = map(server.metric, names)
        return queries - hits

    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        messages = [{"role": "user", "content": "look at the screen"}]
        cached, before = [], seen()
        for number, screen in enumerate((SCREEN, NEXT, picture(160, 100, seed=33)), 1):
            made = {**call, "id": f"c{number}"}
            url = {"type": "image_url", "image_url": {"url": data_url(saved(screen))}}
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [made]},
                {"role": "tool", "tool_call_id": made["id"], "content": [url]},
            ]
            reply = client.chat.completions.create(
                model="m", messages=messages, temperature=0, max_tokens=2
            )
            assert reply.choices[0].message.role == "assistant"
            images = reply.usage.prompt_tokens_details.multimodal_tokens["image"]
            assert images % number == 0
            cached.append(reply.usage.prompt_tokens_details.cached_tokens)
    assert cached == sorted(cached)
    assert cached[-1] > 2 * images // 3 - 32
    assert seen() - before <= 3
    with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        source = {"type": "base64", "media_type": "image/png", "data": encoded(NEXT)}
        result = {"type": "image", "source": source}
        turns = [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "t1", "name": "look", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [result]}]},
        ]  # fmt: skip
        reply = client.messages.create(model="m", messages=turns, max_tokens=2)
        count = client.messages.count_tokens(model="m", messages=turns).input_tokens
        usage = reply.usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count
    assert json.loads(server.get("/props"))["modalities"]["vision"] is True
