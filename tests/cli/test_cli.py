"""The command line: exit codes, errors on one line, and imported modules."""

import argparse
import ast
import importlib.util
import json
import re
import shlex
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from cpuserve.base.errors import ConfigError, ModelError
from cpuserve.bench.server import serve_command
from cpuserve.cli import main as cli
from cpuserve.cli.flags import as_arguments, asked, normalize
from cpuserve.cli.main import build_parser
from cpuserve.config.fields import FIELDS, no_op_flags
from cpuserve.config.missing import MISSING, why_missing
from cpuserve.loader.builtin import DEFAULT
from tests.helpers.children import child_options
from tests.helpers.depth import deep_but
from tests.helpers.gguf_file import gguf, tiny_tensors, tiny_values
from tests.helpers.tiny import tiny_model

COMMANDS = (
    "serve",
    "run",
    "ps",
    "stop",
    "completion",
    "size",
    "complete",
    "generate",
    "chat",
    "bench",
    "config",
    "program",
    "doctor",
    "pull",
    "quantize",
    "models",
    "list",
    "ls",
    "show",
    "rm",
)


@pytest.fixture
def parse():
    """Return a function that parses a command line without running the command."""

    return lambda *argv: parsed(cli.build_parser(), argv)


def parsed(parser, argv):
    """Return what a command line asks for. A parser keeps what it has been given."""
    args, unknown = parser.parse_known_args(normalize(argv))
    cli.refuse_unknown(args.parser, unknown)
    return asked(args)


