"""`penstock kernels`: builds the native CPU kernels ahead of time, and says which of them are there."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

from penstock.app.errors import OperatorError
from penstock.engine.errors import InstructionSetError
from penstock.engine.kernels.cpu import prebuilt
from penstock.engine.kernels.cpu.build import NativeUnavailable, find_compiler, side_by_side, stem
from penstock.engine.kernels.cpu.commands import Commands
from penstock.engine.kernels.cpu.levels import Level, Machine, requested, this_machine


def check_level() -> None:
    """Looks whether this machine can use the level that PENSTOCK_CPU_ISA names.

    Raises:
        OperatorError: it cannot, or there is no such level.
    """
    own_level(this_machine())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=("build", "list"),
        help="build: compile them into a folder, where they are found without a compiler; list: say what is there",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="build: every level of this architecture, not only the one that this machine uses",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"the folder; without it, what {prebuilt.VARIABLE} names, or one inside the installed package",
    )


def run(options: argparse.Namespace) -> int:
    place = options.out or prebuilt.folder()
    if place.exists() and not place.is_dir():
        raise OperatorError(f"--out {place}: is no directory")
    if options.action == "list":
        return _list(place)
    machine = this_machine()
    return _build(machine.levels if options.all else (own_level(machine),), place)


def own_level(machine: Machine) -> Level:
    """The level that this machine uses: the one that PENSTOCK_CPU_ISA names, or the best."""
    try:
        return machine.named(name) if (name := requested()) else machine.usable()[0]
    except InstructionSetError as error:
        raise OperatorError(str(error)) from None


def _build(levels: tuple[Level, ...], place: Path) -> int:
    """Builds the levels one after the other; 1 if one failed."""
    try:
        find_compiler()
        with side_by_side() if len(levels) > 1 else nullcontext() as commands:
            built = [
                _build_one(level, place, f"{number}/{len(levels)}", commands)
                for number, level in enumerate(levels, start=1)
            ]
    except NativeUnavailable as error:
        raise OperatorError(f"kernels build: {error}") from None
    return 0 if all(built) else 1


def _build_one(level: Level, place: Path, count: str, commands: Commands | None) -> bool:
    def say(line: str) -> None:
        print(f"{count} {line}", flush=True)

    try:
        path = prebuilt.make(level, place, say, commands=commands)
    except NativeUnavailable as error:
        print(f"penstock: no CPU kernels for {level.name}: {error}", file=sys.stderr, flush=True)
        return False
    print(f"{count} {path}", flush=True)
    return True


def _list(place: Path) -> int:
    machine = this_machine()
    own = own_level(machine)
    others = prebuilt.libraries(place)
    print(f"prebuilt CPU kernels in {place}; this machine uses those marked with *")
    levels = list(dict.fromkeys((*machine.levels, own)))
    width = max(len(level.name) for level in levels)
    for level in levels:
        found = prebuilt.libraries(place, stem(level))
        others = [path for path in others if path not in found]
        print(f"{'*' if level == own else ' '} {level.name:<{width}} {_state(level, found):<13} {level.text}")
    for path in others:
        print(f"  {path.name} is of another system, or of no level that there is")
    return 0


def _state(level: Level, found: list[Path]) -> str:
    if not found:
        return "not prebuilt"
    obstacles = [prebuilt.obstacle(path, level) for path in found]
    return "prebuilt" if "" in obstacles else f"ignored: it {obstacles[0]}"
