"""`penstock kernels`, and the level that PENSTOCK_CPU_ISA names: real processes, and what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.app import cli, kernels
from penstock.app.checkpoint import find_checkpoint
from penstock.app.errors import describe_failure
from penstock.engine.config import LoadOptions
from penstock.engine.errors import InstructionSetError
from penstock.engine.kernels.cpu import build
from penstock.engine.kernels.cpu.build import NativeUnavailable
from penstock.engine.kernels.cpu.levels import Machine, this_machine
from penstock.engine.kernels.select import select
from penstock.engine.model.parse import read_config
from tests.app.command import penstock

BEST = this_machine().usable()[0].name


def of_doctor(name: str, **variables: str) -> str:
    done = penstock("doctor", "--port", "0", **variables)
    assert done.stderr == ""
    (line,) = [line for line in done.stdout.splitlines() if line.split()[1] == name]
    return line


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the kernels of this machine, as the command builds them."""
    try:
        build.find_compiler()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("kernels") / "prebuilt"
    done = penstock("kernels", "build", "--out", str(folder))
    assert (done.returncode, done.stderr) == (0, "")
    (path,) = folder.iterdir()
    assert done.stdout.splitlines()[-1] == f"1/1 {path}"
    assert f"-{BEST}-" in path.name
    return folder


@pytest.mark.parametrize(
    "command",
    [["serve", "--port", "0"], ["doctor", "--port", "0"], ["bench", "--quick"], ["kernels", "list"]],
    ids=lambda command: command[0],
)
def test_a_level_that_does_not_exist_is_one_line(command: list[str]) -> None:
    done = penstock(*command, PENSTOCK_CPU_ISA="avx3")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("penstock: PENSTOCK_CPU_ISA: ")
    assert "'avx3'" in line
    assert line.endswith(", ".join(level.name for level in this_machine().levels))


def test_a_level_that_this_machine_lacks_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "this_machine", lambda: Machine("x86_64", frozenset({"avx2"}), str))
    monkeypatch.setenv("PENSTOCK_CPU_ISA", "avx512")
    assert cli.main(["doctor", "--port", "0"]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert "level avx512 cannot be used, this processor lacks fma f16c bmi1 bmi2 avx512f" in err


def test_the_engine_refuses_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch never serves in place of a level that was asked for."""
    config = read_config(find_checkpoint(None))
    monkeypatch.setenv("PENSTOCK_CPU_ISA", "avx3")
    with pytest.raises(InstructionSetError, match="has no level 'avx3'") as caught:
        select(config, torch.device("cpu"), torch.float16, LoadOptions(), print)
    assert describe_failure(caught.value, Path("model")) == str(caught.value)


@pytest.mark.usefixtures("place")
def test_the_doctor_and_the_server_name_the_level() -> None:
    assert of_doctor("kernels", PENSTOCK_CPU_ISA="portable").startswith(
        "ok    kernels   native, portable: any "
    )
    line = of_doctor("kernels", PENSTOCK_CPU_ISA="")
    assert f"native, {BEST}: " in line
    better = this_machine().better()
    assert (f"no {better[0].name}: {better[1]}" in line) if better else (" no " not in line)


def test_prebuilt_kernels_need_no_compiler(place: Path, tmp_path: Path) -> None:
    bare = {"PATH": str(tmp_path), "CXX": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert "native" in of_doctor("kernels", **bare, PENSTOCK_KERNELS=str(place))
    assert of_doctor("compiler", **bare, PENSTOCK_KERNELS=str(place)).startswith("ok ")
    assert not (tmp_path / "cache").exists()
    assert of_doctor("kernels", **bare, PENSTOCK_KERNELS=str(tmp_path)).startswith("warn ")


def test_the_doctor_warns_of_prebuilt_kernels_that_are_ignored(place: Path, tmp_path: Path) -> None:
    (path,) = place.iterdir()
    (tmp_path / path.name).write_bytes(path.read_bytes()[:-1])
    line = of_doctor("kernels", PENSTOCK_KERNELS=str(tmp_path))
    assert line.startswith("warn ")
    assert "native" in line
    assert f"{path.name} is broken" in line


def test_the_list_says_what_is_prebuilt_and_what_is_used(place: Path, tmp_path: Path) -> None:
    (path,) = place.iterdir()
    (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "native-plan9-vax-portable-0-0.so").write_bytes(b"")
    first, *levels, other = penstock("kernels", "list", "--out", str(tmp_path)).stdout.splitlines()
    assert str(tmp_path) in first
    assert [line[2:].split()[0] for line in levels] == [level.name for level in this_machine().levels]
    (own,) = [line for line in levels if line.startswith("*")]
    assert own.split()[1:3] == [BEST, "prebuilt"]
    assert all("not prebuilt" in line for line in levels if line != own)
    assert "plan9" in other
    path = tmp_path / path.name
    path.write_bytes(path.read_bytes()[:-1])
    listed = penstock("kernels", "list", "--out", str(tmp_path), PENSTOCK_CPU_ISA="portable").stdout
    assert f" {BEST} " in listed
    assert "ignored: it is broken" in listed
    assert [line.split()[1] for line in listed.splitlines() if line.startswith("*")] == ["portable"]


def fake_compiler(folder: Path, script: str) -> dict[str, str]:
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {
        "CXX": str(path),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PENSTOCK_KERNELS": str(folder / "out"),
    }


def test_a_level_that_fails_is_named_and_the_others_are_built(tmp_path: Path) -> None:
    fails = (
        '[ "$1" = --version ] && exit; case "$*" in *avx512vnni*) echo "error: no vnni" >&2; exit 1;; esac'
    )
    writes = 'while [ $# -gt 1 ]; do [ "$1" = -o ] && echo x > "$2"; shift; done; exit 0'
    done = penstock("kernels", "build", "--all", **fake_compiler(tmp_path, f"{fails}\n{writes}"))
    names = [level.name for level in this_machine().levels]
    failing = [level.name for level in this_machine().levels if "-mavx512vnni" in level.flags]
    assert done.returncode == bool(failing)
    errors = done.stderr.splitlines()
    assert [line.split(": ")[1] for line in errors] == [f"no CPU kernels for {name}" for name in failing]
    assert all("no vnni" in line for line in errors)
    built = sorted(path.name.split("-")[3] for path in (tmp_path / "out").iterdir())
    assert built == sorted(set(names) - set(failing))


def test_no_compiler_is_one_line(tmp_path: Path) -> None:
    done = penstock("kernels", "build", PATH=str(tmp_path), CXX="")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "kernels build: no C++ compiler" in line
