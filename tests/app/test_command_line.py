"""What an operator gets wrong is one line that names it, and exit status 2: real processes, real files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from penstock.app import cli
from penstock.app.bench.checkpoint import LLAMA_TINY, ensure_checkpoint
from tests.app.command import penstock

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_checkpoint(LLAMA_TINY, tmp_path_factory.mktemp("models"))


def assert_refused(done: subprocess.CompletedProcess[str], *named: str) -> None:
    """Exit status 2, and a last line that names what was wrong; nothing else is said but how far starting came."""
    assert done.returncode == 2, done.stderr
    *before, last = done.stderr.splitlines()
    assert last.startswith("penstock: ")
    for name in named:
        assert name in last
    assert "Traceback" not in done.stderr
    assert not [line for line in before if " starting on " not in line and " loading " not in line]


def test_more_blocks_than_there_is_memory_for_is_one_line(tiny_model: Path) -> None:
    done = penstock("serve", "--port", "0", "--model", str(tiny_model), "--num-blocks", "1000000000")
    assert_refused(done, "memory")


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["serve", "--help"], ["doctor", "--help"], ["kernels", "--help"], ["bench", "--help"]],
)
def test_help_is_not_a_mistake(arguments: list[str]) -> None:
    done = penstock(*arguments)
    assert done.returncode == 0
    assert "usage: penstock" in done.stdout
    assert done.stderr == ""


def test_help_names_every_setting_with_its_default() -> None:
    text = penstock("serve", "--help", COLUMNS="200").stdout
    for part in (
        "--max-num-seqs",
        "Default: 256.",
        "--drain-timeout SECONDS",
        "auto|float32|bfloat16|float16",
    ):
        assert part in text


def test_the_version_is_the_package_s() -> None:
    assert penstock("-V").stdout == penstock("--version").stdout == f"penstock {version('penstock')}\n"


def test_a_reader_that_has_seen_enough_is_no_fault() -> None:
    """As with `penstock ... | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as nobody:
        done = subprocess.run(
            [sys.executable, "-m", "penstock", "--version"],
            stdout=nobody,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, b"")


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(cli._COMMANDS, "bench", ("", interrupted))
    assert cli.main(["bench"]) == cli.EXIT_INTERRUPTED
    assert capfd.readouterr().err == "penstock: interrupted\n"
