"""A library for 64-bit ARM that computes in an emulated process, with the memory of this one.

qemu-aarch64 runs emulated_arm.cpp, which loads the library and calls its functions for this process. Pointers stay as
they are: memory of this process has the same address there. A page is fetched when the library first touches it, and
what was written there comes back when the call ends, so that nobody has to know what the arguments point to.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import struct
import subprocess
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from ctypes import c_double, c_float, c_void_p
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.engine.kernels.cpu.build import cache_directory
from penstock.engine.kernels.cpu.levels import Level
from penstock.engine.kernels.cpu.library import SIGNATURES, NativeLibrary

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
_SOURCE = Path(__file__).with_name("emulated_arm.cpp")
_REQUEST = struct.Struct("48s8q2fq")
_READ_NUMBER = "read_number"
_SHARED = ("[stack]", "[vdso]", "[vvar]", "[vsyscall]")
"""What every process has at about the same place, and no argument points to."""
_APART = 1 << 36
"""Bytes between the memory of this process and the emulator's own, for both to grow."""
_TRIES = 100


def missing() -> str:
    """The commands that are needed to compile for 64-bit ARM and to run that, and are not here; "" if all are."""
    return ", ".join(command for command in (COMPILER, EMULATOR) if shutil.which(command) is None)


class EmulatedLibrary(NativeLibrary):
    """A library whose functions run in a process of the emulator, which ends with this object."""

    def __init__(self, path: str, level: Level) -> None:
        self.path, self.level, self.text = path, level.name, level.text
        self._process = _started(path)
        self.close = weakref.finalize(self, _end, self._process)
        self._lock = threading.Lock()
        self._to_free: deque[tuple[Any, ...]] = deque()

    def call(self, name: str, *arguments: Any) -> Any:
        # The next call frees, for a garbage collection may ask for it in the midst of one.
        if name.endswith("_free"):
            return self._to_free.append((name, *arguments))
        with self._lock:
            while self._to_free:
                self._ask(*self._to_free.popleft())
            return self._ask(name, *arguments)

    def function(self, name: str) -> Any:
        return functools.partial(self.call, name)

    def _ask(self, name: str, *arguments: Any) -> Any:
        result, types = SIGNATURES[name]
        return _ask(self._process, name, result, types, arguments)


def _ask(
    process: subprocess.Popen[bytes], name: str, result: Any, types: tuple[Any, ...], given: tuple[Any, ...]
) -> Any:
    """Lets the process call a function, whose result and arguments have these types of ctypes."""
    assert process.stdin is not None
    assert process.stdout is not None
    floats = [value for type_, value in zip(types, given, strict=True) if type_ is c_float]
    integers = [
        (ctypes.cast(value, c_void_p).value or 0) if type_ is c_void_p else value
        for type_, value in zip(types, given, strict=True)
        if type_ is not c_float
    ]
    numbers = *integers, *[0] * (8 - len(integers)), *floats, *[0.0] * (2 - len(floats))
    process.stdin.write(_REQUEST.pack(name.encode(), *numbers, result is c_double))
    process.stdin.flush()
    reply = process.stdout.read(8)
    if len(reply) < 8:
        raise RuntimeError(f"{EMULATOR} ended in {name} with status {process.wait()}")
    return None if result is None else result.from_buffer_copy(reply).value


def _started(library: str) -> subprocess.Popen[bytes]:
    """A process that has loaded the library, and whose own memory lies where this process has none."""
    memory = os.open("/proc/self/mem", os.O_RDWR)
    try:
        for _ in range(_TRIES):  # addresses are random
            process = subprocess.Popen(
                [EMULATOR, "-L", str(_system()), str(_caller()), library, str(memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[memory],
            )
            magic = ctypes.c_int64(0x5EED)
            found = _ask(process, _READ_NUMBER, ctypes.c_int64, (c_void_p,), (ctypes.byref(magic),))
            if found == magic.value and _lies_apart(process.pid):
                return process
            _end(process)
    finally:
        os.close(memory)
    raise RuntimeError(
        f"{EMULATOR} has its own memory where this process has some, {_TRIES} times of {_TRIES}"
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    with process:  # which closes the pipes, and waits
        process.kill()


def _lies_apart(process: int) -> bool:
    ours = list(_mapped("self"))
    return all(
        end + _APART <= our_start or our_end + _APART <= start
        for start, end in _mapped(str(process))
        for our_start, our_end in ours
    )


def _mapped(process: str) -> Iterator[tuple[int, int]]:
    for line in Path(f"/proc/{process}/maps").read_text(encoding="utf-8").splitlines():
        if not line.endswith(_SHARED):
            start, _, end = line.split()[0].partition("-")
            yield int(start, 16), int(end, 16)


def _caller() -> Path:
    """The program that calls a library's functions."""
    path = cache_directory() / f"emulated-arm-{sha256(_SOURCE.read_bytes()).hexdigest()[:16]}"
    if not path.exists():
        with TemporaryDirectory(dir=path.parent, prefix="build-") as scratch:
            made = Path(scratch) / path.name
            subprocess.run([COMPILER, "-std=c++17", "-O2", str(_SOURCE), "-ldl", "-o", str(made)], check=True)
            os.replace(made, path)
    return path


@functools.cache
def _system() -> Path:
    """The folder in which the emulator finds the libraries of the system, as the compiler has them."""
    loader = subprocess.run(
        [COMPILER, "-print-file-name=ld-linux-aarch64.so.1"], capture_output=True, text=True, check=True
    ).stdout
    return Path(loader.strip()).resolve().parents[1]
