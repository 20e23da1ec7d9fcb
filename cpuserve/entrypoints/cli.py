"""The `cpuserve` command. A StartupError is one line on stderr and exit code 2, never a traceback.

Only argparse and the option table are imported here; each command imports what it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from cpuserve.entrypoints.bench_flags import add_bench
from cpuserve.entrypoints.flags import Parser, add_options, normalize, refuse_unknown
from cpuserve.entrypoints.terminal import drop_output, open_standard_streams
from cpuserve.errors import LIMITS, CpuserveError, StartupError, without_threads

DESCRIPTION = """CPU-first LLM inference server with an OpenAI-compatible API.

  cpuserve serve                     serve the built-in model on http://127.0.0.1:8000
  cpuserve serve DIR --port 9000     serve a Hugging Face directory or a GGUF file
  cpuserve chat                      talk to a model on this terminal"""

EPILOG = """Values come from flags, then CPUSERVE_* variables, then --config FILE, then defaults;
`cpuserve config MODEL` shows what was decided and why. Flags and variables of vLLM that have a
counterpart are taken as that; those without a meaning on this server are accepted and say so."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    open_standard_streams()
    try:
        return _run(normalize(sys.argv[1:] if argv is None else argv))
    except StartupError as e:
        return _fail(e, 2)
    except CpuserveError as e:
        return _fail(e, 1)
    except RuntimeError as e:
        if not without_threads(e):
            raise
        return _fail(StartupError(f"{e} ({LIMITS})"), 2)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader of a pipe (`| head`) went away; nothing is left to say, and nobody to say it to
        drop_output()
        return 141


def _fail(error: Exception, code: int) -> int:
    sys.stdout.flush()
    print(f"cpuserve: error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def _run(argv: list[str]) -> int:
    parser = build_parser()
    if not argv:
        parser.print_help()
        return 0
    args, unknown = parser.parse_known_args(argv)
    if args.version:
        from cpuserve.version import version

        print(version())
        return 0
    if args.command is None:
        refuse_unknown(parser, unknown)
        parser.print_help()
        return 0
    refuse_unknown(args.parser, unknown)
    run: Callable[[argparse.Namespace], int] = _load(args.run)
    return run(args)


def _load(path: str) -> Callable[[argparse.Namespace], int]:
    module, _, name = path.partition(":")
    found: Callable[[argparse.Namespace], int] = getattr(import_module(module), name)
    return found


def build_parser() -> Parser:
    """The whole command line."""
    parser = Parser(prog="cpuserve", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND", title="Commands", parser_class=Parser)

    def command(name: str, run: str, text: str) -> Parser:
        sub: Parser = commands.add_parser(name, help=text, description=text, epilog=None)
        sub.set_defaults(command=name, run=f"cpuserve.entrypoints.{run}", parser=sub)
        return sub

    serve = command("serve", "commands:serve", "Serve a model over HTTP (OpenAI's API).")
    add_options(serve, server=True)
    serve.epilog = EPILOG
    _generate(command("generate", "chat_cli:generate", "Complete one prompt on this terminal."))
    _chat(command("chat", "chat_cli:chat", "Talk to a model on this terminal."))
    add_bench(command("bench", "bench", "Measure the machine, or a server on it."))
    config = command("config", "commands:config", "Show every setting, who asked for it, and why.")
    add_options(config, server=True)
    config.add_argument("--json", action="store_true", help="as JSON")
    program = command("program", "commands:program", "Show a model's operations with their shapes.")
    add_options(program, server=False)
    program.add_argument("--json", action="store_true", help="as JSON")
    doctor = command("doctor", "doctor:main", "Report on this machine, with problems and remedies.")
    doctor.add_argument("--json", action="store_true", help="as JSON (docs/doctor.schema.json)")
    doctor.add_argument("--no-roofline", action="store_true", help="measure nothing")
    pull = command("pull", "commands:pull", "Download a model, so that serving needs no network.")
    pull.add_argument("name", metavar="NAME", help="built-in name or Hugging Face id")
    pull.add_argument("--revision", metavar="REV", help="branch, tag or commit")
    command("models", "commands:models", "List the built-in models and the architectures.")
    return parser


def _sampling(parser: Parser) -> None:
    group = parser.add_argument_group("Sampling")
    group.add_argument("--max-tokens", type=_number(int), metavar="N", help="longest answer")
    group.add_argument("--temperature", type=_number(float), metavar="T", help="0 = greedy")
    group.add_argument("--top-p", type=_number(float), metavar="P", help="nucleus, 1 = all")
    group.add_argument("--top-k", type=_number(int), metavar="K", help="0 = all")


def _number(kind: type[int] | type[float]) -> Callable[[str], int | float]:
    def read(text: str) -> int | float:
        try:
            return kind(text)
        except ValueError:
            msg = f"{text!r} is not a number"
            raise argparse.ArgumentTypeError(msg) from None

    return read


def _generate(parser: Parser) -> None:
    add_options(parser, server=False)
    parser.add_argument("--prompt", "-p", metavar="TEXT", help="[default: standard input]")
    _sampling(parser)


def _chat(parser: Parser) -> None:
    add_options(parser, server=False)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--message", metavar="TEXT", help="say this, print the answer, and end")
    _sampling(parser)


if __name__ == "__main__":
    sys.exit(main())
