"""Missing packages are named in a line each, and wheels bring them without a network."""

from __future__ import annotations

import importlib.util
import os
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from loadtests.gpu import packages
from loadtests.gpu.packages import PackagesMissing, advice, check_packages, needed, prepare


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "/already/there")


def write_wheel(folder: Path, name: str) -> None:
    """As small as a wheel can be."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "ANSWER = 42\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


def test_a_wheel_is_put_on_the_path_of_this_process_and_of_those_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "a_package_of_these_tests"
    write_wheel(tmp_path / "wheels", name)
    monkeypatch.setattr(packages, "needed", lambda *_: [name])
    said: list[str] = []
    prepare(tmp_path / "target", said.append, tmp_path / "wheels")
    assert importlib.import_module(name).ANSWER == 42
    assert said == ["unpacking 1 wheels"]
    expected = [str(tmp_path / "target"), str(packages.ROOT), "/already/there"]
    assert os.environ["PYTHONPATH"].split(os.pathsep) == expected


def test_a_wheel_does_not_take_the_place_of_what_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "needed", lambda *_: ["numpy"])
    write_wheel(tmp_path / "wheels", "numpy")
    prepare(tmp_path / "target", lambda _: None, tmp_path / "wheels")
    assert not (tmp_path / "target").exists()


def test_what_is_missing_has_a_line_each_and_one_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "needed", lambda *_: ["numpy", "nowhere-at-all>=2", "nor-here"])
    with pytest.raises(PackagesMissing) as caught:
        prepare(tmp_path / "target", lambda _: None, tmp_path)
    first, second, help_ = str(caught.value).splitlines()
    assert (first, second) == ("nowhere-at-all is missing", "nor-here is missing")
    assert "--dest loadtests/gpu/wheels nowhere-at-all nor-here;" in help_
    assert advice(["nowhere-at-all", "nor-here"]) == str(caught.value)


def test_all_that_penstock_requires_is_needed() -> None:
    project = tomllib.loads((packages.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    tests = ["packaging", "pytest", "hypothesis"]
    assert needed("gpu", "bench") == [*project["dependencies"], *extras["gpu"], *extras["bench"], *tests]
    check_packages(needed("bench"))
