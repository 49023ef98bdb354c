"""The command line: `penstock serve` and the other commands, of which each is loaded when it is asked for."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, get_args, get_origin

from penstock.app.errors import OperatorError, TransientError, suggestion

if TYPE_CHECKING:
    from penstock.app.settings import CommonSettings

EXIT_USAGE = 2
EXIT_TRANSIENT = os.EX_TEMPFAIL
"""For supervisors: another start may succeed, as it cannot after EXIT_USAGE."""
EXIT_INTERRUPTED = 130
"""The exit status that shells use for a command ended by SIGINT."""


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake as one line."""

    def error(self, message: str) -> NoReturn:
        raise OperatorError(message)

    def reject_unknown(self, arguments: list[str]) -> None:
        if arguments:
            flags = [name for action in self._actions for name in action.option_strings]
            self.error(f"unknown argument {arguments[0]}{suggestion(arguments[0].split('=')[0], flags)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 2 for a mistake of the operator, 75 for a failure that may pass."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever read this has seen enough. What is left is not to be tried again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("penstock: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OperatorError as error:
        message = " ".join(str(error).split())
        print(f"penstock: {message}", file=sys.stderr)
        return EXIT_TRANSIENT if isinstance(error, TransientError) else EXIT_USAGE


def _dispatch(arguments: list[str]) -> int:
    parser = _Parser(
        prog="penstock",
        description="An LLM server that keeps its promises.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n" + "\n".join(f"  {name:<8} {text}" for name, (text, _) in _COMMANDS.items()),
    )
    parser.add_argument("-V", "--version", action="store_true", help="print the version and exit")
    parser.add_argument(
        "command", nargs="?", metavar="COMMAND", help="the command; `penstock COMMAND --help` describes it"
    )
    known, rest = parser.parse_known_args(arguments[:1])
    if known.version:
        return _print_version()
    if known.command is None:
        parser.reject_unknown(rest)
        parser.print_help()
        return EXIT_USAGE
    if known.command not in _COMMANDS:
        parser.error(f"unknown command {known.command}{suggestion(known.command, _COMMANDS)}")
    text, run = _COMMANDS[known.command]
    command_parser = _Parser(prog=f"penstock {known.command}", description=text, allow_abbrev=False)
    return run(command_parser, arguments[1:])


def _print_version() -> int:
    from importlib.metadata import version

    print(f"penstock {version('penstock')}")
    return 0


def _serve(parser: _Parser, arguments: list[str]) -> int:
    from penstock.app.kernels import check_level
    from penstock.app.settings import Settings

    flags = _parse_settings(parser, arguments, Settings)
    settings = Settings.load(flags)
    check_level()
    from penstock.app.server import serve

    return serve(settings)


def _module(name: str) -> Callable[[_Parser, list[str]], int]:
    """The command of a module, which has `add_arguments` and `run`."""

    def run(parser: _Parser, arguments: list[str]) -> int:
        module = import_module(name)
        module.add_arguments(parser)
        options, rest = parser.parse_known_intermixed_args(arguments)
        parser.reject_unknown(rest)
        return int(module.run(options))

    return run


_DOCTOR_MODEL = """check whether this model fits, before loading it: a directory, a GGUF file, a Hugging Face id, or
penstock-demo; by default, report what this machine offers"""


def _doctor(parser: _Parser, arguments: list[str]) -> int:
    from penstock.app.kernels import check_level
    from penstock.app.settings import Settings

    parser.add_argument("MODEL", nargs="?", help=_DOCTOR_MODEL)
    parser.add_argument(
        "--url", help="check a running server instead, and whether its streams arrive unbuffered"
    )
    flags = _parse_settings(parser, arguments, Settings)
    model, url = flags.pop("MODEL", None), flags.pop("url", None)
    if url is not None:
        if model is not None or flags:
            parser.error("--url goes with nothing else")
        from penstock.app import remote

        return remote.run(url)
    if model is not None and "model" in flags:
        parser.error(f"give {model} or --model, not both")
    settings = Settings.load(flags)
    check_level()
    if model is not None:
        from penstock.app import fitting

        return fitting.run(model, settings, flags)
    from penstock.app import doctor

    return doctor.run(settings)


_CHECK_MODEL = "a directory, a GGUF file, or a Hugging Face id; by default, the demo model"


def _check(parser: _Parser, arguments: list[str]) -> int:
    from penstock.app.settings import EngineSettings

    parser.add_argument("MODEL", nargs="?", help=_CHECK_MODEL)
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file")
    flags = _parse_settings(parser, arguments, EngineSettings)
    model, output = flags.pop("MODEL", None), flags.pop("json", None)
    if model is not None and "model" in flags:
        parser.error(f"give {model} or --model, not both")
    from penstock.app.check.command import run

    return run(flags if model is None else {**flags, "model": model}, Path(output) if output else None)


def _switch(parser: _Parser, arguments: list[str]) -> int:
    from penstock.app.settings import FrontSettings

    parser.add_argument("REPLICA", nargs="*", help="address of a replica: http://HOST:PORT")
    parser.add_argument(
        "--replicas-file",
        metavar="FILE",
        help="file with more replicas, one per line; reread when it changes",
    )
    flags = _parse_settings(parser, arguments, FrontSettings)
    replicas, path = list(flags.pop("REPLICA", ())), flags.pop("replicas_file", None)
    if not replicas and path is None:
        parser.error("name the replicas, or give --replicas-file")
    settings = FrontSettings.load(flags)
    from penstock.app.switch import run

    return run(replicas, Path(path) if path is not None else None, settings)


def _cluster(parser: _Parser, arguments: list[str]) -> int:
    from penstock.app import cluster
    from penstock.app.settings import Settings

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "actions:\n" + "\n".join(f"  {name:<7} {text}" for name, text in cluster.ACTIONS.items())
    parser.add_argument(
        "action", metavar="ACTION", help="the action; `penstock cluster ACTION --help` describes it"
    )
    action = parser.parse_args(arguments[:1]).action
    if action not in cluster.ACTIONS:
        parser.error(f"unknown action {action}{suggestion(action, cluster.ACTIONS)}")
    own = _Parser(prog=f"penstock cluster {action}", description=cluster.ACTIONS[action], allow_abbrev=False)
    cluster.add_arguments(own, action)
    if action == "deploy":
        return cluster.deploy(_parse_settings(own, arguments[1:], Settings))
    options, rest = own.parse_known_intermixed_args(arguments[1:])
    own.reject_unknown(rest)
    return cluster.run(action, options)


def _parse_settings(parser: _Parser, arguments: list[str], kind: type[CommonSettings]) -> dict[str, str]:
    """Adds a flag for each setting of this kind, and reads them.

    Values stay text: wherever they come from, one place checks them.
    """
    from penstock.app.settings import ENV_PREFIX, default_text, flag

    one = "port" if "port" in kind.model_fields else "threads"
    parser.epilog = (
        f"Each is also a variable ({ENV_PREFIX}{one.upper()}) and a key of the --config file ({one})."
    )
    for name, field in kind.model_fields.items():
        text = " ".join((field.description or "").split()).replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(
                flag(name),
                dest=name,
                default=argparse.SUPPRESS,
                action="store_const",
                const="true",
                help=text,
            )
            continue
        extra = field.json_schema_extra
        metavar = extra.get("metavar") if isinstance(extra, dict) else None
        shown = "" if field.default in (None, ()) else f" Default: {default_text(field.default)}."
        parser.add_argument(
            flag(name),
            dest=name,
            default=argparse.SUPPRESS,
            metavar=str(metavar or _choices(field.annotation) or name.split("_")[-1].upper()),
            help=text + shown,
        )
    values, rest = parser.parse_known_intermixed_args(arguments)
    parser.reject_unknown(rest)
    return {name: value for name, value in vars(values).items() if value is not None}


def _choices(annotation: object) -> str | None:
    """Returns `a|b` for Literal["a", "b"], also inside an optional."""
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    return next((found for inner in get_args(annotation) if (found := _choices(inner))), None)


_COMMANDS: dict[str, tuple[str, Callable[[_Parser, list[str]], int]]] = {
    "serve": ("Serves a model over HTTP.", _serve),
    "switch": ("Serves several replicas under one address, and chooses one for each request.", _switch),
    "cluster": ("Runs replicas and switches on a Ray cluster, which replaces and scales them.", _cluster),
    "quantize": ("Quantizes a checkpoint to 4 or 8 bits.", _module("penstock.app.quantize")),
    "key": ("Makes an API key and its line for the keys file.", _module("penstock.app.keys")),
    "doctor": ("Reports what this machine offers and lacks, or whether a model fits.", _doctor),
    "watermark": ("Tells whether a text has a watermark.", _module("penstock.app.watermark")),
    "top": ("Shows live who takes a running server, and how its lanes stand.", _module("penstock.app.top")),
    "check": ("Compares a model with its own weights in float32, and measures its speed.", _check),
    "kernels": (
        "Builds the CPU kernels ahead of time, or lists those that are built.",
        _module("penstock.app.kernels"),
    ),
    "bench": (
        "Measures this server against transformers' generate and the limits of the machine.",
        _module("penstock.app.bench.command"),
    ),
    "simulate": (
        "Tries scheduling policies on a trace, or finds how much traffic a machine can promise to serve.",
        _module("penstock.app.simulate.command"),
    ),
}
