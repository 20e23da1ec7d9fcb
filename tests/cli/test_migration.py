"""The tables for users of other servers say what the command line and the variables really do."""

import re
import shlex

import pytest

from cpuserve.base.errors import ConfigError
from cpuserve.cli import main as cli
from cpuserve.cli.flags import normalize, refuse_unknown
from cpuserve.config.env import read_env
from cpuserve.config.fields import BY_NAME, NO_OPS
from cpuserve.config.missing import MISSING, UNREAD
from docs.tables import migrating
from docs.tables.migrating import ALIAS, IGNORED, OWN, REFUSED, SERVERS, UNREAD_VARIABLE

NAMES = [(server.title, name) for server in SERVERS for name in server.all_names]
FLAGS = [(server, name) for server, name in NAMES if name.startswith("-")]
VARIABLES = [(server, name) for server, name in NAMES if not name.startswith("-")]
# A value that each option with one accepts; all others accept 1.
VALUES = {
    "model": "m",
    "dtype": "bfloat16",
    "quantization": "int8",
    "max_model_len": "0",
    "kv_cache_dtype": "int8",
    "numa": "tp",
    "pooling": "mean",
    "scheduling_policy": "priority",
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
    "omp_threads_bind": "0-3",
    "log_level": "debug",
    "lora_modules": "a=b",
    "allowed_origins": "*",
    "speculative_config": '{"method": "ngram"}',
    "override_generation_config": '{"top_k": 5}',
}


@pytest.fixture(scope="module")
def parser():
    return cli.build_parser()


def parsed(parser, *argv):
    parser_of_serve(parser).set_defaults(given={}, notes=[], two_models=None)
    args, unknown = parser.parse_known_args(normalize(["serve", "m", *argv]))
    refuse_unknown(args.parser, unknown)
    return args


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.title)
def test_a_table_has_the_names_that_users_know_best(server):
    names = server.all_names
    assert len(names) + len(server.commands) >= 40
    assert len({*names}) == len(names)
    assert server.remarks.keys() <= {*names}


@pytest.mark.parametrize(("server", "name"), FLAGS)
def test_the_parser_does_with_a_flag_what_the_table_says(parser, server, name):
    how, to = migrating.counterpart(name)
    plain = to.replace("`", "")
    if how == REFUSED:
        with pytest.raises(ConfigError) as refused:
            parsed(parser, name)
        said = str(refused.value).replace("`", "")
        assert said == f"flag {name} is not supported: {plain}"
        return
    (action,) = {a for a in parser_of_serve(parser)._actions if name in a.option_strings}
    if how == IGNORED:
        value = [] if action.nargs == 0 else [(*action.no_op.only, "1")[0]]
        assert parsed(parser, name, *value).notes == [
            f"{name} is accepted and has no effect: {action.no_op.why}"
        ]
        return
    value = [] if action.nargs == 0 else [VALUES.get(action.field.name, "1")]
    given = parsed(parser, name, *value).given[action.field.name]
    assert given.name == name
    assert how == (OWN if plain == name else ALIAS)
    assert plain.split(",")[0] in (name, action.field.flag)


def parser_of_serve(parser):
    return parser.parse_args(["serve"]).parser


@pytest.mark.parametrize(("server", "name"), VARIABLES)
def test_a_variable_is_read_as_the_table_says(server, name):
    how, to = migrating.counterpart(name)
    found = read_env({name: "1"})
    if how == ALIAS:
        ((field, (variable, _)),) = found.values.items()
        assert (variable, BY_NAME[field].flag) == (name, to.split("`")[1])
        return
    assert found.values == {}
    begin = {IGNORED: "accepted and has no effect", UNREAD_VARIABLE: "ignored"}[how]
    assert [note.replace("`", "") for note in found.notes] == [
        f"env {name} is {begin}: {to.replace('`', '')}"
    ]


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.title)
def test_the_commands_of_a_table_are_understood(parser, server):
    (choices,) = (action.choices for action in parser._actions if action.choices)
    for theirs, ours in server.commands.items():
        for command in re.findall(r"`cpuserve (.*?)`", ours):
            args, unknown = parser.parse_known_args(normalize(shlex.split(command)))
            assert args.command == command.split()[0]
            assert set(unknown) <= {"TEXT"}
        name = theirs.split()[1] if " " in theirs else ""
        assert name not in choices or f"`cpuserve {name}" in ours or "vllm" not in theirs


def test_advice_has_only_options_that_exist(parser):
    (choices,) = (action.choices for action in parser._actions if action.choices)
    known = {flag for sub in choices.values() for flag in sub._option_string_actions}
    advice = [entry.why for entry in (*MISSING, *UNREAD, *NO_OPS)]
    assert len(advice) > 100
    for why in advice:
        assert {*re.findall(r"(?<![\w-])--[a-z-]+", why)} <= known, why


def test_a_variable_of_llama_server_has_the_advice_of_its_flag():
    found = read_env({"LLAMA_ARG_THREADS": "8", "LLAMA_ARG_UNKNOWN": "1", "OLLAMA_EDITOR": "vi"})
    assert found.notes == (
        "env LLAMA_ARG_THREADS is ignored: use --omp-threads-bind, or OMP_NUM_THREADS with "
        "--omp-threads-bind nobind",
        "env LLAMA_ARG_UNKNOWN has no counterpart in cpuserve and is ignored",
    )


def test_no_variable_is_both_read_and_ignored():
    ignored = [name for unread in UNREAD for name in unread.names]
    read = {alias.name for field in BY_NAME.values() for alias in field.env_aliases}
    read |= {name for no_op in NO_OPS for name in no_op.names}
    assert len({*ignored}) == len(ignored)
    assert not read & {*ignored}
