"""Compiles the C++ sources next to this file with the system's compiler, once per machine and level, into a cache
directory.

It imports nothing but Python itself, so that `python -m penstock.engine.kernels.cpu.build` works before anything is
installed: .ci/setup lets it compile the kernels of this machine in the meantime.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from penstock.engine.cores import num_cores
from penstock.engine.kernels.cpu.commands import Commands
from penstock.engine.kernels.cpu.levels import Level, architecture, requested, this_machine

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_S = 1200
"""The slowest unit takes half a minute; on a crowded machine with a slow processor forty times that."""
_CORE_S, _WIDE_CORE_S = 60, 120
"""The seconds that the units of a level take together on a quiet core of 2023; the second, with vectors of 64 bytes."""
_MOST_CORES = 5
"""The slowest unit takes as long as the others on the other cores."""
HERE = architecture(platform.machine())
FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",  # sums must not depend on the compiler's choice to fuse: see simd.h
    "-fno-math-errno",
    "-fno-trapping-math",
    "-pthread",
    "-fPIC",
    "-fvisibility=hidden",
)

_BEYOND_BYTES = ("-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8")
_BEYOND_FLOATS = ("-mavxvnni", "-mavx512vnni", *_BEYOND_BYTES)
UNUSED_FLAGS = {
    "attention_f16": _BEYOND_FLOATS,
    "attention_f32": _BEYOND_FLOATS,
    "attention_int4": _BEYOND_FLOATS,
    "gemm_integers_1": _BEYOND_BYTES,
    "gemm_integers_2": _BEYOND_BYTES,
    "gemm_integers_4": _BEYOND_BYTES,
}
"""Flags of levels that change nothing in a unit, by its name: levels that differ in them alone share its object."""

_NO_ROOM = ("No space left on device", "Disk quota exceeded", "File too large", "File size limit exceeded")
"""The messages of a compiler, an assembler or a linker that cannot write as much as it needs."""
_NO_ROOM_CODES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FAULTS = ("error", "undefined", "cannot", "can't", "failed", "killed", "no such")
_CONSEQUENCES = ("ld returned", "linker command failed", "compilation terminated", "warning:")
"""Lines of a compiler that report a failure, and not its cause."""
_MAX_LINE_CHARS = 300


class NativeUnavailable(RuntimeError):
    """The native kernels are not available; the message is one line with the reason, and with a remedy."""


class LevelUnknown(NativeUnavailable):
    """The compiler does not know the instructions of a level: it is too old for them."""


def build(
    level: Level,
    say: Callable[[str], None],
    target: str = HERE,
    compiler: list[str] | None = None,
    commands: Commands | None = None,
) -> Path:
    """Returns the path of the shared library of a level in the cache, which is compiled if no earlier call has.

    Of several processes and threads that ask for the same library one compiles it, and the others wait for it.

    Args:
        target: the architecture that the compiler compiles for.
        compiler: the start of its command line; the default is `find_compiler`'s.
        commands: the commands of `side_by_side`, which compile other levels, too.

    Raises:
        NativeUnavailable: there is no compiler, it failed, or the cache directory cannot be written.
    """
    compiler = compiler or find_compiler()
    key = _digest(fingerprint(level), *compiler, _answer([*compiler, "--version"]))
    path = cache_directory() / f"{stem(level, target)}-{key}.so"
    if path.exists():
        return path
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path, f"waiting for the CPU kernels for {level.name}, which another process builds", say):
            if not path.exists():
                _build(compiler, level, path, say, commands)
    return path


@contextmanager
def side_by_side() -> Iterator[Commands]:
    """Yields compilers that run side by side, with a folder for their output, for one library or for several.

    Raises:
        NativeUnavailable: the cache directory cannot be written.
    """
    with _writing(cache_directory()):
        cache_directory().mkdir(parents=True, exist_ok=True)
        # Temporary files go where the library goes, so that one folder needs room.
        with (
            tempfile.TemporaryDirectory(dir=cache_directory(), prefix="build-") as scratch,
            Commands(Path(scratch), TIMEOUT_S) as commands,
        ):
            yield commands


def find_compiler() -> list[str]:
    """Returns the compiler as the start of a command line: $CXX, or the first of the usual names that exists."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    raise NativeUnavailable(f"no C++ compiler ({' '.join(chosen) or ', '.join(COMPILERS)} not found)")


def target_of(compiler: list[str]) -> str:
    """The architecture that a compiler compiles for.

    Raises:
        NativeUnavailable: the compiler does not run.
    """
    return architecture(_answer([*compiler, "-dumpmachine"]).partition("-")[0].strip())


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def stem(level: Level, target: str = HERE) -> str:
    """The start of the names of a level's libraries: the system, the architecture and the level."""
    return f"native-{sys.platform}-{target}-{level.name}"


