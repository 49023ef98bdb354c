"""Libraries of the native kernels that were compiled ahead of time, for machines without a compiler.

The name of such a file gives the system, the architecture, the level, the fingerprint of its sources, and a checksum of
its content.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from penstock.engine.kernels.cpu.build import HERE, NativeUnavailable, build, fingerprint, stem
from penstock.engine.kernels.cpu.commands import Commands
from penstock.engine.kernels.cpu.levels import Level

VARIABLE = "PENSTOCK_KERNELS"
"""Names the folder of prebuilt libraries."""


def folder() -> Path:
    """Returns the folder of prebuilt libraries: PENSTOCK_KERNELS, or one inside the package."""
    return Path(os.environ.get(VARIABLE) or Path(__file__).parent / "prebuilt")


def find(level: Level, say: Callable[[str], None]) -> Path | None:
    """Returns the prebuilt library of a level, if there is one from these sources and whole.

    Args:
        say: is called with a line if there are libraries and none of them fits.
    """
    mine = libraries(folder(), stem(level))
    for path in mine:
        if not (reason := obstacle(path, level)):
            return path
        say(f"a prebuilt library of the CPU kernels is ignored: {path} {reason}")
    if not mine and VARIABLE in os.environ:
        say(f"{VARIABLE}: {folder()} has no CPU kernels for {level.name} on this system")
    return None


def libraries(place: Path, start: str = "native") -> list[Path]:
    """The libraries in a folder whose name begins with the parts in `start`."""
    return sorted(place.glob(f"{start}-*.so"))


def obstacle(path: Path, level: Level) -> str:
    """Returns why a library cannot serve as a level's; "" if it can."""
    made_from, _, checksum = path.stem.removeprefix(f"{stem(level)}-").partition("-")
    if made_from != fingerprint(level):
        return "was made from other sources"
    try:
        return "" if checksum == _checksum(path) else "is broken, its checksum is another"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def make(
    level: Level,
    place: Path,
    say: Callable[[str], None],
    target: str = HERE,
    commands: Commands | None = None,
) -> Path:
    """Puts the library of a level into a folder; earlier libraries of the same level are removed.

    Args:
        target: the architecture that the compiler compiles for.
        commands: see `build`.

    Raises:
        NativeUnavailable: there is no compiler, it failed, or the folder cannot be written.
    """
    library = build(level, say, target, commands=commands)
    path = place / f"{stem(level, target)}-{fingerprint(level)}-{_checksum(library)}.so"
    try:
        place.mkdir(parents=True, exist_ok=True)
        for old in libraries(place, stem(level, target)):
            old.unlink()
        with tempfile.TemporaryDirectory(dir=place, prefix="build-") as scratch:
            os.replace(shutil.copy(library, scratch), path)
    except OSError as error:
        raise NativeUnavailable(f"cannot write {place}: {error}; --out can name another folder") from error
    return path


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
