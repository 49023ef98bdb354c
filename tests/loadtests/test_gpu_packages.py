"""Missing packages are named in a line each, and wheels bring them without a network."""

from __future__ import annotations

import importlib.util
import os
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from types import SimpleNamespace

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


def test_a_checkout_that_is_not_installed_has_its_version(tmp_path: Path) -> None:
    packages.describe_project(tmp_path)
    (found,) = distributions(path=[str(tmp_path)])
    assert (found.name, found.version) == ("penstock", version("penstock"))


def test_a_broken_wheel_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken-1.0-py3-none-any.whl").write_bytes(b"no zip")
    with pytest.raises(
        PackagesMissing, match=r"broken-1\.0-py3-none-any\.whl cannot be unpacked: "
    ) as caught:
        prepare(tmp_path / "target", lambda _: None, tmp_path)
    assert "\n" not in str(caught.value)


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


def test_the_line_that_helps_is_a_command_for_this_python() -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert advice(["a", "b"]) == (
        "a is missing\nb is missing\n"
        f"on a machine with a network: pip download --only-binary=:all: --python-version {version} "
        "--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --dest loadtests/gpu/wheels a b; "
        "then copy the folder here"
    )


def test_all_that_penstock_requires_is_needed() -> None:
    project = tomllib.loads((packages.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    tests = ["packaging", "pytest", "hypothesis"]
    assert needed("gpu", "bench") == [*project["dependencies"], *extras["gpu"], *extras["bench"], *tests]
    check_packages(needed("bench"))


def test_without_packaging_it_is_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(PackagesMissing, match=r"^packaging is missing\non"):
        check_packages([])


def test_what_a_package_requires_in_turn_is_followed_but_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each package is asked once, and only what the list itself names is imported."""
    requires = {
        "one": ["two[more]", "three"],
        "two": ['four; extra == "more"', 'five; extra == "other"', "three"],
        "three": ["one", "six"],
        "torch": ["seven"],
    }
    asked: list[str] = []

    def distribution(name: str) -> object:
        asked.append(name)
        if name in ("four", "six"):
            raise PackageNotFoundError(name)
        return SimpleNamespace(requires=requires.get(name))

    monkeypatch.setattr(packages, "distribution", distribution)
    assert packages._closure(["one", "torch", "one>=2", 'nine; extra == "x"']) == (
        ["one", "torch", "one"],
        ["four", "six"],
    )
    assert asked == ["one", "torch", "one", "two", "three", "four", "six"]


def test_what_a_package_requires_in_turn_is_needed_too_where_its_marker_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "lacks_one-1.0.dist-info"
    info.mkdir()
    requires = ["nowhere-at-all", 'another; extra == "more"', 'a-third; sys_platform == "amiga"']
    lines = [f"Requires-Dist: {line}\n" for line in requires]
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: lacks-one\nVersion: 1.0\n" + "".join(lines), encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PackagesMissing, match=r"^nowhere-at-all is missing\non a machine"):
        check_packages(["lacks-one"])
    with pytest.raises(PackagesMissing, match="another is missing"):
        check_packages(["lacks-one[more]"])
    check_packages(['lacks-one; sys_platform == "amiga"'])


def test_a_package_that_cannot_be_imported_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(tmp_path / "wheels", "lacks_one")
    with zipfile.ZipFile(tmp_path / "wheels" / "lacks_one-1.0-py3-none-any.whl") as wheel:
        wheel.extractall(tmp_path)
    (tmp_path / "lacks_one.py").write_text("import nowhere_at_all", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PackagesMissing, match="lacks_one is there and cannot be imported: No module named"):
        check_packages(["lacks-one"])
