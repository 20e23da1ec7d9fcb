"""The `cpuserve` command. A StartupError prints one line on stderr and exits with code 2.

This module imports only argparse and the option table; each command imports its own modules.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

from cpuserve.base.errors import LIMITS, CpuserveError, StartupError, printable, without_threads
from cpuserve.base.registry import imported
from cpuserve.cli.bench_flags import add_bench, number
from cpuserve.cli.examples import epilog
from cpuserve.cli.flags import (
    COMMAND,
    Parser,
    add_options,
    normalize,
    refuse_two_models,
    refuse_unknown,
    take_further_models,
)
from cpuserve.cli.interrupt import EXIT_INTERRUPTED, interrupted, interrupts
from cpuserve.cli.terminal import columns, drop_output, folded, open_standard_streams

DESCRIPTION = """CPU-first LLM inference server with an OpenAI-compatible API.

  cpuserve serve                  serve the built-in model on port 8000
  cpuserve serve DIR --port 9000  serve a Hugging Face directory or a GGUF file
  cpuserve run smollm2:135m       download a model and chat with it"""

EPILOG = """Flags take precedence over CPUSERVE_* variables, and these over --config FILE.
`cpuserve config MODEL` shows every setting and its reason. Flags and variables
of vLLM are translated if cpuserve has a counterpart; those without effect are
accepted with a note."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code."""
    open_standard_streams()
    with interrupts():
        try:
            return _main(argv)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        except BaseException:
            if not interrupted():
                raise
            return EXIT_INTERRUPTED


def _main(argv: Sequence[str] | None) -> int:
    try:
        return _run(_as_flags(normalize(sys.argv[1:] if argv is None else argv)))
    except StartupError as e:
        return _fail(e, 2)
    except CpuserveError as e:
        return _fail(e, 1)
    except RuntimeError as e:
        if not without_threads(e):
            raise
        return _fail(StartupError(f"{e} ({LIMITS})"), 2)
    except BrokenPipeError:
        # The reader of the pipe (such as `| head`) has exited, so no more output can be written.
        drop_output()
        return 141
    except OSError as e:
        # The user must solve this file error: no permission, a full disk, a lost network disk.
        if e.filename is None:
            raise
        return _fail(StartupError(f"{e.filename}: {e.strerror}"), 2)


def _as_flags(argv: list[str]) -> list[str]:
    """Convert `help COMMAND` to `COMMAND --help`, and `version` to `--version`."""
    if argv[:1] == ["help"]:
        return [*argv[1:], "--help"]
    return ["--version"] if argv == ["version"] else argv


def _fail(error: Exception, code: int) -> int:
    from cpuserve.base import log

    sys.stdout.flush()
    if log.writes_json():
        log.write(printable(str(error)), "error")
        return code
    text = f"cpuserve: error: {printable(' '.join(str(error).split()))}"
    print(folded(text, columns(sys.stderr)), file=sys.stderr)
    return code


def version_text(version: str, levels: Sequence[str], facts: Mapping[str, str], error: str) -> str:
    """Return the output of --version; CpuPlatform.build returns all arguments but the first."""
    lines = [f"cpuserve {version}"]
    if error:
        return "\n".join([*lines, f"  kernels   none: {error}"])
    built = f"{facts['compiler']} ({facts['build_type']}), {facts['c_library']}"
    return "\n".join(
        [
            *lines,
            f"  levels    {', '.join(levels)} (CPUSERVE_LEVELS={facts['levels']})",
            f"  built     for {facts['arch']} and Python {facts['python']}, with {built}",
            f"  baseline  {facts['baseline']} outside the kernels",
        ]
    )


def _run(argv: list[str]) -> int:
    parser = build_parser(argv)
    if not argv:
        parser.print_help()
        return 0
    args, unknown = parser.parse_known_args(argv)
    if args.version:
        from cpuserve.base.version import version
        from cpuserve.platforms.cpu import CpuPlatform

        print(version_text(version(), *CpuPlatform().build()))
        return 0
    if args.command is None:
        refuse_unknown(parser, unknown)
        parser.print_help()
        return 0
    if "words" in args:  # argparse leaves words after a flag in `unknown`
        args.words += [word for word in unknown if not word.startswith("-")]
        unknown = [word for word in unknown if word.startswith("-")]
    if "further" in args and not any(word.startswith("-") for word in unknown):
        take_further_models(args, unknown)
        unknown = []
    refuse_unknown(args.parser, unknown)
    refuse_two_models(args)
    run: Callable[[argparse.Namespace], int] = imported(args.run)
    return run(args)