def fingerprint(level: Level) -> str:
    """Returns a digest of a level's library: its sources, and how they are compiled."""
    sources = sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")])
    texts = [text for source in sources for text in (source.name, source.read_text(encoding="utf-8"))]
    return _digest(*texts, *FLAGS, level.name, *level.flags)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Says in one line, and with a way out, why a file of the cache or its folder cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM_CODES:
            raise _no_room(cache_directory(), str(error)) from error
        raise NativeUnavailable(
            f"cannot write {path}: {error}; XDG_CACHE_HOME can name another folder"
        ) from error


@contextmanager
def _alone(path: Path, text: str, say: Callable[[str], None]) -> Iterator[None]:
    """Keeps others from building the same library; says the text if that means to wait."""
    name = path.with_suffix(".lock")
    with name.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(text)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks: a library built twice is put in place twice, each time whole
        try:
            yield
        finally:
            name.unlink(missing_ok=True)


def _build(
    compiler: list[str], level: Level, path: Path, say: Callable[[str], None], commands: Commands | None
) -> None:
    """Compiles a library into its place, where it appears when it is whole."""
    expected = "beside others" if commands else f"once; about {_expected_s(level, num_cores())} s"
    say(f"building the CPU kernels for {level.name} with {compiler[0]} ({expected})")
    start = time.monotonic()
    with nullcontext(commands) if commands else side_by_side() as running:
        _compile(compiler, level, running.folder / path.name, running)
        os.replace(running.folder / path.name, path)
    say(f"built the CPU kernels for {level.name} in {time.monotonic() - start:.1f} s")


def _expected_s(level: Level, cores: int) -> int:
    """Returns the seconds that the units of a level take, to 5 s."""
    core_s = _WIDE_CORE_S if "-mavx512f" in level.flags else _CORE_S
    return round(core_s / min(cores, _MOST_CORES) / 5) * 5


def _knows(compiler: list[str]) -> bool:
    """Returns whether a compiler understands its flags."""
    command = [*compiler, "-E", "-x", "c++", os.devnull]
    try:
        return subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _compile(compiler: list[str], level: Level, output: Path, commands: Commands) -> None:
    objects: list[str] = []
    units: list[list[str]] = []
    for source in sorted(SOURCES.glob("*.cpp")):
        unused = UNUSED_FLAGS.get(source.stem, ())
        start = [*compiler, *FLAGS, *(flag for flag in level.flags if flag not in unused)]
        objects.append(str(commands.folder / f"{source.stem}-{_digest(*start)}.o"))
        units.append([*start, "-c", str(source), "-o", objects[-1]])
    try:
        commands.run(units)
        commands.run([[*compiler, *FLAGS, "-shared", *objects, "-o", str(output)]])
    except subprocess.CalledProcessError as error:
        raise _failed(compiler, level, _telling_line(error.stderr) or str(error.returncode)) from error
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(f"{compiler[0]} did not run: {error}") from error


def _failed(compiler: list[str], level: Level, line: str) -> NativeUnavailable:
    if any(words in line for words in _NO_ROOM):
        return _no_room(cache_directory(), line)
    if _knows(compiler) and not _knows([*compiler, *level.flags]):
        return LevelUnknown(f"{compiler[0]} is too old for {level.name}: {line}")
    return NativeUnavailable(f"{compiler[0]} failed: {line}")


def _telling_line(stderr: str) -> str:
    """The line of a compiler's messages that says most about why it failed; "" if there are none.

    A disk without room counts most. Then the first line that names a fault and is not the consequence of another.
    """
    lines = [line.strip()[:_MAX_LINE_CHARS] for line in stderr.splitlines() if line.strip()]
    no_room = [line for line in lines if any(words in line for words in _NO_ROOM)]
    causes = [line for line in lines if not any(words in line for words in _CONSEQUENCES)]
    faults = [line for line in causes if any(word in line.lower() for word in _FAULTS)]
    return next(iter(no_room or faults or causes or lines), "")


def _no_room(folder: Path, reason: str) -> NativeUnavailable:
    return NativeUnavailable(
        f"{folder} has no room for them, {_free_text(folder)}: {reason}; "
        "free some space there, or let XDG_CACHE_HOME name a folder on another disk"
    )


def _free_text(folder: Path) -> str:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return f"{shutil.disk_usage(existing).free / (1 << 20):.1f} MiB are free"


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _answer(command: list[str]) -> str:
    """Returns a compiler's answer to a question."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(f"{command[0]} did not run: {error}") from error


if __name__ == "__main__":
    _machine = this_machine()
    build(_machine.named(_name) if (_name := requested()) else _machine.usable()[0], print)
