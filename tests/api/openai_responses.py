"""Requests to OpenAI's responses, and the content of the responses."""

from tests.api.fakes import named_events_of

PATH = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tell the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
NESTED = {"type": "function", "function": {k: v for k, v in WEATHER.items() if k != "type"}}
OTHER = {"type": "function", "name": "other"}
SEARCH = {"type": "web_search", "external_web_access": True}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FORM = {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}
LOGPROBS = "message.output_text.logprobs"
HI = {"role": "user", "content": "hi"}


def ask(api, given="hi", **fields):
    return api.post(PATH, model="tiny", input=given, **fields)


def events_of(response):
    """The events of a stream, after checking their numbers."""
    found = named_events_of(response)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found
