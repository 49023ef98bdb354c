"""Checks that all packages are here; without a network they come as wheels beside this file."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WHEELS = Path(__file__).parent / "wheels"

_TESTS = ("packaging", "pytest", "hypothesis")
"""The tests on a GPU and this module need these beside what Penstock needs."""
_AS_BUILT = "torch"
"""Its builds for CUDA come from several indexes, and name packages that another build brings with it."""


class PackagesMissing(RuntimeError):
    """One line for each of them, and how to bring them."""


def prepare(target: Path, say: Callable[[str], None], wheels: Path = WHEELS) -> None:
    """Puts the repository and the wheels that are missing here on the path, of this process and those it starts.

    Args:
        target: an empty folder for what the wheels hold.

    Raises:
        PackagesMissing: something is still not there.
    """
    _extend_path(ROOT)
    wanted = [wheel for wheel in sorted(wheels.glob("*.whl")) if not _is_installed(wheel.name.split("-")[0])]
    if wanted:
        say(f"unpacking {len(wanted)} wheels")
        _install(wanted, target)
        _extend_path(target)
    if not _is_installed("penstock"):
        describe_project(target)
        _extend_path(target)
    check_packages(needed("bench"))


def describe_project(target: Path) -> None:
    """Lets servers of a checkout that is not installed know their version."""
    name, version = (_project()[field] for field in ("name", "version"))
    folder = target / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def needed(*extras: str) -> list[str]:
    """The requirements of Penstock with these extras as pyproject.toml has them, and those of the tests."""
    project = _project()
    optional = (line for extra in extras for line in project["optional-dependencies"][extra])
    return [*project["dependencies"], *optional, *_TESTS]


def check_packages(requirements: Sequence[str]) -> None:
    """
    Raises:
        PackagesMissing: one of them, or what it requires in turn, is not here or cannot be imported.
    """
    if importlib.util.find_spec("packaging") is None:
        raise PackagesMissing(advice(["packaging"]))
    here, missing = _closure(requirements)
    if missing:
        raise PackagesMissing(advice(missing))
    if broken := [line for name in here if (line := _import_error(name.replace("-", "_")))]:
        raise PackagesMissing("\n".join(broken))


def _closure(requirements: Sequence[str]) -> tuple[list[str], list[str]]:
    """The names that are required on this machine, and those of them and of what they require that are not here.

    Versions are not compared: a machine with a card has the builds that its driver takes.
    """
    from packaging.requirements import Requirement

    roots, missing, seen = list[str](), list[str](), set[str]()
    left = [(Requirement(line), {""}, True) for line in requirements]
    while left:
        one, extras, is_root = left.pop(0)
        if one.marker is not None and not any(one.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        if is_root:
            roots.append(one.name)
        if str(one) in seen:
            continue
        seen.add(str(one))
        try:
            requires = distribution(one.name).requires or []
        except PackageNotFoundError:
            missing.append(one.name)
            continue
        if one.name != _AS_BUILT:
            left += [(Requirement(line), {"", *one.extras}, False) for line in requires]
    return roots, list(dict.fromkeys(missing))


def advice(missing: Sequence[str]) -> str:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    lines = [f"{name} is missing" for name in missing]
    return "\n".join(
        [
            *lines,
            "on a machine with a network: pip download --only-binary=:all: "
            f"--python-version {version} --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 "
            f"--dest loadtests/gpu/wheels {' '.join(missing)}; then copy the folder here",
        ]
    )


def _is_installed(name: str) -> bool:
    """Returns whether the machine has a package, in which case no wheel replaces it."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _import_error(module: str) -> str | None:
    """Says what a package lacks to be imported: one that it needs, or the right version of Python."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"{module} is there and cannot be imported: {error}"
    return None


def _install(wheels: Sequence[Path], target: Path) -> None:
    """A wheel is a zip of what belongs on the path, and pip may not be there."""
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(target)
        except (OSError, zipfile.BadZipFile) as error:
            raise PackagesMissing(f"{wheel} cannot be unpacked: {error}") from None


def _extend_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    known = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if str(folder) not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *known])
