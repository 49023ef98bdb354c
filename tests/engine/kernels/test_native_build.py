"""A compiler that cannot build the CPU kernels is reported in one line with the cause, and what can be done."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.engine.config import LoadOptions
from penstock.engine.fields import Fields
from penstock.engine.kernels.cpu import build, commands
from penstock.engine.kernels.cpu.build import NativeUnavailable
from penstock.engine.kernels.cpu.levels import LEVELS, this_machine
from penstock.engine.kernels.select import select
from penstock.engine.model.parse import parse_config
from tests.engine.checkpoints import make_config

LD_FULL = """\
/usr/bin/ld: final link failed: No space left on device
collect2: error: ld returned 1 exit status
"""
AS_FULL = """\
/tmp/ccV9sLQ3.s: Assembler messages:
/tmp/ccV9sLQ3.s: Fatal error: can't fill 256 bytes in section .data of /tmp/ccn3sFDU.o: 'No space left on device'
"""
CC1_FULL = """\
api.cpp:89:27: fatal error: error writing to /tmp/ccNUij9p.s: No space left on device
   89 | #pragma GCC visibility pop
      |                           ^
compilation terminated.
"""
CLANG_FULL = "LLVM ERROR: IO failure on output stream: No space left on device\n"
QUOTA = "/usr/bin/ld: final link failed: Disk quota exceeded\ncollect2: error: ld returned 1 exit status\n"
AS_LIMITED = """\
c++: internal compiler error: File size limit exceeded signal terminated program as
Please submit a full bug report, with preprocessed source (by using -freport-bug).
"""
UNDEFINED = """\
/usr/bin/ld: /tmp/ccW1.o: in function `f()':
api.cpp:(.text+0x5): undefined reference to `g()'
collect2: error: ld returned 1 exit status
"""
NO_LIBRARY = "/usr/bin/ld: cannot find -lstdc++\ncollect2: error: ld returned 1 exit status\n"
WARNED = """\
api.cpp:3:9: warning: #pragma once in main file, an error in some compilers
api.cpp:7:1: error: 'foo' does not name a type
"""
OUT_OF_MEMORY = """\
c++: fatal error: Killed signal terminated program cc1plus
compilation terminated.
"""


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache directory, which is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock"


def use_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Makes a shell script the compiler; it is asked for its version first."""
    path = folder / "cc"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\n{script}\n')
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def failing_with(stderr: str) -> str:
    return f"cat >&2 <<'END'\n{stderr}END\nexit 1"


def reason() -> str:
    with pytest.raises(NativeUnavailable) as caught:
        build.build(this_machine().usable()[0], lambda _: None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        (LD_FULL, "/usr/bin/ld: final link failed: No space left on device"),
        (AS_FULL, "can't fill 256 bytes in section .data of /tmp/ccn3sFDU.o: 'No space left on device'"),
        (CC1_FULL, "fatal error: error writing to /tmp/ccNUij9p.s: No space left on device"),
        (CLANG_FULL, "LLVM ERROR: IO failure on output stream: No space left on device"),
        (QUOTA, "/usr/bin/ld: final link failed: Disk quota exceeded"),
        (AS_LIMITED, "File size limit exceeded signal terminated program as"),
    ],
)
def test_a_disk_without_room_is_said_with_its_folder_and_a_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, stderr: str, line: str
) -> None:
    use_compiler(monkeypatch, tmp_path, failing_with(stderr))
    said = reason()
    assert said.startswith(f"{cache} has no room for them, ")
    assert " MiB are free: " in said
    assert line in said
    assert "XDG_CACHE_HOME" in said
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        (UNDEFINED, "api.cpp:(.text+0x5): undefined reference to `g()'"),
        (NO_LIBRARY, "/usr/bin/ld: cannot find -lstdc++"),
        (WARNED, "api.cpp:7:1: error: 'foo' does not name a type"),
        (OUT_OF_MEMORY, "c++: fatal error: Killed signal terminated program cc1plus"),
        ("collect2: error: ld returned 1 exit status\n", "collect2: error: ld returned 1 exit status"),
        ("something odd\nand more of it\n", "something odd"),
        ("\n", "1"),
    ],
)
def test_the_line_that_says_most_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, stderr: str, line: str
) -> None:
    use_compiler(monkeypatch, tmp_path, failing_with(stderr))
    assert reason() == f"{tmp_path / 'cc'} failed: {line}"
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("cache")
def test_the_first_unit_that_fails_is_told_and_the_others_are_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.cpp").write_text("")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setattr(commands, "num_cores", lambda: 2)
    script = 'case "$*" in *b.cpp*) echo "error: b" >&2; exit 1;; *.cpp*) sleep 1000;; esac'
    use_compiler(monkeypatch, tmp_path, script)
    assert reason() == f"{tmp_path / 'cc'} failed: error: b"


