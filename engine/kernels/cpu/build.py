"""Compiles the C++ sources beside this file with the system's compiler, once per machine and level, into a cache
directory.

Nothing but Python itself is imported, so that `python -m engine.kernels.cpu.build` works before anything is installed:
.ci/setup lets it compile what this machine needs in the meantime.
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
from contextlib import contextmanager
from pathlib import Path

from engine.kernels.cpu.levels import Level, architecture, requested, this_machine

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_S = 1200
"""A build takes a minute; on a crowded machine with a slow processor twenty times that."""
HERE = architecture(platform.machine())
FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",  # sums must not depend on what the compiler likes to fuse: see simd.h
    "-fno-math-errno",
    "-fno-trapping-math",
    "-pthread",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
)

_NO_ROOM = ("No space left on device", "Disk quota exceeded", "File too large", "File size limit exceeded")
"""What a compiler, an assembler or a linker says when it cannot write as much as it needs."""
_NO_ROOM_CODES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FAULTS = ("error", "undefined", "cannot", "can't", "failed", "killed", "no such")
_CONSEQUENCES = ("ld returned", "linker command failed", "compilation terminated", "warning:")
"""Lines of a compiler that say that something went wrong, and not what."""
_MAX_LINE_CHARS = 300


class NativeUnavailable(RuntimeError):
    """The native kernels cannot be had here; the message is one line that says why, and what can be done about it."""


class LevelUnknown(NativeUnavailable):
    """The compiler does not know the instructions of a level: it is too old for them."""


def build(
    level: Level, say: Callable[[str], None], target: str = HERE, compiler: list[str] | None = None
) -> Path:
    """Returns the path of the shared library of a level in the cache, which is compiled if no earlier call has.

    Of several processes and threads that ask for the same library one compiles it, and the others wait for it.

    Args:
        target: the architecture that the compiler compiles for.
        compiler: the start of its command line; that of `find_compiler` if it is not given.

    Raises:
        NativeUnavailable: there is no compiler, it failed, or the cache directory cannot be written.
    """
    compiler = compiler or find_compiler()
    key = _digest(fingerprint(level), *compiler, _answer([*compiler, "--version"]))
    path = cache_directory() / f"{stem(level, target)}-{key}.so"
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path, f"waiting for the CPU kernels for {level.name}, which another process builds", say):
            if not path.exists():
                _build(compiler, level, path, say)
    except OSError as error:
        if error.errno in _NO_ROOM_CODES:
            raise _no_room(path.parent, str(error)) from error
        raise NativeUnavailable(
            f"cannot write {path}: {error}; XDG_CACHE_HOME can name another folder"
        ) from error
    return path


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
    """A digest of what the library of a level is made from: the sources, and how they are compiled."""
    sources = sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")])
    texts = [text for source in sources for text in (source.name, source.read_text(encoding="utf-8"))]
    return _digest(*texts, *FLAGS, level.name, *level.flags)


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
            pass  # a file system without locks: what is built twice is put in place twice, each time whole
        try:
            yield
        finally:
            name.unlink(missing_ok=True)


def _build(compiler: list[str], level: Level, path: Path, say: Callable[[str], None]) -> None:
    """Compiles a library into its place, where it appears when it is whole."""
    say(f"building the CPU kernels for {level.name} with {compiler[0]} (once; about a minute)")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as scratch:
        _compile(compiler, level, Path(scratch) / path.name)
        os.replace(Path(scratch) / path.name, path)
    say(f"built the CPU kernels for {level.name} in {time.monotonic() - start:.1f} s")


def _knows(compiler: list[str]) -> bool:
    """Whether a compiler understands the flags that it is given."""
    command = [*compiler, "-E", "-x", "c++", os.devnull]
    try:
        return subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _compile(compiler: list[str], level: Level, output: Path) -> None:
    sources = [str(source) for source in sorted(SOURCES.glob("*.cpp"))]
    command = [*compiler, *FLAGS, *level.flags, *sources, "-o", str(output)]
    # Temporary files go where the library goes, so that one folder needs room; messages come in the language that
    # _NO_ROOM is in.
    variables = {**os.environ, "TMPDIR": str(output.parent), "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=variables
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{compiler[0]} did not run: {error}") from error
    if done.returncode == 0:
        return
    line = _telling_line(done.stderr) or str(done.returncode)
    if any(words in line for words in _NO_ROOM):
        raise _no_room(output.parent.parent, line)
    if _knows(compiler) and not _knows([*compiler, *level.flags]):
        raise LevelUnknown(f"{compiler[0]} is too old for {level.name}: {line}")
    raise NativeUnavailable(f"{compiler[0]} failed: {line}")


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
    """What a compiler says to a question."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(f"{command[0]} did not run: {error}") from error


if __name__ == "__main__":
    _machine = this_machine()
    build(_machine.named(_name) if (_name := requested()) else _machine.usable()[0], print)
