"""The examples at the end of each command's help."""

import argparse
import shlex

import pytest

from cpuserve.cli.examples import EXAMPLES
from cpuserve.cli.flags import normalize
from cpuserve.cli.main import build_parser


def parsers(parser, name=""):
    """The parsers of all commands and of the kinds of `bench`, by name."""
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, sub in action.choices.items():
                path = f"{name} {word}".strip()
                found |= {path: sub} | parsers(sub, path)
    return found


PARSER = build_parser()
PARSERS = parsers(PARSER)


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_the_help_of_every_command_ends_with_an_example(name):
    *_, heading, examples = PARSERS[name].format_help().rpartition("\nExamples:\n")
    assert heading, "no examples"
    assert all(f"cpuserve {name}" in line for line in examples.splitlines())


def test_each_list_of_examples_belongs_to_a_command():
    assert set(EXAMPLES) == set(PARSERS)


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_every_example_is_understood(line):
    words = shlex.split(line[line.index("cpuserve ") :].rstrip(")").split(" < ")[0].split(" > ")[0])
    args, unknown = PARSER.parse_known_args(normalize(words[1:]))
    assert args.command == words[1]
    assert unknown == []
