"""Builds the C++ sources beside this file with the system's compiler, once per machine, into a cache directory."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_S = 120
FLAGS = (
    "-std=c++17",
    "-O3",
    "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native",
    "-ffp-contract=off",  # sums must not depend on what the compiler likes to fuse: see simd.h
    "-fno-math-errno",
    "-fno-trapping-math",
    "-pthread",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
)


class NativeUnavailable(RuntimeError):
    """The native kernels cannot be had here; the message is one line that says why."""


def build(say: Callable[[str], None]) -> Path:
    """The path of the shared library, compiled if no earlier call has.

    Safe in several processes at once: each compiles to a file of its own, the rename at the end is atomic.
    Raises NativeUnavailable without a compiler, or when it fails.
    """
    compiler = find_compiler()
    path = cache_directory() / f"native-{_fingerprint(compiler)}.so"
    if path.exists():
        return path
    say(f"building the CPU kernels with {compiler[0]} (once; about ten seconds)")
    start = time.monotonic()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as scratch:
            _compile(compiler, Path(scratch) / path.name)
            os.replace(Path(scratch) / path.name, path)
    except OSError as error:
        raise NativeUnavailable(f"cannot write {path}: {error}") from error
    say(f"built the CPU kernels in {time.monotonic() - start:.1f} s")
    return path


def find_compiler() -> list[str]:
    """The compiler as the start of a command line: $CXX, or the first of the usual names that exists."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    raise NativeUnavailable(f"no C++ compiler ({' '.join(chosen) or ', '.join(COMPILERS)} not found)")


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def _compile(compiler: list[str], output: Path) -> None:
    command = [*compiler, *FLAGS, str(SOURCES / "api.cpp"), "-o", str(output)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{compiler[0]} did not run: {error}") from error
    if done.returncode != 0:
        complaints = [
            line for line in done.stderr.splitlines() if "error" in line
        ] or done.stderr.splitlines()
        raise NativeUnavailable(f"{compiler[0]} failed: {complaints[0] if complaints else done.returncode}")


def _fingerprint(compiler: list[str]) -> str:
    """What the library depends on: sources, compiler, flags and, as it is built for this CPU alone, the CPU."""
    digest = hashlib.sha256()
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update("\0".join([*compiler, *FLAGS, _version(compiler), _cpu()]).encode())
    return digest.hexdigest()[:16]


def _version(compiler: list[str]) -> str:
    try:
        return subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(f"{compiler[0]} did not run: {error}") from error


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(("model", "flags", "Features"))))
