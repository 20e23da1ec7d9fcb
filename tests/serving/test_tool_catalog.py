"""Searches among the tools of a request."""

import json

import pytest

from cpuserve.serving.calls.tool_catalog import MOST_FOUND, ToolSearch


def tool(name, description="", **properties):
    schemas = {key: {"type": "string", "description": text} for key, text in properties.items()}
    parameters = {"type": "object", "properties": schemas}
    return {"type": "function", "function": {"name": name, "description": description,
                                             "parameters": parameters}}  # fmt: skip


TOOLS = [
    tool("get_weather", "Tell the weather of a city.", city="The city."),
    tool("sendMail", "Send a message.", to="The address of the receiver."),
    tool("list_orders", "List the orders of a customer.", customer="A customer number."),
    tool("refund", "Pay an order back.", order="The order."),
    {"type": "function", "function": {"name": "bare", "description": None}},
]


def found(query, tools=TOOLS, *, by_pattern=False):
    search = ToolSearch("search", by_pattern=by_pattern, tools=tools)
    return search.run(query if isinstance(query, str) else json.dumps(query))


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("weather in Paris", ["get_weather"]),
        ("mail", ["sendMail"]),
        ("SEND MAIL", ["sendMail"]),
        ("receiver", ["sendMail"]),
        ("orders of a customer", ["list_orders", "get_weather", "sendMail"]),
        ("order", ["refund"]),
        ("bare", ["bare"]),
        ("nothing like this", []),
        ("", []),
    ],
)
def test_words_find_tools_by_names_descriptions_and_parameters(query, names):
    result = found({"query": query})
    assert result.error == ""
    assert result.names[:1] == names[:1]
    assert set(result.names) == set(names)


def test_a_rare_word_counts_more_than_a_common_one():
    tools = [tool(f"tool_{i}", "Read a file.") for i in range(9)] + [tool("x", "Read a calendar.")]
    assert found({"query": "read calendar"}, tools).names[0] == "x"
    assert len(found({"query": "read"}, tools).names) == MOST_FOUND


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("weather", ["get_weather"]),
        ("get_.*", ["get_weather"]),
        ("(?i)MAIL", ["sendMail"]),
        ("MAIL", []),
        ("mail|order", ["list_orders", "refund"]),
        ("^refund$", ["refund"]),
        ("number", ["list_orders"]),
    ],
)
def test_patterns_find_tools(pattern, names):
    assert found({"query": pattern}, by_pattern=True) == (names, "")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("", "it needs a query"),
        ("[]", "it needs a query"),
        ('{"query": 1}', "it needs a query"),
        ('{"pattern": "a"}', "it needs a query"),
        ("[" * 100_000, "it needs a query"),
        ({"query": "("}, "the pattern is not valid"),
        ({"query": "(?=a)"}, "the pattern is not valid"),
        ({"query": "a" * 201}, "more than 200 characters"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_bad_call_is_an_error_for_the_model(arguments, why):
    result = found(arguments, by_pattern=True)
    assert result.names == []
    assert why in result.error


def test_a_pattern_that_would_take_python_years_ends():
    tools = [tool("a" * 2000 + "!") for _ in range(20)]
    assert found({"query": "(a+)+$"}, tools, by_pattern=True).names == []


def test_only_the_beginning_of_a_long_description_is_searched():
    tools = [tool("a", "word " * 1_000_000 + "orders"), tool("b", "orders " * 3)]
    search = ToolSearch("search", by_pattern=False, tools=tools)
    assert search.num_chars < 10_000
    assert search.run('{"query": "orders"}').names == ["b"]
