"""The command line: `penstock serve` and the other commands, of which each is loaded when it is asked for."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, get_args, get_origin

from penstock.app.errors import OperatorError, suggestion

if TYPE_CHECKING:
    from penstock.app.settings import CommonSettings

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
"""As a shell has it where SIGINT ended a command."""


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake as one line."""

    def error(self, message: str) -> NoReturn:
        raise OperatorError(message)

    def reject_unknown(self, arguments: list[str]) -> None:
        if arguments:
            flags = [name for action in self._actions for name in action.option_strings]
            self.error(f"unknown argument {arguments[0]}{suggestion(arguments[0].split('=')[0], flags)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status: 2 where the operator has to set something right."""
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
        return EXIT_USAGE


def _dispatch(arguments: list[str]) -> int:
    parser = _Parser(
        prog="penstock",
        description="An LLM server that keeps its promises.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n" + "\n".join(f"  {name:<8} {text}" for name, (text, _) in _COMMANDS.items()),
    )
    parser.add_argument("-V", "--version", action="store_true", help="print the version and exit")
    parser.add_argument(
        "command", nargs="?", metavar="COMMAND", help="one of these; `penstock COMMAND --help` says more"
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


_DOCTOR_MODEL = """says what of this model fits, before anything of it is loaded: a directory, a GGUF file, a
Hugging Face id, or penstock-demo; without it, what this machine offers"""


def _doctor(parser: _Parser, arguments: list[str]) -> int:
    from penstock.app.kernels import check_level
    from penstock.app.settings import Settings

    parser.add_argument("MODEL", nargs="?", help=_DOCTOR_MODEL)
    parser.add_argument(
        "--url", help="says how a running server is, and whether its streams come through; nothing else"
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


_CHECK_MODEL = "a directory, a GGUF file, a Hugging Face id; without it, the demo model"


def _check(parser: _Parser, arguments: list[str]) -> int:
    from penstock.app.settings import EngineSettings

    parser.add_argument("MODEL", nargs="?", help=_CHECK_MODEL)
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    flags = _parse_settings(parser, arguments, EngineSettings)
    model, output = flags.pop("MODEL", None), flags.pop("json", None)
    if model is not None and "model" in flags:
        parser.error(f"give {model} or --model, not both")
    from penstock.app.check.command import run

    return run(flags if model is None else {**flags, "model": model}, Path(output) if output else None)


def _switch(parser: _Parser, arguments: list[str]) -> int:
    from penstock.app.settings import FrontSettings

    parser.add_argument("REPLICA", nargs="*", help="where a replica listens: http://HOST:PORT")
    parser.add_argument(
        "--replicas-file", metavar="FILE", help="more of them, one a line; read again when it changes"
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
        "action", metavar="ACTION", help="one of these; `penstock cluster ACTION --help` says more"
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
    """`a|b` for Literal["a", "b"], also inside an optional."""
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    return next((found for inner in get_args(annotation) if (found := _choices(inner))), None)


_COMMANDS: dict[str, tuple[str, Callable[[_Parser, list[str]], int]]] = {
    "serve": ("Serves a model over HTTP.", _serve),
    "switch": ("Puts one address before several replicas, and chooses one for each request.", _switch),
    "cluster": ("Runs replicas and switches on a Ray cluster, which replaces and scales them.", _cluster),
    "quantize": (
        "Makes a checkpoint of 4 or 8 bits from one in floating point.",
        _module("penstock.app.quantize"),
    ),
    "key": ("Makes an API key, and its line for the file of keys.", _module("penstock.app.keys")),
    "doctor": ("Says what this machine offers and what is missing, or what of a model fits.", _doctor),
    "check": ("Compares a model with its own weights in float32, and says how fast it is.", _check),
    "kernels": (
        "Builds the CPU kernels ahead of time, or says which are there.",
        _module("penstock.app.kernels"),
    ),
    "bench": (
        "Measures this server against transformers' generate, and against the machine.",
        _module("penstock.app.bench.command"),
    ),
    "simulate": (
        "Tries scheduling policies on a trace, or says how much traffic a machine can promise.",
        _module("penstock.app.simulate.command"),
    ),
}
