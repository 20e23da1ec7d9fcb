"""LangChain's HuggingFaceEndpoint and ChatHuggingFace, whole, streamed and asynchronous."""

import asyncio

import pytest
from langchain_core.messages import HumanMessage
from langchain_huggingface import ChatHuggingFace, HuggingFaceEndpoint

from tests.clients.sdk.flows import SAID, SAY


def endpoint(server, **more):
    asked = {"max_new_tokens": 64, "huggingfacehub_api_token": "none", "provider": "hf-inference"}
    return HuggingFaceEndpoint(endpoint_url=server.url, **{**asked, **more})


async def astreamed(model, asked):
    return [piece async for piece in model.astream(asked)]


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.5, "top_k": 4}])
def test_a_prompt_is_continued(server, sampling):
    model = endpoint(server, **sampling)
    assert model.invoke(SAY) == SAID
    assert asyncio.run(endpoint(server, **sampling).ainvoke(SAY)) == SAID


def test_a_text_is_streamed(server):
    model = endpoint(server, streaming=True)
    pieces = list(model.stream(SAY))
    assert "".join(pieces) == SAID
    assert model.invoke(SAY) == SAID
    assert "".join(asyncio.run(astreamed(endpoint(server), SAY))) == SAID


def test_the_client_removes_its_stop_sequence(server):
    assert endpoint(server, stop_sequences=["there"]).invoke(SAY) == "Hi "
    assert endpoint(server).invoke(SAY, stop=["there"]) == "Hi "


def test_a_chat_is_answered(server):
    model = ChatHuggingFace(llm=endpoint(server), model_id="tgi")
    asked = [HumanMessage(SAY)]
    assert model.invoke(asked).content == SAID
    assert "".join(piece.content for piece in model.stream(asked)) == SAID
    again = ChatHuggingFace(llm=endpoint(server), model_id="tgi")
    assert asyncio.run(again.ainvoke(asked)).content == SAID
