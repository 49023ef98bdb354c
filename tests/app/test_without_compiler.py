"""A machine on which the native kernels cannot be built still serves, says why it is slower, and how to change that."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.app.bench.server_process import ServerProcess
from penstock.app.doctor import Severity, check_kernels

PENSTOCK = str(Path(sys.executable).with_name("penstock"))


def bare_machine(folder: Path) -> dict[str, str]:
    """Variables of a machine with nothing in its PATH and nothing in its cache."""
    (folder / "bin").mkdir()
    (folder / "cache").mkdir()
    kept = {name: value for name, value in os.environ.items() if name != "CXX"}
    return kept | {"PATH": str(folder / "bin"), "XDG_CACHE_HOME": str(folder / "cache")}


def add_compiler(variables: dict[str, str], script: str) -> None:
    path = Path(variables["PATH"]) / "c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def start(variables: dict[str, str]) -> ServerProcess:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CXX", raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        return ServerProcess(("--threads", "1"), command=(PENSTOCK, "serve"))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return bare_machine(tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def server(bare: dict[str, str]) -> Iterator[ServerProcess]:
    with start(bare) as running:
        yield running
    assert running.process.returncode == 0, running.log


def complete(server: ServerProcess, **options: object) -> dict[str, Any]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    try:
        body = {"model": "penstock-demo", "prompt": "Once upon a time", **options}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        answer: dict[str, Any] = json.load(response)
        assert response.status == 200, answer
        return answer
    finally:
        connection.close()


def test_it_says_once_that_it_is_slower_and_why(server: ServerProcess) -> None:
    (line,) = [line for line in server.lines if "no native CPU kernels" in line]
    assert "no C++ compiler" in line
    assert "plain torch" in line
    assert "Traceback" not in server.log


def test_it_serves(server: ServerProcess) -> None:
    answer = complete(server, max_tokens=12, temperature=0, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["text"].strip()


def test_greedy_answers_are_the_same_every_time(server: ServerProcess) -> None:
    first, again = (complete(server, max_tokens=8, temperature=0)["choices"][0]["text"] for _ in range(2))
    assert first == again


def test_it_samples_as_it_was_seeded(server: ServerProcess) -> None:
    texts = [
        complete(server, max_tokens=12, temperature=1.0, seed=seed)["choices"][0]["text"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_nothing_is_left_in_the_cache(server: ServerProcess, bare: dict[str, str]) -> None:
    assert server.process.poll() is None
    assert not [path for path in Path(bare["XDG_CACHE_HOME"]).rglob("*") if path.suffix == ".so"]


def test_the_doctor_says_what_to_install(bare: dict[str, str]) -> None:
    done = subprocess.run(
        [PENSTOCK, "doctor", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=bare,
    )
    assert done.returncode == 0, done.stdout
    assert done.stderr == ""
    lines = {line.split()[1]: line for line in done.stdout.splitlines()}
    assert lines["compiler"].startswith("warn")
    assert "install g++" in lines["compiler"]
    assert lines["kernels"].startswith("warn")
    assert "no C++ compiler" in lines["kernels"]
    assert lines["model"].startswith("ok")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A bare machine that the test itself runs on."""
    variables = bare_machine(tmp_path)
    monkeypatch.delenv("CXX", raising=False)
    for name in ("PATH", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, variables[name])
    return variables


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ('[ "$1" = --version ] || { echo "x.cpp:1: error: no such header" >&2; exit 1; }', "no such header"),
        ('[ "$1" = --version ] || exit 3', "c++ failed: 3"),
        ("exit 127", "c++ did not run"),
        ("kill -9 $$", "c++ did not run"),
        ('[ "$1" = --version ] && exit; for last; do true; done; echo junk > "$last"', "cannot load"),
        ("exit 0", "cannot write"),
    ],
)
def test_a_compiler_that_does_not_work_is_told(machine: dict[str, str], script: str, said: str) -> None:
    add_compiler(machine, script)
    check = check_kernels()
    assert check.level is Severity.WARN
    assert said in check.text
    assert "\n" not in str(check)


def test_the_compiler_that_was_chosen_is_the_one_that_is_missed(
    machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_compiler(machine, "exit 0")
    monkeypatch.setenv("CXX", "clang++-99 -O1")
    assert "clang++-99" in check_kernels().text


def test_a_cache_that_is_no_folder_is_told(machine: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    add_compiler(machine, "exit 0")
    monkeypatch.setenv("XDG_CACHE_HOME", f"{machine['PATH']}/c++")
    check = check_kernels()
    assert check.level is Severity.WARN
    assert "cannot write" in check.text