def run(capsys, *argv):
    code = cli.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def help_of(capsys, *argv):
    with pytest.raises(SystemExit) as end:
        cli.main([*argv, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_names_every_command(capsys):
    text = help_of(capsys)
    assert all(re.search(rf"\n    {name}\s", text) for name in COMMANDS)


def test_no_arguments_print_the_help(capsys):
    code, out, _ = run(capsys)
    assert code == 0
    assert out.startswith("usage: cpuserve")


def all_help_of(capsys, *argv):
    with pytest.raises(SystemExit) as end:
        cli.main([*argv, "--help-all"])
    assert end.value.code == 0
    return capsys.readouterr().out


TAKES_OPTIONS = ("serve", "size", "run", "complete", "generate", "chat", "config", "program")


@pytest.mark.parametrize("name", TAKES_OPTIONS)
def test_the_first_page_of_help_has_ten_options_and_says_how_to_see_all(capsys, name):
    first, every = help_of(capsys, name), all_help_of(capsys, name)
    offered = {f"  {field.flag} " for field in FIELDS if field.flags}
    assert 4 <= sum(flag in first for flag in offered) <= 9, "and --config"
    assert "--help-all" in first
    assert len(first.splitlines()) < len(every.splitlines()) / 2


@pytest.mark.parametrize("columns", [60, 80, 100])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_the_terminal(capsys, monkeypatch, name, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    pages = [help_of(capsys, *name.split())]
    if name in TAKES_OPTIONS:
        pages.append(all_help_of(capsys, name))
    for page in pages:
        # Texts with examples have their own line breaks, for 80 columns.
        page, _, examples = page.partition("\nExamples:\n")
        assert all(len(line) <= 80 for line in examples.splitlines()), examples
        text = page.replace(cli.DESCRIPTION, "").replace(cli.EPILOG, "")
        assert all(len(line) <= columns for line in text.splitlines()), text
    assert all(len(line) <= 80 for line in f"{cli.DESCRIPTION}\n{cli.EPILOG}".splitlines())


@pytest.mark.parametrize("words", [["help"], ["help", "serve"], ["version"]])
def test_help_and_version_are_commands_too(capsys, words):
    as_flag = ["--version"] if words == ["version"] else [*words[1:], "--help"]
    shown = []
    for argv in (words, as_flag):
        with suppress(SystemExit):
            cli.main(argv)
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert "cpuserve" in shown[0]


@pytest.mark.parametrize("name", ["create", "cp", "collect-env"])
def test_a_command_of_another_program_gets_a_hint(capsys, name):
    code, out, err = run(capsys, name, "llama3")
    assert (code, out) == (2, "")
    assert err.startswith(f"cpuserve: error: there is no command {name!r}: ")
    assert err.count("\n") == 1


def test_help_of_serve_explains_every_option_in_its_group(capsys):
    text = " ".join(all_help_of(capsys, "serve").split())
    for field in FIELDS:
        if field.flags:
            assert f"{field.flag} {field.metavar or ''}".strip() in text
            assert " ".join(field.help.split()) in text
            assert not field.env or field.env in text
    assert "CPU and threads:" in text
    assert " _" not in text  # argparse's name for the value of an option without a metavar


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(capsys, name):
    assert help_of(capsys, name).startswith(f"usage: cpuserve {name}")


def test_version(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.strip()


@pytest.mark.parametrize(
    ("argv", "needle"),
    [
        (["serv"], "unknown command 'serv'; did you mean serve?; see `cpuserve --help`\n"),
        (["./m.gguf"], "unknown command './m.gguf'; to serve this model, run `cpuserve serve ./m"),
        (["owner/model", "--port", "80"], "run `cpuserve serve owner/model`\n"),
        ([DEFAULT], f"run `cpuserve serve {DEFAULT}`\n"),
        (["frobnicate"], "unknown command 'frobnicate'; see `cpuserve --help`\n"),
        (["serve", "--frobnicate"], "unknown flag --frobnicate; see `cpuserve serve --help`\n"),
        (["serve", "--no-enforce-eagr"], "did you mean --no-enforce-eager?"),
        (["serve", "--task", "classify"], "use generate"),
        (["serve", "--max-modellen", "4"], "did you mean --max-model-len?"),
        (["serve", "--prot=80"], "did you mean --port?"),
        (["serve", "--port"], "expected one argument"),
        (["serve", "a", "b"], "unexpected argument b"),
        (["serve", "a", "--model", "b"], "two models: --model 'b' and MODEL 'a'; give one of them"),
        (["serve", "--model=b", "--port", "80", "a"], "two models: --model 'b' and MODEL 'a'"),
        (["config", "a", "--model", "b"], "two models"),
        (["chat", "a", "--model", "b"], "two models"),
        (["config", "-m", "b.gguf", "-ngl", "99", "-c", "64"], "flag -ngl is not supported"),
        (["chat", "-ngl", "99", "-m", "b.gguf"], "flag -ngl is not supported"),
        (["--versoin"], "did you mean --version?"),
        (["bench"], "KIND"),
        (
            ["bench", "rooflin"],
            "unknown kind 'rooflin'; did you mean roofline?; see `cpuserve bench",
        ),
        (["generate", "--max-tokens", "x"], "not a number"),
        (["pull"], "NAME"),
        (["serve", "--pipeline-parallel-size", "2"], "use 1"),
        (["serve", "--config", "/no/such.json"], "No such file"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_2(capsys, argv, needle):
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert err.startswith("cpuserve: error: ")
    assert err.count("\n") == 1
    assert needle in err
    assert out == ""


@pytest.fixture(scope="module")
def parser():
    return cli.build_parser()


@pytest.mark.parametrize(
    "name",
    deep_but(
        [missing.names[0] for missing in MISSING],
        [name for missing in MISSING for name in missing.names],
    ),
)
def test_a_flag_of_another_server_without_counterpart_is_explained(parser, name):
    typed = f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name
    for argv in ([name], [f"{name}=x"], ["m", name, "x"], [typed], [name, "2"]):
        with pytest.raises(ConfigError) as refused:
            parsed(parser, ["serve", *argv])
        assert str(refused.value) == f"flag {name} is not supported: {why_missing(name)}"


def test_flags_that_are_explained_are_no_options():
    ours = {flag for field in FIELDS for flag in field.all_flags} | no_op_flags().keys()
    explained = [name for missing in MISSING for name in missing.names]
    assert not ours & set(explained)
    assert len(set(explained)) == len(explained)


def test_flags_of_vllm_without_effect_are_accepted_with_a_note(parse):
    found = parse("serve", "m", "--task", "generate", "--runner=auto", "--max-log-len", "5")
    assert [note.split()[0] for note in found.notes] == ["--task", "--runner", "--max-log-len"]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--dtype", "float8"),
        ("--max-model-len", "0"),
        ("--max-num-seqs", "abc"),
        ("--max-num-batched-tokens", "-1"),
        ("--kv-cache-memory", "abc"),
        ("--omp-threads-bind", "3-1"),
        ("--tensor-parallel-size", "0"),
        ("--model-impl", "jax"),
        ("--port", "99999"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "config"])
def test_a_bad_option_is_one_line_and_exit_2(capsys, command, flag, value):
    code, _, err = run(capsys, command, f"{flag}={value}")
    assert code == 2
    assert f"flag {flag}={value}" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["config", "program", "serve"])
def test_a_missing_model_is_one_line_and_exit_2(capsys, name):
    port = ["--port=0"] if name == "serve" else []
    code, _, err = run(capsys, name, "/no/such/model.gguf", *port)
    assert code == 2
    assert err.startswith("cpuserve: error: ")
    assert "model path /no/such/model.gguf does not exist" in err
    assert "Traceback" not in err


def test_an_error_that_quotes_control_characters_is_one_line_of_printable_text(capsys):
    code, _, err = run(capsys, "config", "/no/such/\x1b[2J\u202e\u2028model\n.gguf")
    assert code == 2
    assert "\\x1b[2J\\u202e" in err
    assert err.count("\n") == 1
    assert err[:-1].isprintable()


def gguf_traps(folder):
    """Broken GGUF models by name, and what the error must say."""
    rng = np.random.default_rng(0)
    whole = gguf(tiny_values(), tiny_tensors(rng))
    parts = gguf([*tiny_values(), ("split.no", 2, 0), ("split.count", 2, 2)], tiny_tensors(rng))
    fork = gguf(tiny_values(), [("token_embd.weight", (256, 8), 144, bytes(1120))])
    found = {
        "zip.gguf": (b"PK\3\4" + bytes(60), "it is not a GGUF file"),
        "cut.gguf": (whole[:-64], "the file may be truncated"),
        "head.gguf": (whole[:40], "do not fit in the remaining 16 bytes"),
        "p-00001-of-00002.gguf": (parts, "p-00002-of-00002.gguf not found"),
        "named.gguf": (parts, "must be called NAME-00001-of-00002.gguf"),
        "rwkv.gguf": (gguf(tiny_values("rwkv"), tiny_tensors(rng)), "rwkv"),
        "fork.gguf": (fork, "type 144, IQ4_KS, a type of ik_llama.cpp, which is not supported"),
    }
    for name, (data, _) in found.items():
        (folder / name).write_bytes(data)
    return {folder / name: reason for name, (_, reason) in found.items()}


def test_a_broken_gguf_file_is_one_line_and_exit_2(capsys, tmp_path):
    for path, reason in gguf_traps(tmp_path).items():
        code, _, err = run(capsys, "config", str(path))
        assert code == 2, path
        assert err.startswith("cpuserve: error: ")
        assert reason in err
        assert err.count("\n") == 1


def test_the_module_vllm_serves_by_is_the_serve_command():
    command = [sys.executable, "-m", "cpuserve.entrypoints.openai.api_server"]
    done = subprocess.run(
        [*command, "--model=here", "--dtype", "int3"],
        **child_options(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("cpuserve: error: flag --dtype=int3: choose one of auto")


@pytest.mark.parametrize("flags", [["--served-model-name", "a", "\udcff"], ["--model", "\udcff"]])
def test_bytes_that_are_no_utf8_are_refused(parse, flags):
    with pytest.raises(ConfigError, match="not UTF-8"):
        parse("serve", *flags)


def test_a_thread_that_is_not_granted_is_one_line_and_exit_2(capsys, monkeypatch):
    def refuse(_):
        msg = "can't start new thread"
        raise RuntimeError(msg)

    monkeypatch.setattr("cpuserve.cli.doctor.main", refuse)
    code, _, err = run(capsys, "doctor")
    assert code == 2
    assert err.startswith("cpuserve: error: can't start new thread (limits: ulimit -u")
    assert err.count("\n") == 1


def test_a_file_that_the_system_refuses_is_one_line_and_exit_2(capsys, monkeypatch):
    def refuse(_):
        raise PermissionError(13, "Permission denied", "/models/config.json")

    monkeypatch.setattr("cpuserve.cli.doctor.main", refuse)
    code, _, err = run(capsys, "doctor")
    assert (code, err) == (2, "cpuserve: error: /models/config.json: Permission denied\n")


def test_flags_reach_their_fields(parse):
    found = parse(
        *("serve", "m", "--max_model_len=8K", "-tp=1", "--kv-cache-memory-bytes", "1073741824"),
        *("--served-model-name", "a", "b", "--host", "::1", "--no-enforce-eager", "-O3"),
        *("--device", "cpu", "--trust-remote-code"),
    )
    options = found.options
    assert (options.model, options.max_model_len, options.tensor_parallel_size) == ("m", 8192, 1)
    assert float(options.kv_cache_space) == 1.0
    assert options.served_model_name == ["a", "b"]
    assert options.enforce_eager is False
    assert found.server.host == "::1"
    assert found.sources["max_model_len"] == "flag --max-model-len"
    assert [n.split()[0] for n in found.notes][:3] == ["-O", "--device", "--trust-remote-code"]


def test_a_model_that_was_taken_as_a_key_is_not_passed_over(parse):
    with pytest.raises(
        ConfigError, match="--api-key has 2 values, and MODEL is missing"
    ) as refused:
        parse("serve", "--api-key", "secret", "./model")
    assert "secret" not in str(refused.value)
    assert "./model" not in str(refused.value), "it may be a key"
    assert parse("serve", "--api-key", "one").server.api_key == ["one"]


@pytest.mark.parametrize(
    "words",
    [
        ["m", "--api-key", "one", "two"],
        ["--api-key", "one", "two", "--model", "m"],
        ["--api-key", "one", "--port=1", "m", "--api-key=two"],
    ],
)
def test_several_keys(parse, words):
    found = parse("serve", *words)
    assert found.options.model == "m"
    assert found.server.api_key == ["one", "two"]


@pytest.mark.parametrize("flag", ["--guided-decoding-backend", "--enable-expert-parallel"])
def test_a_refused_flag_does_not_deny_a_feature_that_is_there(parse, flag):
    with pytest.raises(ConfigError, match=f"flag {flag} is not supported: ") as refused:
        parse("serve", "m", flag)
    assert "supported yet" not in str(refused.value)


def test_adapters_are_pairs_or_json_objects_as_in_vllm(parse):
    vllm = '{"name": "x", "path": "y", "base_model_name": "z"}'
    found = parse("serve", "m", "--lora-modules", vllm, "a=b", "--lora-modules", "c=d")
    assert found.options.lora_modules == ["x=y", "a=b", "c=d"]


def test_a_flag_of_several_names_may_be_given_several_times(parse):
    found = parse(
        *("serve", "m", "--also-serve", "a=/a", "--also-serve=b=/b,c=/c"),
        *("--allowed-origins=https://a.example", "--allowed-origins=https://b.example"),
    )
    assert found.server.also_serve == ["a=/a", "b=/b", "c=/c"]
    assert found.server.allowed_origins == ["https://a.example", "https://b.example"]
    with pytest.raises(ConfigError, match="each with a name of its own"):
        parse("serve", "m", "--also-serve", "a=/a", "--also-serve", "a=/b")
    with pytest.raises(ConfigError, match="flag --also-serve=: must be names separated by commas"):
        parse("serve", "m", "--also-serve", "a=/a", "--also-serve", "")


def test_a_flag_of_several_names_may_be_given_several_times_as_a_json_list(parse):
    origins = [f"https://{name}.example" for name in "abc"]
    argv = [f"--allowed-origins={json.dumps(origins[:2])}", f"--allowed-origins={origins[2]}"]
    assert parse("serve", "m", *argv).server.allowed_origins == origins


def test_options_can_be_passed_on_to_another_command(parse):
    argv = ["serve", "m", "--allowed-origins", "http://a", "--allowed-origins", "http://b",
            "--served-model-name", "x", "y", "--no-enable-prefix-caching"]  # fmt: skip
    args, _ = cli.build_parser().parse_known_args(argv)
    first, again = parse(*argv), parse("serve", *as_arguments(args))
    assert (again.options, again.server) == (first.options, first.server)
    assert again.server.allowed_origins == ["http://a", "http://b"]


@pytest.mark.parametrize(
    ("names", "write"),
    [
        (["a", "b", "."], "write `. --served-model-name a b`"),
        (["."], "write `. --served-model-name NAME`"),
        (["a", DEFAULT], f"write `{DEFAULT} --served-model-name a`"),
        (["a", "org/model"], "write `org/model --served-model-name a`"),
    ],
)
def test_a_model_that_was_taken_as_a_name_is_not_passed_over(parse, names, write):
    with pytest.raises(ConfigError, match=re.escape(write)):
        parse("serve", "--served-model-name", *names)
    assert parse("serve", "m", "--served-model-name", *names).options.served_model_name == names
    assert parse("serve", "--served-model-name", *names, "--model=m").options.model == "m"


def test_names_alone_are_names(parse):
    assert parse("serve", "--served-model-name", "a", "b").options.model is None
    assert parse("serve", "--served-model-name", "org/a").options.served_model_name == ["org/a"]
    assert parse("serve", "--served-model-name", "tests").options.model is None, "just a directory"
    assert parse("serve", "--served-model-name", "~nobody-is").options.model is None
    assert parse("serve", "--served-model-name", "x" * 5000).options.model is None


def test_sizes_without_effect_do_not_take_the_model(parse):
    with pytest.raises(ConfigError, match=r"expects numbers, got '\./model'; put MODEL before it"):
        parse("serve", "--cuda-graph-sizes", "1", "2", "./model")
    assert parse("serve", "./model", "--cuda-graph-sizes", "1", "2,4").options.model == "./model"


def test_the_model_flag_and_the_positional_mean_the_same(parse):
    assert parse("serve", "--model", "x").options.model == "x"
    assert parse("serve", "x").options.model == "x"
    assert parse("serve").options.model is None
    assert parse("serve", "-m", "x", "-c", "8k").options.model == "x", "as llama.cpp has it"
    assert parse("serve", "x", "--model", "x").options.model == "x"
    assert parse("serve", "--model", "y", "--model", "x").options.model == "x", "as for any flag"


def parsers(parser=None, name=""):
    """The parsers of all commands, by name."""
    found = {}
    for action in (parser or cli.build_parser())._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, sub in action.choices.items():
                found |= {f"{name} {word}".strip(): sub} | parsers(sub, word)
    return found


def flags_of(parser):
    return {flag for action in parser._actions for flag in action.option_strings}


PARSER = cli.build_parser()


@pytest.mark.parametrize("command", sorted({name.split()[0] for name in parsers(PARSER)}))
def test_a_command_line_gets_the_flags_of_its_command_only(command):
    whole, own = parsers(PARSER), parsers(build_parser([command, "--x"]))
    assert flags_of(own[command]) == flags_of(whole[command])
    assert own[command].format_help() == whole[command].format_help()
    others = {name for name in own if name.split()[0] != command}
    assert {flag for name in others for flag in flags_of(own[name])} <= flags_of(PARSER)


SHORT = {
    flag for parser in parsers().values() for flag in flags_of(parser) if not flag.startswith("--")
}
NO_FLAGS = sorted(
    {flag[:end] for flag in SHORT for end in range(2, len(flag))}
    | {f"{flag}{more}" for flag in SHORT for more in "2fx"}
    | {"-d", "-n", "-t", "-to", "-hx", "-cX"}
)


@pytest.mark.parametrize(
    "command",
    deep_but(["serve", "chat", "quantize", "bench latency"], sorted(parsers().keys() - {"bench"})),
)
def test_no_flag_is_abbreviated_in_any_command(command):
    """Also not by argparse's rules for flags with one dash: `-t 2` was taken for `-tp 2`."""
    known = flags_of(parsers()[command])
    long = [flag[:-1] for flag in known if flag.startswith("--") and flag[:-1] not in known]
    for flag in {*NO_FLAGS, *long} - known:
        for argv in ([flag, "2"], [f"{flag}=2"]):
            with pytest.raises(ConfigError, match=f"flag {flag}( |;|$)"):
                _refused(command, argv)


def _refused(command, argv):
    needed = [word for action in parsers()[command]._actions for word in _least(action)]
    args, unknown = PARSER.parse_known_args([*command.split(), *needed, *argv])
    cli.refuse_unknown(args.parser, [word for word in unknown if word.startswith("-")])


def _least(action):
    """The fewest arguments that `action` of a parser accepts, none where it is optional."""
    if not action.required:
        return []
    value = str(next(iter(action.choices))) if action.choices else "x"
    return [*action.option_strings[:1], value]


def test_flags_of_llama_cpp_mean_what_they_mean_there(parse):
    given = [
        "-m",
        "x",
        "-c",
        "4096",
        "-np",
        "3",
        "-b",
        "512",
        "--host",
        "0.0.0.0",
        "--port",
        "8081",
    ]
    options = parse("serve", *given).options
    assert (options.model, options.max_model_len) == ("x", 4096)
    assert (options.max_num_seqs, options.max_num_batched_tokens) == (3, 512)
    for flag in ("-hf", "--hf-repo"):
        assert parse("serve", flag, "owner/model:Q4_0").options.model == "owner/model:Q4_0"


def test_a_startup_error_anywhere_is_one_line(capsys, monkeypatch):
    def fail(args):
        msg = "first\n  second"
        raise ModelError(msg)

    monkeypatch.setattr("cpuserve.cli.listings.models", fail)
    code, _, err = run(capsys, "models")
    assert (code, err) == (2, "cpuserve: error: first second\n")


def test_ctrl_c_ends_without_a_traceback(capsys, monkeypatch):
    def stop(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("cpuserve.cli.listings.models", stop)
    code, _, err = run(capsys, "models")
    assert (code, err) == (130, "")


def test_a_taken_port_is_told_before_the_model_is_looked_for(capsys, monkeypatch):
    monkeypatch.setattr("cpuserve.cli.commands.prepare", lambda *_: pytest.fail("it was"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = run(capsys, "serve", "owner/model", "--port", str(port))
    assert (code, out) == (2, "")
    assert f"port {port}: Address already in use" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "module", ["cpuserve.cli.main as c; c.build_parser()", "cpuserve.api.lifecycle.serve"]
)
def test_importing_the_command_line_or_the_server_loads_nothing_heavy(module):
    heavy = ["numpy", "torch", "transformers", "fastapi", "uvicorn", "rich", "psutil", "yaml"]
    code = f"import json, sys, {module};print(json.dumps([m for m in {heavy} if m in sys.modules]))"
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, **child_options(), capture_output=True, text=True, check=True)
    assert json.loads(out.stdout) == []


def test_importing_the_routes_loads_neither_numpy_nor_torch():
    heavy = ["numpy", "torch", "transformers"]
    code = f"import sys, cpuserve.api.app; print([m for m in {heavy} if m in sys.modules])"
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, **child_options(), capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_fingerprint_of_a_model_loads_no_numpy_into_the_front_end():
    """--audit and --prefix-cache-dir need it there."""
    names = "cpuserve.api.lifecycle.model_context", "cpuserve.engine.fingerprint"
    code = f"import sys, {', '.join(names)}; print('numpy' in sys.modules)"
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, **child_options(), capture_output=True, text=True, check=True)
    assert out.stdout == "False\n"
    assert not any({"numpy", "torch"} & imported_when_run(name) for name in names)


FRONT_END = ("api", "serving", "tokenizer", "metrics", "sampling", "core")


def test_no_request_loads_a_heavy_library_into_the_front_end():
    """It would keep megabytes and threads for ever after one request with a rare field."""
    code = (
        "import sys, cpuserve.api.app; print(*[m for m, module in sys.modules.items() "
        "if m[:9] == 'cpuserve.' and getattr(module, '__file__', None)])"
    )
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, **child_options(), capture_output=True, text=True, check=True)
    own = [name for name in out.stdout.split() if name.split(".")[1] in FRONT_END]
    assert "cpuserve.serving.calls.sampler_ids" in own
    heavy = {"numpy", "torch", "transformers"}
    assert not [(name, found) for name in own if (found := heavy & imported_when_run(name))]


def imported_when_run(module):
    """The libraries that a module imports, in its functions too, but not for types alone."""
    tree = ast.parse(Path(importlib.util.find_spec(module).origin).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    nodes = list(ast.walk(tree))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_reading_what_a_model_is_loads_no_numpy(form, tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf(tiny_values(), tiny_tensors(np.random.default_rng(0))))
    path = path if form == "gguf" else tiny_model("llama")
    code = (
        "import sys, pathlib; from cpuserve.config.options import EngineOptions as Options; from "
        "cpuserve.prepare import model_facts; import cpuserve.loader.speculation.eagle_heads; "
        "print(model_facts(Options(), pathlib.Path("
        f"{str(path)!r}))[0].width, 'numpy' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, **child_options(), capture_output=True, text=True, check=True)
    assert out.stdout == "64 False\n"


def test_help_into_a_closed_pipe_is_quiet():
    words = " ".join(map(shlex.quote, serve_command(["--help"])))
    command = ["bash", "-c", f"{words} | head -c 10"]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert out.stderr == ""


def test_a_full_disk_under_the_output_is_one_line():
    words = " ".join(map(shlex.quote, [sys.executable, "-m", "cpuserve", "models"]))
    command = ["bash", "-c", f"{words} >/dev/full"]
    out = subprocess.run(command, **child_options(), capture_output=True, text=True, check=False)
    assert out.returncode == 1
    assert out.stderr == (
        "cpuserve: error: standard output cannot be written: No space left on device\n"
    )


def about(capsys, *argv):
    """Return the help about a topic."""
    with pytest.raises(SystemExit) as end:
        cli.main([*argv])
    assert end.value.code == 0
    return capsys.readouterr().out


def shown(text):
    """Return the options of a help text."""
    return re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("topic", "first", "more"),
    [
        ("ModelConfig", "--model", "--dtype"),
        ("memory", "--weights-on-disk", "--kv-cache-memory"),
        ("MAX_NUM_SEQS", "--max-num-seqs", "--kv-cache-memory"),
        ("LLAMA_ARG_CTX_SIZE", "--max-model-len", "--max-model-len"),
        ("tpm", "--api-key-file", "--api-key-file"),
    ],
)
def test_help_about_a_group_or_a_word_has_its_options(capsys, topic, first, more):
    found = shown(about(capsys, "serve", f"--help={topic}"))
    assert found[0] == first
    assert more in found
    assert len(found) < len(shown(about(capsys, "serve", "--help=all"))) / 2


def test_help_lists_its_groups_and_all_options_as_the_server_of_vllm(capsys):
    groups = about(capsys, "serve", "--help=groups")
    for name in re.findall(r"--help=(\w+)", groups):
        assert about(capsys, "serve", f"--help={name}")
    assert about(capsys, "serve", "--help=all") == about(capsys, "serve", "--help-all")
    assert shown(about(capsys, "--help=forwarded")) == ["--forwarded-allow-ips"]
    assert shown(about(capsys, "ps", "--help=url")) == ["--url"]


def test_help_about_an_unknown_word_says_what_there_is(capsys):
    code, _, err = run(capsys, "serve", "--help=max-model-lenn")
    assert code == 2
    assert "no option of `cpuserve serve` has this word" in err
    assert "max-model-len" in err
    assert "--help=all" in err