def build_parser(argv: Sequence[str] | None = None) -> Parser:
    """Return the parser for the whole command line.

    argv: what it will parse. Commands that it does not name get no flags: those of all commands
      take 50 ms. None = all commands.
    """
    parser = Parser(prog="cpuserve", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument(
        "--version", action="store_true", help="print the version, and facts about the build"
    )
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar=COMMAND, title="Commands", parser_class=Parser)
    for name, (run, text, add_flags) in COMMANDS.items():
        sub: Parser = commands.add_parser(name, help=text, description=text, epilog=epilog(name))
        sub.set_defaults(command=name, run=f"cpuserve.cli.{run}", parser=sub)
        if argv is None or name in argv:
            add_flags(sub)
    return parser


def _serve(parser: Parser) -> None:
    add_options(parser, server=True)
    parser.usage = f"{parser.prog} [MODEL] [NAME=MODEL ...] [OPTIONS]"
    parser.set_defaults(further=True)
    parser.epilog = f"{EPILOG}\n\n{epilog('serve')}"


def _ps(parser: Parser) -> None:
    _running_server(parser)
    parser.add_argument("--json", action="store_true", help="print JSON with the fields of Ollama")


def _stop(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the model, as `cpuserve ps` shows it")
    _running_server(parser)


def _completion(parser: Parser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="kind of shell")


def _size(parser: Parser) -> None:
    add_options(parser, server=False)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    _size_formats(parser.add_mutually_exclusive_group(), parser)


def _program(parser: Parser) -> None:
    add_options(parser, server=False)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _config(parser: Parser) -> None:
    add_options(parser, server=True)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    text = "show only what a flag, a variable or the config file sets"
    parser.add_argument("--changed", action="store_true", help=text)


def _pull(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="built-in model or Hugging Face id")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit")


def _list(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _show(parser: Parser) -> None:
    text = "name, as `cpuserve list` shows it, or a path"
    parser.add_argument("name", metavar="NAME", help=text)
    parser.add_argument("--template", action="store_true", help="print only the chat template")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _remove(parser: Parser) -> None:
    text = "name of a model, as `cpuserve list` shows it"
    parser.add_argument("names", nargs="*", metavar="NAME", help=text)
    parser.add_argument(
        "--packed", action="store_true", help="remove packed weights, which starts make again"
    )


def _size_formats(group: argparse._MutuallyExclusiveGroup, size: Parser) -> None:
    """Add the flags of `size` that read only the configuration of the model, or of known ones."""
    size.add_argument(
        "--recommend",
        action="store_true",
        help="show which known models fit this machine, or that of --instance, and their rates",
    )
    group.add_argument(
        "--formats", action="store_true", help="compare formats on this machine, without a download"
    )
    group.add_argument(
        "--instance",
        metavar="NAME",
        help="compare formats on a cloud instance, such as c7i.4xlarge",
    )
    group.add_argument("--instances", action="store_true", help="compare all cloud instances")


def _sampling(parser: Parser) -> None:
    group = parser.add_argument_group("Sampling")
    group.add_argument(
        "--max-tokens", type=_number(int), metavar="N", help="maximum tokens of a response"
    )
    group.add_argument(
        "--temperature", type=_number(float), metavar="T", help="temperature; 0 = greedy"
    )
    group.add_argument(
        "--top-p", type=_number(float), metavar="P", help="nucleus sampling; 1 = all tokens"
    )
    group.add_argument(
        "--top-k",
        type=_number(int),
        metavar="K",
        help="sample from the K most likely tokens; 0 = all tokens",
    )


def _number(kind: type[int] | type[float]) -> Callable[[str], int | float]:
    def read(text: str) -> int | float:
        try:
            return kind(text)
        except ValueError:
            msg = f"{text!r} is not a number"
            raise argparse.ArgumentTypeError(msg) from None

    return read


_WORDS_HELP = (
    "MODEL as in `cpuserve serve` [default: the built-in model], and the prompt, in quotes "
    "[default: standard input]"
)


def _server(parser: Parser) -> None:
    """Add --url and --api-key for a command that can use a running server."""
    parser.add_argument(
        "--url",
        metavar="URL",
        help="URL of a running server; use its model MODEL or its first model",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="API key of the server at --url [env CPUSERVE_API_KEY]"
    )


def _running_server(parser: Parser) -> None:
    """Add --url with a default, and --api-key, for a command that needs a running server."""
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="URL of the server [default: http://127.0.0.1:8000]",
    )
    parser.add_argument("--api-key", metavar="KEY", help="API key [env CPUSERVE_API_KEY]")


def _warm(parser: Parser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE",
        help="JSON lines: a text, the body of a completion or a chat, or a line of a batch",
    )
    _running_server(parser)


def _run_model(parser: Parser) -> None:
    add_options(parser, server=False, model=False)
    parser.usage = f"{parser.prog} MODEL [TEXT] [OPTIONS]"
    parser.add_argument(
        "words",
        nargs="*",
        metavar="MODEL [TEXT]",
        help="MODEL as in `cpuserve serve` [default: the built-in model], and a message; the "
        "response to it, or to standard input, is printed without a chat",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.set_defaults(url=None)
    _answers(parser)
    _sampling(parser)


def _generate(parser: Parser) -> None:
    _server(parser)
    add_options(parser, server=False, model=False)
    parser.usage = f"{parser.prog} [MODEL] [TEXT] [OPTIONS]"
    parser.add_argument("words", nargs="*", metavar="[MODEL] TEXT", help=_WORDS_HELP)
    parser.add_argument("--prompt", "-p", metavar="TEXT", help="the prompt")
    _sampling(parser)


def _run_batch(parser: Parser) -> None:
    add_options(parser, server=False)
    parser.usage = f"{parser.prog} -i FILE -o FILE [MODEL] [OPTIONS]"
    parser.add_argument(
        "--input-file",
        "-i",
        required=True,
        metavar="FILE",
        help="JSON lines with custom_id, method, url and body, as for /v1/batches",
    )
    parser.add_argument(
        "--output-file",
        "-o",
        required=True,
        metavar="FILE",
        help="one result for each line, in the same order; a file with results is not replaced",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the results in the output file, and run the lines that have none",
    )


def _top(parser: Parser) -> None:
    _running_server(parser)
    parser.add_argument("--once", action="store_true", help="print one view and exit")
    parser.add_argument(
        "--interval",
        type=number(float, 0.1),
        default=1.0,
        metavar="S",
        help="seconds between two views [default: 1]",
    )


def _models(parser: Parser) -> None:
    parser.add_argument(
        "--supported",
        action="store_true",
        help="print tables of all families, formats and kernels instead (Markdown)",
    )


def _doctor(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON (docs/doctor.schema.json)")
    parser.add_argument(
        "--no-roofline", action="store_true", help="do not measure bandwidth and dot-product rates"
    )


def _quantize(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="directory or Hugging Face id")
    parser.add_argument("out", metavar="OUT", help="a new or empty directory")
    parser.add_argument(
        "--scheme",
        default="int8",
        metavar="SCHEME",
        help="int8, w8a8, int4 or int4_mixed, as in `serve --quantization` [default: int8]",
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit")


def _answers(parser: Parser) -> None:
    """Add the flags for files of a message, and for the way that responses are shown."""
    parser.add_argument(
        "--image",
        action="append",
        metavar="FILE",
        help="send a picture or a document with the message; the flag may be repeated",
    )
    text = "show responses as the model writes them, not as Markdown with colours"
    parser.add_argument("--plain", action="store_true", help=text)


def _chat(parser: Parser) -> None:
    add_options(parser, server=False)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--message", metavar="TEXT", help="respond to this message and exit")
    _answers(parser)
    _server(parser)
    _sampling(parser)


if __name__ == "__main__":
    sys.exit(main())


# (module:function of cpuserve.cli, description, function that adds the flags) of each command.
COMMANDS: dict[str, tuple[str, str, Callable[[Parser], None]]] = {
    "serve": ("commands:serve", "Serve a model over HTTP (OpenAI's API).", _serve),
    "run": ("chat:run", "Download and load a model, and chat with it here.", _run_model),
    "chat": ("chat:chat", "Chat with a model here, or at a server with --url.", _chat),
    "complete": ("chat:generate", "Complete one prompt on this terminal.", _generate),
    "generate": ("chat:generate", "Complete one prompt, as `complete` does.", _generate),
    "ps": ("server_models:ps", "List the models that a server has in memory.", _ps),
    "stop": ("server_models:stop", "Unload a model of a running server.", _stop),
    "warm": ("server_models:warm", "Let a server compute prompts in advance.", _warm),
    "top": ("top:top", "Show what a running server does, once a second.", _top),
    "completion": (
        "completion:completion",
        "Print a script that completes flags in a shell.",
        _completion,
    ),
    "bench": ("bench", "Measure this machine, or a server.", add_bench),
    "run-batch": ("run_batch:run_batch", "Run a file of requests, offline.", _run_batch),
    "config": ("commands:config", "Show every setting, its source and its reason.", _config),
    "size": ("recommend:size", "Show the memory and highest rates of a model here.", _size),
    "program": ("listings:program", "Show a model's operations with their shapes.", _program),
    "doctor": ("doctor:main", "Show this machine, its problems and their remedies.", _doctor),
    "pull": ("commands:pull", "Download a model, to serve it without a network.", _pull),
    "quantize": (
        "quantize:quantize",
        "Write a quantized copy of a model (compressed-tensors), which vLLM also loads.",
        _quantize,
    ),
    "models": (
        "listings:models",
        "List the models on this machine, the built-in models and the architectures.",
        _models,
    ),
    "list": ("disk_models:show_stored", "List the models on this machine.", _list),
    "ls": ("disk_models:show_stored", "List the models, as `list` does.", _list),
    "show": ("disk_models:show", "Show facts about a model on this machine.", _show),
    "rm": ("disk_models:remove", "Remove downloaded models from this machine.", _remove),
}
