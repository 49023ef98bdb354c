"""`penstock doctor` where something is missing: every check is still made, each is a line, and it says what to do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.app import doctor
from penstock.app.cli import main
from penstock.app.doctor import Severity
from penstock.app.settings import Settings

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
CHECKS = [
    "python",
    "processor",
    "memory",
    "torch",
    "gpu",
    "compiler",
    "kernels",
    "model",
    "families",
    "port",
    "bench",
]


def examine(*arguments: str, status: int, **variables: str) -> dict[str, str]:
    """The doctor's lines by name."""
    done = subprocess.run(
        [PENSTOCK, "doctor", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **variables},
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stderr == ""
    return {line.split()[1]: line for line in done.stdout.splitlines()}


def failed(lines: Mapping[str, str]) -> list[str]:
    return [name for name, line in lines.items() if line.startswith("fail")]


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Makes an environment in which torch is installed and cannot be imported."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "torch.py").write_text("raise ImportError('libtorch.so: undefined symbol')\n")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        return examine(
            "--model", str(folder), "--port", str(port), status=1, PYTHONPATH=str(folder), PATH=str(folder)
        )


def test_one_failure_does_not_hide_the_others(without_torch: dict[str, str]) -> None:
    assert list(without_torch) == CHECKS
    assert failed(without_torch) == ["torch", "kernels", "model", "port"]


def test_a_torch_that_cannot_be_imported_is_told_with_its_reason(without_torch: dict[str, str]) -> None:
    assert "libtorch.so: undefined symbol" in without_torch["torch"]
    assert "pip install" in without_torch["torch"]
    assert "see torch" in without_torch["kernels"]


def test_a_folder_that_is_no_model_is_told_with_what_it_lacks(without_torch: dict[str, str]) -> None:
    assert "has no config.json" in without_torch["model"]


def test_a_port_in_use_is_told(without_torch: dict[str, str]) -> None:
    assert "another program listens there already" in without_torch["port"]


def test_a_missing_compiler_is_no_failure(without_torch: dict[str, str]) -> None:
    assert without_torch["compiler"].startswith("warn")
    assert "apt-get install g++" in without_torch["compiler"]


def test_the_doctor_reads_settings_as_the_server_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(f'model = "{tmp_path}"\n')
    monkeypatch.setattr(doctor, "checks", lambda settings: iter([doctor.check_model(settings)]))
    assert main(["doctor", "--config", str(path)]) == 1
    assert f"fail  model     --model {tmp_path}: " in capsys.readouterr().out


def test_an_address_of_elsewhere_is_told() -> None:
    check = doctor.check_port(Settings(host="192.0.2.1", port=0))
    assert check.level is Severity.FAIL
    assert "--host 192.0.2.1" in check.text


def test_looking_at_a_port_leaves_it_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for _ in range(2):
        assert doctor.check_port(Settings(port=port)).level is Severity.OK
    with socket.create_server(("127.0.0.1", port)) as listener:
        assert listener.getsockname()[1] == port


def test_a_bench_without_its_baseline_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    said = "penstock bench is there; pip install 'penstock[bench]' for transformers' generate as a baseline"
    assert str(doctor.check_bench()) == f"ok    bench     {said}"


def test_a_system_without_proc_has_its_whole_memory_and_unknown_units(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(_: Path, encoding: str) -> str:
        raise FileNotFoundError(2, f"no such file, whatever its {encoding}")

    monkeypatch.setattr(Path, "read_text", missing)
    assert "GiB available" in doctor.check_memory().text
    assert "no vector units known" in doctor.check_processor().text