def test_the_time_that_is_told_is_that_of_the_cores() -> None:
    levels = {level.name: level for level in LEVELS["x86_64"]}
    told = {name: [build._expected_s(levels[name], cores) for cores in (1, 2, 5, 64)] for name in levels}
    assert told["avx2"] == [60, 30, 10, 10]
    assert told["amx"] == [120, 60, 25, 25]


@pytest.mark.long("other instruction sets")
@pytest.mark.skipif(this_machine().architecture != "x86_64", reason="levels of x86-64")
@pytest.mark.parametrize("unit", build.UNUSED_FLAGS)
def test_flags_that_a_unit_does_not_use_change_nothing(tmp_path: Path, unit: str) -> None:
    """A library has what another unit makes of an inline function, too, so that each must make the same of it.

    Levels that use the same flags have all of them, or more and more of the others: the most are held against none.
    """
    unused = build.UNUSED_FLAGS[unit]
    most: dict[tuple[str, ...], tuple[str, ...]] = {}
    for level in LEVELS["x86_64"]:
        used = tuple(flag for flag in level.flags if flag not in unused)
        most[used] = max(most.get(used, used), level.flags, key=len)
        assert set(most[used]) >= set(level.flags)
    different = [pair for pair in most.items() if pair[0] != pair[1]]
    assert different
    source, compiler = build.SOURCES / f"{unit}.cpp", build.find_compiler()

    def compiled(flags: tuple[str, ...]) -> bytes:
        output = tmp_path / "unit.o"
        command = [*compiler, *build.FLAGS, *flags, "-c", str(source), "-o", str(output)]
        subprocess.run(command, check=True, timeout=build.TIMEOUT_S)
        return output.read_bytes()

    for used, flags in different:
        assert compiled(used) == compiled(flags), flags


@pytest.mark.usefixtures("cache")
def test_a_line_without_end_is_cut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_compiler(monkeypatch, tmp_path, "head -c 100000 /dev/zero | tr '\\0' x >&2; exit 1")
    assert len(reason()) < 1000


def test_temporary_files_lie_beside_the_library_and_messages_are_english(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("TMPDIR", "/nowhere")
    use_compiler(monkeypatch, tmp_path, 'echo "error: $TMPDIR $LC_ALL" >&2; exit 1')
    folder, language = reason().rpartition("error: ")[2].split()
    assert Path(folder).parent == cache
    assert language == "C"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_so_is_a_disk_on_which_no_folder_can_be_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, code: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    use_compiler(monkeypatch, tmp_path, "exit 1")
    monkeypatch.setattr(Path, "mkdir", fail)
    said = reason()
    assert said.startswith(f"{cache} has no room for them, ")
    assert os.strerror(code) in said
    assert "XDG_CACHE_HOME" in said


def test_a_folder_that_cannot_be_written_is_said_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_compiler(monkeypatch, tmp_path, "exit 1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cc"))
    said = reason()
    assert said.startswith("cannot write ")
    assert "XDG_CACHE_HOME" in said


@pytest.mark.usefixtures("cache")
def test_the_operator_reads_what_it_means_for_the_users(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_compiler(monkeypatch, tmp_path, failing_with(LD_FULL))
    config = parse_config(Fields("config.json", make_config("llama")))
    said: list[str] = []
    kernels = select(config, torch.device("cpu"), torch.float16, LoadOptions(), said.append)
    assert kernels.name == "torch"
    last = said[-1]
    for words in ("has no room", "No space left on device", "XDG_CACHE_HOME", "plain torch", "slower"):
        assert words in last
    assert "\n" not in last


LIMITED = """
import resource, sys
from pathlib import Path
from penstock.engine.kernels.cpu import build, levels

build.SOURCES = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
try:
    print(build.build(levels.this_machine().usable()[0], lambda _: None))
except build.NativeUnavailable as error:
    print("unavailable:", error)
"""


@pytest.mark.usefixtures("cache")
def test_a_real_compiler_that_may_not_write_as_much_as_it_needs(tmp_path: Path, cache: Path) -> None:
    try:
        build.find_compiler()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    (tmp_path / "api.cpp").write_text("char large[1 << 20] = {1};\n")
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache.parent)},
    )
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"unavailable: {cache} has no room for them, ")
    assert "XDG_CACHE_HOME" in line
    assert list(cache.iterdir()) == []
