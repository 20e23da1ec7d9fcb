"""The models of one server: the file of --models, and words after MODEL."""

import json

import pytest

from cpuserve.base.errors import ConfigError
from cpuserve.cli.flags import asked
from cpuserve.cli.main import _run, build_parser
from cpuserve.config.load import Given, load_options
from cpuserve.config.several import several_models


def models_of(tmp_path, content, **flags):
    path = tmp_path / "models.json"
    path.write_text(json.dumps(content))
    given = {"models": Given("--models", "flag", str(path))}
    for name, value in flags.items():
        given[name] = Given(f"--{name}", "flag", value)
    return several_models(load_options(given, environ={}))


def test_the_first_model_of_the_file_is_the_first_of_the_server(tmp_path):
    first, further = models_of(
        tmp_path,
        {
            "chat": {
                "model": "/m/chat",
                "aliases": ["gpt-4o"],
                "adapters": {"polite": "/a/polite"},
                "max_model_len": 2048,
            },
            "embed": "/m/embed",
        },
        max_num_seqs="3",
        seed="5",
    )
    assert first.options.model == "/m/chat"
    assert first.options.served_model_name == ["chat", "gpt-4o"]
    assert first.options.lora_modules == ["polite=/a/polite"]
    assert (first.options.max_model_len, first.options.max_num_seqs) == (2048, 3)
    (embed,) = further
    assert (embed.name, embed.asked.options.model) == ("embed", "/m/embed")
    assert embed.asked.options.max_model_len is None
    assert embed.asked.options.max_num_seqs == 3, "flags apply to all models"
    assert embed.asked.sources["model"].endswith("models.json: embed")


def test_with_a_model_on_the_command_line_all_of_the_file_are_further_models(tmp_path):
    content = {"b": {"model": "/b", "aliases": ["bee"], "adapters": {"x": "/x"}}}
    first, further = models_of(tmp_path, content, model="/a", chat_template="/t")
    assert (first.options.model, first.options.chat_template) == ("/a", "/t")
    (found,) = further
    assert (found.name, found.aliases, found.adapters) == ("b", ("bee",), {"x": "/x"})
    assert found.asked.options.chat_template is None, "flags about one model are about the first"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([], "mapping of names to models"),
        ({}, "mapping of names to models"),
        ({"a": 3}, "a: it must be the path or name of a model"),
        ({"a": {"aliases": ["b"]}}, "a mapping with `model`"),
        ({"a": {"model": "/a", "aliases": "b"}}, "aliases must be a list of names"),
        ({"a": {"model": "/a", "adapters": ["b"]}}, "adapters must be a mapping"),
        ({"a": {"model": "/a", "port": 80}}, "port is no option of a model in this file"),
        ({"a": {"model": "/a", "served_model_name": "x"}}, "give `aliases`"),
        ({"a": {"model": "/a", "max_model_length": 9}}, "unknown option 'max_model_length'"),
        ({"a": {"model": "/a", "max_model_len": "x"}}, "must be a whole number"),
        ({"m": "/m", "a": {"model": "/a", "aliases": ["b"]}, "b": "/b"}, "the name 'b'"),
    ],
)
def test_a_wrong_file_is_refused_with_the_entry(tmp_path, content, told):
    with pytest.raises(ConfigError) as raised:
        models_of(tmp_path, content)
    assert told in str(raised.value)


def test_words_after_the_model_are_further_models():
    args, unknown = build_parser().parse_known_args(
        ["serve", "a/b", "--port", "1", "--also-serve", "x=/x"]
    )
    from cpuserve.cli.flags import take_further_models

    assert not unknown
    take_further_models(args, ["c/d", "code=e/f"])
    found = asked(args)
    assert found.options.model == "a/b"
    assert found.server.also_serve == ["x=/x", "c/d=c/d", "code=e/f"]


@pytest.mark.parametrize("words", [["8000"], ["c/d", "no-such-model"], ["n=nothing"]])
def test_a_word_that_is_no_model_is_refused(words):
    with pytest.raises(ConfigError, match=f"unexpected argument {words[-1]}: it is no built-in"):
        _run(["serve", "a/b", *words])


def test_an_unknown_flag_is_reported_before_its_value():
    with pytest.raises(ConfigError, match="unknown flag --prot"):
        _run(["serve", "a/b", "--prot", "8000"])
