"""A small agent: it asks a model, runs the tools that the model calls, and returns the text."""

import json
from typing import Any

import openai

WEATHER = {"Paris": "18 degrees, light rain", "Oslo": "3 degrees, snow"}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city now.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


def get_weather(city: str) -> str:
    """Return the weather in a city."""
    return WEATHER.get(city, "unknown")


def ask(client: openai.OpenAI, model: str, question: str, max_turns: int = 5) -> str:
    """Return the text that the model writes after it has called its tools."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(max_turns):
        reply = client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    msg = f"the model still calls tools after {max_turns} turns"
    raise RuntimeError(msg)


if __name__ == "__main__":
    local = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    print(ask(local, local.models.list().data[0].id, "What is the weather in Paris?"))
